"""A Spec -> the Series-to-Series pandas UDF that runs it: the seam between Spark's driver and its workers."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
from pyspark import SparkFiles, TaskContext
from pyspark.sql import Column
from pyspark.sql.pandas.functions import pandas_udf
from pyspark.sql.types import ArrayType, DoubleType, FloatType, StringType, StructField, StructType

from gpuml.errors import ModelError
from gpuml.models.store import file_name
from gpuml.spec import Spec

#: The struct's fields by name, see gpuml.worker.outputs. Vectors travel as array<float>: a VectorUDT inside a struct
#: fails on a Parquet source (seen in Spark 4.3).
FIELDS = {
    "prediction": DoubleType(),
    "predictedLabel": StringType(),
    "probability": ArrayType(FloatType()),
    "rawPrediction": ArrayType(FloatType()),
    "features": ArrayType(FloatType()),
    "topLabels": ArrayType(StringType()),
    "topProbabilities": ArrayType(DoubleType()),
    "error": StringType(),
    "device": StringType(),
    "timing": ArrayType(DoubleType()),
}

#: The task whose rows this worker answered last, and when: what lies between two answers is the feed.
_answered: tuple[int, float] | None = None


def score_udf(spec: Spec, *, image_struct: bool) -> Callable[..., Column]:
    """The UDF of a spec: a binary column, or an image struct's `columns.IMAGE_TYPES`, -> a struct of ``spec.outputs``.

    Nondeterministic in Spark's eyes: a deterministic one runs again for a filter on its output (1,500 UDF rows for
    1,000). The price: a filter on another column, placed after the stage, is not pushed below it.

    The closure holds `spec` alone: no stage, session or Param goes to the workers.
    """
    schema = StructType([StructField(name, FIELDS[name], nullable=True) for name in spec.outputs])

    def of_bytes(content: pd.Series) -> pd.DataFrame:
        return _score(spec, content.tolist())

    def of_structs(
        data: pd.Series, height: pd.Series, width: pd.Series, nChannels: pd.Series, mode: pd.Series
    ) -> pd.DataFrame:
        return _score(spec, list(zip(data, height, width, nChannels, mode, strict=True)))

    score: Any = pandas_udf(of_structs if image_struct else of_bytes, schema)  # type: ignore[call-overload]
    udf: Callable[..., Column] = score.asNondeterministic()
    return udf


def _score(spec: Spec, rows: list[Any]) -> pd.DataFrame:
    """Runs in a worker: one Arrow batch of the task."""
    global _answered
    from gpuml.worker import cache, device, serve

    begin = time.perf_counter()
    context = TaskContext.get()
    assert context is not None, "a UDF runs in a task"
    resources = context.resources()
    addresses = tuple(resources["gpu"].addresses) if "gpu" in resources else ()
    number = context.taskAttemptId()
    waited = begin - _answered[1] if _answered is not None and _answered[0] == number else None
    task = device.Task(addresses, context.cpus(), context.partitionId(), waited)
    columns = serve.serve(rows, spec, task, lambda: _shipped(spec.model))
    cache.freeze()
    _answered = number, time.perf_counter()
    return pd.DataFrame(columns, columns=list(spec.outputs), index=range(len(rows)))


def _shipped(sha256: str) -> Path:
    """Where Spark put the model file on this node."""
    path = Path(SparkFiles.get(file_name(sha256)))
    if not path.is_file():
        raise ModelError(
            f"the model file {path.name} has not reached this worker ({path.parent}). A transform sends it to the "
            f"session that made the DataFrame: run transform again in the session that runs the job."
        )
    return path
