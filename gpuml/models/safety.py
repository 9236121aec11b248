"""A model file's archive -> its kind, or why it is not safe to open: decided before torch reads the file.

``torch.export.load`` trusts its file (seen on torch 2.14.1). From bytes to code, the doors and their locks:

- data/sample_inputs: unpickled in full where weights_only fails -> they are empty, or load with weights_only.
- data/weights, data/constants: ``use_pickle``, ``custom_obj_*``, ``opaque_obj_*``, the older ``<model>.pt`` -> raw tensors.
- data/aotinductor: shared libraries are opened; data/executorch; the layout before torch 2.8 -> no such members.
- node targets: any dotted path under ``torch`` is looked up and called -> the list in `safety_operators`.
- sizes: ``expr_str`` goes to sympify, which evaluates -> constructors of numbers, symbols and arithmetic.
- names of nodes, arguments and parameters: pasted into generated Python that is run -> identifiers.
- ``in_spec``, ``out_spec``: an enum or a defaultdict imports any module -> tuples, lists and plain dicts.
- ``guards_code``, constant inputs: pasted into generated Python too -> none.
- custom objects, tokens, operators as arguments -> none; every key is known, or its value is empty.
- the zip: Python and torch's reader must see the same members (torch ignores case) -> one plain layout.

Checks on text are allow-lists; what is not known is refused. Doors of TorchScript: `safety_torchscript`.
"""

from __future__ import annotations

import io
import json
import os
import pickletools
import re
import struct
import warnings
import zipfile
from collections.abc import Callable
from typing import Any

import torch

from gpuml.errors import ModelFileError
from gpuml.models import safety_torchscript
from gpuml.models.safety_operators import refuse_target

_MOST_TEXT = 1 << 28  # bytes of one JSON member; the largest of torchvision's 80 networks has 2.5 MB

_COMMON = (
    r"version|byteorder|\.data/(version|serialization_id)|\.format_version|\.storage_alignment|extra/[\w.][\w.\-/ ]*"
)
_MEMBERS = re.compile(
    rf"{_COMMON}|archive_format|archive_version|models/model\.json|data/sample_inputs/model\.pt"
    r"|data/(weights|constants)/(model_(weights|constants)_config\.json|(weight|tensor)_\d+)",
    re.ASCII,
)

_IDENTIFIER = re.compile(r"(?!__)[A-Za-z_]\w*|", re.ASCII)
_PATH = re.compile(r"(?!__)[\w@-]*(\.(?!__)[\w@-]*)*", re.ASCII)
_SYMBOL = re.compile(r"[A-Za-z_]+\d{0,6}", re.ASCII)  # torch counts up to the number
_WORD = re.compile(r"[\w:]*", re.ASCII)
_FLOAT = re.compile(r"-?(Infinity|inf)|NaN|nan")
_ANY = re.compile(r"(?s).*")  # values that torch keeps, or quotes with repr(), and never parses

#: The strings of the JSON by their key: a pattern that the whole of it matches. Functions are in `_PARSED`.
_STRINGS = {
    **dict.fromkeys(("name", "as_name", "forward_arg_names"), _IDENTIFIER),
    **dict.fromkeys(("parameter_name", "buffer_name", "tensor_constant_name", "fqn"), _PATH),
    **dict.fromkeys(("type", "verifiers"), _WORD),
    **dict.fromkeys(("as_float", "as_floats", "as_float_lists", "real", "imag"), _FLOAT),
    **dict.fromkeys(("as_string", "as_strings", "metadata", "torch_version"), _ANY),
    "path_name": re.compile(r"(weight|tensor)_\d+", re.ASCII),
}

#: Objects keyed by a file's own names: a pattern for those names.
_MAPS = {
    **dict.fromkeys(("tensor_values", "sym_int_values", "sym_float_values", "sym_bool_values"), _IDENTIFIER),
    **dict.fromkeys(("as_string_to_argument", "metadata", "opset_version"), _IDENTIFIER),
    "range_constraints": _SYMBOL,
    "config": _PATH,
}

#: The keys of torch.export's schema that a network of tensors needs.
_KEYS = frozenset(_STRINGS) | frozenset(_MAPS) | frozenset(
    """
    graph_module opset_version schema_version major minor graph signature module_call_graph inputs outputs nodes
    is_single_tensor_return input_specs output_specs user_input parameter buffer tensor_constant persistent user_output
    buffer_mutation user_input_mutation arg kind target is_hop_single_tensor_return as_none as_tensor as_tensors as_int
    as_ints as_sym_int as_sym_ints as_sym_float as_sym_floats as_sym_bool as_sym_bools as_scalar_type as_memory_format
    as_layout as_device as_bool as_bools as_graph as_optional_tensor as_optional_tensors as_complex as_nested_tensors
    as_int_lists as_expr expr_str hint dtype sizes requires_grad device index strides storage_offset layout min_val
    max_val in_spec out_spec is_param use_pickle tensor_meta
    """.split()
)  # fmt: skip

