"""gpuml against predict_batch_udf on the same JPEGs, interleaved: an order of magnitude, not the benchmark.

    python examples/benchmarks/quick_check.py [images] [rounds] [classes]

1,600 JPEGs of 500x375 pixels in Parquet, crops of the sample photographs; local[2]; a network that is pooled pixels and
one linear layer, so that what is measured is all but the network. The peer decodes the same bytes inside its predict
function, with the preset of torchvision's zoo. Both give an index and the probabilities of 10 classes per row; gpuml's
as an ML Vector.
"""

import io
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from pyspark.ml.functions import predict_batch_udf
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, FloatType, StructField, StructType
from torch import nn

from gpuml import ImageClassifier, Preprocess

NAMES = ("astronaut.jpg", "cat.png", "coffee.jpg", "flower.jpg", "motorcycle.jpg", "rocket.jpg", "temple.jpg")
PHOTOGRAPHS = [Path(__file__).parents[1] / "images" / name for name in NAMES]


class Pooled(nn.Module):
    """Mean colour, then one linear layer with seeded weights."""

    def __init__(self, classes):
        super().__init__()
        self.linear = nn.Linear(3, classes)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 5)

    def forward(self, x):
        return self.linear(x.mean((2, 3)))


def photo(seed, width=500, height=375):
    """A crop of one of the sample photographs, as a JPEG of quality 90."""
    random = np.random.default_rng(seed)
    image = Image.open(PHOTOGRAPHS[seed % len(PHOTOGRAPHS)]).convert("RGB")
    part = random.uniform(0.6, 1)
    left, top = (random.uniform(0, 1 - part) * side for side in image.size)
    box = (left, top, left + part * image.width, top + part * image.height)
    buffer = io.BytesIO()
    image.resize((width, height), Image.Resampling.LANCZOS, box=box).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def peer(content, classes):
    """predict_batch_udf over raw bytes, its strongest fair form: decode, preset and network in one function."""

    def load():
        from torchvision.transforms._presets import ImageClassification

        network, preset = Pooled(classes).eval(), ImageClassification(crop_size=224)

        def predict(encoded):
            images = [Image.open(io.BytesIO(data)).convert("RGB") for data in encoded]
            with torch.inference_mode():
                probability = torch.softmax(network(torch.stack([preset(image) for image in images])), 1).numpy()
            return {"prediction": probability.argmax(1).astype(np.float32), "probability": probability}

        return predict

    schema = StructType([StructField("prediction", FloatType()), StructField("probability", ArrayType(FloatType()))])
    return predict_batch_udf(load, return_type=schema, batch_size=64)(content)


def main(images=1600, rounds=5, classes=10):
    os.environ["PYSPARK_PYTHON"] = sys.executable
    conf = {
        "spark.driver.memory": "4g",
        "spark.ui.enabled": "false",
    }
    spark = SparkSession.builder.master("local[2]").config(map=conf).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    with tempfile.TemporaryDirectory() as folder:
        photos = [photo(seed) for seed in range(64)]
        for part in range(8):
            numbers = range(part, images, 8)
            table = pa.table({"id": list(numbers), "content": [photos[i % len(photos)] for i in numbers]})
            pq.write_table(table, f"{folder}/part-{part}.parquet")
        frame = spark.read.parquet(folder)
        stage = ImageClassifier.from_module(Pooled(classes), preprocess=Preprocess(), errorCol="")
        ours = stage.transform(frame).select("id", "prediction", "probability")
        theirs = frame.select("id", peer(F.col("content"), classes).alias("out")).select("id", "out.*")
        labels = [dict(out.select("id", "prediction").collect()) for out in (ours, theirs)]  # warms both up as well
        agree = sum(labels[0][i] == labels[1][i] for i in labels[0]) / images
        ratios, seconds = [], {"gpuml": [], "predict_batch_udf": []}
        for _ in range(rounds):
            for name, out in (("gpuml", ours), ("predict_batch_udf", theirs)):
                start = time.perf_counter()
                out.write.format("noop").mode("overwrite").save()  # every column of every row
                seconds[name].append(time.perf_counter() - start)
            ratios.append(seconds["predict_batch_udf"][-1] / seconds["gpuml"][-1])
    size = sum(map(len, photos)) // len(photos) // 1000
    print(f"{images} JPEGs of {size} kB, {classes} classes, {rounds} interleaved rounds")
    print(f"labels agree on {agree:.1%}")
    for name, taken in seconds.items():
        print(f"{name:18} {images / statistics.median(taken):6.0f} images/s (median)")
    print(f"ratio {statistics.median(ratios):.2f} (median; {min(ratios):.2f} to {max(ratios):.2f})")
    spark.stop()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
