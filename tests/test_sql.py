"""register_udf: a stage as a function of SQL, its types, and how often each way of writing it runs the network."""

import io
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from conftest import PLAIN, Pooled, encoded
from PIL import Image
from pyspark.ml import PipelineModel
from pyspark.sql.types import StringType, StructField, StructType

from gpuml import ImageClassifier, ImageFeaturizer, ParamError, RowError, register_udf
from gpuml.spark import udf
from gpuml.spark.columns import TIMING_TYPE, TOP_K_TYPE
from gpuml.spec import Spec

#: The photographs below are as blue as can be, all over; the images with which a network is tried at first are not.
COUNTING = """
import os
from pathlib import Path
from torch import nn

class Counting(nn.Module):
    def forward(self, x):
        with open(Path(FOLDER, str(os.getpid())), "a") as file:
            file.write("x" * int((x[:, 2].amin((1, 2)) == 1).sum()))
        return x.mean((2, 3))
"""

GOOD = 5


def blue(red):
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (red, 0, 255)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def runs(spark, tmp_path_factory):
    """A query -> its rows, and how many rows of it went through the network; `classify` and `photos` are there."""
    source, counts = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("counts")
    (source / "counting_for_sql.py").write_text(COUNTING.replace("FOLDER", repr(str(counts))))
    spark.addArtifacts(str(source / "counting_for_sql.py"), pyfile=True)
    stage = ImageClassifier(model="python:counting_for_sql:Counting", preprocess=PLAIN, labels=["red", "green", "blue"])
    register_udf(spark, "classify", stage)
    data = [*(blue(red) for red in range(GOOD)), b"no picture", None]
    photos = spark.createDataFrame([(f"{i}.png", d) for i, d in enumerate(data)], "path string, content binary")
    photos.coalesce(1).createOrReplaceTempView("photos")

    def count(query):
        before = sum(len(file.read_text()) for file in counts.iterdir())
        rows = spark.sql(query).collect()
        return rows, sum(len(file.read_text()) for file in counts.iterdir()) - before

    return count


DOCUMENTED = """
    SELECT path, r.predictedLabel, r.prediction FROM (SELECT path, classify(content) AS r FROM photos)
    WHERE r.error IS NULL
"""


def test_the_documented_form_runs_the_network_once_per_row(runs):
    rows, count = runs(DOCUMENTED)
    assert rows == [(f"{i}.png", "blue", 2.0) for i in range(GOOD)]
    assert count == GOOD


@pytest.mark.parametrize(
    "query",
    [
        "SELECT path, r.* FROM classified WHERE r.error IS NULL AND r.prediction = 2",
        "SELECT r.predictedLabel, count(*), max(r.prediction) FROM classified WHERE r.error IS NULL GROUP BY 1",
        "SELECT a.r.prediction, b.path FROM classified a JOIN VALUES ('1.png') b(path) ON a.path = b.path",
    ],
)
def test_a_view_of_it_runs_it_once_per_row_too(spark, runs, query):
    spark.sql("CREATE OR REPLACE TEMPORARY VIEW classified AS SELECT path, classify(content) AS r FROM photos")
    rows, count = runs(query)
    assert rows
    assert count == GOOD


@pytest.mark.parametrize(
    ("query", "times"),
    [
        ("SELECT classify(content).predictedLabel FROM photos", 1),
        ("SELECT classify(content).predictedLabel, classify(content).prediction FROM photos", 2),
        ("SELECT classify(content).predictedLabel FROM photos WHERE classify(content).error IS NULL", 2),
        ("SELECT classify(content).predictedLabel, classify(content).prediction FROM photos "
         "WHERE classify(content).error IS NULL", 3),
    ],
)  # fmt: skip
def test_written_directly_it_runs_the_network_for_each_place_where_it_stands(runs, query, times):
    assert runs(query)[1] == times * GOOD


