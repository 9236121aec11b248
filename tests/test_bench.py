"""The benchmark's own arithmetic and data, and one small run of it."""

import json
import subprocess
import sys

import numpy as np
import pytest
from conftest import BENCHMARKS

pytestmark = pytest.mark.usefixtures("benchmarks")


def passes(*rates, images=100):
    from bench.report import Pass

    return [Pass(images, images / rate, 0.2) for rate in rates]


def test_equal_seeds_are_equal_photos_and_others_are_not():
    from bench.data import KINDS, photo

    for name in ("jpeg", "png", "struct"):
        assert photo(3, KINDS[name]) == photo(3, KINDS[name])
        assert photo(3, KINDS[name]) != photo(4, KINDS[name])


def test_a_folder_holds_each_id_once_and_repeats_its_photos(tmp_path, monkeypatch):
    from bench import data

    monkeypatch.setitem(data.KINDS, "jpeg", data.Kind(40, 30, "JPEG", 8))
    folder = data.parquet(tmp_path, "jpeg", 24)
    rows = dict(row for path in sorted(folder.glob("*.parquet")) for row in zip(*data.read(path), strict=True))
    assert len(list(folder.glob("*.parquet"))) == data.FILES
    assert sorted(rows) == list(range(24))
    assert rows[1] == rows[9] == rows[17] != rows[2]


def test_an_image_struct_and_a_file_of_it_have_the_same_pixels():
    import torch
    from bench import data, limit

    from gpuml.worker.decode import decode

    struct = data.photo(0, data.Kind(20, 10, "raw", 1))
    from_file = decode(data.encoded(struct), max_pixels=1000, alpha="white")
    assert torch.equal(limit.decoded(struct), from_file)
    assert np.array_equal(from_file[:, 0, 0].numpy(), np.frombuffer(struct["data"][:3], np.uint8)[::-1])


def test_ratios_are_paired_by_round():
    from bench.report import ratios, spread

    # The machine is twice as slow in the second round: for both.
    assert ratios(passes(200, 100), passes(100, 50)) == pytest.approx([2, 2])
    assert f"{spread([3.0, 1.0, 2.0]):.1f}" == "2.0 (1.0 to 3.0)"


def test_the_limit_is_the_fastest_loop_and_says_which(tmp_path):
    import time
    from functools import partial

    from bench.limit import _fastest
    from bench.serve import Setting

    for number in range(4):
        (tmp_path / f"part-{number}.parquet").touch()
    seen = []

    def loop(name, seconds, files):
        time.sleep(seconds)
        seen.append((name, len(files)))
        return {0: 0}

    loops = {name: partial(loop, name, seconds) for name, seconds in {"a": 0.1, "b": 0.0, "c": 0.2, "d": 0.3}.items()}
    job = _fastest(loops, Setting("pooled", str(tmp_path), "", 2))
    assert job.note == "b"
    # All are tried on two of the files, the better half twice again.
    assert seen == [(name, 2) for name in "abcdbaba"]
    assert job(True) == {0: 0}
    assert seen[-1] == ("b", 4)


def test_the_table_shows_medians_spread_ratio_and_failure():
    from bench.report import Pass, Result, table

    known = {"memory": 1_500_000_000, "agreement": 1, "clear_agreement": 1}
    results = {
        "limit": Result(passes(200, 250, 400), note="threads", **known),
        "gpuml": Result(passes(100, 200, 400), agreement=0.995, clear_agreement=1),
        "ray": Result(passes(100, 100, 100), start=Pass(8, 0.5, 1)),
        "daft": Result(failed="ImportError: a|b"),
    }
    text = table({"pooled": results})
    rows = [line.split(" | ") for line in text.splitlines()[2:]]
    assert rows[0][1:] == [
        "limit (threads)",
        "100",
        "250 (200 to 400)",
        "0.80 (0.50 to 1.00)",
        "2.00 (2.00 to 2.00)",
        "1.5",
        "100.0; 100.0 |",
    ]
    assert rows[1][4] == ""
    assert rows[1][-1] == "99.5; 100.0 |"
    assert rows[2][1] == "ray, 0.5 s of each pass to start"
    assert rows[2][4] == "2.00 (1.00 to 4.00); without its start 1.00 (0.50 to 2.00)"
    assert text.splitlines()[-1] == "| pooled | daft | | ImportError: a/b | | | | |"