#: sympy.srepr's words for sizes, in which atoms have become "0". No shift, no PowByNatural, and Pow only of a symbol to
#: a digit: LShift(Integer(1), Integer(10**9)) would be computed.
_SIZE_ATOM = re.compile(
    r"(Pow\()?Symbol\('[A-Za-z_]+\d{0,6}'(, \w+=(True|False))*\)(?(1), Integer\(-?\d\)\))"
    r"|Integer\(-?\d{1,19}\)|Rational\(-?\d{1,9}, \d{1,9}\)|Float\('-?\d{1,30}\.\d{1,30}', precision=\d{1,3}\)",
    re.ASCII,
)
_SIZE_CALL = re.compile(
    r"(Add|Mul|Max|Min|Mod|PythonMod|FloorDiv|CeilDiv|CleanDiv|ModularIndexing|IntTrueDiv|FloatTrueDiv|CeilToInt"
    r"|FloorToInt|TruncToInt|TruncToFloat|RoundToInt|ToFloat|Identity|Where|Equality|Unequality|StrictLessThan|LessThan"
    r"|StrictGreaterThan|GreaterThan|And|Or|Not)\(0(, 0)*\)"
)


def check_archive(path: str | os.PathLike[str]) -> str:
    """What kind of model file this is, once everything in it is known to be harmless to load and run.

    Parameters
    ----------
    path : a file on this machine. It is read, never unpickled or run.

    Returns
    -------
    str
        ``"export"`` (written by ``torch.export.save``) or ``"torchscript"`` (by ``torch.jit.save``).

    Raises
    ------
    ModelFileError
        The file is damaged, of another format, or not safe to open; the message says which and what to do.

    Examples
    --------
    >>> check_archive("resnet50.pt2")  # doctest: +SKIP
    'export'
    """
    name = os.fspath(path)
    try:
        with open(name, "rb") as file:
            return _check(file)
    except ModelFileError as error:
        raise ModelFileError(
            f"model file {name!r} is refused: {error}. gpuml.save_model(net, 'net.pt2', ...) writes a file that is safe"
        ) from error.__cause__
    except OSError as error:
        raise ModelFileError(f"model file {name!r} cannot be read: {error.strerror or error}") from error
    # What the parsers of zip, JSON, syntax and pickle raise on damaged bytes; a hostile nesting ends in RecursionError.
    except (zipfile.BadZipFile, NotImplementedError, ValueError, LookupError, TypeError, AttributeError,
            SyntaxError, EOFError, struct.error, RecursionError, MemoryError, OverflowError) as error:  # fmt: skip
        raise ModelFileError(
            f"model file {name!r} is damaged: {type(error).__name__}: {str(error)[:200]}. Fetch or export it again"
        ) from error


def _check(file: io.BufferedReader) -> str:
    """The kind of the archive in `file`."""
    start = file.read(4)
    if start[:1] == b"\x80":
        raise ModelFileError(_pickle_advice(pickletools.genops(start + file.read())))
    if start != b"PK\x03\x04":
        raise ModelFileError(
            "it is no zip archive, as torch.export.save and torch.jit.save write; use gpuml.save_model(...)"
        )
    with zipfile.ZipFile(file) as archive:
        members = _members(archive, file)

        def read(name: str) -> bytes:
            if name not in members:
                raise ModelFileError(f"it has no {name!r}: the file is incomplete; fetch or export it again")
            if members[name].file_size > _MOST_TEXT:
                raise ModelFileError(f"{name!r} has {members[name].file_size} bytes, more than {_MOST_TEXT}")
            return archive.read(members[name])

        sizes = {name: member.file_size for name, member in members.items()}
        if "archive_format" in members:
            _check_export(sizes, read)
            return "export"
        if "constants.pkl" in members:
            safety_torchscript.check(sizes, read, _COMMON)
            return "torchscript"
        if "data.pkl" in members:
            raise ModelFileError(_pickle_advice(pickletools.genops(read("data.pkl"))))
    raise ModelFileError("it is a zip archive, but of neither torch.export nor TorchScript; use gpuml.save_model(...)")


