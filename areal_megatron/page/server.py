"""A page that shows a run while it goes on: `areal status RUN --web`; or the runs of a folder, side by side.

The page itself is three files without data (page.html, page.css, page.js). What they show comes from /api/, and only
for who sends the token that is in the printed address, as `Authorization: Bearer TOKEN`. Everything is read from the
run folder, by one thread, at most once a second however many look, and not at all while nobody looks. Trajectories are
read when somebody opens them, one batch at a time.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from aiohttp import web

from areal_megatron.config import ConfigError
from areal_megatron.page.browser import Browser
from areal_megatron.page.runs import WatchedRuns, holds_runs
from areal_megatron.page.watched import Watched, as_json
from areal_megatron.run import descriptors
from areal_megatron.run.folder import RunFolder
from areal_megatron.run.http_server import HttpServer
from areal_megatron.run.network import address, backlog

_REFRESH_S = 1.0
_PATIENCE_S = 2.0
"""Longest wait of a request for a look at the run folder."""
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}


class Page:
    """The server of the page. A request says by `?run=NAME` which of several runs it asks about."""

    def __init__(self, watched: Watched | WatchedRuns, token: str):
        self.watched, self.server = watched, HttpServer(self.answer)
        self._browsers: dict[Watched, Browser] = {}
        self._files = {path: Path(__file__).with_name(name).read_bytes() for path, (name, _) in _FILES.items()}
        self._routes = {
            "/api/overview": self._overview,
            "/api/curves": self._curves,
            "/api/answers": self._answers,
            "/api/trajectories": self._trajectories,
            "/api/trajectory": self._trajectory,
        }
        self._expected = f"Bearer {token}".encode()
        self._looking: asyncio.Task | None = None
        self._looked_at = float("-inf")
        self._reading = asyncio.Lock()

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if known := self._is_authentic(request):
            self.server.welcome(request)
        try:
            response = await self._respond(request, known)
        except web.HTTPException as e:
            response = _answer({"error": e.reason}, e.status)
        if not known:
            response.force_close()  # who wants more of what anybody may see connects again
        response.headers.update(_HEADERS)
        return response

    async def _respond(self, request: web.BaseRequest, known: bool) -> web.StreamResponse:
        path = request.path
        if not known and path not in _FILES:
            refusal = _answer({"error": "this address asks for the token of the page"}, 401)
            return self.server.refused(f"{path} from {request.remote}, without the token of the page", refusal)
        if path not in _FILES and path not in self._routes:
            raise web.HTTPNotFound
        if request.method not in ("GET", "HEAD"):
            raise web.HTTPMethodNotAllowed(request.method, ["GET", "HEAD"])
        return self._file(path) if path in _FILES else await self._routes[path](request)

    def _file(self, path: str) -> web.Response:
        return web.Response(body=self._files[path], content_type=_FILES[path][1], charset="utf-8")

    def _is_authentic(self, request: web.BaseRequest) -> bool:
        given = request.headers.getall("Authorization", [])
        return len(given) == 1 and hmac.compare_digest(given[0].encode(errors="surrogateescape"), self._expected)

    async def _fresh(self) -> None:
        """Waits until the run folder was looked at within the last second, but not longer than _PATIENCE_S: a file
        server may hang."""
        if self._looking is None and time.monotonic() - self._looked_at > _REFRESH_S:
            self._looking = asyncio.create_task(self._look())
        if self._looking is not None:
            await asyncio.wait([self._looking], timeout=_PATIENCE_S)

    async def _look(self) -> None:
        try:
            await asyncio.to_thread(self._refresh)
        finally:
            self._looked_at, self._looking = time.monotonic(), None

    def _refresh(self) -> None:
        if isinstance(self.watched, Watched) and self.watched.config is None and holds_runs(self.watched.run):
            self.watched = WatchedRuns(self.watched.run.folder)  # it was empty, or not there
        self.watched.refresh()

    async def _overview(self, request: web.BaseRequest) -> web.Response:
        await self._fresh()
        several = isinstance(self.watched, WatchedRuns) and "run" not in request.query
        return _answer(self.watched.overview() if several else self._one(request).overview())

    async def _curves(self, request: web.BaseRequest) -> web.Response:
        await self._fresh()
        response = web.Response(body=self._one(request).curves() or b"{}", content_type="application/json")
        response.enable_compression()
        return response

    async def _answers(self, request: web.BaseRequest) -> web.Response:
        await self._fresh()
        response = _answer(self._one(request).answers())
        response.enable_compression()
        return response

    async def _trajectories(self, request: web.BaseRequest) -> web.Response:
        batch, first = _number(request, "batch", None), _number(request, "from", 0)
        return await self._browse(request, Browser.page, batch, first, request.query.get("only", ""))

    async def _trajectory(self, request: web.BaseRequest) -> web.Response:
        places = (_number(request, name, 0) for name in ("batch", "index", "from"))
        return await self._browse(request, Browser.trajectory, *places)

    def _one(self, request: web.BaseRequest) -> Watched:
        """Returns the run that is asked about. Raises HTTPNotFound."""
        if isinstance(self.watched, Watched):
            return self.watched
        if found := self.watched.runs.get(request.query.get("run", "")):
            return found
        raise web.HTTPNotFound(reason="there is no such run any more")

    async def _browse(self, request: web.BaseRequest, function, *arguments) -> web.Response:
        await self._fresh()
        watched = self._one(request)
        browser = self._browsers.setdefault(watched, Browser(watched.run))
        if watched.config is None:
            return _answer({"note": watched.overview().get("problem") or "The run has not begun."})
        async with self._reading:  # one batch at a time: each may be large
            try:
                found = await asyncio.to_thread(function, browser, watched.config, *arguments)
            except ConfigError as e:
                return _answer({"note": str(e)})
        response = _answer(found)
        response.enable_compression()
        return response


def _answer(found: Any, status: int = 200) -> web.Response:
    return web.Response(body=as_json(found), status=status, content_type="application/json")


def _number(request: web.BaseRequest, name: str, default: int | None) -> int | None:
    text = request.query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise web.HTTPBadRequest(reason=f"{name}: no number")
    return int(text)


def token_of(run: RunFolder) -> str:
    """Returns the token of the page: derived from the run's secret, which it does not disclose, so that who may look at
    the page can do nothing with the engines. Drawn if there is no run yet. Raises ConfigError as `RunFolder.token`."""
    if not run.folder.exists() or not (run.folder / "secret").exists():
        return secrets.token_hex(16)
    return hmac.digest(run.token.encode(), b"live page", "sha256").hex()[:32]


def serve(run: RunFolder, host: str, port: int) -> None:
    """Serves the page until SIGINT or SIGTERM, and prints its address. A folder of runs gets a page of them. Raises
    ConfigError if it cannot listen."""
    if run.folder.exists() and not run.folder.is_dir():
        raise ConfigError(f"{run.folder} is no folder of a run or of runs")
    own, token = address(host), token_of(run)
    descriptors.raise_limit()
    listening = socket.socket(socket.AF_INET6 if ":" in own else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((own, port))
        listening.listen(backlog())  # before its address is known to anybody
    except OSError as e:
        raise ConfigError(f"--port: {port} of {own} cannot be listened on: {e.strerror}; choose another") from None
    shown = f"[{own}]" if ":" in own else own
    print(f"http://{shown}:{listening.getsockname()[1]}/#{token}", flush=True)
    asyncio.run(_serve(Page(Watched(run), token), listening))
    print("ended", file=sys.stderr)


async def _serve(page: Page, listening: socket.socket) -> None:
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    await page.server.start(listening)
    await ended.wait()
    await page.server.close()
