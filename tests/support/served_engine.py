"""An engine of a served model, which answers from a script at /v1/completions, as vLLM's server does."""

import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.support.chat_world import END, IDS, spelled

TEXTS = {number: token for token, number in IDS.items()}


class ServedEngine:
    """Listens from `start` to `stop` on a port of its own; before and after, the port refuses connections.

    `answer(prompt text, number of the answer)` returns the text of an answer, or a float: the seconds that it takes to
    say nothing.
    """

    def __init__(self, run, name, answer):
        self.asked = []
        self._reservation = socket.socket()
        self._reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reservation.bind(("127.0.0.1", 0))
        self._port, self._token, self._answer, self._server = (
            self._reservation.getsockname()[1],
            run.token,
            answer,
            None,
        )
        run.announce(name, f"http://127.0.0.1:{self._port}")

    def start(self):
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert self.path == "/v1/completions" and self.headers["Authorization"] == f"Bearer {engine._token}"
                engine.asked.append(question)
                prompt = "".join(TEXTS[token] for token in question["prompt"])
                choices = [engine._choice(prompt, index, question) for index in range(question["n"])]
                body = json.dumps({"choices": choices[::-1]}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self._reservation.close()
        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _choice(self, prompt, index, question):
        text = self._answer(prompt, index)
        if isinstance(text, float):
            time.sleep(text)
            text = ""
        tokens = [*spelled(text), END]
        kept = tokens[: question["max_tokens"]]
        reason = "stop" if kept == tokens else "length"
        return {"index": index, "token_ids": kept, "finish_reason": reason, "text": "not read"}

    def stop(self):
        if self._server:
            self._server.shutdown()
            self._server.server_close()
