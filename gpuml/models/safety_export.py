"""The members of a torch.export archive -> None, or why they are not safe to load.

``torch.export.load`` trusts its file (seen on torch 2.14.1). The doors from bytes to code, and what closes them here:

- data/sample_inputs: where weights_only fails, unpickled in full -> empty, or loaded here with weights_only.
- data/weights, data/constants: ``use_pickle``, ``custom_obj_*``, ``opaque_obj_*``, older ``model.pt`` -> raw tensors.
- data/aotinductor: shared libraries are opened; data/executorch -> no such members.
- targets of nodes: any dotted path under ``torch`` is looked up and called -> the list of `safety_operators`.
- sizes: ``expr_str`` goes to sympify, which evaluates -> arithmetic on symbols and numbers.
- names of nodes, arguments, parameters: pasted into generated Python that is then run -> identifiers.
- ``in_spec``, ``out_spec``: an enum, at any depth, or a defaultdict imports any module -> tuples, lists, plain dicts.
- ``guards_code``: pasted into generated Python too -> that a length of one input is that of another, no more.
- constant inputs: the same -> none.
- custom objects, tokens, operators as arguments -> none: every key is known, or its value is empty.

Left open: nodes' metadata. torch looks up names in it below ``torch``, keeps what it finds and calls nothing.
"""

from __future__ import annotations

import io
import json
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gpuml.errors import ModelFileError
from gpuml.models.safety_operators import refuse_target

#: Members that every archive of torch may have.
COMMON = (
    r"version|byteorder|\.data/(version|serialization_id)|\.format_version|\.storage_alignment|extra/[\w.][\w. /-]*"
)

_MEMBERS = re.compile(
    rf"{COMMON}|archive_format|archive_version|models/model\.json|data/sample_inputs/model\.pt"
    r"|data/weights/(model_weights_config\.json|weight_\d+)|data/constants/(model_constants_config\.json|tensor_\d+)",
    re.ASCII,
)

_IDENTIFIER = re.compile(r"((?!__)[A-Za-z_]\w*)?", re.ASCII)
_PATH = re.compile(r"(?!__)[\w@-]*(\.(?!__)[\w@-]*)*", re.ASCII)
_LENGTH = r"L\['(?!__)[A-Za-z_]\w*'\](\[\d+\])*\.size\(\)\[\d+\]"
_ANY = re.compile(r"(?s).*")  # kept by torch, or quoted with repr(); never parsed

#: The pattern of a string, by its key.
_STRINGS = {
    **dict.fromkeys(("name", "as_name", "forward_arg_names"), _IDENTIFIER),
    **dict.fromkeys(("parameter_name", "buffer_name", "tensor_constant_name", "fqn"), _PATH),
    **dict.fromkeys(("type", "verifiers"), re.compile(r"\w*", re.ASCII)),
    **dict.fromkeys(("as_float", "as_floats", "as_float_lists", "real", "imag"), re.compile(r"-?Infinity|NaN")),
    **dict.fromkeys(("as_string", "as_strings", "metadata", "torch_version"), _ANY),
    "path_name": re.compile(r"(weight|tensor)_\d+", re.ASCII),
    "guards_code": re.compile(rf"{_LENGTH} == {_LENGTH}", re.ASCII),
}

#: What torch parses further: one string, since sympy evaluates those in lists and dicts as well.
_PARSED = ("target", "expr_str", "in_spec", "out_spec")

#: The pattern of the names in an object that is keyed by names of the file's own, by the object's key.
_MAPS = {
    **dict.fromkeys(("tensor_values", "sym_int_values", "sym_float_values", "sym_bool_values"), _IDENTIFIER),
    **dict.fromkeys(("as_string_to_argument", "metadata", "opset_version"), _IDENTIFIER),
    "range_constraints": re.compile(r"[A-Za-z][A-Za-z_]*\d{0,6}", re.ASCII),  # torch counts up to the number
    "config": _PATH,
}

