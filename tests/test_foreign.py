"""Files of others: torch.export and TorchScript archives without a card, and zips around them."""

import json
import os
import pickle
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from conftest import PLAIN, Pooled, Quadrants, picture
from torch import nn

from gpuml import ImageClassifier, ModelError, ModelFileError, Preprocess, save_model
from gpuml.models import bundle, sources, store
from gpuml.models.file import load, read_card
from gpuml.models.sources import resolve

CPU = torch.device("cpu")
ROWS = torch.rand((3, 3, 32, 32), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GPUML_HOME", str(tmp_path / "cache"))


def exported(net, path, rows=2, dynamic=True):
    shapes = {"x": {0: torch.export.Dim("batch")}} if dynamic else None
    torch.export.save(torch.export.export(net, (torch.zeros(rows, 3, 32, 32),), dynamic_shapes=shapes), path)
    return str(path)


def jit(function, path, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(getattr(torch.jit, function)(*args), path)
    return str(path)


def zipped(path, **members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name.replace("__", "/").replace("_DOT_", "."), content)
    return str(path)


def refusal(model, labels=(), preprocess=PLAIN):
    with pytest.raises(ModelError) as caught:
        resolve(model, "", labels, preprocess)
    return str(caught.value)


def outputs(sha256):
    with torch.inference_mode():
        return load(store.path_of(sha256), CPU)[0](ROWS)


# --- archives without a card --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["export", "trace", "script"])
def test_an_archive_without_a_card_becomes_a_model_file(kind, tmp_path):
    net = Pooled().eval()
    path = tmp_path / "net.pt2"
    model = (
        exported(net, path)
        if kind == "export"
        else jit(kind, path, net, *([torch.zeros(1, 3, 32, 32)] if kind == "trace" else []))
    )
    sha256 = resolve(model, "", list("abcd"), PLAIN)
    card = read_card(store.path_of(sha256))
    assert (card.labels, card.preprocess, card.width, card.activation) == (tuple("abcd"), PLAIN, 4, "softmax")
    with torch.inference_mode():
        torch.testing.assert_close(outputs(sha256), net(ROWS))
    assert resolve(model, "", list("abcd"), PLAIN) == sha256
    assert read_card(store.path_of(resolve(model, "", (), PLAIN))).labels == ()


def test_a_second_request_for_an_archive_writes_nothing(tmp_path, monkeypatch):
    model = exported(Pooled(), tmp_path / "net.pt2")
    sha256 = resolve(model, "", (), PLAIN)
    monkeypatch.setattr(sources, "rewrite", None)
    assert resolve(model, "", (), PLAIN) == sha256


def test_an_archive_without_a_card_needs_a_preprocess(tmp_path):
    message = refusal(exported(Pooled(), tmp_path / "net.pt2"), preprocess=None)
    assert "give preprocess=" in message
    assert "net.pt2" in message


def test_labels_of_another_number_are_refused_with_both(tmp_path):
    message = refusal(exported(Pooled(), tmp_path / "net.pt2"), labels=["a", "b"])
    assert "2 labels" in message
    assert "4 outputs" in message


def test_an_archive_of_a_fixed_batch_is_refused_when_it_is_resolved(tmp_path):
    assert "one number of rows" in refusal(exported(Pooled(), tmp_path / "net.pt2", dynamic=False))

    class Fixed(nn.Module):
        def forward(self, x):
            return x.mean((2, 3)).view(2, 3)

    trace = jit("trace", tmp_path / "net.pt", Fixed(), torch.zeros(2, 3, 32, 32))
    assert "one number of rows" in refusal(trace)


def test_an_archive_of_another_size_is_refused_when_it_is_resolved(tmp_path):
    model = exported(nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 4)), tmp_path / "net.pt2", dynamic=False)
    assert "another size" in refusal(model, preprocess=Preprocess(resize=48, crop=48))


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x):
        return self.norm(x).amax((2, 3))


def test_an_archive_that_mixes_rows_is_refused_when_it_is_resolved(tmp_path):
    """As an export in train mode does, without a word of torch's."""
    assert "mixes the rows" in refusal(exported(Normed().train(), tmp_path / "net.pt2"))


def test_torchscript_saved_in_train_mode_is_run_in_evaluation_mode(tmp_path):
    net = Normed().train()
    sha256 = resolve(jit("script", tmp_path / "net.pt", net), "", (), PLAIN)
    with torch.inference_mode():
        torch.testing.assert_close(outputs(sha256), net.eval()(ROWS))


def test_an_archive_that_gives_a_tuple_is_refused_when_it_is_resolved(tmp_path):
    class Two(nn.Module):
        def forward(self, x):
            return x.mean((2, 3)), x

    assert "gives a tuple" in refusal(exported(Two(), tmp_path / "net.pt2"))


