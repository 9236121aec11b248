"""Several processes on one GPU, as Spark's tasks that share it -> images/s of all together."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import forkserver
from typing import Any

import torch

from gpubench.loops import calls_of
from gpubench.work import Config, Plan, repeated, server

#: Processes are forked, as Spark's are, from one that knows no CUDA: a process that used it leaves its children none.
CONTEXT = multiprocessing.get_context("forkserver")

#: Seconds that a process waits for the others to be ready.
PATIENCE = 90

#: Of a process of the pool: serves one pass, once all of them are there.
_serve: Any = None
_together: Any = None


def start() -> None:
    """Let the process that forks import torch, so that it has done so when tasks are asked for."""
    CONTEXT.set_forkserver_preload([__name__])
    forkserver.ensure_running()


def together(config: Config, plan: Plan, contents: Sequence[bytes], images: int, tasks: int = 2) -> dict[str, Any]:
    """Rates by round. Each task decodes with its share of the cores, and gets calls as large as Arrow batches."""
    each = replace(plan, cores=max(1, plan.cores // tasks))
    given = (CONTEXT.Barrier(tasks), config, each, contents)
    with ProcessPoolExecutor(tasks, CONTEXT, initializer=_begin, initargs=given) as pool:
        rates = []
        for _ in range(plan.rounds + 1):  # the first is a warm-up, and starts the processes
            done = list(pool.map(_pass, [images] * tasks))
            first, last = min(start for start, _ in done), max(end for _, end in done)
            rates.append(tasks * images / (last - first))
    return {"tasks": tasks, "threads_each": each.cores, "images_each": images, "rates": rates[1:]}


def _begin(barrier: Any, config: Config, plan: Plan, contents: Sequence[bytes]) -> None:
    global _serve, _together
    torch.set_num_threads(plan.cores)  # what Spark sets by OMP_NUM_THREADS
    serve, rows = server(config, plan), calls_of(contents)
    _serve = partial(_calls, serve, contents, rows)
    serve(repeated(contents, min(rows, 2 * config.batch)))
    _together = barrier


def _calls(serve: Any, contents: Sequence[bytes], rows: int, images: int) -> None:
    given = repeated(contents, images)
    for start in range(0, images, rows):
        serve(given[start : start + rows])


def _pass(images: int) -> tuple[float, float]:
    """When the pass began and ended, on the machine's one monotonic clock."""
    _together.wait(PATIENCE)  # one pass each: none begins before all have one
    start = time.perf_counter()
    _serve(images)
    return start, time.perf_counter()
