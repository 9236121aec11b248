"""Hostile model files are refused, and each is seen to do its harm with plain torch; ordinary files pass."""

from __future__ import annotations

import collections
import contextlib
import io
import json
import operator
import pathlib
import pickle
import random
import re
import shutil
import struct
import subprocess
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import nn

from gpuml.errors import ModelFileError
from gpuml.models.safety import check_archive
from gpuml.models.safety_operators import refuse_operator, refuse_target

MODEL = "models/model.json"
WEIGHTS = "data/weights/model_weights_config.json"
CONSTANTS = "data/constants/model_constants_config.json"
INPUTS = "data/sample_inputs/model.pt"

#: The size of the batch, as torch.export writes it.
BATCH = "Symbol('s77', positive=True, integer=True)"

#: Members that torch's writer adds by itself.
WRITTEN = {"version", "byteorder", ".data/version", ".data/serialization_id", ".format_version", ".storage_alignment"}


class Net(nn.Module):
    """Small, with what real exports have: a subgraph, a constant, a size computed from the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.head = nn.Linear(4, 5)
        self.scale = torch.tensor([2.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = torch.relu(self.conv(x)) * self.scale
        y = y.permute(0, 2, 3, 1).reshape(-1, 4)
        return self.head(y).reshape(x.shape[0], -1, 5).mean(1)


def export(net: nn.Module, path: Path, size: int = 8, inputs: bool = False) -> Path:
    x = torch.zeros(2, 3, size, size)
    program = torch.export.export(net.eval(), (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    if not inputs:
        program.example_inputs = None
    torch.export.save(program, path, extra_files={"gpuml.json": "{}"})
    return path


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(Net(), tmp_path_factory.mktemp("good") / "net.pt2")


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good") / "net.pt"
    return script(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten()), path)


def script(net: nn.Module, path: Path) -> Path:
    with quiet():
        # As in a new process: a class that was scripted before gets a numbered name, and its code another place.
        torch._C._jit_clear_class_registry()
        torch.jit._state._clear_class_state()
        torch.jit._recursive.concrete_type_store = torch.jit._recursive.ConcreteTypeStore()
        torch.jit.save(torch.jit.script(net.eval()), path, _extra_files={"gpuml.json": "{}"})
    return path


@contextlib.contextmanager
def quiet() -> Any:
    """torch.jit and torch's fallbacks warn; warnings are errors in this suite."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name.split("/", 1)[1]: archive.read(name) for name in archive.namelist()}


def write(path: Path, content: dict[str, bytes]) -> Path:
    """An archive by torch's own writer, so that only the content is hostile."""
    writer = torch._C.PyTorchFileWriter(str(path))
    for name, data in content.items():
        if name not in WRITTEN:
            writer.write_record(name, data, len(data))
    writer.write_end_of_file()
    return path


def edited(good: Path, path: Path, member: str, change: Callable[[Any], None]) -> Path:
    content = members(good)
    value = json.loads(content[member])
    change(value)
    return write(path, {**content, member: json.dumps(value).encode()})


def use(path: Path) -> None:
    """What a program without a check does: load, make a module, run. Failing is fine, harm comes before."""
    with quiet(), contextlib.suppress(Exception):
        module = torch.export.load(path).module()
        inputs = [json.loads(members(path)[MODEL])["graph_module"]["graph"]["inputs"][-1].get("as_string")]
        module(torch.zeros(2, 3, 8, 8), *filter(None, inputs))


def use_torchscript(path: Path) -> None:
    with quiet(), contextlib.suppress(Exception):
        torch.jit.load(path)(torch.zeros(2, 3, 8, 8))


