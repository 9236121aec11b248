"""URLs that Spark reads: every byte arrives on the driver, in pieces. Hadoop's viewfs stands for a remote system."""

import shutil
import zipfile

import numpy as np
import pyarrow as pa
import pytest
import torch
import torchvision
from conftest import PLAIN, Pooled, encoded
from pyspark.sql import SparkSession

from gpuml import ImageClassifier, ModelError, ParamError, Preprocess, save_model
from gpuml.spark import fetch
from gpuml.spark.fetch import is_spark_url, local_copy

URL = "viewfs://gpumltest/models"


@pytest.fixture(scope="module")
def mount(spark, tmp_path_factory):
    """A folder that Spark alone reads as viewfs://gpumltest/models. One for all: Hadoop keeps a mount."""
    folder = tmp_path_factory.mktemp("remote")
    spark.conf.set("fs.viewfs.mounttable.gpumltest.link./models", f"file:{folder}")
    yield folder
    spark.conf.unset("fs.viewfs.mounttable.gpumltest.link./models")


@pytest.fixture
def remote(mount):
    yield mount
    for path in mount.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("hdfs://namenode:8020/a.pt2", True),
        ("hdfs:///a.pt2", True),
        ("s3a://bucket/a.pt2", True),
        ("abfss://box@account.dfs.core.windows.net/a.pt2", True),
        ("dbfs:/models/a.pt2", True),
        ("viewfs://gpumltest/a", True),
        ("file:/a.pt2", False),
        ("file:///a.pt2", False),
        ("https://host/a.pt2", False),
        ("HTTP://host/a.pt2", False),
        ("torchvision:resnet50", False),
        ("hf:org/name", False),
        ("hf:/folder", False),
        ("timm:/x", False),
        ("C:/models/a.pt2", False),
        ("/a.pt2", False),
        ("", False),
    ],
)
def test_what_is_read_through_spark(text, known):
    assert is_spark_url(text) is known


RANDOM = np.random.default_rng(0).integers(0, 256, 700_000, dtype=np.uint8).tobytes()


@pytest.mark.parametrize(
    "content",
    [
        RANDOM,
        RANDOM + b"\n",
        b"\n",
        b"\n\n\n",
        b"one line, no end",
        b"\r\n\r\r\n",
        bytes(range(256)) * 100,
        bytes(200_000),
        b"\xff\xfe\x00\n" * 40_000,
        b"PK\x03\x04" + b"\n" * 20_000 + b"end",
    ],
    ids=lambda content: f"{len(content)}-{content[:4].hex()}",
)
@pytest.mark.parametrize("split", ["128m", "64k"])
def test_every_byte_arrives_whatever_it_is_and_wherever_spark_splits_it(spark, remote, content, split, monkeypatch):
    (remote / "file.bin").write_bytes(content)
    spark.conf.set("spark.sql.files.maxPartitionBytes", split)
    try:
        with local_copy(f"{URL}/file.bin", spark) as path:
            assert path.read_bytes() == content
    finally:
        spark.conf.unset("spark.sql.files.maxPartitionBytes")
    assert not path.exists()


def test_a_file_is_cut_into_pieces_that_are_put_in_order(monkeypatch):
    monkeypatch.setattr(fetch, "CHUNK_BYTES", 10)
    lines = [b"a" * 4, b"", b"b" * 30, b"c", b"d" * 9, b"e", b"f"]
    starts = [0, 0, 0, 0, 500, 500, 500]
    batches = [
        pa.record_batch([pa.array([s], pa.int64()), pa.array([line], pa.binary())], names=["start", "value"])
        for s, line in zip(starts, lines, strict=True)
    ]
    pieces = [piece.to_pylist()[0] for piece in fetch._cut(iter(batches))]
    assert [piece["place"] for piece in pieces] == sorted({piece["place"] for piece in pieces})
    assert b"".join(piece["data"] for piece in pieces) == b"".join(line + b"\n" for line in lines)
    assert len(pieces) >= 4
    whole = pa.record_batch([pa.array(starts, pa.int64()), pa.array(lines, pa.binary())], names=["start", "value"])
    together = [piece.to_pylist()[0] for piece in fetch._cut(iter([whole]))]
    assert b"".join(piece["data"] for piece in together) == b"".join(line + b"\n" for line in lines)
    assert [piece["place"] >= 500 for piece in together] == [False, True]


