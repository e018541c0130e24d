"""Evaluations beside a training that does not wait: what they ask of which engine, and the figures of the answers."""

import asyncio
from dataclasses import replace
from math import comb

import numpy as np
import pytest

from areal_megatron.config import Config, ConfigError, DataConfig, EvalConfig, ModelConfig, RolloutConfig
from areal_megatron.controller.changed import Changed
from areal_megatron.controller.engine import Engine
from areal_megatron.controller.environment import Environment
from areal_megatron.controller.evaluation import Evaluation, EvaluationQueue
from areal_megatron.controller.generation import Generation
from areal_megatron.controller.sampler import Sampler
from areal_megatron.controller.schedule import Schedule
from areal_megatron.data.prompts import Prompt
from areal_megatron.engine.client import Completion, EngineError
from areal_megatron.observe.metrics import MetricsWriter
from areal_megatron.observe.shown_answers import LONGEST, AnswersWriter, ShownAnswer, read_answers
from areal_megatron.observe.status import EngineState
from areal_megatron.observe.timeline import Timeline
from areal_megatron.process.files import numbered
from areal_megatron.run.folder import RunFolder
from areal_megatron.workflows import sampling
from areal_megatron.workflows.sampling import Decoding, sampling_seed
from areal_megatron.workflows.scoring import Score
from areal_megatron.workflows.single_turn import SingleTurn

PROMPTS = [
    Prompt(id=number, text="", answer="", tokens=[number], response_tokens=None, source=number % 2)
    for number in range(6)
]


class Client:
    """The client of an engine that answers a number of requests and then dies.

    The answer to prompt p with seed s has p + 1 tokens, all of which are s % 97; half of them are of `version`, the
    others of the version after it.
    """

    def __init__(self, name, answers=10**9, version=0):
        self.name, self.answers, self.version = name, answers, version
        self.asked, self.running, self.most = [], 0, 0

    async def generate(self, prompt, *, n, seed, **options):
        self.asked.append((prompt[0], n, seed, options))
        self.running += n
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self.running -= n
        self.answers -= 1
        if self.answers < 0:
            raise EngineError(f"{self.name} is dead")
        length = prompt[0] + 1
        versions = self.version + (np.arange(length, dtype=np.int32) >= length / 2)
        return [
            Completion(np.full(length, (seed + k) % 97, np.int32), np.zeros(length, np.float32), versions, "stop")
            for k in range(n)
        ]


class Even:
    """Answers with an even token are right, answers of one token are truncated; the rewards of tokens in `fails` do."""

    def __init__(self, fails=()):
        self.fails = fails

    async def score(self, prompt, completions):
        return [self._score(completion) for completion in completions]

    def _score(self, completion):
        right = bool(completion.tokens[0] % 2 == 0)
        truncated = len(completion.tokens) == 1
        score = Score(reward=5.0 * right, correct=right, truncated=truncated, trained=True, score=float(right))
        return score.failed_by("the service is away") if completion.tokens[0] in self.fails else score


def is_right(prompt, k):
    return (sampling_seed(3, "eval", prompt) + k) % 97 % 2 == 0


@pytest.fixture
def setting(tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "_RETRY_S", 0.0)

    def make(*clients, max_running=8, fails=(), **evaluation):
        config = Config(
            name="x",
            updates=3,
            batch_size=4,
            seed=3,
            model=ModelConfig(path="x"),
            data=DataConfig(train="x", eval="a/even.jsonl,b/odd.parquet", max_prompt_tokens=2),
            rollout=RolloutConfig(group_size=2, max_running=max_running, temperature=0.5, replay_routes=True),
            eval=EvalConfig(**evaluation),
        )
        timeline, changed = Timeline(tmp_path / "timeline", "controller"), Changed()
        engines = [Engine(number, client, timeline, changed) for number, client in enumerate(clients)]

        async def is_lost(engine, client, error):
            assert engine.client is client and "is dead" in str(error)
            if not engine.gone:
                engine.leave(EngineState.LOST)
            return True

        sampler = Sampler(
            engines=engines,
            is_lost=is_lost,
            stop_tokens=[0],
            environments=[Environment(config, scorer := Even(fails), SingleTurn(scorer))],
            timeline=timeline,
            evaluation=Decoding(config.eval.temperature, config.eval.top_p, config.eval.top_k),
        )
        return config, sampler, changed

    return make


