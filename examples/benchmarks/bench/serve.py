"""One peer in a process of its own, told by lines of JSON on stdin what to run; it stays warm in between.

    python -m bench.serve gpuml

Ray, Daft and Spark in one process would share threads, allocators and garbage collectors.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

#: A pass over all images. It makes every output of every row; when asked to collect, it returns id -> label.
Job = Callable[[bool], dict[int, int]]

#: The function that makes a peer's job; a job may have a `note` for the table.
PEERS = {
    "limit": "bench.limit:limit",
    "gpuml": "bench.spark_peers:gpuml",
    "predict_batch_udf": "bench.spark_peers:batch_udf",
    "predict_batch_udf_floats": "bench.spark_peers:batch_udf_floats",
    "pandas_udf": "bench.spark_peers:pandas_udf",
    "mlflow": "bench.spark_peers:mlflow",
    "ray": "bench.ray_peer:ray_data",
    "daft": "bench.daft_peer:daft_native",
}


@dataclass(frozen=True)
class Setting:
    """What a peer runs: a network's name, a folder of Parquet, the folder of weights and model files, its cores."""

    network: str
    data: str
    models: str
    cores: int


def main(peer: str) -> None:
    """Answer each line with one: what was asked for, or ``{"failed": ...}``. Ends with stdin."""
    # Spark and Ray print to stdout; the answers need one that nobody else writes to.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    module, _, function = PEERS[peer].partition(":")
    make = getattr(import_module(module), function)
    job: Job = lambda collect: {}  # noqa: E731
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if "open" in asked:
                job = make(Setting(**asked["open"]))
                print(json.dumps({"note": getattr(job, "note", "")}), file=answers)
            else:
                print(json.dumps(_timed(job, asked["collect"])), file=answers)
        except Exception as error:  # a peer that fails is a line in the table, with the traceback in its log
            sys.excepthook(*sys.exc_info())
            print(json.dumps({"failed": f"{type(error).__name__}: {error}"[:300]}), file=answers)


def _timed(job: Job, collect: bool) -> dict[str, Any]:
    start = time.perf_counter()
    labels = job(collect)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "labels": list(labels.items()) if collect else []}


def open_message(setting: Setting) -> dict[str, Any]:
    return {"open": asdict(setting)}


if __name__ == "__main__":
    main(sys.argv[1])
