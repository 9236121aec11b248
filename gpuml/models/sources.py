"""What the ``model`` Param says -> the content hash of one model file in the cache."""

from __future__ import annotations

import difflib
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from gpuml.errors import ModelError
from gpuml.models import store, zoo_huggingface, zoo_timm, zoo_torchvision
from gpuml.models.bundle import is_bundle, unpack
from gpuml.models.cards import Card, checked_kind
from gpuml.models.fetch import fetch
from gpuml.models.file import find_card, rewrite, save_model
from gpuml.models.found import Found
from gpuml.models.weights import check_file, local_path
from gpuml.spec import Preprocess
from gpuml.version import __version__

#: Prefix -> what recognises the rest of it.
ZOOS: dict[str, Callable[[str, str, Sequence[str]], Found]] = {
    zoo_torchvision.PREFIX: zoo_torchvision.find,
    zoo_timm.PREFIX: zoo_timm.find,
    zoo_huggingface.PREFIX: zoo_huggingface.find,
}


def resolve(model: str, weights: str = "", labels: Sequence[str] = (), preprocess: Preprocess | None = None) -> str:
    """Make sure that the model file of a source is in the cache; returns its sha256.

    Parameters
    ----------
    model : ``torchvision:<name>`` or another zoo's; the path, or the http(s) URL, of a model file, of a file of
        ``torch.export.save`` or ``torch.jit.save``, or of a zip around one; or ``sha256:<hex>`` of one in the cache.
    weights : for a zoo: ``""`` its best, a weights name, ``"none"`` random (seeded by the model's name), or the path or
        URL of a state dict (``.pth`` and the like, or ``.safetensors``).
    labels, preprocess : in place of the model's own; empty and None keep them.

    Raises
    ------
    ModelError
        The source is unknown, cannot be read, or does not fit the weights or labels.
    """
    for prefix, find in ZOOS.items():
        if model.startswith(prefix):
            with local_weights(weights) as near:
                return _from_zoo(model, find(model.removeprefix(prefix), near, labels), labels, preprocess)
    refuse_weights(model, weights, f"{zoo_torchvision.PREFIX}resnet50")
    return from_place(model, partial(_from_file, labels=labels, preprocess=preprocess))


def refuse_weights(model: str, weights: str, name: str) -> None:
    """Refuse weights beside a source that is no zoo's; `name` is one that is.

    Raises
    ------
    ModelError
        There are weights.
    """
    if weights:
        raise ModelError(
            f"weights={_shown(weights)!r} go with a zoo's name such as {name!r}, not model={_shown(model)!r}"
        )


def from_place(model: str, take: Callable[..., str]) -> str:
    """What ``take(path, sha256=..., add=...)`` makes of the file that a source of no zoo names, as `_from_file` does.

    Raises
    ------
    ModelError
        The source is unknown, or cannot be read.
    """
    if match := re.fullmatch(r"sha256:([0-9a-f]{64})", model):
        return take(store.path_of(match[1]), sha256=match[1])
    if _is_http(model):
        file = fetch(model)
        with named(file, _shown(model)):
            return take(file, add=store.add_copy)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:", model) and not model.startswith("file:/"):
        prefix, _, rest = model.partition(":")
        close = difflib.get_close_matches(f"{prefix.lower()}:", ZOOS, n=1, cutoff=0.7)
        hint = f" Did you mean {close[0] + rest!r}?" if close else ""
        raise ModelError(
            f"model={model!r}: gpuml {__version__} knows no such source.{hint} It reads {', '.join(ZOOS)}, python:, "
            f"http://, https:// and paths on the driver, such as './{model}'; with a Spark session also URLs that "
            f"Spark reads, such as s3a://"
        )
    path = local_path(model)
    if re.fullmatch(r"[\w-]+", model) and not path.exists():
        raise ModelError(_no_source(model))
    check_file(path, f"model={model!r}")
    if path.suffix in (".safetensors", ".onnx"):
        what = "weights without their network: name it in model=, and give this file as weights="
        raise ModelError(
            f"model={model!r}: {what if path.suffix != '.onnx' else 'ONNX is not read; export the network'}"
        )
    with store.incoming() as copy, named(copy, str(path)):
        shutil.copyfile(path, copy)  # what is checked is what is read, whoever may write to the path meanwhile
        return take(copy)


@contextmanager
def named(file: Path, name: str) -> Iterator[None]:
    """Errors speak of what the user named, not of the file that it became for the moment."""
    try:
        yield
    except ModelError as error:
        raise type(error)(str(error).replace(str(file), name)) from error


@contextmanager
def local_weights(weights: str) -> Iterator[str]:
    """A ``weights`` Param as a zoo takes it: a URL is downloaded, and errors speak of it."""
    if not _is_http(weights):
        yield weights
        return
    file = fetch(weights)
    with named(file, _shown(weights)):
        yield str(file)


def _from_zoo(model: str, found: Found, labels: Sequence[str], preprocess: Preprocess | None) -> str:
    """A zoo's model, exported once per key, labels, preprocessing and versions."""

    def write(new: Path) -> None:
        built = found.build()
        wanted = preprocess or built.preprocess
        if wanted is None:
            raise ModelError(f"model={model!r}: {built.no_preprocess}; give preprocess=Preprocess(...)")
        save_model(built.net, new, labels=labels or built.labels, preprocess=wanted, activation=built.activation)

    return store.once(request_of(found.key, labels, preprocess), write)


def _from_file(
    path: Path,
    labels: Sequence[str],
    preprocess: Preprocess | None,
    *,
    sha256: str | None = None,
    add: Callable[[Path], str] = store.add,
) -> str:
    """A model file as it is; or an archive of torch's, or a zip around one, as a model file.

    `sha256` is that of a file in the cache; `add` takes another one in, moving it unless it is told to copy.
    """
    if is_bundle(path):
        with store.incoming() as network:
            names = unpack(path, network)
            with named(network, f"the network in {path}"):
                return _from_file(network, labels or names, preprocess)
    found = find_card(path)
    card = None if found is None else checked_kind(found, Card, str(path))
    if card is not None and card == replace(
        card, labels=tuple(labels) or card.labels, preprocess=preprocess or card.preprocess
    ):
        return sha256 or add(path)
    request = request_of({"file": sha256 or store.hash_of(path)}, labels, preprocess)
    return store.once(request, lambda new: rewrite(path, new, labels=labels, preprocess=preprocess))


def request_of(key: dict[str, object], labels: Sequence[str], preprocess: Preprocess | None) -> dict[str, object]:
    """What the index knows a model file by: all that shapes it."""
    return {
        **key,
        "labels": list(labels),
        "preprocess": preprocess.to_json() if preprocess else None,
        "torch": torch.__version__,
        "gpuml": __version__,
    }


def _shown(text: str) -> str:
    """A URL without its password and its query, which may be a signature; any other text as it is."""
    return re.sub(r"//[^/@]*@", "//", text).partition("?")[0] if _is_http(text) else text


def _is_http(text: str) -> bool:
    return re.match("https?:", text, re.IGNORECASE) is not None


def _no_source(model: str) -> str:
    """A bare name: never guessed, since it could be the zoo's or a file's."""
    close = difflib.get_close_matches(model, zoo_torchvision.names(), n=1)
    name = close[0] if close else model
    return f"model={model!r} has no source. Did you mean '{zoo_torchvision.PREFIX}{name}' or './{model}.pt2'?"