class Kept(dict):
    """Stands in for AnswersWriter: {version: answers}."""

    write = dict.__setitem__


def decode(tokens):
    return " ".join(map(str, tokens))


@pytest.fixture
def evaluate(setting):
    def run(*clients, version=0, prompts=PROMPTS, **options):
        config, sampler, changed = setting(*clients, **options)
        evaluation = Evaluation(config, sampler, prompts, changed, decode, run.kept)
        return asyncio.run(evaluation.run(version)), sampler.engines

    run.kept = Kept()

    return run


def test_figures_are_those_of_the_answers_by_file(evaluate):
    """Counted by hand; 3 answers of 5 have to be asked for in two requests."""
    long = Prompt(id=6, text="", answer="", tokens=[1, 2, 3], response_tokens=None, source=1)
    client = Client("engine-0", version=4)
    options = {"n": 5, "temperature": 0.6, "top_p": 0.9, "top_k": 7, "max_running": 12}
    values, (engine,) = evaluate(client, prompts=[*PROMPTS, long], **options)

    own = [[is_right(prompt, k) for k in range(5)] for prompt in range(6)]
    assert values["accuracy"] == pytest.approx(np.mean(own)) and 0 < values["accuracy"] < 1
    assert values["accuracy_low"] < values["accuracy"] < values["accuracy_high"]
    assert (values["items"], values["n"], values["too_long"], values["failed"]) == (6, 5, 1, 0)
    assert list(values["files"]) == ["even", "odd"]
    for name, first in (("even", 0), ("odd", 1)):
        file, correct = values["files"][name], own[first::2]
        assert (file["items"], file["too_long"]) == (3, first)
        assert file["avg@5"]["value"] == pytest.approx(np.mean(correct))
        solved = np.mean([1 - comb(5 - sum(item), 5) for item in correct])
        assert file["pass@5"]["value"] == pytest.approx(solved)
        assert file["response_tokens_mean"] == pytest.approx(np.mean([1, 3, 5]) + first)
    assert values["files"]["even"]["truncated_share"] == pytest.approx(1 / 3)
    assert values["truncated_share"] == pytest.approx(1 / 6)
    newer = [length // 2 for length in range(1, 7)]
    assert (values["version_min"], values["version_max"]) == (4, 5)
    assert values["version_mean"] == pytest.approx(4 + sum(newer) / 21)

    assert sorted((prompt, n, seed) for prompt, n, seed, _ in client.asked) == sorted(
        (prompt, n, sampling_seed(3, "eval", prompt) + first) for prompt in range(6) for first, n in ((0, 3), (3, 2))
    )
    for *_, asked in client.asked:
        assert (asked["temperature"], asked["top_p"], asked["top_k"], asked["routes_from"]) == (0.6, 0.9, 7, None)
    assert engine.running == 0


def test_answers_whose_rewards_failed_are_counted_and_left_out(evaluate, caplog):
    """Every right answer's, and one item's all."""
    tokens = [[(sampling_seed(3, "eval", prompt) + k) % 97 for k in range(2)] for prompt in range(6)]
    fails = {token for own in tokens for token in own if token % 2 == 0} | set(tokens[5])
    values, _ = evaluate(Client("engine-0"), n=2, fails=fails)
    known = [[token for token in own if token not in fails] for own in tokens]
    assert values["accuracy"] == 0 and values["failed"] == 12 - sum(map(len, known)) >= 2
    assert values["items"] == sum(map(bool, known)) <= 5
    values, _ = evaluate(Client("engine-0"), n=2, fails=range(97))
    assert values is None and "version 0 is not evaluated: the rewards of all answers failed" in caplog.text


def test_the_first_answers_to_eight_spaced_prompts_are_kept(evaluate):
    """The same prompts each time; one too long is not asked, and a score that failed is unknown."""
    prompts = [
        Prompt(id=number, text=f"prompt {number}", answer=f"right {number}", tokens=[number], response_tokens=None)
        for number in range(20)
    ]
    prompts[3] = replace(prompts[3], tokens=[1, 2, 3])
    first = {number: sampling_seed(3, "eval", number) % 97 for number in range(20)}
    for _ in range(2):
        evaluate(Client("engine-0", version=9), prompts=prompts, n=3, fails={first[19]})
        kept = evaluate.kept.pop(0)
        assert [answer.prompt for answer in kept] == [f"prompt {n}" for n in (0, 4, 6, 9, 11, 14, 16, 19)]
        for answer in kept:
            number = int(answer.prompt.split()[1])
            right = first[number] % 2 == 0
            assert answer.answer == f"right {number}"
            assert answer.response == decode([first[number]] * (number + 1))
            assert answer.score == (None if first[number] == first[19] else right)
            assert (answer.correct, answer.truncated) == (answer.score == 1, number == 0)
    evaluate(Client("engine-0"), prompts=prompts[:2])
    assert len(evaluate.kept[0]) == 2


def test_what_is_kept_is_bounded_text(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.create()
    metrics = MetricsWriter(run)
    writer = AnswersWriter(run, metrics)
    said = {"prompt": "p" * 10_000, "answer": "\x1b[2J\u202e" * 5000, "response": "a" + "\ud800" * 5000 + "z"}
    kept = [ShownAnswer(**said, score=0.5, correct=False, truncated=True)]
    writer.write(12, kept)
    found = read_answers(run, 12)
    assert found == kept and read_answers(run, 11) == []
    (answer,) = found
    assert max(map(len, answer.row[:3])) <= LONGEST and "".join(answer.row[:3]).isprintable()
    assert answer.response[0] == "a" and answer.response[-1] == "z" and "\\ud800" in answer.response
    numbered(run.evaluations, 12).write_bytes(b"[{}")
    with pytest.raises(ConfigError, match=r"00012\.json is of another release or damaged"):
        read_answers(run, 12)
    writer.close()
    metrics.close()


def test_what_a_lost_engine_did_not_answer_another_does(evaluate):
    values, engines = evaluate(Client("engine-0", 1), Client("engine-1"))
    assert values["items"] == 6 and values["accuracy"] == np.mean([is_right(prompt, 0) for prompt in range(6)])
    assert [engine.losses for engine in engines] == [1, 0]
    assert [engine.running for engine in engines] == [0, 0]


def test_without_an_engine_that_has_the_version_it_is_left_out(evaluate):
    values, engines = evaluate(Client("engine-0", 2), Client("engine-1", 1))
    assert values is None and [engine.state for engine in engines] == ["lost", "lost"]


def test_a_version_that_no_engine_was_ever_given_is_an_error(evaluate):
    with pytest.raises(ExceptionGroup) as error:
        evaluate(Client("engine-0"), version=1)
    (cause,) = error.value.exceptions
    assert isinstance(cause, EngineError)
    assert str(cause).startswith("version 1 cannot be evaluated: no engine has committed it")


@pytest.mark.parametrize(("options", "most"), [({}, 4), ({"share": 0.1}, 2), ({"share": 1.0}, 20)])
def test_it_takes_its_share_of_the_slots_until_nothing_else_runs(setting, options, most):
    """By default 5 of 20, asked for in pairs."""
    clients = [Client("engine-0"), Client("engine-1")]
    prompts = [Prompt(id=number, text="", answer="", tokens=[number], response_tokens=None) for number in range(80)]
    config, sampler, changed = setting(*clients, max_running=20, n=2, **options)
    evaluation = Evaluation(config, sampler, prompts, changed, decode, Kept())
    assert asyncio.run(evaluation.run(0))["items"] == 80
    assert [client.most for client in clients] == [most, most]
    evaluation.use_all_slots()
    asyncio.run(evaluation.run(0))
    assert [client.most for client in clients] == [20, 20]


@pytest.mark.parametrize("held", [0, 1, 8])
@pytest.mark.parametrize("engines", [1, 2, 3])
def test_what_it_holds_takes_nothing_of_an_engines_share_of_training(setting, engines, held):
    config, sampler, changed = setting(*(Client(f"engine-{number}") for number in range(engines)), max_running=32)
    schedule = Schedule(batch_size=16, group_size=2, max_staleness=0, updates=1)
    generation = Generation(config, schedule, sampler, PROMPTS, changed)
    for engine in sampler.engines:
        engine.state = EngineState.READY
        schedule.add_engine(engine.index, 0)
        engine.occupy(held)
    for engine in generation._free_engines():
        schedule.admit(engine.index, 0, len(schedule.running))
        engine.occupy(2)
    assert len(schedule.running) == 8, "the batch"
    shares = [sum(group.engine == number for group in schedule.running.values()) for number in range(engines)]
    assert max(shares) == -(-8 // engines)


class Slow:
    """Stands in for Evaluation; ends one when it is told to."""

    def __init__(self):
        self.begun, self.going_on, self.all_slots = [], asyncio.Event(), False

    async def run(self, version):
        self.begun.append(version)
        await self.going_on.wait()
        return {"accuracy": version}

    def use_all_slots(self):
        self.all_slots = True


def test_evaluations_are_made_one_after_the_other_and_of_those_that_wait_the_newest(caplog):
    async def live():
        slow, written = Slow(), []
        queue = EvaluationQueue(slow, lambda version, values: written.append((version, values["accuracy"])))
        running = asyncio.create_task(queue.run())
        for version in (0, 10, 20, 30):
            queue.add(version)
            await asyncio.sleep(0.01)
        assert slow.begun == [0] and queue.left_out == 2
        slow.going_on.set()
        await asyncio.sleep(0.01)
        assert slow.begun == [0, 30] and not slow.all_slots
        slow.going_on.clear()
        queue.add(40)
        await asyncio.sleep(0.01)
        last = asyncio.create_task(queue.finish(50))
        await asyncio.sleep(0.01)
        assert slow.begun == [0, 30, 40] and slow.all_slots and not last.done()
        slow.going_on.set()
        await asyncio.wait_for(last, 5)
        running.cancel()
        return written

    assert asyncio.run(live()) == [(version, version) for version in (0, 30, 40, 50)]
    assert "version 10 is not evaluated: the evaluation of version 0 still runs, and version 20 is due" in caplog.text


@pytest.mark.parametrize(
    ("first", "reached", "begun", "left_out"),
    [
        (0, [1, 2, 3, 4, 5, 7, 8], [4, 8], 0),
        (0, [3, 5, 6, 9, 10], [4, 8], 0),
        (8, [8, 9], [8], 0),
        (9, [9, 11, 13], [12], 0),
        (0, [3, 13, 14], [12], 2),
    ],
)
def test_a_version_that_engines_have_passed_over_is_evaluated_as_the_next_one_is_there(first, reached, begun, left_out):
    """As where the last engine without it was lost, or failed to get it."""

    async def live():
        at_once = Slow()
        at_once.going_on.set()
        queue = EvaluationQueue(at_once, lambda version, values: None, every=4, first=first)
        running = asyncio.create_task(queue.run())
        for version in reached:
            queue.reached(version)
            await asyncio.sleep(0.01)
        running.cancel()
        return at_once.begun, queue.left_out

    assert asyncio.run(live()) == (begun, left_out)
