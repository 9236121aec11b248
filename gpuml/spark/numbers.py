"""Spark's types and columns <-> what tensors hold: numbers, booleans, and arrays of them."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from pyspark.errors import ParseException, PySparkRuntimeError
from pyspark.sql import Column, DataFrame
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
    StructType,
)

from gpuml.errors import ParamError
from gpuml.spark.columns import Frame, column_of

#: With the Arrow types by which they travel.
NUMBERS: dict[type[DataType], pa.DataType] = {
    BooleanType: pa.bool_(),
    ByteType: pa.int8(),
    ShortType: pa.int16(),
    IntegerType: pa.int32(),
    LongType: pa.int64(),
    FloatType: pa.float32(),
    DoubleType: pa.float64(),
}


def parsed(returns: str | DataType) -> DataType:
    """The type that a user wrote.

    Raises
    ------
    ParamError
        It is none.
    """
    if isinstance(returns, DataType):
        return returns
    if not isinstance(returns, str):
        raise ParamError(f"returns={returns!r} is no type; give DDL text such as 'array<float>', or a DataType")
    try:
        return DataType.fromDDL(returns)
    except ParseException as error:
        raise ParamError(
            f"returns={returns!r} is no type; write 'double', 'array<float>' or 'a double, b int'"
        ) from error
    except PySparkRuntimeError as error:  # its parser is the session's
        raise ParamError(
            f"returns={returns!r} is text, which Spark parses, and no session is running: start one, or give a "
            f"DataType of pyspark.sql.types"
        ) from error


def promised(returns: DataType) -> pa.DataType:
    """The Arrow type of a column that tensors make.

    Raises
    ------
    ParamError
        They make no such column.
    """
    if isinstance(returns, StructType):
        made = {field.name: numbers_type(field.dataType) for field in returns.fields}
        if made and len(made) == len(returns.fields) and None not in made.values():
            return pa.struct(list(made.items()))
    kind = numbers_type(returns)
    if kind is None:
        raise ParamError(
            f"returns={returns.simpleString()!r} is no type that tensors make: a number or boolean, an array of them, "
            f"or a struct of these, its names distinct"
        )
    return kind


def chosen(df: DataFrame, columns: Sequence[str] | None) -> tuple[DataFrame, list[str]]:
    """Columns of a frame by name, None for all, seen to hold numbers; and their names.

    Raises
    ------
    ParamError
        Naming the column that is missing, or holds something else.
    """
    if isinstance(columns, str):
        raise ParamError(f"reduce_blocks: columns={columns!r} is one name; give a list: columns=[{columns!r}]")
    if df.isStreaming:
        raise ParamError("reduce_blocks: a stream has no end; reduce each batch with writeStream.foreachBatch")
    frame = Frame.of(df)
    names = frame.names if columns is None else list(columns)
    selected: list[Column] = []
    for name in names:
        found = frame.only(name, f"reduce_blocks: column {name!r}")
        if numbers_type(found.dataType) is None:
            raise ParamError(
                f"reduce_blocks: column {name!r} is of type {found.dataType.simpleString()}; tensors hold numbers, "
                f"booleans, and arrays of them: cast it, leave it out with columns=[...], or give "
                f"pyspark.ml.functions.vector_to_array(column) for an ML Vector"
            )
        selected.append(column_of(found).alias(str(len(selected))))
    if not selected:
        raise ParamError("reduce_blocks: there are no columns to reduce; name some with columns=[...]")
    # By number: mapInArrow asks for df[name], which takes a dot in a name for a field.
    return df.select(*selected), names


def numbers_type(kind: DataType) -> pa.DataType | None:
    """The Arrow type of numbers, or of arrays of them; None of anything else."""
    if isinstance(kind, ArrayType):
        element = numbers_type(kind.elementType)
        return None if element is None else pa.list_(element)
    return NUMBERS.get(type(kind))
