"""A plan -> measured passes: one process per peer, all warm, one of them working at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import data, tree
from bench.report import Pass, Result
from bench.serve import Setting, open_message
from bench.workloads import MAIN, WORKLOADS, Workload, prepare, reference

#: A pass of a slow peer has a half of the images, a quarter or less, so as to take no longer than this if it can:
#: so many of the files, since each file is a task, and a task has its costs. Short passes would not do: what a pass
#: costs by itself, and batches that do not fill, would count against the slow.
PASS_S = 3.0

#: One in so many, for the slowest.
MOST_PARTS = 16

#: The least images of a pass that is not of all; of so many the labels are compared, too.
LEAST_IMAGES = 64

#: And for a peer that starts its processes anew, so that these do not count for all.
PARTS_ANEW = 8

#: The peers that get all images in every workload.
ALL_IMAGES = ("limit_threads", "gpuml")

#: The peers of the workloads with other images.
OTHER_IMAGES = ("limit_threads", "gpuml")

#: Starts its processes anew in each pass, in seconds that a long job would not notice. A pass of 8 images shows how
#: many; they are not taken off, since decoding goes on meanwhile: with few images that would leave nearly nothing.
STARTS_ANEW = ("ray",)

#: For the stages, one by one.
STAGES_IMAGES = 256

#: These take their turns apart, so that a round of the others is over before Spark ends workers that wait. (Else each
#: peer has to be warmed up in each round, which makes rounds longer still.)
SLOW = ("predict_batch_udf_floats", "ray")

#: Spark ends a Python worker that was idle for a minute; a peer that waited longer gets an untimed pass first.
WARM_S = 55.0


@dataclass(frozen=True)
class Plan:
    """What to measure. `images` is for every pass; None: a workload's own number, times `share`, as `PASS_S` says."""

    peers: list[str]
    workloads: list[str]
    rounds: int
    share: float
    images: int | None
    cores: int
    root: Path

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
        logs = root / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
        # OMP_NUM_THREADS unset: each system chooses for its own workers, as it would for a user.
        environment = {**os.environ, "PYTHONPATH": path, "GPUML_HOME": str(root / "home")}
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
            The peer says that it failed, or its process ended.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        self.last = time.monotonic()
        answer: dict[str, Any] = json.loads(line or '{"failed": "its process ended"}')
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
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            tree.end(self.process.pid)


Measured = tuple[dict[str, dict[str, float]], dict[str, dict[str, Result]], float]


def measure(plan: Plan) -> Measured:
    """Stages, results by workload and peer, and the cores that waiting peers use."""
    models = plan.root / "models"
    prepare(models, {WORKLOADS[name].network for name in plan.workloads})
    stages = _stages(plan, models)
    peers: dict[str, Peer] = {}
    results: dict[str, dict[str, Result]] = {}
    try:
        for name in plan.peers:
            peers[name] = Peer(name, plan.root)
        for workload in plan.workloads:
            results[workload] = _workload(plan, workload, list(peers.values()))
        idle = _idle(list(peers.values()))
    finally:
        for peer in peers.values():
            peer.close()
    return stages, results, idle


def _workload(plan: Plan, name: str, peers: list[Peer]) -> dict[str, Result]:
    """Open and check each peer, then the rounds, in which the peers take turns."""
    workload = WORKLOADS[name]
    if name not in MAIN:
        peers = [peer for peer in peers if peer.name in OTHER_IMAGES]
    size = plan.size(workload)
    truth = reference(workload.network, plan.root / "models", data.parquet(plan.root, workload.kind, size))
    results: dict[str, Result] = {peer.name: Result() for peer in peers}
    sizes: dict[str, int] = {}
    for peer in peers:
        _say(f"{name}: {peer.name}: checking")
        try:
            sizes[peer.name] = _opened(plan, workload, peer, size, truth, results[peer.name])
        except Failed as error:
            results[peer.name].failed = str(error)
    for group in _groups(peers):
        _rounds(plan, name, group, sizes, results)
    return results


def _groups(peers: list[Peer]) -> list[list[Peer]]:
    """The slow apart, with gpuml once more."""
    slow = [peer for peer in peers if peer.name in SLOW]
    ours = [peer for peer in peers if peer.name == "gpuml"]
    groups = [[peer for peer in peers if peer not in slow], [*ours, *slow] if slow else []]
    return [group for group in groups if group]


