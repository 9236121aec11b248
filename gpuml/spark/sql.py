"""A stage -> a function of SQL over a column of encoded images, or of paths."""

from __future__ import annotations

import re
from collections.abc import Callable

from pyspark.sql import Column, SparkSession
from pyspark.sql.types import ArrayType, DataType, DoubleType, FloatType, StringType, StructField, StructType

from gpuml.errors import ParamError
from gpuml.spark import columns
from gpuml.spark.images import ImageStage
from gpuml.spark.udf import FIELDS, answer_udf

#: Fields of a stage, as columns of SQL: there is nothing after the function that would make them of other fields.
_TYPES: dict[str, DataType] = {
    **FIELDS,
    "topK": ArrayType(StructType([StructField("label", StringType()), StructField("probability", DoubleType())])),
    "detections": ArrayType(
        StructType([StructField(name, StringType() if name == "label" else FloatType()) for name in columns.BOX])
    ),
    "timing": StructType([StructField(name, DoubleType()) for name in columns.TIMING]),
}

_FORM = "SELECT path, r.* FROM (SELECT path, {name}(content) AS r FROM photos) WHERE r.error IS NULL"


def register_udf(spark: SparkSession, name: str, stage: ImageStage) -> Callable[..., Column]:
    """Register a stage as a function of SQL, for one session; it sends the model file there.

    The function takes a binary column of encoded images, with ``readPaths`` a string column, and returns a struct whose
    fields are the stage's output columns, named as `transform` names them; vectors are ``array<float>``. It counts as
    nondeterministic, and Spark runs it wherever it is written: write it once, in a subquery.

    Parameters
    ----------
    spark : the session, over Spark Connect too.
    name : what SQL calls it: letters, digits and ``_``. A function of that name is replaced.
    stage : its Params are taken as they are now. ``handleInvalid="error"`` fails the query with the first reason;
        ``"skip"`` is refused, as a function answers every row.

    Returns
    -------
    callable
        The function for Python: of a column, a column.

    Raises
    ------
    ParamError
        The name is no identifier, `stage` no stage over images, its `model` unset, or its ``handleInvalid`` ``"skip"``.
    ModelError
        The model cannot be found or used.

    Examples
    --------
    >>> classify = register_udf(spark, "classify", stage)  # doctest: +SKIP
    >>> spark.sql("SELECT r.predictedLabel FROM (SELECT classify(content) AS r FROM photos)")  # doctest: +SKIP
    """
    if not isinstance(name, str) or not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
        raise ParamError(f"register_udf: name={name!r} is no identifier of SQL; give letters, digits and _")
    if not isinstance(stage, ImageStage):
        raise ParamError(
            f"register_udf: stage is a {type(stage).__name__}; give a stage of gpuml over images, such as "
            f"ImageClassifier(...). A fitted pipeline has its own in pipeline.stages"
        )
    if stage.getHandleInvalid() == "skip":
        raise ParamError(
            f"{stage.uid}: handleInvalid='skip', but a function of SQL answers every row. setHandleInvalid('keep') "
            f"and filter in the query: {_FORM.format(name=name)}"
        )
    outputs = stage._output_columns()
    if not outputs:
        raise ParamError(f"{stage.uid}: every output column is ''; name one, e.g. setErrorCol('error')")
    # Whichever way the session will compare names.
    columns.check_distinct(
        {param: column for param, (column, _) in outputs.items()}, lambda a, b: a.lower() == b.lower()
    )
    spec = stage._sent_spec((field for _, field in outputs.values()), spark)
    schema = StructType([StructField(column, _TYPES[field]) for column, field in outputs.values()])
    udf = answer_udf(spec, dict(outputs.values()), schema, fail=stage.getHandleInvalid() == "error")
    registered: Callable[..., Column] = spark.udf.register(name, udf)
    return registered