def test_a_failed_gpuml_leaves_the_others_without_a_ratio():
    from bench.report import Result, table

    results = {"limit": Result(passes(200, 250)), "gpuml": Result(passes(100), failed="it ended")}
    rows = table({"pooled": results}).splitlines()[2:]
    assert rows[0].split(" | ")[3:5] == ["225 (200 to 250)", ""]
    assert rows[1] == "| pooled | gpuml | | it ended | | | | |"


def test_the_json_holds_every_pass_and_the_ratios():
    from bench.report import Result, as_json

    peers = {"gpuml": Result(passes(200, 300)), "limit": Result(passes(400, 400))}
    made = json.loads(json.dumps(as_json({"pooled": peers})))["pooled"]
    assert made["limit"]["gpuml_over_this"] == pytest.approx([0.5, 0.75])
    assert made["limit"]["gpuml_over_this_without_start"] == []
    assert [one["seconds"] for one in made["gpuml"]["passes"]] == pytest.approx([1 / 2, 1 / 3])
    assert made["gpuml"]["gpuml_over_this"] == []


def test_labels_are_compared_where_the_reference_is_clear():
    from bench.rounds import _agreement

    truth = [(5, 0.9), (6, 0.01), (7, 0.5)]
    assert _agreement({0: 5, 1: 9, 2: 8}, truth, 0) == pytest.approx(1 / 3)
    assert _agreement({0: 5, 1: 9, 2: 8}, truth, 0.1) == 0.5
    assert _agreement({0: 5, 3: 5, 5: 8}, truth, 0) == pytest.approx(2 / 3)  # images repeat: 3 is 0, and 5 is 2


def test_a_start_is_taken_off_long_passes_and_not_off_short_ones():
    from bench.report import Pass, Result

    start = Pass(8, 10.0, 5.0)
    assert [one.seconds for one in Result([Pass(100, 24.0, 9.0), Pass(100, 20.0, 9.0)], start=start).steady()] == [
        14,
        10,
    ]
    assert Result([Pass(100, 24.0, 9.0), Pass(100, 19.0, 9.0)], start=start).steady() is None
    assert Result([Pass(100, 24.0, 9.0)]).steady() is None


def test_the_cpu_time_and_memory_of_a_tree_count_its_children():
    from bench import tree

    work = "import time\nwhile time.process_time() < 0.5: pass\nblock = bytearray(64 << 20); print(flush=True); input()"
    parent = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {work!r}], check=True)"
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        process.stdout.readline()
        assert 0.5 <= tree.cpu_seconds({}, tree.times(process.pid)) < 5
        assert tree.memory(process.pid) > 64 << 20
        process.stdin.write("\n")
    assert process.returncode == 0
    assert tree.times(process.pid) == {}


@pytest.mark.parametrize(
    ("after", "seconds"),
    [
        ({1: (12.0, 0.0), 2: (7.0, 0.0)}, 4),
        ({1: (12.0, 0.0), 2: (5.0, 0.0), 3: (1.5, 0.5)}, 4),  # 3 is new
        ({1: (10.0, 8.0)}, 3),  # 2 had used 5, and 8 when it ended
        ({1: (11.0, 0.0)}, 1),  # 2 ended and nobody waited for it: less is known, but never less than nothing
    ],
)
def test_processes_that_come_and_go_keep_the_cpu_time_right(after, seconds):
    from bench import tree

    assert tree.cpu_seconds({1: (10.0, 0.0), 2: (5.0, 0.0)}, after) == pytest.approx(seconds)


