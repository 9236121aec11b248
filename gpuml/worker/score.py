"""The columns of an Arrow batch of a task -> a struct of a network's outputs: bind, load, run, lay back."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from gpuml.errors import ModelError, RowError
from gpuml.models.cards import TensorCard
from gpuml.spec import OUTPUT, Spec
from gpuml.worker import cache, device
from gpuml.worker.arrow import to_column
from gpuml.worker.outputs import activate
from gpuml.worker.passes import Passes
from gpuml.worker.table import Rows, around, tensors_of

#: Fields that are made of the first output's classes.
CLASSES = ("prediction", "predictedLabel", "probability", "rawPrediction")


def score(
    columns: Sequence[pa.Array], spec: Spec, kind: pa.StructType, task: device.Task, find: Callable[[], Path]
) -> pa.StructArray:
    """One Arrow batch through the spec's model file.

    Parameters
    ----------
    columns : one for each of the network's inputs, in its order; equally long.
    spec : what the stage asks.
    kind : the struct to make. Its fields are ``error``, ``device``, those of `CLASSES`, and ``output<i>`` for the
        network's i-th output, of that one's own type.
    task : what Spark gave the task; the device is decided here, at every call: a reused worker may have another.
    find : path of the model file on this node, called only when this process does not hold the network yet.

    Returns
    -------
    As long as the columns; every field but ``error`` and ``device`` is null in the rows that failed.
    """
    place, decision = device.bind(spec.device, task)
    network = cache.network(spec.model, place, spec.dtype, find)
    card: TensorCard = network.card
    rows, inputs, reasons = tensors_of(columns, card.inputs)
    names = [field.name for field in kind]
    wanted = {int(name.removeprefix(OUTPUT)) for name in names if name.startswith(OUTPUT)}
    classes = set(names) & set(CLASSES)
    outputs = TensorRunner(network, spec).run(inputs, wanted | {0} if classes else wanted)
    made: dict[str, Any] = {}
    if classes:
        rows, outputs, probabilities = _numbers_only(rows, outputs, card, reasons)
        made = _of_classes(outputs[0].numpy(), probabilities, card)
    made.update({f"{OUTPUT}{i}": output for i, output in outputs.items()})
    laid = {
        "error": pa.array(reasons, pa.string()),
        "device": pa.array([str(decision)] * len(reasons), pa.string()),
    }
    for field in kind:
        if field.name not in laid:
            value = made[field.name]
            value = value if isinstance(value, pa.Array) else to_column(value, field.type, len(rows), field.name)
            laid[field.name] = around(value, rows, len(reasons))
    return pa.StructArray.from_arrays([laid[name] for name in names], fields=list(kind))


class TensorRunner(Passes):
    """A network of tensors on a device, run over the rows of one call."""

    def run(self, inputs: Sequence[Tensor], wanted: set[int]) -> dict[int, Tensor]:
        """Each row exactly once, computed once unless memory ran out.

        Parameters
        ----------
        inputs : (n, *shape) each, on the CPU, in the card's order.
        wanted : places of outputs.

        Returns
        -------
        Those outputs, (n, *shape) each, on the CPU, of the card's types.

        Raises
        ------
        DeviceMemoryError
            One row alone does not fit into the device's memory.
        """
        count = len(inputs[0])
        ports = self.network.card.outputs
        outputs = {i: torch.empty((count, *ports[i].shape), dtype=getattr(torch, ports[i].dtype)) for i in wanted}
        with torch.cuda.device(self.network.device) if self._on_cuda else contextlib.nullcontext():
            for start in range(0, count, self.spec.batch_size):
                stop = min(start + self.spec.batch_size, count)

                def forward(part: slice, start: int = start, stop: int = stop) -> None:
                    self._forward(
                        [each[start:stop][part] for each in inputs],
                        {i: each[start:stop][part] for i, each in outputs.items()},
                    )

                self._in_parts(stop - start, sys.maxsize, forward)
        return outputs

    def _forward(self, inputs: Sequence[Tensor], outputs: dict[int, Tensor]) -> None:
        """Tensors of n rows on the host, in and out."""
        network = self.network
        dtype = getattr(torch, network.dtype)
        with (
            torch.inference_mode(),
            torch.autocast(network.device.type, dtype=dtype, enabled=dtype != torch.float32),
        ):
            given = self._call(*(each.to(network.device) for each in inputs))
            for i, output in outputs.items():
                if given[i].shape != output.shape:
                    raise ModelError(
                        f"the model gave {tuple(given[i].shape)} for {len(output)} rows; its card promises "
                        f"{network.card.outputs[i]}: write the model file again with gpuml.save_model"
                    )
                output.copy_(given[i])


def _numbers_only(
    rows: Rows, outputs: dict[int, Tensor], card: TensorCard, reasons: list[str | None]
) -> tuple[Rows, dict[int, Tensor], Any]:
    """Without the rows that have NaN among their probabilities: argmax would name some class for them."""
    probabilities = activate(outputs[0].numpy(), card.activation)
    bad = np.isnan(probabilities).any(1)
    if not bad.any():
        return rows, outputs, probabilities
    for row in rows[bad].tolist():
        reasons[row] = str(RowError("bad_value", f"the model gave NaN as {card.outputs[0].name!r} of this row"))
    kept = torch.from_numpy(~bad)
    return rows[~bad], {i: output[kept] for i, output in outputs.items()}, probabilities[~bad]


def _of_classes(first: Any, probabilities: Any, card: TensorCard) -> dict[str, Any]:
    """Fields of `CLASSES`: of the first output and its probabilities, float32 (n, classes)."""
    prediction = probabilities.argmax(1)
    labels = pa.array(card.labels or list(map(str, range(probabilities.shape[1]))), pa.string())
    return {
        "prediction": prediction.astype(np.float64),
        "predictedLabel": labels.take(pa.array(prediction)),
        "probability": probabilities,
        "rawPrediction": first,
    }
