"""hf: checkpoints made here, in folders and in a hub's cache, give what transformers' own pipeline gives, or errors."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from conftest import Harm, Stumble, picture
from PIL import Image
from torch import nn

from gpuml import ImageClassifier, ModelError, Preprocess
from gpuml.models import store, zoo_huggingface
from gpuml.models.file import load, read_card
from gpuml.models.huggingface_preset import preset
from gpuml.models.sources import resolve
from gpuml.worker.preprocess import normalise, resize_crop

PHOTOGRAPHS = Path(__file__).parents[1] / "examples" / "images"
FILES = [
    PHOTOGRAPHS / name for name in ("cat.png", "coffee.jpg", "flower.jpg", "motorcycle.jpg", "rocket.jpg", "temple.jpg")
]
ANIMALS = {number: f"animal {number}" for number in range(40)}
COMMIT = "0123456789abcdef0123456789abcdef01234567"

VIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
VIT |= {"image_size": 64, "patch_size": 16, "id2label": ANIMALS}
CONVNEXT = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "id2label": ANIMALS}


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    """No test reaches a hub; the caches are the test's own."""
    monkeypatch.setenv("GPUML_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def classifier(kind, **settings):
    """A random network of transformers whose logits spread over the labels."""
    config = transformers.CONFIG_MAPPING[kind](**settings)
    torch.manual_seed(0)
    net = transformers.AutoModelForImageClassification.from_config(config).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
        linear = [module for module in net.modules() if isinstance(module, nn.Linear)][-1]
        logits = net(torch.stack([tensor(image, 64) for image in images()])).logits
        linear.weight *= 3 / (logits - logits.mean(0)).std()
        linear.bias -= net(torch.stack([tensor(image, 64) for image in images()])).logits.mean(0)
    return net


def checkpoint(folder, kind="vit", processor=None, **settings):
    settings = settings or VIT
    classifier(kind, **settings).save_pretrained(folder)
    processor = processor or transformers.ViTImageProcessor(size={"height": 64, "width": 64})
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("checkpoints") / "vit")


@pytest.fixture
def own(vit, tmp_path):
    """A copy of it, to spoil."""
    return Path(shutil.copytree(vit, tmp_path / "own"))


def edit(path, **values):
    """Change keys of a JSON file; None removes them."""
    content = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def images():
    # At this size no crop below has half a pixel to round, see the test of an odd length.
    photographs = [Image.open(file).convert("RGB").resize((300, 225)) for file in FILES]
    return photographs + [picture(seed, 120, 90) for seed in range(6)]


def tensor(image, size):
    return torch.from_numpy(np.array(image.resize((size, size)))).permute(2, 0, 1) / 127.5 - 1


def refusal(name, weights="", labels=()):
    with pytest.raises(ModelError) as caught:
        zoo_huggingface.find(str(name), weights, labels).build()
    return str(caught.value)


def in_hub(folder, tmp_path, repository="acme/animals", branch="main", commit=COMMIT):
    """Lay a folder out as the hub's cache does after a download."""
    place = tmp_path / "hub" / f"models--{repository.replace('/', '--')}"
    shutil.copytree(folder, place / "snapshots" / commit)
    (place / "refs").mkdir(parents=True, exist_ok=True)
    (place / "refs" / branch).write_text(commit)


# --- the same as transformers -------------------------------------------------------------------------------------

CONVNEXT_PROCESSOR = {"size": {"shortest_edge": 64}, "crop_pct": 0.8}


@pytest.mark.parametrize("kind", ["vit", "convnext"])
def test_labels_and_probabilities_are_those_of_transformers_pipeline(kind, vit, tmp_path, monkeypatch):
    folder = vit
    if kind == "convnext":
        processor = transformers.ConvNextImageProcessor(**CONVNEXT_PROCESSOR)
        folder = checkpoint(tmp_path / "convnext", "convnext", processor, **CONVNEXT)
    pipeline = transformers.pipeline("image-classification", str(folder))
    expected = [{one["label"]: one["score"] for one in pipeline(image, top_k=40)} for image in images()]
    monkeypatch.chdir(folder.parent)
    given = ImageClassifier(model=f"hf:./{folder.name}").predict(images())
    best = [max(scores, key=scores.get) for scores in expected]
    assert len(set(best)) >= 5
    assert given["predictedLabel"].tolist() == best
    for scores, probability in zip(expected, given["probability"], strict=True):
        ordered = [scores[ANIMALS[number]] for number in range(40)]
        np.testing.assert_allclose(probability, ordered, atol=0.02)
    card = read_card(store.path_of(resolve(f"hf:./{folder.name}")))
    assert card.labels == tuple(ANIMALS.values())
    assert (
        card.preprocess
        == {
            "vit": Preprocess((64, 64), None, (0.5,) * 3, (0.5,) * 3, "bilinear"),
            "convnext": Preprocess(80, (64, 64), (0.5,) * 3, (0.5,) * 3, "bicubic"),
        }[kind]
    )


