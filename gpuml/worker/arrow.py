"""An Arrow column -> a tensor on a device; the tensors that a function gave -> an Arrow column of the promised type."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from gpuml.errors import TensorError


def to_tensor(column: pa.Array, what: str, device: torch.device) -> Tensor:
    """The numbers of a column, copied to a device.

    Parameters
    ----------
    column : numbers or booleans, or arrays of them, nested at will, of one length at each depth; no nulls.
    what : how an error names the column.

    Returns
    -------
    Tensor
        Of the column's own type: (n,); (n, k) for arrays of length k; (n, k, m) for arrays of arrays. Without a row, or
        without an element, a length that nothing tells is 0.

    Raises
    ------
    TensorError
        Naming the first row that does not fit.
    """
    _check_type(column.type, what)
    shape = [len(column)]
    while _is_list(column.type):
        _refuse_null(column, what, shape)
        lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
        other = np.flatnonzero(lengths != lengths[:1])
        if other.size:
            raise TensorError(
                f"{what}: row {_row(other[0], shape)} of a batch of {shape[0]} has an array of length "
                f"{lengths[other[0]]}, the first one {lengths[0]}; a tensor has one length for all: pad or cut the "
                f"arrays, such as F.slice(F.concat(column, F.array_repeat(F.lit(0.0), k)), 1, k), or filter the rows"
            )
        shape.append(int(lengths[0]) if len(lengths) else 0)
        column = column.flatten()
    _refuse_null(column, what, shape)
    # A copy on the CPU too: the buffer is Arrow's, read-only, and may be that of another argument.
    return torch.tensor(column.to_numpy(zero_copy_only=False), device=device).reshape(shape)


def to_column(given: Any, promised: pa.DataType, rows: int, what: str) -> pa.Array:
    """What a function gave for a batch, as a column.

    Parameters
    ----------
    given : a tensor on any device, or a NumPy array, of shape (rows,) for a number, (rows, k) for an array; for a
        struct a dict of them by field name, or a tuple in the order of the fields.
    promised : numbers, booleans, arrays of them, or a struct of these.
    what : how an error names the function.

    Raises
    ------
    TensorError
        Saying what was given and what was promised. Numbers are converted only where that loses nothing but precision.
    """
    if not pa.types.is_struct(promised):
        return _plain(given, promised, rows, what)
    fields = list(promised)
    parts = _parts(given, [field.name for field in fields], what)
    made = [
        _plain(part, field.type, rows, f"{what}, field {field.name!r}")
        for part, field in zip(parts, fields, strict=True)
    ]
    return pa.StructArray.from_arrays(made, fields=fields)


def to_host(value: Any, what: str) -> Any:
    """A tensor or a NumPy array as a NumPy array; bfloat16, which NumPy lacks, as float32."""
    if isinstance(value, Tensor):
        value = value.detach()
        return (value.float() if value.dtype == torch.bfloat16 else value).cpu().numpy()
    if isinstance(value, np.ndarray):
        return value
    raise TensorError(f"{what}: gave a {type(value).__name__}, not a tensor; torch.stack makes one of a list")


def _plain(given: Any, promised: pa.DataType, rows: int, what: str) -> pa.Array:
    numbers = to_host(given, what)
    depth, leaf = 0, promised
    while _is_list(leaf):
        depth, leaf = depth + 1, leaf.value_type
    if numbers.ndim != depth + 1 or len(numbers) != rows:
        wanted = ", ".join([str(rows), *"kml"[:depth]]) + ("" if depth else ",")
        raise TensorError(
            f"{what}: gave shape {tuple(numbers.shape)} for a batch of {rows} rows; it promised {_text(promised)}, "
            f"which is a tensor of shape ({wanted})"
        )
    if pa.types.is_boolean(leaf) and numbers.dtype != bool:
        raise TensorError(f"{what}: gave {numbers.dtype}, but promised {_text(promised)}: compare, such as x > 0.5")
    try:
        column = pa.array(numbers.reshape(-1)).cast(leaf)  # safe: what does not fit into the type is an error
    except pa.ArrowException as error:
        raise TensorError(
            f"{what}: gave {numbers.dtype}, but promised {_text(promised)}, and not every value is one ({error}); "
            f"round or clamp it, or promise another type"
        ) from error
    for axis in range(depth, 0, -1):
        ends = np.arange(math.prod(numbers.shape[:axis]) + 1) * numbers.shape[axis]
        column = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), column)  # checks that they fit 32 bits
    return column


def _parts(given: Any, names: list[str], what: str) -> list[Any]:
    """The fields of a struct, in its order."""
    if isinstance(given, Mapping):
        if set(given) == set(names):
            return [given[name] for name in names]
        told = f"a dict of {', '.join(map(repr, given)) or 'nothing'}"
    elif isinstance(given, (tuple, list)):
        if len(given) == len(names):
            return list(given)
        told = f"{len(given)} values"
    else:
        told = f"a {type(given).__name__}"
    raise TensorError(
        f"{what}: gave {told}; it promised a struct of {', '.join(map(repr, names))}: a dict with these names, or a "
        f"tuple of {len(names)} in this order"
    )


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _check_type(kind: pa.DataType, what: str) -> None:
    leaf = kind
    while _is_list(leaf):
        leaf = leaf.value_type
    if pa.types.is_integer(leaf) or pa.types.is_floating(leaf) or pa.types.is_boolean(leaf):
        return
    if pa.types.is_struct(leaf):
        hint = "give its fields one by one, or pyspark.ml.functions.vector_to_array(column) for an ML Vector"
    else:
        hint = "cast it, such as F.col('x').cast('double'), or leave it out"
    raise TensorError(
        f"{what}: the column is of type {_text(kind)}; tensors hold numbers, booleans, and arrays of them: {hint}"
    )


def _refuse_null(column: pa.Array, what: str, shape: list[int]) -> None:
    if column.null_count:
        first = np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0]
        holds = "is null" if len(shape) == 1 else "holds a null"
        raise TensorError(
            f"{what}: row {_row(first, shape)} of a batch of {shape[0]} {holds}, which no tensor can hold; fill it "
            f"before, such as F.coalesce(column, F.lit(0.0)), or filter the rows: where(column.isNotNull())"
        )


def _row(place: int, shape: list[int]) -> int:
    """Row of the batch that holds the element at a place among all of its depth."""
    return int(place) // math.prod(shape[1:])


def _text(kind: pa.DataType) -> str:
    """A type as Spark writes it."""
    if _is_list(kind):
        return f"array<{_text(kind.value_type)}>"
    return {"float": "float", "int32": "int", "int64": "bigint", "int16": "smallint", "int8": "tinyint"}.get(
        str(kind), str(kind)
    )