#: Keys of an input: a node's, or a graph's, whose kind is one key.
_INPUTS = ({"name", "arg", "kind"}, {"as_tensor"}, {"as_sym_int"})

#: Other keys of torch.export's schema that a network of plain tensors needs.
_KEYS = re.compile(
    r"graph(_module)?|(opset|schema)_version|major|minor|signature|module_call_graph|inputs|outputs|nodes|metadata"
    r"|is_(single_tensor_return|hop_single_tensor_return|param)|(input|output)_specs|user_(input|output)|parameter"
    r"|buffer|tensor_constant|persistent|(buffer|user_input)_mutation|user_input_name|arg|kind|target|hint|dtype|sizes"
    r"|as_(none|tensors?|optional_tensors?|nested_tensors|ints?|int_lists|bools?|sym_(int|float|bool)s?|scalar_type"
    r"|memory_format|layout|device|complex|graph|expr)|expr_str|requires_grad|device|index|strides|storage_offset"
    r"|layout|min_val|max_val|in_spec|out_spec|use_pickle|tensor_meta"
)

#: Symbols and numbers as sympy.srepr writes them. Pow only of a symbol to a digit: of numbers it would be computed.
_SIZE_ATOM = re.compile(
    r"(Pow\()?Symbol\('[A-Za-z][A-Za-z_]*\d{0,6}'(, \w+=(True|False))*\)(?(1), Integer\(-?\d\)\))"
    r"|Integer\(-?\d{1,19}\)|Rational\(-?\d{1,9}, \d{1,9}\)|Float\('-?\d{1,30}\.\d{1,30}', precision=\d{1,3}\)",
    re.ASCII,
)
#: Characters of a symbolic size; the longest in torchvision's swin_v2_t, maxvit_t and vit_b_32 has 80.
_MOST_SIZE = 10_000
#: Arithmetic of atoms, which have become "0". No shifts: LShift(Integer(1), Integer(10**9)) would be computed.
_SIZE_CALL = re.compile(
    r"(Add|Mul|Max|Min|Mod|PythonMod|FloorDiv|CeilDiv|CleanDiv|ModularIndexing|IntTrueDiv|FloatTrueDiv|CeilToInt"
    r"|FloorToInt|TruncToInt|TruncToFloat|RoundToInt|ToFloat|Identity|Where|Equality|Unequality|StrictLessThan|LessThan"
    r"|StrictGreaterThan|GreaterThan|And|Or|Not)\(0(, 0)*\)"
)


def check(sizes: Mapping[str, int], read: Callable[[str], bytes]) -> None:
    """Refuse a torch.export archive that could do more than compute.

    Parameters
    ----------
    sizes : bytes of each member by its name below the root folder.
    read : the content of a member.

    Raises
    ------
    ModelFileError
        What is wrong, for `gpuml.models.safety.check_archive` to add the file's name.
    """
    for name in sizes:
        if not _MEMBERS.fullmatch(name):
            raise ModelFileError(f"it has a member {name!r}, which is no part of a network of plain tensors")
    if (read("archive_format"), read("archive_version")) != (b"pt2", b"0"):
        raise ModelFileError(f"its format is not 'pt2' in version 0, which torch {torch.__version__} reads")
    for folder in ("weights", "constants"):
        config = json.loads(read(f"data/{folder}/model_{folder}_config.json").decode("utf-8"))
        _walk(config, "")
        for name, payload in config["config"].items():
            _check_payload(name, payload, folder, sizes)
    _walk(json.loads(read("models/model.json").decode("utf-8")), "")
    _check_sample_inputs(read("data/sample_inputs/model.pt"))


