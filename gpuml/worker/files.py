"""A path or a URL -> the bytes of the file there, or a reason."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path
from urllib.parse import unquote_to_bytes

from gpuml.errors import ParamError, RowError

#: The most that a cell of Spark holds: a file is refused here as it would be in a binary column.
MAX_BYTES = 2**31 - 1

_FILE = re.compile(r"file:(//[^/]*)?(/.*)", re.IGNORECASE | re.DOTALL)

#: A scheme and a slash, also at the end of a chain.
_URL = re.compile(r"([^/:]*::)*[A-Za-z][A-Za-z0-9+.-]+:/")

#: Hadoop's name of a scheme -> the one that fsspec knows before the package is there that reads it.
_NAMES = {"abfss": "abfs"}

#: Other words for a local path, which pass by the check for regular files.
_LOCAL = ("local", "generic", "asynclocal")


def read_file(place: str | Path) -> bytes:
    """Read a file whole, from a local disk or wherever fsspec can.

    Parameters
    ----------
    place : a local Path; or text: a local path, a ``file:`` URI, or a URL of a scheme that fsspec knows.

    Raises
    ------
    RowError
        ``io``: there is no such file, or it cannot be read; ``too_large``: a local one is larger than `MAX_BYTES`, or
        than memory.
    ParamError
        This Python lacks the package that reads the scheme: the set-up is wrong, and so would all rows be.

    Examples
    --------
    >>> read_file("file:///no%20such.jpg")
    Traceback (most recent call last):
    gpuml.errors.RowError: io: file:///no%20such.jpg: No such file or directory
    """
    if place == "":
        raise RowError("io", "the path is empty")
    try:
        path = place if isinstance(place, Path) else local_path(place)
        return _remote(str(place)) if path is None else _regular(path)
    except (RowError, ParamError):
        raise
    except MemoryError as error:
        raise RowError("too_large", f"{place}: no memory for the file") from error
    except Exception as error:  # fsspec's file systems raise nearly anything
        said = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise RowError("io", f"{place}: {said}") from error


def local_path(text: str) -> Path | None:
    """Where a path or a ``file:`` URI lies on this machine; None for other URLs.

    Spark writes two forms. Hadoop's, with one slash, escapes nothing: ``file:/a b%.jpg``, as in binaryFile's ``path``.
    A URI has three, and is escaped: ``file:///a%20b%25.jpg``, as from ``input_file_name()`` and the image source. (A
    third form is both: ``_metadata.file_path`` has one slash, and is escaped. It is taken for the first.)

    Raises
    ------
    ValueError
        It lies on another machine.
    """
    found = _FILE.fullmatch(text)
    if found is None:
        return None if _URL.match(text) else Path(text)
    host, path = found.groups()
    if host is None:
        return Path(path)
    if host[2:].lower() not in ("", "localhost"):
        raise ValueError(f"a file of the host {host[2:]!r}")
    return Path(os.fsdecode(unquote_to_bytes(path)))


def _regular(path: Path) -> bytes:
    """The bytes of a regular file: opening a FIFO would wait for its writer, and a device might never end."""
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    if status.st_size > MAX_BYTES:
        raise RowError("too_large", f"{path}: {status.st_size} bytes; the most that is read is {MAX_BYTES}")
    # Files of /proc claim to have no bytes, and some of them wait for more without end.
    return path.read_bytes() if status.st_size else b""


def _remote(url: str) -> bytes:
    """The bytes behind a URL, in one request where the file system can: asking for the size first would be another."""
    if "::" in url:
        raise ValueError("chains of file systems ('::') are not opened; give the URL of the file itself")
    scheme, rest = url.split(":", 1)
    scheme = _NAMES.get(scheme.lower(), scheme.lower())
    if scheme in _LOCAL:
        raise ValueError("give a local file as a path, or as a file: URI")
    if not rest.startswith("//"):  # dbfs:/x, as Hadoop writes it
        rest = f"//{rest}"
    try:
        from fsspec.core import url_to_fs

        files, path = url_to_fs(f"{scheme}:{rest}")
        return bytes(files.cat_file(path))
    except ImportError as error:
        cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
        package = (cause.name or "fsspec").partition(".")[0]
        raise ParamError(
            f"readPaths: {url!r} cannot be opened, since this worker lacks a package that reads {scheme}:// ({cause}). "
            f"On every node type: pip install {package}"
        ) from error
