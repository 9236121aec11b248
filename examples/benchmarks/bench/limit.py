"""The limit: the model file in a plain PyTorch loop, with gpuml's own decode and preprocessing and no Spark between.

Each loop has a few shapes; which one is fastest depends on the network, so each is tried before it is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from bench import data
from bench.serve import Job, Setting
from bench.workloads import PREPROCESS, network, outputs
from gpuml.models.file import load
from gpuml.spec import MAX_PIXELS
from gpuml.worker.decode import decode, decode_struct
from gpuml.worker.preprocess import normalise, resize_crop

#: Rows in a forward pass, per thread: as gpuml does on a CPU, and faster here too than passes of 64.
ROWS = 8


def limit(setting: Setting) -> Job:
    """The fastest of six loops: a pool of threads that decodes ahead, or does all; a DataLoader."""
    forward, cores = _forward(setting), setting.cores
    workers = _workers(cores)
    return _fastest(
        {
            "threads decode, torch has 1": partial(_ahead, forward, cores, 1),
            "threads decode, torch has all": partial(_ahead, forward, cores, cores),
            "threads, each for itself": partial(_apart, forward, cores),
            "DataLoader without processes": partial(_loaded, forward, _workers(0), cores),
            "DataLoader with processes, torch has 1": partial(_loaded, forward, workers, 1),
            "DataLoader with processes, torch has all": partial(_loaded, forward, workers, cores),
        },
        setting,
    )


def pixels_of(contents: Iterable[Any]) -> Tensor:
    """Encoded images, or image structs, -> uint8 (n, 3, 224, 224) in channels-last memory, by gpuml's own path."""
    contents = list(contents)
    batch = torch.empty((len(contents), *PREPROCESS.size, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    for content, slot in zip(contents, batch, strict=True):
        resize_crop(decoded(content), PREPROCESS, out=slot)
    return batch


def decoded(content: Any) -> Tensor:
    """One image -> uint8 (3, height, width)."""
    if isinstance(content, dict):
        fields = (content[name] for name in ("data", "height", "width", "nChannels", "mode"))
        return decode_struct(*fields, max_pixels=MAX_PIXELS, alpha="white")
    return decode(content, max_pixels=MAX_PIXELS, alpha="white")


Forward = Callable[[Tensor], list[int]]


def _forward(setting: Setting) -> Forward:
    """Pixels -> labels; the probabilities are made too, as every peer makes them."""
    if setting.network == "accelerator":  # sleeps in Python, so it has no model file
        net, channels_last = network("accelerator", setting.models), True
    else:
        net, card = load(Path(setting.models) / f"{setting.network}.pt2", torch.device("cpu"))
        channels_last = card.memory_format == "channels_last"

    def forward(pixels: Tensor) -> list[int]:
        inputs = normalise(pixels, PREPROCESS)
        return outputs(net, inputs if channels_last else inputs.contiguous())["prediction"].astype(int).tolist()

    return forward


@dataclass(frozen=True)
class _Loop:
    """A loop over some files; the note names it in the table."""

    note: str
    run: Callable[[list[Path]], dict[int, int]]
    files: list[Path]

    def __call__(self, collect: bool) -> dict[int, int]:
        return self.run(self.files)


def _fastest(shapes: dict[str, Callable[[list[Path]], dict[int, int]]], setting: Setting) -> Job:
    """The shape that takes the least time for a part of the files: all are tried, then the better half twice more."""
    files = sorted(Path(setting.data).glob("*.parquet"))
    tried: dict[str, float] = {}

    def try_(name: str) -> None:
        start = time.perf_counter()
        shapes[name](files[: setting.cores])
        tried[name] = min(tried.get(name, float("inf")), time.perf_counter() - start)

    for name in shapes:
        try_(name)
    # In turn: what disturbs the machine for a moment must not choose among them.
    for name in 2 * sorted(shapes, key=lambda name: tried[name])[: len(shapes) // 2]:
        try_(name)
    best = min(tried, key=lambda name: tried[name])
    print(f"{setting.network}: {', '.join(f'{name} {seconds:.3f} s' for name, seconds in tried.items())}")  # the log
    return _Loop(best, shapes[best], files)


def _ahead(forward: Forward, cores: int, torch_threads: int, files: list[Path]) -> dict[int, int]:
    """Threads decode; this thread runs the network on what is ready, while they decode the next file."""
    torch.set_num_threads(torch_threads)
    labels: dict[int, int] = {}

    def finish(ids: list[int], batches: list[Any]) -> None:
        labels.update(zip(ids, (label for batch in batches for label in forward(batch.result())), strict=True))

    with ThreadPoolExecutor(cores) as pool:
        before: tuple[list[int], list[Any]] = ([], [])
        for path in files:
            ids, contents = data.read(path)
            batches = [pool.submit(pixels_of, part) for part in _parts(contents, ROWS * torch_threads)]
            finish(*before)
            before = ids, batches
        finish(*before)
    return labels


def _apart(forward: Forward, cores: int, files: list[Path]) -> dict[int, int]:
    """Each thread takes whole files: reads, decodes, and runs the network on one torch thread."""

    def one(path: Path) -> dict[int, int]:
        ids, contents = data.read(path)
        return dict(
            zip(ids, (label for part in _parts(contents, ROWS) for label in forward(pixels_of(part))), strict=True)
        )

    torch.set_num_threads(1)
    labels: dict[int, int] = {}
    # OpenMP holds the number of its threads per thread that uses it.
    with ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for part in pool.map(one, files):
            labels.update(part)
    return labels


class _Pixels(IterableDataset[tuple[list[int], Tensor]]):
    """Batches of pixels of the files; each of a loader's workers takes its share of them."""

    files: list[Path] = []

    def __iter__(self) -> Iterator[tuple[list[int], Tensor]]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for path in self.files[first::step]:
            ids, contents = data.read(path)
            rows = iter(zip(ids, contents, strict=True))
            while part := list(islice(rows, 64)):
                yield [number for number, _ in part], pixels_of(content for _, content in part)


def _workers(count: int) -> DataLoader[tuple[list[int], Tensor]]:
    return DataLoader(_Pixels(), batch_size=None, num_workers=count)  # each two ahead, as is its default


def _loaded(
    forward: Forward, batches: DataLoader[tuple[list[int], Tensor]], torch_threads: int, files: list[Path]
) -> dict[int, int]:
    torch.set_num_threads(torch_threads)
    batches.dataset.files = files
    labels: dict[int, int] = {}
    for ids, pixels in batches:
        found = (label for part in pixels.split(ROWS * torch_threads) for label in forward(part))
        labels.update(zip(ids, found, strict=True))
    return labels


def _parts(contents: list[Any], rows: int) -> Iterator[list[Any]]:
    return (contents[start : start + rows] for start in range(0, len(contents), rows))
