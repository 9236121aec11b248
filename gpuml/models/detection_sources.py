"""What an ObjectDetector's ``model`` Param says -> the content hash of one model file in the cache."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from gpuml.errors import ModelError
from gpuml.models import store, zoo_detection
from gpuml.models.cards import CARD, DetectionCard, checked_kind
from gpuml.models.detection import save_detector
from gpuml.models.file import find_card, open_program, write
from gpuml.models.found import Found, did_you_mean
from gpuml.models.sources import ZOOS, from_place, local_weights, refuse_weights, request_of
from gpuml.models.weights import local_path
from gpuml.models.zoo_torchvision import PREFIX, detection_names
from gpuml.spec import PYTHON
from gpuml.version import __version__


def resolve(model: str, weights: str = "", labels: Sequence[str] = ()) -> str:
    """Make sure that the model file of a source is in the cache; returns its sha256.

    Parameters
    ----------
    model : ``torchvision:<name>`` of a detection model; the path, or the http(s) URL, of a file of
        `gpuml.save_detector`; or ``sha256:<hex>`` of one in the cache.
    weights : as of `gpuml.models.sources.resolve`.
    labels : in place of the model's own; empty keeps them.

    Raises
    ------
    ModelError
        The source is unknown, cannot be read, finds no objects, or does not fit the weights or labels.
    """
    if model.startswith(PREFIX):
        with local_weights(weights) as near:
            return _from_zoo(zoo_detection.find(model.removeprefix(PREFIX), near, labels), labels)
    if model.startswith((*ZOOS, PYTHON)):
        raise ModelError(
            f"model={model!r}: an ObjectDetector runs torchvision's detection models and files of gpuml.save_detector. "
            f"Write a network of your own once: gpuml.save_detector(net, 'net.pt2', labels=[...])"
        )
    refuse_weights(model, weights, f"{PREFIX}fasterrcnn_resnet50_fpn")
    if re.fullmatch(r"[\w-]+", model) and not local_path(model).exists():
        hint = did_you_mean(PREFIX, model, detection_names()) or f" Did you mean './{model}.pt2'?"
        raise ModelError(f"model={model!r} has no source.{hint}")
    return from_place(model, partial(_from_file, labels=tuple(labels)))


def _from_zoo(found: Found, labels: Sequence[str]) -> str:
    """A zoo's model, scripted once per key, labels and versions."""

    def write_new(new: Path) -> None:
        built = found.build()
        save_detector(built.net, new, labels or built.labels)

    return store.once(request_of({**found.key, "kind": "detection"}, labels, None), write_new)


def _from_file(
    path: Path, *, labels: tuple[str, ...], sha256: str | None = None, add: Callable[[Path], str] = store.add
) -> str:
    """A model file as it is, or with other labels."""
    found = find_card(path)
    if found is None:
        raise ModelError(
            f"{path} has no {CARD} inside, so its labels are unknown; write it with gpuml.save_detector(net, path, "
            f"labels=[...])"
        )
    card = checked_kind(found, DetectionCard, str(path))
    if labels in ((), card.labels):
        return sha256 or add(path)

    def rewrite(new: Path) -> None:
        if card.labels and len(card.labels) != len(labels):
            raise ModelError(f"{len(labels)} labels in place of the {len(card.labels)} of {path}; give as many")
        program = open_program(path)[2]
        write(program, new, replace(card, labels=labels, gpuml=__version__, torch=torch.__version__))

    request = request_of({"file": sha256 or store.hash_of(path), "kind": "detection"}, labels, None)
    return store.once(request, rewrite)