class Touch:
    """Pickles as a call that makes the file `marker`."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return pathlib.Path.touch, (self.marker,)


def pickled(marker: Path, wrap: Callable[[Any], Any] = lambda value: value) -> bytes:
    buffer = io.BytesIO()
    torch.save(wrap(Touch(marker)), buffer)
    return buffer.getvalue()


def code(marker: Path) -> str:
    return f"__import__('pathlib').Path('{marker}').touch()"


def graph(value: Any) -> Any:
    return value["graph_module"]["graph"]


def signature(value: Any) -> Any:
    return value["graph_module"]["module_call_graph"][0]["signature"]


def replace_text(value: Any, old: str, new: str) -> Any:
    """`value` with every string that is `old` now `new`, keys too."""
    if isinstance(value, dict):
        return {replace_text(k, old, new): replace_text(v, old, new) for k, v in value.items()}
    if isinstance(value, list):
        return [replace_text(part, old, new) for part in value]
    return new if value == old else value


# The doors. Each plants its payload in a copy of a good file.


def sample_inputs(good: Path, path: Path, marker: Path) -> Path:
    return write(path, {**members(good), INPUTS: pickled(marker, lambda payload: ((payload,), {}))})


def pickled_weight(good: Path, path: Path, marker: Path) -> Path:
    content = members(good)
    config = json.loads(content[WEIGHTS])
    entry = config["config"]["head.weight"]
    entry["use_pickle"] = True
    member = "data/weights/" + entry["path_name"]
    return write(path, {**content, WEIGHTS: json.dumps(config).encode(), member: pickled(marker)})


def pickled_constant(good: Path, path: Path, marker: Path) -> Path:
    content = members(good)
    config = json.loads(content[CONSTANTS])
    entry = next(iter(config["config"].values()))
    entry["use_pickle"] = True
    member = "data/constants/" + entry["path_name"]
    return write(path, {**content, CONSTANTS: json.dumps(config).encode(), member: pickled(marker)})


def opaque_object(good: Path, path: Path, marker: Path) -> Path:
    content = members(good)
    config = json.loads(content[CONSTANTS])
    config["config"]["thing"] = {
        "path_name": "opaque_obj_0",
        "is_param": False,
        "use_pickle": True,
        "tensor_meta": None,
    }
    payload = {CONSTANTS: json.dumps(config).encode(), "data/constants/opaque_obj_0": pickle.dumps(Touch(marker))}
    return write(path, {**content, **payload})


def older_weights(good: Path, path: Path, marker: Path) -> Path:
    return write(path, {**members(good), "data/weights/model.pt": pickled(marker)})


def older_constants(good: Path, path: Path, marker: Path) -> Path:
    return write(path, {**members(good), "data/constants/model.pt": pickled(marker)})


def older_layout(good: Path, path: Path, marker: Path) -> Path:
    content = members(good)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("version", ".".join(map(str, json.loads(content[MODEL])["schema_version"].values())))
        archive.writestr("serialized_exported_program.json", content[MODEL])
        for part in ("state_dict", "constants", "example_inputs"):
            archive.writestr(f"serialized_{part}.pt", pickled(marker))
    return path


def operator_as_argument(good: Path, path: Path, marker: Path) -> Path:
    """A higher-order operator calls what it is given."""

    def change(value: Any) -> None:
        arguments = [{"as_bool": True}, {"as_operator": "torch.ops.aten.from_file.default"}]
        arguments += [{"as_string": str(marker)}, {"as_bool": True}, {"as_int": 4}]
        plant_node(graph(value), "torch.ops.higher_order.wrap_with_set_grad_enabled", [("", arg) for arg in arguments])

    return edited(good, path, MODEL, change)


def file_operator(good: Path, path: Path, marker: Path) -> Path:
    return edited(good, path, MODEL, lambda value: plant_from_file(graph(value), marker))


def file_operator_in_subgraph(good: Path, path: Path, marker: Path) -> Path:
    def change(value: Any) -> None:
        inner = next(
            part["arg"]["as_graph"]["graph"]
            for node in graph(value)["nodes"]
            for part in node["inputs"]
            if "as_graph" in part["arg"]
        )
        plant_from_file(inner, marker)

    return edited(good, path, MODEL, change)


def plant_from_file(target: Any, marker: Path) -> None:
    """aten.from_file(marker, shared=True, size=4) makes the file when run."""
    arguments = {"filename": {"as_string": str(marker)}, "shared": {"as_bool": True}, "size": {"as_int": 4}}
    plant_node(target, "torch.ops.aten.from_file.default", list(arguments.items()))


def plant_node(target: Any, operator: str, arguments: list[tuple[str, Any]], name: str = "planted") -> None:
    meta = {"dtype": 7, "sizes": [{"as_int": 4}], "requires_grad": False, "device": {"type": "cpu", "index": None}}
    meta |= {"strides": [{"as_int": 1}], "storage_offset": {"as_int": 0}, "layout": 7}
    target["tensor_values"][name] = meta
    inputs = [{"name": key, "arg": arg, "kind": 2 if key else 1} for key, arg in arguments]
    outputs = [{"as_tensor": {"name": name}}]
    node = {"target": operator, "inputs": inputs, "outputs": outputs, "metadata": {}, "name": name}
    target["nodes"].insert(0, {**node, "is_hop_single_tensor_return": True})


def symbolic_size(good: Path, path: Path, marker: Path) -> Path:
    def change(value: Any) -> None:
        for meta in graph(value)["tensor_values"].values():
            for size in meta["sizes"]:
                if "as_expr" in size:
                    size["as_expr"]["expr_str"] = code(marker)

    return edited(good, path, MODEL, change)


def long_symbolic_size(good: Path, path: Path, marker: Path) -> Path:
    """10,000 characters of arithmetic, then an attribute chain: a check of a prefix sees the arithmetic alone."""
    start = f"Add({BATCH}" + ", Integer(11)" * 761
    size = f"{start}, Integer({'1' * (10_000 - len(start) - 12)}))"
    assert len(size) == 10_000
    chain = f".func.doit.__globals__['__builtins__']['__import__']('pathlib').Path('{marker}').touch()"

    def change(value: Any) -> None:
        for meta in graph(value)["tensor_values"].values():
            for length in meta["sizes"]:
                if "as_expr" in length:
                    length["as_expr"]["expr_str"] = size + chain

    return edited(good, path, MODEL, change)


def name_of_input(good: Path, path: Path, marker: Path) -> Path:
    content = members(good)
    value = replace_text(json.loads(content[MODEL]), "x", f"x=[{code(marker)}][0]")
    return write(path, {**content, MODEL: json.dumps(value).encode()})


def name_of_node(good: Path, path: Path, marker: Path) -> Path:
    """A line of generated code begins with the name: text after a newline stands at the module's level."""
    name = f"a = 0\n{code(marker)}\ndef g():\n    b"

    def change(value: Any) -> None:
        plant_node(graph(value), "torch.ops.aten.zeros.default", [("size", {"as_ints": [4]})], name)

    return edited(good, path, MODEL, change)


def name_of_argument(good: Path, path: Path, marker: Path) -> Path:
    def change(value: Any) -> None:
        node = next(node for node in graph(value)["nodes"] if "higher_order" in node["target"])
        node["inputs"][0].update(name=f"a={code(marker)}, b", kind=2)

    return edited(good, path, MODEL, change)


