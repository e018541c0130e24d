"""How huggingface_hub asks the hub: whatever it, a mirror or a proxy answers, or does not, ends in time and is of a
bounded size; and no name that it sends leads out of the cache.

Limits of this kind are in the hooks of one httpx client, because the library has none for most of what it asks. Where
HF_ENDPOINT names another server than the hub, files come over HTTP alone: Xet's own client knows no such limits.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import httpx2
import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.utils import close_session, disable_progress_bars, get_session

TRIES = 3
"""How often a request is sent until it is answered as a whole, or by PROGRESS_BYTES at least."""
PROGRESS_BYTES = 1 << 20
SILENCE_S = 10.0
"""Longest wait for a connection, and for the next bytes."""
REPLY_S = 30.0
"""Longest time that headers take, and all of a reply that is no file."""
REPLIES_BYTES, REPLIES = 64 << 20, 1000
"""Most that one look-up reads beside files: bytes, and replies."""
WAIT_S = 300
"""Longest time for which the hub may ask to be left alone, as for its limits of rates; a line tells of it."""
STALL_S, STALL_BYTES = 60.0, 1 << 16
"""A file of which fewer bytes come in this time has stalled."""
TOLD_AFTER_S = 3.0
_ID = re.compile(r"[A-Za-z0-9+=_:-][A-Za-z0-9+=_:.-]*")
"""What a file of the cache may be called by the hub's word."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_RESET = re.compile(r";\s*t=(\d{1,12})\b")


class HubFault(httpx2.TransportError):
    """What the hub answers is refused; the library tries no further."""


def is_name(name: str) -> bool:
    """Whether the hub may call a file of a repository so: a path within it."""
    return "\\" not in name and "\0" not in name and not {"", ".", ".."}.intersection(name.split("/"))


def is_revision(text: str) -> bool:
    """Whether a branch or tag may be called so: it names a file of the cache, and a part of an address."""
    return is_name(text) and text.isprintable() and not text.startswith("-") and len(text) <= 255


def is_id(text: str) -> bool:
    """Whether the hub may identify the content of a file so, by which the cache names it."""
    return bool(_ID.fullmatch(text))


@contextmanager
def asking(what: str, largest: int = REPLIES_BYTES) -> Iterator[None]:
    """The library asks the hub within it, by the limits of this module; a line on stderr says so after TOLD_AFTER_S.

    `largest`: bytes of the largest file that may come. What breaks a limit is an httpx2.TransportError.
    """
    host = urlsplit(constants.ENDPOINT).hostname or "the hub"
    line = f"asking {host} about {what}"
    told = threading.Timer(TOLD_AFTER_S, lambda: print(line, file=sys.stderr, flush=True))
    told.daemon = True
    _limits.begin(largest)
    told.start()
    try:
        yield
    finally:
        told.cancel()
        _limits.end()


