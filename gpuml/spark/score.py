"""A Spec of a network of tensors -> the UDF that runs columns of numbers through it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    ByteType,
    DataType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    StructType,
)

from gpuml.spark import arrays
from gpuml.spark.numbers import numbers_type
from gpuml.spark.task import this_task
from gpuml.spark.udf import FIELDS, shipped
from gpuml.spec import OUTPUT, Spec

if TYPE_CHECKING:
    from gpuml.models.cards import Port, TensorCard

#: torch's names of types -> the columns that hold them.
TYPES: dict[str, DataType] = {
    "bool": BooleanType(),
    "int8": ByteType(),
    "int16": ShortType(),
    "int32": IntegerType(),
    "int64": LongType(),
    "float32": FloatType(),
    "float64": DoubleType(),
}


def type_of(port: Port) -> DataType:
    """The type of the column that holds a network's input or output."""
    made = TYPES[port.dtype]
    for _ in port.shape:
        made = ArrayType(made)
    return made


def struct_of(spec: Spec, card: TensorCard) -> tuple[StructType, pa.StructType]:
    """The struct of ``spec.outputs``, in Spark's types and in Arrow's."""
    of_outputs = {f"{OUTPUT}{i}": type_of(port) for i, port in enumerate(card.outputs)}
    schema = StructType([StructField(name, {**FIELDS, **of_outputs}[name]) for name in spec.outputs])
    return schema, pa.struct([(field.name, _arrow_type(field.dataType)) for field in schema])


def score_columns(spec: Spec, card: TensorCard, columns: Sequence[Column]) -> Column:
    """The struct of ``spec.outputs`` that the network of a card makes of its inputs' columns.

    Nondeterministic, as `gpuml.spark.udf.score_udf` says. The closure holds plain values alone.
    """
    schema, kind = struct_of(spec, card)
    split = arrays.through_pandas()
    scalars = [not port.shape for port in card.inputs]

    def score(*given: pa.Array) -> pa.Array:
        return _answer(_joined(given, scalars) if split else given, spec, kind)

    if split:
        columns = [
            part
            for column, port in zip(columns, card.inputs, strict=True)
            for part in ([column] if port.shape else _split(column, type_of(port)))
        ]
    return arrays.arrays_udf(score, schema, "score")(*columns)


def _answer(columns: Sequence[pa.Array], spec: Spec, kind: pa.DataType) -> pa.Array:
    """Runs in a worker: one Arrow batch of the task."""
    from gpuml.worker import cache, score

    made = score.score(columns, spec, kind, this_task(), lambda: shipped(spec.model))
    cache.freeze()
    return made


def _arrow_type(kind: DataType) -> pa.DataType:
    return pa.string() if isinstance(kind, StringType) else numbers_type(kind)


# --- before Spark 4.1, where pandas has no null for a number ----------------------------------------------------------


def _split(column: Column, kind: DataType) -> list[Column]:
    """A column of numbers without its nulls, and where they are."""
    return [F.coalesce(column, F.lit(0).cast(kind)), column.isNull()]


def _joined(columns: Sequence[pa.Array], scalars: Sequence[bool]) -> list[pa.Array]:
    """The columns that were split, in the worker."""
    parts, made = iter(columns), []
    for scalar in scalars:
        column = next(parts)
        if scalar:
            null = next(parts)
            column = pa.array(column.to_numpy(zero_copy_only=False), mask=null.to_numpy(zero_copy_only=False))
        made.append(column)
    return made
