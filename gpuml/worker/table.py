"""The columns of an Arrow batch <-> a tensor for each input, of the rows that fit, and for each output of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from gpuml.errors import RowError
from gpuml.models.cards import Port

Rows = np.ndarray[Any, np.dtype[np.intp]]


def tensors_of(columns: Sequence[pa.Array], ports: Sequence[Port]) -> tuple[Rows, list[Tensor], list[str | None]]:
    """The rows that a network can take.

    Parameters
    ----------
    columns : one for each input, equally long: numbers, or arrays nested as deep as its shape.
    ports : the inputs.

    Returns
    -------
    rows
        Indices of the rows that fit every input, ascending.
    tensors
        For each input, (len(rows), *shape) on the CPU.
    reasons
        Per row of the batch, None or ``"kind: message"``, of the first input that it does not fit.
    """
    count = len(columns[0])
    reasons: list[str | None] = [None] * count
    found = [_numbers(_typed(column, port), port, reasons) for column, port in zip(columns, ports, strict=True)]
    fits = np.ones(count, bool)
    for rows, _ in found:
        if len(rows) < count:
            fits &= np.bincount(rows, minlength=count).astype(bool)
    tensors = []
    for (rows, numbers), port in zip(found, ports, strict=True):
        # A copy: the buffer is Arrow's, read-only.
        tensor = torch.tensor(numbers, dtype=getattr(torch, port.dtype)).reshape(len(rows), *port.shape)
        tensors.append(tensor if fits[rows].all() else tensor[torch.from_numpy(fits[rows])])
    return np.flatnonzero(fits), tensors, reasons


def around(values: pa.Array, rows: Rows, count: int) -> pa.Array:
    """A column of `count` rows: the values in their rows, null in all others."""
    if len(rows) == count:
        return values
    places = np.zeros(count, np.int64)
    missing = np.ones(count, bool)
    places[rows], missing[rows] = np.arange(len(rows)), False
    return values.take(pa.array(places, mask=missing))


def _typed(column: pa.Array, port: Port) -> pa.Array:
    """A column that has a type, if it holds no number at all: through pandas it has none (before Spark 4.1)."""
    leaf = column.type
    while pa.types.is_list(leaf):
        leaf = leaf.value_type
    if not pa.types.is_null(leaf):
        return column
    kind = pa.from_numpy_dtype(np.dtype(port.dtype))
    for _ in port.shape:
        kind = pa.list_(kind)
    return column.cast(kind)


def _numbers(column: pa.Array, port: Port, reasons: list[str | None]) -> tuple[Rows, Any]:
    """Indices of the rows that fit an input, and their numbers in one row after another; the others get a reason."""
    rows, values = np.arange(len(column)), column
    for depth, length in enumerate((*port.shape, None)):
        null = values.is_null().to_numpy(zero_copy_only=False) if values.null_count else None
        if length is None and port.dtype != "float32" and pa.types.is_floating(values.type):
            null = np.isnan(values.to_numpy(zero_copy_only=False))  # pandas' null among integers: before Spark 4.1
        if null is not None and null.any():
            kind, what = ("bad_value", "has a null in its array") if depth else ("null_input", "is null")
            why = {True: RowError(kind, f"input {port.name!r} {what}")}
            rows, values = _without(null, null, why, rows, values, reasons)
        if length is None:
            break
        lengths = pc.list_value_length(values).to_numpy(zero_copy_only=False)
        wrong = lengths != length
        if wrong.any():
            within = " within its array" if depth else ""
            what = f"input {port.name!r} takes an array of length {length}{within}, and was given"
            why = {n: RowError("bad_shape", f"{what} {n}") for n in np.unique(lengths[wrong]).tolist()}
            rows, values = _without(wrong, lengths, why, rows, values, reasons)
        values = values.flatten()
    return rows, values.to_numpy(zero_copy_only=False)


def _without(
    bad: Any, seen: Any, why: Mapping[Any, RowError], rows: Rows, values: pa.Array, reasons: list[str | None]
) -> tuple[Rows, pa.Array]:
    """The rows, and their values, of which none is bad; `why` tells by what was seen of another row's first bad one."""
    grid = bad.reshape(len(rows), -1)
    failed = grid.any(1)
    for row in np.flatnonzero(failed).tolist():
        place = row * grid.shape[1] + int(grid[row].argmax())
        reasons[rows[row]] = reasons[rows[row]] or str(why[seen[place]])
    return rows[~failed], values.filter(pa.array(np.repeat(~failed, grid.shape[1])))
