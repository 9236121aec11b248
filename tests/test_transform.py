"""The stage in a real Spark job: columns, rows, errors, and how often the model runs."""

import functools
import io
import os
import re
import subprocess
import sys
import textwrap

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import PLAIN, PYTHONPATH, Pooled, Quadrants, encoded, picture
from plans import udf_nodes, udf_rows
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Row
from pyspark.sql import functions as F
from pyspark.sql.types import DoubleType, StringType

from gpuml import ImageClassifier, ParamError, gpu_conf
from gpuml.spark.columns import TIMING_TYPE

LABELS = ["ant", "bee", "cat", "dog"]
ALL_OUTPUTS = {"rawPredictionCol": "raw", "topKCol": "top", "topK": 2, "deviceCol": "device"}


@functools.cache
def model():
    """One export for all tests here."""
    return ImageClassifier.from_module(Pooled(), labels=LABELS, preprocess=PLAIN).getModel()


def classifier(**params):
    return ImageClassifier(model=model(), **params)


@pytest.fixture(scope="module")
def frame(spark):
    """Ten good pictures in two partitions, with a column before and one after `content`."""
    rows = [(i, encoded(i), f"name{i}") for i in range(10)]
    return spark.createDataFrame(rows, "id int, content binary, name string").coalesce(2).cache()


@pytest.fixture(scope="module")
def broken(spark):
    """Good pictures with a null, an empty, a text and a truncated one among them."""
    data = [None, encoded(1), b"", encoded(2), b"not an image", encoded(3)[:60]]
    return spark.createDataFrame(list(enumerate(data)), "id int, content binary").coalesce(1).cache()


def expected(seed):
    """Probabilities worked out in plain torch from the picture's pixels."""
    pixels = torch.from_numpy(np.array(picture(seed).resize((32, 32), 2))).permute(2, 0, 1)[None] / 255
    with torch.no_grad():
        return torch.softmax(Pooled()(pixels), 1)[0].numpy()


def test_outputs_have_the_contracts_names_types_and_places(frame):
    out = classifier(**ALL_OUTPUTS).transform(frame)
    names = ["id", "content", "name", "prediction", "predictedLabel", "probability", "raw", "top", "error", "device"]
    assert out.columns == names
    types = {field.name: field.dataType for field in out.schema.fields}
    assert types["prediction"] == DoubleType()
    assert types["predictedLabel"] == types["error"] == types["device"] == StringType()
    assert isinstance(types["probability"], VectorUDT)
    assert isinstance(types["raw"], VectorUDT)
    assert types["top"].simpleString() == "array<struct<label:string,probability:double>>"
    assert all(field.nullable for field in out.schema.fields if field.name not in frame.columns)


def test_default_outputs_are_prediction_label_probability_and_error(frame):
    added = classifier().transform(frame).columns[3:]
    assert added == ["prediction", "predictedLabel", "probability", "error"]


def test_rows_hold_what_plain_torch_gives(frame):
    for row in classifier(**ALL_OUTPUTS).transform(frame).collect():
        wanted = expected(row.id)
        got = row.probability.toArray()
        assert np.abs(got - wanted).max() < 0.02  # Pillow's resize against torch's: a level or so of 255
        assert row.prediction == wanted.argmax() == got.argmax()
        assert row.predictedLabel == LABELS[int(row.prediction)]
        assert row.top[0] == Row(label=row.predictedLabel, probability=got.max())
        assert [entry.label for entry in row.top] == [LABELS[i] for i in np.argsort(-got)[:2]]
        assert np.allclose(np.exp(row.raw.toArray()) / np.exp(row.raw.toArray()).sum(), got, atol=1e-6)
        assert (row.error, row.device, row.name) == (None, "cpu", f"name{row.id}")


