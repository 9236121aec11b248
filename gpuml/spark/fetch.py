"""A URL that Spark's own file systems read, such as s3a:// or hdfs:// -> a file on the driver, over Connect too."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import StorageLevel
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from gpuml.errors import ModelError
from gpuml.models import store
from gpuml.spark.persistence import CHUNK_BYTES, CHUNKS_AT_ONCE

#: Suffixes of Hadoop's codecs, by which the text source would unpack a file.
_CODECS = (".gz", ".bz2", ".deflate", ".snappy", ".lz4", ".zst")


def is_spark_url(text: str) -> bool:
    """Whether only Spark knows how to read it: a scheme and a slash, but none that gpuml.models reads by itself."""
    return (
        re.match(r"(?!(https?|file|torchvision|timm|hf|python|sha256):)[A-Za-z][A-Za-z0-9+.-]+:/", text, re.IGNORECASE)
        is not None
    )


@contextmanager
def local_copy(url: str, spark: SparkSession) -> Iterator[Path]:
    """A file of Spark's on the driver, for the time of a block.

    Tasks read it, with the cluster's credentials, and cut it into pieces; the driver asks for a few at a time. They
    read it as lines, whatever it is: Spark's text source alone goes through a file bit by bit, and leaves the bytes as
    they are. Its binaryFile source takes a file as one cell: 351 MiB of it ended an executor of 1 GB.

    Raises
    ------
    ModelError
        There is no such file, or Spark cannot read it.
    """
    name = url.rstrip("/").rpartition("/")[2]
    if name.startswith(("_", ".")):
        raise ModelError(f"{url!r}: Spark does not read files whose name begins with _ or a dot; rename it")
    if name.lower().endswith(_CODECS):
        raise ModelError(f"{url!r}: Spark would unpack a file of that name; unpack it yourself, or rename it")
    with store.incoming() as copy:
        try:
            _read(url, copy, spark)
        except ModelError:
            raise
        except Exception as error:  # Spark's, py4j's or Connect's, by file system
            raise ModelError(f"Spark cannot read {url!r}: {_first_line(error)}") from error
        yield copy


def _read(url: str, copy: Path, spark: SparkSession) -> None:
    """Write the bytes of a file of Spark's to `copy`."""
    path = re.sub(r"([\\*?\[\]{}])", r"\\\1", url)  # a path is a pattern to Spark
    found = spark.read.format("binaryFile").load(path).select("length").limit(2).collect()  # lengths alone
    if len(found) != 1:
        raise ModelError(f"{url!r} is {'a folder; name a file in it' if found else 'an empty file or folder'}")
    length = found[0].length
    lines = spark.read.option("lineSep", "\n").text(path)
    lines = lines.select(F.col("_metadata.file_block_start").alias("start"), F.col("value").cast("binary"))
    pieces = lines.mapInArrow(_cut, "place long, data binary").persist(StorageLevel.DISK_ONLY)
    try:
        order = sorted(row.place for row in pieces.select("place").collect())
        with copy.open("w+b") as out:
            # Each job reads all that is persisted; eight pieces at once were fewer jobs, and hung a server of 1 GB.
            for first in range(0, len(order), CHUNKS_AT_ONCE):
                wanted = F.col("place").isin(order[first : first + CHUNKS_AT_ONCE])
                for row in sorted(pieces.where(wanted).collect(), key=lambda row: int(row.place)):
                    out.write(row.data)
            came = out.tell()
            if came == length + 1:  # the file does not end in a new line
                out.seek(length)
                if out.read() == b"\n":
                    out.truncate(length)
                    came = length
        if came != length:
            raise ModelError(
                f"{url!r} has {length} bytes, and {came} came: it is being written to, or begins with a byte order mark"
            )
    finally:
        pieces.unpersist()


def _cut(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Runs in a worker: the lines of parts of the file -> rows of some MiB each, every line with its end.

    `place` orders the rows: where their part starts in the file, and then by one more each.
    """
    start, number, held = 0, 0, bytearray()

    def piece() -> pa.RecordBatch:
        columns = [pa.array([start + number], pa.int64()), pa.array([bytes(held)], pa.binary())]
        return pa.record_batch(columns, names=["place", "data"])

    for batch in batches:
        values = batch.column("value")
        for place in pc.unique(batch.column("start")).to_pylist():
            part = values.filter(pc.equal(batch.column("start"), place)).cast(pa.binary())  # it may be large_binary
            if held and (place != start or len(held) >= CHUNK_BYTES):
                yield piece()
                number, held = number + 1, bytearray()
            start = place
            offsets = pa.array([0, len(part)], pa.int32())
            held += pc.binary_join(pa.ListArray.from_arrays(offsets, part), b"\n")[0].as_buffer()
            held += b"\n"
    if held:
        yield piece()


def _first_line(error: Exception) -> str:
    java = getattr(error, "java_exception", None)  # py4j's own text is a trace
    lines = str(error if java is None else java.toString()).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"
