"""The cache folder: where it is, that a hash always leads to whole, equal content, and what leaves it when."""

import hashlib
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import PLAIN, Pooled, aged, give_back

import gpuml
from gpuml import ModelError
from gpuml.models import locks, prune, store
from gpuml.models.sources import resolve


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


def test_what_is_added_again_leaves_the_whole_file_as_it_is(cache):
    """Others have read it, or hold it open, which Windows does not allow to be replaced."""
    before = store.path_of(put(b"content")).stat()
    assert store.path_of(put(b"content")).stat() == before


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


def start(script, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(Path(gpuml.__file__).parents[1])}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def output(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.strip()


def test_processes_that_add_the_same_at_once_leave_one_whole_file(cache):
    (sha256,) = {output(process) for process in [start(ADD) for _ in range(8)]}
    assert [path.name for path in (cache / "models").iterdir()] == [store.file_name(sha256)]
    assert store.hash_of(store.path_of(sha256)) == sha256
    assert len(list((cache / "index").iterdir())) == 1


#: Eight processes that begin at once, each with an export, of a zoo with one small network, and with other labels for
#: a file's network. They are forks: to import torch and torchvision takes each process 4 s of a core, the work 0.3 s.
RESOLVE = """
import multiprocessing, os, sys
import torch
from torch import nn
from gpuml.models import sources
from gpuml.models.found import Built, Found
from gpuml.spec import Preprocess

def build():
    torch.manual_seed(0)
    net = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4))
    return Built(net, tuple("abcd"), Preprocess(resize=(32, 32), crop=None))

def work():
    together.wait(60)
    found = [sources.resolve("tiny:net"), sources.resolve(sys.argv[1], labels=list("efgh"))]
    os.write(1, " ".join(found).encode() + b"\\n")  # whole: print may write a line in parts, and lines mix

sources.ZOOS["tiny:"] = lambda name, weights, labels: Found({"zoo": name}, build)
fork = multiprocessing.get_context("fork")
together = fork.Barrier(8)
children = [fork.Process(target=work) for _ in range(8)]
for child in children:
    child.start()
for child in children:
    child.join()
sys.exit(any(child.exitcode for child in children))
"""


def test_processes_that_need_the_same_models_at_once_in_an_empty_cache_get_one_file_of_each(cache, tmp_path):
    gpuml.save_model(Pooled(), tmp_path / "net.pt2", preprocess=PLAIN, labels=list("abcd"))
    lines = output(start(RESOLVE, tmp_path / "net.pt2")).splitlines()
    assert len(lines) == 8
    (line,) = set(lines)
    exported, relabelled = line.split()
    assert exported != relabelled
    assert sorted(path.name for path in cache.iterdir()) == [".lock", "index", "models"]
    files = {path.name for path in (cache / "models").iterdir()}
    assert files == {store.file_name(exported), store.file_name(relabelled)}
    assert {path.read_text() for path in (cache / "index").iterdir()} == {exported, relabelled}
    assert len(list((cache / "index").iterdir())) == 2
    for sha256 in (exported, relabelled):
        assert store.hash_of(store.path_of(sha256)) == sha256


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


# --- files that are damaged ---------------------------------------------------------------------------------------


def damage(path):
    """Another content of the same length, as a failing disk leaves it."""
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("harm", [damage, lambda path: os.truncate(path, 3), lambda path: os.truncate(path, 0)])
def test_a_damaged_file_is_deleted_with_a_warning_and_counts_as_absent(cache, caplog, harm):
    sha256 = put(b"content")
    store.remember({"a": 1}, sha256)
    path = store.path_of(sha256)
    harm(path)
    found = store.hash_of(path)
    assert store.recall({"a": 1}) is None
    assert not path.exists()
    assert warnings_of(caplog) == [
        f"{path} is damaged (its sha256 is {found}): it is deleted, and made again when it can be"
    ]
    assert not store.holds(sha256)
    with pytest.raises(ModelError, match="is not in the cache"):
        store.path_of(sha256)
    assert put(b"content") == sha256
    assert store.recall({"a": 1}) == sha256


def test_a_damaged_model_file_is_exported_again(cache, tmp_path):
    gpuml.save_model(Pooled(), tmp_path / "net.pt2", preprocess=PLAIN, labels=list("abcd"))
    sha256 = resolve(str(tmp_path / "net.pt2"), labels=list("efgh"))
    damage(store.path_of(sha256))
    assert resolve(str(tmp_path / "net.pt2"), labels=list("efgh")) == sha256
    assert store.hash_of(store.path_of(sha256)) == sha256


def test_what_is_added_replaces_a_damaged_file(cache):
    sha256 = put(b"content")
    damage(store.path_of(sha256))
    assert put(b"content") == sha256
    assert store.path_of(sha256).read_bytes() == b"content"


def test_a_whole_file_that_another_process_put_there_meanwhile_is_not_deleted(cache, monkeypatch):
    sha256 = put(b"content")
    path = store.path_of(sha256)
    damage(path)
    read = store.hash_stream

    def replaced_while_read(file):
        found = read(file)
        (cache / "new").write_bytes(b"content")
        os.replace(cache / "new", path)
        return found

    monkeypatch.setattr(store, "hash_stream", replaced_while_read)
    assert not store.holds(sha256)
    monkeypatch.undo()
    monkeypatch.setenv("GPUML_HOME", str(cache))
    assert store.path_of(sha256).read_bytes() == b"content"


def test_a_damaged_file_that_cannot_be_deleted_counts_as_absent(cache, monkeypatch):
    sha256 = put(b"content")
    damage(store.path_of(sha256))

    def refuse(path):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    assert not store.holds(sha256)


def test_content_is_read_once_until_the_file_changes(cache, monkeypatch):
    sha256 = put(b"content")
    read, times = store.hash_stream, []
    monkeypatch.setattr(store, "hash_stream", lambda file: times.append(1) or read(file))
    for _ in range(3):
        store.path_of(sha256)
    assert times == []  # hashed when it was added
    os.utime(store.path_of(sha256), (1, 1))
    for _ in range(3):
        store.path_of(sha256)
    assert len(times) == 1


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_lies_in_the_place_of_a_file_and_is_none_is_named_and_not_waited_for(cache, make):
    """To open a FIFO waits for who writes to it."""
    (cache / "models").mkdir(parents=True)
    make(cache / "models" / store.file_name("0" * 64))
    with pytest.raises(ModelError, match=rf"gpuml-{'0' * 64}\.pt2 cannot be read \(no regular file\); delete it"):
        store.path_of("0" * 64)


def test_a_note_that_is_a_fifo_is_no_answer(cache):
    sha256 = put(b"content")
    store.remember({"a": 1}, sha256)
    (note,) = (cache / "index").iterdir()
    note.unlink()
    os.mkfifo(note)
    assert store.recall({"a": 1}) is None
    store.remember({"a": 1}, sha256)
    assert store.recall({"a": 1}) == sha256


# --- files in use -------------------------------------------------------------------------------------------------


def old(content, days):
    """A file in the cache that no process uses, and that none has used for some days."""
    sha256 = put(content)
    give_back()
    return aged(store.home() / "models" / store.file_name(sha256), days)


HOLD = """
import sys
from gpuml.models import store
print(store.path_of(sys.argv[1]), flush=True)
sys.stdin.read()
"""


def test_a_file_is_spared_as_long_as_a_process_that_was_given_it_lives(cache):
    path, other = old(b"content", 9), old(b"other", 9)
    holder = start(HOLD, hashlib.sha256(b"content").hexdigest())
    assert holder.stdout.readline().strip() == str(path)
    deleted, spared = prune.prune(max_bytes=0)
    assert [entry.path for entry in deleted] == [other]
    assert [(entry.path, entry.in_use) for entry in spared] == [(path, True)]
    assert path.exists()
    holder.kill()
    holder.communicate()
    assert [entry.path for entry in prune.prune(max_bytes=0)[0]] == [path]
    assert not path.exists()


def test_what_this_process_was_given_added_or_recalled_is_in_use(cache):
    sha256 = put(b"content")
    store.remember({"a": 1}, sha256)
    for given in (lambda: put(b"content"), lambda: store.path_of(sha256), lambda: store.recall({"a": 1})):
        give_back()
        assert [entry.in_use for entry in prune.entries()] == [False]
        given()
        assert [entry.in_use for entry in prune.entries()] == [True]
        assert prune.prune(max_bytes=0) == ([], prune.entries())


TAKE = """
import os, sys, time
from gpuml.models import store
number = 0
while number < 30 or not os.path.exists(sys.argv[1]):
    number += 1
    with store.incoming() as path:
        path.write_bytes(f"{os.getpid()} {number % 5}".encode())
        sha256 = store.add(path)
    for path in list(store._kept):
        store._let_go(path)
    if store.holds(sha256):
        time.sleep(0.001)
        assert store.path_of(sha256).read_bytes(), "deleted while in use"
print(number)
"""


def test_no_file_is_deleted_between_being_found_and_being_used(cache, tmp_path):
    """The lock that a reader takes and the question whether a file is in use never interleave."""
    enough = tmp_path / "enough"
    running = [start(TAKE, enough), start(TAKE, enough)]
    deleted, until = 0, time.monotonic() + 60
    while any(process.poll() is None for process in running):
        deleted += len(prune.prune(max_bytes=0)[0])
        if deleted >= 30 or time.monotonic() > until:
            enough.touch()
    rounds = [int(output(process)) for process in running]
    assert min(rounds) >= 30
    assert deleted >= 30


def test_the_last_use_is_noted_once_an_hour(cache):
    path = old(b"content", 9)
    store.holds(hashlib.sha256(b"content").hexdigest())
    first = path.stat().st_mtime
    assert time.time() - first < 60
    half_an_hour_ago = first - 1800
    os.utime(path, (half_an_hour_ago, half_an_hour_ago))
    store.holds(hashlib.sha256(b"content").hexdigest())
    assert path.stat().st_mtime == pytest.approx(half_an_hour_ago, abs=1e-3)


def test_noting_the_last_use_costs_this_process_no_second_reading(cache, monkeypatch):
    path = old(b"content", 9)
    read, times = store.hash_stream, []
    monkeypatch.setattr(store, "hash_stream", lambda file: times.append(1) or read(file))
    for _ in range(3):
        assert store.path_of(hashlib.sha256(b"content").hexdigest()) == path
    assert len(times) == 1


def test_where_nothing_can_be_locked_or_noted_files_are_given_all_the_same(cache, monkeypatch):
    path = old(b"content", 9)

    def refuse(*args, **kwargs):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    monkeypatch.setattr(os, "utime", refuse)
    assert store.path_of(hashlib.sha256(b"content").hexdigest()) == path
    with locks.exclusive(cache / ".lock") as alone:
        assert not alone
    with locks.exclusive(cache / "no" / "folder") as alone:
        assert not alone
    assert [entry.in_use for entry in prune.entries()] == [False]
    assert put(b"other")


def test_a_lock_file_that_is_deleted_while_another_waits_keeps_no_two_in(cache):
    cache.mkdir()
    with locks.exclusive(cache / "one") as alone:
        assert alone
        waiter = start(
            "import sys; from pathlib import Path; from gpuml.models.locks import exclusive, in_use\n"
            "print(flush=True)\n"
            "with exclusive(Path(sys.argv[1])): print(in_use(Path(sys.argv[1])))",
            cache / "one",
        )
        waiter.stdout.readline()
        time.sleep(0.3)
        (cache / "one").unlink()
    assert output(waiter) == "True"  # it holds the file that is there now


def test_only_so_many_files_are_held_and_no_child_inherits_them(cache):
    for number in range(store._MOST_KEPT + 3):
        put(str(number).encode())
    assert len(store._kept) == store._MOST_KEPT
    in_use = {entry.sha256: entry.in_use for entry in prune.entries()}
    assert [in_use[hashlib.sha256(str(number).encode()).hexdigest()] for number in (2, 3)] == [False, True]
    assert not any(os.get_inheritable(descriptor) for descriptor, _ in store._kept.values())
    give_back()


# --- less of it ---------------------------------------------------------------------------------------------------


@pytest.fixture
def three(cache):
    """Files of 100, 200 and 300 bytes, unused for 30, 20 and 10 days."""
    give_back()
    return [old(bytes([size]) * size, days) for size, days in ((100, 30), (200, 20), (250, 10))]


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        ({"max_bytes": 0}, []),
        ({"max_bytes": 549}, [1, 2]),
        ({"max_bytes": 550}, [0, 1, 2]),
        ({"max_bytes": 449}, [2]),
        ({"older_than_seconds": 15 * 86400}, [2]),
        ({"older_than_seconds": 31 * 86400}, [0, 1, 2]),
        ({"older_than_seconds": 25 * 86400, "max_bytes": 250}, [2]),
        ({}, [0, 1, 2]),
    ],
)
def test_the_least_recently_used_go_first(three, limits, left):
    before = prune.entries()
    assert [(entry.path, entry.bytes) for entry in before] == list(zip(three, (100, 200, 250), strict=True))
    kept = [three[number] for number in left]
    gone = [entry for entry in before if entry.path not in kept]
    assert prune.prune(**limits, dry_run=True) == (gone, [])
    assert [path for path in three if path.exists()] == three
    assert prune.prune(**limits) == (gone, [])
    assert [path for path in three if path.exists()] == kept


