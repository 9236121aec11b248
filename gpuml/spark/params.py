"""The Params that Spark lacks: which model a stage runs, and how rows go through it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import HasInputCol

from gpuml.errors import ParamError
from gpuml.spark.columns import TIMING_TYPE
from gpuml.spec import ALPHAS, DEVICES, DTYPES, MAX_PIXELS, Preprocess

if TYPE_CHECKING:
    from typing_extensions import Self

HANDLE_INVALID = ("keep", "skip", "error")

#: Setting one of these means another model file.
MODEL_PARAMS = ("model", "weights", "labels", "preprocess", "layer")


def choice(name: str, allowed: Sequence[str]) -> Callable[[Any], str]:
    """A converter that takes one of some words."""

    def convert(value: Any) -> str:
        if value not in allowed:
            raise ParamError(f"{name}={value!r} is none of {', '.join(map(repr, allowed))}")
        return str(value)

    return convert


def at_least(name: str, least: int) -> Callable[[Any], int]:
    """A converter that takes an integer from `least` up."""

    def convert(value: Any) -> int:
        number = TypeConverters.toInt(value)
        if isinstance(value, bool) or number < least:
            raise ParamError(f"{name}={value!r} is not an integer from {least} up")
        return number

    return convert


def _scaled_decode(value: Any) -> float:
    """0, or a number from 1 up."""
    try:
        number = TypeConverters.toFloat(value)
    except (TypeError, OverflowError):
        number = math.nan
    if number != 0 and not 1 <= number < math.inf:
        raise ParamError(
            f"scaledDecode={value!r} is neither 0 (off) nor a number from 1 up, such as 2: below 1, JPEGs would be "
            f"decoded smaller than the model's input and enlarged again"
        )
    return number


def _source(value: Any) -> str:
    """A model source: text, or a path."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if value == "":
        raise ParamError("model is empty; give a source, such as 'torchvision:resnet50'")
    if not isinstance(value, str):
        raise ParamError(
            f"model is a {type(value).__name__}; give a source as text, such as 'torchvision:resnet50' or the path of "
            f"a model file. A network in memory: ImageClassifier.from_module(net, preprocess=...)"
        )
    return value


def _labels(value: Any) -> list[str]:
    """A list of names, or the path of a text file with one name a line."""
    if isinstance(value, (str, os.PathLike)):
        path = Path(value).expanduser()
        try:
            names = path.read_text(encoding="utf-8-sig").rstrip().splitlines()
            if names:
                return names
            raise ParamError(f"labels={os.fspath(value)!r} is an empty file; give one name a line")
        except (OSError, UnicodeDecodeError) as error:
            raise ParamError(
                f"labels={os.fspath(value)!r} is no text file on the driver with one name a line "
                f"({getattr(error, 'strerror', None) or error}); give such a file, or a list of names"
            ) from error
    if isinstance(value, dict):
        raise ParamError("labels is a dict; give a list of names in the outputs' order: [names[i] for i in range(n)]")
    return list(TypeConverters.toListString(value))


def _preprocess_json(value: Any) -> str:
    """A Preprocess, or its JSON text, checked; "" is the model's own."""
    if isinstance(value, Preprocess):
        return value.to_json()
    if not isinstance(value, str):
        raise ParamError(
            f"preprocess is a {type(value).__name__}; give gpuml.Preprocess(resize=..., crop=..., mean=..., std=...), "
            f"with the numbers of your transforms"
        )
    text = str(value)
    if text:
        try:
            Preprocess.from_json(text)
        except ValueError as error:
            raise ParamError(f"preprocess: {error}") from error
    return text


def param(name: str, doc: str, converter: Callable[[Any], Any] = TypeConverters.toString) -> Param[Any]:
    return Param(Params._dummy(), name, doc, converter)