#: Of families that differ in what they wrap: a teacher's head, BatchNorm, windows.
SMALL = {
    "deit": {**VIT, "architectures": ["DeiTForImageClassification"]},
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
    "swin": {"image_size": 64, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
}


@pytest.mark.parametrize("kind", SMALL)
def test_a_family_exports_to_the_logits_of_transformers(kind, tmp_path):
    folder = checkpoint(tmp_path / kind, kind, **SMALL[kind])
    rows = torch.stack([tensor(image, 64) for image in images()])
    with torch.inference_mode():
        net = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
        expected = net(rows).logits
        given = load(store.path_of(resolve(f"hf:{folder}")), torch.device("cpu"))[0](rows)
    assert expected.std(0).mean() > 0.5
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4)


PROCESSORS = {
    "vit": (transformers.ViTImageProcessor(size={"height": 64, "width": 48}), (64, 48)),
    "vit, bicubic": (transformers.ViTImageProcessor(size={"height": 64, "width": 64}, resample=3), (64, 64)),
    "not scaled to 0..1": (
        transformers.ViTImageProcessor(size={"height": 64, "width": 64}, do_rescale=False, image_mean=[100.0] * 3),
        (64, 64),
    ),
    "not normalised": (transformers.ViTImageProcessor(size={"height": 64, "width": 64}, do_normalize=False), (64, 64)),
    "scaled to 0..2": (
        transformers.ViTImageProcessor(
            size={"height": 64, "width": 64}, rescale_factor=1 / 127.5, image_mean=[1.0] * 3
        ),
        (64, 64),
    ),
    "deit": (
        transformers.DeiTImageProcessor(size={"height": 72, "width": 72}, crop_size={"height": 64, "width": 64}),
        (64, 64),
    ),
    "clip": (
        transformers.CLIPImageProcessor(size={"shortest_edge": 64}, crop_size={"height": 64, "width": 64}),
        (64, 64),
    ),
    "mobilenet": (
        transformers.MobileNetV2ImageProcessor(size={"shortest_edge": 72}, crop_size={"height": 64, "width": 64}),
        (64, 64),
    ),
    "convnext, cropped": (transformers.ConvNextImageProcessor(size={"shortest_edge": 224}, crop_pct=0.875), (224, 224)),
    "convnext, 384": (transformers.ConvNextImageProcessor(size={"shortest_edge": 384}), (384, 384)),
    "poolformer": (
        transformers.PoolFormerImageProcessor(size={"shortest_edge": 72}, crop_size={"height": 64, "width": 64}),
        (64, 64),
    ),
    "efficientnet": (
        transformers.EfficientNetImageProcessor(size={"height": 64, "width": 64}, rescale_factor=1 / 127.5),
        (64, 64),
    ),
    "efficientnet, offset": (
        transformers.EfficientNetImageProcessor(
            size={"height": 64, "width": 64}, rescale_factor=1 / 127.5, rescale_offset=True, image_mean=[0.1, 0.2, 0.3]
        ),
        (64, 64),
    ),
    "efficientnet, not include_top": (
        transformers.EfficientNetImageProcessor(size={"height": 64, "width": 64}, include_top=False),
        (64, 64),
    ),
    "segformer": (
        transformers.SegformerImageProcessor(
            size={"height": 64, "width": 64}, crop_size={"height": 32, "width": 32}, do_center_crop=True
        ),
        (64, 64),
    ),
    "beit, cropped": (
        transformers.BeitImageProcessor(
            size={"height": 80, "width": 72}, crop_size={"height": 64, "width": 64}, do_center_crop=True
        ),
        (64, 64),
    ),
}


