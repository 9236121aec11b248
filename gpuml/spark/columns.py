"""A DataFrame's schema and a worker's struct -> checked input columns and the output columns of a stage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pyspark.ml.functions import array_to_vector
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, DataType, IntegerType, StringType, StructField, StructType

from gpuml.errors import ParamError

TOP_K_TYPE = "array<struct<label:string,probability:double>>"

#: Fields of Spark's image struct that a worker needs, each a column of its own: with `origin`, a string, the whole
#: struct would take a slow conversion.
IMAGE_TYPES: dict[str, DataType] = {
    "data": BinaryType(),
    "height": IntegerType(),
    "width": IntegerType(),
    "nChannels": IntegerType(),
    "mode": IntegerType(),
}


@dataclass(frozen=True)
class Input:
    """A checked input column; `origin` says whether an image struct names its file."""

    column: Column
    is_image: bool
    origin: bool


def input_column(dataset: DataFrame, name: str, column: str) -> Input:
    """The column that a Param names, if it holds images.

    Raises
    ------
    ParamError
        There is no such column, more than one, or it is neither binary nor an image struct.
    """
    found = _fields(dataset, column)
    if len(found) != 1:
        what = "there is no such column" if not found else f"there are {len(found)} such columns"
        raise ParamError(f"{name}={column!r}: {what} among {dataset.columns}; choose with {_setter(name)}(...)")
    quoted = _column(dataset, found[0])
    kind = found[0].dataType
    if isinstance(kind, BinaryType):
        return Input(quoted, is_image=False, origin=False)
    if isinstance(kind, StructType):
        types = {field.name: field.dataType for field in kind.fields}
        if all(types.get(field) == wanted for field, wanted in IMAGE_TYPES.items()):
            return Input(quoted, is_image=True, origin=types.get("origin") == StringType())
    hint = " Read the files with spark.read.format('binaryFile')." if isinstance(kind, StringType) else ""
    raise ParamError(
        f"{name}={column!r} is of type {kind.simpleString()}; images are a binary column (encoded files) or Spark's "
        f"image struct.{hint}"
    )


def check_outputs(dataset: DataFrame, outputs: dict[str, str]) -> None:
    """Refuse output columns (by Param name) that exist already, as Spark compares names.

    Raises
    ------
    ParamError
        Naming column, Param and setter.
    """
    same = _same(dataset)
    for name, column in outputs.items():
        if any(same(existing, column) for existing in dataset.columns):
            raise ParamError(
                f"{name}={column!r}: the DataFrame has a column of that name already; drop it, or choose another "
                f"with {_setter(name)}(...), or '' for none"
            )
    check_distinct(outputs, same)


def check_distinct(outputs: dict[str, str], same: Any = lambda a, b: a == b) -> None:
    """Refuse two outputs of one name."""
    names = list(outputs.items())
    for position, (name, column) in enumerate(names):
        for other, taken in names[:position]:
            if same(column, taken):
                raise ParamError(
                    f"{name}={column!r} and {other}={taken!r} are one name; choose another with {_setter(name)}(...)"
                )


def free_names(dataset: DataFrame, *names: str) -> list[str]:
    """Names for temporary columns that no column of the frame has."""
    while any(_fields(dataset, name) for name in names):
        names = tuple(f"_{name}" for name in names)
    return list(names)


def _fields(dataset: DataFrame, column: str) -> list[StructField]:
    """The frame's columns that a name can mean."""
    same = _same(dataset)
    return [field for field in dataset.schema.fields if same(field.name, column)]


def _column(dataset: DataFrame, field: StructField) -> Column:
    return dataset["`" + field.name.replace("`", "``") + "`"]


def _same(dataset: DataFrame) -> Any:
    """How Spark compares column names in the frame's session."""
    sensitive = str(dataset.sparkSession.conf.get("spark.sql.caseSensitive", "false")).lower() == "true"
    return (lambda a, b: a == b) if sensitive else (lambda a, b: a.lower() == b.lower())


def _setter(name: str) -> str:
    return f"set{name[0].upper()}{name[1:]}"


def worker_fields(fields: Iterable[str]) -> tuple[str, ...]:
    """The struct fields that a worker makes for some outputs, and the reason always; equal stages are equal Specs."""
    parts = {"topK": ("topLabels", "topProbabilities")}
    return tuple(sorted({"error"}.union(*(parts.get(field, (field,)) for field in fields))))


def from_struct(struct: Column, field: str) -> Column:
    """One output column of the worker's struct."""
    if field in ("probability", "rawPrediction"):
        # array_to_vector fails on null, hence the guard.
        return F.when(struct[field].isNotNull(), array_to_vector(struct[field]))
    if field == "topK":
        pairs = F.arrays_zip(struct["topLabels"].alias("label"), struct["topProbabilities"].alias("probability"))
        return pairs.cast(TOP_K_TYPE)
    return struct[field]


def local(made: dict[str, Any], field: str) -> Any:
    """One output column of a worker's answer, for pandas."""
    if field != "topK":
        return made[field]
    return [
        None if labels is None else [{"label": a, "probability": b} for a, b in zip(labels, values, strict=True)]
        for labels, values in zip(made["topLabels"], made["topProbabilities"], strict=True)
    ]


def row_name(dataset: DataFrame, source: Input) -> Column:
    """How an error names a row: the frame's path, else the image's origin, else partition and row.

    For the select that holds the UDF: in a branch that only failed rows take, the row would count those alone.
    """
    place = F.concat(F.lit("partition "), F.spark_partition_id().cast("string"))
    if not dataset.isStreaming:  # which has no row numbers
        number = F.monotonically_increasing_id().bitwiseAND((1 << 33) - 1)
        place = F.concat(place, F.lit(" row "), number.cast("string"))
    paths = _fields(dataset, "path")
    if len(paths) == 1 and isinstance(paths[0].dataType, StringType):
        return F.coalesce(_column(dataset, paths[0]), place)
    if source.is_image and source.origin:
        return F.coalesce(source.column.getField("origin"), place)
    return place
