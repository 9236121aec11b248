"""A function of Arrow arrays -> a UDF: of Arrow where Spark has them, through pandas before Spark 4.1."""

from collections.abc import Callable
from typing import Any

import pandas as pd
import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql.pandas.functions import pandas_udf
from pyspark.sql.types import DataType

from gpuml.errors import TensorError

try:
    from pyspark.sql.pandas.functions import arrow_udf
except ImportError:  # before Spark 4.1
    arrow_udf = None  # type: ignore[assignment]


def through_pandas() -> bool:
    """Whether columns come through pandas, which has no null for numbers, and an object for each array."""
    return arrow_udf is None


def arrays_udf(function: Callable[..., pa.Array], returns: DataType, name: str) -> Callable[..., Column]:
    """A UDF of a function on the arrays of a batch, nondeterministic in Spark's eyes.

    Parameters
    ----------
    function : runs in the workers; gives an array as long as those that it is given.
    returns : the type of that array.
    name : what Spark calls the column: ``name(x, y)``.
    """

    def of_arrow(*columns: pa.Array) -> pa.Array:
        return function(*columns)

    def of_pandas(*columns: pd.Series) -> pd.Series:
        return _to_pandas(function(*(_from_pandas(column, name) for column in columns)))

    of_arrow.__name__ = of_pandas.__name__ = name
    made: Any = pandas_udf(of_pandas, returns) if arrow_udf is None else arrow_udf(of_arrow, returns)  # type: ignore[call-overload]
    udf: Callable[..., Column] = made.asNondeterministic()
    return udf


def _from_pandas(column: Any, name: str) -> pa.Array:
    if isinstance(column, pd.Series):
        try:
            return pa.array(column, from_pandas=False)  # NaN stays NaN
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            pass
    raise TensorError(
        f"{name}: a column is no array of numbers; give the fields of a struct one by one, and "
        f"pyspark.ml.functions.vector_to_array(column) for an ML Vector"
    )


def _to_pandas(column: pa.Array) -> Any:
    if pa.types.is_struct(column.type):
        # Not as float64, where an integer stands beside a null: that has 53 bits.
        parts = {
            field.name: column.field(i).to_pandas(integer_object_nulls=True) for i, field in enumerate(column.type)
        }
        return pd.DataFrame(parts, index=range(len(column)))
    return column.to_pandas()
