"""The folder of awkward files (make_inputs.py) through a real Spark job: colours, reasons, one row per file."""

import base64
import json
import warnings

import pytest
from conftest import Quadrants
from make_inputs import build
from pyspark.sql import functions as F

from gpuml import ImageClassifier, Preprocess

# The whole picture, a little enlarged or reduced, whatever its shape: quadrants stay quadrants.
WHOLE = Preprocess(resize=(64, 64), crop=None, mean=(0, 0, 0), std=(1, 1, 1), interpolation="nearest")
QUADRANTS = ("tl", "tr", "bl", "br")
IMAGE = "struct<origin:string,height:int,width:int,nChannels:int,mode:int,data:binary>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("field")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's deprecations in the encoders that write the files
        build(out)
    return out


@pytest.fixture(scope="module")
def manifest(folder):
    return json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["files"]


@pytest.fixture(scope="module")
def stage():
    return ImageClassifier.from_module(
        Quadrants(), preprocess=WHOLE, activation="none", rawPredictionCol="raw", topKCol="top", deviceCol="device"
    )


def check(entry, row):
    """One answer against its manifest entry: colours within tolerance, or nulls and the right kind."""
    kind = row.error.split(": ")[0] if row.error else None
    made = [row.prediction, row.predictedLabel, row.probability, row.raw, row.top]
    assert all((value is None) == (kind is not None) for value in made), entry["id"]
    if entry["expect"] == "reject":
        assert kind == entry["error_kind"], (entry["id"], row.error)
    elif entry["expect"] == "decode":
        assert kind is None, (entry["id"], row.error)
    elif kind is not None:
        assert kind == entry["error_kind"], (entry["id"], row.error)
    if kind is None and "quadrants" in entry and entry.get("check") != "size_only":
        colours = row.raw.toArray().reshape(3, 4).T * 255
        for name, colour in zip(QUADRANTS, colours, strict=True):
            # An odd size has its middle row or column in one of two quadrants: the mean of 32x32 shifts a little.
            slack = entry["tol"] + (8 if any(length % 2 for length in entry["size"]) else 1)
            assert abs(colour - entry["quadrants"][name]).max() <= slack, (entry["id"], name, colour)


def test_every_file_of_a_tree_is_one_row_with_the_right_colours_or_the_right_reason(spark, folder, manifest, stage):
    frame = spark.read.format("binaryFile").option("recursiveFileLookup", "true").load(str(folder / "images"))
    rows = {row.path: row for row in stage.transform(frame.coalesce(2)).collect()}
    visible = [entry for entry in manifest if entry["spark_visible"] and entry["path"].startswith("images/")]
    assert len(rows) == frame.count() == len(visible)
    for entry in visible:
        # Names come back as they are, with "file:" in front.
        row = rows[f"file:{folder / entry['path']}"]
        assert row.length == entry["bytes"]
        check(entry, row)


def test_files_that_spark_leaves_out_work_as_rows_in_one_batch_with_all_others(spark, folder, manifest, stage):
    data = [(entry["id"], (folder / entry["path"]).read_bytes()) for entry in manifest]
    frame = spark.createDataFrame(data, "id string, content binary").coalesce(1)
    rows = stage.copy({stage.batchSize: 200}).transform(frame).collect()
    assert [row.id for row in rows] == [entry["id"] for entry in manifest]
    for entry, row in zip(manifest, rows, strict=True):
        check(entry, row)


def test_partition_folders_keep_their_label(spark, folder, stage):
    frame = spark.read.format("binaryFile").load(str(folder / "partitioned"))
    rows = stage.transform(frame).select("label", "error").collect()
    assert sorted(map(tuple, rows)) == [("cat", None), ("dog", None)]


def test_image_structs_give_the_colours_of_their_pictures(spark, folder, stage):
    entries = json.loads((folder / "structs.json").read_text())["rows"]
    data = []
    for entry in entries:
        row = dict(entry["row"]) if entry["row"] else None
        if row:
            row["data"] = base64.b64decode(row.pop("data_base64"))
        data.append(
            (entry["id"], row and [row[name] for name in ["origin", "height", "width", "nChannels", "mode", "data"]])
        )
    frame = spark.createDataFrame(data, f"id string, image {IMAGE}").coalesce(1)
    rows = stage.copy({stage.inputCol: "image"}).transform(frame).collect()
    assert len(rows) == len(entries)
    for entry, row in zip(entries, rows, strict=True):
        check(entry, row)


def test_sparks_image_source_gives_the_same_where_it_does_not_spoil_the_file(spark, folder, manifest, stage):
    """One flat bomb fails that source's whole read, so the files that it can take are named one by one."""
    usable = [e for e in manifest if e["spark_visible"] and "image_source" not in e and e["expect"] != "either"]
    usable = [e for e in usable if e["path"].startswith("images/") and "names/" not in e["path"]]
    paths = [f"{folder / entry['path']}" for entry in usable]
    frame = spark.read.format("image").load(paths).withColumn("path", F.col("image.origin"))
    rows = {row.path: row for row in stage.copy({stage.inputCol: "image"}).transform(frame.coalesce(2)).collect()}
    assert len(rows) == len(usable) > 20
    for entry in usable:
        if "variants" in entry or entry["expect"] == "reject":
            continue  # ImageIO's transparency is not ours; what it cannot read is an undefined row, tested above
        check({**entry, "tol": entry["tol"] + 3}, rows[f"file://{folder / entry['path']}"])
