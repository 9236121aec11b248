"""Moments of a call, on the host or on a GPU's stream -> seconds that each row took in each stage."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

#: Stages of a row in `Scores.seconds`: its own decoding and resizing, its share of a copy to the GPU and of a forward
#: pass.
STAGES = ("decode", "resize", "copy", "compute")

#: Seconds on the host's clock, or a place in the work of a GPU's stream.
Moment = float | torch.cuda.Event


def now(stream: torch.cuda.Stream | None) -> Moment:
    """This moment; with a stream, when the GPU gets there."""
    if stream is None:
        return time.perf_counter()
    # Blocking: a host that waits for it sleeps, and would hold its core otherwise.
    event = torch.cuda.Event(enable_timing=True, blocking=True)
    event.record(stream)
    return event


def wait(moment: Moment) -> None:
    """Until the GPU has got there."""
    if isinstance(moment, torch.cuda.Event):
        moment.synchronize()


@dataclass(frozen=True)
class Part:
    """A forward pass over some rows: when its copy and its computation began and ended."""

    rows: int
    copy: tuple[Moment, Moment]
    compute: tuple[Moment, Moment]

    def shares(self) -> tuple[float, float]:
        """Seconds of the copy and of the computation, for each row; the part must have ended."""
        return _seconds(*self.copy) / self.rows, _seconds(*self.compute) / self.rows


def _seconds(begin: Moment, end: Moment) -> float:
    if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return float(begin.elapsed_time(end)) / 1000
    assert isinstance(begin, float)
    assert isinstance(end, float)
    return end - begin
