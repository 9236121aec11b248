"""A TorchScript archive's members -> None, or why it is not safe to load.

``torch.jit.load`` never runs Python: code/ is compiled by torch, the pickles are read by its own C++ reader. What is
left to a hostile file, and what stops it:

- code calls any registered operator, at load time too (``__setstate__``): files, random state, custom C++ classes
  -> every name below ``torch.`` and ``ops.`` is on the list of `safety_operators`.
- methods are operators as well (``"/a/path".from_file()``), and ``getattr(x, "from_file")`` -> attributes and strings
  that name a refused operator are refused.
- pickles build C++ classes -> only the archive's own classes and the few helpers that ``torch.jit.save`` writes.
- a tensor may claim more elements than its storage has, and the reader does not look -> counted here.

The text is split by a lexer of our own: whatever Python and TorchScript could read differently is refused.
"""

from __future__ import annotations

import ast
import io
import pickle
import pickletools
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gpuml.errors import ModelFileError
from gpuml.models.safety_operators import refuse_operator

_MEMBERS = (
    r"data\.pkl|constants\.pkl|traced_inputs\.pkl|(data|constants|traced_inputs)/\d+|code/[\w/.]+\.py(\.debug_pkl)?"
)

_TOKEN = re.compile(
    r"""(?P<space>[ \n]+)|(?P<name>[A-Za-z_]\w*)|(?P<number>(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?j?)"""
    r"""|(?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|(?P<mark>[-+*/%@=<>!&|^~.,:;()\[\]{}])""",
    re.ASCII,
)

#: Words of TorchScript that start other threads or write to the worker's output.
_REFUSED_WORDS = frozenset(("fork", "awaitable", "print"))

#: What torch.jit.save's pickler writes. Others have a meaning of their own to one of the two readers.
_OPCODES = frozenset(
    """
    PROTO STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE EMPTY_TUPLE TUPLE TUPLE1
    TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS GLOBAL REDUCE NEWOBJ BUILD BINPUT LONG_BINPUT
    BINGET LONG_BINGET BINPERSID
    """.split()
)

_ITEM_BYTES = {
    f"{name}Storage": dtype.itemsize
    for name, dtype in {
        "Bool": torch.bool, "Byte": torch.uint8, "Char": torch.int8, "Short": torch.int16, "Int": torch.int32,
        "Long": torch.int64, "Half": torch.float16, "BFloat16": torch.bfloat16, "Float": torch.float32,
        "Double": torch.float64, "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128,
    }.items()
}  # fmt: skip


def check(sizes: Mapping[str, int], read: Callable[[str], bytes], common: str) -> None:
    """Refuse a TorchScript archive that could do more than compute.

    Parameters
    ----------
    sizes : bytes of each member by its name below the root folder.
    read : the content of a member.
    common : a pattern of the members that every archive of torch may have.

    Raises
    ------
    ModelFileError
        What is wrong, for `gpuml.models.safety.check_archive` to add the file's name.
    """
    for name in sizes:
        if not re.fullmatch(f"{common}|{_MEMBERS}", name, re.ASCII):
            raise ModelFileError(f"it has a member {name!r}, which is no part of a TorchScript network")
        if name.endswith(".py"):
            _check_code(name, read(name).decode("utf-8"))
        elif name.endswith("pkl"):
            _check_pickle(name, read(name), sizes)


def _check_code(member: str, text: str) -> None:
    """Every name that the code could reach an operator by is harmless."""
    tokens, position = [""], 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None or text.startswith(('"""', "'''"), position):
            line = text.count("\n", 0, position) + 1
            raise ModelFileError(
                f"its {member}, line {line}, has {text[position]!r}, which torch.jit.save never writes"
            )
        if match.lastgroup != "space" and match["space"] is None:
            tokens.append(match[0])
        position = match.end()
    tokens += [""] * 4
    for i, token in enumerate(tokens):
        reason = _refuse_token(tokens, i) if token and (token[0].isalpha() or token[0] in "_\"'") else None
        if reason is not None:
            raise ModelFileError(f"{reason} (in {member})")


def _refuse_token(tokens: list[str], i: int) -> str | None:
    """Why the name or string at `i` is refused: as the root of a path, as an attribute, or as getattr's string."""
    token, after = tokens[i], tokens[i + 1 : i + 5]
    if tokens[i - 1] != ".":
        if token == "torch":
            return refuse_operator("aten", after[1]) if after[0] == "." else "it passes on the module torch itself"
        if token == "ops":
            whole = (after[0], after[2]) == (".", ".")
            return refuse_operator(after[1], after[3]) if whole else "it passes on the module torch.ops itself"
        if token == "__torch__" and after == [".", "torch", ".", "classes"]:
            return "it uses a C++ class of torch.classes"
        if token in _REFUSED_WORDS:
            return f"it calls {token!r}"
    name = ast.literal_eval(token) if token[0] in "\"'" else token
    if (tokens[i - 1] == "." or name is not token) and re.fullmatch(r"\w+", name, re.ASCII):
        # Below a path's root: a module's attribute, or an operator called as a method. Both are fine unless refused.
        if torch._C._jit_get_schemas_for_operator(f"aten::{name}"):
            return refuse_operator("aten", name)
        if torch._C._jit_get_schemas_for_operator(f"prim::{name}"):
            return refuse_operator("prim", name)
    return None


def _check_pickle(member: str, data: bytes, sizes: Mapping[str, int]) -> None:
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name not in _OPCODES or "torch.classes" in str(argument):
            raise ModelFileError(
                f"its {member} has {opcode.name} {str(argument)[:100]!r}, unknown to TorchScript's files"
            )
    _Reader(member, data, sizes).load()


class _Object:
    """Stands for an object of the archive's own classes; its state is dropped."""

    def __setstate__(self, state: object) -> None:
        pass


class _Reader(pickle.Unpickler):
    """Reads TorchScript's pickles into nothing: no torch object is made, and tensors are measured."""

    def __init__(self, member: str, data: bytes, sizes: Mapping[str, int]) -> None:
        super().__init__(io.BytesIO(data))
        self.folder, self.sizes = member.removesuffix(".pkl"), sizes

    def find_class(self, module: str, name: str) -> Any:
        if module == "__torch__" or module.startswith("__torch__."):
            return _Object
        if module == "torch" and name in _ITEM_BYTES:
            return name
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return self.measure
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch.jit._pickle" and name in ("build_intlist", "build_doublelist", "build_boollist",
                                                      "build_tensorlist", "restore_type_tag"):  # fmt: skip
            return lambda value, tag=None: value
        raise ModelFileError(f"its {self.folder}.pkl builds {module}.{name}, which torch.jit.save never writes")

    def persistent_load(self, pid: Any) -> int:
        """The number of elements of a storage, which its member's bytes must cover."""
        _, storage, key, _, elements = pid
        size = self.sizes.get(f"{self.folder}/{key}", -1)
        if type(elements) is not int or elements * _ITEM_BYTES[storage] != size:
            raise ModelFileError(f"its storage {self.folder}/{key} is to have {elements} elements in {size} bytes")
        return elements

    def measure(self, elements: int, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *_: object) -> None:
        """Refuse a tensor that reaches outside of its storage."""
        numbers = [elements, offset, *shape, *stride]
        plain = len(shape) == len(stride) and all(type(number) is int and number >= 0 for number in numbers)
        last = offset + sum((length - 1) * step for length, step in zip(shape, stride, strict=False))
        if not plain or (0 not in shape and last >= elements):
            raise ModelFileError(
                f"a tensor of shape {shape}, stride {stride} leaves its storage of {elements} elements"
            )
