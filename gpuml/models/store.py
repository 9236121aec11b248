"""The cache folder: content hash -> model file, and what was asked for -> content hash.

``$GPUML_HOME`` (default: ``gpuml`` in the user's cache folder) holds ``models/gpuml-<sha256>.pt2``, named as the files
are shipped to the workers, and ``index/<sha256 of a request>``, since a content hash is known only after an export.
``downloads/`` belongs to `gpuml.models.fetch`, and `gpuml.models.prune` empties them all.

Files are written beside their place and renamed into it, so a reader never sees half a file. A process holds a shared
lock on each file that it was given, and `gpuml.models.prune` spares those. ``.lock`` is held, for an instant, by who
renames a file into place, takes such a lock or deletes: none of the three comes between the steps of another.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from gpuml.errors import ModelError
from gpuml.models.locks import exclusive, shared

#: device, inode, bytes, mtime in ns: content that was read once is not read again until one of them changes.
_State = tuple[int, int, int, int]

#: What this process was given: path -> an open descriptor with a shared lock, and the state whose content was checked.
_kept: dict[Path, tuple[int, _State]] = {}
_mutex = threading.Lock()

#: The least recently given files beyond these are let go: descriptors are few (256 a process on macOS).
_MOST_KEPT = 64

#: The modification time says when a file was last used, to this many seconds. A change of it makes each process that
#: uses the file read it once more.
_USED_EVERY = 3600

_log = logging.getLogger("gpuml")


def home() -> Path:
    """The cache folder; nothing is created."""
    if os.environ.get("GPUML_HOME"):
        return Path(os.environ["GPUML_HOME"]).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "gpuml"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "gpuml"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpuml"


def folder(name: str) -> Path:
    """A folder of the cache, made if need be.

    Raises
    ------
    ModelError
        It cannot be written.
    """
    path = home() / name
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        raise ModelError(
            f"the cache folder {home()} cannot be written ({error.strerror or error}); set the environment variable "
            f"GPUML_HOME to a folder of the driver that can"
        ) from error


def file_name(sha256: str) -> str:
    """Name of a model file, in the cache and on the workers: equal name, equal content."""
    return f"gpuml-{sha256}.pt2"


def path_of(sha256: str) -> Path:
    """Where the model file of a hash lies: whole (see `keep`), and spared by `prune` while this process lives.

    Raises
    ------
    ModelError
        It is not in the cache, or was damaged and has been deleted.
    """
    if not holds(sha256):
        raise ModelError(
            f"the model file sha256:{sha256} is not in the cache {home()}; set the stage's model again, or load the "
            f"stage again from where it was saved"
        )
    return _place(sha256)


def holds(sha256: str) -> bool:
    """Whether `path_of` has an answer; if so, it stays so while this process lives."""
    return keep(_place(sha256), sha256)


@contextmanager
def incoming() -> Iterator[Path]:
    """A path inside the cache to write a new model file to; `add` it before leaving the block."""
    with tempfile.TemporaryDirectory(dir=folder("models"), prefix=".incoming-") as name:
        yield Path(name) / "model.pt2"


def add(path: Path) -> str:
    """Move a file from `incoming` into its place, atomically; returns its sha256."""
    sha256 = hash_of(path)
    put(path, _place(sha256), sha256)
    return sha256


def add_copy(source: Path) -> str:
    """Copy a model file into the cache; returns the sha256 of what was copied."""
    with incoming() as path:
        shutil.copyfile(source, path)
        return add(path)


def hash_of(path: Path) -> str:
    """sha256 of a file's content, as hexadecimal digits."""
    with path.open("rb") as file:
        return hash_stream(file)


