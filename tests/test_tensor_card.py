"""A network of named tensors becomes a model file that says what it takes and gives, or is refused. No Spark."""

import json
import zipfile
from collections import OrderedDict

import pytest
import torch
from conftest import PLAIN, Pooled, WideAndDeep
from torch import nn

from gpuml import ModelError, ModelFileError, save_model
from gpuml.models import cards, store, tensor_sources
from gpuml.models.cards import Card, Port, TensorCard
from gpuml.models.export import jit
from gpuml.models.file import load, read_card
from gpuml.models.sources import resolve as resolve_images
from gpuml.models.tensor_sources import card_of, resolve

CPU = torch.device("cpu")
SAMPLES = {"wide": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), "ids": torch.tensor([1, 2, 3])}


class Rule(nn.Module):
    """Its forward is a function."""

    def __init__(self, rule):
        super().__init__()
        self.rule = rule

    def forward(self, x):
        return self.rule(x)


def saved(net, path, **arguments):
    save_model(net, path, **arguments)
    return read_card(path)


def outputs(path, *rows):
    with torch.inference_mode():
        return load(path, CPU)[0](*rows)


# --- what a file says -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [("wide", "ids"), ("ids", "wide")])
def test_inputs_are_given_by_name_and_outputs_named_by_the_dict_of_forward(tmp_path, order):
    net = WideAndDeep()
    card = saved(net, tmp_path / "net.pt2", inputs={name: SAMPLES[name] for name in order}, labels=["a", "b", "c"])
    ports = {"wide": Port("wide", "float32", (4,)), "ids": Port("ids", "int64", ())}
    assert card.inputs == tuple(ports[name] for name in order)
    assert card.outputs == (
        Port("logits", "float32", (3,)),
        Port("hidden", "float32", (2, 5)),
        Port("twice", "int64", ()),
    )
    assert (card.labels, card.activation) == (("a", "b", "c"), "softmax")
    rows = {"wide": torch.randn(7, 4), "ids": torch.arange(7)}
    with torch.inference_mode():
        wanted = net.eval()(**rows).values()
    for count in (7, 1):
        made = outputs(tmp_path / "net.pt2", *(rows[name][:count] for name in order))
        for given, expected in zip(made, wanted, strict=True):
            torch.testing.assert_close(given, expected[:count])


@pytest.mark.parametrize(
    ("rule", "named", "ports"),
    [
        (lambda x: x.sum(1), (), [Port("output", "float32", ())]),
        (lambda x: x.sum(1), ["y"], [Port("y", "float32", ())]),
        (lambda x: (x, x.sum(1) > 0), (), [Port("output_0", "float32", (4,)), Port("output_1", "bool", ())]),
        (lambda x: (x.argmax(1), x.half()), ["best", "x"], [Port("best", "int64", ()), Port("x", "float32", (4,))]),
        (lambda x: [x.to(torch.uint8)], (), [Port("output_0", "int16", (4,))]),
        (lambda x: {"a": x, "b": x.double()}, ["b"], [Port("b", "float64", (4,))]),
        (lambda x: OrderedDict(b=x, a=x.abs()), (), [Port("b", "float32", (4,)), Port("a", "float32", (4,))]),
    ],
)
def test_outputs_have_names_types_and_the_shapes_of_a_row(tmp_path, rule, named, ports):
    made = saved(Rule(rule), tmp_path / "net.pt2", inputs={"x": SAMPLES["wide"]}, outputs=named).outputs
    assert list(made) == ports


def test_the_one_input_of_a_network_may_have_any_name(tmp_path):
    card = saved(nn.Linear(4, 2), tmp_path / "net.pt2", inputs={"features": SAMPLES["wide"]})
    assert card.inputs == (Port("features", "float32", (4,)),)


def test_inputs_may_leave_a_parameter_of_forward_out(tmp_path):
    class Masked(nn.Module):
        def forward(self, x, mask=None, *, shift):
            return x + shift if mask is None else x * mask

    x = SAMPLES["wide"]
    save_model(Masked(), tmp_path / "net.pt2", inputs={"shift": 2 * x, "x": x})
    torch.testing.assert_close(outputs(tmp_path / "net.pt2", x, 3 * x)[0], 4 * x)


