"""Batch normalisations become part of the convolutions before them, and only where that changes nothing."""

import pytest
import torch
from conftest import PLAIN
from torch import nn

from gpuml import save_model
from gpuml.models.export import export
from gpuml.models.file import load
from gpuml.models.fold import fold_batch_norm

ROWS = torch.rand((3, 3, 32, 32), generator=torch.Generator().manual_seed(2))


def settled(net):
    """Statistics, scales and shifts that are not those of a new network."""
    generator = torch.Generator().manual_seed(1)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.running_mean, module.weight, module.bias):
                if tensor is not None:
                    tensor.data.copy_(torch.randn(tensor.shape, generator=generator))
            module.running_var.copy_(torch.rand(module.running_var.shape, generator=generator) + 0.1)
    return net.eval()


def normalisations(program):
    return sum(node.target is torch.ops.aten.batch_norm.default for node in program.graph.nodes)


class Net(nn.Module):
    """convolve, then normalise; `between` is what else happens to the convolution's output."""

    def __init__(self, between=None, normalise=None, **options):
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv2d(3, 6, 3, padding=1, **options)
        self.normalise = normalise or nn.BatchNorm2d(6)
        self.between = between or (lambda net, x: net.normalise(net.convolution(x)))

    def forward(self, x):
        return self.between(self, x).mean((2, 3))


@pytest.mark.parametrize(
    "net",
    [
        Net(),
        Net(bias=False),
        Net(groups=3),
        Net(stride=2, dilation=2, bias=False),
        Net(normalise=nn.BatchNorm2d(6, affine=False)),
        Net(normalise=nn.BatchNorm2d(6, affine=False), bias=False),
        Net(normalise=nn.BatchNorm2d(6, eps=0.1, momentum=0.5)),
    ],
    ids=str,
)
def test_a_normalisation_after_a_convolution_is_folded(net):
    program = export(settled(net), (32, 32))
    assert normalisations(program) == 0
    with torch.inference_mode():
        torch.testing.assert_close(program.module()(ROWS), net(ROWS), rtol=1e-5, atol=1e-6)


def both(net, x):
    y = net.convolution(x)
    return net.normalise(y) + y


def twice(net, x):
    return net.normalise(net.convolution(x)) + net.convolution(x * 2)


def alone(net, x):
    return net.normalise(torch.cat([x, x], 1))


def shared(net, x):
    return net.normalise(net.convolution(x)) * net.normalise(torch.cat([x, x], 1))


@pytest.mark.parametrize("between", [both, twice, alone, shared], ids=lambda between: between.__name__)
def test_what_serves_something_else_too_is_left_alone(between):
    net = settled(Net(between))
    program = export(net, (32, 32))
    assert normalisations(program) >= 1
    with torch.inference_mode():
        torch.testing.assert_close(program.module()(ROWS), net(ROWS))


def test_a_normalisation_by_the_batchs_own_statistics_is_left_alone():
    net = Net(lambda net, x: nn.functional.batch_norm(net.convolution(x), None, None, training=True)).eval()
    program = torch.export.export(net, (ROWS,))
    assert fold_batch_norm(program) == 0
    assert normalisations(program) == 1


def test_a_folded_network_is_written_and_read_again(tmp_path):
    net = settled(Net(bias=False))
    save_model(net, tmp_path / "net.pt2", preprocess=PLAIN)
    forward, _ = load(tmp_path / "net.pt2", torch.device("cpu"))
    with torch.inference_mode():
        torch.testing.assert_close(forward(ROWS), net(ROWS), rtol=1e-5, atol=1e-6)
    assert all(torch.isfinite(tensor).all() for tensor in forward.state_dict().values())
    assert torch.equal(net.convolution.weight, Net(bias=False).convolution.weight)  # the user's stays as it is
