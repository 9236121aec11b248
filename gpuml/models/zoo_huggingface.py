"""``hf:<org/name>[@revision]`` or ``hf:<folder>`` -> an image classifier of Hugging Face's transformers."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import nn

from gpuml.errors import ModelError
from gpuml.models.export import plain_torch, telling_lines
from gpuml.models.found import Built, Found
from gpuml.models.huggingface_preset import preset
from gpuml.models.store import hash_of
from gpuml.models.weights import no_code
from gpuml.spec import Preprocess

PREFIX = "hf:"

#: ImageNet-21k has 21,843 classes. transformers makes a name for each of as many as a config.json says.
_MOST_LABELS = 10**6


class Logits(nn.Module):
    """The tensor of logits that an image classifier of transformers wraps into an output object."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.net(rows, return_dict=True).logits
        return logits


@dataclass(frozen=True)
class _Source:
    """Where a checkpoint is: a folder's path, or a repository of the hub and its revision."""

    text: str
    place: str
    revision: str | None
    is_folder: bool

    def help(self) -> str:
        """What to do when it cannot be had."""
        if self.is_folder:
            return "A checkpoint folder is written by net.save_pretrained(folder) and processor.save_pretrained(folder)"
        revision = f" --revision {self.revision}" if self.revision else ""
        download = f"hf download {self.place}{revision} --local-dir folder"
        return f"Where there is a network, run '{download}', bring the folder here and give model='{PREFIX}./folder'"


def find(name: str, weights: str, labels: Sequence[str]) -> Found:
    """An image-classification checkpoint of the hub, or of a folder. No code of the checkpoint's runs.

    Parameters
    ----------
    name : ``org/name``, ``org/name@revision``, or the path of a folder: ``./folder``, ``/folder``.
    weights : ``""``: a checkpoint holds its own.

    Raises
    ------
    ModelError
        transformers is not installed; the checkpoint cannot be had, wants code of its own, or is no image classifier;
        weights are given; or labels of another number than the checkpoint's classes.
    """
    source = _source(name)
    if weights:
        raise ModelError(
            f"weights={weights!r}: the checkpoint {source.text} holds its own. For others, write a checkpoint folder "
            f"with net.save_pretrained(folder) and give model='{PREFIX}./folder', or use from_module(net, ...)"
        )
    transformers = _transformers()
    file = _config_file(source)
    # From here on by the commit: a branch that moves meanwhile gives what the key says.
    pinned = source if source.is_folder else replace(source, revision=file.parent.name)
    config = _config(source, file)
    if source.is_folder:
        _check_folder(source, config)
    if labels and len(labels) != config.num_labels:  # before a download of hundreds of MB
        counts = f"{len(labels)} labels for {source.text} with {config.num_labels} outputs"
        raise ModelError(f"{counts}; give one label per output, in order")
    names = () if labels else _class_names(config, source)

    def build() -> Built:
        preprocess, reason = _preprocess_of(pinned)
        return Built(Logits(_network(pinned, config)), names, preprocess, _activation(config), reason)

    key: dict[str, object] = {
        "zoo": f"sha256:{_hash_of_folder(Path(source.place))}" if source.is_folder else f"{PREFIX}{source.place}",
        "commit": pinned.revision,
        "transformers": transformers.__version__,
    }
    return Found(key, build)


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ModelError(f"model='{PREFIX}...' needs transformers ({error}): pip install 'gpuml[hf]'") from error


def _source(name: str) -> _Source:
    path = Path(
        os.path.expanduser(name)
    )  # pathlib's fails for a user that there is not, and is_dir for a name too long
    if name and os.path.isdir(path):
        return _Source(f"{PREFIX}{name}", str(path), None, is_folder=True)
    if re.match(r"[./~]|[A-Za-z]:\\", name):
        problem = "that is a file" if os.path.isfile(path) else "there is no such folder on the driver"
        raise ModelError(f"model='{PREFIX}{name}': {problem} ({path.absolute()}); give the folder of a checkpoint")
    place, _, revision = name.partition("@")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", place) or name.endswith("@"):
        raise ModelError(
            f"model='{PREFIX}{name}' names no checkpoint; give '{PREFIX}google/vit-base-patch16-224', with a revision "
            f"'{PREFIX}google/vit-base-patch16-224@main', or a folder '{PREFIX}./folder'"
        )
    if place.startswith("timm/"):
        raise ModelError(f"model='{PREFIX}{name}' is a checkpoint of timm: give model='timm:{place[5:]}'")
    return _Source(f"{PREFIX}{name}", place, revision or None, is_folder=False)


def _config_file(source: _Source) -> Path:
    """config.json in the folder, or in the hub's cache, ``.../snapshots/<commit>/config.json``; one small request."""
    if source.is_folder:
        return Path(source.place) / "config.json"
    hub = importlib.import_module("huggingface_hub")
    try:
        return Path(hub.hf_hub_download(source.place, "config.json", revision=source.revision))
    except Exception as error:  # the hub's errors and the network's; what the cache holds serves without either
        raise ModelError(f"{source.text} cannot be had ({telling_lines(error)}). {source.help()}") from error


