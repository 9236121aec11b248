"""A network in memory <-> a model file: one file with network, labels and preprocessing.

A model file is a ``torch.export`` archive (``.pt2``) with a dynamic batch dimension, and a card, ``gpuml.json``, among
its extra files. A TorchScript archive with the same card is taken as well.
"""

from __future__ import annotations

import copy
import json
import os
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpuml.errors import ModelError, ModelFileError
from gpuml.models.safety import check_archive
from gpuml.spec import ACTIVATIONS, Preprocess
from gpuml.version import __version__

CARD = "gpuml.json"
FORMAT = 1


@dataclass(frozen=True)
class Card:
    """What a model file says of its network.

    Parameters
    ----------
    preprocess : how an image becomes the input.
    width : columns of the output, which has shape (batch, width).
    labels : one name per column, or none.
    activation : ``"softmax"``, ``"sigmoid"`` or ``"none"``: what turns the output into probabilities.
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
    gpuml: str = __version__
    torch: str = torch.__version__
    format: int = FORMAT

    def __post_init__(self) -> None:
        if not isinstance(self.width, int) or self.width < 1:
            raise ModelError(f"a model with {self.width!r} outputs has nothing to predict")
        if self.labels and len(self.labels) != self.width:
            raise ModelError(
                f"{len(self.labels)} labels for a model with {self.width} outputs; give one label per output, in order"
            )
        if self.activation not in ACTIVATIONS:
            raise ModelError(f"activation={self.activation!r} is none of {', '.join(ACTIVATIONS)}")
        if self.activation == "softmax" and self.width == 1:
            raise ModelError("softmax over one output is always 1; use activation='sigmoid' or 'none'")

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Card:
        try:
            values = json.loads(text)
            if values["format"] > FORMAT:
                raise ModelFileError(
                    f"the model file's card has format {values['format']}, written by gpuml {values.get('gpuml')}; "
                    f"gpuml {__version__} reads up to {FORMAT}: upgrade gpuml"
                )
            values["preprocess"] = Preprocess.from_dict(values["preprocess"])
            values["labels"] = tuple(str(label) for label in values["labels"])
            return cls(**values)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, ModelFileError):
                raise
            raise ModelFileError(f"the model file's card {CARD} is damaged: {error}") from error


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
    ``torch.jit.ScriptModule`` is written as TorchScript.

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
    path = Path(path)
    if not isinstance(net, nn.Module):
        raise ModelError(f"save_model: {type(net).__name__} is not a torch.nn.Module")
    if not isinstance(preprocess, Preprocess):
        raise ModelError(f"save_model: preprocess={preprocess!r} is not a gpuml.Preprocess")
    if isinstance(labels, str):
        raise ModelError(f"save_model: labels={labels!r} is one text; give a list of names")
    module = _evaluation_copy(net)
    program = module if isinstance(module, torch.jit.ScriptModule) else _export(module, preprocess.size)
    width = _checked_width(program if program is module else program.module(), module, preprocess.size)
    _write(program, path, Card(preprocess, width, tuple(str(label) for label in labels), activation))


def read_card(path: str | os.PathLike[str]) -> Card:
    """The card of a model file, after its archive was checked; nothing else is read.

    Raises
    ------
    ModelFileError
        The file is no model file, is damaged, or is not safe to open.
    """
    check_archive(path)
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith(f"/extra/{CARD}")]
        if not names:
            raise ModelFileError(
                f"{os.fspath(path)} has no {CARD} inside, so its labels and preprocessing are unknown; "
                f"write it with gpuml.save_model(net, path, labels=..., preprocess=...)"
            )
        return Card.from_json(archive.read(names[0]).decode())


def load(path: str | os.PathLike[str], device: torch.device) -> tuple[Callable[[Tensor], Tensor], Card]:
    """The network of a model file on a device, weights in channels-last memory, and its card.

    Raises
    ------
    ModelFileError
        The file is no model file, is damaged, is not safe to open, or is of a newer torch.
    """
    card = read_card(path)
    try:
        program = _open(path, device)
    except Exception as error:
        raise ModelFileError(
            f"torch {torch.__version__} cannot read {os.fspath(path)}, written by torch {card.torch}: "
            f"{_first_line(error)}"
        ) from error
    module = program if isinstance(program, torch.jit.ScriptModule) else program.module()
    return module.to(memory_format=torch.channels_last), card


def rewrite(source: str | os.PathLike[str], path: str | os.PathLike[str], card: Card) -> None:
    """Write the network of one model file into another, under another card."""
    _write(_open(source, torch.device("cpu")), Path(path), card)


def _evaluation_copy(net: nn.Module) -> nn.Module:
    """A float32 copy on the CPU in evaluation mode: exporting in train mode raises nothing and is wrong."""
    try:
        module = copy.deepcopy(net)
    except Exception as error:
        raise ModelError(f"{type(net).__name__} cannot be copied for export: {_first_line(error)}") from error
    return module.to("cpu", torch.float32).eval().requires_grad_(False)


def _sample(size: tuple[int, int], rows: int = 2) -> Tensor:
    """Fixed inputs. Two rows: a batch of one makes the export specialise on it."""
    return torch.randn((rows, 3, *size), generator=torch.Generator().manual_seed(0))


def _export(module: nn.Module, size: tuple[int, int]) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch")
    try:
        program = torch.export.export(module, (_sample(size),), dynamic_shapes=({0: batch},))
    except Exception as error:
        raise ModelError(
            f"torch.export cannot export {type(module).__name__} for inputs of shape (batch, 3, {size[0]}, {size[1]}): "
            f"{_first_line(error)}. Let forward() take that one tensor, with no branch on its values and no fixed "
            f"batch size; or pass torch.jit.script(net)."
        ) from error
    program.example_inputs = None  # they are pickled into the file otherwise
    return program


def _checked_width(exported: Callable[[Tensor], Tensor], module: nn.Module, size: tuple[int, int]) -> int:
    """Columns of the output, once the exported network was seen to do what the module does, row by row."""
    name = type(module).__name__
    rows = _sample(size, 3)
    with torch.inference_mode():
        try:
            output = exported(rows)
        except Exception as error:
            raise ModelError(f"{name} fails on a batch of shape {tuple(rows.shape)}: {_first_line(error)}") from error
        if not isinstance(output, Tensor) or not output.is_floating_point() or output.ndim != 2 or len(output) != 3:
            what = f"{output.dtype} of shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output)
            raise ModelError(f"{name} gives {what} for 3 rows; a classifier must give float of shape (batch, classes)")
        if exported is not module and not _close(output, module(rows)):
            raise ModelError(f"{name}: the exported network does not give what forward() gives; is it random?")
        if not all(_close(output[i : i + 1], exported(rows[i : i + 1])) for i in range(3)):
            raise ModelError(
                f"{name} mixes the rows of a batch: row i alone gives another output than row i among others, so "
                f"results would depend on batchSize; remove what reads across dimension 0"
            )
    return output.shape[1]


def _close(a: Tensor, b: Tensor) -> bool:
    """Equal but for float32 rounding, which depends on the batch; measured against the largest output."""
    scale = float(a.abs().nan_to_num(0.0).max()) if a.numel() else 0.0
    return torch.allclose(a.float(), b.float(), rtol=1e-3, atol=1e-4 * scale + 1e-7, equal_nan=True)


def _write(program: Any, path: Path, card: Card) -> None:
    """One archive, then renamed into place. Its inner name is fixed, so that equal content hashes equally."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".gpuml-") as folder:
        file = os.path.join(folder, "model.pt2")
        if isinstance(program, torch.jit.ScriptModule):
            _jit("save", program, file, _extra_files={CARD: card.to_json()})
        else:
            torch.export.save(program, file, extra_files={CARD: card.to_json()})
        check_archive(file)  # what we write we must be able to read: refuse here, not on a worker
        os.replace(file, path)


def _open(path: str | os.PathLike[str], device: torch.device) -> Any:
    """A checked archive -> an exported program or a script module, on the device with its constants."""
    if check_archive(path) == "torchscript":
        return _jit("load", os.fspath(path), map_location=device)
    program = torch.export.load(path)
    if device.type == "cpu":
        return program
    from torch.export.passes import move_to_device_pass

    return move_to_device_pass(program, device)


def _jit(function: str, *args: Any, **kwargs: Any) -> Any:
    """Call torch.jit, which warns at every call since 2.9 that it is deprecated: exactly that is silenced."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"`torch\.jit\.\w+` is (deprecated|not supported)")
        return getattr(torch.jit, function)(*args, **kwargs)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")
