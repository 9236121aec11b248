"""Python workers of a local Spark -> the most memory that each held, a few times a second.

Reads /proc, so it runs on Linux only.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench import tree

#: Seconds between two looks at a worker's memory. What lies between them is not missed: the kernel keeps the peak.
LOOK_S = 0.25


@contextlib.contextmanager
def worker_peaks() -> Iterator[dict[int, list[tuple[float, int]]]]:
    """Fills what it gives: process id of a Python worker of Spark's -> (second, peak of resident bytes until then)."""
    seen: dict[int, list[tuple[float, int]]] = {}

    def look() -> None:
        for pid in tree.times(os.getpid()):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended while we looked
                proc = Path(f"/proc/{pid}")
                if b"pyspark.daemon" not in (proc / "cmdline").read_bytes():
                    continue
                status = (proc / "status").read_text()
                (proc / "clear_refs").write_text("5")  # proc(5): the peak, VmHWM, starts anew
                peak = 1024 * int(status.partition("VmHWM:")[2].split()[0])
                seen.setdefault(pid, []).append((time.perf_counter(), peak))

    with tree.repeated(look, LOOK_S):
        yield seen


def quarters(seen: Sequence[tuple[float, int]]) -> list[int]:
    """(second, peak since the one before), ascending -> the peak of each quarter of the time."""
    start, end = seen[0][0], seen[-1][0]
    peaks = [0] * 4
    for second, peak in seen:
        number = min(int(4 * (second - start) / (end - start)), 3)
        peaks[number] = max(peaks[number], peak)
    return peaks
