"""What is trained of an episode of several answers: the tokens of each sample are what the template renders for it."""

import asyncio

import msgspec
import numpy as np
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from areal_megatron.controller.batches import by_environment, describe
from areal_megatron.controller.generation import _samples
from areal_megatron.controller.schedule import Group
from tests.support.chat_world import END, FORGETTING, TEMPLATE, World, spelled
from tests.support.judging import short_pauses  # noqa: F401
from tests.unit.workflows.test_endpoint import ask, user

pytestmark = pytest.mark.usefixtures("short_pauses")
ANSWERS = ["<think>a</think>one", "<think>b</think>two", "<think>c</think>three", "<think>d</think>four"]


async def by_itself(episode):
    """A user's message, a tool's result and another user's message between four answers."""
    await episode.sample()
    for role in ("user", "tool", "user"):
        episode.say([{"role": role, "content": "go on"}])
        await episode.sample()
    return 1.0


async def by_an_agent(episode):
    async with episode.openai() as api:
        messages = [user("hi?")]
        messages.append(await ask(api, messages))
        for role in ("user", "tool", "user"):
            messages.append({"role": role, "content": "go on"})
            messages.append(await ask(api, messages))
    return 1.0


def sampled(folder, workflow, template, samples):
    world = World(folder, workflow, lambda _, number: ANSWERS[number], template=template, samples=samples, turns=4)
    (ended,) = asyncio.run(world.sample())
    assert not world.episodes.failures and ended.score.correct
    return ended, world


def conversation(answers):
    """The messages before each answer."""
    messages = [user("hi?")]
    for answer, role in zip(answers, ("user", "tool", "user", None), strict=False):
        yield list(messages)
        messages += [{"role": "assistant", "content": answer}, {"role": role, "content": "go on"}]


@pytest.mark.parametrize("workflow", [by_itself, by_an_agent])
@pytest.mark.parametrize(
    ("template", "samples", "expected"),
    [
        (TEMPLATE, "auto", [[0, 1, 2, 3]]),
        (TEMPLATE, "individual", [[0], [1], [2], [3]]),
        (TEMPLATE, "concat", [[0, 1, 2, 3]]),
        (FORGETTING, "auto", [[0], [1, 2], [3]]),
        (FORGETTING, "individual", [[0], [1], [2], [3]]),
    ],
)
def test_each_sample_is_what_the_template_shows_the_model(tmp_path, workflow, template, samples, expected):
    """What the model saw for each answer is the text that a deployed model gets for the same messages."""
    ended, world = sampled(tmp_path, workflow, template, samples)
    shown = render_jinja_template(list(conversation(ANSWERS)), chat_template=template, add_generation_prompt=True)[0]
    for call, text in zip(world.client.calls, shown, strict=True):
        assert world.tokenizer._tokenizer.decode(call.prompt, skip_special_tokens=False) == text
    for sample, own in zip(ended.samples, expected, strict=True):
        whole = [*sample.prompt, *sample.tokens.tolist()]
        assert whole == [*world.client.calls[own[-1]].prompt, *spelled(ANSWERS[own[-1]]), END]
        assert sample.prompt == world.client.calls[own[0]].prompt
        trained = [token for number in own for token in [*spelled(ANSWERS[number]), END]]
        assert sample.tokens[sample.loss_mask == 1].tolist() == trained


@pytest.mark.parametrize("workflow", [by_itself, by_an_agent])
def test_concat_keeps_what_the_template_drops(tmp_path, workflow):
    ended, world = sampled(tmp_path, workflow, FORGETTING, "concat")
    (sample,) = ended.samples
    text = world.tokenizer._tokenizer.decode([*sample.prompt, *sample.tokens.tolist()], skip_special_tokens=False)
    assert sample.answers == 4 and all(f"assistant\n{answer}<|im_end|>" in text for answer in ANSWERS)


def test_samples_of_an_episode_carry_its_reward_and_count_once(tmp_path):
    ended, _ = sampled(tmp_path, by_itself, FORGETTING, "auto")
    group = Group(number=3, epoch=0, prompt_id=7, engine=0, admission_version=0, deadline=9)
    found = [t for k in range(2) for t in _samples(group, 6 + k, ended, 1.0)]
    assert [(t.uid, t.sample) for t in found] == [(6, 0), (6, 1), (6, 2), (7, 0), (7, 1), (7, 2)]
    assert {t.reward for t in found} == {5.0} and {t.admission_version for t in found} == {0}
    described = describe(found, 9)
    assert described["turns_mean"] == 4 and described["samples_per_episode_mean"] == 3
    assert described["staleness_histogram"] == {"9": 2} and described["accuracy"] == 1
    other = msgspec.structs.replace(found[0], uid=8, prompt_id=8)
    assert by_environment([*found, other], {7: "talk", 8: "sums"})["answer_share/talk"] == 2 / 3


