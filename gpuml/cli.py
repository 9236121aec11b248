"""Words of a command line -> lines on stdout: what model files there are, what is in one, and fewer of them.

Exit codes: 0 it was done; 1 it could not be, and why is one line on stderr; 2 the command line is wrong.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpuml.errors import GpumlError, ModelError
from gpuml.version import __version__

if TYPE_CHECKING:
    from gpuml.models.cards import AnyCard
    from gpuml.models.prune import Entry

_SIZES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_TIMES = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

#: How many labels a line shows, and how many digits of a hash a table does; `show` takes as few.
_LABELS = 3
_DIGITS = 12


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a label need not fit into the terminal's encoding
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        options.run(options)
        sys.stdout.flush()
    except GpumlError as error:
        print(f"gpuml: {_plain(str(error))}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # as in `| head`; Python would complain once more on closing stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gpuml", description="Look after the model files of gpuml.")
    parser.add_argument("--version", action="version", version=f"gpuml {__version__}")
    models = parser.add_subparsers(required=True, metavar="models").add_parser(
        "models", help="model files in the cache, and elsewhere"
    )
    commands = models.add_subparsers(required=True, metavar="list | show | prune")

    command = commands.add_parser("list", help="the model files and downloads in the cache, the last used first")
    command.set_defaults(run=_list)

    command = commands.add_parser("show", help="what a model file says of its network")
    command.add_argument("file", help="a path, or sha256:<hex> of one in the cache, as many digits as list shows")
    command.set_defaults(run=_show)

    command = commands.add_parser(
        "prune",
        help="delete what was not used for long",
        description="Delete model files and downloads from the cache, the least recently used first. What a process "
        "uses is spared. A stage that was saved brings its model file along; one of from_module that was not needs it.",
    )
    command.add_argument("--max-size", type=_size, metavar="10G", help="keep at most so much (1G = 10^9 bytes)")
    command.add_argument("--older-than", type=_duration, metavar="30d", help="delete what was not used for so long")
    command.add_argument("--all", action="store_true", help="delete all")
    command.add_argument("--dry-run", action="store_true", help="say what would be deleted, and delete nothing")
    command.set_defaults(run=_prune, error=command.error)
    return parser


def _size(text: str) -> int:
    """Bytes, of "500M" or "10G"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)B?", text.upper())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 500M or 10G")
    return int(float(match[1]) * _SIZES[match[2]])


