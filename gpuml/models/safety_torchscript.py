"""A TorchScript archive's members -> None, or why it is not safe to load.

``torch.jit.load`` never runs Python: code/ is compiled by torch, the pickles are read by its own C++ reader. What is
left to a hostile file, and what stops it:

- code calls any registered operator, at load time too (``__setstate__``): files, random state, custom C++ classes
  -> every name below ``torch.`` and ``ops.`` is on the list of `safety_operators`.
- methods of tensors are operators as well: ``x.resize_([9])``, ``getattr(x, "resize_")([9])`` -> attributes and strings
  that name a refused operator are refused.
- C++ classes by another name, ``t = __torch__.torch`` -> those names are only read in full.
- pickles build C++ classes -> only the archive's own classes and the few helpers that ``torch.jit.save`` writes.
- a tensor may claim more elements than its storage has (torch 2.14.1 counts them itself) -> counted here.

The text is split by a lexer of our own: whatever Python and TorchScript could read differently is refused.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gpuml.errors import ModelFileError
from gpuml.models.safety_export import COMMON
from gpuml.models.safety_operators import refuse_operator

_MEMBERS = re.compile(
    rf"{COMMON}|(data|constants|traced_inputs)(\.pkl|/\d+)|code/[\w/.]+\.py(\.debug_pkl)?",
    re.ASCII,
)

_TOKEN = re.compile(
    r"""(?P<space>[ \n]+)|(?P<name>[A-Za-z_]\w*)|(?P<number>(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?j?)"""
    r"""|(?P<string>"([^"\\\n]|\\([abfnrtv\\'"]|[0-7]{3}))*")|(?P<mark>[-+*/%@=<>!&|^~.,:;()\[\]{}])""",
    re.ASCII,
)

#: Words of TorchScript that start other threads or write to the worker's output.
_REFUSED_WORDS = frozenset(("fork", "awaitable", "print"))

#: Methods that are harmless as methods alone. ``x.tolist()`` is typed by its annotation, and looks at the tensor's type
#: and dimensions when it runs; ``ops.prim.tolist(x, 1, 0)`` is taken to give nothing, and leaves a list on the stack.
_METHODS = frozenset(("tolist",))

#: What torch.jit.save's pickler writes. Others have a meaning of their own to one of the two readers.
_OPCODES = re.compile(
    r"PROTO|STOP|MARK|NONE|NEWTRUE|NEWFALSE|BININT[12]?|LONG1|BINFLOAT|BINUNICODE|(EMPTY_)?(TUPLE|LIST|DICT)|TUPLE[123]"
    r"|APPENDS?|SETITEMS?|GLOBAL|REDUCE|NEWOBJ|BUILD|(LONG_)?BIN(PUT|GET)|BINPERSID"
)

_ITEM_BYTES = {
    f"{name}Storage": dtype.itemsize
    for name, dtype in {
        "Bool": torch.bool, "Byte": torch.uint8, "Char": torch.int8, "Short": torch.int16, "Int": torch.int32,
        "Long": torch.int64, "Half": torch.float16, "BFloat16": torch.bfloat16, "Float": torch.float32,
        "Double": torch.float64, "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128,
    }.items()
}  # fmt: skip


def check(sizes: Mapping[str, int], read: Callable[[str], bytes]) -> None:
    """Refuse a TorchScript archive that could do more than compute.

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
        if match is None or text.startswith('"""', position):
            line = text.count("\n", 0, position) + 1
            raise ModelFileError(
                f"its {member}, line {line}, has {text[position]!r}, which torch.jit.save never writes"
            )
        if match.lastgroup == "string" and tokens[-1][:1] == '"':  # TorchScript joins them: "resi" "ze_"
            raise ModelFileError(f"its {member} has two strings in a row, which torch.jit.save never writes")
        if match.lastgroup != "space":
            tokens.append(match[0])
        position = match.end()
    tokens += [""] * 4
    for i, token in enumerate(tokens):
        reason = _refuse_token(tokens, i) if token and (token[0].isalpha() or token[0] in '_"') else None
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
        if token == "__torch__" and (after[0] != "." or (after[1] == "torch" and after[2] != ".")):
            return "it passes on the names below __torch__, where torch.classes are"
        if token in _REFUSED_WORDS:
            return f"it calls {token!r}"
    string = token[0] == '"'
    name = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), token.strip('"')) if string else token
    if (string or tokens[i - 1] == ".") and re.fullmatch(r"\w+", name, re.ASCII):
        # Below a path's root: a module's attribute, or an operator called as a method. Both are fine unless refused.
        if name in _METHODS and not string:
            return None
        if torch._C._jit_get_schemas_for_operator(f"aten::{name}"):
            return refuse_operator("aten", name)
        if torch._C._jit_get_schemas_for_operator(f"prim::{name}"):
            return refuse_operator("prim", name)
    return None


def _check_pickle(member: str, data: bytes, sizes: Mapping[str, int]) -> None:
    for opcode, argument, _ in pickletools.genops(data):
        # GLOBAL parts a class's name with a space, anywhere.
        if not _OPCODES.fullmatch(opcode.name) or "torch.classes" in str(argument).replace(" ", "."):
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
        # torch.jit.save keeps the shapes of a trace's inputs without their bytes; torch.jit.load does not read them.
        dropped = self.folder == "traced_inputs" and size == 0
        if type(elements) is not int or (elements * _ITEM_BYTES[storage] != size and not dropped):
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
