"""A DataFrame's schema and a worker's struct -> checked input columns and the output columns of a stage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.ml.functions import array_to_vector
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, DataType, IntegerType, StringType, StructField, StructType

from gpuml.errors import ParamError

if TYPE_CHECKING:
    from typing_extensions import Self

TOP_K_TYPE = "array<struct<label:string,probability:double>>"

#: Fields of a detection -> the worker's column that each is of.
BOX = {"x1": "boxX1", "y1": "boxY1", "x2": "boxX2", "y2": "boxY2", "label": "boxLabels", "score": "boxScores"}
DETECTIONS_TYPE = "array<struct<x1:float,y1:float,x2:float,y2:float,label:string,score:float>>"

#: Milliseconds of a row, in the order in which a worker gives them.
TIMING = ("feed", "decode", "resize", "copy", "compute")
TIMING_TYPE = f"struct<{','.join(f'{name}:double' for name in TIMING)}>"

#: Fields of Spark's image struct that a worker needs, each a column of its own: with `origin`, a string, the whole
#: struct would take a slow conversion.
IMAGE_TYPES: dict[str, DataType] = {
    "data": BinaryType(),
    "height": IntegerType(),
    "width": IntegerType(),
    "nChannels": IntegerType(),
    "mode": IntegerType(),
}


@dataclass(frozen=True)
class Frame:
    """What a DataFrame's columns are, and how its session compares names: asked once, each is a call over Connect."""

    fields: list[StructField]
    case_sensitive: bool
    streaming: bool

    @classmethod
    def of(cls, dataset: DataFrame) -> Self:
        sensitive = str(dataset.sparkSession.conf.get("spark.sql.caseSensitive", "false")).lower() == "true"
        return cls(dataset.schema.fields, sensitive, dataset.isStreaming)

    def named(self, column: str) -> list[StructField]:
        """The columns that a name can mean."""
        return [field for field in self.fields if self.same(field.name, column)]

    def only(self, column: str, what: str, advice: str = "") -> StructField:
        """The one column that a name means; errors call it `what`, and end with `advice`.

        Raises
        ------
        ParamError
            There is no such column, or more than one.
        """
        found = self.named(column)
        if len(found) == 1:
            return found[0]
        seen = "there is no such column" if not found else f"there are {len(found)} such columns"
        raise ParamError(f"{what}: {seen} among {self.names}{advice}")

    def same(self, a: str, b: str) -> bool:
        return a == b if self.case_sensitive else a.lower() == b.lower()

    @property
    def names(self) -> list[str]:
        return [field.name for field in self.fields]


@dataclass(frozen=True)
class Input:
    """A checked input column; `origin` says whether an image struct names its file, `is_path` that the cells do."""

    column: Column
    is_image: bool = False
    origin: bool = False
    is_path: bool = False


def input_column(frame: Frame, name: str, column: str, read_paths: bool) -> Input:
    """The column that a Param names, if it holds images, or paths where these are read.

    Raises
    ------
    ParamError
        There is no such column, more than one, or it is neither binary nor an image struct; with `read_paths`, no
        string.
    """
    found = frame.only(column, f"{name}={column!r}", f"; choose with {_setter(name)}(...)")
    quoted = column_of(found)
    kind = found.dataType
    if read_paths:
        if isinstance(kind, StringType):
            return Input(quoted, is_path=True)
        raise ParamError(
            f"{name}={column!r} is of type {kind.simpleString()}, and readPaths=True opens the paths of a string "
            f"column: {_setter(name)}('path'). For a column of images setReadPaths(False)"
        )
    if isinstance(kind, BinaryType):
        return Input(quoted)
    if isinstance(kind, StructType):
        types = {field.name: field.dataType for field in kind.fields}
        if all(types.get(field) == wanted for field, wanted in IMAGE_TYPES.items()):
            return Input(quoted, is_image=True, origin=types.get("origin") == StringType())
    hint = ""
    if isinstance(kind, StringType):
        hint = " Read the files by spark.read.format('binaryFile'), or open paths in the workers: setReadPaths(True)."
    raise ParamError(
        f"{name}={column!r} is of type {kind.simpleString()}; images are a binary column (encoded files) or Spark's "
        f"image struct.{hint}"
    )


