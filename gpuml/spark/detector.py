"""The stage that finds objects: a column of images -> a column of boxes, by a detection model of torchvision's kind."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from pyspark import keyword_only
from pyspark.ml.param import TypeConverters
from pyspark.ml.param.shared import HasOutputCol
from pyspark.sql import SparkSession

from gpuml.errors import ParamError
from gpuml.spark import columns
from gpuml.spark.images import ImageStage
from gpuml.spark.params import HasLabels, HasModel, at_least, param
from gpuml.spec import Spec

if TYPE_CHECKING:
    from torch import nn
    from typing_extensions import Self


def _score(value: Any) -> float:
    try:
        number = TypeConverters.toFloat(value)
    except (TypeError, OverflowError):
        number = math.nan
    if isinstance(value, bool) or not 0 <= number <= 1:
        raise ParamError(f"scoreThreshold={value!r} is not a number from 0 to 1")
    return number


class ObjectDetector(ImageStage, HasLabels, HasOutputCol):
    """Finds objects in the images of a column with a PyTorch model, each task on its own GPU.

    Adds ``detections``, an array of structs (x1, y1, x2, y2, label, score) by falling score, and ``detectionsError``
    (string). Boxes are in pixels of the image itself, once its EXIF orientation is applied: x to the right, y down from
    its upper left corner. An image without objects has an empty array; one that cannot be read has null and the reason.
    All input columns pass through.

    Parameters
    ----------
    model : ``torchvision:<name>`` of a detection model, or the path of a file of `gpuml.save_detector`; see
        `explainParams` for this and all others.

    Raises
    ------
    ParamError
        A Param is out of range; at transform: a column is missing, wrongly typed or already there, `model` is unset.
    ModelError
        At transform: the model cannot be found or used.

    Examples
    --------
    >>> detector = ObjectDetector(model="torchvision:ssdlite320_mobilenet_v3_large", weights="none")
    >>> detector.predict(["examples/images/coffee.jpg"]).detections[0]
    []
    """

    model = param(
        "model",
        "model source: 'torchvision:<name>' of a detection model; the path on the driver, or a URL (http, https, what "
        "Spark reads), of a file of gpuml.save_detector; 'sha256:<hex>' is a model in memory (from_module). No default",
        HasModel.model.typeConverter,
    )
    labels = param(
        "labels",
        "category names, by the number that the model gives, from 0 on (torchvision's models count the background as "
        "0): a list, or the path of a text file with one a line; [] = the model's own; if it has none, a label is the "
        "number as text",
        HasLabels.labels.typeConverter,
    )
    batchSize = param(
        "batchSize",
        "images that are decoded together, from 1 up; those of one size share a forward pass",
        at_least("batchSize", 1),
    )
    dtype = param("dtype", "'float32'; a transform refuses any other", HasModel.dtype.typeConverter)
    scoreThreshold = param(
        "scoreThreshold",
        "boxes of a lower score are left out, 0 to 1. A model has a least score and a largest number of boxes of its "
        "own: many of torchvision's 0.05, and 100 an image",
        _score,
    )
    outputCol = param("outputCol", f"output column, {columns.DETECTIONS_TYPE}; '' = not produced")

    _models = "setModel('torchvision:fasterrcnn_resnet50_fpn_v2') or "

    @keyword_only
    def __init__(
        self,
        *,
        inputCol: str | None = None,
        outputCol: str | None = None,
        model: str | None = None,
        weights: str | None = None,
        labels: Sequence[str] | os.PathLike[str] | None = None,
        scoreThreshold: float | None = None,
        batchSize: int | None = None,
        device: str | None = None,
        dtype: str | None = None,
        decodeThreads: int | None = None,
        readPaths: bool | None = None,
        maxPixels: int | None = None,
        alpha: str | None = None,
        handleInvalid: str | None = None,
        errorCol: str | None = None,
        deviceCol: str | None = None,
        timingCol: str | None = None,
    ) -> None:
        super().__init__()
        # The network enlarges each image, many of torchvision's to 800 x 1333 pixels: 21 times those of 224 x 224.
        self._setDefault(outputCol="detections", errorCol="detectionsError", scoreThreshold=0.5, batchSize=4)
        self.setParams(**self._input_kwargs)  # type: ignore[attr-defined]  # set by keyword_only

    def setOutputCol(self, value: str) -> Self:
        """Set `outputCol`."""
        return self._set(outputCol=value)

    def setScoreThreshold(self, value: float) -> Self:
        """Set `scoreThreshold`."""
        return self._set(scoreThreshold=value)

    def getScoreThreshold(self) -> float:
        """The value of `scoreThreshold`."""
        return float(self.getOrDefault(self.scoreThreshold))

    @classmethod
    def from_module(cls, net: nn.Module, *, labels: Sequence[str] = (), **params: Any) -> Self:
        """A stage for a network in memory, a notebook's own class included; workers need not know the class.

        Parameters
        ----------
        net, labels : as `gpuml.save_detector` takes them. `net` stays as it is.
        **params : Params of the stage. `model` becomes ``sha256:<hex>``, the content hash of the scripted network.

        Raises
        ------
        ModelError
            The network cannot be scripted, gives no boxes, or does not fit the labels.
        """
        from gpuml.models.detection import save_detector

        return cls._of_file(lambda path: save_detector(net, path, labels), params)

    def _resolve(self, *sources: str) -> str:
        from gpuml.models.detection_sources import resolve

        model, weights = sources
        return resolve(model, weights, self.getLabels())

    def _spec(self, fields: Iterable[str], spark: SparkSession | None = None) -> Spec:
        if self.getDtype() != "float32":
            raise ParamError(
                f"dtype={self.getDtype()!r}: an ObjectDetector computes in float32. In half precision a place is known "
                f"to 1 of 256 or so, and boxes move by whole pixels: setDtype('float32')"
            )
        return super()._spec(fields, spark)

    def _of_kind(self) -> dict[str, Any]:
        return {"score_threshold": self.getScoreThreshold()}

    def _own_columns(self) -> dict[str, tuple[str, str]]:
        return {"outputCol": (self.getOutputCol(), "detections")}


# The path that saved stages name.
ObjectDetector.__module__ = "gpuml"
