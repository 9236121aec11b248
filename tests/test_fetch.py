"""URL -> local file, against a real HTTP server here: once, whole, the right one, and saying why not."""

import hashlib
import http.server
import json
import logging
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

import gpuml
from gpuml import ModelError
from gpuml.models import download, locks, progress, store
from gpuml.models.fetch import fetch

CONTENT = bytes(range(256)) * 1200  # 307,200 bytes: more than a socket holds at once
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Site:
    """What a server has, and what was asked of it."""

    def __init__(self):
        self.content = CONTENT
        self.headers = {"ETag": '"v1"'}
        self.ranges = True
        self.length = True
        self.status = None
        self.location = None
        self.sends = []  # per request, how many bytes of the body before the connection ends; then all
        self.pause = None  # before each quarter of the body: an Event, or seconds
        self.requests = []

    @property
    def asked(self):
        """(Range, If-Range) of each request."""
        return [(request["Range"], request["If-Range"]) for request in self.requests]


WATCHED = ("Range", "If-Range", "If-None-Match", "If-Modified-Since", "Authorization")
CONDITIONS = {"ETag": "If-None-Match", "Last-Modified": "If-Modified-Since"}


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        site = self.server.site
        site.requests.append({name: self.headers[name] for name in (*WATCHED, *self.headers)} | {"path": self.path})
        if site.location and self.path == "/start.pt2":
            self.answer(*site.location, b"moved")
        elif site.status:
            self.answer(site.status, {}, b"no")
        elif any(site.headers.get(tag, "") == self.headers[asked] for tag, asked in CONDITIONS.items()):
            self.answer(304, site.headers, None)
        else:
            self.body()

    def body(self):
        site = self.server.site
        start = int((self.headers["Range"] or "bytes=0-")[6:-1])
        same = self.headers["If-Range"] in (site.headers.get("ETag"), site.headers.get("Last-Modified"))
        if not (start and site.ranges and same):
            start = 0
        elif start >= len(site.content):
            return self.answer(416, {}, b"")
        content = site.content[start:]
        headers = dict(site.headers)
        if start:
            end = len(site.content)
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{end}"
        sent = content[: site.sends.pop(0)] if site.sends else content
        return self.answer(206 if start else 200, headers, sent, len(content))

    def answer(self, status, headers, body, length=None):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if body is not None and self.server.site.length:
            self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        for quarter in range(4) if body else ():
            pause = self.server.site.pause if quarter else None
            if isinstance(pause, threading.Event):
                pause.wait(30)
            elif pause:
                time.sleep(pause)
            size = -(-len(body) // 4)
            self.wfile.write(body[quarter * size : (quarter + 1) * size])
            self.wfile.flush()

    def log_message(self, *args):
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = False  # server_close waits for them

    def handle_error(self, request, client_address):
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a client that went away is what some tests are about
            raise


@contextmanager
def serving(tls=None):
    """(site, URL of its root), for the time of a block."""
    server = Server(("127.0.0.1", 0), Handler)
    server.site = Site()
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.site, f"http{'s' if tls else ''}://127.0.0.1:{server.server_port}"
    finally:
        if isinstance(server.site.pause, threading.Event):
            server.site.pause.set()
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GPUML_HOME", str(tmp_path / "mon cache é"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return tmp_path / "mon cache é" / "downloads"


@pytest.fixture
def served(cache):
    with serving() as pair:
        yield pair


@pytest.fixture
def hasty(monkeypatch):
    """No waits between tries."""
    monkeypatch.setattr(download, "WAIT_SECONDS", (0, 0, 0))


def notes(cache):
    return [json.loads(path.read_text()) for path in cache.glob("*.json")]


def leftovers(cache):
    return [
        path.name
        for path in cache.iterdir()
        if ".part" in path.name or not re.search(r"[.](pt2|json|lock)$", path.name)
    ]


# --- once ---------------------------------------------------------------------------------------------------------


def test_a_url_becomes_a_file_with_its_suffix_and_a_note(served, cache):
    site, root = served
    path = fetch(f"{root}/folder/net.pt2?v=1")
    assert path.read_bytes() == CONTENT
    assert path.suffix == ".pt2"
    assert path.parent == cache
    port = root.rpartition(":")[2]
    assert notes(cache) == [
        {
            "url": f"http://127.0.0.1:{port}/folder/net.pt2?...",
            "etag": '"v1"',
            "last_modified": None,
            "sha256": SHA256,
            "bytes": len(CONTENT),
        }
    ]
    assert leftovers(cache) == []
    assert site.requests[0]["User-Agent"] == f"gpuml/{gpuml.__version__}"


@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        ("net.zip", ".zip"),
        ("net.safetensors", ".safetensors"),
        ("net", ""),
        ("net.p%20t", ""),
        ("net.%2F", ""),
        ("a%20b.pt2", ".pt2"),
    ],
)
def test_the_suffix_is_the_paths_own_if_it_is_a_plain_one(served, cache, name, suffix):
    path = fetch(f"{served[1]}/{name}?file=x.exe")
    assert path.suffix == suffix
    assert path.parent == cache


