"""The stages: pyspark.ml Transformers that run a model file over a column of images."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pyspark import keyword_only
from pyspark.ml.param import TypeConverters
from pyspark.ml.param.shared import HasOutputCol, HasPredictionCol, HasProbabilityCol, HasRawPredictionCol

from gpuml.errors import ParamError
from gpuml.spark import columns
from gpuml.spark.images import PixelStage
from gpuml.spark.params import HasLabels, at_least, param
from gpuml.spec import OUTPUT, Preprocess

if TYPE_CHECKING:
    from typing_extensions import Self


class ImageClassifier(PixelStage, HasLabels, HasPredictionCol, HasProbabilityCol, HasRawPredictionCol):
    """Classifies images in a column with a PyTorch model, each task on its own GPU.

    Adds ``prediction`` (double index), ``predictedLabel`` (string), ``probability`` (Vector) and ``error`` (string);
    on request ``rawPrediction`` (Vector), top-k, the device, and the time of each stage. All come from one forward
    pass. All input columns pass through; the row of an image that cannot be read keeps its place, with nulls and the
    reason.

    Parameters
    ----------
    model : ``torchvision:<name>``, or the path of a model file; see `explainParams` for this and all others.

    Raises
    ------
    ParamError
        A Param is out of range; at transform: a column is missing, wrongly typed or already there, `model` is unset.
    ModelError
        At transform: the model cannot be found or used.

    Examples
    --------
    >>> classifier = ImageClassifier(model="torchvision:squeezenet1_1", weights="none", topKCol="top")
    >>> classifier.predict(["examples/images/coffee.jpg"]).columns.tolist()
    ['prediction', 'predictedLabel', 'probability', 'top', 'error']
    """

    predictionCol = param("predictionCol", "output column, double: index of the most probable class; '' = not produced")
    predictedLabelCol = param(
        "predictedLabelCol",
        "output column, string: label of the most probable class; '' = not produced",
    )
    probabilityCol = param("probabilityCol", "output column, Vector: probability of each class; '' = not produced")
    rawPredictionCol = param("rawPredictionCol", "output column, Vector: the model's output itself; '' = not produced")
    topKCol = param("topKCol", f"output column, {columns.TOP_K_TYPE}: the most probable classes; '' = not produced")
    topK = param("topK", "how many classes topKCol holds, from 1 up", at_least("topK", 1))

    @keyword_only
    def __init__(
        self,
        *,
        inputCol: str | None = None,
        model: str | None = None,
        weights: str | None = None,
        batchSize: int | None = None,
        labels: Sequence[str] | os.PathLike[str] | None = None,
        preprocess: Preprocess | str | None = None,
        device: str | None = None,
        dtype: str | None = None,
        decodeThreads: int | None = None,
        readPaths: bool | None = None,
        maxPixels: int | None = None,
        alpha: str | None = None,
        scaledDecode: float | None = None,
        handleInvalid: str | None = None,
        errorCol: str | None = None,
        deviceCol: str | None = None,
        timingCol: str | None = None,
        predictionCol: str | None = None,
        predictedLabelCol: str | None = None,
        probabilityCol: str | None = None,
        rawPredictionCol: str | None = None,
        topKCol: str | None = None,
        topK: int | None = None,
    ) -> None:
        super().__init__()
        self._setDefault(
            predictionCol="prediction",
            predictedLabelCol="predictedLabel",
            probabilityCol="probability",
            rawPredictionCol="",
            topKCol="",
            topK=5,
        )
        self.setParams(**self._input_kwargs)  # type: ignore[attr-defined]  # set by keyword_only

    def setPredictionCol(self, value: str) -> Self:
        """Set `predictionCol`."""
        return self._set(predictionCol=value)

    def setPredictedLabelCol(self, value: str) -> Self:
        """Set `predictedLabelCol`."""
        return self._set(predictedLabelCol=value)

    def getPredictedLabelCol(self) -> str:
        """The value of `predictedLabelCol`."""
        return str(self.getOrDefault(self.predictedLabelCol))

    def setProbabilityCol(self, value: str) -> Self:
        """Set `probabilityCol`."""
        return self._set(probabilityCol=value)

    def setRawPredictionCol(self, value: str) -> Self:
        """Set `rawPredictionCol`."""
        return self._set(rawPredictionCol=value)

    def setTopKCol(self, value: str) -> Self:
        """Set `topKCol`."""
        return self._set(topKCol=value)

    def getTopKCol(self) -> str:
        """The value of `topKCol`."""
        return str(self.getOrDefault(self.topKCol))

    def setTopK(self, value: int) -> Self:
        """Set `topK`."""
        return self._set(topK=value)

    def getTopK(self) -> int:
        """The value of `topK`."""
        return int(self.getOrDefault(self.topK))

    def _labels(self) -> list[str]:
        return self.getLabels()

    def _of_kind(self) -> dict[str, Any]:
        return {**super()._of_kind(), "top_k": self.getTopK()}

    def _own_columns(self) -> dict[str, tuple[str, str]]:
        return {
            "predictionCol": (self.getPredictionCol(), "prediction"),
            "predictedLabelCol": (self.getPredictedLabelCol(), "predictedLabel"),
            "probabilityCol": (self.getProbabilityCol(), "probability"),
            "rawPredictionCol": (self.getRawPredictionCol(), "rawPrediction"),
            "topKCol": (self.getTopKCol(), "topK"),
        }


class ImageFeaturizer(PixelStage, HasOutputCol):
    """Turns images in a column into vectors, for a learner of Spark's: what a network knows before it classifies.

    Adds ``features`` (Vector) and ``featuresError`` (string); all input columns pass through. The row of an image that
    cannot be read keeps its place, with nulls and the reason, or is dropped by ``handleInvalid="skip"``, as a learner
    needs.

    Parameters
    ----------
    model : ``torchvision:<name>``, or the path of a model file; see `explainParams` for this and all others.
    layer : where the network is cut.

    Raises
    ------
    ParamError
        A Param is out of range; at transform: a column is missing, wrongly typed or already there, `model` is unset.
    ModelError
        At transform: the model cannot be found or used, or has no such layer.

    Examples
    --------
    >>> featurizer = ImageFeaturizer(model="torchvision:squeezenet1_1", weights="none")
    >>> featurizer.predict(["examples/images/coffee.jpg"]).features[0].shape
    (512,)
    """

    layer = param(
        "layer",
        "name of the module whose output the features are, such as 'layer3' or 'classifier.1'; maps are averaged over "
        "height and width. '' = the input of the last linear layer or 1x1 convolution, the classifier; 'output' = the "
        "model's own output",
    )
    normalize = param("normalize", "divide each vector by its Euclidean length; zeros stay", TypeConverters.toBoolean)

    @keyword_only
    def __init__(
        self,
        *,
        inputCol: str | None = None,
        outputCol: str | None = None,
        model: str | None = None,
        weights: str | None = None,
        layer: str | None = None,
        normalize: bool | None = None,
        batchSize: int | None = None,
        preprocess: Preprocess | str | None = None,
        device: str | None = None,
        dtype: str | None = None,
        decodeThreads: int | None = None,
        readPaths: bool | None = None,
        maxPixels: int | None = None,
        alpha: str | None = None,
        scaledDecode: float | None = None,
        handleInvalid: str | None = None,
        errorCol: str | None = None,
        deviceCol: str | None = None,
        timingCol: str | None = None,
    ) -> None:
        super().__init__()
        # Two stages of a Pipeline must not want one column.
        self._setDefault(outputCol="features", errorCol="featuresError", layer="", normalize=False)
        self.setParams(**self._input_kwargs)  # type: ignore[attr-defined]  # set by keyword_only

    def setOutputCol(self, value: str) -> Self:
        """Set `outputCol`."""
        return self._set(outputCol=value)

    def setLayer(self, value: str) -> Self:
        """Set `layer`."""
        return self._set(layer=value)

    def getLayer(self) -> str:
        """The value of `layer`."""
        return str(self.getOrDefault(self.layer))

    def setNormalize(self, value: bool) -> Self:
        """Set `normalize`."""
        return self._set(normalize=value)

    def getNormalize(self) -> bool:
        """The value of `normalize`."""
        return bool(self.getOrDefault(self.normalize))

    def _cut(self, sha256: str) -> str:
        from gpuml.models.features import features_of

        return features_of(sha256, self.getLayer())

    def _check_python(self) -> None:
        super()._check_python()
        if self.getLayer() != OUTPUT:
            raise ParamError(
                f"layer={self.getLayer()!r}: the network of {self.getModel()!r} is made in each worker, and is not "
                f"cut; let it give the features, and setLayer({OUTPUT!r})"
            )

    def _of_kind(self) -> dict[str, Any]:
        return {**super()._of_kind(), "normalize": self.getNormalize()}

    def _own_columns(self) -> dict[str, tuple[str, str]]:
        return {"outputCol": (self.getOutputCol(), "features")}


# The path that saved stages name: it outlives any move of the modules behind it.
ImageClassifier.__module__ = ImageFeaturizer.__module__ = "gpuml"
