"""(model content, device, dtype) -> the network that this process already holds there.

Lives in an importable module: a cache in a notebook's ``__main__`` would be pickled by value and empty in every task.
"""

from __future__ import annotations

import gc
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from gpuml.errors import DeviceMemoryError
from gpuml.models.cards import AnyCard
from gpuml.models.file import load

#: Networks held per process; the least recently used goes first. pyspark's own model cache holds three as well.
CAPACITY = 3

#: cudaErrorMemoryAllocation
_CUDA_OUT_OF_MEMORY = 2


@dataclass
class Network:
    """A model file on a device. `batch_limit` is what fitted into its memory, None until memory ran out."""

    forward: Callable[..., Any]
    card: Any  # an AnyCard, of the kind that the stage runs: the driver has seen to that
    device: torch.device
    dtype: str
    batch_limit: int | None = None

    @cached_property
    def copies(self) -> torch.cuda.Stream | None:
        """The stream of the copies to its GPU; None on the CPU.

        One for all calls: torch's allocator gives memory again only on the stream that it was first given on, so a
        stream for each call would leave its slices behind, in turn on each of the 32 streams that torch has.
        """
        return torch.cuda.Stream(self.device) if self.device.type == "cuda" else None


_networks: OrderedDict[tuple[Hashable, str, str], Network] = OrderedDict()
_lock = threading.Lock()
_frozen = False


Loaded = tuple[Callable[..., Any], AnyCard]


def network(
    model: Hashable,
    device: torch.device,
    dtype: str,
    find: Callable[[], Path],
    make: Callable[[torch.device], Loaded] | None = None,
) -> Network:
    """A network on a device, loaded at most once per process.

    Parameters
    ----------
    model : the model file's content hash: equal content is one network, whatever stage asks. Without a file, the
        source and all that makes it.
    device, dtype : where and how it runs; a reused worker may be given another GPU by its next task.
    find : path of the model file, called only when it must be loaded.
    make : what makes the network instead, where there is no file.

    Raises
    ------
    DeviceMemoryError
        It does not fit into the device's memory, even with no other network of this process there.
    """
    key = (model, str(device), dtype)
    with _lock:
        if key in _networks:
            _networks.move_to_end(key)
            return _networks[key]
        while len(_networks) >= CAPACITY:
            release(_networks.popitem(last=False)[1].device)
        read = make or partial(load, find())
        loaded = _load(read, device, dtype)
        if loaded is None:
            # Here, not in the except block: the exception's frames keep alive what was loaded until then.
            _drop_all(device)
            loaded = _load(read, device, dtype)
        if loaded is None:
            name = f"model file {model[:12]}" if isinstance(model, str) else str(model)
            raise DeviceMemoryError(
                f"the network of {name} does not fit into the memory of {device}, though this "
                f"process has dropped its other networks there. Let fewer tasks share the GPU "
                f"(spark.task.resource.gpu.amount), see with nvidia-smi who else uses it, or use a smaller model."
            )
        _networks[key] = loaded
        return loaded


def out_of_memory(error: Exception) -> bool:
    """Whether a device's memory ran out, told by type and number, never by text.

    torch's allocator has a type for it. Where CUDA itself fails to allocate (a context, a kernel's code, pinned memory)
    an AcceleratorError (torch 2.8) has CUDA's number. cuBLAS and cuDNN give a RuntimeError that only has a text: False.
    """
    if isinstance(error, torch.AcceleratorError):
        return getattr(error, "error_code", None) == _CUDA_OUT_OF_MEMORY  # set by torch's C++, on no other instance
    return isinstance(error, torch.OutOfMemoryError)


def freeze() -> None:
    """Take what is loaded by now out of the garbage collector's sight, once per process.

    Spark collects garbage after every task: with torch imported a task then costs about 180 ms, after this 50-85 ms.
    Only Spark's workers call it; in a user's own process that would be a liberty.
    """
    global _frozen
    if not _frozen:
        gc.collect()
        gc.freeze()
        _frozen = True


def _load(read: Callable[[torch.device], Loaded], device: torch.device, dtype: str) -> Network | None:
    """None when the device's memory ran out."""
    try:
        forward, card = read(device)
    except Exception as error:
        if not out_of_memory(error):
            raise
        return None
    return Network(forward, card, device, dtype)


def _drop_all(device: torch.device) -> None:
    for key in [key for key, held in _networks.items() if held.device == device]:
        del _networks[key]
    release(device)


def release(device: torch.device) -> None:
    """Give back the memory of what was dropped: modules hold one another, and frozen cycles are never collected."""
    global _frozen
    if _frozen:
        gc.unfreeze()
        _frozen = False
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
