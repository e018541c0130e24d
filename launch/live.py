"""A page that shows a run while it goes on: `python -m launch.status RUN --web`.

The page itself is three files without data (live.html, live.css, live.js). What they show comes from /api/, and only
for who sends the token that is in the printed address, as `Authorization: Bearer TOKEN`. Everything is read from the
run folder, by one thread, at most once a second however many look, and not at all while nobody looks. Trajectories are
read when somebody opens them, one batch at a time.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import signal
import socket
import sys
import time
from array import array
from bisect import bisect_right
from collections import Counter, OrderedDict
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from areal_megatron import config_file, descriptors, hub
from areal_megatron.config import Config, ConfigError
from areal_megatron.data.dumps import dumped, read
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.data.trajectory import decoder
from areal_megatron.http_server import HttpServer
from areal_megatron.network import address, backlog
from areal_megatron.observe.figures import HELD_OUT, Figure, sections
from areal_megatron.observe.metrics import STEPS, MetricsReader, read_status, surviving
from areal_megatron.run import Run
from areal_megatron.shown import visible
from areal_megatron.trajectories import pieces
from launch.process_rows import HEAD, rows
from launch.records import GONE_S, Pulse, read_record

MOST_POINTS = 400
"""Most points of a curve that are sent."""
PAGE = 25
"""Trajectories on a page of the browser."""
PAGE_TOKENS = 2000
"""Tokens of an answer, or of its prompt, that are shown at a time."""
_EXCERPT = 120
_REFRESH_S = 1.0
_PATIENCE_S = 2.0
"""Longest wait of a request for a look at the run folder."""
_KEPT_BATCHES = 2
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_FILES = {
    "/": ("live.html", "text/html"),
    "/live.css": ("live.css", "text/css"),
    "/live.js": ("live.js", "text/javascript"),
}


class History:
    """The metrics of a run by column, as they come; work that was done again after a resume is dropped."""

    def __init__(self, run: Run):
        self._reader = MetricsReader(run)
        self._columns: dict[str, tuple[array, array]] = {}
        self._counts: dict[str, list[tuple[int, dict[str, float]]]] = {}
        self.evaluations: list[dict[str, Any]] = []
        self.last: dict[str, Any] = {}
        """The newest line of an update."""
        self.revision = 0
        """Changes whenever anything else does."""

    def update(self) -> None:
        """Reads what is new. Raises OSError."""
        for record in self._reader.new():
            self.revision += 1
            if record["kind"] == "resume":
                self._forget(record["version"])
            elif record["kind"] == "eval":
                self.evaluations.append(record)
            elif record["kind"] in STEPS:
                self._add(record)

    @property
    def problem(self) -> str:
        return self._reader.problem

    def _add(self, record: dict[str, Any]) -> None:
        self.last = record
        for key, value in record.items():
            if isinstance(value, dict):
                self._counts.setdefault(key, []).append((record["version"], value))
            elif isinstance(value, int | float) and key not in ("version", "time"):
                versions, values = self._columns.setdefault(key, (array("d"), array("d")))
                versions.append(record["version"])
                values.append(value)

    def _forget(self, version: int) -> None:
        for versions, values in self._columns.values():
            end = bisect_right(versions, version)
            del versions[end:], values[end:]
        for counts in self._counts.values():
            del counts[bisect_right(counts, version, key=lambda entry: entry[0]) :]
        self.evaluations = surviving(self.evaluations, version)

    @property
    def keys(self) -> set[str]:
        return self._columns.keys() | self._counts.keys()

    def curve(self, key: str, scale: float = 1.0) -> list[list[float]]:
        """Returns [versions, values] with at most MOST_POINTS points: of more, the least and the greatest of each
        stretch."""
        versions, values = self._columns.get(key, ((), ()))
        x, y = thinned(np.array(versions), np.array(values) * scale, MOST_POINTS)
        return [x.tolist(), [float(f"{value:.6g}") for value in y]]

    def values(self, key: str) -> array:
        return self._columns.get(key, (array("d"), array("d")))[1]

    def histogram(self, key: str) -> list[list[float]]:
        """Returns [values, shares] of the counts of all updates together."""
        total: Counter[int] = Counter()
        for _, counts in self._counts.get(key, []):
            for value, count in counts.items():
                total[int(value)] += count
        whole = sum(total.values()) or 1
        return [sorted(total), [total[value] / whole for value in sorted(total)]]


def thinned(x: np.ndarray, y: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns at most `most` of the points [n], in order: the least and the greatest y of each stretch of x, and both
    ends."""
    if len(x) <= most:
        return x, y
    kept = {0, len(x) - 1}
    for stretch in np.array_split(np.arange(len(x)), most // 2 - 1):
        kept |= {int(stretch[y[stretch].argmin()]), int(stretch[y[stretch].argmax()])}
    order = sorted(kept)
    return x[order], y[order]


class Watched:
    """What is known of a run, whether it has begun, goes on or has ended."""

    def __init__(self, run: Run):
        self.run, self.config = run, None
        self.history = History(run)
        self._pulse, self._first, self._seen_at = Pulse(run, GONE_S), None, 0.0
        self._problem = ""
        self._overview: dict[str, Any] = {}
        self._curves = (-1, b"")

    def refresh(self) -> None:
        """Looks at the run folder. Not for two threads at once."""
        try:
            if self.config is None and self.run.config.exists():
                self.config = config_file.load(self.run.config)
            self.history.update()
            self._problem = self.history.problem
        except (ConfigError, OSError) as e:
            self._problem = str(e)
        self._overview = self._look()
        self._seen_at = time.monotonic()
        if self.config and self._curves[0] != self.history.revision:
            self._curves = self.history.revision, _json(self._drawn())

    def overview(self) -> dict[str, Any]:
        """What the last look has found; without a `state` before the first."""
        age_s = time.monotonic() - self._seen_at if self._seen_at else 0.0
        return self._overview | {"revision": self._curves[0], "age_s": round(age_s, 1)}

    def curves(self) -> bytes:
        return self._curves[1]

    def _look(self) -> dict[str, Any]:
        record, status, last = read_record(self.run), read_status(self.run), self.history.last
        self._first = self._first or record
        state = self._pulse.state() if record else "not started" if self.config else "not begun"
        if state == "running" and record == self._first and abs(time.time() - record.time) > GONE_S:
            state = "silent"  # until the launcher is seen to write, or not to
        return {
            "name": self.config.name if self.config else self.run.folder.name,
            "folder": str(self.run.folder),
            "mode": self.config.mode if self.config else "",
            "state": state,
            "phase": status.get("phase", "") if state == "running" else "",
            "version": max(status.get("version", 0), last.get("version", 0)),
            "updates": self.config.updates if self.config else 0,
            "updated": last.get("time"),
            "now": time.time(),
            "elapsed_s": status.get("elapsed_s"),
            "cards": self._cards() if self.config else [],
            "processes": {"head": HEAD, "rows": rows(record, status, False) if record else []},
            "problem": self._problem,
        }

    def _cards(self) -> list[tuple[str, str]]:
        def recent(key: str, form: str, scale: float = 1.0) -> str:
            values = self.history.values(key)[-10:]
            return form.format(median(values) * scale) if len(values) else "–"

        if self.config.is_supervised:
            return [(recent("loss", "{:.3f}"), "loss"), (recent("tokens_per_s", "{:,.0f}"), "tokens/s")]
        measured = [e["accuracy"] for e in self.history.evaluations if e.get("accuracy") is not None]
        held_out = [f"{100 * accuracy:.0f}%" for accuracy in measured]
        bound = self.config.rollout.max_staleness
        return [
            (" → ".join([*held_out[:1], *held_out[1:][-1:]]) or "–", "held-out accuracy"),
            (recent("reward_mean", "{:.2f}"), "reward"),
            (recent("effective_tokens_per_s", "{:,.0f}"), "trained tokens/s"),
            (f"{max(self.history.values('staleness_max'), default=0):.0f}", f"largest staleness, bound {bound}"),
            (recent("publish_s", "{:.2g} s"), "publish"),
            (recent("commit_s", "{:.0f} ms", 1000), "commit"),
        ]

    def _drawn(self) -> dict[str, Any]:
        shown = sections(self.config, self.history.keys)
        return {
            "x": "step" if self.config.is_supervised else "policy version",
            "end": self.config.updates,
            "sections": [
                {"title": s.title, "text": s.text, "figures": [self._figure(f) for f in s.figures]} for s in shown
            ],
        }

    def _figure(self, figure: Figure) -> dict[str, Any]:
        share = figure.kind in ("accuracy", "utilisation", "histogram")
        drawn = {"title": figure.title, "unit": figure.unit, "zero": figure.zero or share, "log": figure.log}
        drawn |= {"share": share, "kind": figure.kind, "curves": []}
        for curve in figure.curves:
            points = self.history.histogram(curve.key) if figure.kind == "histogram" else self.history.curve(curve.key)
            if figure.kind == "utilisation":
                points = [points[0], [1 - value for value in points[1]]]
            points[1] = [value * figure.scale for value in points[1]]
            drawn["curves"].append({"label": curve.label, "colour": curve.colour, "points": points})
        if figure.kind == "utilisation":
            drawn["unit"] = "share of an update's time at work"
        if figure.kind == "histogram":
            drawn["bound"] = self.config.rollout.max_staleness
        if figure.kind == "held_out":
            key = figure.curves[0].key
            found = [(e["version"], e[key]) for e in self.history.evaluations[-MOST_POINTS:] if e.get(key) is not None]
            points = [list(column) for column in zip(*sorted(found), strict=True)]
            held_out = {"label": "held-out", "colour": HELD_OUT, "points": points, "marked": True}
            drawn["curves"] += [held_out] if found else []
        if figure.kind == "accuracy":
            keys = ("accuracy", "accuracy_low", "accuracy_high")
            known = [e for e in self.history.evaluations if all(e.get(key) is not None for key in keys)]
            whole = sorted(known[-MOST_POINTS:], key=lambda e: e["version"])
            points = [[e.get("version_mean") or e["version"] for e in whole], [e["accuracy"] for e in whole]]
            interval = [[e["accuracy_low"] for e in whole], [e["accuracy_high"] for e in whole]]
            held_out = {"label": "held-out", "colour": HELD_OUT, "points": points, "interval": interval, "marked": True}
            drawn["curves"] += [held_out] if whole else []
        return drawn


class ShownTrajectory(msgspec.Struct, kw_only=True):
    """What is shown of a Trajectory: routes of experts alone may take gigabytes of a batch."""

    uid: int
    epoch: int
    prompt_id: int
    admission_version: int
    prompt: np.ndarray
    response: np.ndarray
    versions: np.ndarray
    loss_mask: np.ndarray
    reward: float
    truncated: bool
    correct: bool = False
    failed: bool = False


class ShownDump(msgspec.Struct, kw_only=True):
    """A Dump with that of its trajectories."""

    version: int
    trajectories: list[ShownTrajectory]


_decode = decoder(ShownDump).decode


class Browser:
    """The trajectories of a run, one batch at a time; the last ones looked at stay in memory."""

    def __init__(self, run: Run):
        self._run = run
        self._batches: OrderedDict[int, tuple[float, ShownDump]] = OrderedDict()
        self._tokenizer: Tokenizer | None = None

    def page(self, config: Config, batch: int | None, first: int, only: str) -> dict[str, Any]:
        """Returns a page of a batch's trajectories, by default of the newest. Raises ConfigError."""
        files = dumped(self._run.trajectories)
        numbers = list(files)
        number = batch if batch in files else numbers[-1]
        place, dump = numbers.index(number), self._read(number, files[number])
        kept = {
            "right": lambda t: t.correct,
            "wrong": lambda t: not t.correct and not t.failed,
            "cut": lambda t: t.truncated,
        }.get(only, lambda t: True)
        found = [(index, t) for index, t in enumerate(dump.trajectories) if kept(t)]
        tokenizer = self._tokenizer_of(config)
        return {
            "batch": number,
            "version": dump.version,
            "older": numbers[place - 1] if place else None,
            "newer": numbers[place + 1] if place + 1 < len(numbers) else None,
            "newest": numbers[-1],
            "from": first,
            "size": PAGE,
            "found": len(found),
            "rows": [_row(index, t, dump.version, tokenizer) for index, t in found[first : first + PAGE]],
        }

    def trajectory(self, config: Config, batch: int, index: int, first: int) -> dict[str, Any]:
        """Returns one trajectory, with PAGE_TOKENS tokens of its answer. Raises ConfigError."""
        files = dumped(self._run.trajectories)
        if batch not in files:
            raise ConfigError(f"there is no batch {batch} any more")
        dump = self._read(batch, files[batch])
        if not 0 <= index < len(dump.trajectories):
            raise ConfigError(f"batch {batch} has {len(dump.trajectories)} trajectories")
        t, tokenizer = dump.trajectories[index], self._tokenizer_of(config)
        counts = sorted(Counter(t.versions.tolist()).items())
        return _row(index, t, dump.version, tokenizer) | {
            "batch": batch,
            "trained": dump.version,
            "prompt": tokenizer.decode(t.prompt[:PAGE_TOKENS].tolist(), special=True),
            "prompt_tokens": len(t.prompt),
            "prompt_shown": min(len(t.prompt), PAGE_TOKENS),
            "by_version": counts,
            "from": first,
            "next": first + PAGE_TOKENS if first + PAGE_TOKENS < len(t.response) else None,
            "parts": parts(tokenizer, t, first, PAGE_TOKENS),
        }

    def _read(self, number: int, path: Path) -> ShownDump:
        changed = path.stat().st_mtime if path.exists() else 0.0
        if number not in self._batches or self._batches[number][0] != changed:
            self._batches[number] = changed, read(path, _decode)
        self._batches.move_to_end(number)
        while len(self._batches) > _KEPT_BATCHES:
            self._batches.popitem(last=False)
        return self._batches[number][1]

    def _tokenizer_of(self, config: Config) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(hub.model_folder(config.model.path, "model.path", weights=False))
        return self._tokenizer


def _row(index: int, t: ShownTrajectory, trained: int, tokenizer: Tokenizer) -> dict[str, Any]:
    versions = t.versions.tolist() or [t.admission_version]
    excerpt = tokenizer.decode(t.response[:_EXCERPT].tolist())
    return {
        "index": index,
        "uid": t.uid,
        "epoch": t.epoch,
        "row": t.prompt_id,
        "reward": None if t.failed else t.reward,
        "correct": t.correct,
        "truncated": t.truncated,
        "tokens": len(t.response),
        "staleness": trained - t.admission_version,
        "versions": [min(versions), max(versions)],
        "excerpt": " ".join(excerpt.split())[:_EXCERPT],
    }


def parts(tokenizer: Tokenizer, t: ShownTrajectory, first: int, count: int) -> list[tuple[int, bool, str]]:
    """Returns the text of `count` tokens of the answer as (version, whether it is trained, text), neighbours of the
    same version together."""
    found: list[tuple[int, bool, str]] = []
    position = first
    for tokens, text in pieces(tokenizer, t.response[first : first + count].tolist()):
        version, trained = int(t.versions[position]), bool(t.loss_mask[position])
        if found and found[-1][:2] == (version, trained):
            text = found.pop()[2] + text
        found.append((version, trained, text))
        position += tokens
    return found


class Page:
    """The server of the page."""

    def __init__(self, run: Run, token: str):
        self.watched, self.browser, self.server = Watched(run), Browser(run), HttpServer(self.answer)
        self._files = {path: Path(__file__).with_name(name).read_bytes() for path, (name, _) in _FILES.items()}
        self._routes = {
            "/api/overview": self._overview,
            "/api/curves": self._curves,
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
            await asyncio.to_thread(self.watched.refresh)
        finally:
            self._looked_at, self._looking = time.monotonic(), None

    async def _overview(self, request: web.BaseRequest) -> web.Response:
        await self._fresh()
        return _answer(self.watched.overview())

    async def _curves(self, request: web.BaseRequest) -> web.Response:
        await self._fresh()
        response = web.Response(body=self.watched.curves() or b"{}", content_type="application/json")
        response.enable_compression()
        return response

    async def _trajectories(self, request: web.BaseRequest) -> web.Response:
        batch, first = _number(request, "batch", None), _number(request, "from", 0)
        return await self._browse(self.browser.page, batch, first, request.query.get("only", ""))

    async def _trajectory(self, request: web.BaseRequest) -> web.Response:
        places = (_number(request, name, 0) for name in ("batch", "index", "from"))
        return await self._browse(self.browser.trajectory, *places)

    async def _browse(self, function, *arguments) -> web.Response:
        await self._fresh()
        if self.watched.config is None:
            return _answer({"note": "The run has not begun."})
        async with self._reading:  # one batch at a time: each may be large
            try:
                found = await asyncio.to_thread(function, self.watched.config, *arguments)
            except ConfigError as e:
                return _answer({"note": str(e)})
        response = _answer(found)
        response.enable_compression()
        return response


def _answer(found: Any, status: int = 200) -> web.Response:
    return web.Response(body=_json(found), status=status, content_type="application/json")


def _json(found: Any) -> bytes:
    """Returns the JSON of what is shown; in a browser, too, a text could show itself in another order, or hide."""
    return json.dumps(_visible(found)).encode()


def _visible(found: Any) -> Any:
    if isinstance(found, str):
        return visible(found)
    if isinstance(found, dict):
        return {visible(name): _visible(value) for name, value in found.items()}
    return [_visible(value) for value in found] if isinstance(found, list | tuple) else found


def _number(request: web.BaseRequest, name: str, default: int | None) -> int | None:
    text = request.query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise web.HTTPBadRequest(reason=f"{name}: no number")
    return int(text)


def token_of(run: Run) -> str:
    """Returns the token of the page: derived from the run's secret, which it does not disclose, so that who may look at
    the page can do nothing with the engines. Drawn if there is no run yet. Raises ConfigError as Run.token does."""
    if not run.folder.exists() or not (run.folder / "secret").exists():
        return secrets.token_hex(16)
    return hmac.digest(run.token.encode(), b"live page", "sha256").hex()[:32]


def serve(run: Run, host: str, port: int) -> None:
    """Serves the page until SIGINT or SIGTERM, and prints its address. Raises ConfigError if it cannot listen."""
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
    asyncio.run(_serve(Page(run, token), listening))
    print("ended", file=sys.stderr)


async def _serve(page: Page, listening: socket.socket) -> None:
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    await page.server.start(listening)
    await ended.wait()
    await page.server.close()