def test_answers_without_a_message_between_them_are_each_a_turn(tmp_path):
    async def workflow(episode):
        for _ in range(4):
            await episode.sample()
        return 1.0

    ended, _ = sampled(tmp_path, workflow, TEMPLATE, "auto")
    group = Group(number=3, epoch=0, prompt_id=7, engine=0, admission_version=0, deadline=9)
    (found,) = _samples(group, 6, ended, 1.0)
    assert found.loss_mask.all() and describe([found], 9)["turns_mean"] == 4


def test_an_episode_that_fails_has_no_trained_token(tmp_path):
    async def workflow(episode):
        await episode.sample()
        episode.say("go on")
        await episode.sample()
        raise ValueError("broken")

    world = World(tmp_path, workflow, lambda _, number: ANSWERS[number % 4], template=FORGETTING)
    (ended,) = asyncio.run(world.sample())
    group = Group(number=0, epoch=0, prompt_id=7, engine=0, admission_version=0, deadline=9)
    found = _samples(group, 0, ended, 1.0)
    assert len(found) == 2 and all(t.failed and not t.loss_mask.any() and t.turns == 1 for t in found)


def test_a_message_that_leaves_no_room_is_left_out_whichever_sample_it_would_begin(tmp_path):
    async def workflow(episode):
        await episode.sample()
        episode.say("x" * 900)

    for samples in ("auto", "individual", "concat"):
        world = World(tmp_path / samples, workflow, lambda *_: ANSWERS[0], template=FORGETTING, samples=samples)
        (ended,) = asyncio.run(world.sample())
        assert [sample.answers for sample in ended.samples] == [1] and ended.score.truncated


def returns_of(folder, result, template=FORGETTING, **settings):
    """Returns (tokens, return) of the answers of each sample, of an episode whose workflow returns this."""

    async def workflow(episode):
        await by_itself(episode)
        return result

    world = World(folder, workflow, lambda _, number: ANSWERS[number % 4], template=template, turns=4)
    for name, value in settings.items():
        setattr(world.config.reward, name, value)
    (ended,) = asyncio.run(world.sample())
    group = Group(number=0, epoch=0, prompt_id=7, engine=0, admission_version=0, deadline=9)
    found = _samples(group, 0, ended, world.config.reward.turn_discount)
    for t in found:
        assert sum(tokens for tokens, _ in t.answers) == t.loss_mask.sum()
    return ended, [t.answers for t in found]


LENGTHS = [len(answer) + 1 for answer in ANSWERS]


@pytest.mark.parametrize("discount", [1.0, 0.5, 0.0])
@pytest.mark.parametrize(("template", "cut"), [(FORGETTING, [1, 3]), (TEMPLATE, [])])
def test_rewards_of_answers_become_returns(tmp_path, template, cut, discount):
    """Scores of 0 to 1 are worth 10, from -5 to 5; what an episode has beside its scores is the last answer's."""
    ended, found = returns_of(tmp_path, [0.5, 0.0, 1.0, -0.25], template, turn_discount=discount)
    rewards = [5.0, 0.0, 10.0, -2.5 - 5.0]
    returns = [sum(discount ** (k - n) * rewards[k] for k in range(n, 4)) for n in range(4)]
    flat = [answer for own in found for answer in own]
    assert [tokens for tokens, _ in flat] == LENGTHS
    assert [value for _, value in flat] == pytest.approx(returns)
    assert [len(own) for own in found] == ([1, 2, 1] if cut else [4])
    assert ended.score.score == 1.25 and ended.score.reward == pytest.approx(sum(rewards)) and ended.score.correct


def test_the_reward_of_an_episode_is_discounted_back_from_its_end(tmp_path):
    _, found = returns_of(tmp_path, 1.0, turn_discount=0.5)
    assert [value for own in found for _, value in own] == pytest.approx([0.625, 1.25, 2.5, 5.0])
    _, found = returns_of(tmp_path, 1.0)
    assert [value for own in found for _, value in own] == [5.0, 5.0, 5.0]


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        ([1.0, 0.0], "2 scores for 4 answers"),
        ([], "0 scores for 4 answers"),
        ([1.0, "good", 0.0, 0.0], "returned 'good', expected a finite number"),
        ([1.0, float("nan"), 0.0, 0.0], "returned nan, expected a finite number"),
        ((1.0, 0.5), r"returned (1.0, 0.5): scores of several answers come in a list"),
        (np.array([1.0, 0.5]), r"returned array([1. , 0.5]): scores of several answers come in a list"),
    ],
)
def test_scores_that_do_not_fit_fail_the_episode(tmp_path, result, problem):
    ended, _ = returns_of(tmp_path, result)
    assert problem in ended.score.failure and not ended.score.trained
