"""The cache folder: where it is, and that a hash always leads to whole, equal content."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gpuml
from gpuml import ModelError
from gpuml.models import store


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache whose path is an ordinary one: with a space and other letters."""
    folder = tmp_path / "mon cache é №1"
    monkeypatch.setenv("GPUML_HOME", str(folder))
    return folder


def put(content):
    with store.incoming() as path:
        path.write_bytes(content)
        return store.add(path)


def test_home_is_gpuml_home_else_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("GPUML_HOME", str(tmp_path / "own"))
    assert store.home() == tmp_path / "own"
    monkeypatch.setenv("GPUML_HOME", "~/own")
    assert store.home() == tmp_path / "own"
    monkeypatch.setenv("GPUML_HOME", "")
    assert store.home() == tmp_path / "xdg" / "gpuml"
    monkeypatch.delenv("GPUML_HOME")
    assert store.home() == tmp_path / "xdg" / "gpuml"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert store.home() == tmp_path / ".cache" / "gpuml"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert store.home() == tmp_path / "Library" / "Caches" / "gpuml"


def test_looking_into_the_cache_makes_nothing(cache):
    assert not store.holds("0" * 64)
    assert store.recall({"a": 1}) is None
    with pytest.raises(ModelError):
        store.path_of("0" * 64)
    assert not cache.exists()


def test_what_is_added_lies_under_its_hash_and_nothing_else_remains(cache):
    sha256 = put(b"content")
    assert sha256 == hashlib.sha256(b"content").hexdigest()
    assert store.path_of(sha256).read_bytes() == b"content"
    assert store.path_of(sha256).name == store.file_name(sha256) == f"gpuml-{sha256}.pt2"
    assert [path.name for path in (cache / "models").iterdir()] == [store.file_name(sha256)]


def test_what_fails_while_it_is_written_leaves_nothing(cache):
    def fail():
        with store.incoming() as path:
            path.write_bytes(b"half")
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        fail()
    assert list((cache / "models").iterdir()) == []


def test_a_copy_leaves_its_source_and_outlives_its_change(cache, tmp_path):
    source = tmp_path / "net.pt2"
    source.write_bytes(b"first")
    first = store.add_copy(source)
    source.write_bytes(b"second")
    assert store.add_copy(source) != first
    assert store.path_of(first).read_bytes() == b"first"


def test_a_file_of_the_cache_can_be_added_again(cache):
    sha256 = put(b"content")
    assert store.add_copy(store.path_of(sha256)) == sha256
    assert store.path_of(sha256).read_bytes() == b"content"


def test_a_missing_file_names_hash_and_cache_and_what_to_do(cache):
    with pytest.raises(ModelError) as caught:
        store.path_of("ab" * 32)
    for part in (f"sha256:{'ab' * 32}", str(cache), "set the stage's model again"):
        assert part in str(caught.value)


def test_a_request_is_recalled_whatever_the_order_of_its_parts(cache):
    sha256 = put(b"content")
    store.remember({"zoo": "a", "labels": ["é"]}, sha256)
    assert store.recall({"labels": ["é"], "zoo": "a"}) == sha256
    assert store.recall({"labels": ["e"], "zoo": "a"}) is None


def test_a_request_is_forgotten_when_its_file_is_gone(cache):
    sha256 = put(b"content")
    store.remember({"a": 1}, sha256)
    store.path_of(sha256).unlink()
    assert store.recall({"a": 1}) is None


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe\x00", b"0" * 64])
def test_a_damaged_note_is_no_answer_and_can_be_replaced(cache, damage):
    sha256 = put(b"content")
    store.remember({"a": 1}, sha256)
    (note,) = (cache / "index").iterdir()
    note.write_bytes(damage)
    assert store.recall({"a": 1}) is None
    store.remember({"a": 1}, sha256)
    assert store.recall({"a": 1}) == sha256
    assert list((cache / "index").iterdir()) == [note]


ADD = """
import sys
from gpuml.models import store
content = bytes(range(256)) * 4096
for _ in range(20):
    with store.incoming() as path:
        path.write_bytes(content)
        sha256 = store.add(path)
    store.remember({"a": 1}, sha256)
    assert store.recall({"a": 1}) == sha256
    assert store.hash_of(store.path_of(sha256)) == sha256
print(sha256)
"""


def test_processes_that_add_the_same_at_once_leave_one_whole_file(cache):
    environment = {**os.environ, "PYTHONPATH": str(Path(gpuml.__file__).parents[1])}
    command = [sys.executable, "-c", ADD]
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for process in running:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        sha256 = out.strip()
    assert [path.name for path in (cache / "models").iterdir()] == [store.file_name(sha256)]
    assert store.hash_of(store.path_of(sha256)) == sha256
    assert len(list((cache / "index").iterdir())) == 1


def test_a_cache_that_cannot_be_written_names_the_variable_to_set(tmp_path, monkeypatch):
    """As in a container whose user has no home folder."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GPUML_HOME", str(tmp_path / "file" / "below"))
    with pytest.raises(ModelError, match="GPUML_HOME"), store.incoming():
        pass


def test_an_index_that_cannot_be_written_costs_only_the_note(cache):
    cache.mkdir()
    (cache / "index").write_text("")
    store.remember({"zoo": "x"}, "0" * 64)
    assert store.recall({"zoo": "x"}) is None
