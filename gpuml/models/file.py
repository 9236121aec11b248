"""A network in memory <-> a model file: one file with network, labels and preprocessing.

A model file is a ``torch.export`` archive (``.pt2``) with a dynamic batch dimension, and a card, ``gpuml.json``, among
its extra files. A TorchScript archive with the same card is taken as well.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpuml.errors import ModelError, ModelFileError
from gpuml.models import cards
from gpuml.models.cards import CARD, AnyCard, Card, checked_kind, checked_labels
from gpuml.models.export import (
    ONE_AT_A_TIME,
    checked_width,
    evaluation_copy,
    jit,
    memory_format,
    moved,
    plain_torch,
    program_of,
    strip,
    telling_lines,
    to_channels_last,
)
from gpuml.models.fold import fold_batch_norm
from gpuml.models.safety import check_archive
from gpuml.models.tensors import program_and_card
from gpuml.spec import Preprocess
from gpuml.version import __version__

_MOST_CARD = 1 << 26


def save_model(
    net: nn.Module,
    path: str | os.PathLike[str],
    *,
    preprocess: Preprocess | None = None,
    inputs: Mapping[str, Tensor] | None = None,
    outputs: Sequence[str] = (),
    labels: Sequence[str] = (),
    activation: str = "softmax",
) -> None:
    """Write a network as a model file, for a stage's ``model`` Param.

    The network is exported as a copy, on the CPU and in evaluation mode; `net` itself stays as it is. A
    ``torch.jit.ScriptModule``, and a network that ``torch.export`` refuses, is written as TorchScript.

    Parameters
    ----------
    net : of images: takes float32 (batch, 3, height, width), gives float (batch, classes). Of columns: takes tensors as
        in `inputs`, gives a tensor, or a tuple or dict of them, the batch first in each.
    path : local file to write, usually ``*.pt2``.
    preprocess : of a network of images: how one becomes the input; its size is the input's.
    inputs : of a network of columns, for `gpuml.TensorTransformer`: a sample of each input, by the name of forward()'s
        parameter; where there is one input, the name is free. Two rows or more that differ, the batch first: type and
        shape of a row are the input's. float32, int64, int32, int16, int8 or bool.
    outputs : names for what such a network gives, in order; of a dict, those to keep. Otherwise a dict's own; one
        tensor is ``"output"``, those of a tuple are ``"output_0"`` and so on.
    labels : one class name per column of the output, the first if there are more; none: the index is the label.
    activation : ``"softmax"``, ``"sigmoid"`` or ``"none"``: what turns that output into probabilities.

    Raises
    ------
    ModelError
        The network cannot be exported, mixes rows of a batch, gives another shape than it must, or the labels do not
        fit; or neither or both of `preprocess` and `inputs` are given.

    Examples
    --------
    >>> from torchvision.models import squeezenet1_1
    >>> save_model(squeezenet1_1(), "net.pt2", preprocess=Preprocess())
    >>> save_model(nn.Linear(13, 3), "wine.pt2", inputs={"features": torch.randn(2, 13)}, outputs=["logits"])
    """
    path = Path(path).expanduser()
    if path.is_dir():
        raise ModelError(f"save_model: path={str(path)!r} is a folder; name a file in it, such as {path / 'net.pt2'}")
    if not isinstance(net, nn.Module):
        raise ModelError(f"save_model: {type(net).__name__} is not a torch.nn.Module")
    if (preprocess is None) == (inputs is None):
        raise ModelError(
            f"save_model: {'neither' if inputs is None else 'both'} of preprocess and inputs given; give preprocess="
            "gpuml.Preprocess(...) for a network of images, or inputs={'x': sample tensor} for one of columns"
        )
    names = checked_labels(labels)
    if inputs is not None:
        with plain_torch():
            made, described = program_and_card(net, inputs, outputs, names, activation)
            write(made, path, described)
        return
    if not isinstance(preprocess, Preprocess):
        raise ModelError(f"save_model: preprocess={preprocess!r} is not a gpuml.Preprocess")
    if outputs:
        raise ModelError(f"save_model: outputs={outputs!r} go with inputs=...; a network of images has one output")
    with plain_torch():
        module = evaluation_copy(net)
        program = program_of(module, preprocess.size)
        network = _callable(program)
        width = checked_width(network, module, preprocess.size)
        card = Card(preprocess, width, names, activation, memory_format(network, preprocess.size))
        write(program, path, card)


def read_card(path: str | os.PathLike[str]) -> AnyCard:
    """The card of a model file, after its archive was checked; nothing else is read.

    Raises
    ------
    ModelFileError
        The file is no model file, is damaged, or is not safe to open.
    """
    return kind_and_card(path)[1]


def find_card(path: str | os.PathLike[str]) -> AnyCard | None:
    """`read_card`, but None for a safe archive of torch's that has no card of ours."""
    return _checked(path)[1]


def load(path: str | os.PathLike[str], device: torch.device) -> tuple[Callable[..., Any], AnyCard]:
    """The network of a model file on a device, weights in the memory format of its card, and that card.

    Raises
    ------
    ModelFileError
        The file is no model file, is damaged, is not safe to open, or is of a newer torch.
    """
    kind, card = kind_and_card(path)
    try:
        with ONE_AT_A_TIME:
            program = _open(path, kind, device)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise  # the device's trouble; the file is not at fault
    except Exception as error:
        raise ModelFileError(
            f"torch {torch.__version__} cannot read {os.fspath(path)}, written by torch {card.torch}: "
            f"{telling_lines(error)}"
        ) from error
    network = _callable(program)
    if card.memory_format == "channels_last":
        to_channels_last(network)
    return network, card


