"""Spark's settings -> what will not work with them."""

from __future__ import annotations

import re
import warnings

from pyspark.sql import SparkSession

GPU_AMOUNT = "spark.task.resource.gpu.amount"


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