@pytest.mark.parametrize(("processor", "size"), PROCESSORS.values(), ids=PROCESSORS)
@pytest.mark.parametrize("resized", [(300, 225), (96, 200), (40, 50)])
def test_preset_gives_the_pixels_of_the_processor_to_two_levels(processor, size, resized):
    """Images whose crops begin at whole pixels: elsewhere processors begin one pixel earlier, at times."""
    image = Image.open(FILES[4]).convert("RGB").resize(resized)
    preprocess = preset(processor)
    expected = processor(image, return_tensors="pt")["pixel_values"][0]
    given = normalise(resize_crop(torch.from_numpy(np.array(image)).permute(2, 0, 1), preprocess)[None], preprocess)[0]
    assert given.shape == expected.shape == (3, *size)
    levels = (given - expected).abs() * torch.tensor(preprocess.std).view(3, 1, 1) * 255
    assert levels.max() <= 2.01, levels.max()
    assert levels.mean() <= 0.2, levels.mean()


def test_where_an_odd_length_is_cut_off_the_crop_may_begin_one_pixel_later():
    processor = transformers.CLIPImageProcessor(size={"shortest_edge": 64}, crop_size={"height": 64, "width": 64})
    image = Image.open(FILES[4]).convert("RGB").resize((67, 64))  # 3 columns to cut off
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    preprocess = preset(processor)
    assert torch.equal(resize_crop(pixels, preprocess), pixels[:, :, 2:66])
    theirs = processor(image, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(theirs, normalise(pixels[None, :, :, 1:65], preprocess))


@pytest.mark.parametrize(
    ("processor", "reason"),
    [
        (transformers.LevitImageProcessor(), "image processor LevitImageProcessor is none of those that gpuml reads"),
        (transformers.ViTImageProcessor(resample=1), "resizes with Pillow's filter 1"),
        (transformers.ViTImageProcessor(do_resize=False), "do_resize=False"),
        (transformers.ViTImageProcessor(size={"longest_edge": 64}), "size={'longest_edge': 64}"),
        (transformers.ViTImageProcessor(size={"shortest_edge": 64, "longest_edge": 99}), "'longest_edge': 99"),
        (transformers.ViTImageProcessor(size={"shortest_edge": 64}), "crop=None leaves images of many sizes"),
        (transformers.ViTImageProcessor(do_pad=True, pad_size={"height": 300, "width": 300}), r"pads \(do_pad=True\)"),
        (transformers.ViTImageProcessor(rescale_factor=0.0), "rescale_factor=0"),
        (transformers.ViTImageProcessor(image_mean=[0.5]), r"normalises with \(0.5,\)"),
        (transformers.CLIPImageProcessor(size={"shortest_edge": 64}), "does not fit into resize=64"),
        (transformers.ConvNextImageProcessor(size={"height": 64, "width": 64}), "size={'height': 64, 'width': 64}"),
        (
            transformers.ConvNextImageProcessor(do_center_crop=True, crop_size={"height": 64, "width": 64}),
            "crop_size={'height': 64, 'width': 64}",
        ),
        (transformers.PoolFormerImageProcessor(size={"height": 64, "width": 48}), "size={'height': 64, 'width': 48}"),
    ],
)
def test_what_a_preprocess_does_not_have_is_refused_saying_what(processor, reason):
    with pytest.raises(ModelError, match=reason):
        preset(processor)


def test_a_processor_that_does_not_map_is_refused_unless_a_preprocess_is_given(own):
    edit(own / "preprocessor_config.json", image_processor_type="LevitImageProcessor")
    with pytest.raises(ModelError, match=r"image processor LevitImageProcessor is none .*; give preprocess="):
        resolve(f"hf:{own}")
    preprocess = Preprocess((64, 64), None)
    assert read_card(store.path_of(resolve(f"hf:{own}", preprocess=preprocess))).preprocess == preprocess


def test_a_checkpoint_without_a_processor_says_so(own):
    (own / "preprocessor_config.json").unlink()
    built = zoo_huggingface.find(str(own), "", ()).build()
    assert built.preprocess is None
    assert built.no_preprocess.startswith("its image processor cannot be had (")


# --- labels, activation, key --------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["plant ", "LABEL_"])
def test_labels_are_in_the_order_of_the_ids_and_generic_ones_stay(own, prefix):
    edit(own / "config.json", id2label={str(number): f"{prefix}{number}" for number in reversed(range(40))})
    assert zoo_huggingface.find(str(own), "", ()).build().labels == tuple(f"{prefix}{number}" for number in range(40))


def test_ids_with_a_gap_are_refused_unless_labels_are_given(own):
    edit(own / "config.json", id2label={"1": "a", "2": "b"}, label2id=None)
    message = refusal(own)
    assert "the ids of its id2label are [1, 2], not 0 to 1" in message
    assert "labels=[...]" in message
    assert zoo_huggingface.find(str(own), "", ["a", "b"])


def test_labels_of_another_number_are_refused_before_the_weights_are_read(own):
    (own / "model.safetensors").unlink()
    message = refusal(own, "", ["a", "b"])
    assert f"2 labels for hf:{own} with 40 outputs" in message


@pytest.mark.parametrize(
    ("values", "activation"),
    [
        ({}, "softmax"),
        ({"problem_type": "single_label_classification"}, "softmax"),
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({"problem_type": "regression"}, "none"),
    ],
)
def test_activation_is_that_of_transformers_pipeline(own, values, activation):
    edit(own / "config.json", **values)
    assert zoo_huggingface.find(str(own), "", ()).build().activation == activation


def test_the_key_of_a_folder_follows_its_content_and_not_its_path_or_hidden_files(own, vit):
    def key(folder):
        return zoo_huggingface.find(str(folder), "", ()).key

    first = key(vit)
    assert key(own) == first
    (own / ".cache").mkdir()
    (own / ".cache" / "note").write_text("downloaded today")
    assert key(own) == first
    edit(own / "preprocessor_config.json", resample=3)
    assert key(own) != first


# --- the hub, from its cache --------------------------------------------------------------------------------------


def test_a_checkpoint_in_the_hubs_cache_serves_without_a_network_by_its_commit(vit, tmp_path):
    in_hub(vit, tmp_path)
    found = zoo_huggingface.find("acme/animals", "", ())
    assert found.key["commit"] == COMMIT
    assert found.key == zoo_huggingface.find("acme/animals@main", "", ()).key
    built = found.build()
    assert built.labels == tuple(ANIMALS.values())
    assert built.preprocess.size == (64, 64)


def test_a_revision_is_another_checkpoint_and_a_branch_that_moved_another_key(vit, own, tmp_path):
    in_hub(vit, tmp_path)
    edit(own / "config.json", id2label={str(number): f"plant {number}" for number in range(40)}, label2id=None)
    in_hub(own, tmp_path, branch="plants", commit=COMMIT[::-1])
    plants = zoo_huggingface.find("acme/animals@plants", "", ())
    assert plants.build().labels[0] == "plant 0"
    before = zoo_huggingface.find("acme/animals", "", ())
    (tmp_path / "hub" / "models--acme--animals" / "refs" / "main").write_text(COMMIT[::-1])
    after = zoo_huggingface.find("acme/animals", "", ())
    assert (before.key["commit"], after.key["commit"]) == (COMMIT, COMMIT[::-1])
    assert before.build().labels[0] == "animal 0"  # what its key says, though main has moved


def test_offline_for_real_the_refusal_names_the_repository_and_how_to_bring_it():
    message = refusal("acme/nowhere@v2")
    assert "hf:acme/nowhere@v2 cannot be had (LocalEntryNotFoundError" in message
    assert "'hf download acme/nowhere --revision v2 --local-dir folder'" in message
    assert "model='hf:./folder'" in message


def test_weights_that_are_not_in_the_cache_say_how_to_bring_them(own, tmp_path):
    (own / "model.safetensors").unlink()
    in_hub(own, tmp_path)
    message = refusal("acme/animals")
    assert "hf:acme/animals cannot be loaded (OSError" in message
    assert f"hf download acme/animals --revision {COMMIT}" in message


# --- what cannot be had -------------------------------------------------------------------------------------------


def test_a_checkpoint_with_code_of_its_own_is_refused_and_the_code_does_not_run(own, tmp_path):
    ran = tmp_path / "ran"
    (own / "modeling_own.py").write_text(f"open({str(ran)!r}, 'w')\n")
    remote = {"AutoConfig": "modeling_own.Config", "AutoModelForImageClassification": "modeling_own.Net"}
    edit(own / "config.json", model_type="own_net", auto_map=remote)
    message = refusal(own)
    assert "gpuml runs no code from a hub" in message
    assert "from_module" in message
    assert not ran.exists()


def test_code_beside_a_network_that_transformers_knows_is_ignored(own, tmp_path):
    ran = tmp_path / "ran"
    (own / "modeling_own.py").write_text(f"open({str(ran)!r}, 'w')\n")
    edit(own / "config.json", auto_map={"AutoModelForImageClassification": "modeling_own.Net"})
    edit(own / "preprocessor_config.json", auto_map={"AutoImageProcessor": "modeling_own.Processor"})
    assert zoo_huggingface.find(str(own), "", ()).build().preprocess.size == (64, 64)
    assert not ran.exists()


def test_a_checkpoint_that_was_not_trained_for_classes_is_refused(own):
    from safetensors.torch import load_file, save_file

    state = load_file(own / "model.safetensors")
    save_file({name: value for name, value in state.items() if "classifier" not in name}, own / "model.safetensors")
    message = refusal(own)
    assert "has no weights for classifier.bias, classifier.weight" in message
    assert "not trained as an image classifier" in message


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("bert", "is a 'bert', which is no image classifier"),
        ("own_net", "is of model_type 'own_net', which is unknown"),
    ],
)
def test_a_checkpoint_of_another_kind_is_refused(own, kind, reason):
    edit(own / "config.json", model_type=kind)
    assert reason in refusal(own)


