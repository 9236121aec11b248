"""gpuml on one GPU: the ceilings of its stages, end to end beside a plain PyTorch loop, memory. Needs no Spark.

    python examples/benchmarks/gpu.py [--out folder] [--seconds 190]
    python examples/benchmarks/gpu.py --device cpu --quick          # a dry run: the steps, not a result

Writes <date>-<card>.md and .json after each step, so that an interrupted run leaves what it had.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from gpubench import ceilings, loops, memory, report, tasks, work
from gpubench.work import Config, Plan

HERE = Path(__file__).resolve().parent


@dataclass
class Run:
    """What was found, the time that is left for more, and where it is written."""

    results: dict[str, Any]
    file: Path
    end: float
    failed: bool = False

    def step(self, part: str, config: Config | None, measure: Callable[[], Any]) -> None:
        """Measure, note and write; a step that fails does not take the others with it."""
        name = f"{part}, {config}" if config else part
        if time.monotonic() > self.end:
            self.results["notes"].append(f"{name}: skipped, no time left")
        else:
            start = time.monotonic()
            try:
                found = measure()
                self.results.setdefault(part, {}).update({str(config): found} if config else found)
            except Exception as error:
                traceback.print_exc()
                self.results["notes"].append(f"{name}: failed, {type(error).__name__}: {error}")
                self.failed = True
            print(f"{name}: {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
        self.write()

    def skip(self, part: str, why: str) -> None:
        self.results["notes"].append(f"{part}: skipped, {why}")

    def write(self) -> None:
        for suffix, text in (
            (".json", json.dumps(self.results, indent=1) + "\n"),
            (".md", report.markdown(self.results)),
        ):
            made = self.file.with_name(f".{self.file.name}{suffix}")
            made.write_text(text)
            made.replace(self.file.with_name(self.file.name + suffix))


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _arguments(arguments)
    device = torch.device("cuda", 0) if asked.device == "cuda" else torch.device("cpu")
    cores = len(os.sched_getaffinity(0))
    tasks.start()
    with tempfile.TemporaryDirectory() as folder:
        if asked.quick:
            plan, models = Plan(device, cores, 16, 40, (16,), 1, Path(folder)), ["small"]
        else:
            plan, models = Plan(device, cores, 512, 4096, (256, 64), 3, Path(folder)), ["resnet50", "vit_b_16"]
        about = _about(plan)
        name = f"{about['date']}-{_slug(about['device'])}{'-dry-run' if asked.quick else ''}"
        shown = {"distinct": plan.distinct, "images": plan.images, "batches": plan.batches, "rounds": plan.rounds}
        results = {"about": about, "dry_run": asked.quick, "plan": shown, "notes": []}
        asked.out.mkdir(parents=True, exist_ok=True)
        run = Run(results, asked.out / name, time.monotonic() + asked.seconds)
        measure(run, plan, models)
        print(report.markdown(results), flush=True)
    return int(run.failed)


def measure(run: Run, plan: Plan, models: Sequence[str]) -> None:
    """All steps, in the order in which they would be missed."""
    contents = work.photos(plan)
    run.results["plan"]["bytes_an_image"] = sum(map(len, contents)) / len(contents)
    run.step("decoding", None, partial(ceilings.decoding, plan, contents))
    if plan.cuda:
        run.step("copies", None, partial(ceilings.copies, plan))
    else:
        run.skip("copies, copied_bytes, peaks, out_of_memory", "they need CUDA")
    for model in models:
        run.step("files", None, partial(_file, model, plan, contents))
        _of_network(run, plan, contents, [Config(model, "bfloat16", batch) for batch in plan.batches])
    for model in models:
        _of_network(run, plan, contents, [Config(model, "float32", batch) for batch in plan.batches])


def _of_network(run: Run, plan: Plan, contents: Sequence[bytes], configs: Sequence[Config]) -> None:
    for config in configs:
        run.step("model", config, partial(ceilings.model, config, plan, contents))
        images = _images(run, plan, config)
        run.step("end_to_end", config, partial(loops.end_to_end, config, plan, contents, images))
    first = configs[0]
    if first.dtype == "bfloat16":
        images = _images(run, plan, first)
        run.step("two_tasks", first, partial(tasks.together, first, plan, contents, images))
        if plan.cuda:
            run.step("copied_bytes", first, partial(memory.copied, first, plan, contents))
            run.step("peaks", first, partial(memory.peaks, first, plan, contents))
            run.step("out_of_memory", first, partial(memory.out_of_memory, first, plan, contents))


def _file(model: str, plan: Plan, contents: Sequence[bytes]) -> dict[str, int]:
    return {model: work.model_file(model, plan, contents).stat().st_size}


def _images(run: Run, plan: Plan, config: Config) -> int:
    """In a pass: half as many where the network alone would need more than two seconds."""
    rate = run.results.get("model", {}).get(str(config), {}).get("model_file", plan.images)
    return plan.images if plan.images < 2 * rate else plan.images // 2


def _about(plan: Plan) -> dict[str, Any]:
    cpu = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    about = {
        "device": torch.cuda.get_device_name(plan.device) if plan.cuda else "the CPU",
        "date": datetime.date.today().isoformat(),
        "cores": plan.cores,
        "cpu": cpu[0] if cpu else platform.machine(),
        "commit": _said("git", "-C", str(HERE), "rev-parse", "--short", "HEAD"),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "torchvision", "pillow", "simplejpeg", "numpy")},
    }
    if plan.cuda:
        about["cuda"], about["cudnn"] = torch.version.cuda, torch.backends.cudnn.version()
        about["driver"] = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
    return about


def _said(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
        return done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).is_file() else []


def _slug(name: str) -> str:
    return "-".join("".join(letter if letter.isalnum() else " " for letter in name.lower()).split())


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="a dry run: few images, a small network, no result")
    parser.add_argument("--seconds", type=float, default=190, help="after which no further step begins")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the files")
    asked = parser.parse_args(arguments)
    if asked.device == "cpu" and not asked.quick:
        parser.error("--device cpu is for a dry run alone: give --quick with it")
    if asked.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} sees no GPU; a dry run needs none: --device cpu --quick")
    return asked


if __name__ == "__main__":
    sys.exit(main())
