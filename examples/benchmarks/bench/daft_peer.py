"""Daft on its native runner: read_parquet, decode and apply expressions, a class that holds the network.

github.com/Eventual-Inc/Daft, benchmarking/ai/image_classification/daft_main.py: that script's steps and batch size;
labels and probabilities instead of labels alone, kept in memory instead of written.
"""

from __future__ import annotations

from typing import Any

import daft
import numpy as np
import torch
from torchvision import transforms
from torchvision.transforms._presets import ImageClassification

from bench.serve import Job, Setting
from bench.workloads import network, outputs

BATCH = 100

daft.set_runner_native()  # once a process

transform = transforms.Compose([transforms.ToTensor(), ImageClassification(crop_size=224, resize_size=256)])
RESULT = daft.DataType.struct(
    {"prediction": daft.DataType.float32(), "probability": daft.DataType.list(daft.DataType.float32())}
)


@daft.cls(max_concurrency=1)
class Classifier:
    """Holds the network: one instance, as the script has one a GPU; torch's threads use all cores."""

    def __init__(self, name: str, models: str) -> None:
        self.net = network(name, models)

    @daft.method.batch(return_dtype=RESULT, batch_size=BATCH)
    def __call__(self, images: Any) -> Any:
        found = outputs(self.net, torch.from_numpy(np.array(images.to_pylist())))
        return [
            {"prediction": label, "probability": row}
            for label, row in zip(found["prediction"].tolist(), found["probability"], strict=True)
        ]


def daft_native(setting: Setting) -> Job:
    tensor = daft.DataType.tensor(dtype=daft.DataType.float32(), shape=(3, 224, 224))

    def job(collect: bool) -> dict[int, int]:
        frame = daft.read_parquet(f"{setting.data}/*.parquet")
        frame = frame.with_column("image", frame["content"].decode_image(mode=daft.ImageMode.RGB))
        frame = frame.with_column("norm_image", frame["image"].apply(transform, return_dtype=tensor))
        frame = frame.with_column("out", Classifier(setting.network, setting.models)(frame["norm_image"]))
        found = frame.select("id", "out").collect()
        if not collect:
            return {}
        rows = found.to_pydict()
        return {number: int(out["prediction"]) for number, out in zip(rows["id"], rows["out"], strict=True)}

    return job
