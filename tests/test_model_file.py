"""save_model and load: the file does what the network does, or the network is refused with the reason."""

import copy
import hashlib
import json
import os
import shutil
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from conftest import PLAIN, Pooled, encoded
from torch import nn

import gpuml
from gpuml import ModelError, ModelFileError, Preprocess, save_model
from gpuml.models import cards
from gpuml.models.cards import CARD, FORMAT, Card
from gpuml.models.file import _open, load, read_card, rewrite
from gpuml.spec import Spec
from gpuml.worker.cache import Network
from gpuml.worker.preprocess import normalise, resize_crop
from gpuml.worker.runner import Runner, read

CPU = torch.device("cpu")
CARD_VALUES = json.loads(cards.to_json(Card(PLAIN, 4)))


class Function(nn.Module):
    """A network of one function of the mean colours, float32 (batch, 3), or of the pixels."""

    def __init__(self, function, pixels=False):
        super().__init__()
        self.function, self.pixels = function, pixels

    def forward(self, x):
        return self.function(x if self.pixels else x.mean((2, 3)))


class Trained(nn.Module):
    """What differs between training and evaluation."""

    def __init__(self):
        super().__init__()
        self.norm, self.pooled, self.dropout = nn.BatchNorm2d(3), Pooled(), nn.Dropout(0.5)
        self.norm.running_mean.copy_(torch.tensor([0.5, -1.0, 2.0]))
        self.norm.running_var.copy_(torch.tensor([4.0, 0.25, 1.0]))

    def forward(self, x):
        return self.dropout(self.pooled(self.norm(x)))


def script(net):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(net)


def trace(net):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(net, torch.zeros(2, 3, 32, 32), check_trace=False)


def pixels(rows, size=(32, 32)):
    return torch.rand((rows, 3, *size), generator=torch.Generator().manual_seed(rows))


def saved_and_loaded(net, path, preprocess=PLAIN, **card):
    save_model(net, path, preprocess=preprocess, **card)
    return load(path, CPU)[0]


