"""Ray Data: read_parquet, map to decode, map to transform, map_batches with an actor that holds the network.

github.com/ray-project/ray, release/nightly_tests/multimodal_inference_benchmarks/image_classification: that script's
steps and batch size; labels and probabilities instead of labels alone, kept in memory instead of written.
"""

from __future__ import annotations

import io
import os
from typing import Any

import numpy as np
import ray
import torch
from PIL import Image
from torchvision import transforms
from torchvision.transforms._presets import ImageClassification

from bench.serve import Job, Setting
from bench.workloads import network, outputs

BATCH = 100

transform = transforms.Compose([transforms.ToTensor(), ImageClassification(crop_size=224, resize_size=256)])


def decode(row: dict[str, Any]) -> dict[str, Any]:
    row["image"] = np.array(Image.open(io.BytesIO(row.pop("content"))).convert("RGB"))
    return row


def normalised(row: dict[str, Any]) -> dict[str, Any]:
    row["norm_image"] = transform(row.pop("image")).numpy()
    return row


class Classifier:
    """Holds the network, once per actor."""

    def __init__(self, name: str, models: str) -> None:
        self.net = network(name, models)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"id": batch["id"], **outputs(self.net, torch.from_numpy(batch["norm_image"]))}


def ray_data(setting: Setting) -> Job:
    if not ray.is_initialized():
        # Ray's workers run at nice 15: beside anything else on the machine, Ray alone would look slow.
        os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 (so Ray spells it)
        ray.init(num_cpus=setting.cores, include_dashboard=False, object_store_memory=2 << 30, log_to_driver=False)
        ray.data.DataContext.get_current().enable_progress_bars = False

    def job(collect: bool) -> dict[int, int]:
        found = (
            ray.data.read_parquet(setting.data)
            .map(decode)
            .map(normalised)
            .map_batches(
                Classifier,
                fn_constructor_args=(setting.network, setting.models),
                batch_size=BATCH,
                # An actor a core, as the script has one a GPU. Like those with a GPU they ask for no core; else the
                # tasks that decode would get none.
                num_cpus=0,
                compute=ray.data.ActorPoolStrategy(size=setting.cores),
            )
            .materialize()
        )
        return {row["id"]: int(row["prediction"]) for row in found.iter_rows()} if collect else {}

    return job