def test_what_is_in_use_still_counts_against_the_size(three):
    store.holds(hashlib.sha256(b"d" * 100).hexdigest())  # the first
    aged(three[0], 30)
    deleted, spared = prune.prune(max_bytes=400)
    assert ([entry.path for entry in deleted], [entry.path for entry in spared]) == ([three[1]], [three[0]])


def test_notes_that_lead_nowhere_go_with_the_files(cache):
    keys = [put(b"one"), put(b"two")]
    for key in keys:
        store.remember({"a": key}, key)
    give_back()
    aged(store.home() / "models" / store.file_name(keys[0]), 9)
    (cache / "index" / ("0" * 64)).write_bytes(b"\xff\xfe")
    written = cache / "index" / ("0" * 64 + ".a1b2c3d_")
    written.write_text("")
    prune.prune(older_than_seconds=86400, dry_run=True)
    assert len(list((cache / "index").iterdir())) == 4
    prune.prune(older_than_seconds=86400)
    assert [store.recall({"a": key}) for key in keys] == [None, keys[1]]
    assert len(list((cache / "index").iterdir())) == 2
    aged(written, 2)
    prune.prune()
    assert len(list((cache / "index").iterdir())) == 1


@pytest.mark.parametrize("name", [".incoming-a1b2c3d_", ".gpuml-a1b2c3d_"])
def test_exports_that_a_dead_process_left_go_after_a_day(cache, name):
    for days, left in ((0.9, True), (1.1, False)):
        folder = cache / "models" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.pt2").write_bytes(b"half")
        prune.prune()
        assert folder.exists()
        aged(folder, days)
        prune.prune()
        assert folder.exists() == left