def test_float64_torchscript_is_run_in_float32(tmp_path):
    sha256 = resolve(jit("script", tmp_path / "net.pt", Pooled().double()), "", (), PLAIN)
    assert outputs(sha256).dtype == torch.float32


def test_the_same_network_exported_from_two_places_is_one_model_file(tmp_path):
    """Sample inputs and source lines of the author's are no part of it."""
    net, other = Pooled(), tmp_path / "other.pt2"
    first = exported(net, tmp_path / "net.pt2")
    torch.export.save(
        torch.export.export(net, (torch.ones(2, 3, 32, 32),), dynamic_shapes={"x": {0: torch.export.Dim("batch")}}),
        other,
    )
    assert resolve(first, "", (), PLAIN) == resolve(str(other), "", (), PLAIN)


def test_file_urls_may_be_quoted_or_not(tmp_path):
    folder = tmp_path / "a folder é 100%25"
    folder.mkdir()
    save_model(Pooled(), folder / "net 1.pt2", preprocess=PLAIN)
    plain = resolve(str(folder / "net 1.pt2"))
    assert resolve((folder / "net 1.pt2").as_uri()) == plain
    assert resolve(f"file:{folder}/net 1.pt2") == plain
    assert resolve(f"file://{folder}/net 1.pt2") == plain
    net = torchvision.models.squeezenet1_1(num_classes=2)
    torch.save(net.state_dict(), folder / "w 1.pth")
    small = Preprocess(resize=64, crop=64)
    zoo = ("torchvision:squeezenet1_1", str(folder / "w 1.pth"), ["a", "b"], small)
    assert resolve(zoo[0], (folder / "w 1.pth").as_uri(), *zoo[2:]) == resolve(*zoo)


def test_an_export_of_an_old_torch_is_called_that(tmp_path):
    with zipfile.ZipFile(tmp_path / "old.pt2", "w") as archive:
        archive.writestr("serialized_exported_program.json", "{}")
        archive.writestr("version", "7")
    assert "before torch 2.8" in refusal(str(tmp_path / "old.pt2"))


class Rescale(nn.Module):
    def forward(self, x):
        if bool(x.max() > 2.2):
            x = x / 10
        return x.mean((2, 3))


class First(nn.Module):
    def forward(self, x):
        return x.mean((2, 3)) * torch.where(x[0].mean() > 1.5, -5.0, 1.0)


class Last(nn.Module):
    def forward(self, x):
        pooled = x.mean((2, 3))
        return pooled + (pooled[-1] < -1.0).float()


@pytest.mark.parametrize("net", [Rescale(), First(), Last()], ids=lambda net: type(net).__name__)
def test_what_one_kind_of_row_makes_of_the_others_is_seen(net, tmp_path):
    with pytest.raises(ModelError, match="mixes the rows"):
        save_model(net, tmp_path / "net.pt2", preprocess=PLAIN)


# --- zips ---------------------------------------------------------------------------------------------------------


def test_a_zip_as_the_deep_java_librarys_tutorial_packs_it_gives_the_answers_of_eager_torch(tmp_path):
    """A traced resnet18 with one fixed example, and a synset, in a zip."""
    torch.manual_seed(0)
    net = torchvision.models.resnet18(num_classes=7).eval()
    network = jit("trace", tmp_path / "resnet18.pt", net, torch.rand(1, 3, 224, 224))
    names = [f"n0{i} thing, number {i}" for i in range(7)]
    members = {"resnet18__resnet18_DOT_pt": Path(network).read_bytes(), "resnet18__synset_DOT_txt": "\n".join(names)}
    model = zipped(tmp_path / "resnet18.zip", **members)
    photos = [picture(seed, 300, 260) for seed in range(5)]
    answers = ImageClassifier(model=model, preprocess=Preprocess(), rawPredictionCol="raw").predict(photos)
    assert answers.error.isna().all()
    preset = torchvision.models.ResNet18_Weights.DEFAULT.transforms()
    with torch.inference_mode():
        expected = net(torch.stack([preset(photo) for photo in photos]))
    assert np.abs(np.stack(answers.raw) - expected.numpy()).max() < 0.02 * expected.abs().max()
    assert answers.predictedLabel.tolist() == [names[i] for i in expected.argmax(1).tolist()]


@pytest.fixture
def network(tmp_path):
    save_model(Quadrants(), tmp_path / "inner.pt2", preprocess=PLAIN)
    return (tmp_path / "inner.pt2").read_bytes()


