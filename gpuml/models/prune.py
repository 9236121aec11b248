"""The cache folder -> what lies in it, who uses it, and less of it."""

from __future__ import annotations

import re
import shutil
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpuml.errors import ModelError
from gpuml.models.locks import exclusive, in_use
from gpuml.models.store import file_name, home, lock

#: What no process finished in a day, no process will.
_LEFTOVER_SECONDS = 86400

#: Folder -> names of model files, and of downloads as `gpuml.models.fetch` has them: the content's hash is in each.
_ENTRIES = {"models": r"gpuml-([0-9a-f]{64})\.pt2", "downloads": r"[0-9a-f]{32}-([0-9a-f]{64})(?:\.[A-Za-z0-9]{1,16})?"}

#: Names of what else `gpuml.models.fetch` and `store.remember` write, and of what is not in its place yet, with what
#: Python's tempfile adds. Where GPUML_HOME is a folder that a user has for other things too, no other name is touched.
_OF_DOWNLOADS = r"([0-9a-f]{32})\.(?:json|lock|(?:[0-9a-f]{16}\.)?part(?:\.json)?)(?:\.\w{8})?"
_OF_INDEX = r"([0-9a-f]{64})(?:\.\w{8})?"
_UNFINISHED = r"\.(?:incoming|gpuml)-\w{8}"


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

    Unfinished files older than a day go too, and notes that lead nowhere. What has no name of gpuml's, or is not a
    regular file, stays.

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
    for folder, name in _ENTRIES.items():
        for path, match in _files(folder, name):
            with suppress(FileNotFoundError):
                state = path.lstat()
                found.append(Entry(path, match[1], state.st_size, state.st_mtime, in_use(path)))
    return sorted(found, key=lambda entry: entry.last_used)


def _tidy_models() -> None:
    """Remove exports that were never finished, and notes of requests whose model file is gone."""
    for path, _ in _files("models", _UNFINISHED, stat.S_ISDIR):
        if _is_old(path):
            shutil.rmtree(path, ignore_errors=True)
    for path, match in _files("index", _OF_INDEX):
        with suppress(OSError):
            sha256 = path.read_text(errors="replace").strip()
            written = path.name == match[1] or _is_old(path)  # else it is being written
            if written and not (home() / "models" / file_name(sha256)).exists():
                path.unlink()


def _tidy_downloads() -> None:
    """Remove parts and locks of a day ago, and notes of files that are gone; nothing of a download that runs."""
    for path, match in _files("downloads", _OF_DOWNLOADS):
        key = match[1]
        if in_use(path.with_name(f"{key}.lock")):
            continue
        is_note = path.name == f"{key}.json"
        if (is_note and not list(path.parent.glob(f"{key}-*"))) or (not is_note and _is_old(path)):
            _delete(path)


def _files(folder: str, name: str, kind: Callable[[int], bool] = stat.S_ISREG) -> list[tuple[Path, re.Match[str]]]:
    """What lies in a folder of the cache and has such a name, in order: regular files, no links, folders or FIFOs."""
    try:
        paths = sorted((home() / folder).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    matches = [(path, match) for path in paths if (match := re.fullmatch(name, path.name, re.ASCII))]
    return [(path, match) for path, match in matches if kind(_mode(path))]


def _mode(path: Path) -> int:
    """Which kind of file it is, as `stat` has it, of a link the link's own; 0 if it is gone."""
    try:
        return path.lstat().st_mode
    except FileNotFoundError:
        return 0


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