def test_directly_inside_an_aggregate_spark_refuses_it(runs):
    with pytest.raises(Exception, match=r"(?i)non-?deterministic"):
        runs("SELECT sum(classify(content).prediction) FROM photos")


def test_a_filter_on_another_column_spares_the_network_inside_the_subquery_alone(runs):
    form = "SELECT path, r.prediction FROM (SELECT path, classify(content) AS r FROM photos {}) {}"
    inside, few = runs(form.format("WHERE path < '3'", ""))
    outside, whole = runs(form.format("", "WHERE path < '3'"))
    assert inside == outside
    assert (few, whole) == (3, GOOD)


def test_a_global_sort_runs_the_network_twice(runs):
    spread = "(SELECT /*+ REPARTITION(2) */ path, content FROM photos)"
    rows, count = runs(f"SELECT path, r.error FROM (SELECT path, classify(content) AS r FROM {spread}) ORDER BY path")
    assert [row.path for row in rows] == [f"{i}.png" for i in range(7)]
    assert count == 2 * GOOD


ALL = {
    "rawPredictionCol": "raw", "topKCol": "top", "topK": 2, "deviceCol": "device", "timingCol": "timing",
    "labels": ["ant", "bee", "cat", "dog"],
}  # fmt: skip


@pytest.fixture(scope="module")
def stage():
    return ImageClassifier(model=ImageClassifier.from_module(Pooled(), preprocess=PLAIN).getModel(), **ALL)


@pytest.fixture(scope="module")
def frame(spark):
    data = [None, encoded(1), b"no picture", encoded(2)]
    rows = [(f"{i}.png", d) for i, d in enumerate(data)]
    return spark.createDataFrame(rows, "path string, content binary").coalesce(1)


def test_its_fields_are_those_of_transform_by_name_type_and_value(spark, frame, stage):
    function = register_udf(spark, "all_of_it", stage)
    wanted = stage.transform(frame)
    answers = frame.select(function("content").alias("r")).select("r.*")
    assert answers.columns == wanted.columns[2:]
    types = {field.name: field.dataType.simpleString() for field in answers.schema.fields}
    assert (types["prediction"], types["predictedLabel"]) == ("double", "string")
    assert (types["probability"], types["raw"]) == ("array<float>", "array<float>")
    assert (types["top"], types["timing"]) == (TOP_K_TYPE, TIMING_TYPE)
    for row, want in zip(answers.collect(), wanted.collect(), strict=True):
        assert (row.error, row.device, row.prediction) == (want.error, want.device, want.prediction)
        assert (row.predictedLabel, row.top) == (want.predictedLabel, want.top)
        assert (row.timing is None) == (want.timing is None) == (row.error is not None)
        for vector, want_vector in ((row.probability, want.probability), (row.raw, want.raw)):
            assert vector == (None if want_vector is None else want_vector.toArray().tolist())
        assert row.timing is None or (row.timing.feed is None and row.timing.compute > 0)


def test_features_are_an_array(spark, frame, stage):
    featurizer = ImageFeaturizer(model=stage.getModel())
    register_udf(spark, "features_of", featurizer)
    frame.createOrReplaceTempView("frame")
    rows = spark.sql("SELECT r.* FROM (SELECT features_of(content) AS r FROM frame)").collect()
    wanted = featurizer.predict([encoded(1)]).features[0]
    assert rows[0].featuresError.startswith("null_input")
    assert np.allclose(rows[1].features, wanted, atol=1e-6)


def test_error_fails_with_the_reason(spark, frame, stage):
    register_udf(spark, "strictly", stage.copy().setHandleInvalid("error"))
    frame.createOrReplaceTempView("frame")
    with pytest.raises(Exception, match="RowError: not_image: 10 bytes"):
        spark.sql("SELECT strictly(content) FROM frame WHERE path <> '0.png'").collect()


