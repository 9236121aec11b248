"""A model file and the name of a layer -> a model file that gives what that layer gives: features.

The cut is made in the exported graph, so it serves networks of every source: zoos, files, a notebook's own class.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from gpuml.errors import ModelError
from gpuml.models import store
from gpuml.models.cards import Card, checked_kind
from gpuml.models.export import checked_width, export, memory_format, plain_torch, sample_rows
from gpuml.models.file import open_program, write
from gpuml.spec import OUTPUT
from gpuml.version import __version__

_CONVOLUTION = torch.ops.aten.conv2d.default
_LINEAR = torch.ops.aten.linear.default


def features_of(sha256: str, layer: str) -> str:
    """Make sure that the model file of a layer's features is in the cache; returns its sha256.

    Parameters
    ----------
    sha256 : of a model file in the cache.
    layer : name of a module, such as ``"layer3"``; ``""`` = the input of the last linear layer or 1x1 convolution, the
        classifier; `OUTPUT` = the network's own output.

    Raises
    ------
    ModelError
        There is no such layer, it gives no features, or the file is TorchScript, which cannot be cut.
    """
    if layer == OUTPUT:
        return sha256
    request: dict[str, object] = {"file": sha256, "layer": layer, "torch": torch.__version__, "gpuml": __version__}
    return store.once(request, lambda new: save_features(store.path_of(sha256), layer, new))


def save_features(source: Path, layer: str, path: Path) -> None:
    """Write the model file of a layer's features; parameters and errors as of `features_of`."""
    with plain_torch():
        kind, found, program = open_program(source)
        assert found is not None, "a file of the cache has a card"
        card = checked_kind(found, Card, f"layer={layer!r}: the model file")
        if kind == "torchscript":
            raise ModelError(
                f"layer={layer!r}: the network is TorchScript, which cannot be cut at a layer. Write it with "
                f"gpuml.save_model from the nn.Module, if torch.export takes it; or setLayer({OUTPUT!r}): features are "
                f"then the network's own output"
            )
        size = card.preprocess.size
        network = program.module()
        _cut(network, layer)
        features = _Features(network, _pooled(network, layer, size))
        cut = export(features, size)
        width = checked_width(cut.module(), features, size, name=f"layer {layer!r}" if layer else "the cut network")
        made = Card(card.preprocess, width, activation="none", memory_format=memory_format(cut.module(), size))
        write(cut, path, made)


class _Features(nn.Module):
    """A cut network; maps of features are averaged over height and width."""

    def __init__(self, network: nn.Module, pooled: bool) -> None:
        super().__init__()
        self.network = network
        self.pooled = pooled

    def forward(self, rows: Tensor) -> Tensor:
        given: Tensor = self.network(rows)
        return given.mean((2, 3)) if self.pooled else given


def _cut(network: GraphModule, layer: str) -> None:
    """Let the graph end at a layer, in place; what only the rest needed goes."""
    graph = network.graph
    end = next(node for node in graph.nodes if node.op == "output")
    (output,) = end.all_input_nodes
    end.replace_input_with(output, _last_of(graph, layer) if layer else _before_classifier(network, output))
    graph.eliminate_dead_code()
    network.delete_all_unused_submodules()
    network.recompile()


def _last_of(graph: Graph, layer: str) -> Node:
    """The last node of a module: its output, of its last call if there are more."""
    found: list[Node] = [node for node in graph.nodes if node.op == "call_function" and layer in _modules(node)]
    if found:
        return found[-1]
    names = list(dict.fromkeys(name for node in graph.nodes for name in _modules(node)))
    close = difflib.get_close_matches(layer, names, n=3)
    outer = [name for name in names if "." not in name]
    raise ModelError(
        f"layer={layer!r}: the network has no such layer. "
        + (f"Did you mean {' or '.join(map(repr, close))}? " if close else "")
        + f"Its outermost are {', '.join(map(repr, outer[:20]))}; {OUTPUT!r} is its own output"
    )


def _modules(node: Node) -> list[str]:
    """Names of the modules whose forward() a node is part of, the outermost first."""
    return [name for name, _ in (node.meta.get("nn_module_stack") or {}).values() if name]


def _before_classifier(network: GraphModule, output: Node) -> Node:
    """The input of the last linear layer or 1x1 convolution, if all that the output knows of the image passes there."""
    nodes = list(network.graph.nodes)
    image = next(node for node in nodes if node.op == "placeholder")
    leading = _ancestors([output])
    heads = [node for node in nodes if node in leading and _is_head(network, node)]
    if heads and image not in _ancestors([output], but=heads[-1]):
        features: Node = heads[-1].args[0]
        return features
    found = "it has none"
    if heads:
        found = (
            f"the last of them, in {(_modules(heads[-1]) or ['the network itself'])[-1]!r}, is one branch of several"
        )
    raise ModelError(
        f"layer='': the network does not end in a linear layer or a 1x1 convolution before which its features stand "
        f"({found}). Name a layer with setLayer(...); {OUTPUT!r} is the network's own "
        f"output, for one that gives features already"
    )


def _is_head(network: GraphModule, node: Node) -> bool:
    if node.target is _LINEAR:
        return True
    if node.target is not _CONVOLUTION:
        return False
    kernel = node.args[1]
    assert isinstance(kernel, Node)
    return kernel.op == "get_attr" and tuple(_attribute(network, str(kernel.target)).shape[2:]) == (1, 1)


def _attribute(network: nn.Module, name: str) -> Tensor:
    value: Any = network
    for part in name.split("."):
        value = getattr(value, part)
    assert isinstance(value, Tensor)
    return value


def _ancestors(of: Iterable[Node], but: Node | None = None) -> set[Node]:
    """These nodes and all that they are made of; what leads to them through `but` alone is left out."""
    found: set[Node] = set()
    ahead = list(of)
    while ahead:
        node = ahead.pop()
        if node is not but and node not in found:
            found.add(node)
            ahead += node.all_input_nodes
    return found


def _pooled(network: nn.Module, layer: str, size: tuple[int, int]) -> bool:
    """Whether a cut network gives maps (batch, channels, height, width), not features (batch, width)."""
    with torch.inference_mode():
        given = network(sample_rows(size, 2))
    shape = tuple(given.shape) if isinstance(given, Tensor) else ()
    if len(shape) == 2:
        return False
    # Maps have the image's proportions, to a pixel: else it is (batch, height, width, channels), or tokens.
    if len(shape) == 4 and abs(shape[2] * size[1] - shape[3] * size[0]) <= max(size):
        return True
    what = f"(batch, {', '.join(map(str, shape[1:]))})" if shape else f"a {type(given).__name__}"
    raise ModelError(
        f"layer={layer!r} gives {what}; features have the shape (batch, width), or (batch, channels, height, width), "
        f"which is averaged over height and width. Choose another layer, such as one after the pooling"
    )
