"""A model file's archive -> its kind, or why it is not safe to open: decided before torch reads the file.

The rule: what is not known to be harmless is refused. This module reads the zip, `safety_export` the parts of
``torch.export.save``, `safety_torchscript` those of ``torch.jit.save``, and `safety_operators` knows the operators;
each lists the doors from bytes to code that it closes. The zip's own: Python and torch must see the same members
(torch's reader ignores case in names, and finds the directory in its own way), so only one plain layout is read.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

from gpuml.errors import ModelFileError
from gpuml.models import safety_export, safety_torchscript

#: Bytes of one text member, and of all compressed ones: the JSON of torchvision's largest network has 3 MB.
_MOST_TEXT = 1 << 28

#: What parsers of zip, JSON, pickles and text raise on damaged bytes; hostile nesting ends in RecursionError.
_DAMAGE = (
    zipfile.BadZipFile, zlib.error, struct.error, pickle.UnpicklingError, EOFError, NotImplementedError, RecursionError,
    ValueError, LookupError, TypeError, AttributeError, ArithmeticError, MemoryError, SyntaxError,
)  # fmt: skip

_Opcode = tuple[pickletools.OpcodeInfo, Any, int | None]

#: Bits of a member's flags that torch sets: 3 = sizes follow the data, 11 = the name is UTF-8. Others encrypt or patch.
_FLAGS = 0x808


def check_archive(path: str | os.PathLike[str]) -> str:
    """What kind of model file this is, once everything in it is known to be harmless to load and run.

    Parameters
    ----------
    path : a file on this machine. It is read, never unpickled in full and never run.

    Returns
    -------
    str
        ``"export"`` (written by ``torch.export.save``) or ``"torchscript"`` (by ``torch.jit.save``).

    Raises
    ------
    ModelFileError
        The file is damaged, of another format, or not safe to open; the message says which and what to do.

    Notes
    -----
    A checked file computes with tensors and nothing else. It may still ask for much memory or time. The answer is
    about these bytes: load the same ones, not a path that others may write to in between.

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
    except _DAMAGE as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise ModelFileError(f"model file {name!r} is damaged ({reason}); fetch or export it again") from error


def _check(file: io.BufferedReader) -> str:
    """The kind of the archive in `file`."""
    start = file.read(4)
    if start[:1] == b"\x80":
        file.seek(0)
        raise ModelFileError(_pickle_advice(_old_pickles(file)))
    if start != b"PK\x03\x04":
        raise ModelFileError("it is no zip archive, which torch.export.save and torch.jit.save write")
    with zipfile.ZipFile(file) as archive:
        members = _members(archive, file)

        def read(name: str) -> bytes:
            if name not in members:
                raise ModelFileError(f"it has no member {name!r}")
            if members[name].file_size > _MOST_TEXT:
                raise ModelFileError(f"its {name!r} has {members[name].file_size} bytes, more than {_MOST_TEXT}")
            return archive.read(members[name])

        sizes = {name: member.file_size for name, member in members.items()}
        if "archive_format" in members:
            safety_export.check(sizes, read)
            return "export"
        if "constants.pkl" in members:
            safety_torchscript.check(sizes, read)
            return "torchscript"
        if "data.pkl" in members:
            raise ModelFileError(_pickle_advice(pickletools.genops(read("data.pkl"))))
    raise ModelFileError("it is a zip archive, but of neither torch.export nor TorchScript")


def _old_pickles(file: io.BufferedReader) -> Iterator[_Opcode]:
    """torch.save's format before 1.6: three pickles of numbers, then the object."""
    for _ in range(4):
        if file.peek(1):
            yield from pickletools.genops(file)


def _pickle_advice(opcodes: Iterator[_Opcode]) -> str:
    """What to do with a file of torch.save: a state dict has its place, a pickled module has none."""
    modules = {str(argument).split(" ")[0] for opcode, argument, _ in opcodes if opcode.name.endswith("GLOBAL")}
    if modules <= {"torch", "torch._utils", "collections"}:
        return (
            "it is a state dict (torch.save), weights without their network; name the network in model= "
            "and give this file as weights=, as in model='torchvision:resnet50', weights='net.pth'"
        )
    return (
        "it is a pickled Python object (torch.save of a whole module), and opening it runs its author's code; "
        "if you trust it, load it where its class can be imported and save the network in the way named here"
    )


