"""gpuml's own path, stage by stage on one thread and without Spark -> milliseconds an image, as JSON on stdout."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench import data
from bench.limit import ROWS, decoded
from bench.workloads import PREPROCESS, WORKLOADS, network
from gpuml.models.file import load
from gpuml.worker.preprocess import normalise, resize_crop

#: Images looked at, and how often; the median of the passes is given.
IMAGES, PASSES = 16, 5


def stages(name: str, folder: Path, models: Path) -> dict[str, float]:
    """Milliseconds an image for decode, resize and crop, normalise and forward; the last two for passes of 8 rows."""
    torch.set_num_threads(1)
    contents = [content for path in sorted(folder.glob("*.parquet")) for content in data.read(path)[1]][:IMAGES]
    if WORKLOADS[name].network == "accelerator":
        net: Callable[[torch.Tensor], torch.Tensor] = network("accelerator", models)
    else:
        net, _ = load(models / f"{WORKLOADS[name].network}.pt2", torch.device("cpu"))
    images = [decoded(content) for content in contents]
    pixels = torch.empty((len(images), *PREPROCESS.size, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    for image, slot in zip(images, pixels, strict=True):
        resize_crop(image, PREPROCESS, out=slot)
    inputs = [normalise(part, PREPROCESS) for part in pixels.split(ROWS)]
    with torch.inference_mode():
        return {
            "decode": _milliseconds(lambda: [decoded(content) for content in contents], len(contents)),
            "resize and crop": _milliseconds(
                lambda: [resize_crop(image, PREPROCESS, out=slot) for image, slot in zip(images, pixels, strict=True)],
                len(contents),
            ),
            "normalise": _milliseconds(
                lambda: [normalise(part, PREPROCESS) for part in pixels.split(ROWS)], len(contents)
            ),
            "forward": _milliseconds(lambda: [net(part) for part in inputs], len(contents)),
        }


def _milliseconds(work: Callable[[], Any], images: int) -> float:
    work()
    taken = []
    for _ in range(PASSES):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return 1000 * statistics.median(taken) / images


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])  # workload -> folder of its images
    models = Path(sys.argv[2])
    print(json.dumps({name: stages(name, Path(folder), models) for name, folder in asked.items()}))
