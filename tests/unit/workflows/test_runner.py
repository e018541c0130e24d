"""Workflows on a scripted engine: which tokens a trajectory has, and what becomes of failures."""

import asyncio
import contextlib
import re
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from areal_megatron.config import ConfigError, RolloutConfig
from areal_megatron.controller.batches import describe
from areal_megatron.controller.changed import Changed
from areal_megatron.controller.engine import Engine
from areal_megatron.controller.environment import Environment
from areal_megatron.controller.generation import Generation
from areal_megatron.controller.sampler import Sampler
from areal_megatron.controller.schedule import Group, Schedule
from areal_megatron.controller.state import InterruptedGroup
from areal_megatron.engine.client import Completion, EngineError
from areal_megatron.observe.timeline import Timeline
from areal_megatron.run.folder import RunError
from areal_megatron.workflows import multi_turn, sampling, tool_use
from areal_megatron.workflows.episode import EpisodeOver, EpisodeSpec
from areal_megatron.workflows.single_turn import SingleTurn
from areal_megatron.workflows.workflow import check_workflow, load_workflow
from tests.support.chat_world import END, IDS, SPECIAL, World, make_tokenizer, spelled
from tests.support.judging import short_pauses  # noqa: F401

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.usefixtures("short_pauses")


def in_turn(*answers):
    return lambda _, number: answers[min(number, len(answers) - 1)]


def run(world, **spec):
    return asyncio.run(world.sample(**spec))


def test_a_wrong_answer_is_told_so_and_tried_again(tmp_path):
    """`ab` is sampled as two tokens, where the tokenizer would have one."""

    def reward(prompt, response, answer):
        return (1.0, "") if response == answer else (0.25, f"not {response}")

    world = World(tmp_path, multi_turn.run, in_turn("ab", "right"), reward=reward)
    (ended,) = run(world, version=5)
    context, score = ended.context, ended.score
    prompt = "<|im_start|>user\nhi?<|im_end|>\n<|im_start|>assistant\n"
    feedback = "\n<|im_start|>user\nnot ab<|im_end|>\n<|im_start|>assistant\n"
    encode = world.tokenizer._tokenizer.encode
    told = encode(feedback).ids
    assert context.prompt == encode(prompt).ids
    assert context.tokens.tolist() == [*spelled("ab"), END, *told, *spelled("right"), END]
    assert context.loss_mask.tolist() == [1] * 3 + [0] * len(told) + [1] * 6
    assert (context.logprobs[context.loss_mask == 0] == 0).all() and (
        context.logprobs[context.loss_mask == 1] < 0
    ).all()
    assert context.versions.tolist() == [0] * (3 + len(told)) + [1] * 6
    assert world.judge.asked == ["ab", "right"]
    low, high = world.config.reward.wrong, world.config.reward.right
    assert score.reward == pytest.approx(low + (high - low) * multi_turn.DISCOUNT)
    assert score.correct and score.trained and not score.truncated
    assert context.tokens.dtype == context.versions.dtype == np.int32 and context.logprobs.dtype == np.float32


def test_tries_end_with_the_first_right_answer_and_with_the_last_turn(tmp_path):
    right = World(tmp_path, multi_turn.run, in_turn("right"))
    (ended,) = run(right)
    assert len(right.client.calls) == 1 and ended.score.reward == right.config.reward.right
    wrong = World(tmp_path, multi_turn.run, in_turn("wrong"))
    (ended,) = run(wrong)
    assert len(wrong.client.calls) == ended.context.answers == 3
    assert ended.score.reward == wrong.config.reward.wrong and not ended.score.truncated
    assert wrong.tokenizer.decode(ended.context.tokens.tolist()).count(multi_turn.FEEDBACK) == 2


@pytest.mark.parametrize(
    ("rule", "reward", "trained"), [("incorrect", -5, True), ("masked", -5, False), ("scored", 5, True)]
)
def test_an_answer_that_never_ends_is_cut(tmp_path, rule, reward, trained):
    world = World(
        tmp_path,
        multi_turn.run,
        in_turn("no", "x…"),
        truncated=rule,
        max_new_tokens=150,
        reward=lambda _, r, __: float(r != "no"),
    )
    (ended,) = run(world)
    assert len(ended.context.tokens) == 150 and ended.score.truncated and ended.score.trained == trained
    discounted = reward if reward < 0 else -5 + 10 * multi_turn.DISCOUNT
    assert ended.score.reward == pytest.approx(discounted)


