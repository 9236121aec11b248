"""A folder of JPEG files in Spark: paths that the workers open, against binaryFile's bytes.

    python examples/benchmarks/paths.py [images] [rounds]

Crops of the sample photographs, 500x375 pixels, each a file of its own on a local disk (in the page cache, after the
first pass); local[2]; a network that is pooled pixels and one linear layer, so that what is measured is all but the
network. Both frames come from one read of the folder, with as many partitions; a pass makes a label and a reason for
every row. The two take turns, and a ratio is that of two passes of one round. Prints a table for Markdown.
"""

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from bench.data import KINDS, photo
from pyspark.sql import SparkSession
from torch import nn

from gpuml import ImageClassifier, Preprocess, gpu_conf


def network(classes=10):
    torch.manual_seed(0)
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, classes))


def write(folder, images):
    """The folder's files; their bytes in all."""
    photos = [photo(seed, KINDS["jpeg"]) for seed in range(min(images, KINDS["jpeg"].distinct))]
    for number in range(images):
        Path(folder, f"{number:06}.jpg").write_bytes(photos[number % len(photos)])
    return sum(len(photos[number % len(photos)]) for number in range(images))


def main(images=1600, rounds=5):
    os.environ["PYSPARK_PYTHON"] = sys.executable
    conf = {"spark.driver.memory": "4g", "spark.ui.enabled": "false", **gpu_conf(64)}
    spark = SparkSession.builder.master("local[2]").config(map=conf).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    by_bytes = ImageClassifier.from_module(network(), preprocess=Preprocess(), probabilityCol="", predictionCol="")
    by_path = by_bytes.copy().setReadPaths(True).setInputCol("path")
    with tempfile.TemporaryDirectory() as folder:
        size = write(folder, images)
        files = spark.read.format("binaryFile").load(folder)
        columns = ("path", "predictedLabel", "error")
        frames = {
            "binaryFile": by_bytes.transform(files).select(*columns),
            "readPaths": by_path.transform(files.select("path")).select(*columns),
        }
        answers = [sorted(frame.collect()) for frame in frames.values()]  # warms both up as well
        assert answers[0] == answers[1], "the rows differ"
        seconds = {name: [] for name in frames}
        for number in range(rounds):
            for name in sorted(frames, reverse=number % 2 == 1):
                start = time.perf_counter()
                frames[name].write.format("noop").mode("overwrite").save()
                seconds[name].append(time.perf_counter() - start)
    ratios = [a / b for a, b in zip(seconds["binaryFile"], seconds["readPaths"], strict=True)]
    partitions = files.rdd.getNumPartitions()
    print(f"{images} JPEGs of {size / images / 1e3:.0f} kB, {partitions} partitions, {rounds} rounds\n")
    print("| input | images/s | times binaryFile |\n|---|---|---|")
    for name, taken in seconds.items():
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        cell = "1" if name == "binaryFile" else ratio
        print(f"| {name} | {images / statistics.median(taken):.0f} | {cell} |")
    spark.stop()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
