"""Measured passes -> medians, spread, paired ratios, and the tables in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Pass:
    """One timed pass over `images` images: wall seconds, and CPU seconds of the whole process tree."""

    images: int
    seconds: float
    cpu_seconds: float

    @property
    def rate(self) -> float:
        """Images per second."""
        return self.images / self.seconds


@dataclass
class Result:
    """What was seen of a peer in a workload; `failed` says why there is nothing.

    Parameters
    ----------
    images : in a pass.
    start : a pass of 8 images, of a peer that starts its processes in each pass; `passes` include as much.
    note : what the peer says of itself.
    memory : peak bytes of the process tree, in an untimed pass.
    agreement : part of the labels that are the reference's.
    clear_agreement : the same among images whose two largest reference probabilities are at least 0.1 apart.
    """

    passes: list[Pass] = field(default_factory=list)
    images: int = 0
    start: Pass | None = None
    note: str = ""
    memory: int = 0
    agreement: float = 0
    clear_agreement: float = 0
    failed: str = ""

    def steady(self) -> list[Pass] | None:
        """The passes less the start: what a job would do that is so long that the start does not count.

        More than that peer can do, in fact: it works while its processes start. None without a start, or where passes
        are less than twice as long: what is left of them would be less than the start varies by.
        """
        start = self.start
        if start is None or any(one.seconds < 2 * start.seconds for one in self.passes):
            return None
        return [Pass(one.images, one.seconds - start.seconds, one.cpu_seconds) for one in self.passes]


@dataclass(frozen=True)
class Spread:
    """Median, least and most of some numbers."""

    median: float
    least: float
    most: float

    def __format__(self, spec: str) -> str:
        return f"{self.median:{spec}} ({self.least:{spec}} to {self.most:{spec}})"


def spread(numbers: Sequence[float]) -> Spread:
    return Spread(statistics.median(numbers), min(numbers), max(numbers))


def ratios(ours: Sequence[Pass], theirs: Sequence[Pass]) -> list[float]:
    """Our rate over theirs, round by round: what slows the whole machine for a while slows both."""
    return [our.rate / their.rate for our, their in zip(ours, theirs, strict=True)]


def table(results: dict[str, dict[str, Result]]) -> str:
    """Markdown: a row for each workload and peer."""
    lines = [
        "| Workload | Peer | Images | Images/s | gpuml / peer | CPU-ms an image | Memory, GB | Equal labels, % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for workload, peers in results.items():
        lines += [_row(workload, name, result, peers.get("gpuml")) for name, result in peers.items()]
    return "\n".join(lines)


def _row(workload: str, name: str, result: Result, gpuml: Result | None) -> str:
    shown = f"{name} ({result.note})" if result.note else name
    if result.start:
        shown += f", {result.start.seconds:.1f} s of each pass to start"
    if result.failed:
        return f"| {workload} | {shown} | | {result.failed.replace('|', '/')} | | | | |"
    over, steady = _over(result, gpuml)
    ratio = f"{spread(over):.2f}" if over else ""
    if steady:
        ratio += f"; without its start {spread(steady):.2f}"
    cpu = spread([1000 * one.cpu_seconds / one.images for one in result.passes])
    cells = [
        workload,
        shown,
        f"{result.passes[0].images:,}",
        f"{spread([one.rate for one in result.passes]):,.0f}",
        ratio,
        f"{cpu:.2f}",
        f"{result.memory / 1e9:.1f}",
        f"{100 * result.agreement:.1f}; {100 * result.clear_agreement:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def _over(result: Result, gpuml: Result | None) -> tuple[list[float], list[float]]:
    """gpuml's rate over a peer's, round by round: of the passes as they were, and of the steady ones; empty: none."""
    if gpuml is None or gpuml is result or gpuml.failed:
        return [], []
    steady = result.steady()
    return ratios(gpuml.passes, result.passes), ratios(gpuml.passes, steady) if steady else []


def stages_table(stages: dict[str, dict[str, float]]) -> str:
    """Markdown: milliseconds an image of each stage, on one thread."""
    names = list(dict.fromkeys(name for row in stages.values() for name in row))
    lines = [f"| Workload | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for workload, row in stages.items():
        lines.append(f"| {workload} | {' | '.join(f'{row[name]:.2f}' for name in names)} |")
    return "\n".join(lines)


def as_json(results: dict[str, dict[str, Result]]) -> dict[str, Any]:
    """All that was seen, pass by pass, with the ratios that the table has."""
    made: dict[str, Any] = {}
    for workload, peers in results.items():
        made[workload] = {}
        for name, result in peers.items():
            row = {**vars(result), "start": result.start and vars(result.start)}
            row["passes"] = [vars(one) for one in result.passes]
            if not result.failed:
                row["gpuml_over_this"], row["gpuml_over_this_without_start"] = _over(result, peers.get("gpuml"))
            made[workload][name] = row
    return made
