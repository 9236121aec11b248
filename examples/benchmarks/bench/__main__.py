"""The whole benchmark: make the data, start the peers, run them in turn, write the table.

python -m bench [--quick] [--peers gpuml,ray] [--workloads pooled] [--images 512] [--rounds 5] [--out [NAME]]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import distributions
from itertools import islice
from pathlib import Path
from typing import Any

from bench.report import as_json, stages_table, table
from bench.rounds import Plan, measure
from bench.serve import PEERS
from bench.workloads import WORKLOADS

HERE = Path(__file__).parents[1]
ROOT = HERE.parents[1]

PACKAGES = (
    "gpuml",
    "torch",
    "torchvision",
    "pillow",
    "pyspark",
    "pandas",
    "pyarrow",
    "numpy",
    "ray",
    "daft",
    "mlflow-skinny",
)


#: Those that start quickly, so that 3 minutes are enough.
QUICK_PEERS = ["limit", "gpuml", "predict_batch_udf", "pandas_udf", "daft"]


def main(arguments: Sequence[str] | None = None) -> None:
    asked = _arguments(arguments)
    plan = Plan(
        peers=asked.peers,
        workloads=asked.workloads,
        rounds=asked.rounds,
        share=0.25 if asked.quick else 1,
        images=asked.images,
        stages=not asked.quick,
        cores=len(os.sched_getaffinity(0)),
        root=asked.data,
    )
    stages, results, idle = measure(plan)
    about = _about(plan.cores)
    parts = [_heading(about, plan, idle), table(results), *([stages_table(stages)] if stages else [])]
    text = "\n\n".join(parts) + "\n"
    print(text)
    if asked.out is not None:
        folder = HERE / "results"
        folder.mkdir(exist_ok=True)
        name = asked.out or f"{about['date']}-{plan.cores}cores"
        made = {**about, "idle_cores": idle, "stages_ms": stages, "workloads": as_json(results)}
        (folder / f"{name}.json").write_text(json.dumps(made, indent=1) + "\n")
        (folder / f"{name}.md").write_text(text)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    def names(known: Sequence[str]) -> Any:
        def parse(text: str) -> list[str]:
            chosen = text.split(",")
            if unknown := [name for name in chosen if name not in known]:
                raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
            return chosen

        return parse

    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="2 workloads, 5 peers, a quarter of the images, 3 rounds, no stages"
    )
    parser.add_argument("--peers", type=names(list(PEERS)), help="comma-separated; else all but ray")
    parser.add_argument("--workloads", type=names(list(WORKLOADS)), help="comma-separated")
    parser.add_argument("--images", type=_positive, help="in each pass of each peer")
    parser.add_argument("--rounds", type=_positive, help="timed passes of each peer")
    parser.add_argument("--data", type=Path, default=ROOT / ".bench-data", help="where data, models and logs are kept")
    parser.add_argument(
        "--out", nargs="?", const="", metavar="NAME", help="write results/NAME.json and .md; else <date>-<cores>cores"
    )
    asked = parser.parse_args(arguments)
    asked.workloads = asked.workloads or (["pooled", "mobilenet_v3_small"] if asked.quick else list(WORKLOADS))
    asked.peers = asked.peers or (QUICK_PEERS if asked.quick else None)
    asked.rounds = asked.rounds or (3 if asked.quick else 5)
    asked.data = asked.data.resolve()
    try:
        asked.data.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--data {asked.data}: {error.strerror}")
    return asked


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number from 1 up")
    return number


def _about(cores: int) -> dict[str, Any]:
    java = subprocess.run(["java", "-version"], capture_output=True, text=True, check=False).stderr
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    model = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "date": datetime.date.today().isoformat(),
        "cores": cores,
        "cpu": model[0] if model else "unknown",
        "commit": commit.stdout.strip(),
        "python": sys.version.split()[0],
        "java": java.split('"')[1] if '"' in java else "unknown",
        "versions": dict(found for name in PACKAGES for found in _version(name)),
    }


def _version(name: str) -> list[tuple[str, str]]:
    """Of the package that an import finds: .venv has others of the same name behind the benchmark's own."""
    return [(name, one.version) for one in islice(distributions(name=name), 1)]


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def _heading(about: dict[str, Any], plan: Plan, idle: float) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return (
        f"{about['date']}, {about['cores']} cores ({about['cpu']}), commit {about['commit']}, "
        f"Python {about['python']}, Java {about['java']}, {versions}. {plan.rounds} rounds; median (least to most). "
        f"While one peer ran, the others together used {idle:.2f} cores. Equal labels: of all images; of those whose "
        f"two largest probabilities are at least 0.1 apart."
    )


if __name__ == "__main__":
    main()
