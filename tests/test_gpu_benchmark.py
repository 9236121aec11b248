"""The benchmark of one GPU, where there is none: every step but those of CUDA alone, without PySpark."""

import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import BENCHMARKS, WITHOUT_PYSPARK

RUN = """
try:
    import pyspark
except ModuleNotFoundError:
    import gpu
    sys.exit(gpu.main())
sys.exit(100)
"""


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    """Folder of the files that a dry run wrote, and what it printed; 100 tells that PySpark was there."""
    folder = tmp_path_factory.mktemp("gpu")
    paths = [str(BENCHMARKS), str(BENCHMARKS.parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PYSPARK + RUN, "--device", "cpu", "--quick", "--out", str(folder)],
        # OpenMP's threads wait for one another in busy loops, and other tests run beside this one.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


@pytest.fixture
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_a_dry_run_measures_every_step_that_needs_no_gpu_and_says_what_it_is(dry_run):
    folder, printed = dry_run
    (written,) = folder.glob("*.md")
    assert written.read_text().strip() == printed.strip()
    assert "**A dry run with a small network: no result.**" in printed
    assert "copies, copied_bytes, peaks, out_of_memory: skipped, they need CUDA" in printed
    (file,) = folder.glob("*.json")
    results = json.loads(file.read_text())
    assert results["dry_run"]
    assert set(results["end_to_end"]) == set(results["model"]) == {"small bfloat16 16", "small float32 16"}
    for found in results["end_to_end"].values():
        assert all(rate > 0 for rates in found["rates"].values() for rate in rates)
        assert found["equal_labels"].keys() == {"gpuml", "gpuml_arrow", "threads", "loader"}
        assert min(found["equal_labels"].values()) >= 0.9
        assert 0 < found["busy"] < 1
        assert not found["no_loader"]
    together = results["two_tasks"]["small bfloat16 16"]
    assert together["tasks"] == 2
    assert len(together["rates"]) == 1


def test_no_aim_is_met_or_missed_in_a_dry_run(dry_run):
    aims = dry_run[1].partition("## Aims")[2].partition("##")[0]
    assert aims.count("| dry run |") == 5
    assert "yes" not in aims


def test_without_a_gpu_it_says_how_to_try_it(importable, monkeypatch, capsys):
    import gpu

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        gpu.main([])
    assert "sees no GPU; a dry run needs none: --device cpu --quick" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        gpu.main(["--device", "cpu"])
    assert "--device cpu is for a dry run alone: give --quick with it" in capsys.readouterr().err


def test_a_step_that_fails_or_comes_too_late_is_told_and_the_others_are_kept(importable, tmp_path, capsys):
    import time

    from gpu import Run

    def fail():
        raise RuntimeError("no such luck")

    about = {"about": {"device": "the CPU", "cores": 1}, "dry_run": False, "plan": {"distinct": 1, "rounds": 1}}
    run = Run({**about, "notes": []}, tmp_path / "out", time.monotonic() + 60)
    run.step("decoding", None, lambda: {"1": 700.0})
    run.step("files", None, fail)
    run.end = 0
    run.step("copies", None, fail)
    assert run.failed
    kept = json.loads((tmp_path / "out.json").read_text())
    assert kept["decoding"] == {"1": 700.0}
    assert kept["notes"] == ["files: failed, RuntimeError: no such luck", "copies: skipped, no time left"]
    assert "| decode and resize, 1 threads | 700 |" in (tmp_path / "out.md").read_text()
    assert "no such luck" in capsys.readouterr().err


def test_a_ratio_is_taken_of_the_lowest_ceiling_and_of_the_faster_loop(importable):
    from gpubench.report import aims, markdown

    config = "resnet50 bfloat16 256"
    rates = {"gpuml": [90.0, 80.0, 70.0], "gpuml_arrow": [60.0] * 3, "threads": [50.0] * 3, "loader": [100.0] * 3}
    ended = {"equal_labels": {"gpuml": 1.0}, "busy": 0.5, "no_loader": ""}
    results = {
        "about": {"device": "A card", "cores": 16},
        "dry_run": False,
        "plan": {"distinct": 1, "rounds": 3},
        "notes": [],
        "model": {config: {"model_file": 400.0, "bfloat16_weights": 500.0}},
        "copies": {"pinned 256": {"images_per_s": 300.0, "gigabytes_per_s": 1.0}},
        "decoding": {"1": 10.0, "16": 160.0},
        "end_to_end": {config: {"images": 4096, "rates": rates, **ended}},
        "two_tasks": {config: {"tasks": 2, "threads_each": 8, "images_each": 4096, "rates": [95.0] * 3}},
        "copied_bytes": {config: 150528.0},
        "peaks": {config: {"1000": 100, "4000": 110}},
        "out_of_memory": {config: {"complete": False, "batch_that_fitted": 128, "difference": None}},
    }
    found = {what.partition(": ")[2]: value for what, value, _, _ in aims(results)}
    assert found == {
        "gpuml / decode alone, the lowest ceiling": 80 / 160,
        "gpuml / loader, the limit": 0.8,
        "two tasks, calls of an Arrow batch / the limit": 0.95,
        "bytes copied to the GPU an image": 150528,
        "peak memory, 4000 / 1000 images": 1.1,
        "memory ran out and every row was served": 0,
    }
    results["out_of_memory"] = {}
    met = [line.split(" | ")[-1] for line in markdown(results).partition("## Aims")[2].splitlines()[4:9]]
    assert met == ["**no** |", "**no** |", "yes |", "yes |", "**no** |"]
    del rates["loader"]
    results["end_to_end"][config]["no_loader"] = "Bus error"
    text = markdown(results)
    assert f"{config}: gpuml / threads, the limit | 1.600 |" in text
    assert f"- {config}: no DataLoader, Bus error" in text


def test_bytes_are_counted_on_their_way_to_another_device_alone(importable):
    from gpubench.memory import Copied

    pixels = torch.zeros((4, 5), dtype=torch.uint8)
    for grad_mode in (torch.inference_mode(), torch.no_grad()):
        counted = Copied()
        with counted, grad_mode:
            there = pixels.to("meta", non_blocking=True)
            torch.empty(3, device="meta").copy_(torch.zeros(3))
            there.to(torch.float32)
            pixels.to(torch.float32).copy_(pixels)
        assert counted.bytes == 20 + 12


@pytest.mark.parametrize("fits", [3, 8])
def test_the_step_without_memory_tells_whether_it_ran_out_and_what_came_then(importable, monkeypatch, tmp_path, fits):
    """On the CPU, with a network that takes `fits` rows while too little memory is allowed."""
    from conftest import Pooled
    from gpubench import memory, work

    from gpuml import save_model
    from gpuml.worker import cache

    config = work.Config("small", "float32", 8)
    plan = work.Plan(torch.device("cpu"), 1, 2, 16, (8,), 1, tmp_path)
    save_model(Pooled(), tmp_path / "small.pt2", preprocess=work.PREPROCESS)
    network, allowed, needs = work.network(config, plan), [1.0], iter([100, 300])
    forward = network.forward

    def limited(rows):
        if allowed[-1] < 1 and len(rows) > fits:
            raise torch.OutOfMemoryError("no memory")
        return forward(rows)

    monkeypatch.setattr(network, "forward", limited)
    monkeypatch.setattr("torch.get_num_threads", lambda: 8)  # passes of 64 rows
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: type("Card", (), {"total_memory": 1000}))
    monkeypatch.setattr("torch.cuda.set_per_process_memory_fraction", allowed.append)
    monkeypatch.setattr(memory, "_peak", lambda *_, **__: next(needs))
    found = memory.out_of_memory(config, plan, work.photos(plan))
    cache._networks.clear()
    assert allowed == [1.0, 0.2, 1.0]
    assert found["complete"]
    assert found["difference"] < 1e-6
    assert found["batch_that_fitted"] == (2 if fits == 3 else None)
    assert network.batch_limit is None