def _members(archive: zipfile.ZipFile, file: io.BufferedReader) -> dict[str, zipfile.ZipInfo]:
    """Members by their name below the archive's root folder; refuses all that two readers could read differently."""
    members: dict[str, zipfile.ZipInfo] = {}
    folded: set[str] = set()
    root, end = "", 0
    for info in sorted(archive.infolist(), key=lambda info: info.header_offset):
        end = _end_of_member(info, file, end)
        folder, _, name = info.orig_filename.partition("/")
        if folder in ("version", "serialized_exported_program.json"):
            raise ModelFileError("it was exported before torch 2.8, in a layout that torch unpickles")
        plain = {"", ".", ".."}.isdisjoint(info.orig_filename.split("/"))
        if not name or not plain or re.search(r"[\0-\x1f\\:]", info.orig_filename):
            raise ModelFileError(f"its member {info.orig_filename!r} is no plain path below the archive's folder")
        if (root := root or folder) != folder:
            raise ModelFileError(f"its members lie below {root!r} and {folder!r}, where torch writes one folder")
        if name.lower() in folded:  # torch's reader finds a name without regard to case
            raise ModelFileError(f"it has two members named {name!r}, and readers differ in which one they take")
        folded.add(name.lower())
        members[name] = info
    if sum(info.file_size for info in members.values() if info.compress_type) > _MOST_TEXT:
        raise ModelFileError(f"its compressed members have more than {_MOST_TEXT} bytes")
    _check_directory(file, end, len(members))
    return members


def _end_of_member(info: zipfile.ZipInfo, file: io.BufferedReader, start: int) -> int:
    """Where a member's bytes end; it begins at `start`, its two headers agree, and it is stored as torch does."""
    where = f"its member {info.orig_filename!r}"
    # torch.jit.save deflates code; all else is stored, so a file cannot unpack to more than it is.
    code = info.compress_type == zipfile.ZIP_DEFLATED and "/code/" in info.orig_filename
    if info.flag_bits & ~_FLAGS or not (code or (info.compress_type == 0 and info.compress_size == info.file_size)):
        raise ModelFileError(f"{where} is compressed or encrypted, where torch stores bytes as they are")
    if info.extra and (info.extra[:2] != b"\1\0" or len(info.extra) != 4 + info.extra[2]):  # only zip64's sizes
        raise ModelFileError(f"{where} has extra fields that torch does not write")
    file.seek(info.header_offset)
    mark, _, flags, method, *_, name_length, extra_length = struct.unpack("<4s5H3L2H", file.read(30))
    name = info.orig_filename.encode("utf-8" if flags & 0x800 else "cp437")
    if (
        mark != b"PK\x03\x04"
        or (flags, method) != (info.flag_bits, info.compress_type)
        or file.read(name_length) != name
    ):
        raise ModelFileError(f"{where} has two headers that differ")
    if info.header_offset != start:
        raise ModelFileError(f"{where} has hidden bytes before it")
    end = start + 30 + int(name_length) + int(extra_length) + info.compress_size
    file.seek(end)
    sizes = file.read(28) if flags & 8 else b""
    if sizes[:4] != b"PK\x07\x08":
        return end
    return end + (16 if sizes[16:18] == b"PK" else 24)  # 24: zip64


def _check_directory(file: io.BufferedReader, start: int, count: int) -> None:
    """The directory of `count` members begins at `start`, its end record follows, and the file ends there."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 98))
    tail = file.read()
    mark, _, _, _, entries, length, offset, _ = struct.unpack("<4s4H2LH", tail[-22:])
    end = size - 22
    if tail[-42:-38] == b"PK\x06\x07":  # zip64, which torch always writes
        end = size - 98
        wide = struct.unpack("<4sQ2H2L4Q4sLQL", tail[:76])
        agree = entries in (wide[7], 0xFFFF) and length in (wide[8], 0xFFFFFFFF) and offset in (wide[9], 0xFFFFFFFF)
        if wide[0] != b"PK\x06\x06" or wide[12] != end or not agree:
            raise ModelFileError("its zip has two directories that differ")
        entries, length, offset = wide[7:10]
    if mark != b"PK\x05\x06" or (offset, offset + length, entries) != (start, end, count):
        raise ModelFileError("its zip has bytes before, between or after the parts that torch writes")
