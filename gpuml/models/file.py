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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpuml.errors import ModelError, ModelFileError
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
from gpuml.spec import ACTIVATIONS, Preprocess
from gpuml.version import __version__

CARD = "gpuml.json"
FORMAT = 1
MEMORY_FORMATS = ("channels_last", "contiguous")
_MOST_CARD = 1 << 26


@dataclass(frozen=True)
class Card:
    """What a model file says of its network.

    Parameters
    ----------
    preprocess : how an image becomes the input.
    width : columns of the output, which has shape (batch, width).
    labels : one name per column, or none.
    activation : ``"softmax"``, ``"sigmoid"`` or ``"none"``: what turns the output into probabilities.
    memory_format : ``"channels_last"`` or ``"contiguous"``: the memory that weights and rows lie in when it runs.
    gpuml, torch : versions that wrote the file.
    format : version of this card.

    Raises
    ------
    ModelError
        The parts do not fit one another.
    """

    preprocess: Preprocess
    width: int
    labels: tuple[str, ...] = ()
    activation: str = "softmax"
    memory_format: str = "channels_last"
    gpuml: str = __version__
    torch: str = torch.__version__
    format: int = FORMAT

    def __post_init__(self) -> None:
        if type(self.width) is not int or self.width < 1:
            raise ModelError(f"a model with {self.width!r} outputs has nothing to predict")
        if self.labels and len(self.labels) != self.width:
            raise ModelError(
                f"{len(self.labels)} labels for a model with {self.width} outputs; give one label per output, in order"
            )
        if self.activation not in ACTIVATIONS:
            raise ModelError(f"activation={self.activation!r} is none of {', '.join(ACTIVATIONS)}")
        if self.memory_format not in MEMORY_FORMATS:
            raise ModelError(f"memory_format={self.memory_format!r} is none of {', '.join(MEMORY_FORMATS)}")
        if self.activation == "softmax" and self.width == 1:
            raise ModelError(
                "softmax over one output is always 1. Give the network two outputs; or use activation='sigmoid' or "
                "'none' and compare probability with a threshold of yours: of one class, prediction is always 0"
            )

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> Card:
        try:
            values = json.loads(text)
            if type(values["format"]) is not int or not all(isinstance(values[key], str) for key in ("gpuml", "torch")):
                raise TypeError("its format is no integer, or a version no text")
            if values["format"] > FORMAT:
                raise ModelFileError(
                    f"the model file's card has format {values['format']}, written by gpuml {values.get('gpuml')}; "
                    f"gpuml {__version__} reads up to {FORMAT}: upgrade gpuml"
                )
            values["preprocess"] = Preprocess.from_dict(values["preprocess"])
            values["labels"] = checked_labels(values["labels"])
            return cls(**values)
        except ModelFileError:
            raise
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ModelFileError(f"the model file's card {CARD} is damaged: {type(error).__name__}: {error}") from error


def checked_labels(labels: Any) -> tuple[str, ...]:
    """Labels as a tuple. A dict, a set or one text would give as many names, and wrong ones."""
    if isinstance(labels, (str, bytes)) or not isinstance(labels, Sequence):
        raise ModelError(f"labels={labels!r} is a {type(labels).__name__}; give a list of names, in the outputs' order")
    for label in labels:
        if not isinstance(label, str):
            raise ModelError(f"labels: {label!r} is a {type(label).__name__}; give each name as text")
        if not label.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in label):
            raise ModelError(f"labels: {label!r} holds half of a surrogate pair, which no column of text can")
    return tuple(labels)