def test_weights_are_refused_as_a_checkpoint_holds_its_own(vit):
    for weights in ("none", "./own.safetensors"):
        message = refusal(vit, weights)
        assert f"weights={weights!r}: the checkpoint hf:{vit} holds its own" in message
        assert "from_module" in message


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("./nowhere", "there is no such folder on the driver"),
        ("~nosuchuser", "there is no such folder on the driver"),
        ("./" + "a" * 5000, "there is no such folder on the driver"),
        (str(FILES[0]), "that is a file"),
        ("", "names no checkpoint"),
        ("a/b/c", "names no checkpoint"),
        ("acme/animals@", "names no checkpoint"),
        ("timm/resnet18.a1_in1k", "give model='timm:resnet18.a1_in1k'"),
    ],
)
def test_a_name_that_is_none_is_refused_saying_what_to_type(name, reason):
    assert reason in refusal(name)


def test_a_folder_with_a_damaged_or_missing_config_is_refused(own, tmp_path):
    for text in ("{", "[]", "[" * 100_000, '{"model_type": "vit", "hidden_size": "many"}'):
        (own / "config.json").write_text(text)
        assert "config.json" in refusal(own)
    (tmp_path / "empty").mkdir()
    message = refusal(tmp_path / "empty")
    assert "has no config.json to read (FileNotFoundError" in message
    assert "save_pretrained" in message