def test_two_who_want_the_accelerator_take_turns():
    import time
    from concurrent.futures import ThreadPoolExecutor

    import torch
    from bench.workloads import ACCELERATOR_S, Accelerator

    net, rows = Accelerator(), torch.zeros(50, 3, 2, 2)
    start = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        outputs = list(pool.map(net, [rows, rows]))
    assert time.perf_counter() - start >= 100 * ACCELERATOR_S
    assert outputs[0].shape == (50, 10)


def test_an_unknown_peer_is_refused_with_those_there_are():
    done = subprocess.run(
        [sys.executable, "-m", "bench", "--peers", "gpuml,nobody"], cwd=BENCHMARKS, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "'nobody' is none of limit, gpuml, predict_batch_udf" in done.stderr


PEER = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    {does}
    print(json.dumps({{"note": ""}} if "open" in asked else {{"seconds": 1, "labels": []}}), flush=True)
"""


def peer_that(does, root, monkeypatch):
    """A peer whose process does something else with a message than to answer it."""
    from bench import rounds

    process = subprocess.Popen
    monkeypatch.setattr(
        rounds.subprocess,
        "Popen",
        lambda command, **options: process([sys.executable, "-c", PEER.format(does=does)], **options),
    )
    return rounds.Peer("daft", root)


@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("raise SystemExit", "its process ended"),
        ("import time; time.sleep(60)", "no answer in 1 s"),
        ("print('half a li', flush=True)", "it answered 'half a li"),
    ],
)
def test_a_peer_that_does_not_answer_has_failed_and_is_closed(does, says, tmp_path, monkeypatch):
    from bench import rounds

    monkeypatch.setattr(rounds, "ANSWER_S", 1.0)
    peer = peer_that(does, tmp_path, monkeypatch)
    with pytest.raises(rounds.Failed, match=says):
        peer.ask({"collect": True})
    if says != "it answered 'half a li":
        with pytest.raises(rounds.Failed, match="its process ended"):
            peer.ask({"collect": True})
    peer.close()
    assert peer.process.returncode is not None


def test_a_peer_that_leaves_images_out_has_failed(tmp_path, monkeypatch):
    from types import SimpleNamespace

    from bench import rounds
    from bench.report import Result
    from bench.workloads import WORKLOADS

    monkeypatch.setattr(rounds.data, "parquet", lambda *arguments: tmp_path)
    plan = rounds.Plan(None, [], 1, 1, 64, False, 2, tmp_path)
    peer = SimpleNamespace(
        name="gpuml",
        process=SimpleNamespace(pid=1),
        ask=lambda message: {"note": "", "labels": [[number, 0] for number in range(60)]},
    )
    with pytest.raises(rounds.Failed, match="4 of 64 images have no answer"):
        rounds._check(plan, WORKLOADS["pooled"], peer, [(0, 1.0)], Result())


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--images", "-5"], ["--data", "/dev/null/here"]])
def test_what_cannot_be_run_is_refused_before_it_is_begun(arguments, capsys):
    from bench.__main__ import _arguments

    with pytest.raises(SystemExit):
        _arguments(arguments)
    assert arguments[0] in capsys.readouterr().err


def test_a_small_run_measures_two_peers_that_agree(tmp_path):
    command = ["--quick", "--peers", "limit,gpuml", "--workloads", "pooled", "--images", "64", "--rounds", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "bench", *command, "--data", str(tmp_path)],
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| pooled | ")]
    assert [row[1].split()[0] for row in rows[:2]] == ["limit", "gpuml"]
    assert all(float(row[3].split()[0].replace(",", "")) > 0 for row in rows[:2]), done.stdout
    assert all(row[-1] == "100.0; 100.0 |" for row in rows[:2]), done.stdout
