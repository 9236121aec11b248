"""gpuml alone on local Spark -> a table for each thing that must stay flat; exit status 1 if one does not.

    python growth.py [--only batch,memory,growth,partitions,tasks] [--quick] [--out]

Images, network and session are those of the benchmark in `bench`. Give it a machine that does nothing else; Linux.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pandas as pd
from bench import tree
from bench.__main__ import HERE, ROOT, _about
from bench.bounds import Table, Verdict, rate, shown, task_ms
from bench.local import NETWORK, SETTINGS, Bench, Work, configure
from bench.peaks import quarters, worker_peaks
from bench.report import Pass, ratios, spread
from bench.workloads import prepare
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from gpuml.spark import udf

RECORDS = "spark.sql.execution.arrow.maxRecordsPerBatch"


def batch(bench: Bench) -> Table:
    """Rows in an Arrow batch."""
    work = bench.work(bench.images(4608), 8)  # 576 a task: 512 and 10,000 cut them differently
    variants = [(name, records) for name in SETTINGS for records in (64, 512, 10_000)]
    passes: dict[tuple[str, int], list[Pass]] = {variant: [] for variant in variants}
    for settings in SETTINGS.values():  # warms up
        configure(settings)
        work.run()
    for turn in range(bench.rounds(6)):
        for variant in variants[turn:] + variants[:turn]:  # each is first, and last, at times
            configure({**SETTINGS[variant[0]], RECORDS: str(variant[1])})
            passes[variant].append(work.run())
    table = Table(
        f"Rows in an Arrow batch: {work.images:,} images, {work.tasks} tasks",
        ["Other settings", "Rows at most", "Images/s", "CPU-ms an image", "Of the best rate"],
    )
    for name, records in variants:
        mine = passes[name, records]
        best = max((passes[one] for one in variants if one[0] == name), key=rate)
        verdict = Verdict(statistics.median(ratios(mine, best)), "at least", 0.9)
        table.rows.append([name, f"{records:,}", *shown(mine), verdict])
    return table


def memory(bench: Bench) -> Table:
    """What a worker holds during one long task, with the large Arrow batches of Spark's own settings."""
    bench.work(8, 8).run()  # starts the workers, and loads the network
    work = bench.work(bench.images(20_000), 1)
    configure(SETTINGS["Spark's own"])
    before = tree.times(os.getpid())
    with worker_peaks() as seen:
        one = work.run()
    after = tree.times(os.getpid())
    busiest = max(seen.keys() & after.keys(), key=lambda pid: after[pid][0] - before.get(pid, (0, 0))[0])
    peaks = quarters(seen[busiest])
    table = Table(
        f"Memory of one worker: {work.images:,} images in one task, {one.rate:,.0f} images/s",
        ["Quarter of the time", "Peak, MB", "More than in the second, bytes an image", "Of the second's peak"],
    )
    for number, peak in enumerate(peaks):
        more = f"{(peak - peaks[1]) / (work.images / 4 * (number - 1)):,.0f}" if number > 1 else ""
        verdict = Verdict(peak / peaks[1], "at most", 1.05) if number == 3 else f"{peak / peaks[1]:.2f}"
        table.rows.append([str(number + 1), f"{peak / 1e6:,.0f}", more, verdict])
    return table


def growth(bench: Bench) -> Table:
    """More images in as many more tasks."""
    fixed = bench.work(8, 8)
    works = small, middle, large = [bench.work(bench.images(250 * tasks), tasks) for tasks in (8, 40, 200)]
    passes: dict[int, list[Pass]] = {work.tasks: [] for work in works}
    starts: list[Pass] = []
    for work in (fixed, small, fixed):  # warms up
        work.run()
    for _ in range(bench.rounds(2)):
        for work in (small, middle, small, large, small):
            passes[work.tasks].append(work.run())
            starts.append(fixed.run())
    table = Table(
        f"Growth: {small.images // small.tasks} images a task. Of that, a job of 8 images in 8 tasks takes "
        f"{spread([one.seconds for one in starts]):.2f} s",
        ["Images", "Tasks", "Passes", "Images/s", "CPU-ms an image", "Of the best rate"],
    )
    best = max(map(rate, passes.values()))
    for work in works:
        mine = passes[work.tasks]
        verdict = Verdict(rate(mine) / best, "at least", 0.9)
        table.rows.append([f"{work.images:,}", str(work.tasks), str(len(mine)), *shown(mine), verdict])
    return table


def partitions(bench: Bench) -> Table:
    """The same images in more tasks."""
    # So many images that 400 tasks have 125 each. A task of 20 is mostly the task: that is the next question.
    works = [bench.work(bench.images(50_000), tasks) for tasks in (8, 400)]
    passes: dict[int, list[Pass]] = {work.tasks: [] for work in works}
    bench.work(bench.images(2000), 8).run()  # warms up
    for turn in range(bench.rounds(3)):
        for work in works[turn:] + works[:turn]:
            passes[work.tasks].append(work.run())
    table = Table(
        f"Partitions: {works[0].images:,} images",
        ["Tasks", "Images/s", "CPU-ms an image", "Cost of a task beyond 8, core-ms", "Of the best rate"],
    )
    best = max(passes.values(), key=rate)
    for work in works:
        mine = passes[work.tasks]
        each = [task_ms(few, many, work.tasks - 8, bench.cores) for few, many in zip(passes[8], mine, strict=True)]
        cost = Verdict(statistics.median(each), "at most", 70, ".1f")
        costs = cost if work.tasks > 8 else ""
        verdict = Verdict(statistics.median(ratios(mine, best)), "at least", 0.8)
        table.rows.append([str(work.tasks), *shown(mine), costs, verdict])
    return table