@pytest.mark.parametrize("left", [0, 1])
def test_feedback_that_leaves_no_token_for_an_answer_is_dropped(tmp_path, left):
    text = f"\n<|im_start|>user\n{multi_turn.FEEDBACK}<|im_end|>\n<|im_start|>assistant\n"
    feedback = len(make_tokenizer(tmp_path)._tokenizer.encode(text).ids)
    world = World(tmp_path, multi_turn.run, in_turn("no"), max_new_tokens=3 + feedback + left, turns=2)
    (ended,) = run(world)
    assert ended.context.answers == 1 + left
    assert len(ended.context.tokens) == (3 + feedback + left if left else 3)
    assert ended.score.truncated and ended.score.reward == -5


def test_answers_of_forced_length_are_not_cut(tmp_path):
    world = World(tmp_path, multi_turn.run, lambda *_: "x…")
    (ended,) = run(world, forced=20)
    assert len(ended.context.tokens) == 20 and not ended.score.truncated


def test_seeds_of_the_first_answers_are_those_of_a_single_turn(tmp_path):
    world = World(tmp_path, multi_turn.run, lambda *_: "wrong", turns=2)
    first = run(world, n=3)
    seeds = [call.seed for call in world.client.calls]
    assert sorted(seeds)[:3] == [100, 101, 102] and len(set(seeds)) == 6
    assert {call.request_id for call in world.client.calls} == {
        f"group-3-{k}-{turn}-1" for k in range(3) for turn in range(2)
    }
    again = World(tmp_path, multi_turn.run, lambda *_: "wrong", turns=2)
    second = run(again, n=3)
    assert sorted(call.seed for call in again.client.calls) == sorted(seeds)
    assert len(first) == len(second) == 3


def test_programs_are_run_and_their_output_is_the_next_message(tmp_path, isolation):
    def answer(prompt, number):
        return "```python\nprint(6 * 7)\n```" if number == 0 else "```python\n1 / 0\n```" if number == 1 else "42"

    world = World(tmp_path, tool_use.run, answer)
    (ended,) = run(world, answer="42")
    text = world.tokenizer.decode(ended.context.tokens.tolist())
    assert "\n```output\n42\n```\n" in text and "ZeroDivisionError: division by zero\n```\n" in text
    assert ended.score.correct and ended.context.answers == 3 and world.judge.asked == ["42"]
    sampled = ended.context.tokens[ended.context.loss_mask == 1].tolist()
    assert sampled == [token for number in range(3) for token in [*spelled(answer(None, number)), END]]


def test_the_output_of_a_program(isolation):
    show = lambda program: tool_use.described(asyncio.run(tool_use.run_program(program)))  # noqa: E731
    assert show("print('x' * 10**6)") == "x" * 2000
    assert show("import sys; print(1); sys.exit('no')") == "1\nno"
    assert show("import os, signal; os.kill(os.getpid(), signal.SIGKILL)") == "ended by signal"
    assert show("") == ""


async def raises(episode):
    await episode.sample()
    raise KeyError("mine")


async def quotes(episode):
    await episode.sample()
    raise ValueError("no number: 1\n2026-01-01 ERROR forged\x1b[2J")


async def leaves(episode):
    await episode.sample()
    sys.exit("mine")


class NoException(BaseException):
    pass


class WithoutWords(Exception):
    def __str__(self):
        raise ValueError("no words")


async def raises_no_exception(episode):
    await episode.sample()
    raise NoException("time is up")


async def exits_a_generator(episode):
    await episode.sample()
    raise GeneratorExit


async def without_words(episode):
    await episode.sample()
    raise WithoutWords


async def makes_an_answer_up(episode):
    await episode.sample()
    made_up = Completion(np.ones(1, np.int32), -np.ones(1, np.float32), np.zeros(1, np.int32), "stop")
    episode.context = episode.context.with_answer(made_up, truncated=False)
    return 1.0


