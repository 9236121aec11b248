"""A DataFrame's columns and a network's inputs -> the columns as the network takes them, or why they do not fit."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import StructField

from gpuml.errors import ParamError
from gpuml.spark.columns import Frame, column_of
from gpuml.spark.numbers import numbers_type
from gpuml.spark.score import type_of

if TYPE_CHECKING:
    from gpuml.models.cards import Port

_VECTOR = pa.list_(pa.float64())


def check_names(param: str, chosen: Mapping[str, Any], known: list[str], what: str) -> None:
    """Refuse names that the network does not have; `what` they are, ``"input"`` or ``"output"``.

    Raises
    ------
    ParamError
        Naming the Param, and a name that is close.
    """
    for name in chosen:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"Did you mean {close[0]!r}? " if close else ""
            raise ParamError(
                f"{param}: the model has no {what} {name!r}. {hint}Its {what}s are {', '.join(map(repr, known))}"
            )


def column_for(frame: Frame, column: str, port: Port) -> Column:
    """The column of that name, cast to what an input takes.

    Raises
    ------
    ParamError
        There is no such column, or it does not hold what the input takes.
    """
    what = f"inputMapping: input {port.name!r} takes column {column!r}"
    found = frame.only(column, what, f"; choose with setInputMapping({{'column': {port.name!r}}})")
    if isinstance(found.dataType, VectorUDT):
        check_type(_VECTOR, port, what, "a Vector")
        _check_size(found, port, what)
        vector = column_of(found)
        # float32 is half the bytes to Arrow. It fails on null, hence the guard.
        return F.when(vector.isNotNull(), vector_to_array(vector, "float32"))
    text = found.dataType.simpleString()
    kind = numbers_type(found.dataType)
    if kind is None:
        raise ParamError(
            f"{what}, which is of type {text}; it must be {_wanted(port)}: cast it, such as "
            f"F.col({column!r}).cast({type_of(port).simpleString()!r}), or choose another with setInputMapping(...)"
        )
    check_type(kind, port, what, text)
    return column_of(found).cast(type_of(port))


def check_type(kind: pa.DataType, port: Port, what: str, text: str) -> None:
    """Refuse a column whose numbers nest otherwise than an input's, or are lost in its type.

    Parameters
    ----------
    kind : of the column, in Arrow's words; null where nothing tells.
    what, text : how an error names column and type.

    Raises
    ------
    ParamError
        Saying what the input takes, and what to type.
    """
    depth, leaf = 0, kind
    while pa.types.is_list(leaf):
        depth, leaf = depth + 1, leaf.value_type
    if pa.types.is_null(leaf):
        return
    if depth != len(port.shape):
        raise ParamError(f"{what}, which is of type {text}; it must be {_wanted(port)}{_nesting(depth, port)}")
    if not _keeps(leaf, port.dtype):
        raise ParamError(
            f"{what}, which is of type {text}; it must be {_wanted(port)}, and not every value is one. If yours are, "
            f"cast it to {type_of(port).simpleString()!r}"
        )


def _keeps(leaf: pa.DataType, dtype: str) -> bool:
    """Whether a type of numbers goes into torch's without a loss, but for precision; anything else does not."""
    if pa.types.is_boolean(leaf):
        return True
    if dtype == "float32":
        return bool(pa.types.is_integer(leaf) or pa.types.is_floating(leaf))
    if dtype == "bool" or not pa.types.is_integer(leaf):
        return False
    # pandas has unsigned numbers: the highest bit is no sign there.
    return bool(leaf.bit_width + pa.types.is_unsigned_integer(leaf) <= int(dtype.removeprefix("int")))


def _nesting(depth: int, port: Port) -> str:
    if not port.shape:
        return ". Give one number of it, such as F.col('x')[0]"
    if depth == 0:
        return ". Make one of several columns: F.array('a', 'b'), or pyspark.ml.feature.VectorAssembler"
    return ""


def _wanted(port: Port) -> str:
    lengths = " of ".join(f"arrays of length {length}" for length in port.shape)
    vector = ", or a Vector" if port.dtype == "float32" and len(port.shape) == 1 else ""
    return f"{type_of(port).simpleString()!r}{f', {lengths}' if lengths else ''}{vector}"


def _check_size(field: StructField, port: Port, what: str) -> None:
    """Refuse a Vector column whose metadata tell another size."""
    size = ((field.metadata or {}).get("ml_attr") or {}).get("num_attrs")
    if size is not None and size != port.shape[0]:
        raise ParamError(
            f"{what}, whose Vectors have {size} numbers; it must be {_wanted(port)}. Assemble the columns that the "
            f"network was trained on, in that order"
        )