@pytest.mark.parametrize("records", [1, 3, 7, 10000])
@pytest.mark.parametrize("bad", [(0,), (6,), (0, 1, 2, 3, 4, 5, 6), (), (2, 3)])
def test_every_row_comes_back_once_in_order_whatever_fails(spark, records, bad):
    data = [(i, b"broken" if i in bad else encoded(i)) for i in range(7)]
    frame = spark.createDataFrame(data, "id int, content binary").coalesce(1)
    key = "spark.sql.execution.arrow.maxRecordsPerBatch"
    before = spark.conf.get(key)
    spark.conf.set(key, records)
    try:
        rows = classifier(batchSize=2).transform(frame).collect()
    finally:
        spark.conf.set(key, before)
    assert [row.id for row in rows] == list(range(7))
    assert [row.error is not None for row in rows] == [i in bad for i in range(7)]
    assert [row.prediction is None for row in rows] == [i in bad for i in range(7)]


def test_keep_gives_nulls_and_a_reason(broken):
    rows = classifier(**ALL_OUTPUTS).transform(broken).orderBy("id").collect()
    kinds = [row.error and row.error.split(": ")[0] for row in rows]
    assert kinds == ["null_input", None, "empty", None, "not_image", "truncated"]
    for row in rows:
        made = [row.prediction, row.predictedLabel, row.probability, row.raw, row.top]
        assert all((value is None) == (row.error is not None) for value in made)
        assert row.device == "cpu"


def test_good_rows_equal_those_of_a_run_without_the_bad(broken):
    stage = classifier(batchSize=1)
    good = stage.transform(broken.where("id in (1, 3)")).orderBy("id").collect()
    mixed = stage.transform(broken).where("error is null").orderBy("id").collect()
    assert good == mixed


def test_error_fails_naming_path_and_reason(spark, broken):
    framed = broken.withColumn("path", F.concat(F.lit("s3://bucket/"), F.col("id"), F.lit(".jpg")))
    out = classifier(handleInvalid="error").transform(framed.where("id = 4"))
    with pytest.raises(Exception, match=r"ImageClassifier_\w+: s3://bucket/4.jpg: not_image: "):
        out.select("predictedLabel").collect()


def test_error_raises_nothing_where_all_is_well(frame):
    stage = classifier(**ALL_OUTPUTS)
    assert stage.copy({stage.handleInvalid: "error"}).transform(frame).collect() == stage.transform(frame).collect()


# --- schema errors: each before any job ---------------------------------------------------------------------------


def test_existing_columns_compare_as_spark_resolves_names(spark, frame):
    upper = frame.withColumn("Prediction", F.lit(1))
    with pytest.raises(ParamError, match="predictionCol"):
        classifier().transform(upper)
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        out = classifier().transform(upper)
        assert out.columns[3:5] == ["Prediction", "prediction"]
        assert {row.Prediction for row in out.collect()} == {1}
    finally:
        spark.conf.unset("spark.sql.caseSensitive")


@pytest.mark.parametrize(
    ("select", "message"),
    [
        (["id", "name"], "inputCol='content': there is no such column"),
        (["name as content"], "of type string.*binaryFile"),
        (["id as content"], "of type int"),
        (["struct(id, name) as content"], "of type struct<"),
        (["content", "content"], "2 such columns"),
    ],
)
def test_a_missing_or_wrong_input_column_is_refused(frame, select, message):
    with pytest.raises(ParamError, match=message):
        classifier().transform(frame.selectExpr(*select))


def test_input_column_is_found_as_spark_finds_it(frame):
    renamed = frame.withColumnRenamed("content", "Image `data`.raw")
    rows = classifier(inputCol="image `data`.RAW").transform(renamed).collect()
    assert [row.error for row in rows] == [None] * 10


def test_columns_with_awkward_or_equal_names_pass_through(frame):
    awkward = frame.select("content", F.col("id").alias("a.b"), F.col("id").alias("x"), F.col("name").alias("x"))
    out = classifier(predictionCol="p.q").transform(awkward)
    assert out.columns == ["content", "a.b", "x", "x", "p.q", "predictedLabel", "probability", "error"]
    assert out.collect()[3][1:4] == (3, 3, "name3")


def test_columns_named_like_the_temporary_ones_pass_through(frame):
    taken = frame.withColumn("gpuml_struct", F.lit(1)).withColumn("_gpuml_row", F.lit(2))
    out = classifier(handleInvalid="error").transform(taken)
    assert out.columns[:5] == taken.columns
    assert {(row.gpuml_struct, row._gpuml_row, row.error) for row in out.collect()} == {(1, 2, None)}