async def not_a_number(episode):
    await episode.sample()
    return float("nan")


async def a_text(episode):
    await episode.sample()
    return "1"


async def cancels(episode):
    await episode.sample()
    asyncio.current_task().cancel()
    await asyncio.sleep(0)


async def hangs(episode):
    await episode.sample()
    await asyncio.sleep(1000)


async def says_first(episode):
    episode.say("x")


async def says_a_number(episode):
    await episode.sample()
    episode.say(5)


async def nothing(episode):
    return 1.0


async def enormous(episode):
    await episode.sample()
    return 1e308


async def multiplies(episode):
    await episode.sample()
    episode.discount = float("inf")
    return 1.0


@pytest.mark.parametrize(
    ("workflow", "problem"),
    [
        (raises, "KeyError: 'mine'"),
        (quotes, r"ValueError: no number: 1\\n2026-01-01 ERROR forged\\x1b\[2J"),
        (leaves, r"it called exit\(mine\)"),
        (raises_no_exception, "it raised NoException: time is up"),
        (exits_a_generator, "it raised GeneratorExit"),
        (without_words, "WithoutWords, whose text raises ValueError"),
        (makes_an_answer_up, "its context has an answer that no engine sampled"),
        (not_a_number, "the workflow returned nan, expected a finite number"),
        (enormous, r"returned 1e\+308, expected a finite number of at most 1,000,000"),
        (multiplies, "its discount is inf"),
        (a_text, "returned '1', expected a finite number"),
        (cancels, "it cancelled itself"),
        (hangs, "it neither asked nor ended within rollout.workflow_timeout_s=0.2 s"),
        (says_first, "there is no answer yet"),
        (says_a_number, "TypeError: say: takes a text or a list of messages, not 5"),
        (nothing, "it ended without an answer of the model"),
    ],
)
def test_an_episode_whose_workflow_fails_twice_is_not_trained_and_counted(tmp_path, caplog, workflow, problem):
    world = World(tmp_path, workflow, lambda *_: "right", timeout_s=0.2 if workflow is hangs else 60.0)
    ended = run(world, n=2)
    assert not any(one.score.correct or one.score.trained for one in ended)
    assert all(one.score.failed for one in ended)
    assert world.episodes.failures == 2
    assert caplog.records[0].getMessage().startswith("workflow failure 1, rows.jsonl:8: ")
    assert re.search(problem, caplog.text), caplog.text
    sampled = [one.context.loss_mask.sum() for one in ended]
    if workflow in (says_first, nothing, makes_an_answer_up):
        assert sampled == [0, 0] and [one.length for one in ended] == [1, 1]
    else:
        assert sampled == [6, 6]


def test_an_episode_whose_workflow_fails_begins_again(tmp_path):
    async def fails_once(episode):
        await episode.sample()
        if len(world.client.calls) == 1:
            raise ConnectionError("the search is down")
        return 1.0

    world = World(tmp_path, fails_once, in_turn("first", "second"))
    (ended,) = run(world)
    assert world.tokenizer.decode(ended.context.tokens.tolist()) == "second" and ended.context.answers == 1
    assert ended.score.trained and ended.score.correct and not ended.score.failed and world.episodes.failures == 0
    first, second = world.client.calls
    assert first.request_id != second.request_id and first.prompt == second.prompt and first.seed == second.seed


@pytest.mark.parametrize("catches", [False, True])
def test_an_episode_without_a_reward_is_not_trained(tmp_path, catches):
    """It is not told that it is wrong either, and not sampled again: its reward has been tried often enough."""

    async def careful(episode):
        with contextlib.suppress(Exception):
            await multi_turn.run(episode)

    def away(prompt, response, answer):
        raise ConnectionError("status 500")

    world = World(tmp_path, careful if catches else multi_turn.run, in_turn("wrong"), reward=away)
    (ended,) = run(world)
    assert ended.score.failure == "status 500" and not ended.score.trained and not ended.score.correct
    assert ended.context.answers == len(world.client.calls) == 1 and world.episodes.failures == 0


