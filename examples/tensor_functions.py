"""Columns of numbers -> your own function's column, or one result: torch, a CUDA kernel of Numba, whole-frame sums."""

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

import gpuml


def distance() -> Callable[..., Column]:
    """A plain torch expression over columns: kilometres between two places, from degrees (the haversine formula)."""

    def haversine(lat1: torch.Tensor, lon1: torch.Tensor, lat2: torch.Tensor, lon2: torch.Tensor) -> torch.Tensor:
        lat1, lon1, lat2, lon2 = (torch.deg2rad(each) for each in (lat1, lon1, lat2, lon2))
        square = torch.sin((lat2 - lat1) / 2) ** 2 + lat1.cos() * lat2.cos() * torch.sin((lon2 - lon1) / 2) ** 2
        return 2 * 6371.0088 * torch.asin(square.sqrt())

    return gpuml.tensor_udf(haversine, "double")


def smoothed(radius: int) -> Callable[..., Column]:
    """A CUDA kernel written in Python: each number of an array becomes the mean of its neighbourhood.

    Needs Numba on the workers. Where there is no GPU, Numba's simulator runs the kernel, slowly.
    """

    def compile_kernel(device: torch.device) -> Any:
        global cuda  # where the simulator puts its own
        if device.type == "cpu":
            os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # read when Numba is imported, which is below
        from numba import cuda

        @cuda.jit
        def kernel(rows: Any, means: Any) -> None:
            row, place = cuda.grid(2)
            if row < rows.shape[0] and place < rows.shape[1]:
                first, last = max(place - radius, 0), min(place + radius + 1, rows.shape[1])
                total = 0.0
                for other in range(first, last):
                    total += rows[row, other]
                means[row, place] = total / (last - first)

        return kernel

    def smooth(kernel: Any, rows: torch.Tensor) -> torch.Tensor:
        means = torch.empty_like(rows)
        threads = (8, 8)
        blocks = tuple(-(-length // width) for length, width in zip(rows.shape, threads, strict=True))
        if rows.is_cuda:
            kernel[blocks, threads](rows, means)  # Numba reads a tensor where it lies: no copy
        else:
            kernel[blocks, threads](rows.numpy(), means.numpy())
        return means

    return gpuml.tensor_udf(smooth, "array<double>", setup=compile_kernel)


def total_and_mean(df: DataFrame, column: str) -> tuple[float, float]:
    """Sum and mean of a column: results of batches are added, and divided at the end."""
    made = gpuml.reduce_blocks(df, lambda x: {"sum": x.sum(), "rows": len(x)}, columns=[column])
    return float(made["sum"]), float(made["sum"] / made["rows"])


def covariance(df: DataFrame, columns: list[str]) -> Any:
    """The sample covariance matrix of columns, (k, k).

    Of each batch: its rows, mean, and products of deviations from that mean. Two such are combined exactly (Chan, Golub
    and LeVeque 1979); sums of squares would lose their digits where the mean is large.
    """

    def moments(*values: torch.Tensor) -> tuple[float, torch.Tensor, torch.Tensor]:
        x = torch.stack(values, 1).double()
        mean = x.mean(0)
        return float(len(x)), mean, (x - mean).T @ (x - mean)

    def together(a: Any, b: Any) -> Any:
        rows, apart = a[0] + b[0], b[1] - a[1]
        products = a[2] + b[2] + torch.outer(apart, apart) * (a[0] * b[0] / rows)
        return rows, a[1] + apart * (b[0] / rows), products

    rows, _, products = gpuml.reduce_blocks(df, moments, columns=columns, combine=together)
    return products / (rows - 1)


def main() -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable  # or Spark's workers run whatever python3 is
    spark = SparkSession.builder.master("local[2]").config("spark.ui.showConsoleProgress", "false").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")

    ways = [("London", 51.507, -0.128, "Paris", 48.857, 2.351), ("Oslo", 59.913, 10.739, "Rome", 41.893, 12.483)]
    places = spark.createDataFrame(ways, "start string, lat1 double, lon1 double, end string, lat2 double, lon2 double")
    places.select("start", "end", F.round(distance()("lat1", "lon1", "lat2", "lon2"), 1).alias("km")).show()

    numbers = spark.range(1000).select(F.sin("id").alias("x"), (F.sin("id") * 2 + F.cos("id")).alias("y"))
    print("sum, mean: ", *(f"{value:.6f}" for value in total_and_mean(numbers, "x")))
    print("covariance:", *(f"{value:.6f}" for value in covariance(numbers, ["x", "y"]).flatten()))

    try:
        import numba  # noqa: F401
    except ImportError:
        print("pip install numba, to see a CUDA kernel here")
    else:
        rows = spark.createDataFrame([([0.0, 0.0, 6.0, 0.0, 0.0],)], "rows array<double>")
        rows.select(smoothed(1)("rows").alias("smoothed")).show(truncate=False)
    spark.stop()


if __name__ == "__main__":
    main()
