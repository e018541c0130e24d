"""A small server that speaks as much of the Hugging Face hub's HTTP interface as huggingface_hub needs to read."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Commit → name → content of its files."""
    branches: dict[str, str] = field(default_factory=dict)
    token: str = ""
    """Who does not send it is told that there is no such repository."""
    gated: bool = False

    def commit(self, files: dict[str, bytes | str], branch: str = "main") -> str:
        content = {name: text.encode() if isinstance(text, str) else text for name, text in files.items()}
        sha = hashlib.sha1(repr((sorted(content.items()), len(self.commits))).encode()).hexdigest()
        self.commits[sha], self.branches[branch] = content, sha
        return sha


class HubServer:
    """`with HubServer() as hub:` serves on 127.0.0.1; `hub.model(...)` and `hub.dataset(...)` make repositories."""

    def __enter__(self) -> HubServer:
        self.repositories: dict[tuple[str, str], Repository] = {}
        #: Every request that has come, as "GET /path".
        self.asked: list[str] = []
        #: Status of every answer; 0: as it should be.
        self.broken = 0
        #: Answers every request in place of this server, by the handler that it is given; its `usual()` is this one's.
        self.answer: Callable[[_Handler], object] = _Handler.usual
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._server.shutdown()
        self._server.server_close()

    def model(self, name: str, folder: Path) -> Repository:
        files = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
        return self._make("models", name, files)

    def dataset(self, name: str, files: dict[str, bytes | str]) -> Repository:
        return self._make("datasets", name, files)

    def _make(self, kind: str, name: str, files: dict[str, bytes | str]) -> Repository:
        made = self.repositories[kind, name] = Repository()
        made.commit(files)
        return made

    def downloads(self) -> list[str]:
        """The names of the files whose contents were asked for."""
        return [
            line.partition("/resolve/")[2].partition("/")[2]
            for line in self.asked
            if line.startswith("GET /") and "/resolve/" in line
        ]


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer

    def do_GET(self) -> None:
        self.hub.asked.append(f"{self.command} {unquote(urlsplit(self.path).path)}")
        with suppress(OSError):  # whoever asked has gone
            self.hub.answer(self)

    def usual(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if self.hub.broken:
            self._answer(self.hub.broken)
            return
        pieces = path.strip("/").split("/")
        is_api = pieces[0] == "api"
        kind = pieces[1] if is_api else "datasets" if pieces[0] == "datasets" else "models"
        pieces = pieces[2:] if is_api else pieces[1:] if kind == "datasets" else pieces
        repository = self.hub.repositories.get((kind, "/".join(pieces[:2])))
        if repository is None or repository.token not in (
            "",
            self.headers.get("Authorization", "").removeprefix("Bearer "),
        ):
            self._answer(401, error="RepoNotFound")
            return
        action, revision, *rest = [*pieces[2:], "", "main"][:2] + pieces[4:] if pieces[2:] else ["", "main"]
        sha = repository.branches.get(revision, revision)
        if sha not in repository.commits:
            self._answer(404, error="RevisionNotFound")
        elif is_api:
            self._describe(repository, "/".join(pieces[:2]), sha, action)
        elif repository.gated:
            self._answer(403, error="GatedRepo")
        else:
            self._file(repository.commits[sha], sha, "/".join(rest))

    do_HEAD = do_GET

    def _describe(self, repository: Repository, name: str, sha: str, action: str) -> None:
        files = repository.commits[sha]
        if action == "tree":
            shown = [
                {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for path, content in files.items()
            ]
        else:
            shown = {"id": name, "sha": sha, "siblings": [{"rfilename": path} for path in files]}
        self._answer(200, json.dumps(shown).encode(), {"Content-Type": "application/json"})

    def _file(self, files: dict[str, bytes], sha: str, path: str) -> None:
        if path not in files:
            self._answer(404, error="EntryNotFound")
            return
        etag = hashlib.sha1(files[path]).hexdigest()
        self._answer(200, files[path], {"ETag": f'"{etag}"', "X-Repo-Commit": sha})

    def _answer(
        self, status: int, content: bytes = b"", headers: dict[str, str] | None = None, error: str = ""
    ) -> None:
        self.send_response(status)
        for name, value in ({"X-Error-Code": error} if error else {} | (headers or {})).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_) -> None:
        pass
