"""Scores of a call -> a stage's output columns, rows laid back in order around the failed ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gpuml.errors import RowError
from gpuml.models.cards import Card
from gpuml.spec import Spec
from gpuml.worker import boxes
from gpuml.worker.runner import Scores
from gpuml.worker.timing import STAGES


def columns(scores: Scores, card: Card, spec: Spec, device: str, waited: float | None = None) -> dict[str, Any]:
    """The columns that ``spec.outputs`` names, each as long as the input; None (NaN for a number) where a row failed.

    ``prediction`` float64 index, ``predictedLabel`` str, ``probability``, ``rawPrediction`` and ``features`` float32
    (width,) per row, ``topLabels`` and ``topProbabilities`` lists in falling order, ``error`` str, ``device`` str,
    ``timing`` float64 (5,) per row: milliseconds of the feed (`waited` seconds for the whole call, NaN where that is
    None) and of `gpuml.worker.timing.STAGES`.
    """
    rows = len(scores.reasons)
    scores, probabilities = _numbers_only(scores, activate(scores.outputs, card.activation))
    indices = probabilities.argmax(1)
    made: dict[str, Any] = {}
    for name in spec.outputs:
        if name == "error":
            made[name] = scores.reasons
        elif name == "device":
            made[name] = [device] * rows
        elif name == "timing":
            feed = np.full((len(scores.good), 1), np.nan if waited is None else waited / max(rows, 1))
            made[name] = _around(scores, list(1000 * np.hstack([feed, scores.seconds])))
        elif name == "prediction":
            prediction = np.full(rows, np.nan)
            prediction[scores.good] = indices
            made[name] = prediction
        elif name == "predictedLabel":
            made[name] = _around(scores, [_label(card, index) for index in indices.tolist()])
        elif name == "probability":
            made[name] = _around(scores, list(probabilities))
        elif name == "rawPrediction":
            made[name] = _around(scores, list(scores.outputs))
        elif name == "features":
            made[name] = _around(scores, list(_unit(scores.outputs) if spec.normalize else scores.outputs))
        elif name in ("topLabels", "topProbabilities"):
            top = _top(probabilities, spec.top_k)
            if name == "topLabels":
                values = [[_label(card, index) for index in row] for row in top.tolist()]
            else:
                values = np.take_along_axis(probabilities, top, 1).astype(np.float64).tolist()
            made[name] = _around(scores, values)
        else:
            raise ValueError(f"no output is called {name!r}")
    return made


def plain(made: dict[str, Any], field: str) -> Any:
    """One output column of a stage, of what `columns` made: a value per row; of a struct, dicts."""
    if field == "timing":
        names = ("feed", *STAGES)
        return [
            row if row is None else {n: None if v != v else float(v) for n, v in zip(names, row, strict=True)}
            for row in made["timing"]
        ]
    if field == "detections":
        return boxes.plain(made)
    if field != "topK":
        return made[field]
    return [
        None if labels is None else [{"label": a, "probability": b} for a, b in zip(labels, values, strict=True)]
        for labels, values in zip(made["topLabels"], made["topProbabilities"], strict=True)
    ]


def _numbers_only(scores: Scores, probabilities: Any) -> tuple[Scores, Any]:
    """A row with NaN among its probabilities fails: argmax would name some class for it, without a word."""
    bad = np.isnan(probabilities).any(1)
    if not bad.any():
        return scores, probabilities
    reasons = list(scores.reasons)
    for place in np.flatnonzero(bad).tolist():
        reasons[scores.good[place]] = str(RowError("bad_value", "the model gave NaN for this image"))
    good = [row for row, failed in zip(scores.good, bad.tolist(), strict=True) if not failed]
    return Scores(scores.outputs[~bad], good, reasons, scores.seconds[~bad]), probabilities[~bad]


def activate(outputs: Any, activation: str) -> Any:
    """The model's output, float32 (n, width) -> probabilities, by the model file's activation."""
    if activation == "softmax":
        return torch.softmax(torch.from_numpy(outputs), 1).numpy()
    if activation == "sigmoid":
        return torch.sigmoid(torch.from_numpy(outputs)).numpy()
    return outputs


def _top(probabilities: Any, k: int) -> Any:
    """Indices of the k largest per row, falling; equal values in the order of their index, as argmax has it."""
    return np.argsort(-probabilities, axis=1, kind="stable")[:, :k]


def _unit(vectors: Any) -> Any:
    """Rows of Euclidean length 1, float32 (n, width); zeros stay."""
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    return (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32)


def _label(card: Card, index: int) -> str:
    return card.labels[index] if card.labels else str(index)


def _around(scores: Scores, values: list[Any]) -> list[Any]:
    laid: list[Any] = [None] * len(scores.reasons)
    for row, value in zip(scores.good, values, strict=True):
        laid[row] = value
    return laid