def assert_does_the_same(net, path, preprocess=PLAIN, batches=(1, 2, 5)):
    forward = saved_and_loaded(net, path, preprocess)
    reference = copy.deepcopy(net).eval()
    with torch.inference_mode():
        for rows in batches:
            x = pixels(rows, preprocess.size)
            expected = reference(x)
            # Channels-last kernels of the loaded network round in another order.
            torch.testing.assert_close(forward(x), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def refusal(net, path, preprocess=PLAIN, **card):
    with pytest.raises(ModelError) as caught:
        save_model(net, path, preprocess=preprocess, **card)
    assert not path.exists()
    assert list(path.parent.iterdir()) == []
    return str(caught.value)


def digest(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def with_members(source, target, members):
    """A copy of an archive, in torch's own layout, with members (below its root) replaced, added or, None, left out."""
    with zipfile.ZipFile(source) as archive:
        contents = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    contents.update(members)
    writer = torch._C.PyTorchFileWriter(str(target))
    for name, content in contents.items():
        if content is not None and name not in ("version", ".data/version", ".data/serialization_id"):
            writer.write_record(name, content, len(content))
    writer.write_end_of_file()


def with_card(source, target, **changes):
    card = {key: value for key, value in {**CARD_VALUES, **changes}.items() if value != "left out"}
    with_members(source, target, {f"extra/{CARD}": json.dumps(card).encode()})
    return target


@pytest.fixture(scope="module")
def pooled_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("pooled") / "net.pt2"
    save_model(Pooled(), path, preprocess=PLAIN)
    return path


# --- the file does what the network does --------------------------------------------------------------------------


NETWORKS = {
    "resnet18": lambda: torchvision.models.resnet18(num_classes=7),
    "mobilenet_v3_small": lambda: torchvision.models.mobilenet_v3_small(num_classes=7),
    "squeezenet1_1": lambda: torchvision.models.squeezenet1_1(num_classes=7),
    "vision transformer": lambda: torchvision.models.VisionTransformer(64, 16, 2, 4, 64, 128, num_classes=7),
    "swin transformer": lambda: torchvision.models.SwinTransformer([4, 4], 24, [2, 2], [2, 4], [4, 4], num_classes=7),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_in_train_mode_give_what_eager_evaluation_gives(tmp_path, name):
    torch.manual_seed(1)
    net = NETWORKS[name]().train()
    assert_does_the_same(net, tmp_path / "net.pt2", Preprocess(resize=64, crop=64))
    assert all(module.training for module in net.modules())


def test_inception_v3_with_its_training_outputs_is_saved_without_them(tmp_path):
    torch.manual_seed(1)
    net = torchvision.models.inception_v3(num_classes=7, init_weights=False).train()
    assert net.aux_logits
    assert_does_the_same(net, tmp_path / "net.pt2", Preprocess(resize=75, crop=75), batches=(1, 3))


def test_batch_norm_and_dropout_of_a_network_in_train_mode_are_saved_in_evaluation_mode(tmp_path):
    net = Trained().train()
    assert_does_the_same(net, tmp_path / "net.pt2")
    assert all(module.training for module in net.modules())


def test_outputs_do_not_depend_on_the_batch(tmp_path):
    forward = saved_and_loaded(Trained(), tmp_path / "net.pt2")
    x = pixels(7)
    with torch.inference_mode():
        whole = forward(x)
        for size in (1, 2, 3):
            torch.testing.assert_close(torch.cat([forward(part) for part in x.split(size)]), whole)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_networks_of_other_float_types_are_saved_in_float32_and_stay_as_they_are(tmp_path, dtype):
    net = Pooled().to(dtype)
    forward = saved_and_loaded(net, tmp_path / "net.pt2")
    reference = copy.deepcopy(net).float()
    with torch.inference_mode():
        torch.testing.assert_close(forward(pixels(3)), reference(pixels(3)))
    assert {parameter.dtype for parameter in net.parameters()} == {dtype}


def test_complex_weights_keep_their_imaginary_part(tmp_path):
    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("phase", torch.tensor([3 + 4j, 1j, 2]))

        def forward(self, x):
            return (x.mean((2, 3)) * self.phase).abs()

    forward = saved_and_loaded(Spectral(), tmp_path / "net.pt2")
    with torch.inference_mode():
        torch.testing.assert_close(forward(torch.ones(2, 3, 32, 32)), torch.tensor([[5.0, 1.0, 2.0]] * 2))


def test_buffers_constants_made_in_forward_and_shared_layers_are_saved(tmp_path):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0]))
            self.register_buffer("passing", torch.tensor([0.1, 0.2, 0.3]), persistent=False)
            self.counts = torch.tensor([1, 2, 3])
            self.once = self.again = nn.Linear(3, 3)

        def forward(self, x):
            x = x.mean((2, 3)) * self.scale + self.passing + torch.arange(3, device=x.device) * self.counts
            x = x + torch.tensor([0.5, 0.25, 0.125], device=x.device) + x.new_ones(x.shape[0], 3)
            return self.again(self.once(x))

    assert_does_the_same(Mixed(), tmp_path / "net.pt2")


def test_modules_whose_forward_takes_any_number_of_inputs_are_saved(tmp_path):
    class Any(Pooled):
        def forward(self, *inputs, **unused):
            return super().forward(*inputs)

    assert_does_the_same(Any(), tmp_path / "net.pt2")


def test_data_parallel_and_compiled_modules_are_saved_as_what_they_wrap(tmp_path):
    assert_does_the_same(nn.DataParallel(Pooled()), tmp_path / "parallel.pt2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(Pooled(), backend=_no_compiling)
    forward = saved_and_loaded(compiled, tmp_path / "compiled.pt2")
    with torch.inference_mode():
        torch.testing.assert_close(forward(pixels(2)), Pooled()(pixels(2)))


def _no_compiling(graph, inputs):
    raise AssertionError("saving must not compile")


def test_hooks_of_a_network_are_part_of_what_it_does(tmp_path):
    net = Pooled()
    net.linear.register_forward_hook(lambda module, inputs, output: output * 2)
    assert_does_the_same(net, tmp_path / "net.pt2")
    assert len(net.linear._forward_hooks) == 1


def test_activation_width_and_versions_are_on_the_card(tmp_path):
    save_model(Pooled(1), tmp_path / "net.pt2", preprocess=PLAIN, labels=["cat"], activation="sigmoid")
    expected = Card(PLAIN, 1, ("cat",), "sigmoid", "channels_last", gpuml.__version__, torch.__version__, FORMAT)
    assert read_card(tmp_path / "net.pt2") == expected


def test_labels_may_repeat_as_those_of_imagenet_do(tmp_path):
    save_model(Pooled(2), tmp_path / "net.pt2", preprocess=PLAIN, labels=["crane", "crane"])
    assert read_card(tmp_path / "net.pt2").labels == ("crane", "crane")


# --- memory formats -----------------------------------------------------------------------------------------------


class LeNet(nn.Module):
    """Convolutions, then a view, which copies nothing and so takes one memory format alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.convolution, self.linear = nn.Conv2d(3, 6, 5, stride=4), nn.Linear(6 * 7 * 7, 4)

    def forward(self, x):
        return self.linear(self.convolution(x).relu().view(x.size(0), -1))


class ViewOfWeight(nn.Module):
    """Centres its kernels through a view of them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 3, 3, 3))

    def forward(self, x):
        weight = self.weight - self.weight.view(4, -1).mean(1).view(4, 1, 1, 1)
        return nn.functional.conv2d(x, weight).mean((2, 3))


