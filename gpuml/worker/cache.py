"""(model content, device, dtype) -> the network that this process already holds there.

Lives in an importable module: a cache in a notebook's ``__main__`` would be pickled by value and empty in every task.
"""

from __future__ import annotations

import gc
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gpuml.models.file import Card, load

#: Networks held per process; the least recently used goes first. pyspark's own model cache holds three as well.
CAPACITY = 3


@dataclass
class Network:
    """A model file on a device. `batch_limit` is what fitted into its memory, None until memory ran out."""

    forward: Callable[[torch.Tensor], torch.Tensor]
    card: Card
    device: torch.device
    dtype: str
    batch_limit: int | None = field(default=None)


_networks: OrderedDict[tuple[str, str, str], Network] = OrderedDict()
_lock = threading.Lock()
_frozen = False


def network(sha256: str, device: torch.device, dtype: str, find: Callable[[], Path]) -> Network:
    """The network of a model file on a device, loaded at most once per process.

    Parameters
    ----------
    sha256 : the model file's content hash; equal content is one network, whatever stage asks.
    device, dtype : where and how it runs; a reused worker may be given another GPU by its next task.
    find : path of the file, called only when it must be loaded.
    """
    key = (sha256, str(device), dtype)
    with _lock:
        if key in _networks:
            _networks.move_to_end(key)
            return _networks[key]
        while len(_networks) >= CAPACITY:
            _release(_networks.popitem(last=False)[1].device)
        forward, card = load(find(), device)
        _networks[key] = Network(forward, card, device, dtype)
        return _networks[key]


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


def _release(device: torch.device) -> None:
    """Give a dropped network's memory back: its modules hold one another, and frozen cycles are never collected."""
    global _frozen
    if _frozen:
        gc.unfreeze()
        _frozen = False
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
