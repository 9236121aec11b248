"""The benchmark of architectures, on four small ones: the model file gives the network's logits, for many labels."""

from pathlib import Path

import pytest
import torch

from gpuml import Preprocess

BENCHMARKS = Path(__file__).parents[1] / "examples" / "benchmarks"


@pytest.fixture
def architectures(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import architectures

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine two threads that wait for one another took three times as long
    yield architectures
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "name",
    ["torchvision:mobilenet_v3_small", "torchvision:shufflenet_v2_x0_5", "timm:test_convnext2", "timm:test_vit"],
)
def test_a_model_file_gives_the_networks_logits_for_at_least_30_labels_of_48_images(architectures, name):
    row = architectures.measure(name)
    assert row.name == name
    assert row.difference <= 1e-4
    assert row.labels >= 30
    assert row.size_mb > 0.5


def test_a_file_that_gives_other_logits_is_found(architectures, monkeypatch):
    load = architectures.load

    def spoiled(path, device):
        network, card = load(path, device)
        return lambda rows: network(rows) + 0.01 * torch.arange(card.width), card

    monkeypatch.setattr(architectures, "load", spoiled)
    with pytest.raises(AssertionError, match="logits differ by"):
        architectures.measure("timm:test_vit")


def test_pixels_are_48_different_images(architectures):
    rows = architectures.pixels(Preprocess((32, 48), None))
    assert rows.shape == (48, 3, 32, 48)
    assert len(torch.unique(rows.flatten(1), dim=0)) == 48
