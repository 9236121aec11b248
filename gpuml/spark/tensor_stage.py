"""TensorTransformer: a pyspark.ml Transformer that runs a network over columns of numbers, by names of inputs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark import keyword_only
from pyspark.ml.param.shared import HasPredictionCol, HasProbabilityCol, HasRawPredictionCol
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from gpuml.errors import ParamError
from gpuml.spark import columns, inputs
from gpuml.spark.base import ModelStage
from gpuml.spark.mappings import HasMappings
from gpuml.spark.params import HasLabels, param
from gpuml.spark.score import score_columns
from gpuml.spec import OUTPUT, Spec

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from torch import nn
    from typing_extensions import Self

    from gpuml.models.cards import Port, TensorCard


class TensorTransformer(ModelStage, HasMappings, HasLabels, HasPredictionCol, HasProbabilityCol, HasRawPredictionCol):
    """Runs a PyTorch network of one or several inputs and outputs over columns of numbers, each task on its own GPU.

    An input takes a column of numbers, of arrays of them nested at will, or of ML Vectors; each output becomes a
    column, and ``outputError`` (string) says why a row has none. On request the first output is taken for a
    classifier's: ``prediction`` and the others. All come from one forward pass. All input columns pass through; a row
    with a null, or with an array of another length than the network takes, keeps its place, with nulls and the reason.

    Parameters
    ----------
    model : path of a model file (``gpuml.save_model(net, path, inputs=...)``); see `explainParams` for this and all
        others.

    Raises
    ------
    ParamError
        A Param is out of range; at transform: a column is missing, wrongly typed or already there, `model` is unset.
    ModelError
        At transform: the model cannot be found or used.

    Examples
    --------
    >>> import pandas as pd, torch
    >>> stage = TensorTransformer.from_module(torch.nn.Linear(2, 1), inputs={"x": torch.randn(2, 2)}, outputs=["y"])
    >>> stage.predict(pd.DataFrame({"x": [[1.0, 2.0], None]})).columns.tolist()
    ['y', 'outputError']
    """

    _models = ""

    model = param(
        "model",
        "model source: the path on the driver, or a URL (http, https, what Spark reads), of a model file "
        "(gpuml.save_model with inputs=...), or of a torch.export archive whose batch is dynamic; 'sha256:<hex>' is a "
        "model in memory (from_module). No default",
        ModelStage.model.typeConverter,
    )
    predictionCol = param(
        "predictionCol",
        "output column, double: index of the most probable class by the first output; '' = not produced",
    )
    predictedLabelCol = param("predictedLabelCol", "output column, string: its label; '' = not produced")
    probabilityCol = param("probabilityCol", "output column, Vector: probability of each class; '' = not produced")
    rawPredictionCol = param(
        "rawPredictionCol", "output column, Vector: the first output, before any activation; '' = not produced"
    )

    @keyword_only
    def __init__(
        self,
        *,
        model: str | None = None,
        inputMapping: Mapping[str, str] | None = None,
        outputMapping: Mapping[str, str] | None = None,
        outputVectors: bool | None = None,
        batchSize: int | None = None,
        labels: Sequence[str] | os.PathLike[str] | None = None,
        device: str | None = None,
        dtype: str | None = None,
        handleInvalid: str | None = None,
        errorCol: str | None = None,
        deviceCol: str | None = None,
        predictionCol: str | None = None,
        predictedLabelCol: str | None = None,
        probabilityCol: str | None = None,
        rawPredictionCol: str | None = None,
    ) -> None:
        super().__init__()
        self._setDefault(
            # Two stages of a Pipeline must not want one column.
            errorCol="outputError",
            predictionCol="",
            predictedLabelCol="",
            probabilityCol="",
            rawPredictionCol="",
        )
        self.setParams(**self._input_kwargs)  # type: ignore[attr-defined]  # set by keyword_only

    @classmethod
    def from_module(
        cls,
        net: nn.Module,
        *,
        inputs: Mapping[str, torch.Tensor],
        outputs: Sequence[str] = (),
        labels: Sequence[str] = (),
        activation: str = "softmax",
        **params: Any,
    ) -> Self:
        """A stage for a network in memory, a notebook's own class included; workers need not know the class.

        Parameters
        ----------
        net, inputs, outputs, labels, activation : as `gpuml.save_model` takes them. `net` stays as it is.
        **params : Params of the stage. `model` becomes ``sha256:<hex>``, the content hash of the exported network.

        Raises
        ------
        ModelError
            The network cannot be exported, or does not fit the samples or labels.
        """
        from gpuml.models.file import save_model

        return cls._of_file(
            lambda path: save_model(net, path, inputs=inputs, outputs=outputs, labels=labels, activation=activation),
            params,
        )

    # --- Params ---------------------------------------------------------------------------------------------------

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

    # --- what the model says --------------------------------------------------------------------------------------

    def _resolve(self, *sources: str) -> str:
        from gpuml.models.tensor_sources import resolve

        (model,) = sources
        return resolve(model, self.getLabels())

    def _card(self, spark: SparkSession | None = None) -> TensorCard:
        from gpuml.models.tensor_sources import card_of

        return card_of(self._model_file(spark))

    def _spec(self, fields: Iterable[str], spark: SparkSession | None = None) -> Spec:
        return Spec(
            model=self._model_file(spark),
            batch_size=self.getBatchSize(),
            device=self.getDevice(),
            dtype=self.getDtype(),
            outputs=columns.worker_fields(fields),
        )

    def _sources_of_inputs(self, card: TensorCard) -> list[tuple[str, Port]]:
        """The column of each input, in the order of the inputs."""
        chosen = {name: column for column, name in self.getInputMapping().items()}
        inputs.check_names("inputMapping", chosen, [port.name for port in card.inputs], "input")
        return [(chosen.get(port.name, port.name), port) for port in card.inputs]

    def _own_columns(self) -> dict[str, tuple[str, str]]:
        card = self._card()
        names = [port.name for port in card.outputs]
        chosen = self.getOutputMapping() or {name: name for name in names}
        inputs.check_names("outputMapping", chosen, names, "output")
        made = {
            f"outputMapping[{name!r}]": (chosen[name], f"{OUTPUT}{i}") for i, name in enumerate(names) if name in chosen
        }
        classes = {
            "predictionCol": (self.getPredictionCol(), "prediction"),
            "predictedLabelCol": (self.getPredictedLabelCol(), "predictedLabel"),
            "probabilityCol": (self.getProbabilityCol(), "probability"),
            "rawPredictionCol": (self.getRawPredictionCol(), "rawPrediction"),
        }
        for name, (column, _) in classes.items():
            if column:
                _check_classes(f"{name}={column!r}", card)
        return {**made, **classes}

    def _made(self, struct: Column, field: str) -> Column:
        if field.startswith(OUTPUT) and self.getOutputVectors():
            port = self._card().outputs[int(field.removeprefix(OUTPUT))]
            if len(port.shape) == 1 and port.dtype.startswith("float"):
                return columns.as_vector(struct[field])
        return super()._made(struct, field)

    # --- ways out -------------------------------------------------------------------------------------------------

    def _transform(self, dataset: DataFrame) -> DataFrame:
        self._refuse_remote_stream(dataset)
        card = self._card(dataset.sparkSession)
        outputs = self._output_columns()
        frame = columns.Frame.of(dataset)
        taken = [inputs.column_for(frame, column, port) for column, port in self._sources_of_inputs(card)]
        columns.check_outputs(frame, {name: column for name, (column, _) in outputs.items()})
        spec = self._sent_spec((field for _, field in outputs.values()), dataset.sparkSession)
        row = columns.row_name(frame, columns.Input(F.lit(None)))
        return self._with_outputs(dataset, frame, score_columns(spec, card, taken), row)

    def predict(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Run the stage here, with no Spark session, on a frame of pandas.

        Parameters
        ----------
        frame : its columns hold numbers, or lists or arrays of NumPy; None is a null.

        Returns
        -------
        pandas.DataFrame
            The index of `frame`, columns named as the stage's outputs; arrays and vectors are arrays of NumPy.
            ``handleInvalid="skip"`` drops failed rows.

        Raises
        ------
        ParamError
            A column is missing or does not hold what the model takes.
        RowError
            ``handleInvalid="error"`` and a row does not fit.
        """
        from gpuml.spark.frames import predicted

        return predicted(self, frame)


def _check_classes(what: str, card: TensorCard) -> None:
    first = card.outputs[0]
    if len(first.shape) != 1 or not first.dtype.startswith("float"):
        raise ParamError(
            f"{what}: classes are made of the first output, and that is {first}, not float (batch, classes). Name the "
            f"outputs in another order: gpuml.save_model(..., outputs=[...])"
        )
    if first.shape == (1,) and card.activation == "softmax":
        raise ParamError(
            f"{what}: softmax over one class, {first}, is always 1. Give the network two; or write it with "
            f"gpuml.save_model(..., activation='sigmoid') and compare its probability with a threshold of yours"
        )


# The path that saved stages name: it outlives any move of the module behind it.
TensorTransformer.__module__ = "gpuml"
