"""Scores of a reward model whose engines come and go; tests/e2e/test_supervised.py has a real one."""

import json
import math
import shutil
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from areal_megatron.config import (
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    RewardConfig,
    ServedConfig,
    ServedModelConfig,
    config_file,
)
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.reward.function import load_function
from areal_megatron.reward.model import sigmoid
from areal_megatron.reward.no_score import ServiceAway
from areal_megatron.run.folder import RunFolder


class Engine(BaseHTTPRequestHandler):
    """Answers as vLLM's /classify does, with the number of tokens as the score; refuses texts of more than 20."""

    token = ""
    asked: ClassVar[list[dict]] = []
    scores = 1

    def do_POST(self):
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        allowed = self.path == "/classify" and self.headers["Authorization"] == f"Bearer {self.token}"
        self.asked.append(question)
        found = [
            {"index": number, "probs": [float(len(tokens))] * self.scores}
            for number, tokens in enumerate(question["input"])
        ]
        body = json.dumps({"data": found[::-1]}).encode()
        too_long = any(len(tokens) > 20 for tokens in question["input"])
        self.send_response(400 if too_long else 200 if allowed else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def run(world, tmp_path):
    """A run with two engines of a reward model, one of which has gone, and with it its port."""
    run = RunFolder(tmp_path / "run")
    run.create()
    reward = RewardConfig(function="model")
    served = ServedConfig(reward=ServedModelConfig(path=str(world / "model"), engines=2))
    config = Config(
        name="x",
        updates=1,
        model=ModelConfig(str(world / "model")),
        data=DataConfig("x.jsonl"),
        reward=reward,
        served=served,
    )
    config_file.save(config, run.config)
    gone = socket.socket()  # refuses, as it does not listen, and nobody else gets the port
    gone.bind(("127.0.0.1", 0))
    run.announce("reward-0", f"http://127.0.0.1:{gone.getsockname()[1]}")
    Engine.token, Engine.asked, Engine.scores = run.token, [], 1
    server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    run.announce("reward-1", f"http://127.0.0.1:{server.server_port}")
    yield run
    gone.close()
    server.shutdown()
    server.server_close()


def test_an_engine_that_is_there_is_asked_for_the_text_as_it_was_trained(run, world):
    score = load_function("model", 5.0, str(run.folder))
    for _ in range(8):  # which one is asked first is drawn
        assert score("1+1=", "2", "not used") == pytest.approx(1 / (1 + math.exp(-6)))
    tokenizer = Tokenizer(world / "model")
    tokens = [*tokenizer.prompts(["1+1="])[0], *tokenizer.responses(["2"])[0]]
    assert Engine.asked[-1]["input"] == [tokens] and Engine.asked[-1]["use_activation"] is False


def test_announced_texts_are_asked_for_together(run):
    score = load_function("model", 5.0, str(run.folder))
    responses = ["2", "22", "2", "222"]
    score.expect([("1+1=", response, "") for response in responses])
    found = [score("1+1=", response, "") for response in responses]
    assert found == [pytest.approx(1 / (1 + math.exp(-5 - len(response)))) for response in responses]
    assert [len(question["input"]) for question in Engine.asked] == [3]
    responses[1] *= 20  # too long: the others have their scores all the same
    score.expect([("1+1=", response, "") for response in responses])
    for response in responses:
        if len(response) < 20:
            assert score("1+1=", response, "") > 0.99
        else:
            with pytest.raises(ValueError, match="status 400"):
                score("1+1=", response, "")


def test_without_an_engine_the_service_is_away(run):
    (run.folder / "endpoints" / "reward-1").unlink()  # it was never announced
    with pytest.raises(ServiceAway, match=r"reward-[01]: "):
        load_function("model", 5.0, str(run.folder))("1+1=", "2", "")


def test_another_answer_is_a_failure(run):
    Engine.scores = 2
    with pytest.raises(ValueError, match="expected 1 scores"):
        load_function("model", 5.0, str(run.folder))("1+1=", "2", "")
    Engine.token = "another"
    with pytest.raises(ValueError, match="status 401"):
        load_function("model", 5.0, str(run.folder))("1+1=", "2", "")


def test_there_is_no_reward_model_without_a_run():
    with pytest.raises(ConfigError, match=r"^reward.function: a reward model is served in runs alone"):
        load_function("model")


def test_scores_of_any_size_have_a_probability():
    assert [sigmoid(value) for value in (-1e30, 0.0, 1e30)] == [pytest.approx(0), 0.5, pytest.approx(1)]
    assert max(sigmoid(value) for value in (36.0, 37.0, 1e30)) < 1


def test_a_token_that_ends_answers_fills_up_no_batches(world, tmp_path):
    assert Tokenizer(world / "model").pad_token == 0
    shutil.copytree(world / "model", tmp_path / "model")
    file = tmp_path / "model" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pad_token": "<eos>"}))
    assert Tokenizer(tmp_path / "model").pad_token is None