def test_spaces_and_other_letters_in_a_url_are_encoded_and_what_is_encoded_stays(served, cache):
    site, root = served
    fetch(f"{root}/mon modèle%20é.pt2?x=a b")
    assert site.requests[0]["path"] == "/mon%20mod%C3%A8le%20%C3%A9.pt2?x=a%20b"


@pytest.mark.parametrize(
    ("headers", "asked"),
    [
        ({"ETag": '"v1"'}, ('"v1"', None)),
        ({"ETag": 'W/"v1"'}, ('W/"v1"', None)),
        ({"Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}, (None, "Mon, 01 Jan 2024 00:00:00 GMT")),
    ],
)
def test_a_second_fetch_asks_whether_the_file_has_changed_and_downloads_nothing(served, cache, headers, asked):
    site, root = served
    site.headers = headers
    first = fetch(f"{root}/net.pt2")
    site.sends = [0]  # a body would be cut
    assert fetch(f"{root}/net.pt2") == first
    assert first.read_bytes() == CONTENT
    assert [(r["If-None-Match"], r["If-Modified-Since"]) for r in site.requests] == [(None, None), asked]


def test_a_file_that_changed_is_downloaded_again_beside_the_one_that_is_in_use(served, cache):
    site, root = served
    old = fetch(f"{root}/net.pt2")
    site.content, site.headers = b"new", {"ETag": '"v2"'}
    new = fetch(f"{root}/net.pt2")
    assert (old.read_bytes(), new.read_bytes()) == (CONTENT, b"new")
    assert [note["etag"] for note in notes(cache)] == ['"v2"']


def test_without_tags_every_fetch_downloads_and_equal_content_is_one_file(served, cache):
    site, root = served
    site.headers = {}
    assert fetch(f"{root}/net.pt2") == fetch(f"{root}/net.pt2")
    assert [r["If-None-Match"] for r in site.requests] == [None, None]
    assert leftovers(cache) == []


def test_a_damaged_download_is_downloaded_again(served, cache, caplog):
    site, root = served
    path = fetch(f"{root}/net.pt2")
    path.write_bytes(CONTENT[:-1] + b"x")
    assert fetch(f"{root}/net.pt2").read_bytes() == CONTENT
    assert "is damaged" in caplog.text
    assert site.requests[1]["If-None-Match"] is None


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"sha256": 5, "etag": 1, "last_modified": null}'])
def test_a_damaged_note_means_a_download(served, cache, damage):
    site, root = served
    path = fetch(f"{root}/net.pt2")
    (note,) = cache.glob("*.json")
    note.write_text(damage)
    assert fetch(f"{root}/net.pt2") == path
    assert len(site.requests) == 2
    assert notes(cache)[0]["sha256"] == SHA256


# --- the hash in the URL ------------------------------------------------------------------------------------------


def test_with_a_sha256_whose_file_is_here_no_server_is_asked(served, cache):
    site, root = served
    path = fetch(f"{root}/net.pt2#sha256={SHA256.upper()}")
    assert path.read_bytes() == CONTENT
    assert fetch(f"{root}/net.pt2#sha256={SHA256}") == path
    assert len(site.requests) == 1
    assert site.requests[0]["path"] == "/net.pt2"


def test_content_of_another_sha256_is_refused_and_not_kept(served, cache):
    wanted = "ab" * 32
    with pytest.raises(ModelError) as caught:
        fetch(f"{served[1]}/net.pt2#sha256={wanted}")
    assert wanted in str(caught.value)
    assert SHA256 in str(caught.value)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_a_sha256_that_changed_is_downloaded_without_asking_about_the_old_file(served, cache):
    site, root = served
    fetch(f"{root}/net.pt2")
    site.content = b"new"  # under the same tag: a server that is wrong about it
    new = fetch(f"{root}/net.pt2#sha256={hashlib.sha256(b'new').hexdigest()}")
    assert new.read_bytes() == b"new"
    assert site.requests[1]["If-None-Match"] is None


@pytest.mark.parametrize("fragment", ["md5=abc", f"sha256={'a' * 63}", f"sha256={'g' * 64}", "top"])
def test_another_fragment_is_refused_and_names_the_form(served, cache, fragment):
    site, root = served
    with pytest.raises(ModelError, match="only #sha256=<64 hexadecimal digits>"):
        fetch(f"{root}/net.pt2#{fragment}")
    assert site.requests == []


# --- connections that end too early -------------------------------------------------------------------------------


@pytest.mark.parametrize("headers", [{"ETag": '"v1"'}, {"Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}])
def test_a_cut_download_goes_on_where_it_stopped(served, cache, hasty, headers):
    site, root = served
    site.headers = headers
    site.sends = [100_000, 50_000]
    (validator,) = headers.values()
    assert fetch(f"{root}/net.pt2").read_bytes() == CONTENT
    assert site.asked == [(None, None), ("bytes=100000-", validator), ("bytes=150000-", validator)]
    assert leftovers(cache) == []


def test_more_cuts_than_tries_are_no_failure_while_each_brings_more(served, cache, hasty):
    site, root = served
    site.sends = [40_000] * 7
    assert fetch(f"{root}/net.pt2").read_bytes() == CONTENT
    assert len(site.requests) == 8


@pytest.mark.parametrize("headers", [{}, {"ETag": 'W/"v1"'}])
def test_without_a_strong_tag_a_cut_download_begins_anew(served, cache, hasty, headers):
    site, root = served
    site.headers = headers
    site.sends = [100_000]
    assert fetch(f"{root}/net.pt2").read_bytes() == CONTENT
    assert site.asked == [(None, None)] * 2


def test_a_server_without_ranges_begins_anew(served, cache, hasty):
    site, root = served
    site.ranges = False
    site.sends = [100_000]
    assert fetch(f"{root}/net.pt2").read_bytes() == CONTENT
    assert site.asked == [(None, None), ("bytes=100000-", '"v1"')]


def test_a_server_that_always_cuts_is_given_up_and_says_how_far_it_came(served, cache, hasty):
    site, root = served
    site.ranges = False
    site.sends = [100_000] * 99
    with pytest.raises(
        ModelError, match=r"ended after 100000 of 307200 bytes, 4 times in a row; 100000 bytes are here"
    ):
        fetch(f"{root}/net.pt2")
    assert len(site.requests) == 4


def test_content_that_changed_between_two_tries_is_downloaded_anew(served, cache, monkeypatch):
    site, root = served
    site.sends = [100_000]
    other = CONTENT[::-1]

    def change(seconds):
        site.content, site.headers = other, {"ETag": '"v2"'}

    monkeypatch.setattr(download.time, "sleep", change)
    assert fetch(f"{root}/net.pt2").read_bytes() == other
    assert site.asked == [(None, None), ("bytes=100000-", '"v1"')]
    assert notes(cache)[0]["etag"] == '"v2"'


def test_content_that_became_shorter_than_what_is_here_is_downloaded_anew(served, cache, monkeypatch):
    """Under the same tag, so that the server answers 416."""
    site, root = served
    site.sends = [100_000]
    monkeypatch.setattr(download.time, "sleep", lambda seconds: setattr(site, "content", b"short"))
    assert fetch(f"{root}/net.pt2").read_bytes() == b"short"
    assert site.asked == [(None, None), ("bytes=100000-", '"v1"'), (None, None)]


def test_a_range_that_begins_elsewhere_is_not_appended(served, cache, hasty, monkeypatch):
    site, root = served
    site.sends = [100_000]
    answer = Handler.answer

    def off_by_one(self, status, headers, body, length=None):
        if status == 206:
            headers["Content-Range"] = headers["Content-Range"].replace("100000-", "100001-")
        answer(self, status, headers, body, length)

    monkeypatch.setattr(Handler, "answer", off_by_one)
    assert fetch(f"{root}/net.pt2").read_bytes() == CONTENT
    assert site.asked == [(None, None), ("bytes=100000-", '"v1"'), (None, None)]


@pytest.mark.parametrize(
    ("headers", "another"),
    [
        ({"ETag": '"v1"', "Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}, {"ETag": '"v2"'}),
        ({"ETag": '"v1"', "Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}, {"Last-Modified": "another day"}),
        ({"Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}, {"Last-Modified": "another day"}),
    ],
)
def test_a_range_of_another_version_is_not_appended(served, cache, hasty, monkeypatch, headers, another):
    """A server that heeds Range and not If-Range."""
    site, root = served
    site.headers = headers
    site.sends = [100_000]
    answer = Handler.answer

    def of_another(self, status, headers, body, length=None):
        answer(self, status, {**headers, **another} if status == 206 else headers, body, length)

    monkeypatch.setattr(Handler, "answer", of_another)
    assert fetch(f"{root}/net.pt2").read_bytes() == CONTENT
    assert [asked for asked, _ in site.asked] == [None, "bytes=100000-", None]


def test_a_range_that_repeats_no_tag_is_appended_and_the_tags_stay_known(served, cache, hasty, monkeypatch):
    """RFC 9110, 15.3.7: an answer to If-Range need not repeat Last-Modified."""
    site, root = served
    site.headers = {"ETag": '"v1"', "Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}
    site.sends = [100_000]
    answer = Handler.answer

    def without_tags(self, status, headers, body, length=None):
        answer(self, status, {"Content-Range": headers["Content-Range"]} if status == 206 else headers, body, length)

    monkeypatch.setattr(Handler, "answer", without_tags)
    assert fetch(f"{root}/net.pt2").read_bytes() == CONTENT
    assert [asked for asked, _ in site.asked] == [None, "bytes=100000-"]
    (note,) = notes(cache)
    assert {"ETag": note["etag"], "Last-Modified": note["last_modified"]} == site.headers


@pytest.mark.parametrize("tag", ['"' + "a" * 2000 + '"', '"a\x85"'])
def test_a_tag_that_could_not_be_sent_back_is_none(served, cache, tag):
    site, root = served
    site.headers = {"ETag": tag}
    for _ in range(2):
        assert fetch(f"{root}/net.pt2").read_bytes() == CONTENT
    assert [note["etag"] for note in notes(cache)] == [None]


def test_a_length_of_too_many_digits_is_none(served, cache, monkeypatch):
    """Beyond 4300 digits Python's int() refuses."""
    site, root = served
    site.length = False
    site.headers = {"Content-Length": "9" * 5000, "ETag": '"v1"'}
    assert fetch(f"{root}/net.pt2").read_bytes() == CONTENT


def test_a_range_of_a_length_of_too_many_digits_is_not_appended(served, cache, hasty, monkeypatch):
    site, root = served
    site.sends = [100_000]
    answer = Handler.answer

    def endless(self, status, headers, body, length=None):
        if status == 206:
            headers["Content-Range"] = "bytes 100000-307199/" + "9" * 5000
        answer(self, status, headers, body, length)

    monkeypatch.setattr(Handler, "answer", endless)
    assert fetch(f"{root}/net.pt2").read_bytes() == CONTENT
    assert [asked for asked, _ in site.asked] == [None, "bytes=100000-", None]


def test_more_bytes_than_promised_are_an_error(served, cache, hasty, monkeypatch):
    site, root = served
    site.sends = [100_000]
    answer = Handler.answer

    def promise_less(self, status, headers, body, length=None):
        if status == 206:
            headers["Content-Range"] = "bytes 100000-199999/200000"
        answer(self, status, headers, body, length)

    monkeypatch.setattr(Handler, "answer", promise_less)
    with pytest.raises(ModelError, match="more than the 200000 bytes that it promised"):
        fetch(f"{root}/net.pt2")
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_without_a_length_the_end_of_the_connection_is_the_files(served, cache):
    site, root = served
    site.length = False
    assert fetch(f"{root}/net.pt2").read_bytes() == CONTENT


FETCH = "import sys; from gpuml.models.fetch import fetch; print(fetch(sys.argv[1]))"


def process(url, script=FETCH):
    environment = {**os.environ, "PYTHONPATH": str(Path(gpuml.__file__).parents[1])}
    command = [sys.executable, "-W", "error", "-c", script, url]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_what_a_killed_process_left_is_continued(served, cache):
    site, root = served
    site.pause = threading.Event()
    killed = process(f"{root}/net.pt2")
    until = time.monotonic() + 30
    while time.monotonic() < until and not [p for p in cache.glob("*.part") if p.stat().st_size]:
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    site.pause.set()
    (part,) = cache.glob("*.part")
    size = part.stat().st_size
    assert 0 < size < len(CONTENT)
    assert fetch(f"{root}/net.pt2").read_bytes() == CONTENT
    assert site.asked == [(None, None), (f"bytes={size}-", '"v1"')]


def test_processes_that_fetch_the_same_at_once_download_it_once_and_get_it_whole(served, cache):
    site, root = served
    site.pause = 0.1
    running = [process(f"{root}/net.pt2") for _ in range(3)]
    paths = set()
    for one in running:
        out, err = one.communicate(timeout=60)
        assert one.returncode == 0, err
        paths.add(out)
    (path,) = paths
    assert Path(path.strip()).read_bytes() == CONTENT
    assert sorted(r["If-None-Match"] or "" for r in site.requests) == ["", '"v1"', '"v1"']


def test_without_locks_threads_that_fetch_the_same_at_once_do_not_mix(served, cache, monkeypatch):
    monkeypatch.setattr(locks, "_locked", lambda path: None)
    site, root = served
    site.pause = 0.05
    paths = []
    threads = [threading.Thread(target=lambda: paths.append(fetch(f"{root}/net.pt2"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 3
    assert {path.read_bytes() for path in paths} == {CONTENT}
    assert leftovers(cache) == []


# --- servers that are slow, or not there ---------------------------------------------------------------------------


def test_a_slow_server_is_waited_for_while_something_comes(served, cache, monkeypatch):
    monkeypatch.setattr(download, "TIMEOUT_SECONDS", 3.0)
    site, root = served
    site.pause = 1.1  # three of them are longer than the timeout; one leaves a busy machine 1.9 s
    assert fetch(f"{root}/net.pt2").read_bytes() == CONTENT
    assert len(site.requests) == 1


def test_a_server_that_stops_sending_is_given_up_and_the_error_says_so(served, cache, monkeypatch):
    monkeypatch.setattr(download, "TIMEOUT_SECONDS", 2.5)  # each try waits so long: a busy machine has it to begin
    monkeypatch.setattr(download, "WAIT_SECONDS", (0,))
    site, root = served
    site.pause = threading.Event()
    site.ranges = False
    with pytest.raises(ModelError, match=r"the server sent nothing for 2\.5 s, 2 times in a row; 76800 bytes are here"):
        fetch(f"{root}/net.pt2")


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (401, "401 Unauthorized: it wants https://user:password@"),
        (403, "403 Forbidden"),
        (404, "404 Not Found"),
        (500, "500 Internal Server Error"),
        (204, "204 No Content"),
        (599, "599"),
    ],
)
def test_a_server_that_refuses_names_its_status_and_what_to_do(served, cache, status, says):
    site, root = served
    site.status = status
    with pytest.raises(ModelError) as caught:
        fetch(f"{root}/net.pt2")
    for part in (f"{root}/net.pt2 cannot be downloaded: the server answers {says}", "give the path of the file"):
        assert part in str(caught.value)
    assert len(site.requests) == 1
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


@pytest.mark.parametrize("failure", ["down", 503])
def test_when_no_server_answers_the_file_that_is_here_is_used_with_a_warning(cache, caplog, failure):
    with serving() as (site, root):
        path = fetch(f"{root}/net.pt2")
        if failure != "down":
            site.status = failure
            assert fetch(f"{root}/net.pt2") == path
    if failure == "down":
        assert fetch(f"{root}/net.pt2") == path
    (record,) = [record for record in caplog.records if record.name == "gpuml"]
    assert record.levelno == logging.WARNING
    assert str(path) in record.getMessage()
    with pytest.raises(ModelError):  # but never in place of what a sha256 asks for
        fetch(f"{root}/net.pt2#sha256={'0' * 64}")


def test_a_file_that_the_server_has_no_more_is_an_error_though_it_is_here(served, cache):
    site, root = served
    fetch(f"{root}/net.pt2")
    site.status = 404
    with pytest.raises(ModelError, match="404"):
        fetch(f"{root}/net.pt2")


def test_a_host_that_is_not_known_is_named(cache):
    with pytest.raises(ModelError, match=r"http://gpuml\.invalid/net\.pt2 cannot be downloaded: its host is not known"):
        fetch("http://gpuml.invalid/net.pt2")


def test_a_server_that_speaks_something_else_is_an_error(cache):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def babble():
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        thread = threading.Thread(target=babble)
        thread.start()
        with pytest.raises(ModelError, match=r"BadStatusLine: SSH-2\.0"):
            fetch(f"http://127.0.0.1:{listener.getsockname()[1]}/net.pt2")
        thread.join()


@pytest.mark.parametrize(
    "url",
    [
        "ftp://host/net.pt2",
        "file:///etc/passwd",
        "http:///net.pt2",
        "http://user:secret@/net.pt2",
        "http://user:secret@host:port/net.pt2",
        "http://user:secret@[::1/net.pt2",
        "http://host:0/net.pt2",
        f"http://{'a' * 64}.org/net.pt2",
    ],
)
def test_what_is_no_url_of_a_file_is_refused_without_a_request(cache, url):
    with pytest.raises(ModelError, match="is no URL of a file") as caught:
        fetch(url)
    assert "secret" not in str(caught.value)


def test_a_full_disk_is_no_cut_connection(served, cache, monkeypatch):
    def full(self, *args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "put", full)
    with pytest.raises(ModelError, match=r"cannot be written to .*: No space left on device"):
        fetch(f"{served[1]}/net.pt2")
    assert len(served[0].requests) == 1


def test_what_a_full_disk_cut_is_deleted_and_the_error_says_so(served, cache):
    """A limit on the size of the process's files, in the place of a disk that is full."""
    site, root = served
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); "
    out, err = process(f"{root}/net.pt2", limit + FETCH).communicate(timeout=60)
    assert out == ""
    assert "File too large; what had arrived is deleted. Make room there, or set GPUML_HOME" in err.splitlines()[-1]
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    assert len(site.requests) == 1


# --- redirects, passwords, TLS ------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_followed(served, cache, status):
    site, root = served
    site.location = status, {"Location": "/elsewhere/net"}
    path = fetch(f"{root}/start.pt2")
    assert path.read_bytes() == CONTENT
    assert path.suffix == ".pt2"
    assert [request["path"] for request in site.requests] == ["/start.pt2", "/elsewhere/net"]


def test_a_cut_download_goes_on_behind_a_redirect(served, cache, hasty):
    site, root = served
    site.location = 302, {"Location": "/net"}
    site.sends = [100_000]
    assert fetch(f"{root}/start.pt2").read_bytes() == CONTENT
    assert site.asked[2:] == [("bytes=100000-", '"v1"')] * 2


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://127.0.0.1/net.pt2", "/start.pt2"])
def test_a_redirect_to_another_scheme_or_in_a_circle_is_not_followed(served, cache, target):
    site, root = served
    site.location = 302, {"Location": target}
    with pytest.raises(ModelError, match="not followed"):
        fetch(f"{root}/start.pt2")


@pytest.mark.parametrize(
    "target",
    [
        "http://[::1/",
        f"http://{'a' * 70}.org/net.pt2",
        "http://h\xf6st..x/",
        "http://127.0.0.1:99999999/",
        "http://127.0.0.1:port/",
    ],
)
def test_a_redirect_to_no_url_is_an_error_and_the_file_that_is_here_is_used(served, cache, caplog, target):
    site, root = served
    site.location = 302, {"Location": target}
    with pytest.raises(ModelError, match=r"start\.pt2 cannot be downloaded: \w+: .* give the path of the file"):
        fetch(f"{root}/start.pt2")
    site.location = None
    path = fetch(f"{root}/start.pt2")
    site.location = 302, {"Location": target}
    assert fetch(f"{root}/start.pt2") == path
    assert f"Used is what was downloaded before, {path}" in caplog.text


def test_a_password_reaches_its_host_alone_and_shows_nowhere(served, cache, caplog, hasty):
    site, root = served
    secret = root.replace("//", "//us%40er:geheim:wörd%2F@") + "/start.pt2"
    header = "Basic dXNAZXI6Z2VoZWltOnfDtnJkLw=="  # us@er:geheim:wörd/
    with serving() as (other, other_root):
        other.content = b"other"
        site.location = 302, {"Location": f"{other_root}/net.pt2"}
        path = fetch(secret)
        site.location = 302, {"Location": "/same.pt2"}
        site.sends = [5, 5]
        fetch(f"{secret}?signature=hidden")
        assert [request["Authorization"] for request in other.requests] == [None]
    assert path.read_bytes() == b"other"
    assert {request["Authorization"] for request in site.requests} == {header}
    site.location, site.status = None, 403
    with pytest.raises(ModelError) as caught:
        fetch(f"{secret}?signature=hidden")
    site.status = 503
    fetch(secret)  # warns
    everything = str(caught.value) + caplog.text + "".join(p.read_text() for p in cache.glob("*.json"))
    assert "503" in caplog.text
    for word in ("geheim", "us@er", "us%40er", "hidden", "dXNAZXI"):
        assert word not in everything


# Made for these tests, for 127.0.0.1, with `openssl req -x509 -newkey ec ...`; it opens nothing.
CERTIFICATE = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQg+t6kDQ89t264/y1M
o42fqsVZDHb4dWWUjhqAEOn9i+ChRANCAARoHNDD2xk9gXTMgmx7rtLWkv0k6a21
tqVave1kFUO0dsy5gsCNGTE8RLOImZq+hq68B+BhjohKp12fs4kMDuk8
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBkzCCATqgAwIBAgIUdYYOanwlS6M7OmoIWu0achqcczowCgYIKoZIzj0EAwIw
FjEUMBIGA1UEAwwLZ3B1bWwgdGVzdHMwIBcNMjYxMTMwMTcwMzI0WhgPMjEyNjEx
MDYxNzAzMjRaMBYxFDASBgNVBAMMC2dwdW1sIHRlc3RzMFkwEwYHKoZIzj0CAQYI
KoZIzj0DAQcDQgAEaBzQw9sZPYF0zIJse67S1pL9JOmttbalWr3tZBVDtHbMuYLA
jRkxPESziJmavoauvAfgYY6ISqddn7OJDA7pPKNkMGIwHQYDVR0OBBYEFDkubfRw
3kxz7dsb2uPspjyT+to3MB8GA1UdIwQYMBaAFDkubfRw3kxz7dsb2uPspjyT+to3
MA8GA1UdEwEB/wQFMAMBAf8wDwYDVR0RBAgwBocEfwAAATAKBggqhkjOPQQDAgNH
ADBEAiBVtiR5OV8XDjuP2RYqQ5jKDKUM5tvyHRQV2cBoIn1dwAIgYZLFC4Ugcs9u
q2qWu2H8chsckHxqDRy/2+1wF971hE0=
-----END CERTIFICATE-----
"""


@pytest.fixture
def certificate(tmp_path):
    path = tmp_path / "certificate.pem"
    path.write_text(CERTIFICATE)
    return path


def test_a_certificate_that_is_not_trusted_is_refused(cache, certificate):
    with serving(tls=certificate) as (site, root):
        with pytest.raises(ModelError, match=r"its certificate is not trusted \(self.signed certificate\)"):
            fetch(f"{root}/net.pt2")
        assert site.requests == []


def test_https_is_followed_to_https_and_never_to_http(cache, certificate, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with serving(tls=certificate) as (site, root), serving() as (plain, plain_root):
        assert fetch(f"{root}/net.pt2").read_bytes() == CONTENT
        site.location = 302, {"Location": f"{root}/net.pt2"}
        assert fetch(f"{root}/start.pt2").read_bytes() == CONTENT
        site.location = 302, {"Location": f"{plain_root}/net.pt2"}
        site.headers = {"ETag": '"v2"'}
        with pytest.raises(ModelError, match=r"leads from https to http://127\.0\.0\.1, which is not followed"):
            fetch(f"{root}/start.pt2")
        assert plain.requests == []


# --- progress -----------------------------------------------------------------------------------------------------


class Terminal:
    def __init__(self):
        self.text = ""

    def isatty(self):
        return True

    def write(self, text):
        self.text += text

    def flush(self):
        pass


class Notebook(Terminal):
    __module__ = "ipykernel.iostream"

    def isatty(self):
        return False


@pytest.mark.parametrize("out", [Terminal, Notebook])
def test_a_long_download_shows_a_line_that_rewrites_itself(served, cache, monkeypatch, out):
    monkeypatch.setattr(progress, "AFTER_SECONDS", 0.1)
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0)
    monkeypatch.setattr(sys, "stderr", out())
    served[0].pause = 0.15
    fetch(f"{served[1]}/net%1b.pt2")
    lines = sys.stderr.text.split("\r")
    assert re.fullmatch(r"net\.pt2: 0\.3 of 0\.3 MB, \d+\.\d MB/s\n", lines[-1])
    assert len(lines) >= 3
    assert sys.stderr.text.count("\n") == 1


def test_a_short_download_shows_nothing(served, cache, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    fetch(f"{served[1]}/net.pt2")
    assert sys.stderr.text == ""


def test_where_nobody_looks_on_nothing_is_shown(served, cache, monkeypatch, capfd):
    monkeypatch.setattr(progress, "AFTER_SECONDS", 0)
    fetch(f"{served[1]}/net.pt2")
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr(sys, "stderr", None)  # as under pythonw
    fetch(f"{served[1]}/other.pt2")