@pytest.mark.parametrize("error", [ConfigError("reward.function: a mistake"), RunError("away for 600 s")])
@pytest.mark.parametrize("catches", [False, True])
def test_what_ends_the_run_in_a_reward_ends_it_in_an_episode(tmp_path, catches, error):
    async def careful(episode):
        with contextlib.suppress(Exception):
            await multi_turn.run(episode)

    def reward(prompt, response, answer):
        raise error

    world = World(tmp_path, careful if catches else multi_turn.run, in_turn("wrong"), reward=reward)
    with pytest.raises(type(error), match=str(error)):
        run(world)


def test_workflows_that_never_get_an_answer_end_the_run_with_the_reason(tmp_path):
    world = World(tmp_path, says_first, lambda *_: "right", batch_size=8)
    assert run(world, n=3)  # six tries
    with pytest.raises(
        ConfigError, match=r"rollout.workflow: none of the first 8 episodes got an answer .* no answer yet"
    ):
        run(world, n=3)


def test_a_workflow_cannot_hide_an_engine_that_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "_RETRY_S", 0)

    async def hides(episode):
        for _ in range(3):
            with contextlib.suppress(EngineError):
                await episode.sample()
        return 1.0

    world = World(tmp_path, hides, lambda _, number: EngineError("dead"))
    with pytest.raises(EngineError, match="dead"):
        run(world, n=2)
    assert world.episodes.failures == 0


def test_episodes_that_are_interrupted_begin_again(tmp_path):
    """One is interrupted by the abort of its request, the other before its second turn."""
    world = World(tmp_path, multi_turn.run, None)

    def answer(prompt, number):
        if number == 0:
            return "wrong"
        world.interrupting = True
        return Completion(np.ones(1, np.int32), -np.ones(1, np.float32), np.zeros(1, np.int32), "abort")

    world.client.answer = answer
    assert run(world, n=2) is None
    assert world.episodes.failures == 0


def test_an_episode_is_limited_in_turns_and_tokens(tmp_path):
    codes = []

    async def greedy(episode):
        try:
            while True:
                await episode.sample()
        except EpisodeOver as e:
            codes.append(e.code)
            raise

    (ended,) = run(World(tmp_path, greedy, lambda *_: "right", turns=4))
    assert ended.context.answers == 4 and ended.score.correct
    (ended,) = run(World(tmp_path, greedy, lambda *_: "right", turns=100, max_new_tokens=20))
    assert len(ended.context.tokens) == 20 and ended.score.truncated
    assert codes == ["turns_exceeded", "context_length_exceeded"]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (
            "multi_trun",
            "'multi_trun' is no workflow, expected single_turn, multi_turn, tool_use, program, or "
            "package.module:function; did you mean 'multi_turn'?",
        ),
        ("nowhere:run", "cannot import nowhere: ModuleNotFoundError"),
        ("json:nothing", "json has no function nothing"),
        ("json:dumps", "json:dumps is no `async def` function of an episode"),
    ],
)
def test_workflows_that_cannot_be_loaded_are_named(name, problem):
    with pytest.raises(ConfigError, match=r"^rollout\.workflow: ") as error:
        load_workflow(RolloutConfig(workflow=name))
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ raise_exception('one turn only') if messages | length > 1 }}{{ messages[0].content }}", "one turn only"),
        ("{{ messages[-1].content }}", "shows an answer 0 times"),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "shows an answer 2 times"),
    ],
)
def test_a_chat_template_of_one_turn_is_refused_before_the_start(tmp_path, template, problem):
    world = World(tmp_path, multi_turn.run, lambda *_: "wrong", template=template, samples="concat")
    world.config.rollout.workflow = "multi_turn"
    with pytest.raises(ConfigError, match="several turns need a template that takes them") as error:
        check_workflow(world.config)
    assert problem in str(error.value)
    world.config.rollout.workflow = "single_turn"
    check_workflow(world.config)
    (ended,) = run(world)  # a template that fails at a later message only is a failure of the workflow
    assert world.episodes.failures == 1 and ended.context.answers == 1


