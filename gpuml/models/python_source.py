"""``python:package.module:factory`` -> the network that the user's own function makes, in the process that runs it.

The one source without a model file: every worker imports the function and calls it. It is the user's code, and runs
with the worker's rights.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable

import torch
from torch import Tensor, nn

from gpuml.errors import ModelError
from gpuml.models.cards import Card
from gpuml.models.export import checked_width, memory_format, plain_torch, telling_lines, to_channels_last
from gpuml.spec import PYTHON, Preprocess


def check(model: str) -> tuple[str, str]:
    """Module and function that a source names; nothing is imported.

    Raises
    ------
    ModelError
        It names none.
    """
    match = re.fullmatch(rf"{PYTHON}([^\W\d]\w*(?:\.[^\W\d]\w*)*):([^\W\d]\w*(?:\.[^\W\d]\w*)*)", model)
    if match is None:
        raise ModelError(
            f"model={model!r}: write '{PYTHON}package.module:function', for a function without arguments that returns "
            f"the network"
        )
    return match[1], match[2]


def load(
    model: str, labels: tuple[str, ...], preprocess: Preprocess, device: torch.device
) -> tuple[Callable[[Tensor], Tensor], Card]:
    """Import the function, call it, and put its network on a device, once it was seen on the CPU to serve row by row.

    Raises
    ------
    ModelError
        It cannot be imported, fails, or returns anything but a network from (batch, 3, height, width) to (batch,
        classes); or the labels do not fit.
    """
    module_name, function = check(model)
    try:
        factory: object = importlib.import_module(module_name)
        for name in function.split("."):
            factory = getattr(factory, name)
    except Exception as error:  # an import runs any code
        raise ModelError(
            f"model={model!r} cannot be imported here ({telling_lines(error)}); the module must be importable on every "
            f"node: install it there, or send it with spark.addArtifacts(..., pyfile=True) or --py-files"
        ) from error
    try:
        net = factory()  # type: ignore[operator]
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise  # the device's trouble
    except Exception as error:
        raise ModelError(f"model={model!r}: the function failed: {telling_lines(error)}") from error
    if not isinstance(net, nn.Module):
        raise ModelError(f"model={model!r} returned a {type(net).__name__}, not a torch.nn.Module")
    net = net.cpu().float().eval()
    for parameter in net.parameters():  # not net.requires_grad_: script modules refuse it
        parameter.requires_grad_(False)
    with plain_torch():
        width = checked_width(net, net, preprocess.size, name=f"model={model!r}")
        card = Card(preprocess, width, labels, memory_format=memory_format(net, preprocess.size))
    net = net.to(device)
    if card.memory_format == "channels_last":
        to_channels_last(net)
    return net, card