def name_of_parameter(good: Path, path: Path, marker: Path) -> Path:
    """Not an identifier, so generated code quotes it, as in getattr(self, "0"), and does not escape it."""
    touch = f"getattr(getattr(__import__('pathlib'), 'Path')('{marker}'), 'touch')()"  # no dot: it parts attributes
    content, name = members(good), f'training"), {touch}, getattr(self, "training'
    for member in (MODEL, WEIGHTS):
        content[member] = json.dumps(replace_text(json.loads(content[member]), "head.weight", name)).encode()
    return write(path, content)


def names_of_arguments(good: Path, path: Path, marker: Path) -> Path:
    def change(value: Any) -> None:
        signature(value)["forward_arg_names"] = ["x", f"y={code(marker)}"]

    return edited(good, path, MODEL, change)


def names_in_spec(good: Path, path: Path, marker: Path) -> Path:
    """Names of keyword arguments are put between quotes, and do not lose quotes and newlines of their own."""

    def change(value: Any) -> None:
        version, spec = json.loads(signature(value)["in_spec"])
        arguments, keywords = spec["children_spec"]
        keywords["children_spec"], arguments["children_spec"] = arguments["children_spec"], []
        keywords["context"] = json.dumps([f"a': 0}}))\n{code(marker)}\ndef g():\n    h(([], {{'b"])
        signature(value).update(in_spec=json.dumps([version, spec]))

    return edited(good, path, MODEL, change)


def module_of_enum(good: Path, path: Path, marker: Path) -> Path:
    (path.parent / "planted_enum.py").write_text(code(marker))

    def change(value: Any) -> None:
        context = json.dumps([{"__enum__": True, "fqn": "planted_enum:Colour", "name": "RED"}])
        spec = {"type": "builtins.dict", "context": context, "children_spec": []}
        signature(value)["out_spec"] = json.dumps([1, spec])

    return edited(good, path, MODEL, change)


def module_of_enum_below_a_name(good: Path, path: Path, marker: Path) -> Path:
    """An object, where a list of names is usual: its own names are plain, what lies below them is not."""
    (path.parent / "planted_below.py").write_text(code(marker))

    def change(value: Any) -> None:
        context = json.dumps({"a": {"__enum__": True, "fqn": "planted_below:Colour", "name": "RED"}})
        spec = {"type": "builtins.dict", "context": context, "children_spec": []}
        signature(value)["out_spec"] = json.dumps([1, spec])

    return edited(good, path, MODEL, change)


def module_of_defaultdict(good: Path, path: Path, marker: Path) -> Path:
    (path.parent / "planted_factory.py").write_text(code(marker))

    def change(value: Any) -> None:
        context = {"default_factory_module": "planted_factory", "default_factory_name": "x", "dict_context": []}
        spec = {"type": "collections.defaultdict", "context": context, "children_spec": []}
        signature(value)["out_spec"] = json.dumps([1, spec])

    return edited(good, path, MODEL, change)


def guards(good: Path, path: Path, marker: Path) -> Path:
    with_inputs = export(Net(), path.with_name("inputs.pt2"), inputs=True)
    return edited(with_inputs, path, MODEL, lambda value: value.update(guards_code=[f"{code(marker)} or True"]))


def constant_input(good: Path, path: Path, marker: Path) -> Path:
    """A string argument of forward becomes a guard, in quotes that it can close."""

    class Mode(nn.Module):
        def forward(self, x: torch.Tensor, mode: str) -> torch.Tensor:
            return x.relu()

    program = torch.export.export(Mode(), (torch.zeros(2, 3, 8, 8), "placeholder_text"))
    plain = path.with_name("mode.pt2")
    torch.export.save(program, plain)
    content = members(plain)
    text = f"' or {code(marker)} or True or '"
    value = replace_text(json.loads(content[MODEL]), "placeholder_text", text)
    return write(path, {**content, MODEL: json.dumps(value).encode()})


def shared_library(good: Path, path: Path, marker: Path) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build a library with")
    source = path.with_suffix(".c")
    source.write_text(
        f'#include <stdio.h>\n__attribute__((constructor)) void f() {{ fclose(fopen("{marker}", "w")); }}'
    )
    subprocess.run([compiler, "-shared", "-fPIC", "-o", path.with_suffix(".so"), source], check=True)
    library = {"data/aotinductor/model/net.wrapper.so": path.with_suffix(".so").read_bytes()}
    library["data/aotinductor/model/net_metadata.json"] = b'{"AOTI_DEVICE_KEY": "cpu"}'
    library["data/aotinductor/model/net.wrapper_metadata.json"] = b'{"AOTI_DEVICE_KEY": "cpu"}'
    return write(path, {**members(good), **library})


DOORS = {
    sample_inputs: "sample inputs hold more than tensors",
    pickled_weight: "weights entry 'head.weight' is pickled",
    pickled_constant: "constants entry 'scale' is pickled",
    opaque_object: "member 'data/constants/opaque_obj_0'",
    older_weights: "member 'data/weights/model.pt'",
    older_constants: "member 'data/constants/model.pt'",
    older_layout: "exported before torch 2.8",
    operator_as_argument: "uses 'as_operator'",
    file_operator: "aten::from_file, which opens files",
    file_operator_in_subgraph: "aten::from_file, which opens files",
    symbolic_size: "more than arithmetic",
    long_symbolic_size: "symbolic size of 10",
    name_of_input: "as 'name', which is not plain",
    name_of_node: "as 'name', which is not plain",
    name_of_argument: "as 'name', which is not plain",
    name_of_parameter: "is no identifier",
    names_of_arguments: "as 'forward_arg_names', which is not plain",
    names_in_spec: "nest in 'builtins.dict'",
    module_of_enum: "nest in 'builtins.dict'",
    module_of_enum_below_a_name: "nest in 'builtins.dict'",
    module_of_defaultdict: "nest in 'collections.defaultdict'",
    guards: "as 'guards_code'",
    constant_input: "constant input",
    shared_library: "member 'data/aotinductor/",
}