def _check_payload(name: str, payload: dict[str, Any], folder: str, sizes: Mapping[str, int]) -> None:
    """A weight or constant is the raw bytes of a tensor."""
    member, meta = f"data/{folder}/{payload['path_name']}", payload["tensor_meta"]
    if payload["use_pickle"] is not False or meta is None:
        raise ModelFileError(f"its {folder} entry {name!r} is pickled, where only raw tensors are safe to read")
    if member not in sizes:
        raise ModelFileError(f"its {folder} entry {name!r} names a missing member {member!r}")
    # torch makes a tensor of zeros, of any size, from no bytes.
    if sizes[member] == 0 and 0 not in [size["as_int"] for size in meta["sizes"]]:
        raise ModelFileError(f"its {folder} entry {name!r} has a shape and no bytes")


def _check_sample_inputs(data: bytes) -> None:
    if not data:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # On the CPU: inputs of a GPU are tensors as well, and this machine may have none.
            torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        raise ModelFileError(
            f"its sample inputs hold more than tensors ({type(error).__name__}), and torch would unpickle them; "
            "set program.example_inputs = None before torch.export.save"
        ) from error


def _walk(value: Any, key: str) -> None:
    """Check every string, key and name of a JSON value that lies under `key`; graphs within graphs are values too."""
    if isinstance(value, str) or key in _PARSED:  # anything but a string fails there, as damage
        _check_string(value, key)
    elif isinstance(value, list):
        for part in value:
            if key == "inputs" and not any(part.keys() <= kind for kind in _INPUTS):
                raise ModelFileError(f"its graph has a constant input {str(part)[:100]}, where only tensors are safe")
            _walk(part, key)
    elif isinstance(value, dict) and key in _MAPS:
        for name, part in value.items():
            if not _MAPS[key].fullmatch(name):
                raise ModelFileError(f"it has a name {name[:100]!r} in {key!r}, which is no identifier")
            _walk(part, "metadata" if key == "metadata" else "")
    elif isinstance(value, dict):
        for name, part in value.items():
            if name in _STRINGS or name in _MAPS or _KEYS.fullmatch(name):
                _walk(part, name)
            elif part not in (None, False, "", [], {}):
                raise ModelFileError(f"it uses {name[:100]!r}, which is no part of a network of plain tensors")


def _check_string(text: str, key: str) -> None:
    if key == "target":
        reason = refuse_target(text)
        if reason is not None:
            raise ModelFileError(reason)
    elif key == "expr_str":
        _check_size(text)
    elif key in ("in_spec", "out_spec"):
        _, spec = json.loads(text)
        _check_spec(spec)
    elif key not in _STRINGS or not _STRINGS[key].fullmatch(text):
        raise ModelFileError(f"it has {text[:100]!r} as {key!r}, which is not plain enough to be safe")


def _check_size(text: str) -> None:
    """A symbolic size is calls of arithmetic on symbols and numbers."""
    if len(text) > _MOST_SIZE:
        raise ModelFileError(f"it has a symbolic size of {len(text)} characters, more than {_MOST_SIZE}")
    left, found = _SIZE_ATOM.sub("0", text), 1
    while found:
        left, found = _SIZE_CALL.subn("0", left)
    if left not in ("0", "true", "false"):
        raise ModelFileError(f"its symbolic size {text[:100]!r} is more than arithmetic, and sympy would evaluate it")


def _check_spec(spec: dict[str, Any]) -> None:
    """How inputs or outputs nest: tuples, lists, and dicts by name."""
    kind, context = spec["type"], spec["context"]
    if kind == "builtins.dict":
        # A list: below the names of an object torch would find enums, even where a second equal name hides them here.
        names = json.loads(context)
        plain = isinstance(names, list) and all(isinstance(name, str) and _IDENTIFIER.fullmatch(name) for name in names)
    else:
        plain = (kind, context) in ((None, None), ("builtins.tuple", "null"), ("builtins.list", "null"))
    if not plain:
        raise ModelFileError(f"its inputs or outputs nest in {str(kind)[:100]!r}, not in tuples, lists or plain dicts")
    for child in spec["children_spec"]:
        _check_spec(child)