def tasks(bench: Bench) -> Table:
    """Tasks of one image each, and what they cost without gpuml, through TCP, and without gpuml's gc.freeze."""
    count = bench.images(1200) // 10
    table = Table(
        f"Cost of a task: {count} tasks of one image",
        ["What runs", "Sockets", "Seconds", "CPU-ms", "Wall time x cores / tasks, ms"],
    )

    def measure(name: str, sockets: str, work: Work, rounds: int, bound: float | None = None) -> None:
        for _ in range(min(rounds, 3)):  # the JVM's compiler is at work for some seconds
            work.run()
        passes = [work.run() for _ in range(rounds)]
        cost = statistics.median(1000 * bench.cores * one.seconds / count for one in passes)
        figure = Verdict(cost, "at most", bound, ".1f") if bound else f"{cost:.1f}"
        table.rows.append([name, sockets, f"{spread([one.seconds for one in passes]):.2f}", shown(passes)[1], figure])

    for sockets in ("TCP", "Unix"):
        bench.start(sockets == "Unix")
        # In this order: the first is to find workers without torch, and the last one changes them.
        measure("a UDF that does nothing", sockets, nothing(bench, count, freeze=False), bench.rounds(5))
        measure("the same after gc.freeze", sockets, nothing(bench, count, freeze=True), bench.rounds(5))
        measure("gpuml", sockets, bench.work(count, count), bench.rounds(5), 70)
    with mock.patch.object(udf, "_score", unfrozen(udf._score)):
        never_frozen = bench.work(count, count)
    measure("gpuml without gc.freeze", "Unix", never_frozen, 1)
    bench.start()  # those workers are of no use to another question
    return table


def nothing(bench: Bench, count: int, freeze: bool) -> Work:
    """Tasks of one image whose UDF does not look at it: what Spark costs by itself."""

    @F.pandas_udf("long")
    def zeros(content: pd.Series) -> pd.Series:
        import gc

        if freeze and not gc.get_freeze_count():
            gc.collect()
            gc.freeze()
        return pd.Series([0] * len(content))

    session = SparkSession.getActiveSession()
    assert session is not None
    configure(SETTINGS["gpu_conf"])
    frame = session.read.parquet(str(bench.folder(count, count))).select(zeros("content"))

    def job(collect: bool) -> dict[int, int]:
        frame.write.format("noop").mode("overwrite").save()
        return {}

    return Work(count, count, job)


def unfrozen(score: Callable[..., Any]) -> Callable[..., Any]:
    """The function that gpuml runs in a worker, for workers in which nothing is frozen, nor ever will be."""

    def run(*arguments: Any) -> Any:
        import gc

        from gpuml.worker import cache

        cache._frozen = True  # so it believes
        gc.unfreeze()
        return score(*arguments)

    return run


QUESTIONS: dict[str, Callable[[Bench], Table]] = {
    "batch": batch,
    "memory": memory,
    "growth": growth,
    "partitions": partitions,
    "tasks": tasks,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 1 if a bound is broken."""
    asked = _arguments(arguments)
    bench = Bench(asked.data.resolve(), len(os.sched_getaffinity(0)), asked.quick)
    os.environ["GPUML_HOME"] = str(bench.root / "home")
    prepare(bench.root / "models", {NETWORK})
    bench.start()
    assert len(bench.work(8, 8).job(True)) == 8  # it reads images, and scores them
    about = _about(bench.cores)
    versions = ", ".join(f"{package} {version}" for package, version in about["versions"].items())
    heading = (
        f"{about['date']}, {bench.cores} cores ({about['cpu']}), commit {about['commit']}, Python {about['python']}, "
        f"Java {about['java']}, {versions}. local[{bench.cores}], network {NETWORK}; median (least to most)."
    )
    print(heading, flush=True)
    tables = []
    for name in asked.only:
        start = time.perf_counter()
        tables.append(QUESTIONS[name](bench))
        print(f"\n{tables[-1].text()}", flush=True)
        print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    if asked.out:
        text = "\n\n".join([heading, *(table.text() for table in tables)]) + "\n"
        folder = HERE / "results"
        folder.mkdir(exist_ok=True)
        (folder / f"{about['date']}-{bench.cores}cores-growth.md").write_text(text)
    return 0 if all(table.holds for table in tables) else 1


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := [name for name in chosen if name not in QUESTIONS]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(QUESTIONS)}")
        return chosen

    parser = argparse.ArgumentParser(prog="growth.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", type=names, default=list(QUESTIONS), help="comma-separated")
    parser.add_argument("--quick", action="store_true", help="a tenth of the images, one round")
    parser.add_argument("--data", type=Path, default=ROOT / ".bench-data", help="where data and models are kept")
    parser.add_argument("--out", action="store_true", help="write results/<date>-<cores>cores-growth.md")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