def hash_stream(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def once(request: dict[str, object], write: Callable[[Path], None]) -> str:
    """sha256 of the model file of a request; `write` makes it at a path, unless the index knows one."""
    if known := recall(request):
        return known
    with incoming() as path:
        write(path)
        sha256 = add(path)
    remember(request, sha256)
    return sha256


def recall(request: dict[str, object]) -> str | None:
    """The content hash that a request led to, if its file is still here and whole."""
    index = _index(request)
    try:
        sha256 = index.read_text().strip() if index.is_file() else ""  # a FIFO would not be read to its end
    except (OSError, UnicodeDecodeError):  # gone by now, or damaged: the export will replace it
        return None
    return sha256 if re.fullmatch("[0-9a-f]{64}", sha256) and holds(sha256) else None


def remember(request: dict[str, object], sha256: str) -> None:
    """Note which content a request led to. A note only: where it cannot be written, the next call exports again."""
    index = _index(request)
    with suppress(OSError):
        index.parent.mkdir(parents=True, exist_ok=True)
        write_text(index, sha256)


def write_text(path: Path, text: str) -> None:
    """Write a small file whole, over an older one too."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f"{path.name}.", delete=False) as file:
        file.write(text)
    os.replace(file.name, path)


# --- files that are whole, and in use -----------------------------------------------------------------------------


def lock() -> Path:
    """The lock file of the cache folder, for `exclusive`."""
    return home() / ".lock"


def keep(path: Path, sha256: str) -> bool:
    """Whether a file of the cache is there and whole; if so, no `prune` deletes it while this process lives.

    The content is read once per process and state of the file: 0.25 s for 350 MB that the system has in memory
    (a processor with SHA instructions). A file with other content is deleted, with a warning, and counts as absent.

    Raises
    ------
    ModelError
        The file is there and cannot be read, or is no regular file.
    """
    with _mutex:
        known = _kept.get(path)
        if known is None or known[1] != _state(path):
            _let_go(path)
            try:
                known = _checked(path, sha256)
            except OSError as error:
                raise ModelError(
                    f"{path} cannot be read ({error.strerror}); delete it, and it is made again"
                ) from error
            if known is None:
                return False
        if time.time() - known[1][3] / 1e9 > _USED_EVERY:
            with suppress(OSError):  # a file system for reading only, or another user's file
                os.utime(path)
            known = known[0], _state(known[0]) or known[1]
        _note(path, *known)
        return True


def put(path: Path, place: Path, sha256: str) -> None:
    """Rename a file of a known hash into its place in the cache, and `keep` it there."""
    if keep(place, sha256):  # what is whole stays: others know its state, or have it open
        return
    with _mutex:
        _let_go(place)
        with exclusive(lock()):
            os.replace(path, place)
            descriptor = shared(place)
        if descriptor is not None and (state := _state(descriptor)):
            _note(place, descriptor, state)


def _checked(path: Path, sha256: str) -> tuple[int, _State] | None:
    """A file whose content has a hash, opened, with its state; any other content is deleted."""
    with exclusive(lock()):
        descriptor = shared(path)
    if descriptor is None:
        return None
    state = _state(descriptor)
    try:
        with open(descriptor, "rb", closefd=False) as file:
            found = hash_stream(file)
    except OSError:
        os.close(descriptor)
        raise
    if found == sha256 and state is not None:
        return descriptor, state
    os.close(descriptor)
    _log.warning("%s is damaged (its sha256 is %s): it is deleted, and made again when it can be", path, found)
    with exclusive(lock()), suppress(OSError):  # where it cannot be deleted, it still counts as absent
        if _state(path) == state:  # else another process has put a whole one there by now
            path.unlink()
    return None


def _note(path: Path, descriptor: int, state: _State) -> None:
    _kept.pop(path, None)
    _kept[path] = descriptor, state
    if len(_kept) > _MOST_KEPT:
        _let_go(next(iter(_kept)))


def _let_go(path: Path) -> None:
    if path in _kept:
        os.close(_kept.pop(path)[0])


def _state(file: Path | int) -> _State | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _place(sha256: str) -> Path:
    return home() / "models" / file_name(sha256)


def _index(request: dict[str, object]) -> Path:
    return home() / "index" / hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