def test_a_zip_around_a_model_file_keeps_its_card_but_for_the_synset(network, tmp_path):
    names = [f"label {i}" for i in range(12)]
    names[3] = "a\vlabel\x85 of one line"
    model = zipped(tmp_path / "a.zip", net_DOT_pt2=network, synset_DOT_txt="\ufeff" + "\r\n".join(names) + "\r\n\r\n")
    card = read_card(store.path_of(resolve(model)))
    assert card.labels == tuple(names)
    assert card.preprocess == PLAIN
    given = [str(i) for i in range(12)]
    assert read_card(store.path_of(resolve(model, "", given))).labels == tuple(given)
    assert resolve(zipped(tmp_path / "b.zip", net_DOT_pt2=network)) == resolve(str(tmp_path / "inner.pt2"))


def test_a_synset_of_another_number_is_refused_with_both(network, tmp_path):
    message = refusal(zipped(tmp_path / "a.zip", net_DOT_pt2=network, synset_DOT_txt="one\ntwo"))
    assert "2 labels" in message
    assert "12 outputs" in message
    assert ".incoming" not in message


def test_errors_name_the_zip_and_no_temporary_file(tmp_path):
    network = Path(jit("script", tmp_path / "n.pt", Pooled())).read_bytes()
    message = refusal(zipped(tmp_path / "a.zip", net_DOT_pt=network), preprocess=None)
    assert f"the network in {tmp_path / 'a.zip'}" in message
    assert ".incoming" not in message


def test_a_zip_of_two_networks_is_refused(network, tmp_path):
    message = refusal(zipped(tmp_path / "a.zip", one_DOT_pt2=network, two_DOT_pt=network))
    assert "one.pt2, two.pt" in message


def test_a_zip_without_a_network_is_refused(tmp_path):
    assert "it holds synset.txt" in refusal(zipped(tmp_path / "a.zip", synset_DOT_txt="a"))


def test_names_in_a_zip_lead_nowhere(network, tmp_path):
    """The network is written to a name of ours, whatever the zip says."""
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("../../escaped.pt2", network)
    assert resolve(str(tmp_path / "a.zip"))
    assert not list(tmp_path.parent.glob("**/escaped.pt2"))


def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(bundle, "_MOST_UNPACKED", 1 << 20)
    model = zipped(tmp_path / "a.zip", net_DOT_pt=bytes(8 << 20))
    monkeypatch.setattr(bundle.shutil, "copyfileobj", lambda *_: pytest.fail("unpacked"))
    assert "refused" in refusal(model)


def test_a_zip_in_a_zip_is_refused(network, tmp_path):
    inner = Path(zipped(tmp_path / "a.zip", net_DOT_pt2=network)).read_bytes()
    assert "a zip of others again" in refusal(zipped(tmp_path / "b.zip", net_DOT_pt=inner))


def test_a_zip_that_lies_of_a_members_size_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(bundle, "_MOST_UNPACKED", 1 << 16)
    whole = bytearray(Path(zipped(tmp_path / "a.zip", net_DOT_pt=bytes(1 << 20))).read_bytes())
    directory = whole.rindex(b"PK\x01\x02")
    whole[directory + 20 : directory + 24] = (1 << 30).to_bytes(4, "little")  # compressed bytes
    (tmp_path / "b.zip").write_bytes(whole)
    monkeypatch.setattr(bundle.shutil, "copyfileobj", lambda *_: pytest.fail("unpacked"))
    assert "would be" in refusal(str(tmp_path / "b.zip"))


def test_a_huge_synset_is_refused(network, tmp_path):
    model = zipped(tmp_path / "a.zip", net_DOT_pt2=network, synset_DOT_txt="a\n" * (1 << 23) + "b")
    assert "synset.txt would be" in refusal(model)


def test_what_is_checked_is_what_is_read_whoever_writes_to_the_path(tmp_path, monkeypatch):
    """Another file takes the path's place between the check and the reading."""
    model = exported(Pooled(), tmp_path / "net.pt2")
    wanted = resolve(model, "", (), PLAIN)
    Path(model).unlink()
    exported(Pooled(), tmp_path / "net.pt2")
    other = Path(exported(Pooled(seed=9), tmp_path / "other.pt2"))
    find_card = sources.find_card

    def swapping(path):
        found = find_card(path)
        if other.exists():
            os.replace(other, model)
        return found

    monkeypatch.setattr(sources, "find_card", swapping)
    monkeypatch.setattr(store, "recall", lambda request: None)
    assert resolve(model, "", (), PLAIN) == wanted
    assert not other.exists()


def test_every_truncated_zip_is_refused(network, tmp_path):
    whole = zipped(tmp_path / "a.zip", net_DOT_pt2=network, synset_DOT_txt="a\nb")
    data = Path(whole).read_bytes()
    for length in np.linspace(0, len(data) - 1, 25).astype(int).tolist():
        (tmp_path / "cut.zip").write_bytes(data[:length])
        with pytest.raises(ModelFileError):
            resolve(str(tmp_path / "cut.zip"), "", (), PLAIN)