def test_jpegs_are_decoded_smaller_in_a_job_as_in_predict(spark):
    buffer = io.BytesIO()
    picture(5).resize((515, 261)).save(buffer, "JPEG")
    frame = spark.createDataFrame([(buffer.getvalue(),)], "content binary")
    found = classifier(scaledDecode=1).transform(frame).first().probability.toArray()
    scaled, whole = (classifier(scaledDecode=ratio).predict([buffer.getvalue()])["probability"][0] for ratio in (1, 0))
    assert np.array_equal(found, scaled)
    assert 0 < np.abs(found - whole).max() < 0.05


# --- how often the model runs -------------------------------------------------------------------------------------


QUERIES = [
    lambda out: out.select("predictedLabel"),
    lambda out: out.select("predictedLabel", "probability"),
    lambda out: out.where("prediction >= 0").select("probability"),
    lambda out: out.where("prediction >= 0").where("predictedLabel <> 'none'").select("probability", "error"),
    lambda out: out.where(F.col("error").isNull()).groupBy("predictedLabel").count(),
    lambda out: out.join(out.sparkSession.range(10).withColumnRenamed("id", "key"), F.col("id") == F.col("key")),
]

#: A filter and a join are what Spark may push below the other modes' own expressions.
FILTER, JOIN = QUERIES[3], QUERIES[5]


@pytest.mark.parametrize(
    ("invalid", "query"),
    [("keep", query) for query in QUERIES] + [(mode, query) for mode in ("skip", "error") for query in (FILTER, JOIN)],
)
def test_each_row_is_evaluated_once(frame, invalid, query):
    out = query(classifier(topKCol="top", handleInvalid=invalid).transform(frame))
    assert udf_rows(out) == 10
    assert len(udf_nodes(out)) == 1
    plan = out._jdf.queryExecution().executedPlan().toString()
    assert len(re.findall(r"of_bytes\([^)]*\)", plan)) >= 1


def test_a_cached_result_is_not_computed_again(frame):
    out = classifier().transform(frame).cache()
    first = udf_rows(out)
    again = udf_rows(out.where("prediction >= 0"))
    out.unpersist()
    assert (first, again) == (10, 10)  # the cached plan's own count: it has not grown


def test_unselected_outputs_do_not_run_the_model(frame):
    assert udf_rows(classifier().transform(frame).select("id")) == 0


# --- image structs ------------------------------------------------------------------------------------------------


def test_the_image_source_gives_the_same_scores_as_the_files(spark, tmp_path):
    for i in range(4):
        (tmp_path / f"{i}.png").write_bytes(encoded(i))
    structs = spark.read.format("image").load(str(tmp_path)).select("image", F.col("image.origin").alias("path"))
    files = spark.read.format("binaryFile").load(str(tmp_path))
    by_struct = classifier(inputCol="image").transform(structs).select("path", "probability").collect()
    by_file = classifier().transform(files).select("path", "probability").collect()

    def names(rows):
        return {row.path.rpartition("/")[2]: row.probability for row in rows}

    assert names(by_struct) == names(by_file)
    assert len(by_file) == 4


def test_an_invalid_image_struct_is_named_by_its_origin(spark, tmp_path):
    (tmp_path / "bad file.png").write_bytes(b"no picture")
    frame = spark.read.format("image").load(str(tmp_path))
    kept = classifier(inputCol="image").transform(frame).collect()
    assert kept[0].error.startswith("not_image: ")
    with pytest.raises(Exception, match=r"bad%20file.png: not_image|bad file.png: not_image"):
        classifier(inputCol="image", handleInvalid="error").transform(frame).collect()


