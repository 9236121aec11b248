"""What crosses to the GPU, what lies there, and what happens when it runs out -> bytes, and differences of outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gpubench.work import Config, Plan, network, repeated, server

#: Images in the two passes whose peaks are compared.
FEW, MANY = 1000, 4000


class Copied(TorchDispatchMode):
    """Counts the bytes of CPU tensors that are copied to another device inside the block, in this thread."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        aten = torch.ops.aten
        # In inference mode tensor.to arrives as itself, else as _to_copy.
        if function.overloadpacket in (aten.copy_, aten._to_copy, aten.to):
            source: Tensor = args[1 if function.overloadpacket is aten.copy_ else 0]
            if source.device.type == "cpu" and made.device.type != "cpu":
                self.bytes += source.numel() * source.element_size()
        return made


def copied(config: Config, plan: Plan, contents: Sequence[bytes]) -> float:
    """Bytes an image that go to the GPU, exactly; once the network is there."""
    serve, rows = server(config, plan), repeated(contents, 2 * config.batch)
    serve(rows)
    counted = Copied()
    with counted:
        serve(rows)
    return counted.bytes / len(rows)


def peaks(config: Config, plan: Plan, contents: Sequence[bytes]) -> dict[str, int]:
    """The most bytes that torch's tensors had on the GPU, in a call of few images and in one of many."""
    serve = server(config, plan)
    serve(repeated(contents, 2 * config.batch))
    return {str(images): _peak(plan, partial(serve, repeated(contents, images))) for images in (FEW, MANY)}


def out_of_memory(config: Config, plan: Plan, contents: Sequence[bytes]) -> dict[str, Any]:
    """With too little memory for a whole batch, but enough for a quarter: what came, beside what comes with enough.

    ``difference``: of the outputs, as a part of their length: ``|a - b| / |b|`` over all rows.
    """
    rows, net = repeated(contents, 3 * config.batch), network(config, plan)
    serve = server(config, plan, ("rawPrediction", "error"))
    quarter = server(Config(config.model, config.dtype, config.batch // 4), plan)
    needs = []
    for one in (quarter, serve):
        torch.cuda.empty_cache()
        needs.append(_peak(plan, partial(one, rows[: config.batch]), reserved=True))
    whole = np.stack(serve(rows)["rawPrediction"])
    most = (needs[0] + needs[1]) // 2
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(most / torch.cuda.get_device_properties(plan.device).total_memory)
    try:
        made, limit = serve(rows), net.batch_limit
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        net.batch_limit = None
    complete = len(made["error"]) == len(rows) and not any(made["error"])
    apart = np.linalg.norm(np.stack(made["rawPrediction"]) - whole) / np.linalg.norm(whole) if complete else None
    return {
        "bytes_of_a_quarter": needs[0],
        "bytes_of_a_batch": needs[1],
        "bytes_allowed": most,
        "batch": config.batch,
        "batch_that_fitted": limit,
        "complete": complete,
        "difference": None if apart is None else float(apart),
    }


def _peak(plan: Plan, work: Callable[[], Any], reserved: bool = False) -> int:
    plan.wait()
    torch.cuda.reset_peak_memory_stats(plan.device)
    work()
    plan.wait()
    return (torch.cuda.max_memory_reserved if reserved else torch.cuda.max_memory_allocated)(plan.device)
