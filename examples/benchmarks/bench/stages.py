"""gpuml's own path, stage by stage on one core -> milliseconds an image, as JSON on stdout."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from bench import data
from bench.limit import ROWS, decoded
from bench.serve import Setting
from bench.spark_peers import OUTPUTS, frame_of
from bench.workloads import PREPROCESS, WORKLOADS, network
from gpuml.models.file import load
from gpuml.worker.preprocess import normalise, resize_crop

#: Images looked at, and how often; the median of the passes is given.
IMAGES, PASSES = 16, 5


def measured(name: str, folder: Path, models: Path) -> dict[str, float]:
    """All stages of a workload, in the order in which an image goes through them."""
    workload = WORKLOADS[name]
    width = 10 if workload.network in ("pooled", "accelerator") else 1000
    way = travels(folder, workload.kind, width)
    return {"feed": way["feed"], **stages(name, folder, models), "return": way["return"]}


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


@cache
def travels(folder: Path, kind: str, width: int) -> dict[str, float]:
    """Milliseconds an image for the way through Spark: read and fed to a worker that does nothing; scores returned."""
    frame = frame_of(Setting("", str(folder), "", cores=1))
    column = "content.data" if kind == "struct" else "content"
    feed = F.pandas_udf(lambda content: content.map(len).astype("float64"), "double")
    scores = F.pandas_udf(
        lambda content: pd.DataFrame(
            {
                "prediction": np.zeros(len(content), np.float32),
                "probability": list(np.zeros((len(content), width), np.float32)),
            }
        ),
        OUTPUTS,
    )
    # As a stage's: else Spark may run them where it likes.
    fed = frame.select("id", feed.asNondeterministic()(column))
    returned = frame.select("id", scores.asNondeterministic()(column).alias("out")).select("id", "out.*")
    images = frame.count()
    # Few tasks, and less what a job costs that reads no image: else those would count as the images' way.
    frame.sparkSession.conf.set("spark.sql.files.minPartitionNum", "1")
    frames = (frame.select("id"), fed, returned)
    rounds = [[_seconds(partial(write, out)) for out in frames] for _ in range(4)][1:]
    nothing, there, back = (1000 * statistics.median(taken) / images for taken in zip(*rounds, strict=True))
    return {"feed": there - nothing, "return": back - there}


def write(out: DataFrame) -> None:
    out.write.format("noop").mode("overwrite").save()


def _milliseconds(work: Callable[[], Any], images: int) -> float:
    work()
    return 1000 * statistics.median(_seconds(work) for _ in range(PASSES)) / images


def _seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Spark prints to stdout
    asked = json.loads(sys.argv[1])  # workload -> folder of its images
    models = Path(sys.argv[2])
    print(json.dumps({name: measured(name, Path(folder), models) for name, folder in asked.items()}), file=answer)