def _pickle_advice(opcodes: Any) -> str:
    """What to do with a file of torch.save: a state dict has its place, a pickled module has none."""
    modules = {str(argument).split(" ")[0] for opcode, argument, _ in opcodes if opcode.name == "GLOBAL"}
    if modules <= {"torch", "torch._utils", "collections"}:
        return (
            "it is a state dict (torch.save), weights without their network; "
            "name the network in model= and give this file as weights=, as in model='torchvision:resnet50'"
        )
    return (
        "it is a pickled Python object (torch.save of a whole module), which runs code when opened; "
        "where its class can be imported and the file is trusted, load it and write gpuml.save_model(net, 'net.pt2', ...)"
    )


# The zip: one layout, so that every reader sees the same members.


def _members(archive: zipfile.ZipFile, file: io.BufferedReader) -> dict[str, zipfile.ZipInfo]:
    """Members by their name below the archive's root folder; refuses all that two readers could read differently."""
    members: dict[str, zipfile.ZipInfo] = {}
    roots, folded, position = set(), set(), 0
    for info in sorted(archive.infolist(), key=lambda info: info.header_offset):
        position = _after(info, file, position)
        parts = info.orig_filename.split("/")
        if len(parts) < 2 or not {"", ".", ".."}.isdisjoint(parts) or re.search(r"[\0-\x1f\\:]", info.orig_filename):
            raise ModelFileError(_legacy_or_path(info.orig_filename))
        roots.add(parts[0])
        name = "/".join(parts[1:])
        if name.lower() in folded:  # torch's reader finds members without regard to case
            raise ModelFileError(f"it has two members named {name!r}, and readers differ in which one they take")
        folded.add(name.lower())
        members[name] = info
    if len(roots) != 1:
        raise ModelFileError(f"its members lie in {len(roots)} top folders, where torch writes one")
    _check_tail(file, position, len(members))
    return members


def _legacy_or_path(name: str) -> str:
    if name in ("version", "serialized_exported_program.json"):
        return "it was exported before torch 2.8, in a layout that torch unpickles; export it again with a newer torch"
    return f"its member {name!r} is no plain relative path below one folder"


def _after(info: zipfile.ZipInfo, file: io.BufferedReader, position: int) -> int:
    """Where the bytes of a member end, after checking that its two headers agree and that it starts at `position`."""
    # Bits: 3 = sizes follow the data, 11 = the name is UTF-8. Others encrypt, patch or compress.
    extra = not info.extra or (info.extra[:2] == b"\1\0" and len(info.extra) == 4 + info.extra[2])
    if info.flag_bits & ~0x808 or info.compress_type or info.compress_size != info.file_size or not extra:
        raise ModelFileError(
            f"its member {info.orig_filename!r} is compressed or encrypted; torch stores members as they are"
        )
    file.seek(info.header_offset)
    fields = struct.unpack("<4s5H3L2H", file.read(30))
    raw = info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437")
    same = fields[0] == b"PK\x03\x04" and fields[2:4] == (info.flag_bits, 0) and file.read(fields[9]) == raw
    if not same or info.header_offset != position:
        raise ModelFileError(
            f"its member {info.orig_filename!r} has two headers that differ, or hidden bytes before it"
        )
    end = position + 30 + fields[9] + fields[10] + info.file_size
    file.seek(end)
    descriptor = file.read(28)
    if not info.flag_bits & 8 or descriptor[:4] != b"PK\x07\x08":
        return end
    return end + (16 if descriptor[16:18] == b"PK" else 24)  # 24 for members above 4 GiB