@pytest.mark.parametrize("plant", DOORS, ids=lambda plant: plant.__name__)
def test_hostile_export_runs_its_payload_with_plain_torch_and_is_refused_here(
    plant: Callable[[Path, Path, Path], Path], good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "harm"
    monkeypatch.syspath_prepend(str(tmp_path))
    hostile = plant(good, tmp_path / "net.pt2", marker)
    marker.unlink(missing_ok=True)  # making the file may itself touch it
    with pytest.raises(ModelFileError, match=re.escape(DOORS[plant])):
        check_archive(hostile)
    assert not marker.exists()
    use(hostile)
    if not marker.exists():
        pytest.skip(f"torch {torch.__version__} closes the door {plant.__name__} itself")


def test_good_files_are_read_as_their_kind(good: Path, scripted: Path) -> None:
    assert check_archive(good) == "export"
    assert check_archive(str(scripted)) == "torchscript"


def test_function_of_torch_found_by_attribute_changes_the_process_and_is_refused_here(
    good: Path, tmp_path: Path
) -> None:
    def change(value: Any) -> None:
        plant_node(graph(value), "torch._C._set_grad_enabled", [("", {"as_bool": False})])

    hostile = edited(good, tmp_path / "net.pt2", MODEL, change)
    with pytest.raises(ModelFileError, match=r"calls 'torch\._C\._set_grad_enabled', which is no operator"):
        check_archive(hostile)
    try:
        use(hostile)
        harmed = not torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)
    if not harmed:
        pytest.skip(f"torch {torch.__version__} closes this door itself")


@pytest.mark.parametrize("attribute", ["overloads", "_op", "default.decompose"])
def test_attribute_of_an_operator_that_is_no_overload_is_found_by_plain_torch_and_refused_here(
    attribute: str, good: Path, tmp_path: Path
) -> None:
    target = f"torch.ops.aten.relu.{attribute}"
    hostile = edited(good, tmp_path / "net.pt2", MODEL, lambda value: plant_node(graph(value), target, []))
    with pytest.raises(ModelFileError, match=re.escape(f"calls {target!r}, which is no operator that gpuml knows")):
        check_archive(hostile)
    try:
        with quiet():
            shown = str([node.target for node in torch.export.load(hostile).graph.nodes])
    except Exception as error:  # the verifier of torch 2.14 names what stands in the graph, after it was looked up
        shown = str(error)
    if str(operator.attrgetter(attribute)(torch.ops.aten.relu)) not in shown:
        pytest.skip(f"torch {torch.__version__} closes this door itself")


# TorchScript. Hostile code replaces what the network returns.

CODE = "code/__torch__/torch/nn/modules/container.py"

SCRIPTS = {
    "operator": ('return torch.from_file("{marker}", True, 4)', "aten::from_file, which opens files"),
    "operator_by_namespace": ('return ops.aten.from_file("{marker}", True, 4)', "aten::from_file, which opens files"),
    "alias": ('t = torch\n    return t.from_file("{marker}", True, 4)', "passes on the module torch"),
    "alias_of_namespace": (
        't = ops.aten\n    return t.from_file("{marker}", True, 4)',
        "passes on the module torch.ops",
    ),
    "save": ('_0 = torch.save(input, "{marker}")\n    return input', "aten::save, which opens files"),
}


def with_code(scripted: Path, path: Path, body: str) -> Path:
    content = members(scripted)
    text, count = re.subn(r"return .*", lambda _: body, content[CODE].decode(), count=1)
    assert count == 1
    return write(path, {**content, CODE: text.encode()})


@pytest.mark.parametrize("name", SCRIPTS)
def test_hostile_torchscript_runs_its_payload_with_plain_torch_and_is_refused_here(
    name: str, scripted: Path, tmp_path: Path
) -> None:
    body, reason = SCRIPTS[name]
    marker = tmp_path / "harm"
    hostile = with_code(scripted, tmp_path / "net.pt", body.format(marker=marker))
    with pytest.raises(ModelFileError, match=re.escape(reason)):
        check_archive(hostile)
    assert not marker.exists()
    use_torchscript(hostile)
    if not marker.exists():
        pytest.skip(f"torch {torch.__version__} closes the door {name} itself")


@pytest.mark.parametrize(
    "body",
    [
        "return (input).resize_([100000])",
        'return getattr(input, "resize_")([100000])',
        'return getattr(input, "resiz\\145_")([100000])',
        'return getattr(input, "resi" "ze_")([100000])',
    ],
)
def test_method_of_a_tensor_is_an_operator_to_plain_torch_and_refused_here(
    body: str, scripted: Path, tmp_path: Path
) -> None:
    hostile = with_code(scripted, tmp_path / "net.pt", body)
    with pytest.raises(ModelFileError, match=r"aten::resize_, which works on unchecked memory|two strings in a row"):
        check_archive(hostile)
    with quiet():
        shown = torch.jit.load(hostile)(torch.zeros(2, 3, 8, 8))
    assert shown.numel() == 100000  # 384 of the input, then what lay in memory


