"""resolve: what the model Param says leads to one model file, or to an error that says what to type."""

import contextlib
import hashlib
import io
import os
import pickle
import socket
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import torch
import torchvision
from conftest import PLAIN, Pooled
from torch import nn
from torchvision.models import SqueezeNet1_1_Weights

import gpuml
from gpuml import ModelError, Preprocess, save_model
from gpuml.models import sources, store, zoo_torchvision
from gpuml.models.file import load, read_card
from gpuml.models.sources import resolve

SMALL = Preprocess(resize=64, crop=64)
SQUEEZENET = "torchvision:squeezenet1_1"
NAMES = torchvision.models.list_models(module=torchvision.models)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Each test begins with empty caches of its own, gpuml's and torch's, and with no network."""
    monkeypatch.setenv("GPUML_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr(torch.hub, "urlopen", _no_network)
    return tmp_path / "cache"


def _no_network(*_, **__):
    raise URLError(socket.gaierror(-2, "Name or service not known"))


@pytest.fixture
def exports(monkeypatch):
    """Counts the exports."""
    calls = []
    export = torch.export.export
    monkeypatch.setattr(torch.export, "export", lambda *args, **kwargs: calls.append(1) or export(*args, **kwargs))
    return calls


@pytest.fixture
def net_file(tmp_path):
    save_model(Pooled(), tmp_path / "net.pt2", preprocess=PLAIN, labels=list("abcd"))
    return tmp_path / "net.pt2"


def squeezenet(classes=3):
    torch.manual_seed(3)
    return torchvision.models.squeezenet1_1(num_classes=classes)


def outputs(sha256, size=64):
    x = torch.rand((3, 3, size, size), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        return load(store.path_of(sha256), torch.device("cpu"))[0](x)


def expected(net, size=64):
    x = torch.rand((3, 3, size, size), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        return net.eval()(x)


def card(sha256):
    return read_card(store.path_of(sha256))


def refusal(model, *args):
    with pytest.raises(ModelError) as caught:
        resolve(model, *args)
    return str(caught.value)


# --- the zoo ------------------------------------------------------------------------------------------------------


def test_the_zoo_is_torchvisions_classification_models():
    assert zoo_torchvision.names() == NAMES
    assert len(NAMES) >= 80
    assert {"resnet50", "vit_b_16", "swin_v2_t", "inception_v3", "maxvit_t"} <= set(NAMES)


def test_every_weights_entry_of_the_zoo_has_a_preprocess_equal_to_its_preset():
    entries = [entry for name in NAMES for entry in torchvision.models.get_model_weights(name)]
    assert len(entries) >= len(NAMES)
    for entry in entries:
        preset = entry.transforms()
        preprocess = zoo_torchvision.preset(entry)
        assert preprocess.size == (preset.crop_size[0],) * 2, entry
        assert [preprocess.resize] == preset.resize_size, entry
        assert preprocess.mean == tuple(preset.mean), entry
        assert preprocess.std == tuple(preset.std), entry
        assert preprocess.interpolation == preset.interpolation.value, entry
        assert preprocess.antialias is preset.antialias, entry


RESOLVE = "import sys; from gpuml.models.sources import resolve; print(resolve(sys.argv[1], 'none', ['a', 'b']))"


def test_random_weights_are_equal_in_two_processes_and_differ_by_name(tmp_path):
    made = resolve(SQUEEZENET, "none", ["a", "b"])
    environment = {
        **os.environ,
        "GPUML_HOME": str(tmp_path / "other"),
        "PYTHONPATH": str(Path(gpuml.__file__).parents[1]),
        "PYTHONHASHSEED": "7",
    }
    command = [sys.executable, "-c", RESOLVE, SQUEEZENET]
    other = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()
    assert made == other
    net = zoo_torchvision.network("squeezenet1_1", None, None, 2)
    sibling = zoo_torchvision.network("squeezenet1_0", None, None, 2)
    assert not torch.equal(net.classifier[1].weight, sibling.classifier[1].weight)


def test_making_random_weights_leaves_torchs_random_states(monkeypatch):
    def seeded(*_):
        raise AssertionError("the GPUs' random state was set")

    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded)
    state = torch.get_rng_state()
    zoo_torchvision.network("squeezenet1_1", None, None, 2)
    assert torch.equal(torch.get_rng_state(), state)


def test_random_weights_do_not_depend_on_the_callers_default_dtype():
    net = zoo_torchvision.network("squeezenet1_1", None, None, 2)
    torch.set_default_dtype(torch.float64)
    try:
        other = zoo_torchvision.network("squeezenet1_1", None, None, 2)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(net.classifier[1].weight, other.classifier[1].weight)


def test_the_zoos_categories_and_preset_are_the_default_and_the_index_saves_a_second_export(exports):
    sha256 = resolve(SQUEEZENET, "none")
    assert card(sha256).labels == tuple(SqueezeNet1_1_Weights.DEFAULT.meta["categories"])
    assert card(sha256).preprocess == Preprocess(antialias=True)
    assert resolve(SQUEEZENET, "none") == sha256
    assert len(exports) == 1


def test_labels_of_another_number_make_a_network_of_that_many_outputs(exports):
    two = resolve(SQUEEZENET, "none", ["cat", "dog"], SMALL)
    assert (card(two).labels, card(two).width, card(two).preprocess) == (("cat", "dog"), 2, SMALL)
    assert outputs(two).shape == (3, 2)
    three = resolve(SQUEEZENET, "none", ["cat", "dog", "eel"], SMALL)
    assert card(three).width == 3
    assert len(exports) == 2


def test_a_request_whose_file_was_deleted_is_exported_again(exports, monkeypatch):
    monkeypatch.setattr(
        zoo_torchvision, "network", lambda name, entry, path, classes: Pooled(classes)
    )  # exports faster
    sha256 = resolve(SQUEEZENET, "none", ["a", "b"], SMALL)
    store.path_of(sha256).unlink()
    assert resolve(SQUEEZENET, "none", ["a", "b"], SMALL) == sha256
    assert len(exports) == 2


def test_another_torch_is_another_request(exports, monkeypatch):
    monkeypatch.setattr(zoo_torchvision, "network", lambda name, entry, path, classes: Pooled(classes))
    resolve(SQUEEZENET, "none", ["a", "b"], SMALL)
    monkeypatch.setattr(torch, "__version__", "99.0")
    resolve(SQUEEZENET, "none", ["a", "b"], SMALL)
    assert len(exports) == 2


def test_a_wrong_zoo_name_is_refused_with_names_to_paste():
    message = refusal("torchvision:resnet51")
    assert "'resnet51'" in message
    assert "'torchvision:resnet50'" in message


def test_names_of_detection_models_are_refused_naming_their_stage():
    assert "ObjectDetector(model='torchvision:fasterrcnn" in refusal("torchvision:fasterrcnn_resnet50_fpn", "none")


def test_an_unknown_weights_name_lists_those_there_are():
    message = refusal("torchvision:resnet50", "IMAGENET1K_V9")
    for part in ("IMAGENET1K_V9", "IMAGENET1K_V1", "IMAGENET1K_V2", "DEFAULT", "none", "path"):
        assert part in message


def test_weights_of_another_network_are_not_taken_for_its_namesakes():
    assert "ResNet18_Weights.IMAGENET1K_V1" in refusal("torchvision:resnet50", "ResNet18_Weights.IMAGENET1K_V1")
    entry = zoo_torchvision.weights_entry("resnet50", "ResNet50_Weights.IMAGENET1K_V1")
    assert entry is zoo_torchvision.weights_entry("resnet50", "IMAGENET1K_V1")
    assert zoo_torchvision.weights_entry("resnet50", "").name == "IMAGENET1K_V2"


def test_labels_that_do_not_fit_published_weights_are_refused_before_the_download(monkeypatch):
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", None)
    message = refusal(SQUEEZENET, "", ["cat", "dog"])
    assert "2 labels" in message
    assert "1000 outputs" in message


# --- weights that are downloaded ----------------------------------------------------------------------------------

FILE = Path(SqueezeNet1_1_Weights.DEFAULT.url).name


def test_with_no_network_the_error_names_file_folder_and_the_ways_out(tmp_path):
    message = refusal(SQUEEZENET)
    folder = tmp_path / "torch" / "hub" / "checkpoints"
    for part in ("Name or service not known", SqueezeNet1_1_Weights.DEFAULT.url, str(folder / FILE), "'none'"):
        assert part in message


@pytest.mark.parametrize("content", [b"", b"half", b"\x80\x02}q", b"PK\x03\x04half a zip file"])
def test_a_damaged_download_is_named_to_be_deleted(tmp_path, content):
    folder = tmp_path / "torch" / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    (folder / FILE).write_bytes(content)
    message = refusal(SQUEEZENET)
    assert f"{folder / FILE} is damaged: delete it" in message


def test_a_download_with_a_wrong_hash_is_refused_and_not_kept(tmp_path, monkeypatch):
    (tmp_path / "other.pth").write_bytes(b"not what was asked for")
    monkeypatch.setattr(torch.hub, "urlopen", lambda *_: urlopen((tmp_path / "other.pth").as_uri()))
    assert "invalid hash" in refusal(SQUEEZENET)
    assert list((tmp_path / "torch" / "hub" / "checkpoints").iterdir()) == []


def test_published_weights_in_torchs_cache_are_used_without_a_network(tmp_path, exports):
    folder = tmp_path / "torch" / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    net = squeezenet(1000)
    torch.save(net.state_dict(), folder / FILE)
    state = torch.get_rng_state()
    sha256 = resolve(SQUEEZENET, "", (), SMALL)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(outputs(sha256), expected(net))
    for same in ("DEFAULT", "IMAGENET1K_V1", "SqueezeNet1_1_Weights.IMAGENET1K_V1"):
        assert resolve(SQUEEZENET, same, (), SMALL) == sha256
    assert len(exports) == 1


# --- weights from a file ------------------------------------------------------------------------------------------


def test_state_dicts_and_safetensors_give_the_same_network(tmp_path):
    from safetensors.torch import save_file

    net = squeezenet()
    torch.save(net.state_dict(), tmp_path / "w.pth")
    torch.save(net.state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    save_file(net.state_dict(), tmp_path / "w.safetensors")
    made = {
        resolve(SQUEEZENET, str(tmp_path / name), list("abc"), SMALL) for name in ("w.pth", "old.pt", "w.safetensors")
    }
    assert len(made) == 1
    torch.testing.assert_close(outputs(made.pop()), expected(net))


def test_half_precision_state_dicts_are_taken_in_float32(tmp_path):
    net = squeezenet().half()
    torch.save(net.state_dict(), tmp_path / "w.pth")
    sha256 = resolve(SQUEEZENET, str(tmp_path / "w.pth"), list("abc"), SMALL)
    torch.testing.assert_close(outputs(sha256), expected(net.float()))


@pytest.mark.parametrize("zip_file", [True, False])
def test_state_dicts_saved_on_a_gpu_load_where_there_is_none(tmp_path, monkeypatch, zip_file):
    net = squeezenet()
    # torch asks each tensor's storage for its tag: cuda:1, as if it lay there.
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:1")
    torch.save(net.state_dict(), tmp_path / "w.pth", _use_new_zipfile_serialization=zip_file)
    monkeypatch.undo()
    monkeypatch.setenv("GPUML_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="Attempting to deserialize object on a CUDA device"):
        torch.load(tmp_path / "w.pth", weights_only=True)
    sha256 = resolve(SQUEEZENET, str(tmp_path / "w.pth"), list("abc"), SMALL)
    torch.testing.assert_close(outputs(sha256), expected(net))


def test_googlenets_state_dict_fits_with_and_without_its_training_outputs(tmp_path):
    state = torchvision.models.googlenet(num_classes=3, init_weights=False).state_dict()
    torch.save(state, tmp_path / "with.pth")
    bare = {name: value for name, value in state.items() if not name.startswith("aux")}
    assert len(bare) < len(state)
    torch.save(bare, tmp_path / "without.pth")
    for file in ("with.pth", "without.pth"):
        net = zoo_torchvision.network("googlenet", None, tmp_path / file, 3)
        assert net.transform_input
        assert torch.equal(net.fc.weight, state["fc.weight"])


def test_a_weights_file_with_new_content_gives_a_new_model(tmp_path, exports):
    path = tmp_path / "w.pth"
    torch.save(squeezenet().state_dict(), path)
    first = resolve(SQUEEZENET, str(path), list("abc"), SMALL)
    assert resolve(SQUEEZENET, str(path), list("abc"), SMALL) == first
    torch.save({name: value + 1 for name, value in squeezenet().state_dict().items()}, path)
    assert resolve(SQUEEZENET, str(path), list("abc"), SMALL) != first
    assert len(exports) == 2


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("harm",)


def write_harmful(path):
    path.write_bytes(pickle.dumps({"weight": Harmful()}, protocol=2))


def write_module(path):
    torch.save(squeezenet(), path)


def write_script(path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(squeezenet()), path)


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (write_harmful, "no state dict that can be read safely"),
        (write_module, "no state dict that can be read safely"),
        (write_script, "no state dict that can be read safely"),
        (lambda path: path.write_bytes(b"junk"), "no state dict that can be read safely"),
        (lambda path: torch.save(torch.zeros(3), path), "holds Tensor"),
        (lambda path: torch.save([1], path), "holds list"),
        (lambda path: torch.save({"epoch": 3, "state_dict": {}}, path), "a dict of 'epoch', 'state_dict'"),
        (lambda path: torch.save({0: torch.zeros(3)}, path), "not tensors by name"),
        (lambda path: torch.save(squeezenet(4).state_dict(), path), "with 3 outputs.*size mismatch"),
        (lambda path: torch.save({"a": torch.zeros(3)}, path), "Missing key"),
        (lambda path: None, "no such file"),
        (lambda path: path.mkdir(), "is a folder"),
    ],
)
def test_weights_that_are_no_fitting_state_dict_are_refused_and_run_nothing(tmp_path, monkeypatch, write, reason):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "w.pth"
    write(path)
    message = refusal(SQUEEZENET, str(path), list("abc"), SMALL)
    assert str(path) in message
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(message)
    assert not (tmp_path / "harm").exists()


def test_damaged_safetensors_are_refused(tmp_path):
    (tmp_path / "w.safetensors").write_bytes(b"junk")
    assert "no state dict that can be read safely" in refusal(SQUEEZENET, str(tmp_path / "w.safetensors"))


def test_safetensors_without_the_package_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "w.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    assert "pip install safetensors" in refusal(SQUEEZENET, str(tmp_path / "w.safetensors"))


# --- model files --------------------------------------------------------------------------------------------------


def test_a_model_file_is_taken_as_it_is_from_each_way_to_write_its_path(net_file, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    sha256 = hashlib.sha256(net_file.read_bytes()).hexdigest()
    for model in (str(net_file), f"file:{net_file}", f"file://{net_file}", "~/net.pt2", "./net.pt2", "net.pt2"):
        assert resolve(model) == sha256, model
    assert resolve(f"sha256:{sha256}") == sha256


def test_a_path_may_look_like_a_source_or_have_spaces_and_other_letters(net_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sha256 = resolve(str(net_file))
    for name in ("resnet50", "é #1 100%.pt2", "hf:net.pt2"):
        net_file = net_file.rename(tmp_path / name)
        assert resolve(str(net_file)) == sha256
        assert resolve(f"./{name}") == sha256


def test_an_overwritten_file_is_another_model_and_the_first_stays_in_the_cache(net_file):
    first = resolve(str(net_file))
    save_model(Pooled(seed=1), net_file, preprocess=PLAIN, labels=list("abcd"))
    second = resolve(str(net_file))
    assert first != second
    torch.testing.assert_close(outputs(first, 32), expected(Pooled(), 32))
    torch.testing.assert_close(outputs(second, 32), expected(Pooled(seed=1), 32))


def _script(net):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(net)


@pytest.mark.parametrize("make", [Pooled, lambda: _script(Pooled())], ids=["export", "TorchScript"])
def test_other_labels_and_preprocess_give_a_new_file_with_the_same_weights(tmp_path, make):
    save_model(make(), tmp_path / "net.pt2", preprocess=PLAIN, labels=list("abcd"))
    path = str(tmp_path / "net.pt2")
    first = resolve(path)
    other = Preprocess(resize=32, crop=32)
    second = resolve(path, "", list("wxyz"), other)
    assert first != second
    assert (card(second).labels, card(second).preprocess) == (tuple("wxyz"), other)
    assert torch.equal(outputs(first, 32), outputs(second, 32))
    assert resolve(path, "", list("wxyz"), other) == second
    assert resolve(f"sha256:{first}", "", list("wxyz"), other) == second
    assert resolve(path, "", list("abcd"), PLAIN) == first
    assert card(resolve(path, "", (), other)).labels == tuple("abcd")


def test_a_second_request_for_the_same_card_writes_nothing(net_file, monkeypatch):
    sha256 = resolve(str(net_file), "", list("wxyz"))
    monkeypatch.setattr(sources, "rewrite", None)
    assert resolve(str(net_file), "", list("wxyz")) == sha256


def test_labels_that_do_not_fit_a_file_are_refused_with_both_numbers(net_file):
    message = refusal(str(net_file), "", ["a", "b", "c"])
    assert "3 labels" in message
    assert "4 outputs" in message


def test_a_preprocess_of_a_size_that_the_file_was_not_exported_for_is_refused(net_file, cache):
    message = refusal(str(net_file), "", (), SMALL)
    assert "(3, 64, 64)" in message
    assert "made for inputs of another size" in message
    assert not list((cache / "models").glob("*.pt2"))


def test_weights_do_not_go_with_a_file(net_file):
    assert "weights='none'" in refusal(str(net_file), "none")
    assert "weights='none'" in refusal(f"sha256:{resolve(str(net_file))}", "none")


def test_a_hash_that_is_not_in_the_cache_says_what_to_do():
    assert "set the stage's model again" in refusal("sha256:" + "0" * 64)


def test_what_is_no_model_file_is_refused(tmp_path, cache):
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "w.pt2")
    assert "state dict" in refusal(str(tmp_path / "w.pt2"))
    (tmp_path / "text.pt2").write_text("hello")
    assert "text.pt2" in refusal(str(tmp_path / "text.pt2"))
    assert list((cache / "models").iterdir()) == []


# --- what is no source --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        ("resnet50", ["'torchvision:resnet50'", "'./resnet50.pt2'"]),
        ("resnet_50", ["'torchvision:resnet50'", "'./resnet_50.pt2'"]),
        ("TorchVision:resnet50", ["'TorchVision:resnet50'", "torchvision:"]),
        ("s3a://bucket/net.pt2", ["'s3a://bucket/net.pt2'", "with a Spark session"]),
        ("hdfs:///models/net.pt2", ["'hdfs:///models/net.pt2'", "with a Spark session"]),
        ("sha256:abc", ["'sha256:abc'"]),
        ("./missing.pt2", ["no such file", "missing.pt2"]),
        ("file:/missing/net.pt2", ["no such file", "(/missing/net.pt2)"]),
        ("C:\\models\\net.pt2", ["no such file", repr("C:\\models\\net.pt2")]),
        ("C:/models/net.pt2", ["no such file", "C:/models/net.pt2"]),
        (".", ["is a folder"]),
        ("~", ["is a folder"]),
        ("", ["model=''"]),
    ],
)
def test_what_is_no_source_is_refused_with_what_to_type(model, parts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = refusal(model)
    for part in parts:
        assert part in message


# --- hostile files in torch's cache --------------------------------------------------------------------------------


def saved(state, zip_file=False):
    buffer = io.BytesIO()
    torch.save(state, buffer, _use_new_zipfile_serialization=zip_file)
    return buffer.getvalue()


def zipped(name, data, before=b""):
    """A zip of one member, as torch.hub unpacks it; bytes may stand before a zip."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, data)
    return before + buffer.getvalue()


