"""What the ``model`` Param says -> the content hash of one model file in the cache."""

from __future__ import annotations

import difflib
import re
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.error import URLError

import torch
import torchvision
from torch import nn

from gpuml.errors import ModelError
from gpuml.models import store
from gpuml.models.file import read_card, rewrite, save_model
from gpuml.spec import Preprocess
from gpuml.version import __version__

ZOO = "torchvision:"


def resolve(model: str, weights: str = "", labels: Sequence[str] = (), preprocess: Preprocess | None = None) -> str:
    """Make sure that the model file of a source is in the cache; returns its sha256.

    Parameters
    ----------
    model : ``torchvision:<name>``, the path of a model file, or ``sha256:<hex>`` of one in the cache.
    weights : for the zoo: ``""`` its best, a weights name, ``"none"`` random (seeded by the model's name), or the path
        of a state dict (``.pth`` and the like, or ``.safetensors``).
    labels, preprocess : in place of the model's own; empty and None keep them.

    Raises
    ------
    ModelError
        The source is unknown, cannot be read, or does not fit the weights or labels.
    """
    if model.startswith(ZOO):
        return _from_zoo(model.removeprefix(ZOO), weights, labels, preprocess)
    if weights:
        raise ModelError(f"weights={weights!r} go with a zoo name such as '{ZOO}resnet50', not with model={model!r}")
    if match := re.fullmatch(r"sha256:([0-9a-f]{64})", model):
        return _from_file(store.path_of(match[1]), match[1], labels, preprocess)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:", model) and not model.startswith("file:/"):
        raise ModelError(
            f"model={model!r}: gpuml {__version__} reads '{ZOO}<name>' and paths of model files on the driver; "
            f"download the model first, or write it with gpuml.save_model"
        )
    path = Path(re.sub(r"^file:(//)?(?=/)", "", model)).expanduser()
    if not path.exists() and re.fullmatch(r"[\w-]+", model):
        raise ModelError(_no_source(model))
    if not path.is_file():
        raise ModelError(f"model={model!r}: there is no such file on the driver ({path.absolute()})")
    return _from_file(path, None, labels, preprocess)


def _from_file(path: Path, sha256: str | None, labels: Sequence[str], preprocess: Preprocess | None) -> str:
    """A model file, under another card if labels or preprocessing are given."""
    card = read_card(path)
    wanted = replace(card, labels=tuple(labels) or card.labels, preprocess=preprocess or card.preprocess)
    if wanted == card:
        return sha256 or store.add_copy(path)
    request: dict[str, object] = {"file": sha256 or store.hash_of(path), "card": wanted.to_json(), **_versions()}
    if known := store.recall(request):
        return known
    with store.incoming() as new:
        rewrite(path, new, replace(wanted, gpuml=__version__, torch=torch.__version__))
        sha256 = store.add(new)
    store.remember(request, sha256)
    return sha256


def _from_zoo(name: str, weights: str, labels: Sequence[str], preprocess: Preprocess | None) -> str:
    """A torchvision classification model, exported once per name, weights, labels, preprocessing and versions."""
    if name not in _zoo_names():
        raise ModelError(f"torchvision has no classification model {name!r}.{_did_you_mean(name)}")
    path = Path(weights).expanduser() if weights and _is_path(weights) else None
    entry = None if path or weights == "none" else _weights_entry(name, weights)
    request: dict[str, object] = {
        "zoo": name,
        "weights": f"sha256:{store.hash_of(path)}" if path else str(entry),
        "labels": list(labels),
        "preprocess": preprocess.to_json() if preprocess else None,
        **_versions(),
    }
    if known := store.recall(request):
        return known
    best = torchvision.models.get_model_weights(name)["DEFAULT"]
    categories = (entry or best).meta["categories"]
    net = _zoo_net(name, entry, path, len(labels) or len(categories))
    with store.incoming() as new:
        save_model(net, new, labels=labels or categories, preprocess=preprocess or _zoo_preprocess(name, entry or best))
        sha256 = store.add(new)
    store.remember(request, sha256)
    return sha256


