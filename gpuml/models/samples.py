"""What a user shows of a network's inputs -> samples that say types and shapes, and three rows to try it on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gpuml.errors import ModelError
from gpuml.models.cards import INPUT_DTYPES


def checked_samples(inputs: Any) -> dict[str, Tensor]:
    """The samples, seen to be tensors of columns' types with as many rows, two at least that differ."""
    if not isinstance(inputs, Mapping) or not inputs:
        raise ModelError(
            f"save_model: inputs={inputs!r:.100} is no dict of sample tensors by name; write inputs={{'x': sample}}, "
            f"the sample of two rows or more: torch.randn(2, 13)"
        )
    for name, sample in inputs.items():
        where = f"save_model: inputs[{name!r}]"
        if not isinstance(sample, Tensor):
            raise ModelError(f"{where} is a {type(sample).__name__}; give a sample tensor, as of torch.tensor(...)")
        if dtype_of(sample) not in INPUT_DTYPES:
            hint = " Networks are exported in float32: give sample.float()" if sample.is_floating_point() else ""
            raise ModelError(f"{where} is {dtype_of(sample)}; inputs are of {', '.join(INPUT_DTYPES)}.{hint}")
        if sample.ndim == 0 or len(sample) < 2 or sample.numel() == 0:
            raise ModelError(
                f"{where} has shape {tuple(sample.shape)}; give two rows or more, the batch first: a sample of (2, 13) "
                f"says that a row is 13 numbers, one of (2,) that it is one"
            )
    if len({len(sample) for sample in inputs.values()}) > 1:
        rows = ", ".join(f"{name!r} {len(sample)}" for name, sample in inputs.items())
        raise ModelError(f"save_model: the samples have several numbers of rows ({rows}); give as many of each")
    return {name: sample.detach().cpu().contiguous() for name, sample in inputs.items()}


def three_rows(samples: Mapping[str, Tensor]) -> list[Tensor]:
    """Three rows of each sample, the second other than the first: what rows make of one another is to show."""
    tensors = list(samples.values())
    count = len(tensors[0])
    other = next((i for i in range(1, count) if any(not torch.equal(each[i], each[0]) for each in tensors)), None)
    if other is None:
        raise ModelError(
            "save_model: the samples' rows are all equal, so a network that mixes rows would not be seen; give rows "
            "that differ, real ones at best"
        )
    third = next((i for i in range(1, count) if i != other), other)
    return [each[[0, other, third]] for each in tensors]


def checked_names(outputs: Any) -> tuple[str, ...]:
    """Names of outputs as a tuple; one text would give a name for each letter."""
    if isinstance(outputs, str) or not isinstance(outputs, Sequence):
        raise ModelError(f"save_model: outputs={outputs!r} is no list of names; write outputs=['logits']")
    return tuple(outputs)


def dtype_of(tensor: Tensor) -> str:
    """torch's name of a tensor's type."""
    return str(tensor.dtype).removeprefix("torch.")
