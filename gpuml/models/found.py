"""What the ``model`` Param names -> what makes its network, and how; nothing is built or downloaded yet."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from gpuml.spec import Preprocess


@dataclass(frozen=True)
class Built:
    """A network as its source gives it; labels and preprocess where the source knows them, or why it does not."""

    net: nn.Module
    labels: tuple[str, ...] = ()
    preprocess: Preprocess | None = None
    activation: str = "softmax"
    no_preprocess: str = ""


@dataclass(frozen=True)
class Found:
    """A source that was recognised.

    Parameters
    ----------
    key : JSON-able; with labels, preprocess and versions, equal keys lead to equal model files.
    build : makes the network; slow, may download. Called only when no model file of that key is in the cache.
    """

    key: dict[str, object]
    build: Callable[[], Built]


def did_you_mean(prefix: str, name: str, names: Sequence[str]) -> str:
    """A sentence with the names of a zoo that are close to a wrong one, to paste; "" if none is."""
    close = difflib.get_close_matches(name, names, n=3)
    return f" Did you mean {' or '.join(repr(prefix + match) for match in close)}?" if close else ""
