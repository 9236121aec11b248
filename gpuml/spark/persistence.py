"""A stage <-> a folder on any file system that Spark knows: Spark's own metadata, and the model file in chunks."""

from __future__ import annotations

import logging
import os
import re
from typing import TYPE_CHECKING, Any

from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReader
from pyspark.sql import SparkSession, is_remote
from pyspark.sql import functions as F

from gpuml.errors import ModelFileError
from gpuml.models import store
from gpuml.version import __version__

if TYPE_CHECKING:
    from gpuml.spark.base import ModelStage

_log = logging.getLogger("gpuml")

#: One DataFrame with a whole model ends a driver of 1 GB from about 110 MB. In pairs of 8 MiB, 333 MB took 10 s.
CHUNK_BYTES = 8 << 20
CHUNKS_AT_ONCE = 2

CHUNK_SCHEMA = "chunk int, data binary"


class StageWriter(DefaultParamsWriter):
    """Writes ``metadata`` and, when the stage has a model, ``model``: Parquet rows of 8 MiB. No pickle."""

    instance: ModelStage

    def saveImpl(self, path: str) -> None:
        instance = self.instance
        if instance._is_python():
            instance._check_python()
            _log.warning(
                "gpuml: %s is saved by name alone: its code is not in %s, and a stage loaded from there runs it only "
                "where GPUML_TRUST_PYTHON=1 is set",
                instance.getModel(),
                path,
            )
            sha256 = None
        else:
            sha256 = instance._model_file(self.sparkSession) if instance.isDefined(instance.model) else None
        chunks = -(-store.path_of(sha256).stat().st_size // CHUNK_BYTES) if sha256 else 0
        extra = {"gpuml": {"sha256": sha256, "chunks": chunks}}
        DefaultParamsWriter.saveMetadata(instance, path, self.sparkSession, extraMetadata=extra)
        if sha256:
            self._write_chunks(sha256, os.path.join(path, "model"))

    def _write_chunks(self, sha256: str, path: str) -> None:
        with store.path_of(sha256).open("rb") as file:
            number, rows = 0, []
            while data := file.read(CHUNK_BYTES):
                rows.append((number, data))
                number += 1
                if len(rows) == CHUNKS_AT_ONCE:
                    self._append(rows, path)
                    rows = []
            if rows:
                self._append(rows, path)

    def _append(self, rows: list[tuple[int, bytes]], path: str) -> None:
        frame = self.sparkSession.createDataFrame(rows, CHUNK_SCHEMA).coalesce(1)
        frame.write.mode("append").option("compression", "uncompressed").parquet(path)

    def _handleOverwrite(self, path: str) -> None:
        """Spark's own asks a JVM session of a Connect client, in 4.0 to 4.3; Pipelines take this way round it."""
        if is_remote():
            from pyspark.ml.connect.readwrite import RemoteMLWriter

            RemoteMLWriter.handleOverwrite(path, True)
        else:
            super()._handleOverwrite(path)


class StageReader(MLReader[Any]):
    """Reads what `StageWriter` wrote; the model file goes into the cache at once, the Params stay as saved."""

    def __init__(self, cls: type[ModelStage]) -> None:
        super().__init__()
        self.cls = cls

    def load(self, path: str) -> ModelStage:
        """The stage that was saved under `path`.

        Raises
        ------
        ModelFileError
            The model's chunks are missing, damaged, or not safe to open.
        """
        metadata = DefaultParamsReader.loadMetadata(path, self.sparkSession)
        wanted = f"{self.cls.__module__}.{self.cls.__name__}"
        if metadata["class"] != wanted:
            name = metadata["class"]
            raise ModelFileError(f"{path} holds a {name}, not a {wanted}; load it with {name.rpartition('.')[2]}.load")
        stage = self.cls()
        saved = metadata.get("gpuml")
        if not isinstance(saved, dict) or not {"sha256", "chunks"} <= set(saved) or "uid" not in metadata:
            raise ModelFileError(
                f"{path}: the metadata is damaged: it lacks uid, sha256 or chunks; save the stage again"
            )
        for name in [*metadata["paramMap"], *metadata["defaultParamMap"]]:
            if not stage.hasParam(name):
                raise ModelFileError(
                    f"{path} was saved with the Param {name!r}, which gpuml {__version__} does not know; upgrade gpuml"
                )
        for saved_params in (metadata["paramMap"], metadata["defaultParamMap"]):
            labels = saved_params.get("labels", [])
            if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
                raise ModelFileError(
                    f"{path}: its labels are no list of names; save the stage again"
                )  # no path to read
        stage._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(stage, metadata)
        stage._loaded_from = path
        sha256, chunks = saved["sha256"], saved["chunks"]
        if sha256 is not None:
            if not re.fullmatch("[0-9a-f]{64}", str(sha256)) or not isinstance(chunks, int):
                raise ModelFileError(f"{path}: {sha256!r} is no sha256; the metadata is damaged, save the stage again")
            if not store.holds(sha256):
                _read_chunks(self.sparkSession, os.path.join(path, "model"), sha256, chunks)
            stage._held = sha256
        return stage


def _read_chunks(spark: SparkSession, path: str, sha256: str, chunks: int) -> None:
    """Chunks of a saved model file -> the cache, a few at a time; the content must have the hash that was saved."""
    from gpuml.models.file import read_card

    frame = spark.read.schema(CHUNK_SCHEMA).parquet(path)
    with store.incoming() as file:
        with file.open("wb") as out:
            for first in range(0, chunks, CHUNKS_AT_ONCE):
                wanted = range(first, min(first + CHUNKS_AT_ONCE, chunks))
                rows = frame.where(F.col("chunk").between(wanted[0], wanted[-1])).collect()
                if sorted(row.chunk for row in rows) != list(wanted):
                    raise ModelFileError(f"{path} lacks chunk {first} or has it twice; save the stage again")
                for row in sorted(rows, key=lambda row: int(row.chunk)):
                    out.write(row.data)
        if store.hash_of(file) != sha256:
            raise ModelFileError(f"{path} does not hold the model that was saved (sha256 differs); save it again")
        read_card(file)  # a file that is not safe is refused here, not on a worker
        store.add(file)
