"""``torchvision:<name>`` -> a detection model of torchvision's zoo, with the categories of its weights."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn

from gpuml.errors import ModelError
from gpuml.models.export import plain_torch
from gpuml.models.found import Built, Found, did_you_mean
from gpuml.models.store import hash_of
from gpuml.models.weights import load_weights, state_dict, weights_path
from gpuml.models.zoo_torchvision import PREFIX, detection_names, downloaded, names, weights_entry


def find(name: str, weights: str, labels: Sequence[str]) -> Found:
    """A detection model with the weights that a Param names, as `zoo_torchvision.find` has it.

    Raises
    ------
    ModelError
        There is no such model, or no such weights; or labels of another number than the weights' categories.
    """
    if name in names():
        raise ModelError(f"model='{PREFIX}{name}' gives classes and no boxes: ImageClassifier(model='{PREFIX}{name}')")
    if name not in detection_names():
        raise ModelError(f"torchvision has no detection model {name!r}.{did_you_mean(PREFIX, name, detection_names())}")
    path = weights_path(weights)
    entry = None if path or weights == "none" else weights_entry(name, weights)
    about = entry or torchvision.models.get_model_weights(name)["DEFAULT"]
    categories = about.meta["categories"]
    if entry and labels and len(labels) != len(categories):  # before a download of hundreds of MB
        raise ModelError(
            f"{len(labels)} labels for the weights {entry} with {len(categories)} categories, the background among "
            f"them; give one label per category, in order, or weights='none' or your own state dict for a network with "
            f"{len(labels)} categories"
        )

    def build() -> Built:
        return Built(_network(name, entry, path, len(labels) or len(categories)), tuple(categories))

    key: dict[str, object] = {
        "zoo": name,
        "weights": f"sha256:{hash_of(path)}" if path else str(entry),
        "torchvision": torchvision.__version__,
    }
    return Found(key, build)


def _network(name: str, entry: Any, path: Path | None, categories: int) -> nn.Module:
    """The network with the weights of an entry, of a file, or random; nothing else is downloaded."""
    if entry is not None:
        return downloaded(name, entry)
    state = None if path is None else state_dict(path)
    with plain_torch():
        torch.default_generator.manual_seed(zlib.crc32(name.encode()))  # torch.manual_seed seeds the GPUs too
        net: nn.Module = torchvision.models.get_model(name, weights=None, weights_backbone=None, num_classes=categories)
        if state is not None and path is not None:
            load_weights(net, state, path, f"{PREFIX}{name}", categories)
    return net
