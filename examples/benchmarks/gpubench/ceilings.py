"""One stage alone -> images/s that the whole cannot exceed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpubench.work import PREPROCESS, Config, Plan, empty, module, network, pixels_of, repeated, score, seconds
from gpuml.worker.preprocess import normalise

#: Sets of inputs used in turn, so that the caches of CPU and GPU hold none of the next.
SETS = 4

#: Seconds that a timed round on a GPU takes at least.
LEAST = 0.5


def model(config: Config, plan: Plan, contents: Sequence[bytes]) -> dict[str, float]:
    """Normalise and forward from uint8 batches that lie on the device.

    ``model_file``: what gpuml runs. ``bfloat16_weights``: torchvision's own module with its weights cast once, no
    autocast, channels last; what the model file and autocast cost shows beside it.
    """
    net = network(config, plan)
    sets = _sets(config.batch, contents, plan)
    rates = {"model_file": _rate(plan, partial(score, net), sets)}
    if config.dtype == "bfloat16":
        plain = module(config.model).to(plan.device, torch.bfloat16)
        plain.to(memory_format=torch.channels_last)
        rates["bfloat16_weights"] = _rate(
            plan, lambda pixels: plain(normalise(pixels, PREPROCESS).to(torch.bfloat16)).float(), sets
        )
    return rates


def copies(plan: Plan) -> dict[str, dict[str, float]]:
    """From the host to the GPU, by rows a batch and kind of memory; images/s and GB/s."""
    rates = {}
    for batch in plan.batches:
        for pinned in (False, True):
            sources = [empty(batch, pinned=pinned).random_() for _ in range(SETS)]
            target = sources[0].to(plan.device)
            rate = _rate(plan, partial(target.copy_, non_blocking=True), sources)
            size = target[0].numel() * target.element_size()
            kind = "pinned" if pinned else "pageable"
            rates[f"{kind} {batch}"] = {"images_per_s": rate, "gigabytes_per_s": rate * size / 1e9}
    return rates


def decoding(plan: Plan, contents: Sequence[bytes]) -> dict[str, float]:
    """Decode, resize and crop in a pool of threads, by their number; one job an image, as in gpuml's worker."""
    rates = {}
    for threads in sorted({count for count in (1, 4, 8, 16) if count < plan.cores} | {plan.cores}):
        rows = repeated(contents, max(plan.distinct // 2, min(plan.images, plan.distinct // 2 * threads)))
        with ThreadPoolExecutor(threads) as pool:
            pixels_of(rows[: 2 * threads], pool)
            taken = [seconds(plan, partial(pixels_of, rows, pool)) for _ in range(plan.rounds)]
        rates[str(threads)] = len(rows) / statistics.median(taken)
    return rates


def _sets(batch: int, contents: Sequence[bytes], plan: Plan) -> list[Tensor]:
    """Different images in each, while there are enough."""
    with ThreadPoolExecutor(plan.cores) as pool:
        pixels = pixels_of(contents[: SETS * batch], pool)
    turns = [torch.arange(number * batch, (number + 1) * batch) % len(pixels) for number in range(SETS)]
    return [pixels[turn].contiguous(memory_format=torch.channels_last).to(plan.device) for turn in turns]


def _rate(plan: Plan, work: Callable[[Tensor], Any], sets: Sequence[Tensor]) -> float:
    """Rows a second: median of the plan's rounds, after two passes through the sets untimed."""

    def through(times: int) -> None:
        for _ in range(times):
            for pixels in sets:
                work(pixels)

    with torch.inference_mode():
        through(1)
        once = seconds(plan, partial(through, 1))
        times = max(1, round(LEAST / once)) if plan.cuda else 1
        taken = [seconds(plan, partial(through, times)) for _ in range(plan.rounds)]
    return times * sum(map(len, sets)) / statistics.median(taken)