def test_parquet_with_image_structs_takes_one_evaluation(spark, tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.png").write_bytes(encoded(i))
    spark.read.format("image").load(str(tmp_path)).write.parquet(str(tmp_path / "table"))
    out = classifier(inputCol="image", **ALL_OUTPUTS).transform(spark.read.parquet(str(tmp_path / "table")))
    assert udf_rows(out.select("probability", "top")) == 3


def test_a_null_struct_is_one_row_also_with_pandas_own_integers(spark):
    key = "spark.sql.execution.pythonUDF.pandas.preferIntExtensionDtype"
    image = "struct<origin:string,height:int,width:int,nChannels:int,mode:int,data:binary>"
    data = [(None,), (("x", 2, 2, 3, 16, bytes(12)),)]
    frame = spark.createDataFrame(data, f"image {image}").coalesce(1)
    spark.conf.set(key, "true")
    try:
        rows = classifier(inputCol="image").transform(frame).collect()
    finally:
        spark.conf.unset(key)
    assert [row.error and row.error.split(":")[0] for row in rows] == ["null_input", None]


# --- sources of files ---------------------------------------------------------------------------------------------


def test_an_empty_frame_and_empty_partitions_give_their_schema(spark, frame):
    empty = classifier(**ALL_OUTPUTS).transform(frame.limit(0))
    assert empty.collect() == []
    spread = frame.limit(2).repartition(6)
    assert classifier().transform(spread).count() == 2
    assert len(classifier().transform(spread).collect()) == 2


def test_parquet_source_gives_vectors(spark, frame, tmp_path):
    frame.write.parquet(str(tmp_path / "p"))
    rows = classifier(**ALL_OUTPUTS).transform(spark.read.parquet(str(tmp_path / "p"))).collect()
    assert len(rows) == 10
    assert all(abs(row.probability.toArray().sum() - 1) < 1e-6 for row in rows)


def test_schema_before_the_action_is_the_schema_after(frame):
    out = classifier(**ALL_OUTPUTS).transform(frame)
    before = out.schema
    assert out.sparkSession.createDataFrame(out.collect(), before).schema == before == out.schema


def test_partition_folders_keep_their_label_column(spark, tmp_path):
    for label in ("cat", "dog"):
        (tmp_path / f"label={label}").mkdir()
        (tmp_path / f"label={label}" / "one.png").write_bytes(encoded(len(label)))
    out = classifier().transform(spark.read.format("binaryFile").load(str(tmp_path)))
    assert sorted((row.label, row.error) for row in out.collect()) == [("cat", None), ("dog", None)]


@pytest.mark.parametrize("invalid", ["keep", "skip", "error"])
def test_a_stream_of_files_is_classified_as_a_batch_is(spark, tmp_path, invalid):
    for i in range(3):
        (tmp_path / "in" / f"{i}.png").parent.mkdir(exist_ok=True)
        (tmp_path / "in" / f"{i}.png").write_bytes(encoded(i))
    files = spark.read.format("binaryFile").load(str(tmp_path / "in"))
    stream = spark.readStream.format("binaryFile").schema(files.schema).load(str(tmp_path / "in"))
    stage = classifier(handleInvalid=invalid)
    query = (
        stage.transform(stream.select("path", "content"))
        .drop("content", "probability")
        .writeStream.format("parquet")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(tmp_path / "out"))
    )
    query.awaitTermination(120)
    got = spark.read.parquet(str(tmp_path / "out")).orderBy("path").collect()
    assert got == stage.transform(files.select("path", "content")).select(got[0].__fields__).orderBy("path").collect()
    assert len(got) == 3


# --- Params -------------------------------------------------------------------------------------------------------


def test_the_default_batch_is_a_cap_whatever_the_arrow_batch(spark):
    """Batch size 3 over one Arrow batch of 10 rows gives what batch size 64 gives."""
    frame = spark.createDataFrame([(i, encoded(i)) for i in range(10)], "id int, content binary").coalesce(1)
    outs = [classifier(batchSize=size, rawPredictionCol="raw").transform(frame).collect() for size in (1, 3, 64)]
    for rows in outs[1:]:
        for a, b in zip(outs[0], rows, strict=True):
            assert np.allclose(a.raw.toArray(), b.raw.toArray(), atol=1e-5)


