"""Episodes in a process of another program: its rewards, its failures, and programs that cannot be started."""

import asyncio
import datetime
import math
import os
import shlex
import signal
import sys
import textwrap
from pathlib import Path

import pytest

import areal_megatron.workflows.environments
from areal_megatron.config import Config, ConfigError, RolloutConfig
from areal_megatron.workflows.workflow import check_workflow
from tests.support.programs import ProgramWorld

SERVING = Path(areal_megatron.workflows.environments.__file__).parent
AGENT = f"import sys; sys.path.insert(0, {str(SERVING)!r})" + textwrap.dedent("""
    import fractions, json, os, urllib.error, urllib.request
    from serving import is_over, serve

    def ask(episode, *said):
        body = json.dumps({"messages": [{"role": "user", "content": text} for text in said]}).encode()
        headers = {"Authorization": f"Bearer {episode.key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{episode.url}/chat/completions", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)["choices"][0]["message"]["content"]
        except urllib.error.HTTPError as e:
            raise RuntimeError(e.read().decode()) from None

    def run(episode):
        said, does = ask(episode, episode.row["asks"]), episode.row["does"]
        print("printed by an environment")
        if does == "leaves it to the reward function":
            return None
        if does == "fails":
            raise ValueError("broken")
        if does == "has a fraction":
            return fractions.Fraction(1, 4)
        if does == "has no number":
            return float("nan")
        if does == "has a thing":
            return object()
        if does == "fails in bytes":
            raise ValueError(b"\\xff".decode(errors="surrogateescape"))
        if does == "ends its process":
            os._exit(3)
        if does == "asks for ever":
            try:
                while True:
                    ask(episode, said)
            except RuntimeError as e:
                return 0.25 if is_over(e) else 1.0
        return {"right": 1.0, "keys": float("OPENAI_API_KEY" in os.environ)}[said]

    serve(run)
""")
RAW = textwrap.dedent("""
    import json, pathlib, sys
    for line in sys.stdin:
        message = json.loads(line)
        if "cancel" in message:
            pathlib.Path("cancelled").write_text(str(message["cancel"]))
        elif message["row"]["says"]:
            print(message["row"]["says"].replace("NUMBER", str(message["episode"])), flush=True)
        else:
            pathlib.Path("began").touch()
""")


class Place(ProgramWorld):
    def __init__(self, folder, program, *answer, **settings):
        (folder / "agent.py").write_text(program)
        super().__init__(folder, [sys.executable, str(folder / "agent.py")], *answer, **settings)

    async def sample(self, n=1, **row):
        return await super().sample(n, **{"does": "", "asks": "x", **row})


def test_episodes_run_there_side_by_side(tmp_path):
    async def then(place):
        first, second = await asyncio.gather(place.sample(3), place.sample(1))
        return [*first, *second, *await place.sample(1, asks="keys" * 20)]

    place = Place(tmp_path, AGENT, lambda prompt, _: "right" if len(prompt) < 80 else "keys")
    *found, keys = place.run(then)
    assert [one.score.score for one in found] == [1.0] * 4 and keys.score.score == 0.0
    assert all(one.answers == 1 and not one.score.failed for one in found)


def test_what_it_says_of_an_episode(tmp_path):
    async def then(place):
        does = ("leaves it to the reward function", "fails", "asks for ever")
        return [(await place.sample(does=one))[0] for one in does]

    scored, failed, over = Place(tmp_path, AGENT, turns=3).run(then)
    assert scored.score.correct and failed.score.failure == "rows.jsonl:8: ProgramError: ValueError: broken"
    assert over.score.score == 0.25 and over.answers == 3


def test_what_is_no_number_fails_its_episode_alone(tmp_path):
    async def then(place):
        kinds = ("has a fraction", "has no number", "has a thing", "fails in bytes", "leaves it to the reward function")
        found = await asyncio.gather(*(place.sample(asks="right", does=does) for does in kinds))
        return [(episode.score.score, episode.score.failure) for (episode,) in found]

    fraction, nan, thing, mute, other = Place(tmp_path, AGENT).run(then, timeout_s=30)
    assert fraction == (0.25, "") and not other[1]
    assert [failure.rpartition("ProgramError: ")[2] for _, failure in (nan, thing, mute)] == [
        "ValueError: Out of range float values are not JSON compliant",
        "TypeError: float() argument must be a string or a real number, not 'object'",
        "ValueError: \\udcff",
    ]


def test_rows_arrive_as_json_whatever_they_hold(tmp_path):
    program = """
        import json, sys
        for line in sys.stdin:
            message = json.loads(line, parse_constant=lambda name: "no JSON")
            print(json.dumps({"episode": message["episode"], "problem": str(message["row"])}), flush=True)
    """
    row = {"picture": b"ab", "share": math.nan, "day": datetime.date(2024, 2, 29)}
    (found,) = Place(tmp_path, textwrap.dedent(program)).run(lambda place: place.sample(**row))
    expected = {"does": "", "asks": "x", "picture": "YWI=", "share": None, "day": "2024-02-29"}
    assert found.score.failure == f"rows.jsonl:8: ProgramError: {expected}"