@pytest.mark.parametrize(
    ("template", "prompts"),
    [
        ("{{ messages[-1].content }}", ["ask", "no"]),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", ["askask", "askaskwrongwrongnono"]),
    ],
)
def test_a_template_that_shows_answers_otherwise_begins_a_sample_at_each(tmp_path, template, prompts):
    async def workflow(episode):
        await episode.sample()
        episode.say("no")
        await episode.sample()

    world = World(tmp_path, workflow, lambda *_: "wrong", template=template)
    world.config.rollout.workflow = "multi_turn"
    check_workflow(world.config)
    (ended,) = run(world, text="ask")
    assert [world.tokenizer.decode(sample.prompt) for sample in ended.samples] == prompts
    assert not world.episodes.failures and [sample.answers for sample in ended.samples] == [1, 1]


@pytest.mark.parametrize(("style", "samples"), [("auto", 2), ("concat", 1), ("individual", 2)])
def test_an_answer_that_ends_otherwise_than_the_template_shows_it_is_a_sample_of_its_own(tmp_path, style, samples):
    """As a model may end a call with the word before a question, where the template has the one before a result."""

    async def workflow(episode):
        await episode.sample()
        episode.say("no")
        await episode.sample()

    other = SPECIAL[0]
    ended = Completion(
        np.array([*spelled("x"), IDS[other]], np.int32), -np.ones(2, np.float32), np.zeros(2, np.int32), "stop"
    )
    world = World(tmp_path, workflow, in_turn(ended, "right"), samples=style)
    world.tokenizer.stop_tokens = [END, IDS[other]]
    (found,) = run(world)
    assert [sample.answers for sample in found.samples] == ([1, 1] if samples == 2 else [2])
    asked = world.tokenizer.decode(world.client.calls[1].prompt, special=True)
    shown = "x<|im_end|>" if samples == 2 else f"x{other}"
    assert f"<|im_start|>assistant\n{shown}\n<|im_start|>user\nno<|im_end|>" in asked


def test_without_a_template_texts_follow_one_another(tmp_path):
    tokenizer = make_tokenizer(tmp_path, template=None)
    messages = [
        {"role": role, "content": content} for role, content in (("user", "a"), ("assistant", "b"), ("user", "ab"))
    ]
    assert tokenizer.conversation(messages[:1]) == [IDS["a"]]
    assert tokenizer.continuation(messages, answer=1) == [IDS["ab"]]


class Aborted:
    """An engine's client whose requests wait until they are aborted."""

    def __init__(self, world):
        self.name, self._world, self._told = "engine-0", world, asyncio.Event()

    async def generate(self, prompt, **request):
        if self._world.client.calls:  # the first answer of the first group, so that one episode is at its second turn
            await self._told.wait()
            return [Completion(np.ones(1, np.int32), -np.ones(1, np.float32), np.zeros(1, np.int32), "abort")]
        return await self._world.client.generate(prompt, **request)

    async def abort(self, prefix):
        self._told.set()


def generation_of(world, tmp_path, client):
    prompts = [replace(world.prompt(), id=number) for number in range(3)]
    schedule = Schedule(batch_size=4, group_size=2, max_staleness=2, updates=3)
    timeline = Timeline(tmp_path / "timeline", "controller")
    world.config.batch_size = 4
    sampler = Sampler(
        engines=[Engine(0, client, timeline)],
        is_lost=None,
        stop_tokens=world.tokenizer.stop_tokens,
        environments=[Environment(world.config, world.scorer, world.groups)],
        timeline=timeline,
        evaluation=sampling.Decoding(1.0),
    )
    return schedule, Generation(world.config, schedule, sampler, prompts, Changed())


