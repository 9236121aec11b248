"""A plan -> measured passes: one process per peer, all warm, one of them working at a time."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench import data, tree
from bench.report import Pass, Result
from bench.serve import PEERS, Setting, open_message
from bench.workloads import WORKLOADS, Workload, prepare, reference

#: The peers that get all images, and Ray, whose start would else be most of a pass; the others, slower, get a part, and
#: two files of it for two cores instead of eight: so their passes have as many rows a task, and take about as long.
ALL_IMAGES = ("limit", "gpuml", "ray")
PARTS = {"predict_batch_udf_floats": 48}
PART = 6

#: Two batches of 64 for each of two cores.
LEAST_IMAGES = 128

#: Starts its processes anew in each pass: seconds that a long job would not notice. A pass of 8 images shows how many.
STARTS_ANEW = ("ray",)

#: Checked alone: the limit chooses among its loops by their times, and Ray's start is timed. The others go in pairs.
TIMED_IN_CHECK = ("limit", *STARTS_ANEW)

#: For the processes that are started: where this package lies, and what this one was given.
PYTHONPATH = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))

#: For the stages, one by one.
STAGES_IMAGES = 256

#: Spark ends a Python worker that was idle for a minute; a peer in Spark that waited longer first gets an untimed pass.
WARM_S = 55.0


#: The longest that a peer may take for one answer.
ANSWER_S = 180.0


@dataclass(frozen=True)
class Plan:
    """What to measure. `peers` run every workload; None: each runs its own. `images` is for every pass; None: a
    workload's own number, times `share`, or a part of it."""

    peers: list[str] | None
    workloads: list[str]
    rounds: int
    share: float
    images: int | None
    stages: bool
    cores: int
    root: Path

    def peers_of(self, workload: Workload) -> Sequence[str]:
        return self.peers or workload.peers

    def size(self, workload: Workload) -> int:
        """Images in a full pass, as many in each file."""
        return self.images or max(int(workload.images * self.share) // data.FILES, 1) * data.FILES


class Failed(Exception):
    """A peer answered that it could not do what it was asked."""


class Peer:
    """A process that runs one peer; `last` is when it last worked."""

    def __init__(self, name: str, root: Path) -> None:
        self.name = name
        self.last = 0.0
        self.in_spark = PEERS[name].startswith("bench.spark_peers:")
        logs = root / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        # OMP_NUM_THREADS unset: each system chooses for its own workers, as it would for a user.
        environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "GPUML_HOME": str(root / "home")}
        with open(logs / f"{name}.txt", "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "bench.serve", name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                cwd=root,
            )

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a line and wait for the answer.

        Raises
        ------
        Failed
            The peer says that it failed, its process ended, or there is no answer in `ANSWER_S`.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
            answered, _, _ = select.select([self.process.stdout], [], [], ANSWER_S)
            line = self.process.stdout.readline() if answered else f'{{"failed": "no answer in {ANSWER_S:.0f} s"}}'
        except BrokenPipeError:
            line = ""
        if not line or not answered:
            tree.end(self.process.pid)
        self.last = time.monotonic()
        try:
            answer: dict[str, Any] = json.loads(line or '{"failed": "its process ended"}')
        except ValueError:
            answer = {"failed": f"it answered {line[:80]!r}"}
        if "failed" in answer:
            raise Failed(f"{answer['failed']}; see logs/{self.name}.txt")
        return answer

    def run(self, images: int) -> Pass:
        """One timed pass."""
        before = tree.times(self.process.pid)
        seconds = self.ask({"collect": False})["seconds"]
        return Pass(images, seconds, tree.cpu_seconds(before, tree.times(self.process.pid)))

    def close(self) -> None:
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it ended, and has not read its last message
                self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            tree.end(self.process.pid)
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


Measured = tuple[dict[str, dict[str, float]], dict[str, dict[str, Result]], float]


def measure(plan: Plan) -> Measured:
    """Stages, results by workload and peer, and the cores that waiting peers use."""
    models = plan.root / "models"
    prepare(models, {WORKLOADS[name].network for name in plan.workloads})
    stages = _stages(plan, models) if plan.stages else {}
    peers: dict[str, Peer] = {}
    results: dict[str, dict[str, Result]] = {}
    try:
        for name in PEERS:
            if any(name in plan.peers_of(WORKLOADS[workload]) for workload in plan.workloads):
                peers[name] = Peer(name, plan.root)
        for workload in plan.workloads:
            for name, peer in peers.items():
                if peer.process.poll() is not None:  # it failed before; here it may not
                    peer.close()
                    peers[name] = Peer(name, plan.root)
            results[workload] = _workload(plan, workload, list(peers.values()))
        idle = _idle(list(peers.values()))
    finally:
        for peer in peers.values():
            peer.close()
    return stages, results, idle


