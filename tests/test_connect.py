"""Spark Connect: the core of the suite on a client with no JVM of its own, in a process of its own."""

import os
import subprocess
import sys
import textwrap

import pytest
from conftest import PYTHONPATH

PRELUDE = """
import pathlib
import sys
import pandas as pd
import pytest
import torch
from conftest import PLAIN, Corner, Pooled, encoded
from pyspark.ml.functions import array_to_vector
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.classification import LogisticRegression
from pyspark.sql import SparkSession, functions as F
from gpuml import ImageClassifier, ObjectDetector, ParamError, TensorTransformer
from gpuml import reduce_blocks, register_udf, save_model, tensor_udf

folder = sys.argv[1]
spark = SparkSession.builder.remote("local[2]").getOrCreate()
assert "connect" in type(spark).__module__
data = [encoded(0), None, encoded(1), b"broken", *(encoded(i) for i in range(2, 8))]
rows = [(i, d, float(i % 2)) for i, d in enumerate(data)]
frame = spark.createDataFrame(rows, "id int, content binary, label double").coalesce(1)
"""

CORE = (
    PRELUDE
    + """
stage = ImageClassifier.from_module(
    Pooled(), preprocess=PLAIN, labels=["ant", "bee", "cat", "dog"], rawPredictionCol="raw", topKCol="top",
    deviceCol="device",
)
rows = stage.transform(frame).orderBy("id").collect()
local = stage.predict(data)
assert [r.predictedLabel for r in rows] == local.predictedLabel.tolist()
assert [r.error for r in rows] == local.error.tolist()
assert [r.device for r in rows] == ["cpu"] * 10
assert all((r.probability is None) == (r.error is not None) for r in rows)
assert max(abs(r.raw.toArray() - x).max() for r, x in zip(rows, local.raw) if x is not None) < 1e-5
assert [t.label for t in rows[0].top] == [t["label"] for t in local.top[0]]
assert stage.transform(frame.limit(0)).collect() == []
assert stage.copy({stage.handleInvalid: "skip"}).transform(frame).count() == 8
with pytest.raises(Exception, match="null_input"):
    stage.copy({stage.handleInvalid: "error"}).transform(frame).collect()
with pytest.raises(ParamError, match="setPredictionCol"):
    stage.transform(stage.transform(frame))

stream = spark.readStream.format("rate").load().select(F.lit(b"").alias("content"))
with pytest.raises(ParamError, match="foreachBatch"):
    stage.transform(stream)

sent = []
add = spark.addArtifacts
spark.addArtifacts = lambda *args, **kwargs: sent.append(args) or add(*args, **kwargs)
other = ImageClassifier.from_module(Pooled(seed=5), preprocess=PLAIN)
for _ in range(2):
    other.copy({other.batchSize: 3}).transform(frame)
assert len(sent) == 1, sent  # a session is sent a model file once

save_model(Pooled(), folder + "/net.pt2", preprocess=PLAIN, labels=["ant", "bee", "cat", "dog"])
spark.conf.set("fs.viewfs.mounttable.gpumltest.link./models", "file:" + folder)
through = ImageClassifier(model="viewfs://gpumltest/models/net.pt2").transform(frame).orderBy("id").collect()
assert [r.prediction for r in through] == [r.prediction for r in rows]

stage.write().overwrite().save(folder + "/stage")
stage.write().overwrite().save(folder + "/stage")
loaded = ImageClassifier.load(folder + "/stage")
assert loaded.extractParamMap() == stage.extractParamMap()
assert loaded.transform(frame).orderBy("id").collect() == rows

register_udf(spark, "classify", stage.copy({stage.batchSize: 5}))
frame.createOrReplaceTempView("photos")
by_sql = spark.sql("SELECT id, r.* FROM (SELECT id, classify(content) AS r FROM photos) WHERE r.error IS NULL")
by_sql = by_sql.orderBy("id").collect()
wanted = [r for r in rows if r.error is None]
assert [(r.id, r.predictedLabel, r.top) for r in by_sql] == [(r.id, r.predictedLabel, r.top) for r in wanted]

# The function runs in a process of the server's, which loads the stage.
for seed in range(2):
    pathlib.Path(folder, "stream").mkdir(exist_ok=True)
    pathlib.Path(folder, "stream", f"{seed}.png").write_bytes(encoded(seed))
schema = "path string, modificationTime timestamp, length long, content binary"
stream = spark.readStream.format("binaryFile").schema(schema).load(folder + "/stream")

def one(batch, number):
    scored = ImageClassifier.load(folder + "/stage").transform(batch)
    scored.select("path", "predictedLabel").write.mode("overwrite").parquet(f"{folder}/scored/batch={number}")

query = stream.writeStream.foreachBatch(one).option("checkpointLocation", folder + "/checkpoint")
query = query.trigger(availableNow=True).start()
assert query.awaitTermination(120)
scored = spark.read.parquet(folder + "/scored").orderBy("path").collect()
assert [r.predictedLabel for r in scored] == [rows[0].predictedLabel, rows[2].predictedLabel]

skip = stage.copy({stage.handleInvalid: "skip"})
learner = LogisticRegression(featuresCol="probability", predictionCol="p2", probabilityCol="pr2",
                             rawPredictionCol="rp2", maxIter=3)
fitted = Pipeline(stages=[skip, learner]).fit(frame)
wanted = fitted.transform(frame).select("id", "p2").orderBy("id").collect()
assert len(wanted) == 8
fitted.write().overwrite().save(folder + "/fitted")
fitted.write().overwrite().save(folder + "/fitted")
again = PipelineModel.load(folder + "/fitted")
assert again.transform(frame).select("id", "p2").orderBy("id").collect() == wanted

detector = ObjectDetector.from_module(Corner(), labels=["none", "corner"], scoreThreshold=0.0)
found = detector.transform(frame.where("id < 4")).orderBy("id").collect()
wanted = detector.predict(data[:4])
assert [r.detections and [box.asDict() for box in r.detections] for r in found] == wanted.detections.tolist()
assert [r.detectionsError for r in found] == wanted.detectionsError.tolist()
assert found[0].detections[0].label == "corner"

numbers = spark.range(0, 20, numPartitions=3).select("id", (F.col("id") / 4).alias("x"))
udf = tensor_udf(lambda state, id, x: {"a": id + state, "b": x * 4}, "a bigint, b double", setup=lambda device: 5)
rows = numbers.select("id", udf("id", "x").alias("r")).collect()
assert sorted((r.id, r.r.a, r.r.b) for r in rows) == [(i, i + 5, i) for i in range(20)]
with pytest.raises(ParamError, match="'dubble' is no type"):
    tensor_udf(abs, "dubble")

tensors = TensorTransformer.from_module(torch.nn.Linear(3, 2), inputs={"vector": torch.randn(2, 3)}, outputs=["y"],
                                        probabilityCol="probability", handleInvalid="skip")
vectors = array_to_vector(F.when(F.col("id") < 18, F.array("x", "x", "x")))
vectors = numbers.withColumn("vector", F.when(F.col("id") < 18, vectors))
rows = tensors.transform(vectors).orderBy("id").collect()
assert [r.id for r in rows] == list(range(18))
local = tensors.predict(pd.DataFrame({"vector": [r.vector for r in rows]}))
assert max(abs(r.y - y).max() for r, y in zip(rows, local.y)) < 1e-5
assert rows[0].probability.size == 2

made = reduce_blocks(numbers, lambda id, x: {"id": id.sum(), "x": x.sum()})
assert {name: float(value) for name, value in made.items()} == {"id": 190, "x": 47.5}
with pytest.raises(ParamError, match="no such column"):
    reduce_blocks(numbers, abs, ["y"])
print("CORE HOLDS")
del fitted, again, learner  # Spark's remote models ask the server at exit, and wait for it for minutes once it is gone
spark.stop()
"""
)