def test_groups_that_are_interrupted_are_admitted_again_and_those_of_a_single_turn_too(tmp_path):
    world = World(tmp_path, multi_turn.run, lambda *_: "wrong", turns=2)

    async def stopped():
        schedule, subject = generation_of(world, tmp_path, Aborted(world))
        schedule.add_engine(0, 0)
        running = asyncio.create_task(subject.run())
        async with asyncio.timeout(30):
            while not world.judge.asked:  # until an episode is at its second turn
                await asyncio.sleep(0.01)
        await subject.interrupt()
        running.cancel()
        return subject.save()

    state = asyncio.run(stopped())
    assert len(state.again) == 6 and not state.resumable and not state.trajectories

    group = Group(0, 0, 1, 0, 0, 2)
    interrupted = Completion(np.ones(1, np.int32), -np.ones(1, np.float32), np.zeros(1, np.int32), "abort")
    kept = {0: InterruptedGroup(prompt=np.ones(1, np.int32), answers=[interrupted] * 2)}
    state = msgspec.structs.replace(
        state, schedule=replace(state.schedule, interrupted=[group]), resumable=kept, again=[]
    )
    schedule, subject = generation_of(world, tmp_path, world.client)
    subject.restore(state)
    assert not schedule.interrupted and subject.save().again == [(0, 1)]


def test_groups_become_trajectories_with_masks(tmp_path):
    world = World(tmp_path, multi_turn.run, lambda _, number: "right" if number % 2 else "wrong", turns=2)

    async def sampled():
        schedule, subject = generation_of(world, tmp_path, world.client)
        schedule.add_engine(0, 0)
        running = asyncio.create_task(subject.run())
        async with asyncio.timeout(30):
            while len(schedule.finished) < 6:
                await asyncio.sleep(0.01)
        running.cancel()
        return schedule, [t for group in schedule.form_batch() for t in subject.take(group)]

    schedule, trajectories = asyncio.run(sampled())
    assert len(trajectories) == 4 and len(schedule.finished) + len(schedule.training) == 6
    for t in trajectories:
        assert len(t.response) == len(t.logprobs) == len(t.versions) == len(t.loss_mask)
        assert t.admission_version == 0 and t.prompt.tolist() == world.prompt().tokens
        assert {bool(x) for x in t.logprobs[t.loss_mask == 0]} <= {False} and t.loss_mask[-1] == 1
    described = describe(trajectories, 100)
    assert described["trained_tokens"] == sum(int(t.loss_mask.sum()) for t in trajectories)
    assert described["turns_mean"] == np.mean([1 if t.loss_mask.all() else 2 for t in trajectories])


def test_the_example_of_the_docs(tmp_path):
    text = (ROOT / "docs" / "workflows.md").read_text()
    names = {}
    exec(re.search(r"```python\n(# guessing\.py.*?)```", text, re.DOTALL)[1], names)
    guesses = ["50", "is it 25?", "hm", "42"]
    world = World(tmp_path, names["run"], in_turn(*guesses), turns=8)
    (ended,) = run(world, answer="42")
    told = world.tokenizer.decode(ended.context.tokens[ended.context.loss_mask == 0].tolist())
    assert re.findall(r"It is \w+|Please answer", told) == ["It is smaller", "It is larger", "Please answer"]
    assert ended.score.reward == -5 + 10 * (1 - 3 / 8) and not world.judge.asked
    (never,) = run(World(tmp_path, names["run"], in_turn("41"), turns=2), answer="42")
    assert never.score.reward == -5 and never.context.answers == 2


@pytest.mark.parametrize(("workflow", "occupied"), [("single_turn", 0), ("multi_turn", 1)])
def test_an_engine_is_free_while_answers_of_a_single_turn_are_scored(tmp_path, workflow, occupied):
    """An episode may ask again after a score, so that it keeps its engine until it ends."""
    world, seen = World(tmp_path, multi_turn.run, lambda *_: "right", turns=2), set()
    judge = world.scorer.workers.judge

    async def looking(answers):
        seen.add(engine.running)
        return await judge(answers)

    world.scorer.workers.judge = looking
    timeline = Timeline(tmp_path / "timeline", "controller")
    engine = Engine(0, world.client, timeline)
    runner = world.groups if workflow == "multi_turn" else SingleTurn(world.scorer)
    sampler = Sampler(
        engines=[engine],
        is_lost=None,
        stop_tokens=world.tokenizer.stop_tokens,
        environments=[Environment(world.config, world.scorer, runner)],
        timeline=timeline,
        evaluation=sampling.Decoding(1.0),
    )
    engine.occupy(1)
    assert asyncio.run(sampler.sample(engine, EpisodeSpec(world.prompt(), 0, "group-0", 1, "train")))
    assert seen == {occupied} and engine.running == 0