class _Limits:
    """The hooks of the client, which its threads share."""

    def __init__(self):
        self._is_installed = False
        self._lock = threading.Lock()
        self._clocks: dict[str, threading.Timer] = {}

    def begin(self, largest: int) -> None:
        self.largest, self._tries, self._replies, self._bytes = largest, Counter(), 0, 0
        if urlsplit(constants.ENDPOINT).hostname != "huggingface.co":
            constants.HF_HUB_DISABLE_XET = True
        if self._is_installed:
            return
        self._is_installed = True
        disable_progress_bars()  # hub.py tells of progress, in lines
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its errors are told once, by whoever asks
        theirs = get_session().event_hooks
        hooks = {"request": [*theirs["request"], self.before], "response": [*theirs["response"], self.after]}
        huggingface_hub.set_client_factory(lambda: httpx2.Client(event_hooks=hooks, follow_redirects=True))

    def end(self) -> None:
        for clock in list(self._clocks.values()):
            clock.cancel()
        self._clocks.clear()

    def before(self, request: httpx2.Request) -> None:
        """Limits what is about to be asked. Raises HubFault."""
        key = f"{request.method} {request.url}"
        with self._lock:
            self._tries[key] += 1
            if self._tries[key] > TRIES:
                raise HubFault(f"{request.url.host} has not answered in {TRIES} tries")
            self._replies += _is_api(request)
            if self._replies > REPLIES:
                raise HubFault(f"{request.url.host} has more than {REPLIES} pages")
        if request.url.scheme != "https" and urlsplit(constants.ENDPOINT).scheme == "https":
            raise HubFault(f"redirected from https to {request.url.scheme}://{request.url.host}")
        request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), SILENCE_S)
        request.headers["Accept-Encoding"] = "identity"  # so that sizes are those of the files
        self._restart(key, threading.Timer(REPLY_S, close_session))  # headers that come byte by byte

    def after(self, response: httpx2.Response) -> None:
        """Limits what is about to be read. Raises HubFault."""
        request, headers = response.request, response.headers
        key = f"{request.method} {request.url}"
        self._restart(key, None)
        if response.is_error and (wait_s := _asked_to_wait(headers)):
            if wait_s > WAIT_S:
                raise HubFault(f"{request.url.host} asks to wait {wait_s} s: try again then")
            print(f"{request.url.host} asks to wait {wait_s} s", file=sys.stderr, flush=True)
        if headers.get("Content-Encoding", "identity") != "identity":
            raise HubFault(f"{request.url.host} answers compressed, which it was not asked for")
        if request.method == "HEAD":
            names = [headers.get(constants.HUGGINGFACE_HEADER_X_LINKED_ETAG), headers.get("ETag")]
            commit = headers.get(constants.HUGGINGFACE_HEADER_X_REPO_COMMIT)
            if not all(name is None or is_id(name.lstrip("W/").strip('"')) for name in names):
                raise HubFault(f"{request.url.host} identifies a file by {names!r}, which is no name in a cache")
            if commit is not None and not _COMMIT.fullmatch(commit):
                raise HubFault(f"{request.url.host} calls a commit {commit!r}")
        is_file = request.method == "GET" and response.is_success and not _is_api(request)
        assert isinstance(response.stream, httpx2.SyncByteStream)
        response.stream = _Limited(response.stream, self, key, is_file)

    def _restart(self, key: str, clock: threading.Timer | None) -> None:
        if earlier := self._clocks.pop(key, None):
            earlier.cancel()
        if clock is not None:
            clock.daemon = True
            self._clocks[key] = clock
            clock.start()

    def count(self, size: int) -> None:
        """Counts bytes of replies that are no files. Raises HubFault."""
        with self._lock:
            self._bytes += size
        if self._bytes > REPLIES_BYTES:
            raise HubFault(f"more than {REPLIES_BYTES >> 20} MiB beside files")

    def came(self, key: str) -> None:
        """Something came of the request that makes another try worth while."""
        self._tries[key] = 0


class _Limited(httpx2.SyncByteStream):
    """The bytes of a reply, which end in time."""

    def __init__(self, stream: httpx2.SyncByteStream, limits: _Limits, key: str, is_file: bool):
        self._stream, self._limits, self._key, self._is_file = stream, limits, key, is_file

    def __iter__(self) -> Iterator[bytes]:
        begun = looked = time.monotonic()
        size = seen = 0
        for part in self._stream:
            size, now = size + len(part), time.monotonic()
            if not self._is_file:
                self._limits.count(len(part))
                if now - begun > REPLY_S:
                    raise HubFault(f"a reply takes more than {REPLY_S:g} s")
            elif size > self._limits.largest:
                raise HubFault(f"a file has more than the {self._limits.largest} bytes that were announced")
            elif now - looked > STALL_S:
                if size - seen < STALL_BYTES:
                    raise httpx2.ReadTimeout(f"{size - seen} bytes of a file in {now - looked:.0f} s")
                looked, seen = now, size
            if size > PROGRESS_BYTES:
                self._limits.came(self._key)
            yield part
        self._limits.came(self._key)

    def close(self) -> None:
        self._stream.close()


def _asked_to_wait(headers: httpx2.Headers) -> int:
    """Returns the seconds for which the library would sleep before its next try, without a word."""
    given, reset = headers.get("Retry-After", ""), _RESET.search(headers.get("RateLimit", ""))
    return max(int(given) if given.isdecimal() and len(given) < 13 else 0, int(reset[1]) if reset else 0)


def _is_api(request: httpx2.Request) -> bool:
    return "/api/" in request.url.path and "/resolve/" not in request.url.path


_limits = _Limits()
