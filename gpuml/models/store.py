"""The cache folder: content hash -> model file, and what was asked for -> content hash.

``$GPUML_HOME`` (default: ``gpuml`` in the user's cache folder) holds ``models/gpuml-<sha256>.pt2``, named as the files
are shipped to the workers, and ``index/<sha256 of a request>``, since a content hash is known only after an export.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from gpuml.errors import ModelError


def home() -> Path:
    """The cache folder; nothing is created."""
    if os.environ.get("GPUML_HOME"):
        return Path(os.environ["GPUML_HOME"]).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "gpuml"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "gpuml"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpuml"


def file_name(sha256: str) -> str:
    """Name of a model file, in the cache and on the workers: equal name, equal content."""
    return f"gpuml-{sha256}.pt2"


def path_of(sha256: str) -> Path:
    """Where the model file of a hash lies.

    Raises
    ------
    ModelError
        It is not in the cache.
    """
    path = home() / "models" / file_name(sha256)
    if not path.is_file():
        raise ModelError(
            f"the model file sha256:{sha256} is not in the cache {home()}; set the stage's model again, or load the "
            f"stage again from where it was saved"
        )
    return path


def holds(sha256: str) -> bool:
    return (home() / "models" / file_name(sha256)).is_file()


@contextmanager
def incoming() -> Iterator[Path]:
    """A path inside the cache to write a new model file to; `add` it before leaving the block."""
    models = home() / "models"
    try:
        models.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(dir=models, prefix=".incoming-")
    except OSError as error:
        raise ModelError(
            f"the cache folder {home()} cannot be written ({error.strerror or error}); set the environment variable "
            f"GPUML_HOME to a folder of the driver that can"
        ) from error
    with folder as name:
        yield Path(name) / "model.pt2"


def add(path: Path) -> str:
    """Move a file from `incoming` into its place, atomically; returns its sha256."""
    sha256 = hash_of(path)
    os.replace(path, home() / "models" / file_name(sha256))
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


def recall(request: dict[str, object]) -> str | None:
    """The content hash that a request led to, if its file is still here."""
    try:
        sha256 = _index(request).read_text().strip()
    except (OSError, UnicodeDecodeError):  # none yet, or damaged: the export will replace it
        return None
    return sha256 if holds(sha256) else None


def remember(request: dict[str, object], sha256: str) -> None:
    """Note which content a request led to. A note only: where it cannot be written, the next call exports again."""
    index = _index(request)
    with suppress(OSError):
        index.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=index.parent, delete=False) as file:
            file.write(sha256)
        os.replace(file.name, index)


def _index(request: dict[str, object]) -> Path:
    return home() / "index" / hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