def replaces_itself(name):
    """A zip whose member takes its own place: harmless to the first reader, and to the next a zip with the payload."""
    return zipped(name, zipped("payload.pth", saved({"weight": Harmful()}), before=saved({})))


@pytest.mark.filterwarnings("ignore:Falling back to the old format:FutureWarning")
@pytest.mark.parametrize(
    "write",
    [
        lambda name: pickle.dumps({"weight": Harmful()}, protocol=2),
        lambda name: saved({"weight": Harmful()}),
        lambda name: saved({"weight": Harmful()}, zip_file=True),
        lambda name: zipped("payload.pth", saved({"weight": Harmful()})),
        replaces_itself,
    ],
    ids=["bare pickle", "old format", "zip format", "zip of one", "zip that replaces itself"],
)
def test_hostile_weights_in_torchs_cache_run_with_plain_torchvision_and_are_refused_here(tmp_path, monkeypatch, write):
    monkeypatch.chdir(tmp_path)
    harm, entry = tmp_path / "harm", SqueezeNet1_1_Weights.DEFAULT
    place = tmp_path / "torch" / "hub" / "checkpoints" / Path(entry.url).name
    place.parent.mkdir(parents=True)
    place.write_bytes(write(place.name))
    for _ in range(2):
        message = refusal(SQUEEZENET)
        assert f"the weights {entry} of {SQUEEZENET} cannot be had (" in message
        assert f"{place} is damaged: delete it" in message
        assert not harm.exists()
    place.write_bytes(write(place.name))
    for _ in range(2):
        with contextlib.suppress(Exception):
            entry.get_state_dict(progress=True, check_hash=True)  # as torchvision's own loader calls it
    assert harm.exists()


def test_no_error_shows_a_password(tmp_path, monkeypatch):
    (tmp_path / "text").write_text("hello")
    monkeypatch.setattr(sources, "fetch", lambda url: tmp_path / "text")
    for arguments in (
        ("http://u:hunter2@host/net.pt2?sig=hunter2",),
        ("http://u:hunter2@host/net.pt2", "none"),
        ("./net.pt2", "http://u:hunter2@host/w.pth?sig=hunter2"),
        (SQUEEZENET, "http://u:hunter2@host/w.pth?sig=hunter2"),
    ):
        message = refusal(*arguments)
        assert "hunter2" not in message
        assert "//host/" in message