def _rounds(plan: Plan, name: str, peers: list[Peer], sizes: dict[str, int], results: dict[str, Result]) -> None:
    """Let some peers take turns; each keeps gpuml's passes of the same rounds."""
    _say(f"{name}: {', '.join(peer.name for peer in peers)}: once untimed")
    # Together: one after the other, Spark would have ended the first one's workers before its first round.
    with ThreadPoolExecutor(len(peers)) as pool:
        for peer, error in zip(peers, pool.map(_touch, peers), strict=True):
            results[peer.name].failed = results[peer.name].failed or error
    passes: dict[str, list[Pass]] = {peer.name: [] for peer in peers}
    for number in range(plan.rounds):
        turn = number % len(peers)
        for peer in peers[turn:] + peers[:turn]:  # each is first, and last, at times
            if results[peer.name].failed:
                continue
            try:
                if time.monotonic() - peer.last > WARM_S:
                    _say(f"{name}: {peer.name} has waited for long: once untimed")
                    peer.ask({"collect": False})
                passes[peer.name].append(peer.run(sizes[peer.name]))
            except Failed as error:
                results[peer.name].failed = str(error)
                continue
            _say(f"{name}: round {number + 1}: {peer.name}: {passes[peer.name][-1].rate:.0f} images/s")
    for peer in peers:
        result = results[peer.name]
        result.passes = result.passes or passes[peer.name]
        result.ours = passes.get("gpuml", [])


def _touch(peer: Peer) -> str:
    """Let a peer run once; what failed, or ""."""
    try:
        peer.ask({"collect": False})
    except Failed as error:
        return str(error)
    return ""


def _opened(
    plan: Plan, workload: Workload, peer: Peer, size: int, truth: dict[int, tuple[int, float]], result: Result
) -> int:
    """Let a peer load the network, check its labels, see its memory and choose how many images its passes have."""
    models = str(plan.root / "models")
    small = max(size // MOST_PARTS, min(size, LEAST_IMAGES))
    anew = peer.name in STARTS_ANEW
    chosen = size
    if not plan.images and peer.name not in ALL_IMAGES:
        chosen = max(size // PARTS_ANEW, small) if anew else small

    def open_with(images: int) -> None:
        files = max(data.FILES * images // size, min(plan.cores, data.FILES))
        folder = data.parquet(plan.root, workload.kind, images, files)
        peer.ask(open_message(Setting(workload.network, str(folder), models, plan.cores)))

    if anew:
        open_with(data.FILES)
        peer.ask({"collect": False})
        result.start = peer.run(data.FILES)
    open_with(chosen)
    with tree.peak_memory(peer.process.pid) as seen:
        first = peer.ask({"collect": True})
    if chosen < size and not anew:
        chosen = _size_for(size, small, peer.run(chosen).rate)
        open_with(chosen)
    result.first_seconds = first["seconds"]
    result.memory = max(seen)
    labels = dict(first["labels"])
    result.agreement = _agreement(labels, truth, 0)
    result.clear_agreement = _agreement(labels, truth, 0.1)
    return chosen


def _size_for(size: int, small: int, rate: float) -> int:
    """The most images that a peer of this rate does in `PASS_S`: all, a half, a quarter or an eighth, else `small`."""
    sizes = (size // part for part in (1, 2, 4, 8))
    return next((images for images in sizes if images > small and images / rate <= PASS_S), small)


def _agreement(labels: dict[int, int], truth: dict[int, tuple[int, float]], ahead: float) -> float:
    """Part of the labels that are the reference's, among images whose reference is at least so far ahead."""
    counted = [labels[number] == label for number, (label, by) in truth.items() if number in labels and by >= ahead]
    return sum(counted) / max(len(counted), 1)


def _stages(plan: Plan, models: Path) -> dict[str, dict[str, float]]:
    folders = {}
    for name in plan.workloads:
        workload = WORKLOADS[name]
        folders[name] = str(data.parquet(plan.root, workload.kind, min(plan.size(workload), STAGES_IMAGES)))
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "bench.stages", json.dumps(folders), str(models)],
        env={**os.environ, "PYTHONPATH": path},
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
