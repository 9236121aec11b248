"""Spark's settings: those that suit a stage, and those that will not work."""

from __future__ import annotations

import re
import warnings

from pyspark.sql import SparkSession

from gpuml.errors import ParamError

GPU_AMOUNT = "spark.task.resource.gpu.amount"


def gpu_conf(batch_size: int = 64) -> dict[str, str]:
    """Settings of Spark under which images travel to the workers and back at the least cost (docs/clusters.md).

    Parameters
    ----------
    batch_size : the stage's ``batchSize``, at least 1.

    Returns
    -------
    dict
        For ``SparkSession.builder.config(map=...)``, or one by one for ``spark.conf.set``: Arrow batches, and what the
        Parquet reader holds at a time, of four times `batch_size` rows; rows, not columns, kept beside the UDF, since
        Spark 4.2 and later otherwise copy every image once more.

    Examples
    --------
    >>> gpu_conf(64)["spark.sql.execution.arrow.maxRecordsPerBatch"]
    '256'
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or not 1 <= batch_size < 2**29:
        raise ParamError(
            f"gpu_conf: batch_size={batch_size!r} is no int from 1 up (four times as many are to fit into Spark's "
            f"setting); give the stage's batchSize"
        )
    rows = str(4 * batch_size)
    return {
        "spark.sql.execution.arrow.maxRecordsPerBatch": rows,
        "spark.sql.parquet.columnarReaderBatchSize": rows,
        "spark.sql.execution.arrow.pythonUDF.columnarInput.enabled": "false",
    }


def warn_of_local_gpu_amount(spark: SparkSession) -> None:
    """Warn where a job would hang: a plain local master schedules no GPUs, and waits for them without a word."""
    amount = spark.conf.get(GPU_AMOUNT, None)
    master = spark.conf.get("spark.master", None) or ""
    if amount is not None and re.match(r"local(\[|$)", master):
        warnings.warn(
            f"{GPU_AMOUNT}={amount} is set, but the master {master!r} schedules no GPUs: jobs will hang. Remove the "
            f"setting; in local mode gpuml uses the visible GPUs by itself.",
            stacklevel=2,
        )
