"""A frame of pandas and a TensorTransformer -> the frame that its transform would add, made here, without Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa

from gpuml.errors import ParamError, RowError
from gpuml.models import store
from gpuml.spark import columns, inputs
from gpuml.spark.numbers import numbers_type
from gpuml.spark.score import struct_of, type_of

if TYPE_CHECKING:
    from gpuml.models.cards import Port
    from gpuml.spark.tensor_stage import TensorTransformer


def predicted(stage: TensorTransformer, frame: Any) -> pd.DataFrame:
    """What `gpuml.TensorTransformer.predict` gives."""
    from gpuml.worker.device import Task
    from gpuml.worker.score import score

    if not isinstance(frame, pd.DataFrame):
        raise ParamError(
            f"predict: frame is a {type(frame).__name__}; give one of pandas. One of Spark goes through transform()"
        )
    card = stage._card()
    outputs = stage._output_columns()
    columns.check_distinct({name: column for name, (column, _) in outputs.items()})
    taken = [_array(frame, column, port) for column, port in stage._sources_of_inputs(card)]
    spec = stage._spec(field for _, field in outputs.values())
    made = score(taken, spec, struct_of(spec, card)[1], Task(), lambda: store.path_of(spec.model))
    reasons = made.field("error").to_pylist()
    failed = [reason is not None for reason in reasons]
    if any(failed) and stage.getHandleInvalid() == "error":
        first = failed.index(True)
        kind, _, message = reasons[first].partition(": ")
        raise RowError(kind, f"row {frame.index[first]!r}: {message}")
    result = pd.DataFrame(
        {column: _series(made.field(field), frame.index) for column, field in outputs.values()}, index=frame.index
    )
    return result[~np.array(failed, bool)] if stage.getHandleInvalid() == "skip" else result


def _array(frame: pd.DataFrame, column: str, port: Port) -> pa.Array:
    """A column as an input takes it."""
    what = f"inputMapping: input {port.name!r} takes column {column!r}"
    if list(frame.columns).count(column) != 1:
        seen = "there is no such column" if column not in frame.columns else "there are several such columns"
        raise ParamError(
            f"{what}: {seen} among {list(frame.columns)}; choose with setInputMapping({{'column': {port.name!r}}})"
        )
    series = frame[column]
    try:
        # NaN is a number, as it is in Spark.
        made = pa.array([_cell(cell) for cell in series] if series.dtype == object else series, from_pandas=False)
    except (pa.ArrowException, TypeError) as error:
        raise ParamError(f"{what}, whose cells are not numbers, or arrays of them, of one type: {error}") from error
    inputs.check_type(made.type, port, what, str(made.type))
    return made.cast(
        numbers_type(type_of(port)), safe=False
    )  # but for precision nothing is lost: the types were checked


def _cell(value: Any) -> Any:
    """What Arrow takes for a cell: its arrays have one dimension, and may lie in lists."""
    if hasattr(value, "toArray"):  # an ML Vector
        return value.toArray()
    return [_cell(part) for part in value] if isinstance(value, np.ndarray) and value.ndim > 1 else value


def _series(column: pa.Array, index: pd.Index) -> pd.Series:
    """A column of the struct: numbers, or an array of NumPy for each row."""
    if not pa.types.is_list(column.type):
        return pd.Series(column.to_pandas(integer_object_nulls=True).to_numpy(), index=index)
    leaf = column.type
    while pa.types.is_list(leaf):
        leaf = leaf.value_type
    cells = np.empty(len(column), object)
    for i, cell in enumerate(column.to_pylist()):
        cells[i] = None if cell is None else np.array(cell, leaf.to_pandas_dtype())
    return pd.Series(cells, index=index, dtype=object)