VIEWS = {
    "view after a convolution": LeNet,
    "view of the input": lambda: Function(lambda x: x.view(x.size(0), -1)[:, :4], pixels=True),
    "strides of the input": lambda: Function(lambda x: torch.as_strided(x, (x.size(0), 4), (3072, 1)) * 1, pixels=True),
    "view of a weight": ViewOfWeight,
}


@pytest.mark.parametrize("make", [lambda net: net, lambda net: trace(net.eval())], ids=["export", "trace"])
@pytest.mark.parametrize("name", VIEWS)
def test_networks_that_take_contiguous_memory_alone_are_served_in_it(tmp_path, name, make):
    net = VIEWS[name]().eval()
    save_model(make(net), tmp_path / "net.pt2", preprocess=PLAIN)
    forward, card = load(tmp_path / "net.pt2", CPU)
    assert card.memory_format == "contiguous"
    rows, spec = [encoded(i) for i in range(5)], Spec("0" * 64, batch_size=2)
    runner = Runner(Network(forward, card, CPU, "float32"), spec, threads=1)
    inputs = torch.stack([resize_crop(read(row, spec)[0], PLAIN) for row in rows])
    with torch.inference_mode():
        expected = net(normalise(inputs, PLAIN).contiguous()).numpy()
    np.testing.assert_allclose(runner.run(rows).outputs, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [Trained, lambda: script(Trained()), lambda: NETWORKS["swin transformer"]()])
def test_other_networks_are_served_in_channels_last_memory(tmp_path, make):
    save_model(make(), tmp_path / "net.pt2", preprocess=Preprocess(resize=64, crop=64))
    assert load(tmp_path / "net.pt2", CPU)[1].memory_format == "channels_last"


def test_weights_in_the_file_are_contiguous_and_those_that_serve_channels_last(tmp_path):
    forward = saved_and_loaded(NETWORKS["squeezenet1_1"](), tmp_path / "net.pt2", Preprocess(resize=64, crop=64))
    with zipfile.ZipFile(tmp_path / "net.pt2") as archive:
        config = json.loads(archive.read("model/data/weights/model_weights_config.json"))["config"]
    strides = [stride["as_int"] for stride in config["features.0.weight"]["tensor_meta"]["strides"]]
    assert strides == [27, 9, 3, 1]
    assert dict(forward.named_parameters())["features.0.weight"].stride() == (27, 1, 9, 3)


def test_weights_of_five_dimensions_are_served(tmp_path):
    class Anchors(Pooled):
        def __init__(self):
            super().__init__()
            self.register_buffer("grid", torch.rand(1, 1, 1, 1, 4))

        def forward(self, x):
            return super().forward(x) * self.grid[0, 0, 0]

    assert_does_the_same(Anchors(), tmp_path / "net.pt2")


def test_a_file_is_loaded_inside_inference_mode(tmp_path):
    save_model(Trained(), tmp_path / "net.pt2", preprocess=PLAIN)
    with torch.inference_mode():
        torch.testing.assert_close(load(tmp_path / "net.pt2", CPU)[0](pixels(2)), Trained().eval()(pixels(2)))


