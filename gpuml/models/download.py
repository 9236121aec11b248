"""A URL -> its bytes in a file, over connections that are slow, that end too early, or that lead elsewhere."""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import asdict, dataclass
from http import HTTPStatus
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from gpuml.errors import ModelError
from gpuml.models import store
from gpuml.models.progress import Progress
from gpuml.version import __version__

#: A server that sends nothing for so long is taken for dead.
TIMEOUT_SECONDS = 60.0

#: The waits after connections that ended without having brought the download further than before; then it fails.
WAIT_SECONDS = (1.0, 2.0, 4.0)

_BLOCK = 1 << 20

#: What http.client and urllib raise on what a server sends: also ValueError, for a redirect to "http://[::1/" or to a
#: host that IDNA does not have.
_FAILURES = (OSError, http.client.HTTPException, ValueError)

#: A number of bytes. More digits are no length of a file, and beyond 4300 int() fails.
_LENGTH = r"\d{1,18}"

_ADVICE = "Or download it by other means, and give the path of the file"


@dataclass(frozen=True)
class Source:
    """A URL to ask for.

    Parameters
    ----------
    url : without userinfo and fragment, in ASCII.
    authorization : the header that the userinfo became; sent to the URL's own host alone.
    """

    url: str
    authorization: str | None = None

    def __str__(self) -> str:
        """For messages and notes: without the query, which may be a signature."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}{parts.path}{'?...' if parts.query else ''}"

    @property
    def name(self) -> str:
        """The file's, without what a terminal would obey."""
        return "".join(filter(str.isprintable, PurePosixPath(unquote(urlsplit(self.url).path)).name))


@dataclass(frozen=True)
class Tags:
    """What a server calls a version of a file: the headers ETag and Last-Modified."""

    etag: str | None
    last_modified: str | None

    @property
    def validator(self) -> str | None:
        """What If-Range takes: a strong tag, else a date; None: a part cannot be continued safely."""
        return self.etag if self.etag and not self.etag.startswith("W/") else self.last_modified


class Unreachable(Exception):
    """No server answered, or it failed by itself (5xx): the URL may be right."""


class _Cut(Exception):
    """A connection ended, or brought nothing for too long; its cause says which."""


class _Anew(Exception):
    """What is here cannot be continued."""


def download(source: Source, part: Path, known: Tags | None) -> Tags | None:
    """Bring the bytes of a URL into `part`; goes on with what is there, if the server says that it is of the same file.

    Parameters
    ----------
    known : of the version that is here already.

    Returns
    -------
    Tags or None
        None: the server still has the known version, and nothing was downloaded.

    Raises
    ------
    Unreachable
        No server answered, or it failed.
    ModelError
        The server refuses, or ends the connection again and again.
    """
    answered = False
    furthest, failures = _size(part), 0
    with Progress(source.name) as progress:
        while True:
            try:
                response = _ask(source, part, known)
                if response is None:
                    return None
                answered = True
                with response:
                    return _receive(response, source, part, progress)
            except _Anew:
                discard(part)
            except _Cut as cut:
                if not answered:  # a wrong name or a server that is down would only be met again
                    raise Unreachable(f"{source} cannot be downloaded: {_why(cut)}. {_ADVICE}") from cut.__cause__
                if _size(part) > furthest:
                    furthest, failures = _size(part), 0
                if failures == len(WAIT_SECONDS):
                    raise ModelError(
                        f"{source} cannot be downloaded: {_why(cut)}, {failures + 1} times in a row; {_size(part)} "
                        f"bytes are here. Try again, and it goes on from there if the server can do that. {_ADVICE}"
                    ) from cut.__cause__
                time.sleep(WAIT_SECONDS[failures])
                failures += 1


def _ask(source: Source, part: Path, known: Tags | None) -> http.client.HTTPResponse | None:
    """The answer to one request, its body not read yet; None if the known version is still the server's."""
    request = urllib.request.Request(source.url, headers={"User-Agent": f"gpuml/{__version__}"})
    if source.authorization:
        request.add_unredirected_header("Authorization", source.authorization)
    tags = _tags_of(part)
    if tags and tags.validator and _size(part):
        request.add_header("Range", f"bytes={_size(part)}-")
        request.add_header("If-Range", tags.validator)
    elif known:
        if known.etag:
            request.add_header("If-None-Match", known.etag)
        if known.last_modified:
            request.add_header("If-Modified-Since", known.last_modified)
    try:
        response: http.client.HTTPResponse = urllib.request.build_opener(_Redirects).open(
            request, timeout=TIMEOUT_SECONDS
        )
        return response
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 304 and known:
                return None
            if error.code == 416 and request.has_header("Range"):  # the file is no longer than the part
                raise _Anew from None
            if error.code >= 500:
                raise _Cut from error
            raise ModelError(f"{source} cannot be downloaded: {_status(error.code)}. {_ADVICE}") from None
    except ModelError:
        raise
    except _FAILURES as error:
        raise _Cut from error