def _duration(text: str) -> float:
    """Seconds, of "12h" or "30d"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([mhdw])", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration such as 12h, 30d or 4w")
    return float(match[1]) * _TIMES[match[2]]


# --- commands -----------------------------------------------------------------------------------------------------


def _list(options: argparse.Namespace) -> None:
    from gpuml.models.prune import entries
    from gpuml.models.store import home

    found = entries()[::-1]
    rows = [("sha256", "size", "last used", "in use", "outputs", "labels")]
    rows += [(entry.sha256[:_DIGITS], _bytes(entry.bytes), *_use(entry), *_summary(entry)) for entry in found]
    _print_table(rows if found else [])
    _say(f"{_count(len(found), 'file')}, {_bytes(sum(entry.bytes for entry in found))}, in {home()}")


def _show(options: argparse.Namespace) -> None:
    from gpuml.models.store import hash_of

    path, wanted = _path(options.file)
    sha256 = hash_of(path)
    if wanted not in (None, sha256):
        raise ModelError(f"{path} is damaged: its sha256 is {sha256}; when a stage asks for it, it is made again")

    from gpuml.models.file import kind_and_card  # seconds, for torch

    kind, card = kind_and_card(path)
    size = path.stat().st_size
    _print_table(
        [
            ("file", str(path)),
            ("kind", kind),
            ("sha256", sha256),
            ("size", f"{_bytes(size)} ({size} bytes)"),
            ("outputs", _outputs(card)),
            ("labels", f"{len(card.labels)}: {_labels(card)}" if card.labels else "none"),
            *_about(card),
            ("memory format", card.memory_format),
            ("written by", f"gpuml {card.gpuml}, torch {card.torch}, format {card.format}"),
        ]
    )


def _prune(options: argparse.Namespace) -> None:
    from gpuml.models.prune import prune

    if options.all == (options.max_size is not None or options.older_than is not None):
        options.error("give --max-size, --older-than, or both; or --all")
    deleted, spared = prune(0 if options.all else options.max_size, options.older_than, options.dry_run)
    rows = [("would delete" if options.dry_run else "deleted", entry) for entry in deleted]
    rows += [("in use, kept", entry) for entry in spared]
    _print_table([(word, entry.path.name, _bytes(entry.bytes), _use(entry)[0]) for word, entry in rows])
    freed, kept = (sum(entry.bytes for entry in group) for group in (deleted, spared))
    would = "would be " if options.dry_run else ""
    in_use = f"; {_count(len(spared), 'file')} in use kept, {_bytes(kept)}" if spared else ""
    _say(f"{_count(len(deleted), 'file')} {would}deleted, {_bytes(freed)}{in_use}")


# --- parts of lines -----------------------------------------------------------------------------------------------


def _path(file: str) -> tuple[Path, str | None]:
    """A path as it is; or, of ``sha256:`` and some digits, the file in the cache and the hash that it should have."""
    from gpuml.models.prune import entries
    from gpuml.models.store import home

    match = re.fullmatch(rf"sha256:([0-9a-f]{{{_DIGITS},64}})", file)
    if not match:
        path = os.path.expanduser(file)  # pathlib's fails for a user that there is not, and is_file for a name too long
        if not os.path.isfile(path):
            raise ModelError(f"{file!r} is no file; give a path, or sha256:<hex> with at least {_DIGITS} digits")
        return Path(path), None
    found = [entry for entry in entries() if entry.sha256.startswith(match[1]) and not entry.is_download]
    if len(found) != 1:
        raise ModelError(f"{len(found)} model files in the cache {home()} have a hash that begins with {match[1]}")
    return found[0].path, found[0].sha256


def _use(entry: Entry) -> tuple[str, str]:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.last_used)), "yes" if entry.in_use else "no"


def _summary(entry: Entry) -> tuple[str, str]:
    """Outputs and first labels of a model file; where a download is from."""
    from gpuml.errors import ModelFileError
    from gpuml.models.file import read_card

    if entry.is_download:
        return "", f"downloaded from {_origin(entry.path)}"
    try:
        card = read_card(entry.path)
    except ModelFileError:
        return "", "damaged, or of another version: models show says more"
    return _outputs(card), _labels(card)


def _origin(path: Path) -> str:
    try:
        note = json.loads(path.with_name(f"{path.name[:32]}.json").read_text())
        return str(note["url"])
    except (OSError, ValueError, TypeError, KeyError):
        return "an unknown URL"


def _outputs(card: AnyCard) -> str:
    """What a network gives."""
    from gpuml.models.cards import DetectionCard, TensorCard

    if isinstance(card, TensorCard):
        return ", ".join(map(str, card.outputs))
    return "boxes" if isinstance(card, DetectionCard) else str(card.width)


def _about(card: AnyCard) -> list[tuple[str, str]]:
    """What else a card of its kind says."""
    from gpuml.models.cards import Card, TensorCard

    if isinstance(card, TensorCard):
        return [("activation", card.activation), ("inputs", ", ".join(map(str, card.inputs)))]
    return [("activation", card.activation), ("preprocess", repr(card.preprocess))] if isinstance(card, Card) else []


def _labels(card: AnyCard) -> str:
    if not card.labels:
        return "none"
    return ", ".join(label[:40] for label in card.labels[:_LABELS]) + (", ..." if len(card.labels) > _LABELS else "")


def _bytes(number: float) -> str:
    """A size to read: three digits, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 999.5:
            return f"{number:.0f} {unit}" if unit == "B" or number >= 99.95 else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        _say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))


def _say(line: str) -> None:
    print(_plain(line).rstrip())


def _plain(text: str) -> str:
    """One line, without what a terminal would obey: labels and names may be a stranger's."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