def test_a_rewritten_file_is_checked_at_its_new_size(tmp_path):
    """A map of one pixel lies in memory in one way, of four in two."""

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution = nn.Conv2d(3, 4, 16, stride=16)

        def forward(self, x):
            return self.convolution(x).view(x.shape[0], -1)[:, :4]

    save_model(trace(Last().eval()), tmp_path / "a", preprocess=Preprocess(resize=16, crop=16))
    assert read_card(tmp_path / "a").memory_format == "channels_last"
    rewrite(tmp_path / "a", tmp_path / "b", preprocess=PLAIN)
    assert read_card(tmp_path / "b").memory_format == "contiguous"


# --- autocast regions ---------------------------------------------------------------------------------------------


class Precise(nn.Module):
    """Switches autocast off where half precision would not do, in a region within another."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 4)

    def forward(self, x):
        with torch.no_grad():
            x = x.mean((2, 3))
            with torch.autocast(x.device.type, enabled=False):
                return self.linear(x.float())


def test_autocast_regions_go_to_the_device_of_the_network(tmp_path):
    save_model(Precise(), tmp_path / "net.pt2", preprocess=PLAIN)
    regions = {"cpu": [], "meta": []}
    for device, found in regions.items():
        for part in _open(tmp_path / "net.pt2", "export", torch.device(device)).module().modules():
            for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
                if node.target is torch.ops.higher_order.wrap_with_autocast:
                    found.append(node.args[0])
                    assert f"wrap_with_autocast('{device}'" in part.code
    assert regions == {"cpu": ["cpu"], "meta": ["meta"]}


# --- the caller's network and settings stay as they are -----------------------------------------------------------


def test_the_network_and_torch_stay_as_they_were(tmp_path):
    net = Trained().train()
    net.pooled.linear.eval()
    net.pooled.linear.weight.requires_grad_(False)
    net.norm.register_forward_pre_hook(lambda module, inputs: None)
    before = copy.deepcopy(net.state_dict())
    flags = [module.training for module in net.modules()]
    torch.manual_seed(5)
    state = torch.get_rng_state()

    save_model(net, tmp_path / "net.pt2", preprocess=PLAIN)

    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert [module.training for module in net.modules()] == flags
    assert [parameter.requires_grad for parameter in net.parameters()] == [True, True, False, True]
    assert len(net.norm._forward_pre_hooks) == 1
    assert {key: value.tolist() for key, value in net.state_dict().items()} == {
        key: value.tolist() for key, value in before.items()
    }
    assert all(parameter.grad is None for parameter in net.parameters())


def test_a_refused_random_network_leaves_the_random_state(tmp_path):
    state = torch.get_rng_state()
    refusal(Function(lambda x: nn.functional.dropout(x, 0.5, training=True)), tmp_path / "net.pt2")
    assert torch.equal(torch.get_rng_state(), state)


def test_the_callers_torch_settings_do_not_enter_the_file(tmp_path, pooled_file):
    def save(name):
        save_model(net, tmp_path / name, preprocess=PLAIN)
        assert digest(tmp_path / name) == digest(pooled_file), name

    net = Pooled()
    with torch.no_grad():
        save("no_grad")
        assert not torch.is_grad_enabled()
    with torch.inference_mode():
        save("inference_mode")
    with torch.autocast("cpu", torch.bfloat16):
        save("autocast")
    with torch.device("meta"):
        save("device")
        assert torch.zeros(1).device.type == "meta"
    torch.set_default_dtype(torch.float64)
    try:
        save("dtype")
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


# --- equal content, equal hash ------------------------------------------------------------------------------------

SAVE = """
import sys
from pathlib import Path
import torch
from torch import nn
from gpuml import Preprocess, save_model
from their_net import Net
torch.manual_seed(0)
save_model(Net(), sys.argv[1], preprocess=Preprocess(resize=32, crop=32), labels=["a", "b"])
"""

NET = """
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.last = nn.Linear(4, 2)
    def forward(self, x):
        return self.last(self.layers(x))
