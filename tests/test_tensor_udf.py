"""tensor_udf and reduce_blocks through real Spark jobs."""

import os
import runpy
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from plans import udf_rows
from pyspark.errors import PythonException
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DoubleType, StringType, StructType

from gpuml import ParamError, TensorError, reduce_blocks, tensor_udf
from gpuml.spark import arrays

EXAMPLE = Path(__file__).parents[1] / "examples" / "tensor_functions.py"


@pytest.fixture(scope="module")
def example():
    """The functions of the example, as a script's are: no worker can import them."""
    return runpy.run_path(str(EXAMPLE))


@pytest.fixture
def short_batches(spark):
    """Four rows an Arrow batch."""
    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    before = spark.conf.get(name)
    spark.conf.set(name, "4")
    yield
    spark.conf.set(name, before)


@pytest.fixture(scope="module")
def frame(spark):
    """20 rows in partitions of 9, 0 and 11 rows, with numbers of every type and arrays."""
    thirds = spark.range(0, 33, 1, 3).where("id < 9 OR id >= 22")
    numbers = thirds.select(F.when(F.col("id") < 9, F.col("id")).otherwise(F.col("id") - 13).alias("id"))
    return numbers.select(
        "id",
        (F.sin("id") + 1000.0).alias("x"),
        (F.sin("id") * 2 + F.cos("id")).alias("y"),
        F.col("id").cast("int").alias("i"),
        F.col("id").cast("float").alias("f"),
        (F.col("id") % 2 == 0).alias("even"),
        F.array(F.col("id").cast("float"), F.lit(1.0).cast("float")).alias("pair"),
        F.array(F.array("id", "id"), F.array("id", "id"), F.array("id", "id")).alias("nested"),
        F.col("id").cast("string").alias("s"),
    )


# --- tensor_udf -------------------------------------------------------------------------------------------------------


def test_every_type_arrives_as_its_own_dtype_and_struct_fields_come_back(frame, short_batches):
    def predict(i, f, x, even, pair, nested):
        dtypes = [each.dtype for each in (i, f, x, even, pair, nested)]
        assert dtypes == [torch.int32, torch.float32, torch.float64, torch.bool, torch.float32, torch.int64], dtypes
        assert nested.shape == (len(i), 3, 2)
        return {
            "wide": torch.stack([i, f, i + f], 1),
            "sum": pair.sum(1),
            "rows": torch.full_like(i, len(i)),
            "odd": ~even,
        }

    udf = tensor_udf(predict, "sum double, rows int, odd boolean, wide array<float>")
    rows = frame.select("id", udf("i", "f", "x", "even", "pair", "nested").alias("r")).select("id", "r.*").collect()
    assert [row.id for row in rows] == list(range(20))
    assert [row["sum"] for row in rows] == [i + 1.0 for i in range(20)]
    assert [row.odd for row in rows] == [i % 2 == 1 for i in range(20)]
    assert [row.wide for row in rows] == [[i, i, 2.0 * i] for i in range(20)]
    assert Counter(row.rows for row in rows) == {4: 16, 1: 1, 3: 3}  # 9 and 11 rows in batches of four


def test_it_is_an_ordinary_udf_that_runs_once_for_each_row(spark, frame):
    double = tensor_udf(lambda x: 2 * x, DoubleType())
    kept = frame.withColumn("twice", double("x")).where("twice > 0").select("twice", "id")
    assert udf_rows(kept) == 20
    spark.udf.register("double_it", double)
    frame.createOrReplaceTempView("frame")
    assert spark.sql("SELECT double_it(f) AS d FROM frame WHERE id = 7").first().d == 14
    assert spark.sql("SELECT double_it(f) AS d FROM frame WHERE id < 0").collect() == []


def test_a_state_is_made_once_in_each_worker_for_equal_setups_and_later_jobs(frame, tmp_path):
    def udf():
        def setup(device):
            with open(f"{tmp_path}/{os.getpid()}", "a") as file:
                file.write(f"{device}\n")
            return 5

        return tensor_udf(lambda state, id: id + state, "bigint", setup=setup)

    for _ in range(2):
        rows = frame.select("id", udf()("id").alias("r"), udf()("id").alias("again")).collect()
        assert [(row.r, row.again) for row in rows] == [(i + 5, i + 5) for i in range(20)]
    made = [path.read_text() for path in tmp_path.iterdir()]
    assert made
    assert set(made) == {"cpu\n"}


def test_a_setup_is_sent_as_it_was_when_the_udf_was_made(frame):
    offset = [1]
    udf = tensor_udf(lambda state, id: id + state, "bigint", setup=lambda device: offset[0])
    offset[0] = 2
    assert frame.where("id = 3").select(udf("id").alias("r")).first().r == 4


