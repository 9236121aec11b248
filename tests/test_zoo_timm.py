"""timm: names, weights, labels and data configurations become model files, or errors that say what to type."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from conftest import Harm, Stumble
from PIL import Image
from safetensors.torch import save_file
from timm.data import create_transform, resolve_data_config
from timm.models import get_pretrained_cfg

from gpuml import ModelError, Preprocess
from gpuml.models import store, zoo_timm
from gpuml.models.file import load, read_card
from gpuml.models.sources import resolve
from gpuml.worker.preprocess import normalise, resize_crop

SMALL = "timm:test_resnet"  # 160 pixels, half a million weights
PHOTOGRAPHS = Path(__file__).parents[1] / "examples" / "images"


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    """No test reaches a hub; gpuml's cache and torch's are the test's own."""
    monkeypatch.setenv("GPUML_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def photograph(name):
    return Image.open(PHOTOGRAPHS / name).convert("RGB")


def refusal(name, weights="", labels=()):
    with pytest.raises(ModelError) as caught:
        zoo_timm.find(name, weights, labels).build()
    return str(caught.value)


def outputs(sha256, rows):
    with torch.inference_mode():
        return load(store.path_of(sha256), torch.device("cpu"))[0](rows)


def config(name, **changes):
    return {**resolve_data_config(pretrained_cfg=get_pretrained_cfg(name).to_dict()), **changes}


# --- preprocessing ------------------------------------------------------------------------------------------------

CONFIGS = {
    "center, crop_pct 0.95": config("resnet18.a1_in1k"),
    "center, crop_pct 0.875 of 299 pixels": config("inception_v3.tf_in1k"),
    "center, crop_pct 1": config("resnetv2_50x1_bit.goog_in21k_ft_in1k", crop_mode="center", crop_pct=1.0),
    "center, means of 0.5, crop_pct 0.9": config("vit_tiny_patch16_224.augreg_in21k_ft_in1k"),
    "squash, crop_pct 1": config("convnext_tiny.fb_in22k_ft_in1k_384"),
    "squash, crop_pct 0.95": config("convnext_tiny.fb_in22k_ft_in1k_384", crop_pct=0.95),
    "squash, not square": config("resnet18.a1_in1k", crop_mode="squash", input_size=(3, 192, 128)),
    "bilinear": config("resnet18.tv_in1k"),
    "nearest": config("resnet18.tv_in1k", interpolation="nearest"),
}


IMAGES = {
    "wide": lambda: photograph("rocket.jpg"),
    "tall": lambda: photograph("cat.png").rotate(90, expand=True).resize((301, 800)),
    "smaller than the input": lambda: photograph("temple.jpg").resize((50, 33)),
}


@pytest.mark.parametrize("chosen", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("image", IMAGES.values(), ids=IMAGES)
def test_preset_gives_the_pixels_of_timms_own_transform_to_two_levels(chosen, image):
    image = image()
    expected = create_transform(**chosen, is_training=False)(image)
    preprocess = zoo_timm.preset(chosen)
    given = normalise(resize_crop(torch.from_numpy(np.array(image)).permute(2, 0, 1), preprocess)[None], preprocess)[0]
    assert given.shape == expected.shape
    levels = (given - expected).abs() * torch.tensor(preprocess.std).view(3, 1, 1) * 255
    assert levels.max() <= 2.01  # of 255
    # torch resizes along the rows first, Pillow 13 along the columns in a tall image: up to 0.18 on average there.
    assert levels.mean() <= 0.2


def test_preset_rounds_the_resize_down_as_timm_does():
    assert zoo_timm.preset(config("resnet18.a1_in1k")).resize == 235  # 224 / 0.95 = 235.8
    assert zoo_timm.preset(config("inception_v3.tv_in1k")).size == (299, 299)


def test_every_pretrained_configuration_of_timm_maps_or_is_refused_with_a_reason():
    refused = {}
    every = timm.list_models(include_tags=True)
    for name in every:
        try:
            preprocess = zoo_timm.preset(config(name))
        except ModelError as error:
            refused.setdefault(str(error)[:20], []).append((name, str(error)))
        else:
            assert preprocess.size == tuple(config(name)["input_size"][1:]), name
    assert len(every) >= 1000
    assert sum(map(len, refused.values())) / len(every) < 0.01, refused
    assert set(refused) <= {
        "its crop_mode 'borde",  # padded
        "its data configurati",  # volo: crop_pct 1.15, padded
    }, refused


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"crop_mode": "border"}, "'border' pads the image"),
        ({"interpolation": "lanczos"}, "interpolation='lanczos' is none of nearest, bilinear, bicubic"),
        ({"interpolation": "random"}, "interpolation='random' is none of"),
        ({"crop_pct": 1.15}, r"crop=\(224, 224\) does not fit into resize=194"),
        ({"input_size": (3, 192, 128)}, r"crop of \(192, 128\) from an image resized to cover \(202, 134\)"),
        ({"mean": (0.5,), "std": (0.5,)}, r"mean=\(0.5,\) is not three numbers"),
    ],
)
def test_what_a_preprocess_does_not_have_is_refused_saying_what(changes, reason):
    with pytest.raises(ModelError, match=reason):
        zoo_timm.preset(config("resnet18.a1_in1k", **changes))