"""


def test_equal_networks_hash_equally_in_two_processes_and_from_two_folders(tmp_path):
    files = []
    for number, folder in enumerate(["one", "another place"]):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "their_net.py").write_text(NET)
        files.append(tmp_path / folder / f"{number}.pt2")
        root = str(Path(gpuml.__file__).parents[1])
        path = os.pathsep.join([str(tmp_path / folder), root])
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": str(number)}
        subprocess.run([sys.executable, "-c", SAVE, str(files[-1])], env=environment, cwd=tmp_path / folder, check=True)
    assert digest(files[0]) == digest(files[1])
    assert str(tmp_path).encode() not in files[0].read_bytes()  # nor do the author's paths and source lines travel
    assert b"self.layers(x)" not in files[0].read_bytes()


def test_other_weights_labels_or_preprocess_give_another_hash(tmp_path, pooled_file):
    variants = {
        "seed": (Pooled(seed=1), PLAIN, []),
        "labels": (Pooled(), PLAIN, list("abcd")),
        "size": (Pooled(), Preprocess(resize=32, crop=32), []),
    }
    hashes = {digest(pooled_file)}
    for name, (net, preprocess, labels) in variants.items():
        save_model(net, tmp_path / name, preprocess=preprocess, labels=labels)
        hashes.add(digest(tmp_path / name))
    assert len(hashes) == 4


def test_no_sample_inputs_are_in_the_file(pooled_file):
    with zipfile.ZipFile(pooled_file) as archive:
        samples = [archive.read(name) for name in archive.namelist() if "sample_inputs" in name]
    assert all(sample == b"" for sample in samples)
    assert pooled_file.stat().st_size < 30_000  # two 3 x 32 x 32 samples in float32 are 24,576 bytes


def test_a_rewritten_card_keeps_the_network_and_hashes_equally_each_time(tmp_path, pooled_file):
    card = Card(PLAIN, 4, tuple("abcd"))
    for name in ("a", "b"):
        rewrite(pooled_file, tmp_path / name, labels=card.labels)
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    forward, found = load(tmp_path / "a", CPU)
    assert found == card
    with torch.inference_mode():
        assert torch.equal(forward(pixels(3)), load(pooled_file, CPU)[0](pixels(3)))


# --- what is refused ----------------------------------------------------------------------------------------------

MINUS_INFINITY = torch.tensor([[float("-inf")]])


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x - x.mean(0), "mixes the rows"),
        (
            lambda x: torch.cat([x - x.mean(0), MINUS_INFINITY.expand(x.shape[0], 1)], 1),
            "mixes the rows",
        ),  # inf hid it once
        (lambda x: x.view(2, 3), r"specialized it to be a constant \(2\)"),
        (lambda x: x if x.shape[0] > 1 else -x, "branch on the number of rows"),
        (lambda x: x * len(x), "len.x. fixes it"),
        (lambda x: x.squeeze(), r"shape \(3,\) for 1 row\(s\)"),
        (lambda x: (x, x), "gives a tuple for 3 row"),
        (lambda x: {"logits": x}, "gives a dict for 3 row"),
        (lambda x: x.long(), r"gives torch.int64 of shape \(3, 3\)"),
        (lambda x: x[:, :, None], r"gives torch.float32 of shape \(3, 3, 1\)"),
        (lambda x: x.sum(), r"gives torch.float32 of shape \(\)"),
        (lambda x: x[:, :0], "0 outputs"),
        (lambda x: x if x.sum() > 0 else -x, "data-dependent"),
        (lambda x: nn.functional.dropout(x, 0.5, training=True), "is it random"),
        (lambda x: x + torch.randn(3), "is it random"),
        (lambda x: x @ torch.ones(4, 2), "Function fails on .* mat1 and mat2"),
        (lambda x: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_networks_that_a_worker_could_not_serve_are_refused_with_the_reason(tmp_path, function, reason):
    message = refusal(Function(function), tmp_path / "net.pt2")
    assert "Function" in message or "0 outputs" in message
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(message)


def test_an_operator_that_workers_refuse_is_refused_when_saving(tmp_path):
    @torch.library.custom_op("gpuml_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    message = refusal(Function(lambda x: twice(x)), tmp_path / "net.pt2")
    assert "gpuml_tests::twice" in message
    assert str(tmp_path) not in message


def test_labels_out_of_step_are_refused_with_both_numbers(tmp_path):
    message = refusal(Pooled(), tmp_path / "net.pt2", labels=["a", "b", "c"])
    assert "3 labels" in message
    assert "4 outputs" in message


@pytest.mark.parametrize("labels", ["abcd", {0: "a", 1: "b", 2: "c", 3: "d"}, {"a", "b", "c", "d"}, None, [0, 1, 2, 3]])
def test_labels_that_are_no_list_of_names_are_refused_before_the_export(tmp_path, labels, monkeypatch):
    monkeypatch.setattr(torch.export, "export", None)
    assert refusal(Pooled(), tmp_path / "net.pt2", labels=labels).startswith("labels")


def test_softmax_over_one_output_is_refused(tmp_path):
    assert "sigmoid" in refusal(Pooled(1), tmp_path / "net.pt2")


def test_an_unknown_activation_is_refused(tmp_path):
    assert "softmax, sigmoid, none" in refusal(Pooled(), tmp_path / "net.pt2", activation="relu")


@pytest.mark.parametrize("preprocess", [None, "{}", PLAIN.to_json(), 224])
def test_a_missing_preprocess_is_refused_never_guessed(tmp_path, preprocess):
    assert "gpuml.Preprocess" in refusal(Pooled(), tmp_path / "net.pt2", preprocess=preprocess)


@pytest.mark.parametrize("net", [None, {"linear.weight": torch.zeros(4, 3)}, Pooled, lambda x: x])
def test_what_is_no_module_is_refused(tmp_path, net):
    assert "is not a torch.nn.Module" in refusal(net, tmp_path / "net.pt2")


def test_a_module_that_cannot_be_copied_is_refused_with_a_way_out(tmp_path):
    net = Pooled()
    net.last = net(pixels(1))
    assert "no_grad" in refusal(net, tmp_path / "net.pt2")


def test_a_network_that_fills_its_gpu_is_sent_to_the_cpu_first(tmp_path):
    class Full(Pooled):
        def __deepcopy__(self, memo):
            raise torch.OutOfMemoryError("CUDA out of memory")

    message = refusal(Full(), tmp_path / "net.pt2")
    assert "net.cpu()" in message
    assert "no_grad" not in message


# --- writing ------------------------------------------------------------------------------------------------------


def test_missing_folders_are_made_and_the_home_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    save_model(Pooled(), "~/new/folder/net.pt2", preprocess=PLAIN)
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == ["net.pt2"]
    assert not (tmp_path / "~").exists()


def test_a_folder_is_no_file_to_write(tmp_path):
    (tmp_path / "net.pt2").mkdir()
    with pytest.raises(ModelError, match="is a folder"):
        save_model(Pooled(), tmp_path / "net.pt2", preprocess=PLAIN)


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "net.pt2"
    path.write_bytes(b"the old file")

    def full(program, file, **_):
        Path(file).write_bytes(b"half a file")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.export, "save", full)
    with pytest.raises(OSError, match="No space"):
        save_model(Pooled(), path, preprocess=PLAIN)
    assert path.read_bytes() == b"the old file"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_may_have_any_name(tmp_path):
    path = tmp_path / "Ein Schöner Ordner" / "netz №1.model"
    assert_does_the_same(Pooled(), path)


# --- TorchScript --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [script, lambda net: trace(net.eval())])
def test_torchscript_is_saved_as_it_is_and_stays_as_it_was(tmp_path, make):
    net = make(Trained())
    training = net.training
    forward = saved_and_loaded(net, tmp_path / "net.pt2", labels=list("abcd"))
    assert isinstance(forward, torch.jit.ScriptModule)
    assert read_card(tmp_path / "net.pt2").labels == tuple("abcd")
    with torch.inference_mode():
        for rows in (1, 2, 5):
            expected = Trained().eval()(pixels(rows))
            torch.testing.assert_close(forward(pixels(rows)), expected)
    assert net.training == training
    assert all(parameter.requires_grad for parameter in net.parameters())


def test_frozen_torchscript_is_saved(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        frozen = torch.jit.freeze(torch.jit.script(Trained().eval()))
    forward = saved_and_loaded(frozen, tmp_path / "net.pt2")
    with torch.inference_mode():
        torch.testing.assert_close(forward(pixels(2)), Trained().eval()(pixels(2)))


@pytest.mark.parametrize(
    ("net", "reason"),
    [
        (lambda: trace(Function(lambda x: x.view(2, 3))), r"shape '\[2, 3\]' is invalid"),
        (lambda: trace(Function(lambda x: x.squeeze())), r"shape \(3,\) for 1 row"),
        (lambda: trace(Trained().train()), "mixes the rows|is it random"),
        (lambda: trace(Function(lambda x: x - x.mean(0))), "mixes the rows"),
    ],
)
def test_traces_that_depend_on_their_batch_are_refused(tmp_path, net, reason):
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(refusal(net(), tmp_path / "net.pt2"))


def test_a_rewritten_card_keeps_the_torchscript_network(tmp_path):
    save_model(script(Pooled()), tmp_path / "a", preprocess=PLAIN)
    card = Card(Preprocess(resize=48, crop=48), 4, tuple("abcd"))  # it takes any size
    rewrite(tmp_path / "a", tmp_path / "b", labels=card.labels, preprocess=card.preprocess)
    forward, found = load(tmp_path / "b", CPU)
    assert found == card
    with torch.inference_mode():
        torch.testing.assert_close(forward(pixels(2)), Pooled()(pixels(2)))


# --- reading ------------------------------------------------------------------------------------------------------


def test_a_file_without_a_card_says_how_to_write_one(tmp_path, pooled_file):
    with_members(pooled_file, tmp_path / "net.pt2", {f"extra/{CARD}": None})
    with pytest.raises(ModelFileError, match=r"net\.pt2 has no gpuml.json.*gpuml\.save_model"):
        load(tmp_path / "net.pt2", CPU)


def test_a_card_in_a_deeper_folder_is_not_the_card(tmp_path, pooled_file):
    members = {f"extra/{CARD}": None, f"extra/other/extra/{CARD}": json.dumps(CARD_VALUES).encode()}
    with_members(pooled_file, tmp_path / "net.pt2", members)
    with pytest.raises(ModelFileError, match=r"has no gpuml\.json"):
        read_card(tmp_path / "net.pt2")


def test_a_card_of_a_newer_format_says_to_upgrade(tmp_path, pooled_file):
    path = with_card(pooled_file, tmp_path / "net.pt2", format=FORMAT + 1, gpuml="99.0", hue="blue")
    with pytest.raises(ModelFileError, match=r"net\.pt2: .*format 2.*gpuml 99\.0.*upgrade gpuml"):
        read_card(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "left out"},
        {"format": "1"},
        {"width": "left out"},
        {"width": "4"},
        {"width": 4.0},
        {"width": True, "activation": "none"},
        {"width": 0},
        {"width": -1},
        {"labels": "abcd"},
        {"labels": None},
        {"labels": {"a": 0, "b": 1, "c": 2, "d": 3}},
        {"labels": [1, 2, 3, 4]},
        {"labels": ["a", "b"]},
        {"activation": "relu"},
        {"activation": None},
        {"preprocess": None},
        {"preprocess": {"resize": -1}},
        {"preprocess": {"hue": 1}},
        {"hue": "blue"},
        {"memory_format": "preserve"},
        {"memory_format": None},
    ],
)
def test_damaged_cards_are_refused_naming_the_file(tmp_path, pooled_file, changes):
    path = with_card(pooled_file, tmp_path / "net.pt2", **changes)
    with pytest.raises(ModelFileError, match=r"net\.pt2: .* is damaged"):
        load(path, CPU)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe\xfa", b"[]", b"null", b"7", b"[" * 100_000])
def test_cards_that_are_no_json_object_are_refused_naming_the_file(tmp_path, pooled_file, text):
    with_members(pooled_file, tmp_path / "net.pt2", {f"extra/{CARD}": text})
    with pytest.raises(ModelFileError, match=r"net\.pt2: .* is damaged"):
        load(tmp_path / "net.pt2", CPU)


def test_a_width_that_is_not_the_networks_is_found_before_it_serves(tmp_path, pooled_file):
    path = with_card(pooled_file, tmp_path / "net.pt2", width=5)
    with pytest.raises(ModelError, match="4 outputs, its card says 5"):
        rewrite(path, tmp_path / "other.pt2", labels=tuple("abcde"))
    assert not (tmp_path / "other.pt2").exists()


def test_a_file_of_a_newer_torch_that_cannot_be_read_names_both_versions(tmp_path, pooled_file):
    with zipfile.ZipFile(pooled_file) as archive:
        graph = archive.read("model/models/model.json")
    newer = graph.replace(b"torch.ops.aten.linear.default", b"torch.ops.aten.linear_of_tomorrow.default")
    assert newer != graph
    card = json.dumps({**CARD_VALUES, "torch": "99.1.0"}).encode()
    with_members(pooled_file, tmp_path / "net.pt2", {"models/model.json": newer, f"extra/{CARD}": card})
    with pytest.raises(ModelFileError) as caught:
        load(tmp_path / "net.pt2", CPU)
    assert "linear_of_tomorrow" in str(caught.value)
    assert "torch 99.1.0 wrote it" in str(caught.value)
    assert torch.__version__ in str(caught.value)


def test_what_torch_itself_fails_to_read_names_both_versions(tmp_path, pooled_file, monkeypatch):
    def fail(*_):
        raise RuntimeError("schema version 99")

    path = with_card(pooled_file, tmp_path / "net.pt2", torch="99.1.0")
    monkeypatch.setattr(torch.export, "load", fail)
    with pytest.raises(ModelFileError, match=r"cannot read .*net\.pt2, written by torch 99\.1\.0: .* 99$") as caught:
        load(path, CPU)
    assert str(caught.value).startswith(f"torch {torch.__version__} cannot read")


def test_truncated_and_foreign_files_are_refused(tmp_path, pooled_file):
    content = pooled_file.read_bytes()
    for name, data in {"half": content[: len(content) // 2], "text": b"hello", "nothing": b""}.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ModelFileError, match=name):
            load(tmp_path / name, CPU)


def test_loading_does_not_need_the_class_of_the_network(tmp_path, pooled_file):
    shutil.copy(pooled_file, tmp_path / "net.pt2")
    program = (
        "import sys, torch; from gpuml.models.file import load\n"
        "forward, card = load(sys.argv[1], torch.device('cpu'))\n"
        "print(tuple(forward(torch.zeros(2, 3, 32, 32)).shape), card.width, 'pyspark' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(gpuml.__file__).parents[1])}
    command = [sys.executable, "-c", program, str(tmp_path / "net.pt2")]
    made = subprocess.run(command, env=environment, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert made.stdout.split("\n")[0] == "(2, 4) 4 False"


def test_a_full_device_is_not_reported_as_a_damaged_file(tmp_path, monkeypatch):
    save_model(Pooled(), tmp_path / "net.pt2", preprocess=PLAIN)

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("gpuml.models.file._open", full)
    with pytest.raises(torch.OutOfMemoryError):
        load(tmp_path / "net.pt2", torch.device("cpu"))


def test_threads_export_and_load_side_by_side(tmp_path):
    """As a CrossValidator with parallelism does: torch.export alone fails in every one of them."""
    from concurrent.futures import ThreadPoolExecutor

    def save_and_load(seed):
        path = tmp_path / f"{seed}.pt2"
        save_model(Pooled(seed=seed), path, preprocess=PLAIN)
        forward, _ = load(path, torch.device("cpu"))
        rows = torch.full((2, 3, 32, 32), 0.5)
        with torch.inference_mode():
            return torch.allclose(forward(rows), Pooled(seed=seed)(rows), atol=1e-5)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(save_and_load, range(8)))


def test_half_a_surrogate_pair_is_no_label(tmp_path):
    with pytest.raises(ModelError, match="surrogate"):
        save_model(Pooled(), tmp_path / "net.pt2", preprocess=PLAIN, labels=["\ud800", "a", "b", "c"])


# --- files of earlier releases ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "activation"), [("export", "softmax"), ("torchscript", "sigmoid")])
def test_a_model_file_of_release_0_1_is_read_for_good(kind, activation):
    """Written with torch 2.14.1 then, and never again. Its author's torch may be newer than this one."""
    path = Path(__file__).parent / "data" / f"model-0.1-{kind}.pt2"
    forward, card = load(path, CPU)
    assert (card.gpuml, card.torch.partition("+")[0], card.format) == ("0.1.0", "2.14.1", 1)
    assert (card.labels, card.preprocess, card.activation) == (("ant", "bee", "cat", "dog"), PLAIN, activation)
    with torch.inference_mode():
        torch.testing.assert_close(forward(pixels(3)), Pooled()(pixels(3)))