def _config(source: _Source, file: Path) -> Any:
    """The configuration of an image classifier that transformers itself knows."""
    transformers = _transformers()
    try:
        raw = json.loads(file.read_text(encoding="utf-8"), object_hook=partial(_plain, source))
        kind = raw.get("model_type")
    except ModelError:
        raise
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"{source.text} has no config.json to read ({telling_lines(error)}). {source.help()}"
        ) from error
    known = kind in transformers.CONFIG_MAPPING
    if known and transformers.CONFIG_MAPPING[kind] in transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        try:
            return transformers.CONFIG_MAPPING[kind].from_dict(raw)
        except Exception as error:  # of any type: its fields are checked by their types
            raise ModelError(f"the config.json of {source.text} cannot be read ({telling_lines(error)})") from error
    if "auto_map" in raw:
        raise ModelError(
            f"{source.text} wants Python code from its repository ({raw['auto_map']}); gpuml runs no code from a hub. "
            f"Read it, make the network yourself, and give it to from_module(net, ...)"
        )
    what = f"a {kind!r}, which is no image classifier" if known else f"of model_type {kind!r}, which is unknown"
    raise ModelError(f"{source.text} is {what} to transformers {transformers.__version__}; use from_module(net, ...)")


def _plain(source: _Source, values: dict[str, Any]) -> dict[str, Any]:
    """An object of a config.json, the whole or a part, without its choice of an implementation of attention or experts.

    transformers downloads one with a repository's name, or flash_attention_2, from the hub and runs it, where the
    package kernels is installed. Without a choice it takes torch's own, or a plain one, and those export.
    """
    kind, count, names = (values.get(key) for key in ("model_type", "num_labels", "id2label"))
    if (
        max(count if isinstance(count, (int, float)) else 0, len(names) if isinstance(names, dict) else 0)
        > _MOST_LABELS
    ):
        raise ModelError(f"{source.text} has more than {_MOST_LABELS} labels, says its config.json; is it damaged?")
    if str(kind).startswith("timm_"):  # its settings name files and repositories that timm would read
        raise ModelError(
            f"{source.text} is a network of timm, {values.get('architecture')!r:.100} (model_type {kind!r}): give "
            f"model='timm:...' with its name there"
        )
    if values.get("quantization_config"):  # some kinds are read with kernels of the hub
        raise ModelError(
            f"{source.text} is quantized (quantization_config in its config.json), which no model file is; choose the "
            f"checkpoint that it was made from"
        )
    return {key: value for key, value in values.items() if "_implementation" not in key}


def _check_folder(source: _Source, config: Any) -> None:
    """Refuse what would be read from elsewhere, or from a hidden file: the model's key is a hash of the others."""
    folder = Path(source.place)
    if os.path.lexists(folder / "adapter_config.json"):
        raise ModelError(
            f"{source.text} has an adapter_config.json, which may name another checkpoint. Merge the adapter into the "
            f"network with peft's merge_and_unload(), and save_pretrained() that to a folder of its own"
        )
    named = [("config.json", getattr(config, "transformers_weights", None) or "model.safetensors")]
    for index in [*folder.glob("*.safetensors.index.json"), *folder.glob("pytorch_model.bin.index.json")]:
        try:
            files = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ModelError(f"{index.name} of {source.text} cannot be read ({telling_lines(error)})") from error
        named += [(index.name, file) for file in files]
    for place, file in named:
        if not isinstance(file, str) or file.startswith(".") or not file or PurePath(file).name != file:
            raise ModelError(
                f"{place} of {source.text} names {file!r:.200}, which is no plain name of a file in that folder; "
                f"save_pretrained() writes such"
            )


def _network(source: _Source, config: Any) -> nn.Module:
    """The network with its weights; `config` is what `_plain` left, so no other reading of config.json counts."""
    make = _transformers().AutoModelForImageClassification.from_pretrained
    settings = {"trust_remote_code": False, "dtype": torch.float32, "output_loading_info": True, "config": config}
    net: nn.Module
    try:
        with plain_torch(), no_code():
            net, report = make(source.place, revision=source.revision, **settings)
    except Exception as error:
        raise ModelError(f"{source.text} cannot be loaded ({telling_lines(error)}). {source.help()}") from error
    if missing := sorted(report["missing_keys"]):  # transformers fills them with random numbers, and warns
        raise ModelError(
            f"{source.text} has no weights for {', '.join(missing[:3])}{' ...' if missing[3:] else ''}: it was not "
            f"trained as an image classifier. Choose a checkpoint that was fine-tuned for classes"
        )
    return net


def _preprocess_of(source: _Source) -> tuple[Preprocess | None, str]:
    """The Preprocess of a checkpoint, or why it has none."""
    make = _transformers().AutoImageProcessor.from_pretrained
    try:
        return preset(make(source.place, revision=source.revision, trust_remote_code=False)), ""
    except ModelError as error:
        return None, str(error)
    except Exception as error:  # none in the checkpoint, one with code of its own, no network
        return None, f"its image processor cannot be had ({telling_lines(error)})"


def _class_names(config: Any, source: _Source) -> tuple[str, ...]:
    names = {int(index): str(name) for index, name in config.id2label.items()}
    if sorted(names) != list(range(len(names))):
        raise ModelError(
            f"{source.text}: the ids of its id2label are {sorted(names)[:5]}, not 0 to {len(names) - 1}; give "
            f"labels=[...], one per output"
        )
    return tuple(names[index] for index in range(len(names)))


def _activation(config: Any) -> str:
    """As transformers' own pipeline chooses it."""
    if config.problem_type == "regression":
        return "none"
    return "sigmoid" if config.problem_type == "multi_label_classification" or config.num_labels == 1 else "softmax"


def _hash_of_folder(folder: Path) -> str:
    """Names and contents of all files but hidden ones: 'hf download --local-dir' notes times in .cache."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    listed = [f"{hash_of(path)} {name}\n" for name, path in sorted(files.items()) if not re.search(r"(^|/)\.", name)]
    return hashlib.sha256("".join(listed).encode()).hexdigest()
