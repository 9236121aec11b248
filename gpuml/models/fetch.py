"""An ``http(s)://`` URL -> a local file in the cache, downloaded once and asked about again.

``$GPUML_HOME/downloads/`` holds per URL, with ``<key>`` a hash of it without credentials and fragment:
``<key>-<sha256><suffix>``, the content; ``<key>.json``, what the server said of it; ``<key>.part`` and
``<key>.part.json``, what has arrived of a download that was cut; ``<key>.lock``, held by the process that downloads.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import re
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from string import punctuation
from urllib.parse import quote, unquote, urlsplit

from gpuml.errors import ModelError
from gpuml.models import store
from gpuml.models.download import Source, Tags, Unreachable, discard, download
from gpuml.models.locks import exclusive

_log = logging.getLogger("gpuml")


@dataclass(frozen=True)
class _Kept:
    """A download that is here, as its note says."""

    path: Path
    sha256: str
    tags: Tags


def fetch(url: str) -> Path:
    """Download a file once; afterwards ask the server whether it has changed, and download it again only then.

    Parameters
    ----------
    url : ``http://`` or ``https://``. With ``#sha256=<64 hex digits>`` at its end the content must have that hash; if
        such a file is here, no server is asked. ``https://user:password@host/...`` sends the password to that host
        alone. Proxies are those of the environment (``https_proxy``).

    Returns
    -------
    pathlib.Path
        A file whose name ends as the URL's path does; `gpuml.models.prune` spares it while this process lives.

    Raises
    ------
    ModelError
        The URL cannot be downloaded, or its content is another than it says.

    Notes
    -----
    A download that was cut goes on where it stopped, in this call or in a later process, if the server can do that and
    says that the file is still the same. If no server answers, or it fails (5xx), the file that is here is used, with a
    warning. A server that gives neither ETag nor Last-Modified cannot be asked: each call downloads. If it gives no
    length either, only a sha256 in the URL shows that a download ended too early.

    Examples
    --------
    >>> fetch("https://example.org/net.pt2#sha256=" + 64 * "0")  # doctest: +SKIP
    """
    source, sha256 = _parsed(url)
    key = hashlib.sha256(source.url.encode()).hexdigest()[:32]
    folder = store.folder("downloads")
    with exclusive(folder / f"{key}.lock") as alone:
        # Without a lock, two processes could write to one part: each has its own then, which no later one continues.
        part = folder / (f"{key}.part" if alone else f"{key}.{os.urandom(8).hex()}.part")
        try:
            return _fetch(source, sha256, folder / key, part)
        except OSError as error:  # a full disk, say; what the network raises is a ModelError by now
            with suppress(OSError):  # a part that fills the disk would stay there until a prune
                discard(part)
            raise ModelError(
                f"{source} cannot be written to {folder}: {error.strerror or error}; what had arrived is deleted. Make "
                f"room there, or set GPUML_HOME to a folder that has it"
            ) from error
        finally:
            if not alone:
                discard(part)


def _fetch(source: Source, sha256: str | None, stem: Path, part: Path) -> Path:
    """`fetch`, by one process at a time; `stem` is what the names of the URL's files begin with."""
    kept = _kept(source, stem)
    if kept and kept.sha256 == sha256:
        return kept.path
    try:
        # If what is here is not what is wanted, whether it has changed is no question.
        tags = download(source, part, kept.tags if kept and not sha256 else None)
    except Unreachable as error:
        if kept is None or sha256:
            raise ModelError(str(error)) from error.__cause__
        _log.warning("%s. Used is what was downloaded before, %s", error, kept.path)
        return kept.path
    if tags is None:
        assert kept is not None
        return kept.path
    found = store.hash_of(part)
    if sha256 and found != sha256:
        discard(part)
        raise ModelError(
            f"{source} has the sha256 {found}, but the URL says #sha256={sha256}; it is not kept. Ask its author which "
            f"is right, and give the URL with that one"
        )
    path = _path(source, stem, found)
    size = part.stat().st_size
    store.put(part, path, found)
    note = {"url": str(source), **asdict(tags), "sha256": found, "bytes": size}
    store.write_text(stem.with_name(f"{stem.name}.json"), json.dumps(note))
    discard(part)
    return path


def _parsed(url: str) -> tuple[Source, str | None]:
    """What to ask for, and the sha256 that the URL says its content has."""
    try:
        parts = urlsplit(url)
        userinfo, _, host = parts.netloc.rpartition("@")
        host = host.encode("idna").decode()
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError
    except ValueError:  # also what a port of letters or half an IPv6 address raises
        shown = re.sub("//.*@", "//", url)  # without the password
        raise ModelError(
            f"{shown!r} is no URL of a file; give https://host/path, or the path of a local file"
        ) from None
    sha256 = re.fullmatch("sha256=([0-9a-fA-F]{64})", parts.fragment)
    # What ASCII cannot say is percent-encoded; what is encoded already stays.
    path, query = (quote(part, safe=punctuation) for part in (parts.path, parts.query))
    source = Source(f"{parts.scheme}://{host}{path}" + (f"?{query}" if query else ""), _login(userinfo))
    if parts.fragment and not sha256:
        raise ModelError(
            f"{source}: '#{parts.fragment}' at its end is not understood; only #sha256=<64 hexadecimal digits> is, the "
            f"hash that the file must have"
        )
    return source, sha256[1].lower() if sha256 else None


def _login(userinfo: str) -> str | None:
    """The header Authorization for ``user:password``."""
    user, _, password = userinfo.partition(":")
    login = f"{unquote(user)}:{unquote(password)}".encode()
    return f"Basic {base64.b64encode(login).decode()}" if userinfo else None


def _kept(source: Source, stem: Path) -> _Kept | None:
    """What is here of a URL, if it is whole."""
    try:
        note = json.loads(stem.with_name(f"{stem.name}.json").read_text())
        sha256, tags = str(note["sha256"]), Tags(note["etag"], note["last_modified"])
    except (OSError, ValueError, TypeError, KeyError):  # nothing, or a damaged note
        return None
    path = _path(source, stem, sha256)
    return _Kept(path, sha256, tags) if re.fullmatch("[0-9a-f]{64}", sha256) and store.keep(path, sha256) else None


def _path(source: Source, stem: Path, sha256: str) -> Path:
    suffix = PurePosixPath(source.name).suffix
    return stem.with_name(f"{stem.name}-{sha256}{suffix if re.fullmatch('[.][A-Za-z0-9]{1,16}', suffix) else ''}")