def test_names_are_no_patterns(spark, remote):
    (remote / "a[1]{x}.bin").write_bytes(b"this")
    (remote / "a1x.bin").write_bytes(b"other")
    with local_copy(f"{URL}/a[1]{{x}}.bin", spark) as path:
        assert path.read_bytes() == b"this"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        (f"{URL}/missing.pt2", "Path does not exist"),
        (URL, "is a folder"),
        (f"{URL}/empty", "is an empty file or folder"),
        (f"{URL}/empty.bin", "is an empty file or folder"),
        ("nosuch://host/net.pt2", "nosuch"),
        (f"{URL}/_hidden.pt2", "begins with _ or a dot"),
        (f"{URL}/.hidden.pt2", "begins with _ or a dot"),
        (f"{URL}/net.pt2.GZ", "would unpack"),
        (f"{URL}/marked.pt2", "byte order mark"),
        (f"{URL}/text.pt2", "no zip archive"),
    ],
)
def test_what_cannot_be_read_says_why(spark, remote, url, reason):
    for name in ("a.bin", "b.bin"):
        (remote / name).write_bytes(b"x")
    (remote / "empty").mkdir()
    (remote / "empty.bin").touch()
    (remote / "marked.pt2").write_bytes(b"\xef\xbb\xbfabc")
    (remote / "text.pt2").write_bytes(b"text\n")
    with pytest.raises(ModelError, match=reason) as caught:
        ImageClassifier(model=url).transform(spark.createDataFrame([(b"",)], "content binary"))
    assert url in str(caught.value)


def test_a_file_that_a_task_cannot_read_says_why(spark, remote):
    """Hadoop keeps sums of what it wrote; they do not fit any more."""
    frame = spark.createDataFrame([("x" * 1000,)], "value string").coalesce(1)
    frame.write.text(f"{URL}/written")
    part = next((remote / "written").glob("part-*"))
    part.write_bytes(part.read_bytes().replace(b"x", b"y"))
    with pytest.raises(ModelError, match=rf"Spark cannot read '{URL}/written/.*error while reading"):
        ImageClassifier(model=f"{URL}/written/{part.name}")._model_file(spark)


def test_arrows_large_types_are_read_as_well(spark, remote):
    (remote / "file.bin").write_bytes(RANDOM)
    spark.conf.set("spark.sql.execution.arrow.useLargeVarTypes", "true")
    try:
        with local_copy(f"{URL}/file.bin", spark) as path:
            assert path.read_bytes() == RANDOM
    finally:
        spark.conf.unset("spark.sql.execution.arrow.useLargeVarTypes")


def test_a_model_and_a_zip_and_weights_come_through_spark(spark, remote, tmp_path):
    save_model(Pooled(), remote / "net.pt2", preprocess=PLAIN, labels=list("abcd"))
    frame = spark.createDataFrame([(encoded(seed),) for seed in range(3)], "content binary")
    stage = ImageClassifier(model=f"{URL}/net.pt2")
    wanted = ImageClassifier(model=str(remote / "net.pt2")).transform(frame).collect()
    assert stage.transform(frame).collect() == wanted
    assert stage.getModel() == f"{URL}/net.pt2"

    with zipfile.ZipFile(remote / "net.zip", "w") as archive:
        archive.write(remote / "net.pt2", "net.pt2")
        archive.writestr("synset.txt", "\n".join("wxyz"))
    zipped = ImageClassifier(model=f"{URL}/net.zip").predict([encoded(0)])
    assert zipped.predictedLabel[0] == "wxyz"["abcd".index(stage.predict([encoded(0)]).predictedLabel[0])]

    torch.manual_seed(1)
    net = torchvision.models.squeezenet1_1(num_classes=3).eval()
    torch.save(net.state_dict(), remote / "w.pth")
    small = Preprocess(resize=64, crop=64)
    args = {"model": "torchvision:squeezenet1_1", "labels": list("abc"), "preprocess": small}
    held = ImageClassifier(weights=f"{URL}/w.pth", **args)._model_file(spark)
    assert held == ImageClassifier(weights=str(remote / "w.pth"), **args)._model_file()

    (remote / "net.pt2").unlink()  # a stage holds its model
    assert stage.transform(frame).collect() == wanted


def test_predict_takes_the_active_session_or_says_that_there_is_none(spark, remote, monkeypatch):
    save_model(Pooled(), remote / "net.pt2", preprocess=PLAIN)
    assert len(ImageClassifier(model=f"{URL}/net.pt2").predict([encoded(0)])) == 1
    monkeypatch.setattr(SparkSession, "getActiveSession", lambda: None)
    with pytest.raises(ParamError, match="no session is active"):
        ImageClassifier(model=f"{URL}/net.pt2").predict([encoded(0)])
