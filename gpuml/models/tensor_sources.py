"""What a TensorTransformer's ``model`` says -> the content hash of one model file in the cache."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from gpuml.errors import ModelError
from gpuml.models import store
from gpuml.models.cards import TensorCard, checked_kind
from gpuml.models.export import plain_torch
from gpuml.models.file import find_card, open_program, read_card, write
from gpuml.models.sources import ZOOS, from_place, request_of
from gpuml.models.tensors import of_archive
from gpuml.models.weights import local_path
from gpuml.spec import PYTHON
from gpuml.version import __version__


def resolve(model: str, labels: Sequence[str] = ()) -> str:
    """Make sure that the model file of a source is in the cache; returns its sha256.

    Parameters
    ----------
    model : path or http(s) URL of a model file, or of a file of ``torch.export.save`` whose batch is dynamic; or
        ``sha256:<hex>`` of one in the cache.
    labels : in place of the model's own; empty keeps them.

    Raises
    ------
    ModelError
        The source is unknown, cannot be read, is a network of images, or does not fit the labels.
    """
    if model.startswith(PYTHON):
        raise ModelError(
            f"model={model!r}: a TensorTransformer runs model files. Code of your own: gpuml.tensor_udf(predict, "
            f"returns, setup=a function that makes the network)"
        )
    if model.startswith(tuple(ZOOS)):
        raise ModelError(
            f"model={model!r} is a network of images: ImageClassifier(model={model!r}). A network of columns is "
            f"written with gpuml.save_model(net, path, inputs={{'x': sample}})"
        )
    if re.fullmatch(r"[\w-]+", model) and not local_path(model).exists():
        raise ModelError(f"model={model!r}: there is no such file. Did you mean './{model}.pt2'?")
    return from_place(model, functools.partial(_from_file, labels=tuple(labels)))


@functools.lru_cache(64)
def card_of(sha256: str) -> TensorCard:
    """The card of a model file in the cache; raises `ModelError` for one of images."""
    return checked_kind(read_card(store.path_of(sha256)), TensorCard, f"model file sha256:{sha256[:12]}")


def _from_file(
    path: Path, *, labels: tuple[str, ...], sha256: str | None = None, add: Callable[[Path], str] = store.add
) -> str:
    """A model file as it is; or an archive of torch.export, or one with other labels, as a model file."""
    found = find_card(path)
    if found is not None:
        card = checked_kind(found, TensorCard, str(path))
        if not labels or labels == card.labels:
            return sha256 or add(path)
    request = request_of({"file": sha256 or store.hash_of(path), "kind": "tensors"}, labels, None)
    return store.once(request, lambda new: _rewrite(path, new, labels))


def _rewrite(source: Path, path: Path, labels: tuple[str, ...]) -> None:
    """Write the network of an archive as a model file with these labels."""
    with plain_torch():
        kind, found, program = open_program(source)
        if found is not None:
            card = checked_kind(found, TensorCard, str(source))
            write(program, path, replace(card, labels=labels, gpuml=__version__, torch=torch.__version__))
        elif kind == "torchscript":
            raise ModelError(
                f"{source} is TorchScript, which does not tell the types and shapes of its inputs: write it with "
                f"gpuml.save_model(torch.jit.load(path), 'net.pt2', inputs={{'x': sample}})"
            )
        else:
            made, described = of_archive(program, f"the network of {source}", labels)
            write(made, path, described)