def _workload(plan: Plan, name: str, peers: list[Peer]) -> dict[str, Result]:
    """Check the peers, let each run once untimed, then the rounds, in which they take turns."""
    workload = WORKLOADS[name]
    peers = [peer for peer in peers if peer.name in plan.peers_of(workload)]
    _say(f"{name}: the reference")
    truth = reference(workload.network, plan.root / "models", workload.kind, plan.root)
    results = {peer.name: Result() for peer in peers}

    def check(peer: Peer) -> None:
        _say(f"{name}: {peer.name}: checking")
        _try(results[peer.name], partial(_check, plan, workload, peer, truth, results[peer.name]))

    for peer in peers:
        if peer.name in TIMED_IN_CHECK:
            check(peer)
    with ThreadPoolExecutor(plan.cores) as pool:
        list(pool.map(check, [peer for peer in peers if peer.name not in TIMED_IN_CHECK]))
    for number in range(plan.rounds):
        turn = number % len(peers)
        for peer in peers[turn:] + peers[:turn]:  # each is first, and last, at times
            _try(results[peer.name], partial(_pass, peer, results[peer.name]))
            if not results[peer.name].failed:
                _say(f"{name}: round {number + 1}: {peer.name}: {results[peer.name].passes[-1].rate:.0f} images/s")
    return results


def _try(result: Result, work: Callable[[], None]) -> None:
    """Work, unless the peer has failed before; if it fails now, that is its result."""
    if not result.failed:
        try:
            work()
        except Failed as error:
            result.failed = str(error)


def _check(plan: Plan, workload: Workload, peer: Peer, truth: list[tuple[int, float]], result: Result) -> None:
    """Let a peer load the network and run once; compare its labels and see its memory."""
    size = plan.size(workload)
    result.images, files = size, data.FILES
    if peer.name not in ALL_IMAGES and not plan.images:
        result.images = max(size // PARTS.get(peer.name, PART), min(LEAST_IMAGES, size))
        files = plan.cores

    def open_with(images: int) -> str:
        folder = str(data.parquet(plan.root, workload.kind, images, files))
        setting = Setting(workload.network, folder, str(plan.root / "models"), plan.cores)
        return str(peer.ask(open_message(setting))["note"])

    if peer.name in STARTS_ANEW:
        open_with(data.FILES)
        result.start = peer.run(data.FILES)
    result.note = open_with(result.images)
    with tree.peak_memory(peer.process.pid) as seen:
        labels = dict(peer.ask({"collect": True})["labels"])
    if missing := set(range(result.images)) - labels.keys():
        raise Failed(f"{len(missing)} of {result.images} images have no answer")
    result.memory = max(seen)
    result.agreement = _agreement(labels, truth, 0)
    result.clear_agreement = _agreement(labels, truth, 0.1)


def _pass(peer: Peer, result: Result) -> None:
    """One timed pass, warm."""
    if peer.in_spark and time.monotonic() - peer.last > WARM_S:
        _say(f"{peer.name} has waited for long: once untimed")
        peer.ask({"collect": False})
    result.passes.append(peer.run(result.images))


def _agreement(labels: dict[int, int], truth: list[tuple[int, float]], ahead: float) -> float:
    """Part of the labels that are the reference's, among images whose reference is at least so far ahead."""
    known = [(label, *truth[number % len(truth)]) for number, label in labels.items()]  # images repeat
    counted = [label == true for label, true, by in known if by >= ahead]
    return sum(counted) / max(len(counted), 1)


def _stages(plan: Plan, models: Path) -> dict[str, dict[str, float]]:
    folders = {}
    for name in plan.workloads:
        workload = WORKLOADS[name]
        folders[name] = str(data.parquet(plan.root, workload.kind, min(plan.size(workload), STAGES_IMAGES)))
    done = subprocess.run(
        [sys.executable, "-m", "bench.stages", json.dumps(folders), str(models)],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        stdout=subprocess.PIPE,
        check=True,
    )
    found: dict[str, dict[str, float]] = json.loads(done.stdout)
    return found


def _idle(peers: list[Peer], seconds: float = 3) -> float:
    """Cores that all the peers together use while none has work."""
    before = [tree.times(peer.process.pid) for peer in peers]
    time.sleep(seconds)
    after = [tree.times(peer.process.pid) for peer in peers]
    return sum(map(tree.cpu_seconds, before, after)) / seconds


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