def check_outputs(frame: Frame, outputs: dict[str, str]) -> None:
    """Refuse output columns (by Param name) that exist already, as Spark compares names.

    Raises
    ------
    ParamError
        Naming column, Param and setter.
    """
    for name, column in outputs.items():
        if frame.named(column):
            none = "" if "[" in name else ", or '' for none"
            raise ParamError(
                f"{name}={column!r}: the DataFrame has a column of that name already; drop it, or choose another "
                f"with {_setter(name)}(...){none}"
            )
    check_distinct(outputs, frame.same)


def check_distinct(outputs: dict[str, str], same: Any = lambda a, b: a == b) -> None:
    """Refuse two outputs of one name."""
    names = list(outputs.items())
    for position, (name, column) in enumerate(names):
        for other, taken in names[:position]:
            if same(column, taken):
                raise ParamError(
                    f"{name}={column!r} and {other}={taken!r} are one name; choose another with {_setter(name)}(...)"
                )


def free_names(frame: Frame, *names: str) -> list[str]:
    """Names for temporary columns that no column of the frame has."""
    while any(frame.named(name) for name in names):
        names = tuple(f"_{name}" for name in names)
    return list(names)


def column_of(field: StructField) -> Column:
    """The column of a frame's field."""
    # By name alone: DataFrame["`a`"] takes the name for a pattern under spark.sql.parser.quotedRegexColumnNames.
    return F.col("`" + field.name.replace("`", "``") + "`")


def _setter(name: str) -> str:
    """Of a Param; ``outputMapping['x']`` is a part of one."""
    return f"set{name[0].upper()}{name[1:]}".partition("[")[0]


def worker_fields(fields: Iterable[str]) -> tuple[str, ...]:
    """The struct fields that a worker makes for some outputs, and the reason always; equal stages are equal Specs."""
    parts = {"topK": ("topLabels", "topProbabilities"), "detections": tuple(BOX.values())}
    return tuple(sorted({"error"}.union(*(parts.get(field, (field,)) for field in fields))))


def from_struct(struct: Column, field: str) -> Column:
    """One output column of the worker's struct."""
    if field in ("probability", "rawPrediction", "features"):
        return as_vector(struct[field])
    if field == "topK":
        pairs = F.arrays_zip(struct["topLabels"].alias("label"), struct["topProbabilities"].alias("probability"))
        return pairs.cast(TOP_K_TYPE)
    if field == "detections":
        return F.arrays_zip(*(struct[part].alias(name) for name, part in BOX.items())).cast(DETECTIONS_TYPE)
    if field == "timing":
        # NaN is a worker's null: it sends plain numbers. In a guard, as a struct of nulls would not be null.
        parts = [F.nanvl(struct[field][place], F.lit(None)).alias(name) for place, name in enumerate(TIMING)]
        return F.when(struct[field].isNotNull(), F.struct(*parts))
    return struct[field]


def as_vector(array: Column) -> Column:
    """A column of arrays of numbers as ML Vectors."""
    return F.when(array.isNotNull(), array_to_vector(array))  # which fails on null


def row_name(frame: Frame, source: Input) -> Column:
    """How an error names a row: the path it is read from, else the frame's, else the image's origin, else its number.

    For the select that holds the UDF: in a branch that only failed rows take, the row would count those alone.
    """
    place = F.concat(F.lit("partition "), F.spark_partition_id().cast("string"))
    if not frame.streaming:  # which has no row numbers
        number = F.monotonically_increasing_id().bitwiseAND((1 << 33) - 1)
        place = F.concat(place, F.lit(" row "), number.cast("string"))
    if source.is_path:
        return F.coalesce(source.column, place)
    paths = frame.named("path")
    if len(paths) == 1 and isinstance(paths[0].dataType, StringType):
        return F.coalesce(column_of(paths[0]), place)
    if source.is_image and source.origin:
        return F.coalesce(source.column.getField("origin"), place)
    return place