def test_damaged_members_of_a_zip_are_refused(network, tmp_path):
    data = bytearray(Path(zipped(tmp_path / "a.zip", net_DOT_pt2=network)).read_bytes())
    data[len(data) // 2] ^= 0xFF
    (tmp_path / "a.zip").write_bytes(data)
    assert "damaged" in refusal(str(tmp_path / "a.zip"))


def test_a_hostile_network_in_a_zip_is_refused_as_it_is_outside(tmp_path):
    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    message = refusal(zipped(tmp_path / "a.zip", net_DOT_pt=pickle.dumps(Payload())))
    assert "pickle" in message
    assert not (tmp_path / "ran").exists()
    torch.save(Payload(), tmp_path / "net.pt")
    assert "pickle" in refusal(zipped(tmp_path / "b.zip", net_DOT_pt=(tmp_path / "net.pt").read_bytes()))
    assert not (tmp_path / "ran").exists()


# --- networks that torch.export refuses ---------------------------------------------------------------------------


class Branching(nn.Module):
    """Its branch on a value cannot be exported, and scripts as it is."""

    def forward(self, x):
        pooled = x.mean((2, 3))
        if bool(pooled.sum() > 1e6):
            pooled = -pooled
        return pooled


def kind_of(path):
    with zipfile.ZipFile(path) as archive:
        return "export" if any(name.endswith("archive_format") for name in archive.namelist()) else "torchscript"


def test_a_network_that_export_refuses_is_scripted(tmp_path, caplog):
    save_model(Branching(), tmp_path / "net.pt2", preprocess=PLAIN)
    assert kind_of(tmp_path / "net.pt2") == "torchscript"
    forward, card = load(tmp_path / "net.pt2", CPU)
    assert card.width == 3
    assert "becomes TorchScript, by torch.jit.script" in caplog.text
    with torch.inference_mode():
        torch.testing.assert_close(forward(ROWS), ROWS.mean((2, 3)))
        torch.testing.assert_close(forward(ROWS + 1e6), -(ROWS + 1e6).mean((2, 3)))  # the branch is alive


def test_a_network_that_export_and_script_refuse_is_traced_if_nothing_is_lost(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("not today")

    monkeypatch.setattr(torch.export, "export", refuse)
    monkeypatch.setattr(torch.jit, "script", refuse)
    save_model(Pooled(), tmp_path / "net.pt2", preprocess=PLAIN)
    assert kind_of(tmp_path / "net.pt2") == "torchscript"
    with torch.inference_mode():
        torch.testing.assert_close(load(tmp_path / "net.pt2", CPU)[0](ROWS), Pooled()(ROWS))


class Lost(nn.Module):
    """Script refuses its **kwargs; a trace would lose its branch, which agrees on the samples."""

    def __init__(self, large):
        super().__init__()
        self.large = large

    def forward(self, x, **_):
        pooled = x.mean((2, 3))
        if self.large(pooled):
            pooled = -pooled
        return pooled


LARGE = [
    lambda x: bool(x.sum() > 1e6),
    lambda x: x.sum().item() > 1e6,
    lambda x: not torch.allclose(x, torch.zeros(()), atol=1e6),
    lambda x: torch.equal(x > 1e6, torch.ones_like(x, dtype=torch.bool)),
    lambda x: torch.is_nonzero((x > 1e6).any()),
    lambda x: x.sum().tolist() > 1e6,
]


@pytest.mark.parametrize("large", LARGE, ids=["bool", "item", "allclose", "equal", "is_nonzero", "tolist"])
def test_a_trace_that_would_lose_a_branch_is_refused_and_python_is_suggested(large, tmp_path):
    """Of most of these torch says nothing when it traces them."""
    with pytest.raises(ModelError) as caught:
        save_model(Lost(large), tmp_path / "net.pt2", preprocess=PLAIN)
    message = str(caught.value)
    for part in (
        "torch.export refuses it",
        "torch.jit.script refuses it",
        "torch.jit.trace refuses it (ModelError",
        "model='python:your.module:",
    ):
        assert part in message
    assert not (tmp_path / "net.pt2").exists()


def test_a_card_in_a_zip_of_others_is_not_ours(tmp_path):
    """A gpuml.json beside the network, not inside it, says nothing."""
    model = zipped(
        tmp_path / "a.zip",
        net_DOT_pt=Path(jit("script", tmp_path / "n.pt", Pooled())).read_bytes(),
        gpuml_DOT_json=json.dumps({"labels": list("wxyz")}),
    )
    assert read_card(store.path_of(resolve(model, "", (), PLAIN))).labels == ()