def kind_and_card(path: str | os.PathLike[str]) -> tuple[str, AnyCard]:
    """``"export"`` or ``"torchscript"``, and the card of a model file; raises as `read_card`."""
    kind, card = _checked(path)
    if card is None:
        raise ModelFileError(
            f"{os.fspath(path)} has no {CARD} inside, so its labels and preprocessing are unknown; "
            f"write it with gpuml.save_model(net, path, labels=..., preprocess=...)"
        )
    return kind, card


def _checked(path: str | os.PathLike[str]) -> tuple[str, AnyCard | None]:
    """The kind of an archive, as `check_archive` has it, and its card if it has one."""
    try:
        kind = check_archive(path)
    except ModelFileError as error:
        # A newer torch's file is refused for what this torch does not know.
        raise ModelFileError(f"{error}{_written_by(path)}") from error
    text = _card_text(path)
    try:
        return kind, None if text is None else cards.from_json(text)
    except ModelFileError as error:
        raise ModelFileError(f"{os.fspath(path)}: {error}") from error


def _card_text(path: str | os.PathLike[str]) -> bytes | None:
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if re.fullmatch(rf"[^/]+/extra/{re.escape(CARD)}", name)]
        if not names:
            return None
        if archive.getinfo(names[0]).file_size > _MOST_CARD:
            raise ModelFileError(f"{os.fspath(path)}: its card has more than {_MOST_CARD} bytes")
        return archive.read(names[0])


def _written_by(path: str | os.PathLike[str]) -> str:
    """ ", written by torch ..., read by torch ..." for a refused file whose card names another torch; else ""."""
    try:
        version = json.loads(_card_text(path) or b"{}")["torch"]
    except Exception:  # the file may be anything
        return ""
    return (
        "" if version == torch.__version__ else f"; it says torch {version!s:.40} wrote it, this is {torch.__version__}"
    )


def rewrite(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    labels: Sequence[str] = (),
    preprocess: Preprocess | None = None,
) -> None:
    """Write the network of an archive as a model file; what is not given is as in the archive's own card.

    Parameters
    ----------
    source : a model file, or one of ``torch.export.save`` or ``torch.jit.save`` with no card of ours.
    path : the model file to write.

    Raises
    ------
    ModelError
        The network does not take inputs of the size of the preprocess, mixes rows, has a fixed batch, gives anything
        but (batch, classes), or does not fit the labels; or there is no preprocess.
    """
    kind, found = _checked(source)
    card = None if found is None else checked_kind(found, Card, os.fspath(source))
    if preprocess is None and card is None:
        raise ModelError(
            f"{os.fspath(source)} does not say how an image becomes its input: give preprocess=, for example "
            f"Preprocess() if it was trained on ImageNet as torchvision's networks are"
        )
    chosen = preprocess or card.preprocess  # type: ignore[union-attr]
    with plain_torch():
        program = _open(source, kind, torch.device("cpu"))
        if kind == "torchscript":
            program = program.float().eval()
        else:
            fold_batch_norm(program)
        network = _callable(program)
        width = checked_width(network, network, chosen.size, name=f"the network of {os.fspath(source)}")
        if card is not None and width != card.width:
            raise ModelError(f"the network of {os.fspath(source)} has {width} outputs, its card says {card.width}")
        if card is None:
            card = Card(chosen, width, tuple(labels))
        # memory_format: at another size it may be another one
        new = replace(
            card,
            preprocess=chosen,
            labels=tuple(labels) or card.labels,
            memory_format=memory_format(network, chosen.size),
            gpuml=__version__,
            torch=torch.__version__,
        )
        write(program, Path(path), new)


def open_program(path: str | os.PathLike[str]) -> tuple[str, AnyCard | None, Any]:
    """``"export"`` or ``"torchscript"``, the card or None, and the program or script module; raises as `find_card`."""
    kind, card = _checked(path)
    return kind, card, _open(path, kind, torch.device("cpu"))


def write(program: Any, path: Path, card: AnyCard) -> None:
    """One archive, then renamed into place. Its inner name is fixed, so that equal content hashes equally."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".gpuml-") as folder:
        file = os.path.join(folder, "model.pt2")
        if isinstance(program, torch.jit.ScriptModule):
            jit("save", program, file, _extra_files={CARD: cards.to_json(card)})
        else:
            strip(program)
            torch.export.save(program, file, extra_files={CARD: cards.to_json(card)})
        try:
            check_archive(file)  # what we write we must be able to read: refuse here, not on a worker
        except ModelFileError as error:
            # The context is the reason alone; the error itself names the temporary file.
            raise ModelError(
                f"the network cannot become a model file: {error.__context__ or error}. Use torch's and torchvision's "
                f"own operators instead"
            ) from error
        os.replace(file, path)


def _callable(program: Any) -> nn.Module:
    module: nn.Module = program if isinstance(program, torch.jit.ScriptModule) else program.module()
    return module


def _open(path: str | os.PathLike[str], kind: str, device: torch.device) -> Any:
    """A checked archive of a kind -> an exported program or a script module, on the device with its constants."""
    if kind == "torchscript":
        return jit("load", os.fspath(path), map_location=device)
    with warnings.catch_warnings():
        # torch 2.9 reads weights as Python bytes, and warns once that those are not for writing.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        program = torch.export.load(path)
    return program if device.type == "cpu" else moved(program, device)