def test_damaged_weights_are_refused(own):
    (own / "model.safetensors").write_bytes(b"not weights")
    assert "cannot be loaded (" in refusal(own)


def test_missing_transformers_says_what_to_install(monkeypatch, vit):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install 'gpuml[hf]'" in refusal(vit)


# --- hostile files ------------------------------------------------------------------------------------------------


@pytest.fixture
def pickled(own):
    """The weights of `own` as torch.save writes them, which is all that it has."""
    from safetensors.torch import load_file

    state = load_file(own / "model.safetensors")
    (own / "model.safetensors").unlink()
    torch.save(state, own / "pytorch_model.bin")
    return own / "pytorch_model.bin"


@pytest.mark.parametrize("zip_file", [True, False])
@pytest.mark.parametrize("before", [(), (Stumble(),)], ids=["a call", "a call after a TypeError"])
def test_hostile_weights_of_a_checkpoint_run_with_plain_torch_and_are_refused_here(
    before, zip_file, pickled, own, tmp_path
):
    harmless, harm = torch.load(pickled, weights_only=True), tmp_path / "harm"
    net = zoo_huggingface.find(str(own), "", ()).build().net
    assert torch.equal(net.net.classifier.weight, harmless["classifier.weight"])  # it is the file that is read
    hostile = {**harmless, "a": [*before, Harm(harm)]}
    torch.save(hostile, pickled, _use_new_zipfile_serialization=zip_file)
    assert f"hf:{own} cannot be loaded (" in refusal(own)
    assert not harm.exists()
    torch.load(pickled, weights_only=False)
    assert harm.exists()