@pytest.mark.parametrize("alias", ["t = __torch__", "t = __torch__.torch", "t = __torch__.torch.classes"])
def test_class_of_torch_by_another_name_is_made_by_plain_torch_and_refused_here(
    alias: str, scripted: Path, tmp_path: Path
) -> None:
    path = "__torch__.torch.classes.profiling._ScriptProfile()".replace(alias.removeprefix("t = "), "t", 1)
    hostile = with_code(scripted, tmp_path / "net.pt", f"{alias}\n    a = {path}\n    a.enable()\n    return input")
    with pytest.raises(ModelFileError, match=r"passes on the names below __torch__|C\+\+ class of torch\.classes"):
        check_archive(hostile)
    with quiet():
        assert torch.jit.load(hostile)(torch.zeros(2, 3, 8, 8)).shape == (2, 3, 8, 8)  # the profiler is on


class RunsAtLoad(nn.Module):
    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    @torch.jit.export
    def __getstate__(self) -> tuple[str, bool]:
        return self.path, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool]) -> None:
        self.path = state[0]
        self.training = state[1]
        torch.save(torch.zeros(1), self.path)


def test_torchscript_that_writes_a_file_when_loaded_is_refused(tmp_path: Path) -> None:
    marker = tmp_path / "harm"
    hostile = script(RunsAtLoad(str(marker)), tmp_path / "net.pt")
    with pytest.raises(ModelFileError, match="aten::save, which opens files"):
        check_archive(hostile)
    assert not marker.exists()
    with quiet():
        torch.jit.load(hostile)
    assert marker.exists()


def test_torchscript_tensor_that_leaves_its_storage_is_refused(scripted: Path, tmp_path: Path) -> None:
    content = members(scripted)
    four, many = b"(K\x04t", b"(M\x00\x40t"  # the shape (4,) of a bias becomes (16384,)
    assert content["data.pkl"].count(four) == 1
    hostile = write(tmp_path / "net.pt", {**content, "data.pkl": content["data.pkl"].replace(four, many)})
    with pytest.raises(ModelFileError, match=r"shape \(16384,\), stride \(1,\) leaves its storage of 4 elements"):
        check_archive(hostile)
    with quiet():
        try:
            bias = dict(torch.jit.load(hostile).named_parameters())["0.bias"]
        except RuntimeError:
            pytest.skip(f"torch {torch.__version__} counts the elements itself")
    assert (bias.numel(), bias.untyped_storage().nbytes()) == (16384, 16)


def test_torchscript_pickle_with_an_opcode_of_another_writer_is_refused(scripted: Path, tmp_path: Path) -> None:
    content = members(scripted)
    hostile = content["data.pkl"][:2] + b"\x8c\x01a0" + content["data.pkl"][2:]  # a short string, dropped again
    with pytest.raises(ModelFileError, match="has SHORT_BINUNICODE 'a', unknown to TorchScript"):
        check_archive(write(tmp_path / "net.pt", {**content, "data.pkl": hostile}))


def test_torchscript_tensor_of_negative_length_is_refused(scripted: Path, tmp_path: Path) -> None:
    content = members(scripted)
    hostile = content["data.pkl"].replace(b"(K\x04t", b"(J\xff\xff\xff\xfft")
    with pytest.raises(ModelFileError, match=r"shape \(-1,\), stride \(1,\) leaves its storage"):
        check_archive(write(tmp_path / "net.pt", {**content, "data.pkl": hostile}))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (
            b"c__torch__.torch.nn.modules.activation\nReLU\n",
            b"c__torch__.torch.classes.a\nReLU\n",
            "unknown to TorchScript",
        ),
        (
            b"c__torch__.torch.nn.modules.activation\nReLU\n",
            b"c__torch__.torch\nclasses.a.ReLU\n",  # the same class, parted elsewhere
            "unknown to TorchScript",
        ),
        (b"ccollections\nOrderedDict\n", b"cbuiltins\neval\n", "builds builtins.eval"),
        (
            b"ctorch._utils\n_rebuild_tensor_v2\n",
            b"ctorch._utils\n_rebuild_qtensor\n",
            "builds torch._utils._rebuild_qtensor",
        ),
    ],
)
def test_torchscript_pickle_with_an_unknown_class_is_refused(
    old: bytes, new: bytes, reason: str, scripted: Path, tmp_path: Path
) -> None:
    content = members(scripted)
    assert old in content["data.pkl"]
    hostile = write(tmp_path / "net.pt", {**content, "data.pkl": content["data.pkl"].replace(old, new)})
    with pytest.raises(ModelFileError, match=re.escape(reason)):
        check_archive(hostile)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return __torch__.torch.classes.thing.Thing().go()", "C++ class of torch.classes"),
        ("return ops.mylib.go(input)", "no harmless operators in 'mylib'"),
        ("return ops.prim.ConstantMKLDNNTensor()", "prim::ConstantMKLDNNTensor"),
        ("return ops.prim.tolist(input, 1, 0)", "prim::tolist"),
        ('return getattr(input, "tolist")()', "prim::tolist"),
        ("return torch.manual_seed(1)", "changes global state"),
        ("return torch.no_such_operator(input)", "does not have"),
        ("return fork(self.forward, input)", "calls 'fork'"),
        ('return """a', "which torch.jit.save never writes"),
        ("return input # a", "which torch.jit.save never writes"),
        ('return getattr(input, "sav\\x65")("a")', "which torch.jit.save never writes"),
        ("return torch.add(input, 'a')", "which torch.jit.save never writes"),
    ],
)
def test_torchscript_code_beyond_harmless_operators_is_refused(
    body: str, reason: str, scripted: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelFileError, match=re.escape(reason)):
        check_archive(with_code(scripted, tmp_path / "net.pt", body))


