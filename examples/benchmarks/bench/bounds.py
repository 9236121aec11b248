"""Measured passes -> figures beside the bounds that they must keep, in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.report import Pass, spread


@dataclass(frozen=True)
class Verdict:
    """A figure and the bound that it must keep: "at least" or "at most" `limit`."""

    figure: float
    bound: str
    limit: float
    form: str = ".2f"

    @property
    def holds(self) -> bool:
        return self.figure >= self.limit if self.bound == "at least" else self.figure <= self.limit

    def __str__(self) -> str:
        shown = f"{self.figure:{self.form}}"
        return shown if self.holds else f"**{shown}, broken**"


@dataclass
class Table:
    """What was seen. The bounds of a row's verdicts stand in a last column."""

    title: str
    header: list[str]
    rows: list[list[str | Verdict]] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return all(cell.holds for row in self.rows for cell in row if isinstance(cell, Verdict))

    def text(self) -> str:
        """In Markdown."""
        lines = [[*self.header, "Bound"], ["---"] * (len(self.header) + 1)]
        for row in self.rows:
            bounds = [f"{cell.bound} {cell.limit:g}" for cell in row if isinstance(cell, Verdict)]
            lines.append([*map(str, row), "; ".join(bounds)])
        return "\n".join([f"### {self.title}", "", *(f"| {' | '.join(line)} |" for line in lines)])


def rate(passes: Sequence[Pass]) -> float:
    """Images per second, the median."""
    return statistics.median(one.rate for one in passes)


def shown(passes: Sequence[Pass]) -> list[str]:
    """Cells: images per second, CPU-ms an image."""
    cpu = spread([1000 * one.cpu_seconds / one.images for one in passes])
    return [f"{spread([one.rate for one in passes]):,.0f}", f"{cpu:.2f}"]


def task_ms(few: Pass, many: Pass, more: int, cores: int) -> float:
    """What a task costs a core, in ms, from two passes over the same images, of which one has so many tasks more."""
    return 1000 * cores * (many.seconds - few.seconds) / more if more else 0
