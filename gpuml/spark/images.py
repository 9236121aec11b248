"""Stages over a column of images: a worker decodes a row, and a network makes columns of it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame, SparkSession

from gpuml.errors import ParamError, RowError
from gpuml.models import store
from gpuml.spark import columns
from gpuml.spark.base import ModelStage
from gpuml.spark.params import HasImages, HasPreprocess
from gpuml.spark.udf import score_udf
from gpuml.spec import PYTHON, Preprocess, Spec

if TYPE_CHECKING:
    import pandas as pd
    from PIL import Image
    from torch import nn
    from typing_extensions import Self


class ImageStage(ModelStage, HasImages):
    """Runs a model file over a column of images."""

    def _output_columns(self) -> dict[str, tuple[str, str]]:
        made = super()._output_columns()
        if self.getTimingCol():
            made["timingCol"] = (self.getTimingCol(), "timing")
        return made

    def _sources(self) -> list[str]:
        return [self.getModel(), self.getWeights()]

    def _transform(self, dataset: DataFrame) -> DataFrame:
        self._refuse_remote_stream(dataset)
        outputs = self._output_columns()
        frame = columns.Frame.of(dataset)
        source = columns.input_column(frame, self.inputCol.name, self.getInputCol(), self.getReadPaths())
        columns.check_outputs(frame, {name: column for name, (column, _) in outputs.items()})
        spec = self._sent_spec((field for _, field in outputs.values()), dataset.sparkSession)

        scored = score_udf(spec, image_struct=source.is_image)
        inputs = [source.column.getField(name) for name in columns.IMAGE_TYPES] if source.is_image else [source.column]
        return self._with_outputs(dataset, frame, scored(*inputs), columns.row_name(frame, source))

    def predict(self, inputs: Sequence[bytes | str | os.PathLike[str] | Image.Image | None]) -> pd.DataFrame:
        """Run the stage here, with no Spark session, on images in memory or on local files.

        Parameters
        ----------
        inputs : encoded bytes, paths of local files, PIL images; None is a null. With ``readPaths``, text is what
            `transform` takes in a column: URLs too.

        Returns
        -------
        pandas.DataFrame
            One row per input, in order, columns named as the stage's outputs; vectors are float32 arrays.
            ``handleInvalid="skip"`` drops failed rows, keeping the index of the others.

        Raises
        ------
        ParamError
            An input is of another type, or a URL without ``readPaths``.
        RowError
            ``handleInvalid="error"`` and an input cannot be read.
        """
        import pandas as pd
        from PIL import Image

        from gpuml.worker.device import Task
        from gpuml.worker.outputs import plain
        from gpuml.worker.serve import serve

        if isinstance(inputs, (str, bytes, bytearray, memoryview, os.PathLike, Image.Image)):
            raise ParamError(f"predict: inputs is one {type(inputs).__name__}; give a list of them: predict([...])")
        what: Any = inputs
        if isinstance(what, DataFrame) or not isinstance(what, Iterable):
            raise ParamError(
                f"predict: inputs is a {type(what).__name__}; give a list of bytes, local paths or PIL images. A "
                f"DataFrame of Spark goes through transform()"
            )
        inputs = list(inputs)
        rows = [_predict_input(position, value, self.getReadPaths()) for position, value in enumerate(inputs)]
        outputs = self._output_columns()
        columns.check_distinct({name: column for name, (column, _) in outputs.items()})
        spec = self._spec(field for _, field in outputs.values())
        made = serve(rows, spec, Task(cpus=_cpus()), lambda: store.path_of(spec.model))
        failed = [position for position, reason in enumerate(made["error"]) if reason is not None]
        if failed and self.getHandleInvalid() == "error":
            first = failed[0]
            kind, _, message = made["error"][first].partition(": ")
            raise RowError(kind, f"input {first} ({_short(inputs[first])}): {message}")
        frame = pd.DataFrame(
            {
                column: pd.Series(plain(made, field), dtype="float64" if field == "prediction" else object)
                for column, field in outputs.values()
            },
            index=range(len(rows)),
        )
        return frame.drop(index=failed) if self.getHandleInvalid() == "skip" else frame

    def _spec(self, fields: Iterable[str], spark: SparkSession | None = None) -> Spec:
        return Spec(
            model=self.getModel() if self._is_python() else self._model_file(spark),
            batch_size=self.getBatchSize(),
            device=self.getDevice(),
            dtype=self.getDtype(),
            decode_threads=self.getDecodeThreads(),
            max_pixels=self.getMaxPixels(),
            alpha=self.getAlpha(),
            read_paths=self.getReadPaths(),
            outputs=columns.worker_fields(fields),
            **self._of_kind(),
        )

    def _of_kind(self) -> dict[str, Any]:
        """What a stage of its kind alone asks of a worker."""
        return {}


class PixelStage(ImageStage, HasPreprocess):
    """Its network takes a batch of pixels of one size, and gives numbers for each row."""

    def _labels(self) -> list[str]:
        """Names of the model's outputs, in place of its own."""
        return []

    def _resolve(self, *sources: str) -> str:
        from gpuml.models.sources import resolve

        model, weights = sources
        return resolve(model, weights, self._labels(), self._preprocess())

    @classmethod
    def from_module(
        cls,
        net: nn.Module,
        *,
        preprocess: Preprocess,
        labels: Sequence[str] = (),
        activation: str = "softmax",
        **params: Any,
    ) -> Self:
        """A stage for a network in memory, a notebook's own class included; workers need not know the class.

        Parameters
        ----------
        net, preprocess, labels, activation : as `gpuml.save_model` takes them. `net` stays as it is.
        **params : Params of the stage. `model` becomes ``sha256:<hex>``, the content hash of the exported network.

        Raises
        ------
        ModelError
            The network cannot be exported, or does not fit the labels.
        """
        from gpuml.models.file import save_model

        return cls._of_file(
            lambda path: save_model(net, path, preprocess=preprocess, labels=labels, activation=activation), params
        )

    def _is_python(self) -> bool:
        """Whether the network is the user's own code in each worker, with no model file."""
        return self.isDefined(self.model) and self.getModel().startswith(PYTHON)

    def _preprocess(self) -> Preprocess | None:
        return Preprocess.from_json(self.getPreprocess()) if self.getPreprocess() else None

    def _check_python(self) -> None:
        from gpuml.models.python_source import check

        check(self.getModel())
        if self.getWeights():
            raise ParamError(f"weights={self.getWeights()!r}: the function of model={self.getModel()!r} loads its own")
        if self._preprocess() is None:
            raise ParamError(
                f"model={self.getModel()!r} does not say how an image becomes its input: setPreprocess(Preprocess(...))"
            )

    def _refuse_saved_code(self) -> None:
        """A stage from a file names code, and running it must be the user's own word."""
        if self._loaded_from is not None and os.environ.get("GPUML_TRUST_PYTHON") != "1":
            raise ParamError(
                f"{self._loaded_from} would run {self.getModel()!r}: code that it only names. If you trust both, set "
                f"the environment variable GPUML_TRUST_PYTHON=1 on the driver, or say setModel({self.getModel()!r})"
            )

    def _spec(self, fields: Iterable[str], spark: SparkSession | None = None) -> Spec:
        if self._is_python():
            self._check_python()
            self._refuse_saved_code()
        return super()._spec(fields, spark)

    def _of_kind(self) -> dict[str, Any]:
        asked: dict[str, Any] = {"scaled_decode": self.getScaledDecode()}
        if self._is_python():  # it has no card
            asked.update(labels=tuple(self._labels()), preprocess=self._preprocess())
        return asked


def _predict_input(position: int, value: Any, read_paths: bool) -> Any:
    """What a user hands to predict -> what a Runner reads."""
    from PIL import Image

    if value is None or isinstance(value, (bytes, bytearray, memoryview, Image.Image)):
        return value
    if isinstance(value, str) and read_paths:
        return value
    if isinstance(value, (str, os.PathLike)):
        path = os.fspath(value)
        if isinstance(path, str) and "://" in path:
            raise ParamError(
                f"predict: input {position} is a URL, {path!r}; predict reads local files: setReadPaths(True), or "
                f"download it first"
            )
        return Path(os.fsdecode(path))
    raise ParamError(
        f"predict: input {position} is a {type(value).__name__}; give bytes, the path of a local file, or a PIL image"
    )


def _short(value: Any) -> str:
    return f"{len(value)} bytes" if isinstance(value, (bytes, bytearray, memoryview)) else repr(value)


def _cpus() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
