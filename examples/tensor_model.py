"""Columns of numbers -> classes and an embedding: a network of two towers, trained here in torch and run by Spark.

    python examples/tensor_model.py

150 irises, which PySpark brings along: one tower sees a flower's sepals, the other its petals (lengths and widths).
"""

import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyspark
import torch
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import VectorSlicer
from pyspark.sql import DataFrame, SparkSession
from torch import nn

from gpuml import TensorTransformer

IRISES = Path(pyspark.__file__).parent / "data" / "mllib" / "sample_multiclass_classification_data.txt"


class Towers(nn.Module):
    """(batch, 2) and (batch, 2) -> logits (batch, 3), and what both towers say together (batch, 16)."""

    def __init__(self) -> None:
        super().__init__()
        self.sepal = nn.Sequential(nn.Linear(2, 8), nn.Tanh())
        self.petal = nn.Sequential(nn.Linear(2, 8), nn.Tanh())
        self.head = nn.Linear(16, 3)

    def forward(self, sepal: torch.Tensor, petal: torch.Tensor) -> dict[str, torch.Tensor]:
        both = torch.cat([self.sepal(sepal), self.petal(petal)], 1)
        return {"logits": self.head(both), "embedding": both}


def tensors(flowers: DataFrame) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The network's inputs and the true classes, on the driver."""
    rows = flowers.collect()
    inputs = {
        name: torch.tensor(np.array([row[name].toArray() for row in rows])).float() for name in ("sepal", "petal")
    }
    return inputs, torch.tensor([int(row.label) for row in rows])


def trained(inputs: dict[str, torch.Tensor], labels: torch.Tensor) -> Towers:
    torch.manual_seed(0)
    net = Towers()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for _ in range(300):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(**inputs)["logits"], labels).backward()
        optimizer.step()
    return net


def main() -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable  # or Spark's workers run whatever python3 is
    spark = SparkSession.builder.master("local[2]").config("spark.ui.showConsoleProgress", "false").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")

    flowers = spark.read.format("libsvm").option("numFeatures", "4").load(str(IRISES)).coalesce(1)
    for name, indices in (("sepal", [0, 1]), ("petal", [2, 3])):
        flowers = VectorSlicer(inputCol="features", outputCol=name, indices=indices).transform(flowers)
    known, new = flowers.randomSplit([0.6, 0.4], seed=1)

    inputs, labels = tensors(known)
    stage = TensorTransformer.from_module(
        trained(inputs, labels),
        inputs=inputs,  # any rows that show types and shapes
        labels=["virginica", "setosa", "versicolor"],
        outputMapping={"embedding": "embedding"},
        outputVectors=True,
        predictionCol="prediction",
        predictedLabelCol="predictedLabel",
    )
    scored = Pipeline(stages=[stage]).fit(known).transform(new).cache()
    scored.select("label", "prediction", "predictedLabel").show(5)
    accuracy = MulticlassClassificationEvaluator(metricName="accuracy").evaluate(scored)
    print(f"accuracy {accuracy:.3f} on {new.count()} flowers that the network had not seen")

    with tempfile.TemporaryDirectory() as place:
        PipelineModel(stages=[stage]).save(f"{place}/model")
        again = PipelineModel.load(f"{place}/model").transform(new)
        assert again.select("prediction", "embedding").collect() == scored.select("prediction", "embedding").collect()
    print("saved, loaded, and the same answers")
    spark.stop()


if __name__ == "__main__":
    main()
