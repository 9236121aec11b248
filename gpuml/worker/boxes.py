"""What was found in the pictures of a call -> an ObjectDetector's output columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuml.models.cards import DetectionCard
from gpuml.spec import Spec
from gpuml.worker.detector import Boxes

#: Columns of what was found, each an array per row, and the field of the struct that each makes.
PARTS = {"boxX1": "x1", "boxY1": "y1", "boxX2": "x2", "boxY2": "y2", "boxLabels": "label", "boxScores": "score"}


def columns(
    found: Sequence[Boxes | str], card: DetectionCard, spec: Spec, device: str, waited: float | None = None
) -> dict[str, Any]:
    """The columns that ``spec.outputs`` names, each as long as the input; None where a row failed.

    `PARTS`: float32 (n,) per row, of the labels a list of str. ``error``, ``device`` and ``timing`` as of
    `gpuml.worker.outputs.columns`.
    """
    feed = np.nan if waited is None else waited / max(len(found), 1)

    def value(name: str, boxes: Boxes) -> Any:
        if name == "timing":
            return 1000 * np.array([feed, *boxes.seconds])
        if name == "boxLabels":
            return [_label(card, number) for number in boxes.labels.tolist()]
        return boxes.scores if name == "boxScores" else boxes.corners[:, list(PARTS).index(name)]

    made: dict[str, Any] = {}
    for name in spec.outputs:
        if name == "error":
            made[name] = [row if isinstance(row, str) else None for row in found]
        elif name == "device":
            made[name] = [device] * len(found)
        else:
            made[name] = [None if isinstance(row, str) else value(name, row) for row in found]
    return made


def plain(made: dict[str, Any]) -> list[list[dict[str, Any]] | None]:
    """The column of a detector, of what `columns` made: per row a list of dicts."""
    rows = zip(*(made[name] for name in PARTS), strict=True)
    return [
        None
        if row[0] is None
        else [
            dict(zip(PARTS.values(), box, strict=True))
            for box in zip(*(part if isinstance(part, list) else part.tolist() for part in row), strict=True)
        ]
        for row in rows
    ]


def _label(card: DetectionCard, number: int) -> str:
    return card.labels[number] if 0 <= number < len(card.labels) else str(number)