# The zip.


def zipped(path: Path, content: list[tuple[str, bytes]], **how: Any) -> Path:
    with quiet(), zipfile.ZipFile(path, "w", **how) as archive:
        for name, data in content:
            archive.writestr(name, data)
    return path


def rooted(good: Path) -> list[tuple[str, bytes]]:
    return [(f"net/{name}", data) for name, data in members(good).items()]


def test_file_written_by_another_zip_tool_is_read_when_it_is_plain(good: Path, tmp_path: Path) -> None:
    assert check_archive(zipped(tmp_path / "net.pt2", rooted(good))) == "export"


def test_second_member_of_the_same_name_is_read_by_one_reader_only_and_refused(good: Path, tmp_path: Path) -> None:
    doubles = [("net/models/model.json", text) for text in (b"1", b"2", b"3", b"4")]
    hostile = zipped(tmp_path / "net.pt2", [*rooted(good), *doubles])
    with pytest.raises(ModelFileError, match=r"two members named 'models/model\.json'"):
        check_archive(hostile)
    assert torch._C.PyTorchFileReader(str(hostile)).get_record(MODEL) != members(hostile)[MODEL]


def test_member_in_other_case_is_taken_by_torch_and_refused(good: Path, tmp_path: Path) -> None:
    hostile = zipped(tmp_path / "net.pt2", [*rooted(good), ("net/MODELS/model.json", b"{}")])
    with pytest.raises(ModelFileError, match="two members named"):
        check_archive(hostile)
    lone = [(name.replace("models/", "MODELS/"), data) for name, data in rooted(good)]
    reader = torch._C.PyTorchFileReader(str(zipped(tmp_path / "lone.pt2", lone)))
    assert reader.get_record(MODEL) == members(good)[MODEL]


@pytest.mark.parametrize(
    "name",
    ["net/../../evil", "../evil", "/etc/evil", "net//evil", "net/./evil", "net/a\\..\\evil", "evil", "net/", "C:/evil"],
)
def test_member_whose_path_is_not_plain_is_refused(name: str, good: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"no plain path below|where torch writes one folder"):
        check_archive(zipped(tmp_path / "net.pt2", [*rooted(good), (name, b"")]))


def test_members_below_two_folders_are_refused(good: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="below 'net' and 'other', where torch writes one folder"):
        check_archive(zipped(tmp_path / "net.pt2", [*rooted(good), ("other/extra/a", b"")]))


