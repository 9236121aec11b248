"""What the ``model`` Param says -> the content hash of one model file in the cache."""

from __future__ import annotations

import difflib
import re
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn

from gpuml.errors import ModelError
from gpuml.models import store
from gpuml.models.export import plain_torch, telling_lines
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
    _check_file(path, f"model={model!r}")
    return _from_file(path, None, labels, preprocess)


def _check_file(path: Path, what: str) -> None:
    """Refuse what is no file, before anything is opened."""
    if not path.is_file():
        problem = "that is a folder" if path.is_dir() else "there is no such file on the driver"
        raise ModelError(f"{what}: {problem} ({path.absolute()})")


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
    if path:
        _check_file(path, f"weights={weights!r}")
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
    if entry and labels and len(labels) != len(categories):  # before a download of hundreds of MB
        raise ModelError(
            f"{len(labels)} labels for the weights {entry} with {len(categories)} outputs; give one label per output, "
            f"in order, or weights='none' or your own state dict for a network with {len(labels)} outputs"
        )
    net = _zoo_net(name, entry, path, len(labels) or len(categories))
    with store.incoming() as new:
        save_model(net, new, labels=labels or categories, preprocess=preprocess or _zoo_preprocess(entry or best))
        sha256 = store.add(new)
    store.remember(request, sha256)
    return sha256


def _zoo_net(name: str, entry: Any, path: Path | None, classes: int) -> nn.Module:
    """The network with the weights of an entry, of a file, or random."""
    if entry is not None:
        return _downloaded(name, entry)
    state = None if path is None else _state_dict(path)
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
        if state is not None:
            try:
                net.load_state_dict(state)
            except RuntimeError as error:
                raise ModelError(
                    f"weights={str(path)!r} do not fit {ZOO}{name} with {classes} outputs: {telling_lines(error)}. "
                    f"They must be a state dict of that network; with other classes, set labels to their names."
                ) from error
    return net


def _state_dict(path: Path) -> dict[str, torch.Tensor]:
    """Tensors by name, on the CPU wherever they were saved; runs no code from the file."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state: Any = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except ImportError:
        raise ModelError(f"weights={str(path)!r} need the package safetensors: pip install safetensors") from None
    except Exception as error:
        raise ModelError(
            f"weights={str(path)!r} is no state dict that can be read safely ({type(error).__name__}); save one with "
            f"torch.save(net.state_dict(), path), or as .safetensors"
        ) from error
    named = isinstance(state, dict) and all(isinstance(name, str) for name in state)
    if not named or not all(isinstance(value, torch.Tensor) for value in state.values()):
        what = f"a dict of {', '.join(map(repr, list(state)[:5]))}" if isinstance(state, dict) else type(state).__name__
        raise ModelError(f"weights={str(path)!r} holds {what}, not tensors by name; save net.state_dict() alone")
    return dict(state)


def _downloaded(name: str, entry: Any) -> nn.Module:
    try:
        with plain_torch():
            net: nn.Module = torchvision.models.get_model(name, weights=entry)
    except Exception as error:  # the network's errors, and what unpickling a damaged file may raise
        file = Path(torch.hub.get_dir()) / "checkpoints" / Path(entry.url).name
        advice = f"{file} is damaged: delete it to download it again" if file.exists() else f"Put {entry.url} at {file}"
        raise ModelError(
            f"the weights {entry} of {ZOO}{name} cannot be had ({telling_lines(error)}). {advice}; or set weights to "
            f"the path of a state dict, or to 'none' for random weights"
        ) from error
    return net


def _weights_entry(name: str, weights: str) -> Any:
    """An entry of the zoo's weights: "" is its best."""
    entries = torchvision.models.get_model_weights(name)
    short = weights.removeprefix(f"{entries.__name__}.") or "DEFAULT"
    if short not in entries.__members__:
        raise ModelError(
            f"weights={weights!r}: {ZOO}{name} has {', '.join(entries.__members__)}; or give '' for the best, 'none' "
            f"for random weights, or the path of a state dict"
        )
    return entries[short]


def _is_path(weights: str) -> bool:
    return "/" in weights or "\\" in weights or Path(weights).suffix in (".pth", ".pt", ".bin", ".safetensors")


def _zoo_preprocess(entry: Any) -> Preprocess:
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
