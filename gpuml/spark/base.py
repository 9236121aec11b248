"""What all stages share: the model file that they hold, transform, predict, save and load."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from pyspark.ml import Transformer
from pyspark.ml.param import Param
from pyspark.ml.util import MLReadable, MLWritable
from pyspark.sql import Column, DataFrame, SparkSession, is_remote
from pyspark.sql import functions as F

from gpuml.errors import ParamError
from gpuml.models import store
from gpuml.spark import columns
from gpuml.spark.conf import warn_of_local_gpu_amount
from gpuml.spark.fetch import is_spark_url, local_copy
from gpuml.spark.params import MODEL_PARAMS, HasModel
from gpuml.spark.persistence import StageReader, StageWriter
from gpuml.spec import Spec

if TYPE_CHECKING:
    from typing_extensions import Self


class ModelStage(Transformer, HasModel, MLReadable[Any], MLWritable):
    """A stage holds one model file, by its content hash, and adds columns made from its output."""

    #: What else than a path its model may be, in the words of an error.
    _models = "setModel('torchvision:resnet50') or "

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
        }
        return {name: (column, field) for name, (column, field) in made.items() if column}

    def _sources(self) -> list[str]:
        """What the stage's Params name of files: the model, and what goes with it."""
        return [self.getModel()]

    def _cut(self, sha256: str) -> str:
        """The model file that the stage runs, made of the one that its Params lead to."""
        return sha256

    @classmethod
    def _of_file(cls, write: Callable[[Path], None], params: dict[str, Any]) -> Self:
        """A stage with these Params, for the model file that `write` makes at a path."""
        with store.incoming() as path:
            write(path)
            sha256 = store.add(path)
        stage = cls()
        stage.setParams(**params, model=f"sha256:{sha256}")
        stage._held = stage._cut(sha256)
        return stage

    def _resolve(self, *sources: str) -> str:
        """sha256 of the model file that they lead to."""
        raise NotImplementedError

    def _is_python(self) -> bool:
        """Whether the network is the user's own code in each worker, with no model file."""
        return False

    def _check_python(self) -> None:
        """Refuse a ``python:`` model that lacks a part."""

    def _spec(self, fields: Iterable[str], spark: SparkSession | None = None) -> Spec:
        """The value that travels to the workers."""
        raise NotImplementedError

    # --- the model file -------------------------------------------------------------------------------------------

    def _model_file(self, spark: SparkSession | None = None) -> str:
        """sha256 of the stage's model file: the one that it holds, else what `model` and its Params lead to."""
        if self._held is None:
            if not self.isDefined(self.model):
                raise ParamError(
                    f"{self.uid}: the Param model is not set; e.g. {self._models}setModel('/path/of/model.pt2')"
                )
            from gpuml.models.sources import named

            with ExitStack() as copies:
                texts = self._sources()
                for place, text in enumerate(texts):
                    if is_spark_url(text):
                        file = copies.enter_context(_spark_copy(text, spark))
                        copies.enter_context(named(file, text))
                        texts[place] = str(file)
                self._held = self._cut(self._resolve(*texts))
        return self._held

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

    def _with_outputs(self, dataset: DataFrame, frame: columns.Frame, scored: Column, row: Column) -> DataFrame:
        """A frame with the stage's output columns, made from the struct that its UDF gives.

        `row` is how an error names a row, see `columns.row_name`.
        """
        struct, name = columns.free_names(frame, "gpuml_struct", "gpuml_row")
        added = [scored.alias(struct)]
        if self.getHandleInvalid() == "error":
            added.append(row.alias(name))
        result = dataset.select("*", *added)
        made = {column: self._made(F.col(struct), field) for column, field in self._output_columns().values()}
        reason = F.col(struct)["error"]
        if self.getHandleInvalid() == "skip":
            result = result.where(reason.isNull())
        elif self.getHandleInvalid() == "error":
            failed = F.raise_error(F.concat(F.lit(f"{self.uid}: "), F.col(name), F.lit(": "), reason))
            made = {column: F.when(reason.isNull(), value).otherwise(failed) for column, value in made.items()}
        return result.select("*", *(value.alias(column) for column, value in made.items())).drop(struct, name)

    def _made(self, struct: Column, field: str) -> Column:
        """One output column of the worker's struct."""
        return columns.from_struct(struct, field)

    def _refuse_remote_stream(self, dataset: DataFrame) -> None:
        if dataset.isStreaming and is_remote():
            raise ParamError(
                f"{self.uid}: over Spark Connect a streaming query cannot find the model file that a transform sends. "
                f"Transform each batch instead: stream.writeStream.foreachBatch(lambda batch, number: "
                f"stage.transform(batch).write...)"
            )

    def _sent_spec(self, fields: Iterable[str], spark: SparkSession) -> Spec:
        """The value that travels to the workers, and before it the model file to their session."""
        spec = self._spec(fields, spark)
        warn_of_local_gpu_amount(spark)
        if not self._is_python():
            _send(store.path_of(spec.model), spark)
        return spec

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