@pytest.mark.parametrize("name", ["data/executorch/a.pte", "data/weights/custom_obj_0", "xl_model_weights/a", "a.py"])
def test_member_of_an_unknown_kind_is_refused(name: str, good: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no part of a network of plain tensors"):
        check_archive(write(tmp_path / "net.pt2", {**members(good), name: b""}))


def test_compressed_members_are_refused(good: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="compressed or encrypted"):
        check_archive(zipped(tmp_path / "net.pt2", rooted(good), compression=zipfile.ZIP_DEFLATED))


def prepend(data: bytes) -> bytes:
    return b"PK\x03\x04 hidden" + data


def append(data: bytes) -> bytes:
    return data + b"hidden"


def comment(data: bytes) -> bytes:
    return data[:-2] + struct.pack("<H", 6) + b"hidden"


def rename_in_local_header(data: bytes) -> bytes:
    """Python compares the names when it reads a member; weights are read by torch only."""
    return data.replace(b"net/data/weights/weight_0", b"net/data/weights/weight_9", 1)


def encrypt(data: bytes) -> bytes:
    """Set the bit that says so, in both headers of the last member."""
    changed = bytearray(data)
    changed[data.rindex(b"PK\x01\x02") + 8] |= 1
    changed[data.rindex(b"PK\x03\x04") + 6] |= 1
    return bytes(changed)


def insert(data: bytes, at: int) -> bytes:
    """Bytes that no header speaks of, with every offset put right."""
    changed, entry = bytearray(data), data.index(b"PK\x01\x02")
    while entry >= 0:
        (offset,) = struct.unpack_from("<L", data, entry + 42)
        struct.pack_into("<L", changed, entry + 42, offset + 6 * (offset >= at))
        entry = data.find(b"PK\x01\x02", entry + 1)
    struct.pack_into("<L", changed, len(data) - 6, data.index(b"PK\x01\x02") + 6)
    return bytes(changed[:at]) + b"hidden" + bytes(changed[at:])


def insert_between_members(data: bytes) -> bytes:
    return insert(data, data.index(b"PK\x03\x04", 4))


def insert_before_directory(data: bytes) -> bytes:
    return insert(data, data.index(b"PK\x01\x02"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (prepend, "two headers that differ|hidden bytes before it"),
        (append, "is damaged|bytes before, between or after"),
        (comment, "bytes before, between or after"),
        (rename_in_local_header, "two headers that differ"),
        (encrypt, "compressed or encrypted"),
        (insert_between_members, "hidden bytes before it"),
        (insert_before_directory, "bytes before, between or after"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_zip_that_two_readers_could_read_differently_is_refused(
    change: Callable[[bytes], bytes], reason: str, good: Path, tmp_path: Path
) -> None:
    path = zipped(tmp_path / "net.pt2", rooted(good))
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ModelFileError, match=reason):
        check_archive(path)


# Damage, and files of other kinds.


def test_file_cut_anywhere_is_refused(good: Path, scripted: Path, tmp_path: Path) -> None:
    for source in (good, scripted):
        data = source.read_bytes()
        for length in range(0, len(data), len(data) // 40):
            path = tmp_path / "cut"
            path.write_bytes(data[:length])
            with pytest.raises(ModelFileError):
                check_archive(path)


@pytest.mark.parametrize("member", [MODEL, WEIGHTS, CONSTANTS])
def test_flipped_bytes_of_json_raise_nothing_but_model_file_errors(member: str, good: Path, tmp_path: Path) -> None:
    content, chance, refused = members(good), random.Random(member), 0
    for _ in range(150):
        data = bytearray(content[member])
        data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            assert check_archive(write(tmp_path / "net.pt2", {**content, member: bytes(data)})) == "export"
        except ModelFileError:
            refused += 1
    assert refused > 20  # a flip in a stack trace or a number may be harmless, one in a key or a name is not


def test_flipped_bytes_of_the_archive_raise_nothing_but_model_file_errors(
    good: Path, scripted: Path, tmp_path: Path
) -> None:
    chance, refused = random.Random(0), 0
    for source in (good, scripted) * 100:
        data = bytearray(source.read_bytes())
        for _ in range(4):
            data[chance.randrange(len(data))] = chance.randrange(256)
        path = tmp_path / "flipped"
        path.write_bytes(data)
        try:
            check_archive(path)
        except ModelFileError:
            refused += 1
    assert refused > 100


def test_deeply_nested_json_is_refused(good: Path, tmp_path: Path) -> None:
    hostile = write(tmp_path / "net.pt2", {**members(good), MODEL: b"[" * 200_000})
    with pytest.raises(ModelFileError, match="damaged"):
        check_archive(hostile)


@pytest.mark.parametrize("data", [b"", b"P", b"PK\x03\x04", b"not a zip at all", b"\x80", b"\x80\x02."])
def test_file_that_is_no_archive_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "net.pt2"
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match=re.escape(str(path))):
        check_archive(path)


def test_missing_file_and_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.pt2", tmp_path):
        with pytest.raises(ModelFileError, match="cannot be read"):
            check_archive(path)


@pytest.mark.parametrize("zip_format", [True, False])
def test_state_dict_is_refused_and_sent_to_weights(zip_format: bool, tmp_path: Path) -> None:
    path = tmp_path / "net.pth"
    torch.save(Net().state_dict(), path, _use_new_zipfile_serialization=zip_format)
    with pytest.raises(ModelFileError, match=r"state dict .* give this file as weights="):
        check_archive(path)


@pytest.mark.parametrize("zip_format", [True, False])
def test_pickled_module_is_refused_without_running_and_sent_to_save_model(zip_format: bool, tmp_path: Path) -> None:
    path, marker = tmp_path / "net.pth", tmp_path / "harm"
    torch.save({"net": Touch(marker)}, path, _use_new_zipfile_serialization=zip_format)
    with pytest.raises(ModelFileError, match=r"pickled Python object.* gpuml\.save_model\("):
        check_archive(path)
    assert not marker.exists()
    torch.load(path, weights_only=False)
    assert marker.exists()


# What is allowed.


def test_sample_inputs_that_are_only_tensors_are_read(tmp_path: Path) -> None:
    assert check_archive(export(Net(), tmp_path / "net.pt2", inputs=True)) == "export"


def test_sample_inputs_of_a_gpu_are_read_where_there_is_none(tmp_path: Path) -> None:
    content = members(export(Net(), tmp_path / "cpu.pt2", inputs=True))
    here, there = b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0"  # where a tensor's storage was
    with zipfile.ZipFile(io.BytesIO(content[INPUTS])) as archive:
        inputs = {name: archive.read(name).replace(here, there) for name in archive.namelist()}
    assert any(there in data for data in inputs.values())
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in inputs.items():
            archive.writestr(name, data)
    assert check_archive(write(tmp_path / "gpu.pt2", {**content, INPUTS: buffer.getvalue()})) == "export"


def test_input_of_two_kinds_is_refused(good: Path, tmp_path: Path) -> None:
    """One reader may take it for an argument of a node, another for a constant."""

    def change(value: Any) -> None:
        graph(value)["inputs"][-1] |= {"as_string": "' or 1", "arg": None}

    with pytest.raises(ModelFileError, match="constant input"):
        check_archive(edited(good, tmp_path / "net.pt2", MODEL, change))


@pytest.mark.parametrize("key", ["expr_str", "target", "in_spec", "out_spec"])
def test_text_that_torch_parses_is_one_string(key: str, good: Path, tmp_path: Path) -> None:
    """sympy evaluates the strings in lists and dicts too; that torch does not pass those on is its accident."""

    def change(value: Any) -> None:
        size = next(
            size for meta in graph(value)["tensor_values"].values() for size in meta["sizes"] if "as_expr" in size
        )
        part = {"expr_str": size.get("as_expr"), "target": graph(value)["nodes"][0]}.get(key, signature(value))
        part[key] = {"as_string": "1 + 1"}

    with pytest.raises(ModelFileError, match=r"is damaged \(TypeError"):
        check_archive(edited(good, tmp_path / "net.pt2", MODEL, change))


def test_weight_of_a_shape_without_bytes_is_refused(good: Path, tmp_path: Path) -> None:
    """torch makes zeros of any size from an empty member: here 4 GB from nothing."""
    content = members(good)
    config = json.loads(content[WEIGHTS])
    entry = config["config"]["head.bias"]
    entry["path_name"], entry["tensor_meta"]["sizes"] = "weight_99", [{"as_int": 10**9}]
    content |= {WEIGHTS: json.dumps(config).encode(), "data/weights/weight_99": b""}
    with pytest.raises(ModelFileError, match=r"'head\.bias' has a shape and no bytes"):
        check_archive(write(tmp_path / "net.pt2", content))


@pytest.mark.parametrize(
    ("size", "safe"),
    [
        (BATCH, True),
        (f"Mul(Integer(49), {BATCH})", True),
        (f"Min(Integer(768), Add(Integer(-1), FloorDiv({BATCH}, Integer(2))))", True),
        (f"Pow({BATCH}, Integer(2))", True),
        ("Pow(Integer(9), Integer(9))", False),
        ("LShift(Integer(1), Integer(1000000000))", False),
        ("Integer(1) if True else Integer(2)", False),
        ("(lambda: 1)()", False),
        ("Symbol.__class__", False),
        ("Function('f')(Integer(1))", False),
        ("Symbol('__import__')", False),
        ("Symbol('s9999999999')", False),
        ("s0; s1", False),
        ("", False),
    ],
)
def test_symbolic_sizes_are_arithmetic_only(size: str, safe: bool, good: Path, tmp_path: Path) -> None:
    content = members(good)
    value = replace_text(json.loads(content[MODEL]), BATCH, size)
    path = write(tmp_path / "net.pt2", {**content, MODEL: json.dumps(value).encode()})
    if safe:
        assert check_archive(path) == "export"
    else:
        with pytest.raises(ModelFileError, match="more than arithmetic"):
            check_archive(path)


@pytest.mark.parametrize(
    ("guard", "safe"),
    [
        ("L['x'].size()[0] == L['x'].size()[0]", True),
        ("L['args'][0].size()[0] == L['args'][10].size()[1]", True),
        ("L['x'].size()[0] == L['x'].size()[0] or exit()", False),
        ("L['x'].size()[0] == L['x'].size()[0]\n", False),
        ("L['x'].size()[0] == L['x'].size()[exit()]", False),
        ("L['x'].size()[0] == L['x'].__class__", False),
        ("L['x'][exit()].size()[0] == L['x'].size()[0]", False),
        ("L['x']) or exit() or (L['x'].size()[0] == 1", False),
        ("L['__import__'].size()[0] == L['x'].size()[0]", False),
    ],
)
def test_guards_compare_the_lengths_of_inputs_only(guard: str, safe: bool, good: Path, tmp_path: Path) -> None:
    path = edited(good, tmp_path / "net.pt2", MODEL, lambda value: value.update(guards_code=[guard]))
    if safe:
        assert check_archive(path) == "export"
    else:
        with pytest.raises(ModelFileError, match="as 'guards_code'"):
            check_archive(path)


@pytest.mark.parametrize(
    "target",
    ["torch.os.system", "torch.hub.load", "torch.ops.load_library", "torch.ops.aten.relu.__class__", "builtins.eval",
     "_operator.methodcaller", "torch.ops.aten.from_file.out", "torch.ops.aten.resize_.default", "#ext:thing", "",
     "torch.ops.aten.fbgemm_linear_fp16_weight.default", "torch.ops.aten.max_pool2d_with_indices_backward.default",
     "torch.ops.aten._print.default", "torch.ops.higher_order.cond", "torch.ops.image.write_file.default",
     "torch.ops.aten.set_.source_Storage"],
)  # fmt: skip
def test_targets_that_do_more_than_compute_are_refused(target: str) -> None:
    assert refuse_target(target) is not None


@pytest.mark.parametrize(
    "target",
    ["torch.ops.aten.conv2d.default", "torch.ops.aten.batch_norm.default", "torch.ops.aten._assert_scalar.default",
     "torch.ops.aten.sym_size.int", "_operator.getitem", "_operator.mul", "torch.sym_float",
     "torch.ops.torchvision.nms.default", "torch.ops.higher_order.wrap_with_set_grad_enabled",
     "torch.ops.higher_order.wrap_with_autocast"],
)  # fmt: skip
def test_targets_that_only_compute_are_allowed(target: str) -> None:
    assert refuse_target(target) is None


def test_no_allowed_operator_takes_storage_streams_or_objects() -> None:
    """Over every aten operator of this torch: the rule lets no schema through that holds more than data."""
    allowed = collections.Counter()
    for schema in torch._C._jit_get_all_schemas():
        namespace, name = schema.name.split("::")
        if namespace == "aten" and refuse_operator(namespace, name) is None:
            allowed[name] += 1
            assert not re.search(r"Storage|Stream|Future|RRef|torch\.classes", str(schema))
    assert len(allowed) > 800


@pytest.mark.parametrize("name", ["mobilenet_v3_small", "swin_t"])
def test_exports_of_torchvision_networks_pass(name: str, tmp_path: Path) -> None:
    with quiet():
        path = export(torchvision.models.get_model(name, weights=None), tmp_path / "net.pt2", size=224)
    assert check_archive(path) == "export"


def test_scripted_and_traced_torchvision_networks_pass(tmp_path: Path) -> None:
    net = torchvision.models.get_model("squeezenet1_1", weights=None).eval()
    assert check_archive(script(net, tmp_path / "scripted.pt")) == "torchscript"
    with quiet():
        torch.jit.save(torch.jit.trace(net, torch.zeros(2, 3, 64, 64)), tmp_path / "traced.pt")
    assert check_archive(tmp_path / "traced.pt") == "torchscript"
