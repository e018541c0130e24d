"""Rewards from a service, against a real server."""

import asyncio
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from areal_megatron.config import ConfigError, RewardConfig
from areal_megatron.reward.function import load_function
from areal_megatron.reward.worker import Answer
from areal_megatron.reward.workers import RewardWorkers
from areal_megatron.run.folder import RunError
from tests.support.judging import scores_of, short_pauses  # noqa: F401

pytestmark = pytest.mark.usefixtures("short_pauses")


class Service(BaseHTTPRequestHandler):
    """A service that replies with what the answer says, unless it says that it is away."""

    away = ""
    fails = 0
    """How many more requests fail."""

    def do_POST(self):
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.headers["Content-Type"].startswith("application/json")
        kind = self.away or question["answer"]
        if Service.fails:
            Service.fails -= 1
            kind = "500 "
        if kind == "score":
            assert set(question) == {"prompt", "response", "answer"}
            return self.reply(json.dumps({"score": len(question["prompt"]) + 0.5 * len(question["response"])}))
        if kind == "dribble":
            self.send_response(200)
            self.end_headers()
            for _ in range(100):
                time.sleep(0.1)
                self.wfile.write(b" ")
            return None
        if kind == "endless":
            self.send_response(200)
            self.end_headers()
            while True:
                self.wfile.write(b" " * 65536)
        if kind == "moved":
            self.send_response(302)
            self.send_header("Location", "/")
            self.end_headers()
            return None
        if kind == "hang up":
            return self.connection.close()
        status, _, body = kind.partition(" ")
        return self.reply(body, int(status))

    def reply(self, body: str, status: int = 200):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_):
        pass


def serve(port: int) -> ThreadingHTTPServer:
    server = ThreadingHTTPServer(("127.0.0.1", port), Service)
    server.handle_error = lambda *_: None  # clients that go away are what is tested
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.fixture
def url():
    server = serve(0)
    yield f"http://127.0.0.1:{server.server_port}/reward"
    server.shutdown()
    server.server_close()


def scored(url, answers, timeout_s=20.0, retry_s=0.0, ask=scores_of):
    async def scores():
        pool = RewardWorkers(RewardConfig(function=url, timeout_s=timeout_s, retry_s=retry_s))
        await pool.start()
        before = {worker._process.pid for worker in pool._workers}
        try:
            found = await ask(pool, answers)
            return found, pool.failures, before == {worker._process.pid for worker in pool._workers}
        finally:
            await pool.close()

    return asyncio.run(asyncio.wait_for(scores(), 120))


def test_a_service_scores(url):
    answers = [Answer("ab", "∑é", "score"), Answer("", "x" * 100_000, "score"), Answer("", "", '200 {"score": -3}')]
    assert scored(url, answers) == ([3.0, 50_000.0, -3.0], 0, True)


def test_a_service_may_say_what_is_wrong(url):
    answers = [
        Answer("", "", f'200 {{"score": 0, "feedback": {feedback}}}') for feedback in ('"too long"', "null", "5")
    ]
    judged, failures, _ = scored(url, answers, ask=RewardWorkers.judge)
    assert [(one.score, one.feedback) for one in judged] == [(0, "too long"), (0, ""), (0, "")] and not failures


BAD = {
    '500 {"score": 1}': "answered with status 500, expected 200",
    "204 ": "answered with status 204",
    "moved": "answered with status 302",
    "200 not json": "answered b'not json', expected",
    "200 [1]": "answered b'[1]', expected",
    "200 {}": "answered b'{}', expected",
    '200 {"score": "1"}': "returned '1', expected a finite number",
    '200 {"score": NaN}': "returned nan, expected a finite number",
    '200 {"score": 1e308}': "returned 1e+308, expected a finite number of at most 1,000,000",
    '200 {"score": -1e999}': "returned -inf, expected a finite number",
    '200 {"score": 1' + "0" * 4000 + "}": "expected a finite number of at most 1,000,000",
    '200 {"score": null}': "returned None, expected a finite number",
    "hang up": "http://127.0.0.1",
    "endless": "answered with more than 1048576 bytes",
}