class HasLabels(Params):
    """The names of a classifier's classes."""

    labels = param(
        "labels",
        "class names, one per output of the model, in order: a list, or the path of a text file with one a line; [] = "
        "the model's own; if it has none, a label is the index as text",
        _labels,
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(labels=[])

    def setLabels(self, value: Sequence[str] | os.PathLike[str]) -> Self:
        """Set `labels`: a list, or the path of a text file with one name a line."""
        return self._set(labels=value)

    def getLabels(self) -> list[str]:
        """The value of `labels`; [] stands for the model's own."""
        return list(self.getOrDefault(self.labels))


class HasModel(Params):
    """Params of every stage: which model file it runs, where, and what becomes of rows that fail."""

    model = param(
        "model",
        "model source: 'torchvision:<name>', 'timm:<name>', 'hf:<org/name>[@revision]' or 'hf:<folder>'; the path on "
        "the driver, or a URL (http, https, what Spark reads), of a model file (gpuml.save_model), a torch.export or "
        "TorchScript archive, or a zip of one with synset.txt; 'python:package.module:function', called in each "
        "worker; 'sha256:<hex>' is a model in memory (from_module). No default",
        _source,
    )
    batchSize = param("batchSize", "rows per forward pass, from 1 up", at_least("batchSize", 1))
    device = param(
        "device",
        "'auto' = the task's GPU address, else a visible GPU, else the CPU; 'cuda' = the same but never the CPU; 'cpu'",
        choice("device", DEVICES),
    )
    dtype = param(
        "dtype",
        "'float32', or the autocast type 'bfloat16' or 'float16'; output columns have the same types with each",
        choice("dtype", DTYPES),
    )
    handleInvalid = param(
        "handleInvalid",
        "rows that cannot be read, nulls too: 'keep' = null outputs and a reason; 'skip' = drop the row, as a learner "
        "or an evaluator after this stage needs; 'error' = fail, naming row and reason",
        choice("handleInvalid", HANDLE_INVALID),
    )
    errorCol = param(
        "errorCol",
        "output column, string: why the row has null outputs, as 'kind: message'; null where all is well; '' = not "
        "produced",
    )
    deviceCol = param(
        "deviceCol",
        "output column, string: the device that served the row, e.g. 'cuda:1 (address 3)'; '' = not produced",
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(
            batchSize=64,
            device="auto",
            dtype="float32",
            handleInvalid="keep",
            errorCol="error",
            deviceCol="",
        )

    def setModel(self, value: str) -> Self:
        """Set `model`; the next transform reads that source, even if it is the same path as before."""
        return self._set(model=value)

    def getModel(self) -> str:
        """The value of `model`."""
        return str(self.getOrDefault(self.model))

    def setBatchSize(self, value: int) -> Self:
        """Set `batchSize`."""
        return self._set(batchSize=value)

    def getBatchSize(self) -> int:
        """The value of `batchSize`."""
        return int(self.getOrDefault(self.batchSize))

    def setDevice(self, value: str) -> Self:
        """Set `device`."""
        return self._set(device=value)

    def getDevice(self) -> str:
        """The value of `device`."""
        return str(self.getOrDefault(self.device))

    def setDtype(self, value: str) -> Self:
        """Set `dtype`."""
        return self._set(dtype=value)

    def getDtype(self) -> str:
        """The value of `dtype`."""
        return str(self.getOrDefault(self.dtype))

    def setHandleInvalid(self, value: str) -> Self:
        """Set `handleInvalid`."""
        return self._set(handleInvalid=value)

    def getHandleInvalid(self) -> str:
        """The value of `handleInvalid`."""
        return str(self.getOrDefault(self.handleInvalid))

    def setErrorCol(self, value: str) -> Self:
        """Set `errorCol`."""
        return self._set(errorCol=value)

    def getErrorCol(self) -> str:
        """The value of `errorCol`."""
        return str(self.getOrDefault(self.errorCol))

    def setDeviceCol(self, value: str) -> Self:
        """Set `deviceCol`."""
        return self._set(deviceCol=value)

    def getDeviceCol(self) -> str:
        """The value of `deviceCol`."""
        return str(self.getOrDefault(self.deviceCol))


class HasImages(HasInputCol):
    """Params of a stage over a column of images."""

    inputCol = param("inputCol", "input column: binary (encoded images), Spark's image struct, or a string (readPaths)")
    weights = param(
        "weights",
        "for 'torchvision:' and 'timm:' models: '' = the zoo's best weights; a weights name; 'none' = random, seeded "
        "by the model's name; or the path or URL of a state dict (.pth, .safetensors)",
    )
    decodeThreads = param(
        "decodeThreads",
        "threads that read and decode images in a task, one slice ahead; 0 = as many as the task has cpus; on the CPU "
        "with one cpu, none: the task's own thread decodes. More of them help where readPaths waits for remote files",
        at_least("decodeThreads", 0),
    )
    readPaths = param(
        "readPaths",
        "whether the input column holds paths or URLs, text that the workers open: local ones, file: URIs, and what "
        "fsspec reads, such as s3:. Whoever writes the column has the workers read any file that they may read",
        TypeConverters.toBoolean,
    )
    maxPixels = param(
        "maxPixels",
        "images with more pixels are refused from their header",
        at_least("maxPixels", 1),
    )
    alpha = param(
        "alpha",
        "what lies under transparent pixels: 'white', 'black', or 'drop' = ignore transparency",
        choice("alpha", ALPHAS),
    )
    timingCol = param(
        "timingCol",
        f"output column, {TIMING_TYPE}: milliseconds that the row took: waiting for Spark (null for a task's first "
        "rows), decoding, resizing, and its shares of a copy to the GPU and of a forward pass; '' = not produced",
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(
            inputCol="content",
            weights="",
            decodeThreads=0,
            readPaths=False,
            maxPixels=MAX_PIXELS,
            alpha="white",
            timingCol="",
        )

    def setInputCol(self, value: str) -> Self:
        """Set `inputCol`."""
        return self._set(inputCol=value)

    def setWeights(self, value: str) -> Self:
        """Set `weights`."""
        return self._set(weights=value)

    def getWeights(self) -> str:
        """The value of `weights`."""
        return str(self.getOrDefault(self.weights))

    def setDecodeThreads(self, value: int) -> Self:
        """Set `decodeThreads`."""
        return self._set(decodeThreads=value)

    def getDecodeThreads(self) -> int:
        """The value of `decodeThreads`."""
        return int(self.getOrDefault(self.decodeThreads))

    def setReadPaths(self, value: bool) -> Self:
        """Set `readPaths`."""
        return self._set(readPaths=value)

    def getReadPaths(self) -> bool:
        """The value of `readPaths`."""
        return bool(self.getOrDefault(self.readPaths))

    def setMaxPixels(self, value: int) -> Self:
        """Set `maxPixels`."""
        return self._set(maxPixels=value)

    def getMaxPixels(self) -> int:
        """The value of `maxPixels`."""
        return int(self.getOrDefault(self.maxPixels))

    def setAlpha(self, value: str) -> Self:
        """Set `alpha`."""
        return self._set(alpha=value)

    def getAlpha(self) -> str:
        """The value of `alpha`."""
        return str(self.getOrDefault(self.alpha))

    def setTimingCol(self, value: str) -> Self:
        """Set `timingCol`."""
        return self._set(timingCol=value)

    def getTimingCol(self) -> str:
        """The value of `timingCol`."""
        return str(self.getOrDefault(self.timingCol))


class HasPreprocess(Params):
    """Params of a stage whose network takes images of one size."""

    preprocess = param(
        "preprocess",
        "how an image becomes the model's input: JSON of a gpuml.Preprocess (the setter takes one as it is); '' = the "
        "model's own",
        _preprocess_json,
    )
    scaledDecode = param(
        "scaledDecode",
        "decode JPEGs at 1/2, 1/4 or 1/8 of their size where each axis keeps at least this many times the pixels that "
        "preprocess resizes it to: 2 is much faster for photographs of many megapixels, and changes pixels a little; "
        "0 = at full size",
        _scaled_decode,
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(
            preprocess="",
            scaledDecode=0.0,
        )

    def setPreprocess(self, value: Preprocess | str) -> Self:
        """Set `preprocess`: a `gpuml.Preprocess` or its JSON."""
        return self._set(preprocess=value)

    def getPreprocess(self) -> str:
        """The value of `preprocess`, JSON; '' stands for the model's own."""
        return str(self.getOrDefault(self.preprocess))

    def setScaledDecode(self, value: float) -> Self:
        """Set `scaledDecode`."""
        return self._set(scaledDecode=value)

    def getScaledDecode(self) -> float:
        """The value of `scaledDecode`."""
        return float(self.getOrDefault(self.scaledDecode))