def test_a_program_that_ends_is_started_again(tmp_path):
    async def then(place):
        ended = await place.sample(does="ends its process")
        return [*ended, *await place.sample()]

    ended, after = Place(tmp_path, AGENT).run(then)
    assert (
        ended.score.failure.endswith("ProgramError: rollout.workflow_program ended with code 3") and after.score.correct
    )


def test_a_program_that_is_ending_takes_no_episode_of_its_successor_with_it(tmp_path, caplog):
    program = """
        import json, os, pathlib, sys, time
        place = pathlib.Path(sys.argv[0]).parent
        ends = not (place / "closed").exists()
        for line in sys.stdin:
            if ends:
                os.close(1)
                (place / "closed").touch()
                while not (place / "succeeded").exists():
                    time.sleep(0.01)
                os._exit(3)
            if not (place / "succeeded").exists():
                (place / "succeeded").touch()
                time.sleep(1.5)  # meanwhile the other has ended
            print(json.dumps({"episode": json.loads(line)["episode"], "problem": "heard"}), flush=True)
    """

    async def then(place):
        first = asyncio.ensure_future(place.sample())
        while not (tmp_path / "closed").exists() or place.program._process:
            await asyncio.sleep(0.02)
        await asyncio.gather(first, place.sample())

    Place(tmp_path, textwrap.dedent(program)).run(then)
    assert caplog.text.count("ended with code 3") == 1 and caplog.text.count("ProgramError: heard") > 1


def test_a_program_whose_child_holds_its_output_open_ends_all_the_same(tmp_path):
    program = """
        import json, pathlib, subprocess, sys
        child = subprocess.Popen(["sleep", "600"])
        pathlib.Path(sys.argv[0]).with_name("children").open("a").write(f"{child.pid} ")
        for line in sys.stdin:
            message = json.loads(line)
            if not message["row"]["says"]:
                sys.exit(5)
            print(json.dumps({"episode": message["episode"], "problem": message["row"]["says"]}), flush=True)
    """

    async def then(place):
        try:
            found = [await place.sample(says=""), await place.sample(says="heard")]
            await place.program.close()
            return [episode.score.failure.rpartition(": ")[2] for (episode,) in found]
        finally:
            for child in (tmp_path / "children").read_text().split():
                os.kill(int(child), signal.SIGKILL)
            await asyncio.sleep(0.5)  # asyncio then closes its own ends of the pipes

    found = Place(tmp_path, textwrap.dedent(program)).run(then, timeout_s=30)
    assert found == ["rollout.workflow_program ended with code 5", "heard"]


@pytest.mark.parametrize("says", ["no JSON", '{"episode": 0}', "[]", '{"episode": "0", "reward": 1}', "x" * 2_000_000])
def test_a_program_that_writes_anything_else_is_ended(tmp_path, says):
    (found,) = Place(tmp_path, RAW).run(lambda place: place.sample(says=says))
    problem = "rollout.workflow_program ended with code -9, having written what is no answer: "
    assert found.score.failure.startswith(f"rows.jsonl:8: ProgramError: {problem}") and len(found.score.failure) < 600


def test_an_answer_that_is_no_reward_fails_the_episode(tmp_path):
    says = '{"episode": NUMBER, "reward": "much"}'
    (found,) = Place(tmp_path, RAW).run(lambda place: place.sample(says=says))
    assert "WrongResult: " in found.score.failure and not found.score.trained


def test_an_episode_that_nobody_waits_for_is_cancelled(tmp_path, monkeypatch):
    async def then(place):
        sampling = asyncio.ensure_future(place.sample(says=""))
        while not (tmp_path / "began").exists():
            await asyncio.sleep(0.02)
        sampling.cancel()
        while not (tmp_path / "cancelled").exists():
            await asyncio.sleep(0.02)
        return (tmp_path / "cancelled").read_text()

    monkeypatch.chdir(tmp_path)
    assert Place(tmp_path, RAW).run(then) == "0"


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (["no such program"], "cannot be started: "),
        ([], "cannot be started: it is blank"),
        (
            [sys.executable, "-c", "exit('error: it has no data')"],
            "ends with code 1 before it has read anything: error: it",
        ),
    ],
)
def test_a_program_that_cannot_run_is_told_at_the_launch(command, problem):
    rollout = RolloutConfig(workflow="program", workflow_program=shlex.join(command) or " ")

    config = Config(name="x", updates=1, rollout=rollout)
    with pytest.raises(ConfigError, match=f"^rollout.workflow_program: {problem}"):
        check_workflow(config)