def _check_tail(file: io.BufferedReader, directory: int, count: int) -> None:
    """The central directory follows the last member, its end record follows it, and nothing else does."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 98))
    tail = file.read()
    mark, _, _, _, entries, length, offset, comment = struct.unpack("<4s4H2LH", tail[-22:])
    end = size - 22
    if tail[-42:-38] == b"PK\x06\x07":  # zip64: torch always writes it
        end = size - 98
        found = struct.unpack("<4sQ2H2L4Q", tail[:56])
        record = struct.unpack("<4sLQL", tail[56:76])[2]
        wide = found[7:10]
        narrow = ((entries, 0xFFFF), (length, 0xFFFFFFFF), (offset, 0xFFFFFFFF))
        agree = all(small in (big, top) for (small, top), big in zip(narrow, wide, strict=True))
        if found[0] != b"PK\x06\x06" or record != end or not agree:
            raise ModelFileError("its zip has two directories that differ")
        entries, length, offset = wide
    if mark != b"PK\x05\x06" or comment or (offset, offset + length, entries) != (directory, end, count):
        raise ModelFileError("its zip has bytes before, between or after the parts that torch writes")


# torch.export's archive.


def _check_export(sizes: dict[str, int], read: Callable[[str], bytes]) -> None:
    for name in sizes:
        if not _MEMBERS.fullmatch(name):
            raise ModelFileError(f"it has a member {name!r}, which is no part of a network of plain tensors")
    if (read("archive_format"), read("archive_version")) != (b"pt2", b"0"):
        raise ModelFileError("its archive format is not 'pt2', version 0; export it again, or upgrade gpuml and torch")
    for folder in ("weights", "constants"):
        config = json.loads(read(f"data/{folder}/model_{folder}_config.json").decode("utf-8"))
        _walk(config, "")
        for name, payload in config["config"].items():
            _check_payload(name, payload, folder, sizes)
    _walk(json.loads(read("models/model.json").decode("utf-8")), "")
    inputs = read("data/sample_inputs/model.pt")
    if inputs:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.load(io.BytesIO(inputs), weights_only=True)
        except Exception as error:
            raise ModelFileError(
                f"its sample inputs hold more than tensors ({type(error).__name__}), and torch would unpickle them; "
                "set program.example_inputs = None before torch.export.save"
            ) from error


def _check_payload(name: str, payload: dict[str, Any], folder: str, sizes: dict[str, int]) -> None:
    """A weight or constant is the raw bytes of a tensor."""
    member, meta = f"data/{folder}/{payload['path_name']}", payload["tensor_meta"]
    if payload["use_pickle"] is not False or meta is None:
        raise ModelFileError(f"its {folder} entry {name!r} is pickled; only raw tensors are safe to read")
    if member not in sizes:
        raise ModelFileError(f"its {folder} entry {name!r} names a missing member {member!r}")
    # torch makes a tensor of zeros, of any size, from no bytes.
    if sizes[member] == 0 and 0 not in [size["as_int"] for size in meta["sizes"]]:
        raise ModelFileError(f"its {folder} entry {name!r} has a shape and no bytes")


def _walk(value: Any, key: str) -> None:
    """Check every string, key and name of a JSON value that lies under `key`, graphs within graphs included."""
    if isinstance(value, list):
        for part in value:
            if key == "inputs" and "arg" not in part and not part.keys() <= {"as_tensor", "as_sym_int"}:
                raise ModelFileError(f"its graph has a constant input {str(part)[:100]}; only tensors may be inputs")
            _walk(part, key)
    elif isinstance(value, dict):
        names = _MAPS.get(key)
        for name, part in value.items():
            if names is None and name not in _KEYS:
                if part not in (None, False, "", [], {}):
                    raise ModelFileError(f"it uses {name!r}, which is no part of a network of plain tensors")
            elif names is not None and not names.fullmatch(name):
                raise ModelFileError(f"it has a name {name[:100]!r} in {key!r}, where only an identifier is safe")
            else:
                _walk(part, name if names is None else "metadata" if key == "metadata" else "")
    elif isinstance(value, str):
        _check_string(value, key)


def _check_string(text: str, key: str) -> None:
    if key == "target":
        reason = refuse_target(text)
        if reason is not None:
            raise ModelFileError(reason)
    elif key == "expr_str":
        _check_size(text)
    elif key in ("in_spec", "out_spec"):
        version, spec = json.loads(text)
        _check_spec(spec)
    elif key not in _STRINGS or not _STRINGS[key].fullmatch(text):
        raise ModelFileError(f"it has {text[:100]!r} as {key!r}, which is not plain enough to be safe")


def _check_size(text: str) -> None:
    """A symbolic size is calls of arithmetic on symbols and numbers, as sympy.srepr writes them."""
    left, found = _SIZE_ATOM.sub("0", text[:10_000]), 1
    while found:
        left, found = _SIZE_CALL.subn("0", left)
    if left not in ("0", "true", "false"):
        raise ModelFileError(f"its symbolic size {text[:100]!r} is more than arithmetic, and sympy would evaluate it")


def _check_spec(spec: dict[str, Any]) -> None:
    """How inputs and outputs nest: tuples, lists and dicts by name."""
    kind, context = spec["type"], spec["context"]
    names = json.loads(context) if kind == "builtins.dict" else []
    if (kind, context) not in ((None, None), ("builtins.tuple", "null"), ("builtins.list", "null")) and (
        kind != "builtins.dict" or not all(isinstance(name, str) and _IDENTIFIER.fullmatch(name) for name in names)
    ):
        raise ModelFileError(
            f"its inputs or outputs are a {str(kind)[:100]!r}, not tensors in tuples, lists or plain dicts"
        )
    for child in spec["children_spec"]:
        _check_spec(child)
