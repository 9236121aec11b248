"""The peers that run in Spark: gpuml, and what else runs a network over a column of images there."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pandas as pd
from pyspark.ml.functions import predict_batch_udf
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, FloatType, StructField, StructType

from bench.serve import Job, Setting
from gpuml import gpu_conf

#: Rows in a forward pass, the same for all.
BATCH = 64

OUTPUTS = StructType([StructField("prediction", FloatType()), StructField("probability", ArrayType(FloatType()))])

#: Rows go to Python through Unix sockets, not TCP: a setting of the session's start, of Spark 4.1 and later.
UNIX_SOCKETS = "spark.python.unix.domain.socket.enabled"


def frame_of(setting: Setting, conf: dict[str, str] | None = None) -> DataFrame:
    """The images, in a local session that is made at the first call: each peer has its own process, and so its own.

    `conf` is what a peer's makers publish; the others get the settings that gpuml recommends, gpuml or not.
    """
    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = {
        "spark.driver.memory": "4g",  # in local mode it holds the executor as well
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        UNIX_SOCKETS: "true",
        **(gpu_conf(BATCH) if conf is None else conf),
    }
    spark = SparkSession.builder.master(f"local[{setting.cores}]").config(map=settings).getOrCreate()
    # A partition for each file; Spark alone would make 3 of 8, of which two cores do the last one in turn.
    spark.conf.set("spark.sql.files.minPartitionNum", str(len(list(Path(setting.data).glob("*.parquet")))))
    return spark.read.parquet(setting.data)


def gpuml(setting: Setting) -> Job:
    """The stage as in the README, with the two outputs that every peer gives."""
    from bench.workloads import PREPROCESS
    from gpuml import ImageClassifier

    frame = frame_of(setting)
    if setting.network == "accelerator":
        source = {"model": "python:bench.workloads:accelerator", "preprocess": PREPROCESS.to_json()}
    else:
        source = {"model": f"{setting.models}/{setting.network}.pt2"}
    stage = ImageClassifier(**source, batchSize=BATCH, predictedLabelCol="", errorCol="")
    return _job(stage.transform(frame).select("id", "prediction", "probability"))


def batch_udf(setting: Setting) -> Job:
    """predict_batch_udf over the encoded bytes, its strongest fair form: all in one function."""
    name, models = setting.network, setting.models

    def load() -> Any:
        from bench.workloads import scorer

        return scorer(name, models)

    predict: Any = predict_batch_udf(load, return_type=OUTPUTS, batch_size=BATCH)
    frame = frame_of(setting)
    return _job(frame.select("id", predict("content").alias("out")).select("id", "out.*"))


def batch_udf_floats(setting: Setting) -> Job:
    """predict_batch_udf as NVIDIA publishes it: a column of flat float arrays, which the frame keeps.

    github.com/NVIDIA/spark-rapids-examples, ML+DL-Examples/Spark-DL/dl_inference (keras_resnet50_tf.ipynb and the
    image classification notebooks): tensors as array<float>, predict_batch_udf over them in a second column, all
    columns written; these two settings. There the arrays lie in the Parquet files; here a pandas UDF makes them.
    """
    name, models = setting.network, setting.models

    @F.pandas_udf(ArrayType(FloatType()))
    def features(content: pd.Series) -> pd.Series:
        import io

        from PIL import Image
        from torchvision.transforms._presets import ImageClassification

        preset = ImageClassification(crop_size=224, resize_size=256)
        return content.map(lambda data: preset(Image.open(io.BytesIO(data)).convert("RGB")).numpy().ravel())

    def load() -> Any:
        import torch

        from bench.workloads import network, outputs

        net = network(name, models)
        return lambda batch: outputs(net, torch.from_numpy(batch))

    predict: Any = predict_batch_udf(load, return_type=OUTPUTS, batch_size=BATCH, input_tensor_shapes=[[3, 224, 224]])
    conf = {
        "spark.sql.execution.arrow.maxRecordsPerBatch": "512",
        "spark.sql.parquet.columnarReaderBatchSize": "1024",
    }
    frame = frame_of(setting, conf).select("id", features("content").alias("data"))
    return _job(frame.withColumn("out", predict("data")).select("id", "data", "out.*"))


#: Of `pandas_udf`: what its makers keep in a module, so that a worker loads each network once.
_scorers: dict[tuple[str, str], Any] = {}


def cached_scorer(name: str, models: str) -> Any:
    """Runs in a worker; this module is imported there, so that the cache outlives the task."""
    from bench.workloads import scorer

    if (name, models) not in _scorers:
        _scorers[name, models] = scorer(name, models)
    return _scorers[name, models]


def pandas_udf(setting: Setting) -> Job:
    """One pandas UDF with torchvision's preset, its network cached per worker, 64 rows in a forward pass."""
    name, models = setting.network, setting.models

    @F.pandas_udf(OUTPUTS)
    def classify(content: pd.Series) -> pd.DataFrame:
        from bench.spark_peers import cached_scorer

        score, rows = cached_scorer(name, models), content.tolist()
        parts = [score(rows[start : start + BATCH]) for start in range(0, len(rows), BATCH)]
        return pd.DataFrame(
            {
                "prediction": [label for part in parts for label in part["prediction"]],
                "probability": [row for part in parts for row in part["probability"]],
            }
        )

    frame = frame_of(setting)
    return _job(frame.select("id", classify("content").alias("out")).select("id", "out.*"))


def mlflow(setting: Setting) -> Job:
    """mlflow.pyfunc.spark_udf over a pyfunc model that takes images and has its network as an artifact.

    github.com/mlflow/mlflow, examples/flower_classifier: image_pyfunc.py and score_images_spark.py. There the images
    are text in base64; here bytes, which spares it the decoding.
    """
    import mlflow.pyfunc

    from bench.mlflow_model import Classifier

    name, uri = setting.network, f"{setting.models}/mlflow-{setting.network}"
    if not Path(uri, "MLmodel").is_file():
        shutil.rmtree(uri, ignore_errors=True)
        weights = {} if name == "accelerator" else {"weights": f"{setting.models}/{name}.pt"}
        model = Classifier(name)
        mlflow.pyfunc.save_model(uri, python_model=model, artifacts=weights or None, pip_requirements=[])
    frame = frame_of(setting)
    classify = mlflow.pyfunc.spark_udf(frame.sparkSession, uri, result_type=OUTPUTS, env_manager="local")
    return _job(frame.select("id", classify("content").alias("out")).select("id", "out.*"))


def _job(out: DataFrame) -> Job:
    """Every column of every row is made: Spark prunes a UDF away that only count() asks for."""

    def job(collect: bool) -> dict[int, int]:
        if collect:
            return {row.id: int(row.prediction) for row in out.select("id", "prediction").collect()}
        out.write.format("noop").mode("overwrite").save()
        return {}

    return job
