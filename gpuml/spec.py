"""Plain frozen values: how an image becomes a model's input, and what a stage or a UDF asks of a worker."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

INTERPOLATIONS = ("nearest", "bilinear", "bicubic")
ALPHAS = ("white", "black", "drop")
DEVICES = ("auto", "cuda", "cpu")
DTYPES = ("float32", "bfloat16", "float16")
ACTIVATIONS = ("softmax", "sigmoid", "none")

#: No NaN, no infinity, no integer beyond a float lies within it (`math.isfinite` fails on the last).
_FLOAT_MAX = sys.float_info.max

#: What begins the one kind of model source that has no model file: a function that each worker imports and calls.
PYTHON = "python:"

#: The layer that stands for a network's own output: nothing is cut.
OUTPUT = "output"

#: Where Pillow itself refuses to open an image: twice its Image.MAX_IMAGE_PIXELS.
MAX_PIXELS = 178956970


@dataclass(frozen=True)
class Preprocess:
    """How an image becomes the model's input: resize, centre crop, scale to 0..1, normalise.

    The numbers are those of torchvision's presets, timm's data configuration and Hugging Face's image
    processors: ``(pixel / 255 - mean) / std``, per RGB channel.

    Parameters
    ----------
    resize : length in pixels of the shorter side, the other following the aspect ratio; or (height, width).
    crop : centre crop, in pixels: one length, (height, width), or None when `resize` is a pair.
    mean, std : three numbers each, for pixels scaled to 0..1.
    interpolation : ``"nearest"``, ``"bilinear"`` or ``"bicubic"``.
    antialias : low-pass before shrinking, as Pillow does.

    Raises
    ------
    ValueError
        A value is out of range, or the crop does not fit into the resized image.

    Examples
    --------
    >>> Preprocess(resize=232, crop=224).size
    (224, 224)
    """

    resize: int | tuple[int, int] = 256
    crop: int | tuple[int, int] | None = 224
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    interpolation: str = "bilinear"
    antialias: bool = True

    def __post_init__(self) -> None:
        resize = _lengths("resize", self.resize)
        crop = None if self.crop is None else _lengths("crop", self.crop)
        if crop is None and isinstance(resize, int):
            raise ValueError(
                f"Preprocess: crop=None leaves images of many sizes when resize={resize} is one length; "
                f"give resize=(height, width), or a crop"
            )
        if crop is not None:
            height, width = _pair(crop)
            most = _pair(resize)
            if height > most[0] or width > most[1]:
                raise ValueError(
                    f"Preprocess: crop={crop} does not fit into resize={resize}; make resize larger or crop smaller, "
                    f"or give crop=None with resize=(height, width)"
                )
        if self.interpolation not in INTERPOLATIONS:
            raise ValueError(f"Preprocess: interpolation={self.interpolation!r} is none of {', '.join(INTERPOLATIONS)}")
        if not isinstance(self.antialias, bool):
            raise ValueError(f"Preprocess: antialias={self.antialias!r} is not True or False")
        # object.__setattr__ is how a frozen dataclass normalises itself: lists (JSON) become tuples, so that it hashes.
        object.__setattr__(self, "resize", resize)
        object.__setattr__(self, "crop", crop)
        object.__setattr__(self, "mean", _channels("mean", self.mean))
        object.__setattr__(self, "std", _channels("std", self.std))
        if any(value > 1 for value in self.mean):
            raise ValueError(f"Preprocess: mean={self.mean} is for pixels scaled to 0..1; divide mean and std by 255")
        if any(value <= 0 for value in self.std):
            raise ValueError(f"Preprocess: std={self.std} must be above 0 in each channel")

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the model's input, in pixels."""
        return _pair(self.resize if self.crop is None else self.crop)

    def to_json(self) -> str:
        """JSON text that `from_json` reads; the value of a stage's ``preprocess`` Param."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Preprocess:
        """Read what `to_json` wrote.

        Raises
        ------
        ValueError
            The text is not JSON of a Preprocess; the message names the part.
        """
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:  # no JSON, an integer too long for Python, or nested too deeply
            raise ValueError(f"Preprocess: {text!r} is not JSON ({error}); use Preprocess(...).to_json()") from None
        return cls.from_dict(values)

    @classmethod
    def from_dict(cls, values: Any) -> Preprocess:
        known = [field.name for field in fields(cls)]
        if not isinstance(values, dict) or not set(values) <= set(known):
            raise ValueError(f"Preprocess: {values!r} is not an object with only the keys {', '.join(known)}")
        return cls(**values)


@dataclass(frozen=True)
class Spec:
    """All that a stage sends to a worker: which model file, and how to run rows through it.

    Parameters
    ----------
    model : sha256 of the model file, 64 hexadecimal digits; or ``python:package.module:function``.
    batch_size : rows per forward pass.
    device : ``"auto"``, ``"cuda"`` or ``"cpu"``.
    dtype : ``"float32"``, or the autocast type ``"bfloat16"`` or ``"float16"``.
    decode_threads : threads that decode images; 0 = as `gpuml.worker.serve.decode_threads` has it.
    max_pixels : larger images are refused from their header.
    alpha : transparency over ``"white"``, over ``"black"``, or ``"drop"``.
    scaled_decode : JPEGs are decoded smaller where at least this many times the pixels of the resize remain; 0 = never.
    read_paths : whether the input is text, paths and URLs that a worker opens.
    outputs : names of the output fields to produce (see `gpuml.worker.outputs`).
    top_k : how many labels in the top-k output.
    normalize : whether features have Euclidean length 1.
    score_threshold : boxes of a lower score are left out.
    labels, preprocess : of a ``python:`` model alone, which has no card.
    """

    model: str
    batch_size: int = 64
    device: str = "auto"
    dtype: str = "float32"
    decode_threads: int = 0
    max_pixels: int = MAX_PIXELS
    alpha: str = "white"
    scaled_decode: float = 0.0
    read_paths: bool = False
    outputs: tuple[str, ...] = ()
    top_k: int = 5
    normalize: bool = False
    score_threshold: float = 0.0
    labels: tuple[str, ...] = ()
    preprocess: Preprocess | None = None


@dataclass(frozen=True)
class Function:
    """All that `gpuml.tensor_udf` sends to a worker: a user's function on tensors, and what it promised.

    Parameters
    ----------
    predict : gives tensors for the state of `setup`, if there is one, and a tensor for each column.
    arguments : names of the parameters that take the columns, as far as they are known.
    returns : pyarrow.DataType of the column that it promised.
    setup : the function that makes its state, pickled: a worker that holds the state never reads it. None: no state.
    sha256 : of `setup`.
    device : ``"auto"``, ``"cuda"`` or ``"cpu"``.
    name : how errors call it.
    """

    predict: Callable[..., Any]
    arguments: tuple[str, ...]
    returns: Any
    setup: bytes | None = None
    sha256: str = ""
    device: str = "auto"
    name: str = "predict"


def _lengths(name: str, value: Any) -> int | tuple[int, int]:
    """One pixel length, or a (height, width) of them."""
    if isinstance(value, (list, tuple)):
        if len(value) == 2 and all(_is_length(part) for part in value):
            return int(value[0]), int(value[1])
    elif _is_length(value):
        return int(value)
    raise ValueError(f"Preprocess: {name}={value!r} is neither a length in pixels nor (height, width)")


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 16384


def _pair(length: int | tuple[int, int]) -> tuple[int, int]:
    return (length, length) if isinstance(length, int) else length


def _channels(name: str, value: Any) -> tuple[float, float, float]:
    numbers = isinstance(value, (list, tuple)) and all(
        isinstance(part, (int, float)) and not isinstance(part, bool) and abs(part) <= _FLOAT_MAX for part in value
    )
    if not numbers or len(value) != 3:
        raise ValueError(f"Preprocess: {name}={value!r} is not three numbers, one for each of red, green and blue")
    return float(value[0]), float(value[1]), float(value[2])
