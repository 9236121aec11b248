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
    ours : gpuml's passes in the same rounds.
    start : a pass of 8 images, of a peer that starts its processes in each pass; `passes` include as much.
    first_seconds : of the first pass: loading, starting workers, compiling.
    memory : peak bytes of the process tree, in an untimed pass.
    agreement : part of the labels that are the reference's.
    clear_agreement : the same among images whose two largest reference probabilities are at least 0.1 apart.
    """

    passes: list[Pass] = field(default_factory=list)
    ours: list[Pass] = field(default_factory=list)
    start: Pass | None = None
    first_seconds: float = 0
    memory: int = 0
    agreement: float = 0
    clear_agreement: float = 0
    failed: str = ""

    def steady(self, one: Pass) -> Pass:
        """A pass less its start: what a job would do that is so long that the start does not count.

        More than that peer can do, in fact: it works while its processes start.
        """
        if not self.start:
            return one
        # Where a pass is hardly longer than the start, its images took no time that could be told.
        return Pass(one.images, max(one.seconds - self.start.seconds, one.seconds / 100), one.cpu_seconds)


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


def limit(results: dict[str, Result]) -> str | None:
    """The plain PyTorch loop with the higher median rate."""
    loops = [name for name, result in results.items() if name.startswith("limit_") and result.passes]
    return max(loops, key=lambda name: statistics.median(one.rate for one in results[name].passes), default=None)


def table(results: dict[str, dict[str, Result]]) -> str:
    """Markdown: a row for each workload and peer."""
    lines = [
        "| Workload | Peer | Images | Images/s | gpuml / peer | CPU-ms an image | Memory, GB | Equal labels, % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for workload, peers in results.items():
        best = limit(peers)
        lines += [_row(workload, name, result, name == best) for name, result in peers.items()]
    return "\n".join(lines)


def _row(workload: str, name: str, result: Result, is_limit: bool) -> str:
    shown = f"**{name}**, the limit" if is_limit else name
    if result.start:
        shown += f", {result.start.seconds:.1f} s of each pass to start"
    if result.failed:
        return f"| {workload} | {shown} | | {result.failed.replace('|', '/')} | | | | |"
    ratio = ""
    if name != "gpuml" and len(result.ours) == len(result.passes):  # gpuml was asked for, and did not fail
        ratio = f"{spread(ratios(result.ours, result.passes)):.2f}"
        # Of shorter passes, what is left of them is less than the start varies by.
        if result.start and all(one.seconds >= 2 * result.start.seconds for one in result.passes):
            steady = [result.steady(one) for one in result.passes]
            ratio += f"; without its start {spread(ratios(result.ours, steady)):.2f}"
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
        made[workload] = {"limit": limit(peers)}
        for name, result in peers.items():
            row = {key: value for key, value in vars(result).items() if key not in ("passes", "ours", "start")}
            row["start"] = result.start and vars(result.start)
            row["passes"] = [vars(one) for one in result.passes]
            row["gpumls_passes"] = [vars(one) for one in result.ours]
            if name != "gpuml" and len(result.ours) == len(result.passes):
                steady = [result.steady(one) for one in result.passes]
                row["gpuml_over_this"] = ratios(result.ours, result.passes)
                row["gpuml_over_this_without_start"] = ratios(result.ours, steady)
            made[workload][name] = row
    return made