def test_downloads_are_pruned_as_model_files_are_and_their_notes_go_along(cache):
    folder = cache / "downloads"
    folder.mkdir(parents=True)
    gone, kept = (folder / f"{key * 32}-{key * 64}{suffix}" for key, suffix in (("a", ".zip"), ("b", "")))
    for path, days in ((gone, 9), (kept, 1)):
        path.write_bytes(b"x" * 10)
        path.with_name(f"{path.name[:32]}.json").write_text("{}")
        aged(path, days)
    deleted, _ = prune.prune(older_than_seconds=5 * 86400)
    assert [(entry.path, entry.is_download, entry.sha256) for entry in deleted] == [(gone, True, "a" * 64)]
    assert sorted(path.name for path in folder.iterdir()) == [kept.name, "b" * 32 + ".json"]


def test_parts_of_downloads_go_after_a_day_but_not_while_one_runs(cache):
    folder = cache / "downloads"
    folder.mkdir(parents=True)
    old_parts = [folder / f"{key * 32}{suffix}" for key in "ab" for suffix in (".lock", ".part", ".part.json")]
    new_part = folder / ("c" * 32 + ".part")
    for path in [*old_parts, new_part]:
        path.write_text("")
    for path in old_parts:
        aged(path, 2)
    with locks.exclusive(folder / ("a" * 32 + ".lock")):
        prune.prune()
        assert sorted(folder.iterdir()) == [*old_parts[:3], new_part]
    prune.prune()
    assert list(folder.iterdir()) == [new_part]


