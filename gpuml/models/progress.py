"""How many bytes of a long download have come -> one line that rewrites itself, where somebody looks on."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

#: What takes less is not worth a line; and how often the line changes.
AFTER_SECONDS = 1.0
EVERY_SECONDS = 0.2


class Progress:
    """A line on stderr, if that is a terminal or a notebook; it ends with the block."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._out: TextIO | None = sys.stderr if _is_watched(sys.stderr) else None
        self._start = time.monotonic()
        self._next = self._start + AFTER_SECONDS
        self._first: int | None = None
        self._line = ""

    def at(self, done: int, total: int | None) -> None:
        """Say that `done` bytes of `total` are here, if it is time to."""
        now = time.monotonic()
        if self._first is None or done < self._first:  # what an earlier process brought is no speed of ours
            self._first = done
        if self._out is None or (now < self._next and not (self._line and done == total)):
            return
        self._next = now + EVERY_SECONDS
        of = f" of {total / 1e6:.1f}" if total else ""
        speed = (done - self._first) / 1e6 / max(now - self._start, 1e-3)
        line = f"{self._what}: {done / 1e6:.1f}{of} MB, {speed:.1f} MB/s"
        self._out.write("\r" + line.ljust(len(self._line)))  # over what the longer line before left
        self._out.flush()
        self._line = line

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._out is not None and self._line:
            self._out.write("\n")
            self._out.flush()


def _is_watched(out: TextIO | None) -> bool:
    """A notebook's stderr says that it is no terminal; it shows a carriage return as one does."""
    return out is not None and (out.isatty() or type(out).__module__.startswith("ipykernel."))
