"""A path or a URL -> bytes, or the row's reason; only a package that is missing is everybody's."""

import os
import sys
import threading
from pathlib import Path

import pytest
import torch
from conftest import PLAIN, Pooled, encoded

from gpuml import ImageClassifier, ParamError
from gpuml.errors import RowError
from gpuml.models.cards import Card
from gpuml.spec import Spec
from gpuml.worker import files
from gpuml.worker.cache import Network
from gpuml.worker.files import local_path, read_file
from gpuml.worker.runner import Runner, read

#: Names that Spark, URIs and patterns take for something else.
NAMES = ["a b.png", "50%.png", "a%20b.png", "é ü.png", "#1?[x].png", "x::y.png", "+&=;.png"]


def a_runner():
    network = Network(lambda x: x.mean((2, 3)), Card(PLAIN, 3), torch.device("cpu"), "float32")
    return Runner(network, Spec("0" * 64), threads=2)


def reason(place):
    with pytest.raises(RowError) as caught:
        read_file(place)
    return str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_a_local_file_is_found_by_its_path_by_hadoops_and_by_its_uri(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(name.encode())
    for place in (path, str(path), f"file:{path}", path.as_uri(), f"FILE://localhost{path.as_uri()[7:]}"):
        assert read_file(place) == name.encode(), place


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("file:/a%20b", "/a%20b"),
        ("file:///a%20b", "/a b"),
        ("file:///%C3%A9", "/é"),
        ("file:///é", "/é"),
        ("file:///100%", "/100%"),
        ("file:a", "file:a"),
        ("a/b", "a/b"),
        ("s3://a/b", None),
        ("dbfs:/a", None),
        ("simplecache::s3://a/b", None),
    ],
)
def test_what_is_escaped_is_told_by_the_slashes(text, path):
    assert local_path(text) == (None if path is None else Path(path))


def test_a_file_of_another_host_is_not_looked_for_here(tmp_path):
    assert "a file of the host 'elsewhere'" in reason(f"file://elsewhere{tmp_path}")


def test_what_is_no_regular_file_is_the_rows_reason_at_once(tmp_path):
    os.mkfifo(tmp_path / "fifo")  # nobody writes to it
    assert reason(f"{tmp_path}/fifo") == f"io: {tmp_path}/fifo: not a regular file"
    assert reason("/dev/zero") == "io: /dev/zero: not a regular file"
    assert reason(tmp_path) == f"io: {tmp_path}: Is a directory"
    assert reason(f"{tmp_path}/none").endswith("/none: No such file or directory")
    assert reason(f"file:{tmp_path}/" + "x" * 300).endswith(": File name too long")
    assert reason("/a\0b") == "io: /a\0b: ValueError: embedded null byte"
    assert reason("") == "io: the path is empty"


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="no /proc")
def test_a_file_that_claims_to_be_empty_is_not_read():
    assert read_file("/proc/self/environ") == b""


def test_a_file_larger_than_a_cell_of_spark_is_not_read(tmp_path):
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(2**31)
    assert reason(tmp_path / "huge").startswith(f"too_large: {tmp_path}/huge: 2147483648 bytes")


def test_memory_that_runs_out_is_the_rows_reason(tmp_path, monkeypatch):
    def exhausted(_):
        raise MemoryError

    (tmp_path / "a").write_bytes(b"x")
    monkeypatch.setattr(Path, "read_bytes", exhausted)
    assert reason(tmp_path / "a").startswith("too_large: ")


# --- URLs ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def memory():
    """fsspec's file system in memory, empty again after the test."""
    from fsspec.implementations.memory import MemoryFileSystem

    yield MemoryFileSystem()
    MemoryFileSystem.store.clear()