#: In a GPUML_HOME that also holds other things: no name is one that gpuml gives, in that folder.
STRANGERS = {
    "": ["file"],
    "models": ["notes.txt", "gpuml-xyz.pt2", f"gpuml-{'0' * 64}.pt2.bak", ".gpuml-notes", ".incoming-a1b2c3d_"]
    + [f"{'a' * 32}-{'0' * 64}.pt2"],
    "index": ["notes.txt", "0" * 63, f"{'0' * 64}.old copy"],
    "downloads": ["thesis.docx", f"{'a' * 32}.docx", f"{'a' * 32}", f"{'a' * 31}.part", f"gpuml-{'0' * 64}.pt2"],
}


def test_what_is_not_ours_stays(cache):
    strangers = [cache / folder / name for folder, names in STRANGERS.items() for name in names]
    for path in strangers:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
        aged(path, 99)
    assert prune.prune(max_bytes=0, older_than_seconds=1) == ([], [])
    assert [path for path in strangers if not path.exists()] == []


@pytest.mark.parametrize(
    "name",
    [
        f"models/gpuml-{'0' * 64}.pt2",
        f"index/{'0' * 64}",
        f"downloads/{'a' * 32}-{'0' * 64}.zip",
        *(f"downloads/{'a' * 32}.{suffix}" for suffix in ("json", "part", "part.json", "lock")),
    ],
)
@pytest.mark.parametrize(
    "make",
    [
        lambda path: (path.mkdir(), (path / "mine").write_text("mine")),
        lambda path: path.symlink_to(path.parent.parent),
        os.mkfifo,
    ],
    ids=["folder", "link", "fifo"],
)
def test_what_has_a_name_of_ours_and_is_no_file_is_passed_over(cache, name, make):
    path = cache / name
    path.parent.mkdir(parents=True)
    make(path)
    os.utime(path, (1, 1), follow_symlinks=False)
    assert prune.prune(max_bytes=0, older_than_seconds=1) == ([], [])
    assert prune.entries() == []
    assert os.path.lexists(path)


def test_a_file_that_cannot_be_deleted_is_named(three, monkeypatch):
    def refuse(path, missing_ok=False):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(ModelError, match=r"\.pt2 cannot be deleted \(Permission denied\)"):
        prune.prune(max_bytes=0)


def test_pruning_no_cache_makes_none(cache):
    assert prune.prune(max_bytes=0) == ([], [])
    assert prune.entries() == []
    assert not cache.exists()
