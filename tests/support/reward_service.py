"""A service of rewards as users have them: POST {"prompt", "response", "answer"} → {"score"}, by the math reward.

python -m tests.support.reward_service PORT
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from areal_megatron.reward import math
from areal_megatron.reward.no_score import AnswerRefused


def score(prompt: str, response: str, answer: str) -> float:
    """The math reward; what it refuses is wrong."""
    try:
        return math.score(prompt, response, answer)
    except AnswerRefused:
        return 0.0


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        told = json.dumps({"score": score(asked["prompt"], asked["response"], asked["answer"])}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(told)))
        self.end_headers()
        self.wfile.write(told)

    def log_message(self, *_) -> None:
        pass


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