@pytest.mark.parametrize(("read_paths", "message"), [(True, "b.png: no image"), (False, "no image")])
def test_error_names_the_row_where_it_is_a_path(monkeypatch, read_paths, message):
    monkeypatch.setattr(udf, "_serve", lambda spec, rows: {"error": [None, "not_image: no image"]})
    spec = Spec("0" * 64, read_paths=read_paths)
    cells = pd.Series(["a.png", "b.png"] if read_paths else [b"a", b"b"])
    schema = StructType([StructField("error", StringType())])
    assert udf.answer_udf(spec, {"error": "error"}, schema, fail=False).func(cells).error[1] == "not_image: no image"
    with pytest.raises(RowError) as caught:
        udf.answer_udf(spec, {"error": "error"}, schema, fail=True).func(cells)
    assert (caught.value.kind, caught.value.message) == ("not_image", message)


def test_paths_are_opened_where_the_stage_says_so(spark, stage, tmp_path):
    (tmp_path / "a b.png").write_bytes(encoded(1))
    register_udf(spark, "by_path", stage.copy().setReadPaths(True))
    paths = f"(SELECT explode(array('{tmp_path}/a b.png', '{tmp_path}/none.png')) AS path)"
    rows = spark.sql(f"SELECT r.error, r.predictedLabel FROM (SELECT by_path(path) AS r FROM {paths})").collect()
    assert rows[0] == (None, stage.predict([encoded(1)]).predictedLabel[0])
    assert rows[1].error == f"io: {tmp_path}/none.png: No such file or directory"


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (pd.Series([None, "/a.png"]), r"column is a string; it takes .* a binary column.*setReadPaths\(True\)"),
        (pd.Series([1.5]), "column is float; it takes"),
        (pd.DataFrame({"data": [b""]}), "column is a struct; it takes .* image structs go through transform"),
    ],
)
def test_a_column_of_another_type_is_refused_in_the_worker(cells, message):
    spec = Spec("0" * 64)
    with pytest.raises(ParamError, match=f"the function's {message}"):
        udf.checked(spec, cells)
    with pytest.raises(ParamError, match="column is binary; with readPaths=True it opens the paths in a string column"):
        udf.checked(replace(spec, read_paths=True), pd.Series([b"x"]))
    nulls = pd.Series([None, None])
    assert udf.checked(spec, nulls) == udf.checked(replace(spec, read_paths=True), nulls) == [None, None]


@pytest.mark.parametrize("name", ["", "a b", "a.b", "1st", "`a`", None, "é"])
def test_a_name_that_is_no_identifier_is_refused(spark, stage, name):
    with pytest.raises(ParamError, match="is no identifier of SQL"):
        register_udf(spark, name, stage)


@pytest.mark.parametrize("other", [None, "model", PipelineModel([])])
def test_what_is_no_stage_of_gpuml_is_refused(spark, other):
    with pytest.raises(ParamError, match=f"stage is a {type(other).__name__}; give a stage of gpuml"):
        register_udf(spark, "classify_it", other)


def test_what_sql_cannot_do_is_refused_before_anything_is_sent(spark, stage):
    form = r"SELECT path, r\.\* FROM \(SELECT path, it\(content\) AS r FROM photos\) WHERE r\.error IS NULL"
    with pytest.raises(ParamError, match=f"handleInvalid='skip'.*{form}"):
        register_udf(spark, "it", stage.copy().setHandleInvalid("skip"))
    with pytest.raises(ParamError, match=r"model is not set.*setModel"):
        register_udf(spark, "it", ImageClassifier())
    with pytest.raises(ParamError, match=r"errorCol='Probability' and probabilityCol='probability' are one name"):
        register_udf(spark, "it", stage.copy().setErrorCol("Probability"))
    nothing = ImageFeaturizer(model=stage.getModel(), outputCol="", errorCol="")
    with pytest.raises(ParamError, match="every output column is ''"):
        register_udf(spark, "it", nothing)
    assert not spark.catalog.functionExists("it")
