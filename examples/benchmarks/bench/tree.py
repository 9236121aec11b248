"""A process -> what it and all its descendants use: CPU seconds, and memory that they share counted once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psutil


def cpu_seconds(pid: int) -> float:
    """User and system time of the processes alive, and of those that ended and were waited for.

    A process that ends while it belongs to another one than its parent is lost; the workers here stay alive.
    """
    return _sum(pid, lambda process: sum(process.cpu_times()[:4]))


def memory(pid: int) -> int:
    """Bytes: proportional set sizes. Resident ones would count what forked workers share once for each."""
    return int(_sum(pid, lambda process: process.memory_full_info().pss))


def end(pid: int) -> None:
    """Kill what is left of a tree that did not end by itself."""
    for process in _tree(pid):
        with contextlib.suppress(psutil.Error):
            process.kill()


@contextlib.contextmanager
def peak_memory(pid: int) -> Iterator[list[int]]:
    """Appends to the list it gives, twice a second; looking costs CPU, so not in what is timed."""
    seen = [memory(pid)]
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.5):
            seen.append(memory(pid))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


def _sum(pid: int, value: Callable[[psutil.Process], Any]) -> float:
    total = 0.0
    for process in _tree(pid):
        with contextlib.suppress(psutil.Error):  # it ended while we looked
            total += value(process)
    return total


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
