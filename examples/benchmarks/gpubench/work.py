"""A device and a plan -> the images, model files and requests that every step shares; all seeded."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from bench.data import KINDS, photo
from torch import Tensor, nn

from gpuml import Preprocess, save_model
from gpuml.models.store import hash_of
from gpuml.spec import MAX_PIXELS, Spec
from gpuml.worker import cache
from gpuml.worker.decode import decode
from gpuml.worker.device import Task
from gpuml.worker.preprocess import normalise, resize_crop
from gpuml.worker.serve import serve

PREPROCESS = Preprocess(resize=256, crop=224)

#: What Spark puts into an Arrow batch at most (spark.sql.execution.arrow.maxBytesPerBatch), and so into one call.
ARROW_BYTES = 64 << 20


@dataclass(frozen=True)
class Plan:
    """How much is measured, and on what.

    Parameters
    ----------
    device : where networks run.
    cores : threads that decode, and worker processes of the DataLoader.
    distinct : different images; a pass repeats them.
    images : in a timed pass; a half of them where the network is slow.
    batches : rows per forward pass, largest first.
    rounds : timed passes of each contender.
    folder : model files lie there.
    """

    device: torch.device
    cores: int
    distinct: int
    images: int
    batches: tuple[int, ...]
    rounds: int
    folder: Path

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def wait(self) -> None:
        """Until the GPU has done all that it was given."""
        if self.cuda:
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class Config:
    """A network, its dtype, and rows per forward pass."""

    model: str
    dtype: str
    batch: int

    def __str__(self) -> str:
        return f"{self.model} {self.dtype} {self.batch}"


def photos(plan: Plan) -> list[bytes]:
    """500x375 JPEGs of quality 90, as in the other benchmarks."""
    with ThreadPoolExecutor(plan.cores) as pool:
        return list(pool.map(partial(photo, kind=KINDS["jpeg"]), range(plan.distinct)))


def repeated(contents: Sequence[bytes], images: int) -> list[bytes]:
    return [contents[number % len(contents)] for number in range(images)]


def prepare(content: bytes, slot: Tensor) -> None:
    """One image into its slot, uint8 (3, height, width), by gpuml's own path."""
    resize_crop(decode(content, max_pixels=MAX_PIXELS, alpha="white"), PREPROCESS, out=slot)


def empty(rows: int, *, pinned: bool = False) -> Tensor:
    """Memory for pixels: uint8 (rows, 3, height, width), channels last."""
    return torch.empty((rows, *PREPROCESS.size, 3), dtype=torch.uint8, pin_memory=pinned).permute(0, 3, 1, 2)


def pixels_of(contents: Sequence[bytes], pool: ThreadPoolExecutor | None = None) -> Tensor:
    """Uint8 (n, 3, height, width), channels last; with a pool, one of its jobs an image, as in gpuml's worker."""
    pixels = empty(len(contents))
    for _ in (pool.map if pool else map)(prepare, contents, pixels):
        pass
    return pixels


def small() -> nn.Module:
    """For a dry run: convolution, batch norm and a linear layer, in milliseconds."""
    features = nn.Sequential(nn.Conv2d(3, 8, 7, 4), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    return nn.Sequential(features, nn.Linear(32, 10))


def module(name: str) -> nn.Module:
    """A network with seeded random weights, in evaluation mode: "small" or one of torchvision's."""
    torch.manual_seed(0)
    if name == "small":
        return small().eval()
    from torchvision import models

    net: nn.Module = getattr(models, name)()
    return net.eval()


def model_file(name: str, plan: Plan, contents: Sequence[bytes]) -> Path:
    """The network's model file, written at the first call; its outputs differ from image to image."""
    path = plan.folder / f"{name}.pt2"
    if not path.is_file():
        net = module(name).to(plan.device)
        _calibrate(net, normalise(pixels_of(contents[:32]).to(plan.device), PREPROCESS))
        save_model(net.cpu(), path, preprocess=PREPROCESS)
    return path


def _calibrate(net: nn.Module, rows: Tensor) -> None:
    """Batch norms get the rows' statistics, outputs mean 0 and standard deviation 3 over them.

    The outputs of a deep random network are nearly equal for all images; comparing them would prove nothing.
    """
    for part in net.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.momentum = 1.0
            part.train()
    linear = [part for part in net.modules() if isinstance(part, nn.Linear)][-1]
    with torch.no_grad():
        net(rows)
        net.eval()
        if not linear.weight.any():  # vit_b_16 begins with zeros
            nn.init.normal_(linear.weight)
        outputs = net(rows)
        scale = 3 / outputs.std(0)
        linear.weight.mul_(scale[:, None])
        linear.bias.sub_(outputs.mean(0)).mul_(scale)


@lru_cache
def _hash(path: Path) -> str:
    return hash_of(path)


def network(config: Config, plan: Plan) -> cache.Network:
    """The one that gpuml's worker holds in this process for the config; its file is there."""
    path = plan.folder / f"{config.model}.pt2"
    return cache.network(_hash(path), plan.device, config.dtype, lambda: path)


def score(net: cache.Network, pixels: Tensor) -> Tensor:
    """Uint8 on the network's device -> float32 (n, width): what a worker computes, in the caller's stream."""
    inputs = normalise(pixels, net.card.preprocess)
    if net.card.memory_format == "contiguous":
        inputs = inputs.contiguous()
    dtype = getattr(torch, net.dtype)
    with torch.autocast(net.device.type, dtype=dtype, enabled=dtype != torch.float32):
        return net.forward(inputs).float()


Served = Callable[[Sequence[bytes]], dict[str, Any]]


def server(config: Config, plan: Plan, outputs: tuple[str, ...] = ("prediction", "probability")) -> Served:
    """Images -> columns, as a Spark task with the GPU's address and all of the plan's cores serves a call."""
    path = plan.folder / f"{config.model}.pt2"
    spec = Spec(_hash(path), batch_size=config.batch, device=plan.device.type, dtype=config.dtype, outputs=outputs)
    task = Task(addresses=("0",) if plan.cuda else (), cpus=plan.cores)
    return lambda contents: serve(contents, spec, task, lambda: path)


def seconds(plan: Plan, work: Callable[[], Any]) -> float:
    """Wall time, with the GPU idle before and after."""
    plan.wait()
    start = time.perf_counter()
    work()
    plan.wait()
    return time.perf_counter() - start