def test_a_url_is_read_by_fsspec_as_it_stands(memory):
    memory.pipe("/a b%20é.png", b"picture")
    for url in ("memory://a b%20é.png", "memory:/a b%20é.png", "MEMORY:///a b%20é.png"):
        assert read_file(url) == b"picture"
    assert reason("memory://none.png").startswith("io: memory://none.png: FileNotFoundError")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("simplecache::memory://a", "chains of file systems"),
        ("memory://a::file:///etc/passwd", "chains of file systems"),
        ("file::memory://a", "chains of file systems"),
        ("local:///none", "as a path"),
        ("generic://file:///none", "as a path"),
        ("nosuch://a", "Protocol not known: nosuch"),
        ("zip://a", "zip://a: "),
        ("reference://a", "reference://a: "),
    ],
)
def test_what_fsspec_would_do_more_than_open_a_url_is_refused_for_that_row(memory, url, message):
    assert message in reason(url)
    assert reason(url).startswith("io: ")


@pytest.mark.parametrize(
    ("url", "package"), [("s3://b/a.png", "s3fs"), ("s3a://b/a.png", "s3fs"), ("abfss://c@h/a.png", "adlfs")]
)
def test_a_missing_package_is_no_rows_fault_and_fails_with_what_to_type(monkeypatch, url, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ParamError, match=rf"'{url}' cannot be opened.*On every node type: pip install {package}$"):
        read_file(url)
    runner = a_runner()
    with pytest.raises(ParamError, match=package):
        list(runner._decoded(["/none", url], [None, None], []))


def test_text_is_opened_in_the_decoding_threads(tmp_path, monkeypatch):
    (tmp_path / "a.png").write_bytes(encoded(1))
    readers = set()

    def watching(path):
        readers.add(threading.current_thread().name)
        return path.read_bytes()

    monkeypatch.setattr(files, "_regular", watching)
    runner = a_runner()
    reasons = [None, None]
    assert [rows for _, rows in runner._decoded([f"{tmp_path}/a.png", None], reasons, [])] == [[0]]
    assert reasons[1].startswith("null_input: ")
    assert readers
    assert all(name.startswith("gpuml-decode") for name in readers)


def test_files_that_are_far_away_are_waited_for_together(memory):
    """Each waits for another: one after the other, the first would never come."""
    from fsspec import register_implementation

    class Far(type(memory)):
        protocol = "far"
        both = threading.Barrier(2, timeout=20)

        def cat_file(self, path):
            self.both.wait()
            return memory.cat_file("/a.png")

    memory.pipe("/a.png", encoded(1))
    register_implementation("far", Far, clobber=True)
    reasons = [None, None]
    assert [rows for _, rows in a_runner()._decoded(["far://a", "far://b"], reasons, [])] == [[0, 1]]
    assert reasons == [None, None]


def test_a_file_is_decoded_by_the_rules_of_its_bytes(tmp_path):
    (tmp_path / "a.png").write_bytes(encoded(1))
    spec = Spec("0" * 64)
    assert read(f"{tmp_path}/a.png", spec)[0].equal(read(encoded(1), spec)[0])
    (tmp_path / "text").write_bytes(b"no picture")
    (tmp_path / "nothing").touch()
    for name, kind in (("text", "not_image"), ("nothing", "empty")):
        with pytest.raises(RowError) as caught:
            read(f"{tmp_path}/{name}", spec)
        assert caught.value.kind == kind


def test_predict_takes_text_as_a_column_of_paths_where_the_stage_says_so(tmp_path, memory):
    (tmp_path / "a b.png").write_bytes(encoded(1))
    memory.pipe("/c.png", encoded(1))
    stage = ImageClassifier.from_module(Pooled(), preprocess=PLAIN, readPaths=True)
    uri = (tmp_path / "a b.png").as_uri()
    answers = stage.predict([uri, "memory://c.png", tmp_path / "a b.png", encoded(1), "nosuch://x", None])
    assert answers.prediction[:4].nunique() == 1
    assert answers.error[4].startswith("io: nosuch://x: ")
    assert answers.error[5].startswith("null_input: ")
