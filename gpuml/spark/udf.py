"""A Spec -> the Series-to-Series pandas UDFs that run it: the seam between Spark's driver and its workers."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
from pyspark import SparkFiles, TaskContext
from pyspark.sql import Column
from pyspark.sql.pandas.functions import pandas_udf
from pyspark.sql.types import ArrayType, DataType, DoubleType, FloatType, StringType, StructField, StructType

from gpuml.errors import ModelError, ParamError, RowError
from gpuml.models.store import file_name
from gpuml.spark.task import this_task
from gpuml.spec import Spec

#: The struct's fields by name, see gpuml.worker.outputs. Vectors travel as array<float>: a VectorUDT inside a struct
#: fails on a Parquet source (seen in Spark 4.3).
FIELDS: dict[str, DataType] = {
    "prediction": DoubleType(),
    "predictedLabel": StringType(),
    "probability": ArrayType(FloatType()),
    "rawPrediction": ArrayType(FloatType()),
    "features": ArrayType(FloatType()),
    "topLabels": ArrayType(StringType()),
    "topProbabilities": ArrayType(DoubleType()),
    **dict.fromkeys(("boxX1", "boxY1", "boxX2", "boxY2", "boxScores"), ArrayType(FloatType())),
    "boxLabels": ArrayType(StringType()),
    "error": StringType(),
    "device": StringType(),
    "timing": ArrayType(DoubleType()),
}

#: The task whose rows this worker answered last, and when: what lies between two answers is the feed.
_answered: tuple[int, float] | None = None


def score_udf(spec: Spec, *, image_struct: bool) -> Callable[..., Column]:
    """The UDF of a spec: a column of bytes or paths, or an image struct's `columns.IMAGE_TYPES`, -> ``spec.outputs``.

    Nondeterministic in Spark's eyes: a deterministic one runs again for a filter on its output (1,500 UDF rows for
    1,000). The price: a filter on another column, placed after the stage, is not pushed below it.

    The closure holds `spec` alone: no stage, session or Param goes to the workers.
    """
    schema = StructType([StructField(name, FIELDS[name], nullable=True) for name in spec.outputs])

    def of_bytes(content: pd.Series) -> pd.DataFrame:
        return _score(spec, content.tolist())

    def of_paths(path: pd.Series) -> pd.DataFrame:
        return _score(spec, path.tolist())

    def of_structs(
        data: pd.Series, height: pd.Series, width: pd.Series, nChannels: pd.Series, mode: pd.Series
    ) -> pd.DataFrame:
        return _score(spec, list(zip(data, height, width, nChannels, mode, strict=True)))

    return _nondeterministic(of_structs if image_struct else of_paths if spec.read_paths else of_bytes, schema)


def answer_udf(spec: Spec, outputs: dict[str, str], schema: StructType, *, fail: bool) -> Callable[..., Column]:
    """The UDF for SQL, of one column, whose answer nobody changes after it.

    Parameters
    ----------
    outputs : column -> the field of a stage that it is made from.
    schema : of those columns, in order.
    fail : whether a row that cannot be read fails the task.
    """

    def of_cells(cells: pd.Series) -> pd.DataFrame:
        from gpuml.worker.outputs import plain

        rows = checked(spec, cells)
        made = _serve(spec, rows)
        for row, reason in zip(rows, made["error"], strict=True):
            if fail and reason is not None:
                kind, message = reason.split(": ", 1)
                raise RowError(kind, f"{row}: {message}" if spec.read_paths else message)
        answers = {column: plain(made, field) for column, field in outputs.items()}
        return pd.DataFrame(answers, index=range(len(cells)))

    return _nondeterministic(of_cells, schema)


def _nondeterministic(function: Callable[..., pd.DataFrame], schema: StructType) -> Callable[..., Column]:
    udf: Any = pandas_udf(function, schema)  # type: ignore[call-overload]
    made: Callable[..., Column] = udf.asNondeterministic()
    return made


def checked(spec: Spec, cells: Any) -> list[Any]:
    """Runs in a worker: SQL hands a UDF whatever column it is given, so its type is seen here first."""
    rows = [] if isinstance(cells, pd.DataFrame) else cells.tolist()
    first = cells if isinstance(cells, pd.DataFrame) else next((row for row in rows if row is not None), None)
    if first is None or isinstance(first, str if spec.read_paths else (bytes, bytearray)):
        return rows
    given = {pd.DataFrame: "a struct", str: "a string", bytes: "binary"}.get(type(first), type(first).__name__)
    if spec.read_paths:
        raise ParamError(f"the function's column is {given}; with readPaths=True it opens the paths in a string column")
    raise ParamError(
        f"the function's column is {given}; it takes encoded images, a binary column. For a column of paths register a "
        f"stage with setReadPaths(True); image structs go through transform"
    )


def _score(spec: Spec, rows: list[Any]) -> pd.DataFrame:
    """Runs in a worker: one Arrow batch of the task."""
    return pd.DataFrame(_serve(spec, rows), columns=list(spec.outputs), index=range(len(rows)))


def _serve(spec: Spec, rows: list[Any]) -> dict[str, Any]:
    """Runs in a worker: the columns ``spec.outputs`` of some rows of its task."""
    global _answered
    from gpuml.worker import cache, serve

    begin = time.perf_counter()
    context = TaskContext.get()
    assert context is not None, "a UDF runs in a task"
    number = context.taskAttemptId()
    waited = begin - _answered[1] if _answered is not None and _answered[0] == number else None
    columns = serve.serve(rows, spec, this_task(waited), lambda: shipped(spec.model))
    cache.freeze()
    _answered = number, time.perf_counter()
    return columns


def shipped(sha256: str) -> Path:
    """Where Spark put the model file on this node."""
    path = Path(SparkFiles.get(file_name(sha256)))
    if not path.is_file():
        raise ModelError(
            f"the model file {path.name} has not reached this worker ({path.parent}). transform sends it to the "
            f"session that made the DataFrame, register_udf to its own: call it again in the session that runs the job."
        )
    return path
