"""What all stages share: the model file that they hold, transform, predict, save and load."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from pyspark.ml import Transformer
from pyspark.ml.param import Param
from pyspark.ml.util import MLReadable, MLWritable
from pyspark.sql import DataFrame, SparkSession, is_remote
from pyspark.sql import functions as F

from gpuml.errors import ParamError, RowError
from gpuml.models import store
from gpuml.spark import columns
from gpuml.spark.conf import warn_of_local_gpu_amount
from gpuml.spark.fetch import is_spark_url, local_copy
from gpuml.spark.params import MODEL_PARAMS, HasModel
from gpuml.spark.persistence import StageReader, StageWriter
from gpuml.spark.udf import score_udf
from gpuml.spec import PYTHON, Preprocess, Spec

if TYPE_CHECKING:
    import pandas as pd
    from PIL import Image
    from torch import nn
    from typing_extensions import Self


class ModelStage(Transformer, HasModel, MLReadable[Any], MLWritable):
    """A stage holds one model file, by its content hash, and adds columns made from its output."""

    #: sha256 of the model file that this stage holds; None until it is first needed.
    _held: str | None = None

    #: Where the stage was loaded from, until the user sets its `model`.
    _loaded_from: str | None = None

    def _own_columns(self) -> dict[str, tuple[str, str]]:
        """Param name -> (column name, the struct's field it is made from), of what a stage of its kind alone gives."""
        raise NotImplementedError

    def _output_columns(self) -> dict[str, tuple[str, str]]:
        """The same of all outputs, in their order; without the empty names."""
        made = {
            **self._own_columns(),
            "errorCol": (self.getErrorCol(), "error"),
            "deviceCol": (self.getDeviceCol(), "device"),
            "timingCol": (self.getTimingCol(), "timing"),
        }
        return {name: (column, field) for name, (column, field) in made.items() if column}

    def _labels(self) -> list[str]:
        """Names of the model's outputs, in place of its own."""
        return []

    def _cut(self, sha256: str) -> str:
        """The model file that the stage runs, made of the one that its Params lead to."""
        return sha256

    # --- the model file -------------------------------------------------------------------------------------------

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

        with store.incoming() as path:
            save_model(net, path, preprocess=preprocess, labels=labels, activation=activation)
            sha256 = store.add(path)
        stage = cls()
        stage.setParams(**params, model=f"sha256:{sha256}")
        stage._held = stage._cut(sha256)
        return stage

    def _is_python(self) -> bool:
        """Whether the network is the user's own code in each worker, with no model file."""
        return self.isDefined(self.model) and self.getModel().startswith(PYTHON)

    def _model_file(self, spark: SparkSession | None = None) -> str:
        """sha256 of the stage's model file: the one that it holds, else what `model` and its Params lead to."""
        if self._held is None:
            if not self.isDefined(self.model):
                raise ParamError(
                    f"{self.uid}: the Param model is not set; e.g. setModel('torchvision:resnet50') or "
                    f"setModel('/path/of/model.pt2')"
                )
            from gpuml.models.sources import named, resolve

            with ExitStack() as copies:
                texts = [self.getModel(), self.getWeights()]
                for place, text in enumerate(texts):
                    if is_spark_url(text):
                        file = copies.enter_context(_spark_copy(text, spark))
                        copies.enter_context(named(file, text))
                        texts[place] = str(file)
                self._held = self._cut(resolve(texts[0], texts[1], self._labels(), self._preprocess()))
        return self._held

    def _preprocess(self) -> Preprocess | None:
        return Preprocess.from_json(self.getPreprocess()) if self.getPreprocess() else None

    def _check_python(self) -> None:
        """Refuse a ``python:`` model that lacks a part."""
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

    def setParams(self, **params: Any) -> Self:
        """Set several Params by name; None leaves one as it is."""
        unknown = [name for name in params if not self.hasParam(name)]
        if unknown:
            raise ParamError(f"{type(self).__name__} has no Param {', '.join(unknown)}; see explainParams()")
        return self._set(**{name: value for name, value in params.items() if value is not None})

    def _set(self, **kwargs: Any) -> Self:
        for name, value in kwargs.items():
            if value is None:  # Spark would take it as it is, past the Param's converter
                raise ParamError(f"{name}=None: give a value, or clear(stage.{name}) for the default")
        super()._set(**kwargs)
        self._changed_by_user(kwargs)
        return self

    def set(self, param: Param[Any], value: Any) -> None:
        super().set(param, value)
        self._changed_by_user([param.name])

    def clear(self, param: Param[Any]) -> None:
        super().clear(param)
        self._forget_model([param.name])

    def copy(self, extra: Any = None) -> Self:
        that = super().copy(extra)
        # A map of extra params may come from a file as well: a CrossValidator saves its grid.
        that._held, that._loaded_from = self._held, self._loaded_from
        # A Pipeline hands every stage the extra params of all.
        that._forget_model(param.name for param in extra or () if param.parent == self.uid)
        return that

    def _changed_by_user(self, names: Any) -> None:
        self._forget_model(names)
        if "model" in names:
            self._loaded_from = None

    def _forget_model(self, names: Any) -> None:
        if any(name in MODEL_PARAMS for name in names):
            self._held = None

    # --- ways out -------------------------------------------------------------------------------------------------

    def _transform(self, dataset: DataFrame) -> DataFrame:
        if dataset.isStreaming and is_remote():
            raise ParamError(
                f"{self.uid}: over Spark Connect a streaming query cannot find the model file that a transform sends. "
                f"Transform each batch instead: stream.writeStream.foreachBatch(lambda batch, number: "
                f"stage.transform(batch).write...)"
            )
        outputs = self._output_columns()
        frame = columns.Frame.of(dataset)
        source = columns.input_column(frame, self.inputCol.name, self.getInputCol(), self.getReadPaths())
        columns.check_outputs(frame, {name: column for name, (column, _) in outputs.items()})
        spec = self._sent_spec((field for _, field in outputs.values()), dataset.sparkSession)

        scored = score_udf(spec, image_struct=source.is_image)
        inputs = [source.column.getField(name) for name in columns.IMAGE_TYPES] if source.is_image else [source.column]
        struct, row = columns.free_names(frame, "gpuml_struct", "gpuml_row")
        added = [scored(*inputs).alias(struct)]
        if self.getHandleInvalid() == "error":
            added.append(columns.row_name(frame, source).alias(row))
        result = dataset.select("*", *added)
        made = {column: columns.from_struct(F.col(struct), field) for column, field in outputs.values()}
        reason = F.col(struct)["error"]
        if self.getHandleInvalid() == "skip":
            result = result.where(reason.isNull())
        elif self.getHandleInvalid() == "error":
            failed = F.raise_error(F.concat(F.lit(f"{self.uid}: "), F.col(row), F.lit(": "), reason))
            made = {column: F.when(reason.isNull(), value).otherwise(failed) for column, value in made.items()}
        return result.select("*", *(value.alias(column) for column, value in made.items())).drop(struct, row)

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

    def _sent_spec(self, fields: Iterable[str], spark: SparkSession) -> Spec:
        """The value that travels to the workers, and before it the model file to their session."""
        spec = self._spec(fields, spark)
        warn_of_local_gpu_amount(spark)
        if not self._is_python():
            _send(store.path_of(spec.model), spark)
        return spec

    def _spec(self, fields: Iterable[str], spark: SparkSession | None = None) -> Spec:
        """The value that travels to the workers."""
        python = self._is_python()
        if python:
            self._check_python()
            self._refuse_saved_code()
        return Spec(
            model=self.getModel() if python else self._model_file(spark),
            labels=tuple(self._labels()) if python else (),
            preprocess=self._preprocess() if python else None,
            batch_size=self.getBatchSize(),
            device=self.getDevice(),
            dtype=self.getDtype(),
            decode_threads=self.getDecodeThreads(),
            max_pixels=self.getMaxPixels(),
            alpha=self.getAlpha(),
            scaled_decode=self.getScaledDecode(),
            read_paths=self.getReadPaths(),
            outputs=columns.worker_fields(fields),
            **self._of_kind(),
        )

    def _of_kind(self) -> dict[str, Any]:
        """What a stage of its kind alone asks of a worker."""
        return {}

    def write(self) -> StageWriter:
        return StageWriter(self)

    @classmethod
    def read(cls) -> StageReader:
        return StageReader(cls)


#: Model files that a Connect session was sent: it keeps them, and a classic context lists its own.
_sent: WeakKeyDictionary[SparkSession, set[str]] = WeakKeyDictionary()


def _send(path: Path, spark: SparkSession) -> None:
    """Make a model file known to a session's jobs, once for each: a new context has lost it."""
    if is_remote():
        known = _sent.setdefault(spark, set())
    else:  # the same file twice is fine but for a warning of Spark's
        known = {file.rpartition("/")[2] for file in spark.sparkContext.listFiles}
    if path.name not in known:
        spark.addArtifacts(str(path), file=True)
        known.add(path.name)


def _spark_copy(url: str, spark: SparkSession | None) -> AbstractContextManager[Path]:
    """A file that Spark reads, on the driver."""
    spark = spark or SparkSession.getActiveSession()
    if spark is None:
        raise ParamError(f"{url!r} is read through Spark, and no session is active: start one, or give a local path")
    return local_copy(url, spark)


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
