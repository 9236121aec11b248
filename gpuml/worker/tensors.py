"""Arrow batches of a task and a user's function -> its column, or one partial result, computed on the task's device."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from gpuml.errors import DeviceMemoryError, TensorError
from gpuml.spec import Function
from gpuml.worker import device, states
from gpuml.worker.arrow import to_column, to_host, to_tensor
from gpuml.worker.cache import out_of_memory

#: The form of a partial result and a file of NumPy's for each of its arrays, as it travels to the driver.
Packed = tuple[str, list[bytes]]


def answer(columns: Sequence[pa.Array], function: Function, task: device.Task) -> pa.Array:
    """One Arrow batch through a user's function.

    Parameters
    ----------
    columns : the arguments, equally long.
    function : what `gpuml.tensor_udf` sent. It never sees a batch of no rows.
    task : what Spark gave the task; the device is decided here, at every call, as a stage's is.

    Raises
    ------
    TensorError
        A column is no tensor, or the function's tensors are not what it promised.
    DeviceMemoryError
        The device's memory ran out.
    """
    if not columns:
        raise TensorError(f"{function.name}: it was called without a column; give one at least")
    rows = len(columns[0])
    if not rows:
        return pa.array([], function.returns)
    place, _ = device.bind(function.device, task)
    with _current(place):
        state = () if function.setup is None else (states.state(function.sha256, function.setup, place),)
        with torch.inference_mode(), _told(function.name, place, rows):
            tensors = [to_tensor(column, _argument(function, i), place) for i, column in enumerate(columns)]
            return to_column(function.predict(*state, *tensors), function.returns, rows, function.name)


def fold(
    batches: Iterable[pa.RecordBatch],
    names: Sequence[str],
    reduce: Callable[..., Any],
    combine: Callable[[Any, Any], Any] | None,
    policy: str,
    task: device.Task,
) -> Packed | None:
    """The batches of a partition -> its partial result, folded on the device; None where there is no row.

    `names` are how errors call the columns; `reduce`, `combine` and `policy` are those of `gpuml.reduce_blocks`.
    """
    held: Parts | None = None
    place, _ = device.bind(policy, task)
    with _current(place), torch.inference_mode():
        for batch in batches:
            if batch.num_rows:
                with _told("reduce", place, batch.num_rows):
                    named = zip(names, batch.columns, strict=True)
                    tensors = [to_tensor(column, f"column {name!r}", place) for name, column in named]
                    made = Parts.of(reduce(*tensors), "reduce")
                    held = made if held is None else held.with_next(made, combine)
    return None if held is None else held.packed()


def merge(packed: Iterable[Packed], combine: Callable[[Any, Any], Any] | None) -> Any:
    """Partial results, at least one -> the result, folded on the CPU in the order given: NumPy arrays in its form."""
    held: Parts | None = None
    with torch.inference_mode():
        for each in packed:
            parts = Parts.unpacked(each)
            held = parts if held is None else held.with_next(parts, combine)
    assert held is not None
    return held.value(lambda tensor: to_host(tensor, "reduce"))


@dataclass(frozen=True)
class Parts:
    """A result laid flat. `form`: None for a tensor, a number for a tuple of so many, names for a dict of tensors."""

    form: int | tuple[str, ...] | None
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, value: Any, what: str) -> Parts:
        """What a user's function gave.

        Raises
        ------
        TensorError
            It is neither a tensor nor a tuple or a dict of tensors. Numbers count as tensors.
        """
        if isinstance(value, Mapping):
            odd = [name for name in value if not isinstance(name, str)]
            if odd:
                raise TensorError(f"{what}: gave a dict with the key {odd[0]!r}; its keys are names, such as 'sum'")
            return cls(tuple(value), tuple(_tensor(each, f"{what}, {name!r}") for name, each in value.items()))
        if isinstance(value, (tuple, list)):
            return cls(len(value), tuple(_tensor(each, f"{what}, value {i}") for i, each in enumerate(value)))
        return cls(None, (_tensor(value, what),))

    def value(self, made: Callable[[Tensor], Any] = lambda tensor: tensor) -> Any:
        """The result in its form, with something made of each tensor."""
        values = tuple(made(tensor) for tensor in self.tensors)
        if self.form is None:
            return values[0]
        return values if isinstance(self.form, int) else dict(zip(self.form, values, strict=True))

    def with_next(self, other: Parts, combine: Callable[[Any, Any], Any] | None) -> Parts:
        """This and the next result, combined; by default the elementwise sum."""
        self._check_form(other, "reduce")
        if combine is None:
            return Parts(self.form, tuple(map(_sum, self.tensors, other.tensors)))
        made = Parts.of(combine(self.value(), other.value()), "combine")
        self._check_form(made, "combine")
        return made

    def _check_form(self, other: Parts, what: str) -> None:
        if other.form != self.form:
            raise TensorError(f"{what}: gave {_form(other.form)} after {_form(self.form)}; its result has one form")

    def packed(self) -> Packed:
        """Without pickle."""
        cells = []
        for tensor in self.tensors:
            file = io.BytesIO()
            np.save(file, to_host(tensor, "reduce"), allow_pickle=False)
            cells.append(file.getvalue())
        return json.dumps(self.form), cells

    @classmethod
    def unpacked(cls, packed: Packed) -> Parts:
        form = json.loads(packed[0])
        arrays = [np.load(io.BytesIO(cell), allow_pickle=False) for cell in packed[1]]
        return cls(tuple(form) if isinstance(form, list) else form, tuple(map(torch.from_numpy, arrays)))


def _sum(a: Tensor, b: Tensor) -> Tensor:
    if a.shape != b.shape or a.dtype == torch.bool:
        raise TensorError(
            f"reduce: gave {a.dtype} of shape {tuple(a.shape)}, then {b.dtype} of shape {tuple(b.shape)}; results are "
            f"summed by element, which takes numbers of one shape: give combine=, a function of two results"
        )
    return a + b


def _tensor(value: Any, what: str) -> Tensor:
    if isinstance(value, (bool, int, float, np.generic)):  # in full precision: torch makes a float32 of a float
        value = np.asarray(value)
    return value if isinstance(value, Tensor) else torch.tensor(to_host(value, what))


def _form(form: int | tuple[str, ...] | None) -> str:
    if form is None:
        return "a tensor"
    return f"a tuple of {form}" if isinstance(form, int) else f"a dict of {', '.join(map(repr, form))}"


def _argument(function: Function, place: int) -> str:
    """How an error names a column: arguments count from 1, the state aside."""
    name = f" ({function.arguments[place]!r})" if place < len(function.arguments) else ""
    return f"{function.name}: argument {place + 1}{name}"


def _current(place: torch.device) -> AbstractContextManager[Any]:
    """Makes the device the current one: there lies what a user's function makes on "cuda", and run Numba's kernels."""
    return torch.cuda.device(place) if place.type == "cuda" else nullcontext()


@contextmanager
def _told(what: str, place: torch.device, rows: int) -> Iterator[None]:
    """Says what to do when the device's memory runs out."""
    try:
        yield
    except Exception as error:
        if not out_of_memory(error):
            raise
        raise DeviceMemoryError(
            f"{what}: a batch of {rows} rows does not fit into the memory of {place}. Make batches smaller "
            f"(spark.sql.execution.arrow.maxRecordsPerBatch), or let fewer tasks share the GPU "
            f"(spark.task.resource.gpu.amount)."
        ) from error
