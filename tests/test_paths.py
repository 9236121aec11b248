"""readPaths in a real Spark job: the rows of a column of paths are those of the files' bytes."""

import pytest
from conftest import PLAIN, Pooled, encoded
from plans import udf_rows
from pyspark.sql import functions as F

from gpuml import ImageClassifier, ImageFeaturizer, ParamError

#: Without colons, which Hadoop's own paths do not take.
NAMES = ["plain.png", "a b.png", "50%.png", "a%20b.png", "é ü.png", "#1?[x].png"]


@pytest.fixture(scope="module")
def stage():
    model = ImageClassifier.from_module(Pooled(), preprocess=PLAIN, labels=["ant", "bee", "cat", "dog"]).getModel()
    return ImageClassifier(model=model)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    for seed, name in enumerate(NAMES):
        (folder / name).write_bytes(encoded(seed))
    (folder / "text.png").write_bytes(b"no picture")
    return folder


@pytest.fixture(scope="module")
def files(spark, folder):
    return spark.read.format("binaryFile").load(str(folder)).withColumn("escaped", F.col("_metadata.file_path"))


def test_paths_and_uris_as_spark_writes_them_give_the_rows_of_the_bytes(stage, files):
    outputs = ["path", "prediction", "predictedLabel", "probability", "error"]
    wanted = sorted(stage.transform(files).select(*outputs).collect())
    assert [row.error for row in wanted].count(None) == len(NAMES)
    # The last is escaped, but with one slash: a recipe of docs/images.md.
    forms = F.array("path", F.input_file_name(), F.regexp_replace("escaped", "^file:/+", "file:///"))
    opened = stage.copy().setReadPaths(True).setInputCol("form")
    rows = opened.transform(files.select("path", F.explode(forms).alias("form"))).select("form", *outputs).collect()
    assert len({row.form for row in rows}) == 2 * len(wanted)
    assert sorted(row[1:] for row in rows) == [tuple(row) for row in wanted for _ in range(3)]


def test_a_bad_path_costs_its_own_row(spark, stage, folder):
    paths = [f"{folder}/a b.png", None, f"{folder}/none.png", f"{folder}", "", f"{folder}/text.png", "::x", "no://x"]
    frame = spark.createDataFrame([(path,) for path in paths], "file string").coalesce(1)
    by_path = stage.copy().setReadPaths(True).setInputCol("file")
    rows = by_path.transform(frame).collect()
    assert [row.file for row in rows] == paths
    kinds = [row.error and row.error.partition(":")[0] for row in rows]
    assert kinds == [None, "null_input", "io", "io", "io", "not_image", "io", "io"]
    assert udf_rows(by_path.setHandleInvalid("skip").transform(frame)) == len(paths)
    out = by_path.setHandleInvalid("error").transform(frame.where(F.col("file").contains("none")))
    with pytest.raises(Exception, match=rf"{stage.uid}: {folder}/none.png: io: .*No such file"):
        out.select("prediction").collect()


def test_a_column_that_does_not_fit_is_refused_with_the_setter(files, stage):
    with pytest.raises(ParamError, match=r"inputCol='path' is of type string.*binaryFile.*setReadPaths\(True\)"):
        stage.copy().setInputCol("path").transform(files)
    for column, kind in (("content", "binary"), ("length", "bigint")):
        message = rf"'{column}' is of type {kind}, and readPaths=True.*setInputCol\('path'\)"
        with pytest.raises(ParamError, match=message):
            stage.copy().setReadPaths(True).setInputCol(column).transform(files)
    with pytest.raises(TypeError):
        stage.copy().setReadPaths("yes")


def test_a_featurizer_takes_paths_too(spark, stage, folder):
    featurizer = ImageFeaturizer(model=stage.getModel(), readPaths=True, inputCol="path")
    row = featurizer.transform(spark.createDataFrame([(f"{folder}/a b.png",)], "path string")).first()
    assert row.features.toArray().tolist() == featurizer.predict([encoded(1)]).features[0].tolist()