@pytest.mark.parametrize("kinds", [[*BAD][::2], [*BAD][1::2]], ids=["even", "odd"])
def test_any_other_reply_is_a_counted_failure(url, kinds, caplog):
    """Each has a line, of ten failures at most."""
    answers = [answer for kind in kinds for answer in (Answer("", "", kind), Answer("ab", "", "score"))]
    assert scored(url, answers) == ([None, 2.0] * len(kinds), len(kinds), True)
    failures = [record.getMessage() for record in caplog.records if record.msg.startswith("reward failure ")]
    assert [any(BAD[kind] in failure for failure in failures) for kind in kinds] == [True] * len(failures)


def test_a_service_that_fails_for_a_while_is_asked_again(url):
    Service.fails = 7
    answers = [Answer("a" * n, "", "score") for n in range(5)]
    assert scored(url, answers, retry_s=20.0) == ([0.0, 1.0, 2.0, 3.0, 4.0], 0, True) and not Service.fails


def test_a_slow_service_is_given_up_before_the_worker_would_be_killed(url, caplog):
    assert scored(url, [Answer("", "", "dribble"), Answer("ab", "", "score")], timeout_s=5) == ([None, 2.0], 1, True)
    assert "did not answer within 4 s" in caplog.text


@pytest.mark.parametrize("kind", ["nobody listens", "503 ", "429 "])
def test_answers_wait_for_a_service_that_is_away(url, kind, caplog, monkeypatch):
    """None of them counts as wrong meanwhile."""
    port, back = int(url.split(":")[2].split("/")[0]), threading.Event()
    if kind == "nobody listens":
        deaf = socket.socket()  # nobody else gets the port
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        deaf.bind(("127.0.0.1", 0))
        port = deaf.getsockname()[1]
        threading.Thread(target=lambda: back.wait() and (deaf.close(), serve(port)), daemon=True).start()
    else:
        monkeypatch.setattr(Service, "away", kind)

    async def scores():
        pool = RewardWorkers(RewardConfig(function=f"http://127.0.0.1:{port}/", timeout_s=20.0, workers=2))
        await pool.start()
        try:
            asked = [asyncio.ensure_future(scores_of(pool, [Answer("ab", "", "score")] * 2)) for _ in range(3)]
            finished, _ = await asyncio.wait(asked, timeout=3)
            assert not finished
            back.set()
            monkeypatch.setattr(Service, "away", "")
            return await asyncio.gather(*asked), pool.failures
        finally:
            await pool.close()

    assert asyncio.run(asyncio.wait_for(scores(), 300)) == ([[2.0, 2.0]] * 3, 0)
    assert caplog.text.count("s for their scores") == 1


def test_a_service_that_stays_away_ends_the_run(caplog):
    async def scores():
        pool = RewardWorkers(RewardConfig(function="http://127.0.0.1:1/", timeout_s=2.0, away_s=1.0, workers=1))
        await pool.start()
        try:
            await pool.judge([Answer("", "", "score")])
        finally:
            await pool.close()

    with pytest.raises(RunError, match=r"away for \d+ s \(reward.away_s\): .*Cannot connect to host 127.0.0.1:1"):
        asyncio.run(asyncio.wait_for(scores(), 300))


def test_a_service_that_stays_away_from_one_answer_alone_fails_that_answer(url, caplog):
    """As behind a proxy, which says 502 for each that ends the service's process."""

    async def scores():
        config = RewardConfig(function=url, timeout_s=20.0, away_s=2.0, workers=2)
        pool, others = RewardWorkers(config), 0
        await pool.start()
        try:
            alone = asyncio.ensure_future(scores_of(pool, [Answer("", "", "502 "), Answer("abc", "", "score")]))
            while not alone.done():
                assert await scores_of(pool, [Answer("ab", "", "score")]) == [2.0]
                others += 1
                await asyncio.sleep(0.1)
            return alone.result(), pool.failures, others > 10
        finally:
            await pool.close()

    assert asyncio.run(asyncio.wait_for(scores(), 60)) == ([None, 3.0], 1, True)
    assert "answered with status 502, for 2 s (reward.away_s), but not for others" in caplog.text


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("http://", "is no address"),
        ("http://:80/x", "is no address"),
        ("https://host:port/", "is no address"),
        ("http://[::1/", "is no address"),
        ("https://me:secret@host/", "holds a user name"),
    ],
)
def test_addresses_that_cannot_work_are_refused(address, problem):
    with pytest.raises(ConfigError, match=r"^reward\.function: ") as error:
        load_function(address)
    assert problem in str(error.value) and "secret" not in str(error.value)