def run(script, *args, timeout=300, **env):
    env = {**os.environ, "PYTHONPATH": PYTHONPATH, "PYSPARK_PYTHON": sys.executable, **env}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, args)],
        env=env, capture_output=True, text=True, timeout=timeout, cwd=args[0],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.connect
def test_the_core_of_the_suite_holds_over_connect(tmp_path):
    assert "CORE HOLDS" in run(CORE, tmp_path)


BIG = """
import os, sys, torch
from conftest import PLAIN, encoded
from pyspark.sql import SparkSession
from gpuml import ImageClassifier, save_model
from gpuml.models import store

folder, kind = sys.argv[1:]

class Big(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = torch.nn.Linear(3, 8)
        self.weight = torch.nn.Parameter(torch.empty(92_000_000).uniform_(generator=torch.Generator().manual_seed(0)))

    def forward(self, x):
        return self.wide(x.mean((2, 3))) + self.weight[:8]

builder = SparkSession.builder.config("spark.ui.enabled", "false")
spark = (builder.remote("local[1]") if kind == "connect" else builder.master("local[1]")).getOrCreate()
stage = ImageClassifier.from_module(Big(), preprocess=PLAIN)
size = store.path_of(stage._held).stat().st_size
assert size > 350 << 20, size
frame = spark.createDataFrame([(encoded(0),)], "content binary")
wanted = stage.transform(frame).collect()
stage.write().overwrite().save(folder + "/big")
os.rename(store.path_of(stage._held), folder + "/net.pt2")
loaded = ImageClassifier.load(folder + "/big")
assert loaded.transform(frame).collect() == wanted
print("SAVED AND LOADED", size >> 20, "MiB")

store.path_of(stage._held).unlink()
spark.conf.set("fs.viewfs.mounttable.gpumltest.link./models", "file:" + folder)
assert ImageClassifier(model="viewfs://gpumltest/models/net.pt2").transform(frame).collect() == wanted
print("READ THROUGH SPARK", size >> 20, "MiB")
"""


@pytest.mark.connect
@pytest.mark.parametrize("kind", ["classic", "connect"])
def test_a_model_of_350_mb_goes_both_ways_with_the_default_driver_memory(tmp_path, kind):
    home = tmp_path / "home"
    out = run(BIG, tmp_path, kind, GPUML_HOME=str(home))
    assert "SAVED AND LOADED" in out
    assert "READ THROUGH SPARK" in out
