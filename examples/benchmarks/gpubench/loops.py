"""The same images end to end -> rates: gpuml's worker, and the limit, which is a plain PyTorch loop in two shapes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from gpubench.work import ARROW_BYTES, Config, Plan, empty, network, pixels_of, prepare, repeated, score, seconds
from gpubench.work import server as make_server
from gpuml.worker.cache import Network

#: Images in a job of the pool. Fewer handovers than with one; the last jobs of a batch still spread over 16 threads.
JOB = 4

#: Batches of pinned memory: one is copied, two are filled.
SLOTS = 3

#: Images that a worker of the DataLoader hands over at once. With whole batches of 256 each of 16 workers would have
#: one batch in a pass of 4,096 images, and nothing would overlap.
PIECE = 32

#: int64, one an image.
Labels = np.ndarray[Any, Any]


def end_to_end(config: Config, plan: Plan, contents: Sequence[bytes], images: int) -> dict[str, Any]:
    """Images/s of each contender and round, in turn; how far the labels agree; the GPU's busy share.

    ``no_loader``: why there is no DataLoader among them, else empty.
    """
    net, rows = network(config, plan), repeated(contents, images)
    serve = make_server(config, plan)
    call = calls_of(contents)
    loader = _loader(plan, rows)
    contenders: dict[str, Callable[[], Labels]] = {
        "gpuml": lambda: _labels(serve(rows)),
        "gpuml_arrow": lambda: np.concatenate([_labels(serve(part)) for part in _parts(rows, call)]),
        "threads": partial(by_threads, net, rows, config.batch, plan),
        "loader": partial(by_loader, net, loader, config.batch, plan),
    }
    truth, agree, no_loader = contenders["gpuml"](), {}, ""
    for name, run in contenders.items():
        try:
            agree[name] = float((run() == truth).mean())
        except RuntimeError as error:
            if name != "loader":
                raise
            no_loader = str(error)  # containers often have no shared memory worth the name
    contenders = {name: contenders[name] for name in agree}
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(plan.rounds):
        order = list(contenders)
        for name in order[number % len(order) :] + order[: number % len(order)]:
            rates[name].append(images / seconds(plan, contenders[name]))
    with busy(net, plan) as share:
        contenders["gpuml"]()
    found: dict[str, Any] = {"images": images, "rows_a_call": call, "rates": rates, "equal_labels": agree}
    return {**found, "busy": share(), "no_loader": no_loader}


def calls_of(contents: Sequence[bytes]) -> int:
    """Rows in one Arrow batch of these images, and so in one call of Spark's."""
    return max(1, ARROW_BYTES * len(contents) // sum(map(len, contents)))


def by_threads(net: Network, contents: Sequence[bytes], batch: int, plan: Plan) -> Labels:
    """A pool decodes two batches ahead; copies have a stream of their own and pinned memory, used again."""
    parts = list(_parts(contents, batch))
    slots = [empty(batch, pinned=plan.cuda) for _ in range(SLOTS)]
    outputs = torch.empty((len(contents), net.card.width), pin_memory=plan.cuda)
    copying = net.copies
    copied = [torch.cuda.Event(blocking=True) if plan.cuda else None for _ in slots]

    def start(number: int) -> list[Future[None]]:
        if (event := copied[number % SLOTS]) is not None:
            event.synchronize()
        rows = parts[number]
        slot = slots[number % SLOTS][: len(rows)]
        jobs = ((rows[i : i + JOB], slot[i : i + JOB]) for i in range(0, len(rows), JOB))
        return [pool.submit(_job, *job) for job in jobs]

    with ThreadPoolExecutor(plan.cores) as pool, torch.inference_mode():
        ahead = deque(start(number) for number in range(min(SLOTS - 1, len(parts))))
        for number, rows in enumerate(parts):
            for job in ahead.popleft():
                job.result()
            if number + SLOTS - 1 < len(parts):
                ahead.append(start(number + SLOTS - 1))
            pixels = _copy(slots[number % SLOTS][: len(rows)], copying, copied[number % SLOTS], plan)
            place = outputs[number * batch : number * batch + len(rows)]
            place.copy_(torch.softmax(score(net, pixels), 1), non_blocking=plan.cuda)
        plan.wait()
    labels: Labels = outputs.numpy().argmax(1)
    return labels


def _job(contents: Sequence[bytes], slots: Tensor) -> None:
    for content, slot in zip(contents, slots, strict=True):
        prepare(content, slot)


def _copy(pixels: Tensor, copying: Any, copied: Any, plan: Plan) -> Tensor:
    """Pinned pixels -> on the device, for the current stream; `copied` tells when the memory may be used again."""
    if copying is None:
        return pixels
    with torch.cuda.stream(copying):
        on_device = pixels.to(plan.device, non_blocking=True)
        copied.record(copying)
    compute = torch.cuda.current_stream(plan.device)
    compute.wait_event(copied)
    on_device.record_stream(compute)
    return on_device


class _Pieces(Dataset[Tensor]):
    """The images' pixels, `PIECE` at a time."""

    def __init__(self, contents: Sequence[bytes]) -> None:
        self.parts = list(_parts(contents, PIECE))

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, number: int) -> Tensor:
        return pixels_of(self.parts[number])


def _loader(plan: Plan, contents: Sequence[bytes]) -> DataLoader[Tensor]:
    """One worker a core, forked: they touch no GPU. They live as long as the loader."""
    return DataLoader(
        _Pieces(contents),
        batch_size=None,
        num_workers=plan.cores,
        pin_memory=plan.cuda,
        persistent_workers=True,
        prefetch_factor=4,
        timeout=60,
        multiprocessing_context="fork",
    )


def by_loader(net: Network, loader: DataLoader[Tensor], batch: int, plan: Plan) -> Labels:
    """Worker processes decode, a thread of torch's pins; pieces are joined to a batch on the device."""
    outputs: list[Tensor] = []
    pieces: list[Tensor] = []

    def forward() -> None:
        found = torch.softmax(score(net, torch.cat(pieces)), 1)
        pieces.clear()
        outputs.append(torch.empty(found.shape, pin_memory=plan.cuda).copy_(found, non_blocking=plan.cuda))

    with torch.inference_mode():
        for piece in loader:
            pieces.append(piece.to(plan.device, non_blocking=True))
            if sum(map(len, pieces)) >= batch:
                forward()
        if pieces:
            forward()
        plan.wait()
    labels: Labels = torch.cat(outputs).numpy().argmax(1)
    return labels


@contextmanager
def busy(net: Network, plan: Plan) -> Iterator[Callable[[], float]]:
    """The share of the block's wall time in which the network computed; CUDA events around each forward pass.

    Where the CPU starts kernels more slowly than the GPU runs them, the gaps between them count as busy.
    """
    forward = net.forward
    marks: list[tuple[Any, Any]] = []
    mark: Callable[[], Any] = _event if plan.cuda else time.perf_counter

    def timed(inputs: Tensor) -> Tensor:
        before = mark()
        output = forward(inputs)
        marks.append((before, mark()))
        return output

    net.forward = timed
    start = time.perf_counter()
    try:
        yield lambda: sum((b - a) if isinstance(a, float) else a.elapsed_time(b) / 1000 for a, b in marks) / wall
    finally:
        net.forward = forward
        plan.wait()
        wall = time.perf_counter() - start


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _labels(columns: dict[str, Any]) -> Labels:
    return np.asarray(columns["prediction"], dtype=np.int64)


def _parts(contents: Sequence[bytes], rows: int) -> Iterator[Sequence[bytes]]:
    return (contents[start : start + rows] for start in range(0, len(contents), rows))