def _receive(response: http.client.HTTPResponse, source: Source, part: Path, progress: Progress) -> Tags:
    """Write the body of an answer to `part`, after what is there or over it."""
    tags = Tags(_tag(response.headers["ETag"]), _tag(response.headers["Last-Modified"]))
    length = response.headers["Content-Length"] if not response.headers["Transfer-Encoding"] else None
    total = int(length) if length and re.fullmatch(_LENGTH, length) else None
    have = _size(part) if response.status == 206 else 0
    if have:
        before = _tags_of(part)
        ranges = re.fullmatch(rf"bytes ({_LENGTH})-{_LENGTH}/({_LENGTH})", response.headers["Content-Range"] or "")
        if before is None or not ranges or int(ranges[1]) != have or _differ(before, tags):
            raise _Anew
        tags, total = before, int(ranges[2])
    elif response.status != 200:
        raise ModelError(f"{source} cannot be downloaded: {_status(response.status)}. {_ADVICE}")
    with part.open("ab" if have else "wb") as out:
        if not have:
            store.write_text(_beside(part), json.dumps(asdict(tags)))
        while block := _read(response):
            have += len(block)
            if total is not None and have > total:
                break
            out.write(block)
            progress.at(have, total)
    if total is not None and have > total:
        discard(part)
        raise ModelError(f"{source} sends more than the {total} bytes that it promised. {_ADVICE}")
    if total is not None and have < total:
        raise _Cut from EOFError(f"the connection ended after {have} of {total} bytes")
    return tags


def discard(part: Path) -> None:
    """Delete what has arrived, and what the server said of it."""
    part.unlink(missing_ok=True)
    _beside(part).unlink(missing_ok=True)


def _read(response: http.client.HTTPResponse) -> bytes:
    try:
        block: bytes = response.read1(_BLOCK)  # what has come: nothing of it is lost if the connection ends now
        return block
    except _FAILURES as error:
        raise _Cut from error


def _tag(header: str | None) -> str | None:
    """A tag that can be sent back: servers refuse long headers, and http.client other than printable ones."""
    return header if header and re.fullmatch("[ -~]{1,1000}", header) else None


def _differ(one: Tags, other: Tags) -> bool:
    """Whether two answers are of two versions; a tag that one of them lacks says nothing."""
    pairs = ((one.etag, other.etag), (one.last_modified, other.last_modified))
    return any(a is not None and b is not None and a != b for a, b in pairs)


def _tags_of(part: Path) -> Tags | None:
    try:
        return Tags(**json.loads(_beside(part).read_text()))
    except (OSError, ValueError, TypeError):  # none, or damaged: what has arrived cannot be continued
        return None


def _beside(part: Path) -> Path:
    return part.with_name(f"{part.name}.json")


def _size(part: Path) -> int:
    try:
        return part.stat().st_size
    except FileNotFoundError:
        return 0


def _why(cut: _Cut) -> str:
    """What ended a connection, in words."""
    error = cut.__cause__
    if isinstance(error, urllib.error.HTTPError):
        return _status(error.code)
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, BaseException):
        error = error.reason
    if isinstance(error, TimeoutError):
        return f"the server sent nothing for {TIMEOUT_SECONDS:g} s"
    if isinstance(error, socket.gaierror):
        return f"its host is not known here ({error.strerror})"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message})"
    return f"{type(error).__name__}: {error!s:.200}"


def _status(code: int) -> str:
    hint = {
        401: ": it wants https://user:password@host/...",
        403: ": it wants https://user:password@host/..., or a signature in the URL has expired",
    }.get(code, "")
    if 300 <= code < 400:
        hint = ": that redirect is not followed"
    with suppress(ValueError):
        return f"the server answers {code} {HTTPStatus(code).phrase}{hint}"
    return f"the server answers {code}{hint}"


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows to http and https alone, and never out of https; passwords stay with their host."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        old, new = urlsplit(req.full_url), urlsplit(newurl)
        if new.scheme not in ("http", "https") or (old.scheme, new.scheme) == ("https", "http"):
            fp.close()
            where = f"from {old.scheme} to {new.scheme}://{new.hostname}"
            raise ModelError(f"{Source(req.full_url)} leads {where}, which is not followed. {_ADVICE}")
        # Python 3.10 knows no 308, which is 307 for good.
        request = super().redirect_request(req, fp, 307 if code == 308 else code, msg, headers, newurl)
        login = req.unredirected_hdrs.get("Authorization")
        if request is not None and login and (old.scheme, old.netloc) == (new.scheme, new.netloc):
            request.add_unredirected_header("Authorization", login)
        return request

    http_error_308 = urllib.request.HTTPRedirectHandler.http_error_302
