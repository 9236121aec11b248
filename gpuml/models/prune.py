"""The cache folder -> what lies in it, who uses it, and less of it."""

from __future__ import annotations

import re
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpuml.errors import ModelError
from gpuml.models.locks import exclusive, in_use
from gpuml.models.store import file_name, home, lock

#: What no process finished in a day, no process will.
_LEFTOVER_SECONDS = 86400

#: Names of model files, and of downloads as `gpuml.models.fetch` has them: the content's hash is in each.
_ENTRY = re.compile(r"(?:gpuml|[0-9a-f]{32})-([0-9a-f]{64})(?:\.\w+)?")


@dataclass(frozen=True)
class Entry:
    """A file of the cache: a model file, or a download.

    Parameters
    ----------
    path : where it lies.
    sha256 : what its name says of its content; nobody looked inside.
    bytes : its size.
    last_used : when a process last got it, in seconds since 1970, to an hour.
    in_use : whether a process holds it now.
    """

    path: Path
    sha256: str
    bytes: int
    last_used: float
    in_use: bool

    @property
    def is_download(self) -> bool:
        return self.path.parent.name == "downloads"


def entries() -> list[Entry]:
    """The model files and downloads of the cache, the least recently used first."""
    with exclusive(lock()):
        return _entries()


def prune(
    max_bytes: int | None = None, older_than_seconds: float | None = None, dry_run: bool = False
) -> tuple[list[Entry], list[Entry]]:
    """Delete what was not used for long, and the least recently used while there is more than `max_bytes`.

    Unfinished files older than a day go too, and notes that lead nowhere.

    Parameters
    ----------
    max_bytes : of all entries together; 0 = delete all.
    older_than_seconds : since the last use.
    dry_run : delete nothing, answer the same.

    Returns
    -------
    (list of Entry, list of Entry)
        What was deleted, and what would have been but that a process uses it.

    Raises
    ------
    ModelError
        A file cannot be deleted.
    """
    deleted: list[Entry] = []
    spared: list[Entry] = []
    with exclusive(lock()):  # nobody is given a file between the question whether it is in use and its end
        found = _entries()
        total = sum(entry.bytes for entry in found)
        for entry in found:
            old = older_than_seconds is not None and time.time() - entry.last_used > older_than_seconds
            if not old and (max_bytes is None or total <= max_bytes):
                continue
            if entry.in_use or not (dry_run or _delete(entry.path)):
                spared.append(entry)
            else:
                deleted.append(entry)
                total -= entry.bytes
        if not dry_run:
            _tidy_models()
            _tidy_downloads()
    return deleted, spared


def _entries() -> list[Entry]:
    found = []
    for path in [*_files("models"), *_files("downloads")]:
        if match := _ENTRY.fullmatch(path.name):
            with suppress(FileNotFoundError):
                stat = path.stat()
                found.append(Entry(path, match[1], stat.st_size, stat.st_mtime, in_use(path)))
    return sorted(found, key=lambda entry: entry.last_used)


def _tidy_models() -> None:
    """Remove exports that were never finished, and notes of requests whose model file is gone."""
    for path in _files("models"):
        if path.name.startswith((".incoming-", ".gpuml-")) and _is_old(path):
            shutil.rmtree(path, ignore_errors=True)
    for path in _files("index"):
        with suppress(OSError):
            sha256 = path.read_text(errors="replace").strip()
            written = re.fullmatch("[0-9a-f]{64}", path.name) or _is_old(path)  # else it is being written
            if written and not (home() / "models" / file_name(sha256)).exists():
                path.unlink()


def _tidy_downloads() -> None:
    """Remove parts and locks of a day ago, and notes of files that are gone; nothing of a download that runs."""
    for path in _files("downloads"):
        key = path.name[:32]
        if _ENTRY.fullmatch(path.name) or in_use(path.with_name(f"{key}.lock")):
            continue
        is_note = path.name == f"{key}.json"
        if (is_note and not list(path.parent.glob(f"{key}-*"))) or (not is_note and _is_old(path)):
            _delete(path)


def _files(folder: str) -> list[Path]:
    try:
        return sorted((home() / folder).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_old(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime > _LEFTOVER_SECONDS
    except FileNotFoundError:
        return False


def _delete(path: Path) -> bool:
    """False where the system refuses because the file is open, as Windows does."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        if getattr(error, "winerror", None) == 32:  # a sharing violation
            return False
        raise ModelError(f"{path} cannot be deleted ({error.strerror}); delete as the owner of its folder") from error
    return True
