"""`python -m gpuml`, each command as a real process: what it prints, what it deletes, and its exit code."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import PLAIN, Pooled, aged, give_back

import gpuml
from gpuml import cli
from gpuml.models import store
from gpuml.models.export import jit

LABELS = ["tench", "gold\x1b[31mfish", "é\n名", "ray"]


def run(*arguments, **environment):
    """(exit code, lines of stdout, lines of stderr)."""
    environment = {**os.environ, "PYTHONPATH": str(Path(gpuml.__file__).parents[1]), "PYTHONUTF8": "1", **environment}
    command = [sys.executable, "-W", "error", "-m", "gpuml", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, encoding="utf-8", check=False)
    return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "mon cache é"
    monkeypatch.setenv("GPUML_HOME", str(folder))
    return folder


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "my net.pt2"
    gpuml.save_model(Pooled(), path, preprocess=PLAIN, labels=LABELS)
    return path


@pytest.fixture
def cached(cache, model_file):
    """sha256 of a model file in the cache that no process uses, last used on a day long ago."""
    sha256 = store.add_copy(model_file)
    give_back()
    aged(store.home() / "models" / store.file_name(sha256), 100)
    return sha256


def test_the_version_is_the_packages():
    assert run("--version") == (0, [f"gpuml {gpuml.__version__}"], [])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "required"),
        (["models"], "required"),
        (["models", "drop"], "invalid choice: 'drop'"),
        (["models", "prune"], "give --max-size, --older-than, or both; or --all"),
        (["models", "prune", "--dry-run"], "give --max-size"),
        (["models", "prune", "--all", "--max-size", "1G"], "give --max-size"),
        (["models", "prune", "--max-size", "much"], "'much' is no size such as 500M or 10G"),
        (["models", "prune", "--older-than", "30"], "'30' is no duration such as 12h, 30d or 4w"),
    ],
)
def test_a_wrong_command_line_is_exit_code_2_and_says_what_is_right(capsys, arguments, says):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err


def test_a_wrong_command_line_is_exit_code_2_of_the_process_too():
    code, out, err = run("models", "prune")
    assert (code, out) == (2, [])
    assert err[-1] == "python -m gpuml models prune: error: give --max-size, --older-than, or both; or --all"


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("500", 500), ("2kB", 2000), ("500M", 5 * 10**8), ("1.5g", 15 * 10**8), ("1T", 10**12)]
)
def test_sizes_are_in_powers_of_1000(text, size):
    assert cli._size(text) == size


@pytest.mark.parametrize(("text", "seconds"), [("5m", 300), ("1.5h", 5400), ("30d", 2592000), ("4w", 2419200)])
def test_durations_have_a_unit(text, seconds):
    assert cli._duration(text) == seconds


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (99_940, "99.9 kB"), (99_960, "100 kB"), (999_600, "1.0 MB")]
    + [(346_000_000, "346 MB"), (12_340_000_000, "12.3 GB"), (5 * 10**15, "5000.0 TB")],
)
def test_bytes_are_shown_as_people_read_them(number, text):
    assert cli._bytes(number) == text


def test_show_prints_the_card_of_a_file(model_file):
    code, out, err = run("models", "show", model_file)
    assert (code, err) == (0, [])
    shown = dict(line.split(maxsplit=1) for line in out if not line.startswith(("memory", "written")))
    size = model_file.stat().st_size
    assert shown == {
        "file": str(model_file),
        "kind": "export",
        "sha256": store.hash_of(model_file),
        "size": f"{cli._bytes(size)} ({size} bytes)",
        "outputs": "4",
        "labels": "4: tench, gold [31mfish, é 名, ...",  # what a terminal would obey is gone
        "activation": "softmax",
        "preprocess": repr(PLAIN),
    }
    assert out[-2:] == [
        "memory format  channels_last",
        f"written by     gpuml {gpuml.__version__}, torch {torch.__version__}, format 1",
    ]


def test_show_takes_a_torchscript_file_and_a_terminal_of_ascii(tmp_path):
    path = tmp_path / "net.pt"
    gpuml.save_model(jit("script", Pooled()), path, preprocess=PLAIN, labels=["é", "b", "c", "d"])
    code, out, _ = run("models", "show", path, PYTHONUTF8="0", PYTHONIOENCODING="ascii")
    assert code == 0
    assert "kind           torchscript" in out
    assert "labels         4: \\xe9, b, c, ..." in out


def test_show_finds_a_file_of_the_cache_by_the_digits_that_list_shows(cached):
    code, out, _ = run("models", "show", f"sha256:{cached[:12]}")
    assert code == 0
    assert f"sha256         {cached}" in out
    code, out, err = run("models", "show", f"sha256:{'0' * 12}")
    assert (code, out) == (1, [])
    assert err == [f"gpuml: 0 model files in the cache {store.home()} have a hash that begins with 000000000000"]


def test_show_says_why_a_file_cannot_be_used(tmp_path):
    (tmp_path / "net.pt").write_bytes(b"no archive")
    code, out, err = run("models", "show", tmp_path / "net.pt")
    assert (code, out, len(err)) == (1, [], 1)
    assert err[0].startswith(f"gpuml: model file '{tmp_path / 'net.pt'}' is refused: it is no zip archive")
    code, out, err = run("models", "show", tmp_path / "other.pt")
    assert (code, out) == (1, [])
    assert err == [f"gpuml: '{tmp_path / 'other.pt'}' is no file; give a path, or sha256:<hex> with at least 12 digits"]


@pytest.mark.parametrize("file", ["~nosuchuser/x", "a" * 5000, "a\0b", "/dev/null"])
def test_show_of_what_can_be_no_file_says_so_in_one_line(capsys, file):
    assert cli.main(["models", "show", file]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"gpuml: '.*' is no file; give a path, or .*\n", err)


def test_show_takes_a_path_below_the_users_home(capsys, model_file, monkeypatch):
    monkeypatch.setenv("HOME", str(model_file.parent))
    assert cli.main(["models", "show", f"~/{model_file.name}"]) == 0
    assert str(model_file) in capsys.readouterr().out


def test_show_of_a_damaged_file_in_the_cache_says_so_and_leaves_it(cached):
    path = store.home() / "models" / store.file_name(cached)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    code, out, err = run("models", "show", f"sha256:{cached}")
    assert (code, out) == (1, [])
    assert f"{path} is damaged: its sha256 is {store.hash_of(path)}" in err[0]
    assert path.exists()


def test_list_shows_model_files_and_downloads_the_last_used_first(cached, cache):
    damaged = cache / "models" / store.file_name("0" * 64)
    damaged.write_bytes(b"x" * 2000)
    aged(damaged, 200)
    downloads = cache / "downloads"
    downloads.mkdir()
    key, sha256 = "a" * 32, "b" * 64
    (downloads / f"{key}-{sha256}.zip").write_bytes(b"y" * 500)
    aged(downloads / f"{key}-{sha256}.zip", 300)
    (downloads / f"{key}.json").write_text(json.dumps({"url": "https://example.org/net.zip"}))
    used = store.path_of(cached)  # by this process
    code, out, err = run("models", "list")
    assert (code, err) == (0, [])
    size = used.stat().st_size
    day = time.strftime("%Y-%m-%d")
    assert out[0].split() == ["sha256", "size", "last", "used", "in", "use", "outputs", "labels"]
    assert out[1].startswith(f"{cached[:12]}  {cli._bytes(size)}")
    assert day in out[1]
    assert out[1].endswith("  yes     4        tench, gold [31mfish, é 名, ...")
    assert out[2].startswith(f"{'0' * 12}  2.0 kB")
    assert out[2].split("no", 1)[1].strip() == "damaged, or of another version: models show says more"
    assert out[3].startswith(f"{'b' * 12}  500 B")
    assert out[3].endswith("downloaded from https://example.org/net.zip")
    assert out[4] == f"3 files, {cli._bytes(size + 2500)}, in {cache}"


def test_list_of_no_cache_is_no_error_and_makes_none(cache):
    assert run("models", "list") == (0, [f"0 files, 0 B, in {cache}"], [])
    assert not cache.exists()


def test_prune_says_what_it_deleted_and_what_it_spared(cached, cache):
    unused = cache / "models" / store.file_name("0" * 64)
    unused.write_bytes(b"x" * 2000)
    aged(unused, 200)
    used = store.path_of(cached)
    aged(used, 100)
    size = cli._bytes(used.stat().st_size)
    for dry_run in (True, False):
        code, out, err = run("models", "prune", "--older-than", "90d", *(["--dry-run"] if dry_run else []))
        assert (code, err, len(out)) == (0, [], 3)
        assert out[0].startswith(f"{'would delete' if dry_run else 'deleted'}")
        assert f"{unused.name}  2.0 kB" in out[0]
        assert out[1].startswith(f"in use, kept  {used.name}")
        would = "would be " if dry_run else ""
        assert out[2] == f"1 file {would}deleted, 2.0 kB; 1 file in use kept, {size}"
        assert unused.exists() == dry_run
    assert used.exists()
    give_back()
    assert run("models", "prune", "--all")[1][-1] == f"1 file deleted, {size}"
    assert not used.exists()
    assert run("models", "prune", "--max-size", "0")[:2] == (0, ["0 files deleted, 0 B"])


def test_a_reader_that_leaves_early_is_no_traceback(cached):
    environment = {**os.environ, "PYTHONPATH": str(Path(gpuml.__file__).parents[1])}
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "gpuml", "models", "prune", "--max-size", "1G"]
    done = subprocess.run(command, env=environment, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


#: `python -m gpuml` in a process that says in the end which of the large packages it has loaded.
LOADED = """
import runpy, sys
try:
    runpy.run_module("gpuml", run_name="__main__", alter_sys=True)
except SystemExit:
    print(*sorted({"PIL", "numpy", "pandas", "pyspark", "torch", "torchvision"} & set(sys.modules)), file=sys.stderr)
"""


def test_help_and_version_load_neither_torch_nor_spark(model_file):
    """Importing them takes seconds, Python's own start 20 ms."""
    environment = {**os.environ, "PYTHONPATH": str(Path(gpuml.__file__).parents[1])}

    def run_and_list(*arguments):
        command = [sys.executable, "-c", LOADED, *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return done.stdout, done.stderr.split()

    out, loaded = run_and_list("models", "prune", "--help")
    assert out.startswith("usage: python -m gpuml models prune")
    assert loaded == []
    assert run_and_list("--version") == (f"gpuml {gpuml.__version__}\n", [])
    assert "torch" in run_and_list("models", "show", model_file)[1]  # what needs it has it: the list sees it