def test_before_spark_4_1_it_is_a_pandas_udf(frame, short_batches, monkeypatch):
    monkeypatch.setattr(arrays, "arrow_udf", None)
    udf = tensor_udf(lambda i, pair, nested: (i + 1, pair * 2, nested), "a int, b array<float>, c array<array<bigint>>")
    rows = frame.select("id", udf("i", "pair", "nested").alias("r")).select("id", "r.*").collect()
    assert [(row.a, row.b, row.c) for row in rows] == [(i + 1, [2.0 * i, 2.0], [[i, i]] * 3) for i in range(20)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"predict": 3}, r"predict=3 is no function"),
        ({"setup": "load"}, r"tensor_udf\(<lambda>\): setup='load' is no function"),
        ({"device": "gpu"}, "device='gpu' is none of auto, cuda, cpu"),
        ({"returns": "string"}, "returns='string' is no type that tensors make"),
        ({"returns": StringType()}, "returns='string' is no type that tensors make"),
        ({"returns": ArrayType(StringType())}, "returns='array<string>'"),
        ({"returns": "a double, b struct<c: double>"}, "returns='struct<a:double,b:struct<c:double>>'"),
        ({"returns": "a double, a int"}, "names distinct"),
        ({"returns": StructType()}, "no type that tensors make"),
        ({"returns": "dubble"}, "returns='dubble' is no type; write 'double'"),
        ({"returns": float}, "DDL text"),
    ],
)
def test_what_the_driver_can_know_is_refused_before_any_job(spark, arguments, said):
    with pytest.raises(ParamError, match=said):
        tensor_udf(**{"predict": lambda x: x, "returns": "double", **arguments})


def test_a_setup_that_cannot_be_sent_is_refused_before_any_job(spark):
    with pytest.raises(ParamError, match="cannot be sent to a worker"):
        tensor_udf(lambda state, x: x, DoubleType(), setup=lambda device: spark)


# --- reduce_blocks ----------------------------------------------------------------------------------------------------


def test_sum_mean_and_covariance_are_sparks(frame, short_batches, example):
    """Three partitions, one of them empty, of several batches."""
    assert frame.rdd.getNumPartitions() == 3
    wanted = frame.agg(
        F.sum("x"), F.avg("x"), F.var_samp("x"), F.covar_samp("x", "y"), F.var_samp("y"), F.covar_pop("x", "y")
    )
    total, mean, xx, xy, yy, population = wanted.first()
    np.testing.assert_allclose(example["total_and_mean"](frame, "x"), (total, mean), rtol=1e-9)
    made = example["covariance"](frame, ["x", "y"])
    np.testing.assert_allclose(made, [[xx, xy], [xy, yy]], rtol=1e-9)
    np.testing.assert_allclose(made[0, 1] * 19 / 20, population, rtol=1e-9)


def test_partitions_are_combined_in_the_order_of_their_ids(frame, short_batches):
    made = reduce_blocks(frame, lambda id: id, ["id"], combine=lambda a, b: torch.cat([a, b]))
    assert made.tolist() == list(range(20))


def test_all_columns_arrive_in_order(frame):
    made = reduce_blocks(frame.select("i", "pair"), lambda i, pair: {"i": i.sum(), "pair": pair.sum(0)})
    assert {name: each.tolist() for name, each in made.items()} == {"i": 190, "pair": [190, 20]}


def test_a_name_with_a_dot_is_a_name(frame):
    assert reduce_blocks(frame.select(F.col("i").alias("a.b")), lambda i: i.sum(), ["a.b"]) == 190


def test_a_frame_without_a_row_is_an_error(frame):
    with pytest.raises(TensorError, match="no row"):
        reduce_blocks(frame.where("id < 0"), torch.sum, ["x"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"columns": "x"}, r"give a list: columns=\['x'\]"),
        ({"columns": ["z"]}, "column 'z': there is no such column among"),
        ({"columns": ["s"]}, "column 's' is of type string"),
        ({"columns": []}, "no columns"),
        ({}, "column 's' is of type string"),
        ({"reduce": None}, "reduce=None is no function"),
        ({"combine": "sum"}, "combine='sum' is no function"),
        ({"device": "gpu"}, "device='gpu'"),
    ],
)
def test_what_cannot_be_reduced_is_refused_before_any_job(frame, arguments, said):
    with pytest.raises(ParamError, match=said):
        reduce_blocks(frame, **{"reduce": torch.sum, **arguments})


def test_a_stream_is_refused(spark):
    with pytest.raises(ParamError, match="foreachBatch"):
        reduce_blocks(spark.readStream.format("rate").load(), torch.sum, ["value"])


# --- the example ------------------------------------------------------------------------------------------------------


def test_the_distance_of_two_places_is_that_of_the_sphere(spark, example):
    place = spark.createDataFrame([(0.0, 0.0, 0.0, 90.0)], "lat1 double, lon1 double, lat2 double, lon2 double")
    (row,) = place.select(example["distance"]()("lat1", "lon1", "lat2", "lon2").alias("km")).collect()
    assert row.km == pytest.approx(6371.0088 * np.pi / 2, rel=1e-12)


def test_a_kernel_of_numba_runs_on_the_tensors_of_a_column(spark, example):
    pytest.importorskip("numba", reason="Numba is not installed: pip install numba")
    rows = spark.createDataFrame([([0.0, 0.0, 6.0],), ([3.0, 0.0, 0.0],)], "r array<double>").coalesce(1)
    assert [row.s for row in rows.select(example["smoothed"](1)("r").alias("s")).collect()] == [[0, 2, 3], [1.5, 1, 0]]


# --- last, as it ends the workers that the others share ---------------------------------------------------------------


@pytest.mark.skipif(arrays.through_pandas(), reason="before Spark 4.1 a null among numbers arrives as NaN")
def test_a_null_ends_the_job_with_the_argument_the_row_and_what_to_do(frame):
    def scale(value):
        return value * 2

    holes = frame.where("id >= 9").select(F.when(F.col("id") != 12, F.col("x")).alias("x"))
    said = r"scale: argument 1 \('value'\): row 3 of a batch of 11 is null, .* fill"
    with pytest.raises(PythonException, match=said):
        holes.select(tensor_udf(scale, "double")("x")).collect()