def _zoo_net(name: str, entry: Any, path: Path | None, classes: int) -> nn.Module:
    """The network with the weights of an entry, of a file, or random."""
    if entry is not None:
        return _downloaded(name, entry)
    arguments: dict[str, Any] = {"num_classes": classes}
    if name in ("googlenet", "inception_v3"):
        # Their slow initialisation warns unless chosen; their published weights want the input re-normalised.
        arguments.update(init_weights=False, transform_input=path is not None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(name.encode()))
        net: nn.Module = torchvision.models.get_model(name, weights=None, **arguments)
    if path is not None:
        try:
            net.load_state_dict(_state_dict(path))
        except (RuntimeError, TypeError, AttributeError) as error:
            lines = [line.strip() for line in str(error).splitlines()]
            raise ModelError(
                f"weights={str(path)!r} do not fit {ZOO}{name} with {classes} outputs: {' '.join(lines[:3])[:400]}. "
                f"They must be a state dict of that network; with another number of classes, set labels to their names."
            ) from error
    return net


def _state_dict(path: Path) -> Any:
    """Tensors by name, on the CPU wherever they were saved; runs no code from the file."""
    if path.suffix == ".safetensors":
        try:
            from safetensors.torch import load_file
        except ImportError:
            raise ModelError(f"weights={str(path)!r} need the package safetensors: pip install safetensors") from None
        return load_file(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ModelError(
            f"weights={str(path)!r} is no state dict that can be read safely ({type(error).__name__}); save one with "
            f"torch.save(net.state_dict(), path), or as .safetensors"
        ) from error


def _downloaded(name: str, entry: Any) -> nn.Module:
    try:
        net: nn.Module = torchvision.models.get_model(name, weights=entry)
    except (URLError, OSError, RuntimeError) as error:
        folder = Path(torch.hub.get_dir()) / "checkpoints"
        raise ModelError(
            f"the weights {entry} of {ZOO}{name} cannot be downloaded ({error}). Put {Path(entry.url).name} from "
            f"{entry.url} into {folder}, or set weights to the path of a state dict, or to 'none' for random weights."
        ) from error
    return net


def _weights_entry(name: str, weights: str) -> Any:
    """An entry of the zoo's weights: "" is its best."""
    entries = torchvision.models.get_model_weights(name)
    short = weights.rpartition(".")[2] or "DEFAULT"
    if short not in entries.__members__:
        raise ModelError(
            f"weights={weights!r}: {ZOO}{name} has {', '.join(entries.__members__)}; or give '' for the best, 'none' "
            f"for random weights, or the path of a state dict"
        )
    return entries[short]


def _is_path(weights: str) -> bool:
    return "/" in weights or "\\" in weights or Path(weights).suffix in (".pth", ".pt", ".bin", ".safetensors")


def _zoo_preprocess(name: str, entry: Any) -> Preprocess:
    """torchvision's preset as a Preprocess."""
    preset = entry.transforms()
    resize, crop = tuple(preset.resize_size), tuple(preset.crop_size)
    return Preprocess(
        resize=resize[0] if len(resize) == 1 else resize,
        crop=crop[0] if len(crop) == 1 else crop,
        mean=tuple(preset.mean),
        std=tuple(preset.std),
        interpolation=preset.interpolation.value,
        antialias=bool(preset.antialias),
    )


def _zoo_names() -> list[str]:
    return list(torchvision.models.list_models(module=torchvision.models))


def _did_you_mean(name: str) -> str:
    close = difflib.get_close_matches(name, _zoo_names(), n=3)
    return f" Did you mean {' or '.join(repr(ZOO + match) for match in close)}?" if close else ""


def _no_source(model: str) -> str:
    """A bare name: never guessed, since it could be the zoo's or a file's."""
    close = difflib.get_close_matches(model, _zoo_names(), n=1)
    return f"model={model!r} has no source. Did you mean '{ZOO}{close[0] if close else model}' or './{model}.pt2'?"


def _versions() -> dict[str, object]:
    return {"torch": torch.__version__, "torchvision": torchvision.__version__, "gpuml": __version__}
