"""A model file, cut at a layer: what comes out is what the network itself has there."""

import numpy as np
import pytest
import torch
from conftest import PLAIN, Pooled, encoded
from PIL import Image
from torch import nn
from torchvision import models as zoo

from gpuml import ImageFeaturizer, ModelError, ParamError, Preprocess, save_model
from gpuml.models import features, store
from gpuml.models.export import jit, sample_rows
from gpuml.models.file import load, read_card
from gpuml.models.sources import resolve

SMALL = Preprocess(resize=64, crop=64)


class Two(nn.Module):
    """Two heads whose outputs are averaged, as in distilled networks."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(3, 4)

    def forward(self, x):
        return (self.a(x.mean((2, 3))) + self.b(x.amax((2, 3)))) / 2


class LastChannels(nn.Module):
    """Maps whose channels come last, as in Swin transformers."""

    def __init__(self):
        super().__init__()
        self.maps = nn.Conv2d(3, 8, 4, 4)
        self.turned = nn.ReLU()
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.turned(self.maps(x).permute(0, 2, 3, 1))
        return self.head(x.mean((1, 2)))


def held(net, preprocess=SMALL, **options):
    with store.incoming() as path:
        save_model(net, path, preprocess=preprocess, **options)
        return store.add(path)


def given(sha256, rows):
    network, card = load(store.path_of(sha256), torch.device("cpu"))
    with torch.inference_mode():
        return network(rows), card


@pytest.fixture(scope="module")
def resnet():
    torch.manual_seed(0)
    return zoo.resnet18().eval()


@pytest.fixture(scope="module")
def resnet_file(resnet, cache_home):
    return held(resnet, labels=[f"class {i}" for i in range(1000)])


def test_features_are_the_input_of_the_last_linear_layer(resnet, resnet_file):
    rows = sample_rows(SMALL.size, 3)
    made, card = given(features.features_of(resnet_file, ""), rows)
    headless = zoo.resnet18()
    headless.load_state_dict(resnet.state_dict())
    headless.fc = nn.Identity()
    with torch.inference_mode():
        wanted = headless.eval()(rows)
    assert made.shape == (3, card.width) == (3, 512)
    assert torch.allclose(made, wanted, rtol=1e-4, atol=1e-4)
    assert (card.labels, card.activation, card.preprocess) == ((), "none", SMALL)


@pytest.mark.parametrize("layer", ["layer3", "layer2.1.relu", "avgpool"])
def test_a_named_layer_is_averaged_over_its_maps(resnet, resnet_file, layer):
    rows, seen = sample_rows(SMALL.size, 2), []
    hook = resnet.get_submodule(layer).register_forward_hook(lambda module, inputs, output: seen.append(output))
    with torch.inference_mode():
        resnet(rows)
    hook.remove()
    made, _ = given(features.features_of(resnet_file, layer), rows)
    assert torch.allclose(made, seen[-1].mean((2, 3)), rtol=1e-4, atol=1e-4)


def test_a_1x1_convolution_is_a_classifier_too():
    torch.manual_seed(0)
    net = zoo.squeezenet1_1().eval()
    rows = sample_rows(SMALL.size, 2)
    made, _ = given(features.features_of(held(net), ""), rows)
    with torch.inference_mode():
        assert torch.allclose(made, net.features(rows).mean((2, 3)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["timm:test_vit.r160_in1k", "timm:test_convnext.r160_in1k"])
def test_other_zoos_and_kinds_of_networks_are_cut_as_timm_cuts_them(name):
    import timm

    sha256 = resolve(name, "none")
    rows = sample_rows(read_card(store.path_of(sha256)).preprocess.size, 2)
    made, card = given(features.features_of(sha256, ""), rows)
    torch.manual_seed(0)
    net = timm.create_model(name.partition(":")[2], num_classes=0)
    assert card.width == net.num_features == made.shape[1]
    assert made.std() > 0


def test_the_cut_file_has_no_classifier_and_is_made_once(resnet_file, monkeypatch):
    made = features.features_of(resnet_file, "")
    # 513,000 numbers of the classifier are gone
    assert store.path_of(resnet_file).stat().st_size - store.path_of(made).stat().st_size > 4 * 500_000
    monkeypatch.setattr(features, "save_features", lambda *arguments: pytest.fail("made again"))
    assert features.features_of(resnet_file, "") == made


def test_the_own_output_is_the_file_itself(resnet_file):
    assert features.features_of(resnet_file, "output") == resnet_file


@pytest.mark.parametrize(
    ("net", "layer", "message"),
    [
        (Two(), "", r"in 'b', is one branch of several\). Name a layer"),
        (nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), "", r"it has none\). Name a layer"),
        (zoo.resnet18(num_classes=5), "layer33", "no such layer. Did you mean 'layer3'"),
        (zoo.resnet18(num_classes=5), "nothing", "Its outermost are 'conv1'"),
        (LastChannels(), "maps", None),
        (LastChannels(), "turned", r"gives \(batch, 16, 16, 8\); features have the shape"),
    ],
)
def test_what_gives_no_features_is_refused_with_what_to_do(net, layer, message):
    sha256 = held(net)
    if message is None:
        assert read_card(store.path_of(features.features_of(sha256, layer))).width == 8
        return
    with pytest.raises(ModelError, match=message):
        features.features_of(sha256, layer)


def test_torchscript_is_refused_unless_its_own_output_is_wanted():
    sha256 = held(jit("script", Pooled()), PLAIN)
    with pytest.raises(ModelError, match=r"TorchScript, which cannot be cut.*setLayer\('output'\)"):
        features.features_of(sha256, "")
    assert features.features_of(sha256, "output") == sha256


def test_predict_gives_vectors_and_reasons():
    stage = ImageFeaturizer.from_module(Pooled(), preprocess=PLAIN)
    made = stage.predict([encoded(0), b"broken", encoded(1)])
    assert made.columns.tolist() == ["features", "featuresError"]
    assert made.features[1] is None
    assert made.featuresError[1].startswith("not_image: ")
    assert (made.features[0].dtype, made.features[0].shape) == (np.float32, (3,))


def test_normalized_vectors_have_length_one_and_zeros_stay():
    class Relu(Pooled):
        def forward(self, x):
            return torch.relu(x.mean((2, 3)) - 0.5) * 1e-20

    stage = ImageFeaturizer.from_module(Relu(), preprocess=PLAIN, layer="output", normalize=True)
    made = stage.predict([Image.new("RGB", (32, 32), "white"), Image.new("RGB", (32, 32), "black")])
    assert made.features[0].tolist() == pytest.approx([3**-0.5] * 3)
    assert made.features[1].tolist() == [0, 0, 0]


def test_another_layer_is_another_file_and_batches_do_not_matter():
    stage = ImageFeaturizer.from_module(zoo.resnet18(num_classes=5), preprocess=SMALL)
    first = stage.predict([encoded(0), encoded(1)]).features
    assert stage._held is not None
    assert stage.setBatchSize(1)._held is not None
    again = stage.predict([encoded(0), encoded(1)]).features
    assert all(abs(a - b).max() < 1e-4 for a, b in zip(first, again, strict=True))
    assert stage.setLayer("layer2")._held is None
    assert stage.predict([encoded(0)]).features[0].shape == (128,)


def test_code_of_the_workers_is_not_cut():
    stage = ImageFeaturizer(model="python:somewhere:network", preprocess=PLAIN)
    with pytest.raises(ParamError, match=r"is not cut; let it give the features, and setLayer\('output'\)"):
        stage.predict([encoded(0)])


def test_a_featurizer_has_no_labels():
    assert not ImageFeaturizer().hasParam("labels")
    with pytest.raises(TypeError, match="labels"):
        ImageFeaturizer(labels=["a"])
