"""What a model file says of its network: the card, ``gpuml.json``, among its archive's extra files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeVar

import torch

from gpuml.errors import ModelError, ModelFileError
from gpuml.spec import ACTIVATIONS, Preprocess
from gpuml.version import __version__

#: The card's name among the extra files.
CARD = "gpuml.json"
FORMAT = 1
MEMORY_FORMATS = ("channels_last", "contiguous")


@dataclass(frozen=True)
class Card:
    """What a model file says of a network from pixels to numbers: a classifier's, a featurizer's.

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

    @classmethod
    def of(cls, values: dict[str, Any]) -> Card:
        """From the values of its JSON."""
        values["preprocess"] = Preprocess.from_dict(values["preprocess"])
        values["labels"] = checked_labels(values["labels"])
        return cls(**values)


#: What tensors a network may take from columns; and give to them, where half precision becomes float32 before.
INPUT_DTYPES = ("float32", "int64", "int32", "int16", "int8", "bool")
OUTPUT_DTYPES = ("float64", *INPUT_DTYPES)


@dataclass(frozen=True)
class Port:
    """One tensor that a network takes or gives: its name, torch's name of its type, and the shape of one row."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype} ({', '.join(map(str, ('batch', *self.shape)))})"


@dataclass(frozen=True)
class TensorCard:
    """What a model file says of a network from named tensors to named tensors.

    Its network takes them in the order of `inputs`, and gives a tuple in the order of `outputs`; the batch is the first
    dimension of each.

    Parameters
    ----------
    inputs, outputs : at least one each, names distinct.
    labels : one name per column of the first output, or none.
    activation : as a `Card`'s, of the first output, where a stage is asked for classes.
    gpuml, torch, format : as a `Card`'s.

    Raises
    ------
    ModelError
        The parts do not fit one another.
    """

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    labels: tuple[str, ...] = ()
    activation: str = "softmax"
    gpuml: str = __version__
    torch: str = torch.__version__
    format: int = FORMAT

    #: That of rows which come from columns.
    memory_format: ClassVar[str] = "contiguous"

    def __post_init__(self) -> None:
        for what, ports, dtypes in (
            ("input", self.inputs, INPUT_DTYPES),
            ("output", self.outputs, OUTPUT_DTYPES),
        ):
            names = [port.name for port in ports]
            if not names or len(set(names)) < len(names) or not all(isinstance(name, str) and name for name in names):
                raise ModelError(f"{what}s {names} are not one or more distinct names")
            for port in ports:
                if port.dtype not in dtypes:
                    raise ModelError(f"{what} {port.name!r} is {port.dtype}, none of {', '.join(dtypes)}")
                if not all(type(length) is int and length > 0 for length in port.shape):
                    raise ModelError(f"{what} {port.name!r} has rows of shape {port.shape}: lengths are from 1 up")
        if self.activation not in ACTIVATIONS:
            raise ModelError(f"activation={self.activation!r} is none of {', '.join(ACTIVATIONS)}")
        first = self.outputs[0]
        if self.labels and first.shape != (len(self.labels),):
            raise ModelError(
                f"{len(self.labels)} labels for the first output, {first}; give one label per column, in order"
            )

    @classmethod
    def of(cls, values: dict[str, Any]) -> TensorCard:
        """From the values of its JSON."""
        for key in ("inputs", "outputs"):
            values[key] = tuple(Port(**{**port, "shape": tuple(port["shape"])}) for port in values[key])
        values["labels"] = checked_labels(values["labels"])
        return cls(**values)


@dataclass(frozen=True)
class DetectionCard:
    """What a model file says of a network from pictures to boxes.

    Its network takes a list of float32 pictures (3, height, width), 0..1, each of its own size. It gives as many dicts
    of ``boxes`` float (n, 4), pixels of that picture, ``labels`` int64 (n,) and ``scores`` float (n,).

    Parameters
    ----------
    labels : one name per number that the network gives as a label, from 0 on; or none.
    gpuml, torch, format : as a `Card`'s.
    """

    labels: tuple[str, ...] = ()
    gpuml: str = __version__
    torch: str = torch.__version__
    format: int = FORMAT

    #: That of its pictures.
    memory_format: ClassVar[str] = "contiguous"

    @classmethod
    def of(cls, values: dict[str, Any]) -> DetectionCard:
        """From the values of its JSON."""
        values["labels"] = checked_labels(values["labels"])
        return cls(**values)


AnyCard = Card | TensorCard | DetectionCard

_AnyCard = TypeVar("_AnyCard", Card, TensorCard, DetectionCard)

#: What a file's network takes and gives -> the class of its card.
KINDS: dict[str, type[AnyCard]] = {"images": Card, "tensors": TensorCard, "detection": DetectionCard}

#: Which stages run it.
STAGES = {
    "images": "ImageClassifier or ImageFeaturizer",
    "tensors": "TensorTransformer",
    "detection": "ObjectDetector",
}


def checked_kind(card: AnyCard, wanted: type[_AnyCard], what: str) -> _AnyCard:
    """The card, if it is of the kind that the user's stage runs; errors call its file `what`.

    Raises
    ------
    ModelError
        Naming the stage that runs it.
    """
    if isinstance(card, wanted):
        return card
    if isinstance(card, TensorCard):
        takes = ", ".join(map(str, card.inputs))
    else:
        takes = "pixels of one size" if isinstance(card, Card) else "pictures, and gives boxes"
    raise ModelError(
        f"{what} is a network that takes {takes}: {STAGES[kind_of(type(card))]} runs it, not {STAGES[kind_of(wanted)]}"
    )


def kind_of(card: type[AnyCard]) -> str:
    (kind,) = (name for name, of_kind in KINDS.items() if card is of_kind)
    return kind


def to_json(card: AnyCard) -> str:
    return json.dumps({"kind": kind_of(type(card)), **asdict(card)}, sort_keys=True)


def from_json(text: str | bytes) -> AnyCard:
    """The card in a model file.

    Raises
    ------
    ModelFileError
        It is damaged, or of a later gpuml.
    """
    try:
        values = json.loads(text)
        if type(values["format"]) is not int or not all(isinstance(values[key], str) for key in ("gpuml", "torch")):
            raise TypeError("its format is no integer, or a version no text")
        kind = values.pop("kind", "images")
        if values["format"] > FORMAT or kind not in KINDS:
            raise ModelFileError(
                f"the model file's card has format {values['format']} and kind {kind!r}, written by gpuml "
                f"{values['gpuml']}; gpuml {__version__} reads up to {FORMAT} of {', '.join(KINDS)}: upgrade gpuml"
            )
        return KINDS[kind].of(values)
    except ModelFileError:
        raise
    except (KeyError, TypeError, ValueError, RecursionError, AttributeError) as error:
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
