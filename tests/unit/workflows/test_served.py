"""Workflows and agents that ask models served beside the policy; tests/e2e/test_served.py has real ones."""

import asyncio
from pathlib import Path

import pytest

from areal_megatron.config import ConfigError, ServedModelConfig
from areal_megatron.reward.served import ServedModelError, ServedModels
from areal_megatron.run.folder import RunError, RunFolder
from areal_megatron.workflows.runner import EpisodeRunner
from areal_megatron.workflows.workflow import Workflow
from tests.support.chat_world import END, InThisProcess, World, make_tokenizer, spelled
from tests.support.judging import short_pauses  # noqa: F401
from tests.support.served_engine import ServedEngine
from tests.unit.workflows.test_endpoint import post, user

pytestmark = pytest.mark.usefixtures("short_pauses")
OTHER_TEMPLATE = "{% for message in messages %}[{{ message.role }}: {{ message.content }}]{% endfor %}>"


@pytest.fixture
def served(tmp_path):
    """Makes a world whose workflow finds a user, with a template of its own, and the user's engine."""
    engines = []

    def make(workflow, say, answer=lambda _, number: "right", **user_settings):
        world = World(tmp_path / "policy", workflow, answer, turns=5)
        make_tokenizer(tmp_path / "user", OTHER_TEMPLATE)
        settings = {"max_length": 200, "max_new_tokens": 50, "timeout_s": 5.0} | user_settings
        world.config.served.user = ServedModelConfig(path=str(tmp_path / "user"), **settings)
        run = RunFolder(tmp_path / "run")
        run.create()
        models = ServedModels(world.config.served_models, run)
        world.episodes = EpisodeRunner(
            world.config, Workflow(workflow, 5), world.tokenizer, world.scorer, served=models
        )
        world.groups = InThisProcess(world.episodes)
        engines.append(ServedEngine(run, "user-0", say))
        return world, engines[0]

    yield make
    for engine in engines:
        engine.stop()


def sampled(episode):
    """The tokens that are trained of an episode."""
    return [t for sample in episode.samples for t in sample.tokens[sample.loss_mask == 1].tolist()]


def test_a_workflow_asks_a_served_model_whose_answers_are_not_trained(served):
    async def workflow(episode):
        said = [{"role": "user", "content": "play ab<|im_end|>"}]
        for _ in range(2):
            episode.say(await episode.served("user").chat(said)) if episode.answers else None
            said.append({"role": "assistant", "content": await episode.sample()})
        return 1.0

    world, engine = served(workflow, lambda prompt, _: "go on", answer=lambda _, number: ["one", "right"][number])
    engine.start()
    (episode,) = asyncio.run(world.sample())
    assert sampled(episode) == [*spelled("one"), END, *spelled("right"), END]
    assert not episode.score.failed and episode.score.reward == 5
    [asked] = engine.asked
    # its own template, in which what is said is text: no token ends a message
    own = "[user: play ab<|im_end|>][assistant: one]>"
    tokenizer = make_tokenizer(Path(world.config.served.user.path), OTHER_TEMPLATE)
    assert END not in asked["prompt"] and tokenizer.decode(asked["prompt"], special=True) == own
    assert asked["model"] == "user" and asked["max_tokens"] == 50 and asked["stop_token_ids"] == [END]
    assert asked["temperature"] == 1.0 and isinstance(asked["seed"], int)


def test_an_episode_waits_for_a_model_that_is_away(served):
    async def workflow(episode):
        task = asyncio.ensure_future(episode.served("user").chat([user("hi")]))
        await asyncio.sleep(1.5)
        assert not task.done()
        engine.start()
        heard = await task
        await episode.sample()
        return float(heard == "here")

    world, engine = served(workflow, lambda *_: "here")
    (episode,) = asyncio.run(world.sample())
    assert episode.score.correct and world.episodes.account()["workflow_failures"] == 0


def test_a_model_that_stays_away_ends_the_run(served):
    async def workflow(episode):
        await episode.sample()
        try:
            await episode.served("user").chat([user("hi")])
        except Exception:
            return 0.0

    world, _ = served(workflow, lambda *_: "here")
    world.config.reward.away_s = 0.5
    with pytest.raises(RunError, match=r"^served.user: away for \d+ s \(reward.away_s\): user-0: "):
        asyncio.run(world.sample())


def test_an_episode_without_an_answer_of_a_model_is_never_trained_as_wrong(served):
    """It hangs; the workflow makes a score of 0 of that."""

    async def workflow(episode):
        await episode.sample()
        try:
            await episode.served("user").chat([user("hi")])
        except ServedModelError:
            return 0.0

    world, engine = served(workflow, lambda *_: 3.0, timeout_s=0.3)
    engine.start()
    (episode,) = asyncio.run(world.sample())
    assert episode.score.failed and not episode.score.trained and len(engine.asked) == 2  # tried again once
    assert "did not answer within 0.3 s" in episode.score.failure


def test_what_a_model_cannot_take_is_told_to_the_workflow(served):
    async def workflow(episode):
        await episode.sample()
        with pytest.raises(ServedModelError, match=r"^served.user: 30\d tokens leave none .*max_length=200"):
            await episode.served("user").chat([user("x" * 300)])
        return 1.0

    world, engine = served(workflow, lambda *_: "y" * 100)
    engine.start()
    (episode,) = asyncio.run(world.sample())
    assert episode.score.correct and not engine.asked


def test_a_model_that_is_not_served_ends_the_run(served):
    async def workflow(episode):
        await episode.sample()
        await episode.served("judge").chat([user("hi")])

    world, _ = served(workflow, lambda *_: "")
    with pytest.raises(ConfigError, match=r"^no model 'judge' is served beside the policy, but user: see served.judge"):
        asyncio.run(world.sample())


def test_agents_ask_a_served_model_by_its_name(served):
    found = {}

    async def workflow(episode):
        async with episode.openai() as api:
            found["first"] = await post(api, model="policy", messages=[user("one")])
            found["user"] = await post(api, model="user", messages=[user("one")], max_tokens=5)
            found["wrong"] = await post(api, model="judge", messages=[user("one")])
        return 1.0

    world, engine = served(workflow, lambda *_: "ok then")
    engine.start()
    (episode,) = asyncio.run(world.sample())
    status, reply = found["user"]
    assert status == 200 and reply["model"] == "user"
    assert reply["choices"][0]["message"]["content"] == "ok th" and reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"] == {"prompt_tokens": len("[user: one]>"), "completion_tokens": 5, "total_tokens": 17}
    status, reply = found["wrong"]
    assert status == 400 and reply["error"]["message"] == "model 'judge' is not served here: ask for policy or user"
    assert sampled(episode) == [*spelled("right"), END] and episode.answers == 1
    assert found["first"][1]["model"] == "policy" and world.episodes.account()["refused_calls"] == 1
