"""``timm:<name>`` -> a model of timm, with its labels and its data configuration as a Preprocess."""

from __future__ import annotations

import importlib
import math
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gpuml.errors import ModelError
from gpuml.models.export import plain_torch, telling_lines
from gpuml.models.found import Built, Found, did_you_mean
from gpuml.models.store import hash_of
from gpuml.models.weights import load_weights, no_code, state_dict, weights_path
from gpuml.spec import Preprocess

PREFIX = "timm:"


def find(name: str, weights: str, labels: Sequence[str]) -> Found:
    """A model of timm with the weights that a Param names: "" its pretrained ones, "none", or a state dict's path.

    Parameters
    ----------
    name : as ``timm.list_models()`` has it, with or without the tag of its weights: ``resnet50.a1_in1k``.

    Raises
    ------
    ModelError
        timm is not installed; there is no such model, or no such weights; it has no classes, or takes no RGB images; or
        labels of another number than the pretrained outputs.
    """
    timm = _timm()
    if name not in names():
        raise ModelError(f"timm {timm.__version__} has no model {name!r}.{did_you_mean(PREFIX, name, names())}")
    config = timm.models.get_pretrained_cfg(name) or timm.models.PretrainedCfg()  # none: registered by the user
    path = weights_path(weights)
    pretrained = path is None and weights != "none"
    if pretrained:
        _check_pretrained(name, weights, config, labels)
    if config.input_size[0] != 3:
        raise ModelError(f"{PREFIX}{name} takes {config.input_size[0]} channels; images have 3")
    classes = (not pretrained and len(labels)) or config.num_classes
    if not classes:
        raise ModelError(
            f"{PREFIX}{name} gives features, not classes (its num_classes is 0). Choose a tag with classes; or set "
            f"labels, with weights to the path of a state dict for that many classes; or use "
            f"from_module(timm.create_model({name!r}, ...), ...)"
        )
    network = partial(_pretrained, name, config) if pretrained else partial(_own, name, path, classes)

    def build() -> Built:
        net = network()
        preprocess, reason = _preset_or_reason(timm.data.resolve_model_data_config(net))
        return Built(net, _class_names(classes), preprocess, no_preprocess=reason)

    key: dict[str, object] = {
        "zoo": f"{PREFIX}{name}",
        "weights": f"sha256:{hash_of(path)}" if path else weights,
        "timm": timm.__version__,
    }
    return Found(key, build)


def preset(config: Mapping[str, Any]) -> Preprocess:
    """timm's evaluation transform for a data configuration, as a Preprocess: its pixels, but for rounding.

    Parameters
    ----------
    config : what ``timm.data.resolve_data_config`` returns.

    Raises
    ------
    ModelError
        The transform pads, or resizes by a rule that a Preprocess does not have.
    """
    size = tuple(config["input_size"][1:])
    # timm's transforms_imagenet_eval rounds down too: 224 / 0.95 is 235.
    resize = tuple(math.floor(length / config["crop_pct"]) for length in size)
    squash = config["crop_mode"] == "squash"
    if config["crop_mode"] not in ("center", "squash"):
        raise ModelError(f"its crop_mode {config['crop_mode']!r} pads the image, which no Preprocess does")
    if not squash and size[0] != size[1]:
        raise ModelError(f"its crop of {size} from an image resized to cover {resize} is no rule of a Preprocess")
    try:
        return Preprocess(
            resize=resize if squash else resize[0],
            crop=None if resize == size and squash else size,
            mean=tuple(config["mean"]),
            std=tuple(config["std"]),
            interpolation=config["interpolation"],
        )
    except ValueError as error:  # another interpolation; a crop larger than the resize, which timm pads
        raise ModelError(f"its data configuration maps onto no Preprocess ({error})") from error


def names() -> list[str]:
    """Every name that timm knows: architectures, and architectures with the tag of their weights."""
    timm = _timm()
    return sorted({*timm.list_models(), *timm.list_models(include_tags=True)})


def _timm() -> Any:
    try:
        return importlib.import_module("timm")
    except ImportError as error:
        raise ModelError(f"model='{PREFIX}...' needs timm ({error}): pip install 'gpuml[timm]'") from error


def _check_pretrained(name: str, weights: str, config: Any, labels: Sequence[str]) -> None:
    """Refuse before a download of hundreds of MB."""
    if weights:
        architecture = name.split(".")[0]
        tagged = [match for match in _timm().list_pretrained(f"{architecture}.*") if "." in match]
        known = f": {', '.join(repr(PREFIX + match) for match in tagged)}" if tagged else f"; {architecture} has none"
        raise ModelError(
            f"weights={weights!r}: timm's weights are tags of the model's name{known}. Else give weights='none' for "
            f"random weights, or the path of a state dict"
        )
    if not config.has_weights:
        raise ModelError(
            f"timm has no pretrained weights for {name!r}: set weights to the path of a state dict, or to 'none' for "
            f"random weights"
        )
    if labels and config.num_classes and len(labels) != config.num_classes:
        raise ModelError(
            f"{len(labels)} labels for {PREFIX}{name} with {config.num_classes} outputs; give one label per output, in "
            f"order, or weights='none' or your own state dict for a network with {len(labels)} outputs"
        )


def _pretrained(name: str, config: Any) -> nn.Module:
    try:
        with plain_torch(), no_code():
            net: nn.Module = _timm().create_model(name, pretrained=True)
    except Exception as error:  # the hub's errors, the network's, and what reading a damaged file may raise
        raise ModelError(
            f"the weights of {PREFIX}{name} cannot be had ({telling_lines(error)}). {_by_hand(config)}; or set weights "
            f"to the path of another state dict, or to 'none' for random weights"
        ) from error
    return net


def _by_hand(config: Any) -> str:
    """How a file that cannot be downloaded gets to where timm looks for it."""
    if config.hf_hub_id:
        repository = config.hf_hub_id.split("@")[0]
        file = config.hf_hub_filename or "model.safetensors"
        return (
            f"Where there is a network, run 'hf download {repository}' and copy the hub's cache folder (HF_HOME) here; "
            f"or get https://huggingface.co/{repository}/resolve/main/{file} and set weights to its path"
        )
    file = Path(torch.hub.get_dir()) / "checkpoints" / Path(config.url).name
    return f"{file} may be damaged: delete it" if file.exists() else f"Put {config.url} at {file}"


def _own(name: str, path: Path | None, classes: int) -> nn.Module:
    """The network with the weights of a file, or random ones."""
    with plain_torch():
        torch.default_generator.manual_seed(zlib.crc32(name.encode()))  # torch.manual_seed seeds the GPUs too
        net: nn.Module = _timm().create_model(name, pretrained=False, num_classes=classes)
        if path is not None:
            load_weights(net, state_dict(path), path, f"{PREFIX}{name}", classes)
    return net


def _preset_or_reason(config: Mapping[str, Any]) -> tuple[Preprocess | None, str]:
    try:
        return preset(config), ""
    except ModelError as error:
        return None, str(error)


def _class_names(classes: int) -> tuple[str, ...]:
    """ImageNet's names, by the number of classes as timm itself infers them; none for other numbers."""
    data = importlib.import_module("timm.data")
    subset = data.infer_imagenet_subset({"num_classes": classes})
    return tuple(data.ImageNetInfo(subset).label_descriptions()) if subset else ()
