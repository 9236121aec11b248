"""A slice of rows and a forward pass -> passes over parts of the slice that fit into the device's memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

from gpuml.errors import DeviceMemoryError
from gpuml.spec import Spec
from gpuml.worker.cache import Network, out_of_memory

_log = logging.getLogger("gpuml")

T = TypeVar("T")


class Passes:
    """What runs a network over slices of rows.

    Parameters
    ----------
    network : from `gpuml.worker.cache`.
    spec : its batch size is the most rows of a slice.
    """

    def __init__(self, network: Network, spec: Spec) -> None:
        self.network = network
        self.spec = spec
        self._on_cuda = network.device.type == "cuda"

    def _in_parts(self, count: int, most: int, forward: Callable[[slice], T]) -> list[T]:
        """What forward passes give for `count` rows, in parts of at most `most` that fit into memory.

        Raises
        ------
        DeviceMemoryError
            One row alone does not fit.
        """
        parts: list[T] = []
        start, rows, halved = 0, min(self.network.batch_limit or count, most), False
        while start < count:
            stop = min(start + rows, count)
            part = self._attempt(partial(forward, slice(start, stop)))
            if part:
                parts += part
                start = stop
                if halved:
                    self.network.batch_limit = rows  # only what worked: a later task may find more room
            else:
                # Here, not in the except block: the exception's frames keep the tensors alive that must go.
                rows, halved = self._halve(stop - start), True
        return parts

    def _call(self, *inputs: Any) -> Any:
        """What the network gives for its inputs.

        TorchScript's interpreter makes a plain RuntimeError of what runs out of memory: the allocator's count tells.
        """
        failures = _failed_allocations(self.network.device)
        try:
            return self.network.forward(*inputs)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except RuntimeError as error:
            if _failed_allocations(self.network.device) > failures:
                raise torch.OutOfMemoryError(str(error)) from None
            raise

    def _attempt(self, forward: Callable[[], T]) -> list[T]:
        """What one forward pass gives; nothing when the device's memory ran out."""
        try:
            return [forward()]
        except Exception as error:
            if not out_of_memory(error):
                raise
            return []

    def _halve(self, rows: int) -> int:
        """After `rows` ran out of memory: free what is free; returns how many to try next."""
        if self._on_cuda:
            torch.cuda.empty_cache()
        if rows == 1:
            raise DeviceMemoryError(
                f"one row alone (batch size 1, after halving batchSize={self.spec.batch_size}) does not fit into the "
                f"memory of {self.network.device}. Let fewer tasks share the GPU (spark.task.resource.gpu.amount), "
                f"set dtype='bfloat16', or use a smaller model."
            )
        half = rows // 2
        _log.warning(
            "gpuml: %s ran out of memory at %d rows a pass; this worker tries %d", self.network.device, rows, half
        )
        return half


def _failed_allocations(device: torch.device) -> int:
    """How often torch's allocator had no memory on a GPU."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats_as_nested_dict(device).get("num_ooms", 0))  # memory_stats flattens them all
