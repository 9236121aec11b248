"""A process -> what it and all its descendants use: CPU seconds, and memory with what they share counted once.

Reads /proc, so it runs on Linux only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")


#: Process id -> CPU seconds (user and system) of its own, and of its children that ended and that it waited for.
Times = dict[int, tuple[float, float]]


def times(pid: int) -> Times:
    """Of a process and its descendants, up to now."""
    # Fields 14 to 17 of proc(5)'s stat: utime, stime, cutime, cstime.
    parts = {member: [int(field) / _TICK for field in fields[11:15]] for member, fields in _tree(pid).items()}
    return {
        member: (user + system, by_user + by_system) for member, (user, system, by_user, by_system) in parts.items()
    }


def cpu_seconds(before: Times, after: Times) -> float:
    """CPU seconds that a tree used between two looks at it.

    What ended in between counts if its parent waited for it, and then without what it had used before.
    """
    own = sum(after[pid][0] - before.get(pid, (0, 0))[0] for pid in after)
    ended = sum(after[pid][1] - before.get(pid, (0, 0))[1] for pid in after)
    known = sum(sum(before[pid]) for pid in before if pid not in after)
    return own + max(ended - known, 0)


def memory(pid: int) -> int:
    """Bytes: proportional set sizes. Resident ones count what forked workers share once for each."""
    total = 0
    for member in _tree(pid):
        with contextlib.suppress(OSError):  # it ended while we looked
            for line in Path(f"/proc/{member}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


def end(pid: int) -> None:
    """Kill what is left of a tree that did not end by itself."""
    for member in _tree(pid):
        with contextlib.suppress(OSError):
            os.kill(member, signal.SIGKILL)


@contextlib.contextmanager
def peak_memory(pid: int) -> Iterator[list[int]]:
    """Appends to the list it gives, twice a second; looking costs CPU, so not in what is timed."""
    seen = [memory(pid)]
    with repeated(lambda: seen.append(memory(pid)), 0.5):
        yield seen


@contextlib.contextmanager
def repeated(look: Callable[[], None], seconds: float) -> Iterator[None]:
    """Calls `look` from a thread of its own, so many seconds apart, for as long as the block lasts."""
    done = threading.Event()

    def run() -> None:
        while not done.wait(seconds):
            look()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _tree(pid: int) -> dict[int, list[str]]:
    """Process id -> the fields of its stat from the third, state, on; of `pid` and its descendants."""
    found: dict[int, list[str]] = {}
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The second field is the command in brackets, which may hold brackets and blanks itself.
            fields = path.read_text().rpartition(")")[2].split()
            found[int(path.parent.name)] = fields
            children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    members, ahead = {}, [pid]
    while ahead:
        member = ahead.pop()
        if member in found:
            members[member] = found[member]
            ahead += children.get(member, [])
    return members