def test_a_configuration_that_does_not_map_is_refused_unless_a_preprocess_is_given(monkeypatch):
    monkeypatch.setattr(timm.data, "resolve_model_data_config", lambda net: config("resnet18", crop_mode="border"))
    with pytest.raises(ModelError, match=r"model='timm:test_resnet': its crop_mode 'border' .*give preprocess="):
        resolve(SMALL, "none")
    preprocess = Preprocess(resize=64, crop=64)
    assert read_card(store.path_of(resolve(SMALL, "none", preprocess=preprocess))).preprocess == preprocess


# --- weights ------------------------------------------------------------------------------------------------------


def test_random_weights_become_a_model_file_with_timms_outputs_labels_and_preprocess():
    sha256 = resolve(SMALL, "none")
    card = read_card(store.path_of(sha256))
    assert card.width == len(card.labels) == 1000
    assert card.labels[0] == "tench, Tinca tinca"
    assert card.labels[281] == "tabby, tabby cat"
    assert card.preprocess == zoo_timm.preset(config("test_resnet"))
    net = zoo_timm.find("test_resnet", "none", ()).build().net.eval()
    rows = torch.rand((2, 3, *card.preprocess.size), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(outputs(sha256, rows), net(rows))


def test_random_weights_are_equal_by_name_differ_between_names_and_leave_the_random_state():
    before = torch.get_rng_state()
    first, again, other = (
        zoo_timm.find(name, "none", ["a", "b"]).build().net
        for name in ["test_resnet", "test_resnet", "test_resnet.r160_in1k"]
    )
    assert torch.equal(first.conv1[0].weight, again.conv1[0].weight)
    assert not torch.equal(first.conv1[0].weight, other.conv1[0].weight)
    assert torch.equal(before, torch.get_rng_state())


def test_a_state_dict_of_own_classes_is_loaded_and_takes_the_labels(tmp_path):
    torch.manual_seed(5)
    net = timm.create_model("test_resnet", num_classes=3).eval()
    torch.save(net.state_dict(), tmp_path / "own.pth")
    sha256 = resolve(SMALL, str(tmp_path / "own.pth"), ["a", "b", "c"])
    rows = torch.rand((2, 3, 160, 160), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(outputs(sha256, rows), net(rows))
    assert read_card(store.path_of(sha256)).labels == ("a", "b", "c")
    message = refusal("test_resnet", str(tmp_path / "own.pth"), ["a", "b"])
    assert "do not fit timm:test_resnet with 2 outputs" in message


def test_a_state_dict_may_be_safetensors_as_timms_hub_has_it(tmp_path):
    torch.manual_seed(5)
    net = timm.create_model("test_resnet", num_classes=3)
    save_file(net.state_dict(), tmp_path / "model.safetensors")
    loaded = zoo_timm.find("test_resnet", str(tmp_path / "model.safetensors"), ["a", "b", "c"]).build().net
    assert all(torch.equal(tensor, net.state_dict()[name]) for name, tensor in loaded.state_dict().items())


def test_the_key_follows_the_name_the_weights_and_timms_version(tmp_path):
    torch.save({}, tmp_path / "a.pth")
    torch.save({"b": torch.zeros(1)}, tmp_path / "b.pth")
    asked = [("test_resnet", "none"), ("test_vit", "none"), ("test_vit.r160_in1k", ""), ("test_vit", "")]
    asked += [("test_vit", str(tmp_path / "a.pth")), ("test_vit", str(tmp_path / "b.pth"))]
    keys = [zoo_timm.find(name, weights, ()).key for name, weights in asked]
    assert len({str(sorted(key.items())) for key in keys}) == len(asked)
    assert all(key["timm"] == timm.__version__ for key in keys)


def test_pretrained_weights_are_timms_own_by_the_same_call(monkeypatch):
    """A double in place of the hub's file: the download itself is timm's."""
    torch.manual_seed(9)
    published = timm.create_model("test_resnet").state_dict()
    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", lambda *_, **__: dict(published))
    net = zoo_timm.find("test_resnet.r160_in1k", "", ()).build().net
    assert all(torch.equal(tensor, published[name]) for name, tensor in net.state_dict().items())


# --- what cannot be had -------------------------------------------------------------------------------------------


def test_unknown_name_is_refused_with_spellings_to_paste():
    message = refusal("resnet50.a1_in1")
    assert f"timm {timm.__version__} has no model 'resnet50.a1_in1'" in message
    assert "'timm:resnet50.a1_in1k'" in message
    assert "Did you mean" not in refusal("xyzzy")


def test_a_hub_name_of_timms_own_syntax_is_no_name():
    assert "has no model 'hf-hub:timm/resnet18.a1_in1k'" in refusal("hf-hub:timm/resnet18.a1_in1k")


def test_other_words_for_weights_are_refused_with_the_tags_of_that_architecture():
    message = refusal("resnet18.a1_in1k", "IMAGENET1K_V1")
    assert "weights='IMAGENET1K_V1': timm's weights are tags of the model's name" in message
    assert "'timm:resnet18.tv_in1k'" in message
    assert "weights='none'" in message
    assert "; cspresnet50d has none." in refusal("cspresnet50d", "best")


def test_a_model_without_pretrained_weights_says_none_and_a_path():
    message = refusal("cspresnet50d.untrained")
    assert "no pretrained weights for 'cspresnet50d.untrained'" in message
    assert "path of a state dict" in message
    assert "'none'" in message


def test_labels_of_another_number_are_refused_before_any_download(monkeypatch):
    monkeypatch.setattr(timm, "create_model", lambda *_, **__: pytest.fail("made a network"))
    message = refusal("resnet18.a1_in1k", "", ["a", "b"])
    assert "2 labels for timm:resnet18.a1_in1k with 1000 outputs" in message


def test_a_model_of_features_is_refused_and_takes_labels_with_weights_of_ones_own():
    message = refusal("vit_small_patch14_dinov2.lvd142m")
    assert "gives features, not classes (its num_classes is 0)" in message
    assert zoo_timm.find("vit_small_patch14_dinov2.lvd142m", "none", ["a", "b"]).key["weights"] == "none"
    assert "gives features" in refusal("vit_small_patch14_dinov2.lvd142m", "", ["a", "b"])


def test_a_model_of_other_channels_is_refused(monkeypatch):
    other = replace(get_pretrained_cfg("test_resnet"), input_size=(12, 160, 160))
    monkeypatch.setattr(timm.models, "get_pretrained_cfg", lambda name: other)
    assert "takes 12 channels; images have 3" in refusal("test_resnet", "none")


def test_classes_of_no_known_set_have_no_labels():
    assert zoo_timm.find("test_resnet", "none", ["a", "b"]).build().labels == ()


def test_missing_timm_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    assert "pip install 'gpuml[timm]'" in refusal("resnet18")


def test_weights_that_the_hub_does_not_give_name_the_file_and_where_to_put_it(monkeypatch):
    from huggingface_hub.errors import LocalEntryNotFoundError

    def unreachable(*_, **__):
        raise LocalEntryNotFoundError("An error happened while trying to locate the file on the Hub")

    monkeypatch.setattr("timm.models._hub.hf_hub_download", unreachable)
    message = refusal("test_resnet.r160_in1k")
    assert "the weights of timm:test_resnet.r160_in1k cannot be had (LocalEntryNotFoundError" in message
    assert "https://huggingface.co/timm/test_resnet.r160_in1k/resolve/main/model.safetensors" in message
    assert "HF_HOME" in message
    assert "set weights to its path" in message
    assert "'none'" in message


def test_offline_for_real_the_hubs_refusal_becomes_a_model_error(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    message = refusal("test_resnet.r160_in1k")
    assert re.search(r"cannot be had \(\w*(LocalEntryNotFound|Offline)\w*: ", message), message
    assert "hf download timm/test_resnet.r160_in1k" in message


def test_weights_at_an_address_go_to_torchs_cache_and_a_damaged_file_there_is_named(monkeypatch, tmp_path):
    def unreachable(*_, **__):
        raise OSError("Name or service not known")

    monkeypatch.setattr("torch.hub.urlopen", unreachable)
    address = get_pretrained_cfg("gcvit_xxtiny.in1k").url
    assert get_pretrained_cfg("gcvit_xxtiny.in1k").hf_hub_id is None
    place = tmp_path / "torch" / "hub" / "checkpoints" / address.rsplit("/", 1)[1]
    assert f"Put {address} at {place}" in refusal("gcvit_xxtiny.in1k")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(b"not weights")
    assert f"{place} may be damaged: delete it" in refusal("gcvit_xxtiny.in1k")


# --- hostile files ------------------------------------------------------------------------------------------------


def plant(kind, path, harm):
    """A file of weights that plain torch.load obeys."""
    state = {"a": Harm(harm)} if kind == "a call" else {"a": Stumble(), "b": Harm(harm)}
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path)


def runs_with_plain_torch(path, harm):
    torch.load(path, weights_only=False)
    return harm.exists()


KINDS = pytest.mark.parametrize("kind", ["a call", "a call after a TypeError"])


@KINDS
def test_hostile_weights_run_with_plain_torch_and_are_refused_here(kind, tmp_path):
    file, harm = tmp_path / "own.pth", tmp_path / "harm"
    plant(kind, file, harm)
    assert "no state dict that can be read safely" in refusal("test_resnet", str(file), ["a", "b"])
    assert not harm.exists()
    assert runs_with_plain_torch(file, harm)


@KINDS
def test_hostile_weights_in_torchs_cache_run_with_plain_torch_and_are_refused_here(kind, tmp_path):
    """After a TypeError timm 1.0.31 reads the file once more, in full: meant for a torch without weights_only."""
    name, harm = "gcvit_xxtiny.in1k", tmp_path / "harm"
    file = tmp_path / "torch" / "hub" / "checkpoints" / get_pretrained_cfg(name).url.rsplit("/", 1)[1]
    plant(kind, file, harm)
    assert f"the weights of timm:{name} cannot be had (" in refusal(name)
    assert not harm.exists()
    assert runs_with_plain_torch(file, harm)


@KINDS
def test_hostile_weights_in_the_hubs_cache_run_with_plain_torch_and_are_refused_here(kind, tmp_path, monkeypatch):
    """As a model has them that is not on the hub as safetensors."""
    file, harm = tmp_path / "hub" / "pytorch_model.bin", tmp_path / "harm"
    plant(kind, file, harm)

    def cached(repo_id, filename, **_):
        from huggingface_hub.errors import EntryNotFoundError

        if filename.endswith(".safetensors"):
            raise EntryNotFoundError(filename)
        return str(file)

    monkeypatch.setattr("timm.models._hub.hf_hub_download", cached)
    monkeypatch.setattr("timm.models._hub.load_state_dict_from_hf.__defaults__", ("pytorch_model.bin", True, None))
    assert "the weights of timm:test_resnet.r160_in1k cannot be had (" in refusal("test_resnet.r160_in1k")
    assert not harm.exists()
    assert runs_with_plain_torch(file, harm)
