"""``torchvision:<name>`` -> a classification model of torchvision's zoo, with its categories and its preset."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn

from gpuml.errors import ModelError
from gpuml.models.export import plain_torch, telling_lines
from gpuml.models.found import Built, Found, did_you_mean
from gpuml.models.store import hash_of
from gpuml.models.weights import load_weights, no_code, state_dict, weights_path
from gpuml.spec import Preprocess

PREFIX = "torchvision:"


def find(name: str, weights: str, labels: Sequence[str]) -> Found:
    """A zoo model with the weights that a Param names: "" its best, an entry's name, "none", or a state dict's path.

    Raises
    ------
    ModelError
        There is no such model, or no such weights; or labels of another number than the weights' outputs.
    """
    if name in detection_names():
        raise ModelError(f"model='{PREFIX}{name}' finds objects: ObjectDetector(model='{PREFIX}{name}')")
    if name not in names():
        raise ModelError(f"torchvision has no classification model {name!r}.{did_you_mean(PREFIX, name, names())}")
    path = weights_path(weights)
    entry = None if path or weights == "none" else weights_entry(name, weights)
    about = entry or torchvision.models.get_model_weights(name)["DEFAULT"]
    categories = about.meta["categories"]
    if entry and labels and len(labels) != len(categories):  # before a download of hundreds of MB
        raise ModelError(
            f"{len(labels)} labels for the weights {entry} with {len(categories)} outputs; give one label per output, "
            f"in order, or weights='none' or your own state dict for a network with {len(labels)} outputs"
        )

    def build() -> Built:
        return Built(network(name, entry, path, len(labels) or len(categories)), tuple(categories), preset(about))

    key: dict[str, object] = {
        "zoo": name,
        "weights": f"sha256:{hash_of(path)}" if path else str(entry),
        "torchvision": torchvision.__version__,
    }
    return Found(key, build)


def network(name: str, entry: Any, path: Path | None, classes: int) -> nn.Module:
    """The network with the weights of an entry, of a file, or random."""
    if entry is not None:
        return downloaded(name, entry)
    state = None if path is None else state_dict(path)
    arguments: dict[str, Any] = {"num_classes": classes}
    if name in ("googlenet", "inception_v3"):
        # Their slow initialisation warns unless chosen; their published weights want the input re-normalised. Side
        # outputs serve training alone: the zoo drops them with its weights, so state dicts come with and without.
        arguments.update(init_weights=False, transform_input=state is not None)
        if state is not None:
            arguments["aux_logits"] = any(key.startswith(("aux", "AuxLogits")) for key in state)
    with plain_torch():
        torch.default_generator.manual_seed(zlib.crc32(name.encode()))  # torch.manual_seed seeds the GPUs too
        net: nn.Module = torchvision.models.get_model(name, weights=None, **arguments)
        if state is not None and path is not None:
            load_weights(net, state, path, f"{PREFIX}{name}", classes)
    return net


def downloaded(name: str, entry: Any) -> nn.Module:
    """A network with the weights of an entry, from torch's cache or the web."""
    try:
        with plain_torch(), no_code():
            net: nn.Module = torchvision.models.get_model(name, weights=entry)
    except Exception as error:  # the network's errors, and what unpickling a damaged file may raise
        file = _cached(entry)
        advice = f"{file} is damaged: delete it to download it again" if file.exists() else f"Put {entry.url} at {file}"
        raise ModelError(
            f"the weights {entry} of {PREFIX}{name} cannot be had ({telling_lines(error)}). {advice}; or set weights "
            f"to the path of a state dict, or to 'none' for random weights"
        ) from error
    return net


def _cached(entry: Any) -> Path:
    """Where torch keeps an entry's weights."""
    return Path(torch.hub.get_dir()) / "checkpoints" / Path(entry.url).name


def weights_entry(name: str, weights: str) -> Any:
    """An entry of the zoo's weights: "" is its best."""
    entries = torchvision.models.get_model_weights(name)
    short = weights.removeprefix(f"{entries.__name__}.") or "DEFAULT"
    if short not in entries.__members__:
        raise ModelError(
            f"weights={weights!r}: {PREFIX}{name} has {', '.join(entries.__members__)}; or give '' for the best, "
            f"'none' for random weights, or the path of a state dict"
        )
    return entries[short]


def preset(entry: Any) -> Preprocess:
    """torchvision's preset as a Preprocess."""
    transforms = entry.transforms()
    resize, crop = tuple(transforms.resize_size), tuple(transforms.crop_size)
    return Preprocess(
        resize=resize[0] if len(resize) == 1 else resize,
        crop=crop[0] if len(crop) == 1 else crop,
        mean=tuple(transforms.mean),
        std=tuple(transforms.std),
        interpolation=transforms.interpolation.value,
        antialias=bool(transforms.antialias),
    )


def names() -> list[str]:
    return list(torchvision.models.list_models(module=torchvision.models))


def detection_names() -> list[str]:
    return list(torchvision.models.list_models(module=torchvision.models.detection))