def test_gpu_conf_sets_the_rows_that_travel_together_and_changes_no_score(spark, frame, tmp_path):
    frame.select("id", "content").coalesce(1).write.parquet(str(tmp_path / "images"))
    images = spark.read.parquet(str(tmp_path / "images"))
    counted = F.pandas_udf(lambda content: pd.Series([len(content)] * len(content)), "int")

    def look():
        rows = classifier(batchSize=1).transform(images).select("id", "prediction", "probability").collect()
        return sorted(rows), {row[0] for row in images.select(counted("content")).collect()}

    scores, together = look()
    assert together == {10}
    settings = gpu_conf(1)
    before = {name: spark.conf.get(name, None) for name in settings}
    if spark.version >= "4.2":
        assert all(spark.conf.get(name) for name in settings)  # it would raise for a name that Spark does not know
    try:
        for name, value in settings.items():
            spark.conf.set(name, value)
        again, together = look()
        # The images are joined to their scores as rows, also where Parquet is read in columns.
        (node,) = udf_nodes(classifier().transform(images))
        assert not node.supportsColumnar()
    finally:
        for name, value in before.items():
            spark.conf.unset(name) if value is None else spark.conf.set(name, value)
    assert (again, together) == (scores, {4, 2})


@pytest.mark.parametrize("size", [0, -64, 2.5, "64", None, True])
def test_gpu_conf_of_no_batch_size_is_refused(size):
    with pytest.raises(ParamError, match="gpu_conf: batch_size="):
        gpu_conf(size)


def test_timing_says_where_a_rows_milliseconds_went(spark, tmp_path):
    images = [None, *(encoded(seed) for seed in range(11))]
    frame = spark.createDataFrame(list(enumerate(images)), "id int, content binary").coalesce(1)
    out = classifier(timingCol="timing").transform(frame).select("id", "timing")
    assert out.schema["timing"].dataType.simpleString() == TIMING_TYPE
    before = spark.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch")
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "6")
    try:
        rows = [row.timing for row in out.orderBy("id").collect()]
    finally:
        spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", before)
    assert rows[0] is None  # that row failed
    # A task's first batch waited for nothing that a worker could see; the second did, and its rows share it.
    assert [row.feed for row in rows[1:6]] == [None] * 5
    assert rows[6].feed > 0
    assert {row.feed for row in rows[6:]} == {rows[6].feed}
    for row in rows[1:]:
        assert min(row.decode, row.resize, row.compute) > 0
        assert row.copy == 0


def test_quadrants_arrive_in_place_and_in_rgb(spark):
    net = ImageClassifier.from_module(Quadrants(), preprocess=PLAIN, activation="none", rawPredictionCol="raw")
    frame = spark.createDataFrame([(encoded(5),)], "content binary")
    row = net.transform(frame).collect()[0]
    pixels = np.array(picture(5).resize((32, 32), 2)) / 255
    tops = [pixels[:16, :16], pixels[:16, 16:], pixels[16:, :16], pixels[16:, 16:]]
    wanted = np.array([part.mean((0, 1)) for part in tops]).T.ravel()
    assert np.abs(row.raw.toArray() - wanted).max() < 0.01


def test_a_local_master_with_a_gpu_amount_is_warned_of(tmp_path):
    """The job itself would hang, so only transform is called, in a session of its own."""
    script = textwrap.dedent("""
        import warnings
        from conftest import PLAIN, Pooled, encoded
        from pyspark.sql import SparkSession
        from gpuml import ImageClassifier
        # Spark starts only with the executor's amount as well, which it then ignores.
        conf = {"spark.task.resource.gpu.amount": "1", "spark.executor.resource.gpu.amount": "1"}
        spark = SparkSession.builder.master("local[2]").config(map=conf).getOrCreate()
        stage = ImageClassifier.from_module(Pooled(), preprocess=PLAIN)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            stage.transform(spark.createDataFrame([(encoded(),)], "content binary"))
        print([str(w.message) for w in seen if "spark.task.resource.gpu.amount" in str(w.message)])
    """)
    env = dict(os.environ, PYTHONPATH=PYTHONPATH)
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120)
    assert "schedules no GPUs" in done.stdout, done.stderr[-2000:]


# --- what travels -------------------------------------------------------------------------------------------------


def test_the_environment_and_pillows_switches_are_left_alone(frame):
    from PIL import Image, ImageFile

    before = dict(os.environ), Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES
    stage = classifier()
    stage.transform(frame).collect()
    stage.predict([encoded(1)])
    assert (dict(os.environ), Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES) == before
