"""A user's setup function and a device -> the state that it made there, once per process.

Lives in an importable module, as `gpuml.worker.cache` does: in a closure it would be empty in every task.
"""

from __future__ import annotations

import pickle
import threading
from collections import OrderedDict
from typing import Any

import torch

from gpuml.worker.cache import CAPACITY, release

_states: OrderedDict[tuple[str, torch.device], Any] = OrderedDict()
_lock = threading.Lock()


def state(sha256: str, setup: bytes, device: torch.device) -> Any:
    """What ``setup(device)`` gave, called at most once while its state is among the last `CAPACITY`.

    Parameters
    ----------
    sha256 : of `setup`: equal content is one state, whatever UDF or job asks.
    setup : the function, pickled; read only where its state must be made.
    device : a reused worker may be given another GPU by its next task.
    """
    key = (sha256, device)
    with _lock:
        if key in _states:
            _states.move_to_end(key)
            return _states[key]
        while len(_states) >= CAPACITY:
            release(_states.popitem(last=False)[0][1])
        _states[key] = pickle.loads(setup)(device)
        return _states[key]
