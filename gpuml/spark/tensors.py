"""A user's function on tensors -> a UDF, or one result of a whole DataFrame; each task computes on its own device."""

import hashlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql import Column, DataFrame
from pyspark.sql.types import DataType

from gpuml.errors import ParamError, TensorError
from gpuml.spark.arrays import arrays_udf
from gpuml.spark.conf import warn_of_local_gpu_amount
from gpuml.spark.numbers import chosen, parsed, promised
from gpuml.spark.task import this_task
from gpuml.spec import DEVICES, Function


def tensor_udf(
    predict: Callable[..., Any],
    returns: str | DataType,
    setup: Callable[[Any], Any] | None = None,
    device: str = "auto",
) -> Callable[..., Column]:
    """A UDF that runs your function on tensors, on the GPU of each task.

    Parameters
    ----------
    predict : called as ``predict(state, *tensors)``, or ``predict(*tensors)`` without `setup`, once for each Arrow
        batch (at most ``spark.sql.execution.arrow.maxRecordsPerBatch`` rows), under ``torch.inference_mode()``. There
        is a tensor on the task's device for each column: (n,) for numbers and booleans, (n, k) for arrays of one length
        k, in the column's own type: a double gives float64. It returns a tensor on any device, or a NumPy array, of n
        rows; for a struct a dict of them by field name, or a tuple in the order of the fields.
    returns : the column's type, as DDL text or a DataType: a number or boolean, an array of them, or a struct of these.
        Text needs a running session.
    setup : called as ``setup(device)``, once in each worker process and for each device; its result is `predict`'s
        first argument. Equal content runs once, in whatever UDF or job; a process keeps the last 3 results.
    device : ``"auto"``, ``"cuda"`` or ``"cpu"``, as in `ImageClassifier`.

    Returns
    -------
    function
        Columns -> a Column, for ``select`` and ``withColumn``, and for ``spark.udf.register``. Nondeterministic in
        Spark's eyes, so that a filter on its output does not run it again (`gpuml.spark.udf.score_udf`).

    Raises
    ------
    ParamError
        An argument is out of range, or `returns` is no type that tensors make.
    TensorError
        In the job: a column has a null, arrays of several lengths or another type, or `predict` gave tensors that do
        not fit `returns`. Before Spark 4.1 a null among numbers may arrive as NaN.

    Examples
    --------
    >>> from pyspark.sql.types import DoubleType
    >>> norm = tensor_udf(lambda x, y: (x**2 + y**2).sqrt(), DoubleType())
    >>> norm("x", "y")  # doctest: +SKIP
    """
    name = getattr(predict, "__name__", type(predict).__name__)
    where = f"tensor_udf({name})"
    _check_callable(where, "predict", predict)
    _check_callable(where, "setup", setup, or_none=True)
    _check_device(device)
    kind = parsed(returns)
    pickled = None if setup is None else _pickled(setup)
    function = Function(
        predict,
        _arguments(predict)[0 if setup is None else 1 :],
        promised(kind),
        setup=pickled,
        sha256=hashlib.sha256(pickled or b"").hexdigest(),
        device=device,
        name=name,
    )

    return arrays_udf(lambda *columns: _answer(columns, function), kind, name)


def reduce_blocks(
    df: DataFrame,
    reduce: Callable[..., Any],
    columns: Sequence[str] | None = None,
    combine: Callable[[Any, Any], Any] | None = None,
    device: str = "auto",
) -> Any:
    """One result of a whole DataFrame, by your functions on tensors, on the GPU of each task.

    Runs a job. The batches of a partition are folded on its device, in their order, and the partitions on the driver's
    CPU in the order of their ids: over the same partitions the result is the same to the last bit.

    Parameters
    ----------
    df : a batch DataFrame.
    reduce : called as ``reduce(*tensors)`` for each Arrow batch, with a tensor for each column as `tensor_udf` has it.
        Its result is a tensor (or a number), a tuple of them, or a dict of them by name; one form for all batches.
    columns : names of the columns; None for all. They hold numbers, booleans, or arrays of one length of them.
    combine : called as ``combine(a, b)`` with two results, `a` of the earlier rows; gives one of the same form. None
        for the elementwise sum.
    device : ``"auto"``, ``"cuda"`` or ``"cpu"``, as in `ImageClassifier`.

    Returns
    -------
    numpy.ndarray, or a tuple or dict of them
        In the form of `reduce`'s results; bfloat16 becomes float32.

    Raises
    ------
    ParamError
        An argument is out of range, or a column is missing or holds no numbers.
    TensorError
        There is no row, two results do not fit each other, or, in the job, a column has a null or arrays of several
        lengths.

    Examples
    --------
    >>> reduce_blocks(spark.range(5), lambda id: id.sum())  # doctest: +SKIP
    array(10)
    """
    _check_callable("reduce_blocks", "reduce", reduce)
    _check_callable("reduce_blocks", "combine", combine, or_none=True)
    _check_device(device)
    frame, names = chosen(df, columns)
    warn_of_local_gpu_amount(df.sparkSession)

    def partial(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return _partial(batches, names, reduce, combine, device)

    rows = frame.mapInArrow(partial, "partition int, form string, cells array<binary>").collect()
    if not rows:
        raise TensorError("reduce_blocks: the DataFrame has no row, so there is nothing to reduce; look at its filters")
    rows.sort(key=lambda row: row.partition)
    from gpuml.worker import tensors

    return tensors.merge(((row.form, row.cells) for row in rows), combine)


def _answer(columns: Sequence[pa.Array], function: Function) -> pa.Array:
    """Runs in a worker: one Arrow batch of the task."""
    from gpuml.worker import cache, tensors

    made = tensors.answer(columns, function, this_task())
    cache.freeze()
    return made


def _partial(
    batches: Iterator[pa.RecordBatch],
    names: list[str],
    reduce: Callable[..., Any],
    combine: Callable[[Any, Any], Any] | None,
    device: str,
) -> Iterator[pa.RecordBatch]:
    """Runs in a worker: one partition -> one row, or none."""
    from gpuml.worker import cache, tensors

    task = this_task()
    packed = tensors.fold(batches, names, reduce, combine, device, task)
    cache.freeze()
    if packed is not None:
        row = [pa.array([task.partition_id], pa.int32()), pa.array([packed[0]])]
        cells = pa.array([packed[1]], pa.list_(pa.binary()))
        yield pa.RecordBatch.from_arrays([*row, cells], names=["partition", "form", "cells"])


# --- what the driver can check ----------------------------------------------------------------------------------------


def _check_callable(where: str, name: str, function: Any, *, or_none: bool = False) -> None:
    if not (callable(function) or (or_none and function is None)):
        raise ParamError(f"{where}: {name}={function!r} is no function")


def _check_device(device: str) -> None:
    if device not in DEVICES:
        raise ParamError(f"device={device!r} is none of {', '.join(DEVICES)}")


def _pickled(setup: Callable[[Any], Any]) -> bytes:
    """The function as it is now: what is sent is what its hash names, whatever its globals are when a job runs."""
    try:
        return bytes(cloudpickle.dumps(setup))  # type: ignore[no-untyped-call]
    except Exception as error:  # pickling runs code of any object
        raise ParamError(
            f"tensor_udf: setup={setup!r} cannot be sent to a worker ({type(error).__name__}: {error}); open there "
            f"what cannot be pickled, and give it names and paths"
        ) from error


def _arguments(predict: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the parameters that are given by position; none where Python cannot tell, as of a function in C."""
    try:
        parameters = inspect.signature(predict).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD))