@pytest.mark.parametrize("wrapper", [nn.DataParallel, torch.compile])
def test_a_wrapper_that_passes_any_names_on_is_given_them(tmp_path, wrapper):
    net = WideAndDeep()
    save_model(wrapper(net), tmp_path / "net.pt2", inputs=dict(reversed(SAMPLES.items())))
    torch.testing.assert_close(
        outputs(tmp_path / "net.pt2", SAMPLES["ids"], SAMPLES["wide"])[0], net(**SAMPLES)["logits"]
    )


def test_a_classifier_of_texts_takes_token_ids_and_a_mask(tmp_path):
    """Transformers' networks give objects of a class of their own; the file gives the tensors that were named."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 2)
    config = transformers.BertConfig(vocab_size=50, hidden_size=16, intermediate_size=16, num_labels=3, **sizes)
    net = transformers.BertForSequenceClassification(config).eval()
    ids = torch.randint(1, 50, (4, 9))
    mask = torch.tensor([[1] * 9, [1] * 5 + [0] * 4, [1] * 9, [1, *[0] * 8]])
    save_model(net, tmp_path / "net.pt2", inputs={"input_ids": ids, "attention_mask": mask}, outputs=["logits"])
    with torch.no_grad():
        wanted = net(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(outputs(tmp_path / "net.pt2", ids, mask)[0], wanted)


def test_equal_networks_are_equal_files_and_the_card_survives_its_json(tmp_path):
    for name in "ab":
        save_model(WideAndDeep(), tmp_path / name, inputs=SAMPLES)
    assert store.hash_of(tmp_path / "a") == store.hash_of(tmp_path / "b")
    card = read_card(tmp_path / "a")
    text = cards.to_json(card)
    assert json.loads(text)["kind"] == "tensors"
    assert cards.from_json(text) == card


@pytest.mark.parametrize(
    "change",
    [
        {"inputs": []},
        {"inputs": [{"name": "x", "dtype": "complex64", "shape": [2]}]},
        {"inputs": [{"name": "x", "dtype": "float32", "shape": [2.5]}]},
        {"inputs": [{"name": "x", "dtype": "float32", "shape": [0]}]},
        {"inputs": [{"name": 3, "dtype": "float32", "shape": []}]},
        {"outputs": [{"name": "y", "dtype": "float32", "shape": []}] * 2},
        {"outputs": [{"name": "y", "dtype": "float32"}]},
        {"labels": ["a"]},
        {"activation": "relu"},
        {"preprocess": None},
    ],
)
def test_a_card_that_does_not_fit_itself_is_damage(change):
    card = TensorCard((Port("x", "float32", (2,)),), (Port("y", "float32", (3,)),))
    with pytest.raises(ModelFileError, match="damaged"):
        cards.from_json(json.dumps({**json.loads(cards.to_json(card)), **change}))


# --- what is refused --------------------------------------------------------------------------------------------------


def squeezed(x):
    return x.sum(1, keepdim=True).squeeze()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "neither of preprocess and inputs"),
        ({"inputs": SAMPLES, "preprocess": PLAIN}, "both of preprocess and inputs"),
        ({"preprocess": PLAIN, "outputs": ["y"]}, r"outputs=\['y'\] go with inputs"),
        ({"inputs": SAMPLES["wide"]}, "no dict of sample tensors"),
        ({"inputs": {}}, "no dict of sample tensors"),
        ({"inputs": {"x": [[1.0]]}}, r"inputs\['x'\] is a list"),
        ({"inputs": {"x": SAMPLES["wide"].double()}}, r"is float64; .*give sample.float\(\)"),
        ({"inputs": {"x": SAMPLES["ids"].to(torch.uint8)}}, "is uint8; inputs are of float32, int64"),
        ({"inputs": {"x": torch.randn(1, 4)}}, r"shape \(1, 4\); give two rows or more"),
        ({"inputs": {"x": torch.tensor(1.0)}}, r"shape \(\); give two rows or more"),
        ({"inputs": {"wide": torch.randn(2, 4), "ids": SAMPLES["ids"]}}, "'wide' 2, 'ids' 3"),
        ({"inputs": {"wide": torch.ones(2, 4), "ids": torch.ones(2).long()}}, "rows are all equal"),
        ({"inputs": {"wide": SAMPLES["wide"], "id": SAMPLES["ids"]}}, r"inputs\['id'\].*Did you mean 'ids'"),
        ({"inputs": {**SAMPLES, "wide": torch.randn(3, 5)}}, r"fails on the samples \(wide: float32 \(batch, 5\)"),
        ({"inputs": SAMPLES, "outputs": "logits"}, r"write outputs=\['logits'\]"),
        ({"inputs": SAMPLES, "outputs": ["logit"]}, "gives no 'logit', but 'logits', 'hidden', 'twice'"),
        ({"inputs": SAMPLES, "labels": ["a"]}, r"1 labels for the first output, logits: float32 \(batch, 3\)"),
        ({"inputs": SAMPLES, "labels": ["a"] * 2, "outputs": ["hidden"]}, r"hidden: float32 \(batch, 2, 5\)"),
        ({"inputs": SAMPLES, "activation": "relu"}, "activation='relu'"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_to_type(tmp_path, arguments, said):
    with pytest.raises(ModelError, match=said):
        save_model(WideAndDeep(), tmp_path / "net.pt2", **arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (lambda x: x - x.mean(0), "output 'output': mixes the rows"),
        (lambda x: (x, x.cumsum(0)), "output 'output_1': mixes the rows"),
        (squeezed, r"is float32 of shape \(\) for 1 row"),
        (lambda x: x.sum(), r"shape \(\) for 3 row"),
        (lambda x: x.T, "for 3 row"),
        (lambda x: torch.fft.fft(x), "is complex64"),
        (lambda x: x + torch.rand(()), "does not give what forward"),
        (lambda x: (x, None), "output 'output_1': is a NoneType"),
        (lambda x: "x", "gives a str; it must give a tensor"),
        (lambda x: x.nonzero(), "for 3 row"),
    ],
)
def test_a_network_that_does_not_serve_row_by_row_is_refused(tmp_path, rule, said):
    with pytest.raises(ModelError, match=said):
        save_model(Rule(rule), tmp_path / "net.pt2", inputs={"x": SAMPLES["wide"]})


def test_a_mixing_of_rows_shows_where_the_first_rows_of_the_sample_are_equal(tmp_path):
    sample = SAMPLES["wide"][[0, 0, 0, 0, 1]]
    with pytest.raises(ModelError, match="mixes the rows"):
        save_model(Rule(lambda x: x - x.mean(0)), tmp_path / "net.pt2", inputs={"x": sample})


def test_names_of_a_tuple_are_as_many_as_it_has(tmp_path):
    with pytest.raises(ModelError, match="names 1 of the 2 that Rule gives"):
        save_model(Rule(lambda x: (x, x)), tmp_path / "net.pt2", inputs={"x": SAMPLES["wide"]}, outputs=["a"])


# --- TorchScript ------------------------------------------------------------------------------------------------------


class Loop(nn.Module):
    """torch.export refuses it: the values say how often it goes round."""

    def forward(self, x):
        n = int(x.abs().max()) + 1
        for _ in range(n):
            x = torch.relu(x)
        return x * 2.0, x > 1.0


@pytest.mark.parametrize("script", [False, True])
def test_what_export_refuses_becomes_torchscript_with_its_branches(tmp_path, script, caplog):
    net = jit("script", Loop()) if script else Loop()
    save_model(net, tmp_path / "net.pt2", inputs={"x": SAMPLES["wide"]}, outputs=["y", "big"])
    assert ("it becomes TorchScript, by torch.jit.script" in caplog.text) != script
    x = torch.randn(5, 4) * 10
    y, big = outputs(tmp_path / "net.pt2", x)
    torch.testing.assert_close(y, x.relu() * 2)
    assert torch.equal(big, x > 1)


# --- files of others, and of images -----------------------------------------------------------------------------------


def exported(net, path, *args, dynamic=True, **kwargs):
    dims = {0: torch.export.Dim("batch")} if dynamic else {}
    shapes = {"wide": dims, "ids": dims}
    torch.export.save(torch.export.export(net.eval(), args, kwargs, dynamic_shapes=shapes), path)
    return str(path)


@pytest.mark.parametrize("by_name", [0, 1, 2])
def test_an_archive_of_torch_export_tells_its_inputs_itself(tmp_path, by_name):
    net, values = WideAndDeep(), list(SAMPLES.values())
    kwargs = dict(list(SAMPLES.items())[2 - by_name :])
    model = exported(net, tmp_path / "net.pt2", *values[: 2 - by_name], **kwargs)
    sha256 = resolve(model, ["x", "y", "z"])
    card = card_of(sha256)
    assert card.inputs == (Port("wide", "float32", (4,)), Port("ids", "int64", ()))
    assert [port.name for port in card.outputs] == ["logits", "hidden", "twice"]
    assert card.labels == ("x", "y", "z")
    with torch.inference_mode():
        wanted = net(*values)
    for given, expected in zip(outputs(store.path_of(sha256), *values), wanted.values(), strict=True):
        torch.testing.assert_close(given, expected)
    assert resolve(model, ["x", "y", "z"]) == sha256


def test_an_archive_with_a_fixed_batch_is_refused(tmp_path):
    model = exported(WideAndDeep(), tmp_path / "net.pt2", *SAMPLES.values(), dynamic=False)
    with pytest.raises(
        ModelError, match=r"input 'wide': has shape \(3, 4\); only the batch may vary, and must"
    ) as caught:
        resolve(model)
    assert str(model) in str(caught.value)


def test_torchscript_without_a_card_is_refused_saying_how_to_write_it(tmp_path):
    jit("save", jit("script", nn.Linear(4, 2)), str(tmp_path / "net.pt"))
    with pytest.raises(ModelError, match=r"TorchScript.*gpuml\.save_model\(.*inputs="):
        resolve(str(tmp_path / "net.pt"))


def test_other_labels_are_another_file_of_the_same_network(tmp_path):
    save_model(WideAndDeep(), tmp_path / "net.pt2", inputs=SAMPLES, labels=["a", "b", "c"])
    plain, other = resolve(str(tmp_path / "net.pt2")), resolve(str(tmp_path / "net.pt2"), ["x", "y", "z"])
    assert [card_of(sha256).labels for sha256 in (plain, other)] == [("a", "b", "c"), ("x", "y", "z")]
    assert plain != other
    with pytest.raises(ModelError, match="2 labels for the first output"):
        resolve(f"sha256:{plain}", ["x", "y"])


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("torchvision:resnet18", r"network of images: ImageClassifier\(model='torchvision:resnet18'\)"),
        ("python:a.b:c", r"gpuml\.tensor_udf\(predict, returns, setup="),
        ("net", r"Did you mean '\./net\.pt2'"),
        ("./net.pt2", "model='./net.pt2'"),
        ("gopher://net", "knows no such source"),
    ],
)
def test_other_sources_are_refused_with_advice(model, said):
    with pytest.raises(ModelError, match=said):
        resolve(model)


def test_a_file_of_the_other_kind_is_refused_naming_the_stage_that_runs_it(tmp_path):
    save_model(WideAndDeep(), tmp_path / "tensors.pt2", inputs=SAMPLES)
    save_model(Pooled(), tmp_path / "images.pt2", preprocess=PLAIN)
    with pytest.raises(ModelError, match=r"tensors\.pt2 is a network that takes wide: .*: TensorTransformer runs it"):
        resolve_images(str(tmp_path / "tensors.pt2"))
    with pytest.raises(ModelError, match=r"images\.pt2 is a network that takes pixels of one size: ImageClassifier or"):
        resolve(str(tmp_path / "images.pt2"))
    assert isinstance(read_card(tmp_path / "images.pt2"), Card)


def test_a_file_that_plain_torch_opens_says_its_kind(tmp_path):
    save_model(WideAndDeep(), tmp_path / "net.pt2", inputs=SAMPLES)
    with zipfile.ZipFile(tmp_path / "net.pt2") as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("extra/gpuml.json")]
        assert json.loads(archive.read(name))["kind"] == "tensors"
    program = torch.export.load(tmp_path / "net.pt2")
    assert len(program.module()(*SAMPLES.values())) == 3


def test_cards_are_read_once(tmp_path, monkeypatch):
    save_model(WideAndDeep(seed=9), tmp_path / "net.pt2", inputs=SAMPLES)
    sha256 = resolve(str(tmp_path / "net.pt2"))
    card = card_of(sha256)
    monkeypatch.setattr(tensor_sources, "read_card", None)
    assert card_of(sha256) is card