@pytest.mark.parametrize("kernel", ["acme/kernel", "kernels-community/flash-attn2", "flash_attention_2"])
@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_an_implementation_that_a_config_chooses_is_not_looked_for(own, key, kernel):
    """transformers would fetch a kernel of that name from the hub, and run it."""
    edit(own / "config.json", **{key: kernel})
    config = zoo_huggingface.find(str(own), "", ()).build().net.net.config
    assert (config._attn_implementation, config._experts_implementation) == ("sdpa", "eager")


@pytest.mark.parametrize(
    "values",
    [
        {"num_labels": 5_000_000, "id2label": None, "label2id": None},
        {"num_labels": 1e300, "id2label": None, "label2id": None},
        {"part": {"num_labels": 5_000_000}},
    ],
)
def test_more_labels_than_a_classifier_has_are_refused_before_they_are_made(own, values, monkeypatch):
    edit(own / "config.json", **values)
    monkeypatch.setattr(transformers.ViTConfig, "from_dict", lambda values: pytest.fail("made"))
    assert f"hf:{own} has more than 1000000 labels" in refusal(own)


def test_more_names_of_labels_than_a_classifier_has_are_refused(own, monkeypatch):
    monkeypatch.setattr(zoo_huggingface, "_MOST_LABELS", 39)
    assert f"hf:{own} has more than 39 labels" in refusal(own)


def test_a_network_of_timm_in_a_checkpoint_of_transformers_is_refused(own):
    """Its settings choose files that timm reads, and repositories."""
    edit(own / "config.json", model_type="timm_wrapper", architecture="resnet18")
    assert "is a network of timm, 'resnet18' (model_type 'timm_wrapper'): give model='timm:...'" in refusal(own)
    edit(own / "config.json", model_type="vit", architecture=None, backbone_config={"model_type": "timm_backbone"})
    assert "(model_type 'timm_backbone'): give model='timm:...'" in refusal(own)


def test_a_quantized_checkpoint_is_refused(own):
    """What reads it may be a kernel of the hub."""
    edit(own / "config.json", quantization_config={"quant_method": "eetq"})
    assert "is quantized (quantization_config" in refusal(own)


def test_a_folder_with_an_adapter_is_refused(own):
    (own / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "acme/base"}))
    message = refusal(own)
    assert "adapter_config.json" in message
    assert "merge_and_unload()" in message


@pytest.mark.parametrize("index", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
@pytest.mark.parametrize(
    "name", ["../weights", "/weights", ".hidden", ".hidden/weights", "below/weights", "", 5, ["a"]]
)
def test_weights_that_an_index_has_elsewhere_are_refused(own, index, name):
    """What is not a plain file of the folder is not in the key that the cache knows the model by."""
    (own / index).write_text(json.dumps({"metadata": {}, "weight_map": {"a": "model.safetensors", "b": name}}))
    message = refusal(own)
    assert f"{index} of hf:{own} names {name!r}, which is no plain name of a file" in message


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": ["a"]}', "[" * 100_000])
def test_an_index_that_is_damaged_is_refused(own, content):
    (own / "model.safetensors.index.json").write_text(content)
    assert f"model.safetensors.index.json of hf:{own} cannot be read" in refusal(own)


def test_weights_in_two_files_are_read(own, vit):
    net = transformers.AutoModelForImageClassification.from_pretrained(vit)
    (own / "model.safetensors").unlink()
    net.save_pretrained(own, max_shard_size="20KB")
    assert (own / "model.safetensors.index.json").is_file()
    built = zoo_huggingface.find(str(own), "", ()).build().net.net
    assert torch.equal(built.classifier.weight, net.classifier.weight)


def test_a_config_that_names_hidden_weights_is_refused(own):
    (own / ".weights.safetensors").write_bytes((own / "model.safetensors").read_bytes())
    edit(own / "config.json", transformers_weights=".weights.safetensors")
    assert f"config.json of hf:{own} names '.weights.safetensors', which is no plain name of a file" in refusal(own)