def save_model(
    net: nn.Module,
    path: str | os.PathLike[str],
    *,
    preprocess: Preprocess,
    labels: Sequence[str] = (),
    activation: str = "softmax",
) -> None:
    """Write a network as a model file, for a stage's ``model`` Param.

    The network is exported as a copy, on the CPU and in evaluation mode; `net` itself stays as it is. A
    ``torch.jit.ScriptModule``, and a network that ``torch.export`` refuses, is written as TorchScript.

    Parameters
    ----------
    net : takes float32 (batch, 3, height, width), gives float (batch, classes).
    path : local file to write, usually ``*.pt2``.
    preprocess : how an image becomes the input; its size is the input's.
    labels : one class name per output column; none: the index is the label.
    activation : ``"softmax"``, ``"sigmoid"`` or ``"none"``: what turns the output into probabilities.

    Raises
    ------
    ModelError
        The network cannot be exported, mixes rows of a batch, gives anything but (batch, classes), or the labels do
        not fit.

    Examples
    --------
    >>> from torchvision.models import squeezenet1_1
    >>> save_model(squeezenet1_1(), "net.pt2", preprocess=Preprocess())
    """
    path = Path(path).expanduser()
    if path.is_dir():
        raise ModelError(f"save_model: path={str(path)!r} is a folder; name a file in it, such as {path / 'net.pt2'}")
    if not isinstance(net, nn.Module):
        raise ModelError(f"save_model: {type(net).__name__} is not a torch.nn.Module")
    if not isinstance(preprocess, Preprocess):
        raise ModelError(f"save_model: preprocess={preprocess!r} is not a gpuml.Preprocess")
    names = checked_labels(labels)
    with plain_torch():
        module = evaluation_copy(net)
        program = program_of(module, preprocess.size)
        network = _callable(program)
        width = checked_width(network, module, preprocess.size)
        card = Card(preprocess, width, names, activation, memory_format(network, preprocess.size))
        write(program, path, card)


def read_card(path: str | os.PathLike[str]) -> Card:
    """The card of a model file, after its archive was checked; nothing else is read.

    Raises
    ------
    ModelFileError
        The file is no model file, is damaged, or is not safe to open.
    """
    return kind_and_card(path)[1]


def find_card(path: str | os.PathLike[str]) -> Card | None:
    """`read_card`, but None for a safe archive of torch's that has no card of ours."""
    return _checked(path)[1]


def load(path: str | os.PathLike[str], device: torch.device) -> tuple[Callable[[Tensor], Tensor], Card]:
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


def kind_and_card(path: str | os.PathLike[str]) -> tuple[str, Card]:
    """``"export"`` or ``"torchscript"``, and the card of a model file; raises as `read_card`."""
    kind, card = _checked(path)
    if card is None:
        raise ModelFileError(
            f"{os.fspath(path)} has no {CARD} inside, so its labels and preprocessing are unknown; "
            f"write it with gpuml.save_model(net, path, labels=..., preprocess=...)"
        )
    return kind, card


def _checked(path: str | os.PathLike[str]) -> tuple[str, Card | None]:
    """The kind of an archive, as `check_archive` has it, and its card if it has one."""
    try:
        kind = check_archive(path)
    except ModelFileError as error:
        # A newer torch's file is refused for what this torch does not know.
        raise ModelFileError(f"{error}{_written_by(path)}") from error
    text = _card_text(path)
    try:
        return kind, None if text is None else Card.from_json(text)
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
    kind, card = _checked(source)
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


def open_program(path: str | os.PathLike[str]) -> tuple[str, Card, Any]:
    """``"export"`` or ``"torchscript"``, the card, and the exported program or script module; raises as `read_card`."""
    kind, card = kind_and_card(path)
    return kind, card, _open(path, kind, torch.device("cpu"))


def write(program: Any, path: Path, card: Card) -> None:
    """One archive, then renamed into place. Its inner name is fixed, so that equal content hashes equally."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".gpuml-") as folder:
        file = os.path.join(folder, "model.pt2")
        if isinstance(program, torch.jit.ScriptModule):
            jit("save", program, file, _extra_files={CARD: card.to_json()})
        else:
            strip(program)
            torch.export.save(program, file, extra_files={CARD: card.to_json()})
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
