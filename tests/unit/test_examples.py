"""The folders of examples/: each config fits the GPUs that its README names, with the figures that stand there; and
what their programs do. tests/e2e/test_examples.py starts them."""

import asyncio
import json
import re
import shlex
from types import SimpleNamespace

import pytest

from areal_megatron.planning import plan
from examples.python_tool import make_data as python_tool
from examples.wordle import make_data as words
from examples.wordle import wordle
from tests.conftest import ROOT
from tests.support.chat_world import END, World, spelled

FOLDERS = sorted(path.parent for path in (ROOT / "examples").glob("*/config.yaml"))
GIB = 1 << 30


def command(folder, program):
    """The words of the README's line that calls `areal PROGRAM`."""
    (line,) = re.findall(rf"^areal {program} (.*)$", (folder / "README.md").read_text(), re.MULTILINE)
    return shlex.split(line)


def test_there_are_six_and_the_index_has_each():
    index = (ROOT / "examples" / "README.md").read_text()
    assert len(FOLDERS) == 6 and re.findall(r"^\| \[\w[\w.]*\]\(([\w.]+)/README\.md\)", index, re.MULTILINE) == [
        folder.name for folder in FOLDERS
    ]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_it_fits_the_gpus_that_its_readme_names(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert plan.main([*command(folder, "plan"), f"--json={tmp_path / 'plan.json'}"]) == 0, capsys.readouterr().err
    memory = json.loads((tmp_path / "plan.json").read_text())["memory"]
    text = (folder / "README.md").read_text()
    for pool, name in (("trainer", "a trainer rank"), ("engine", "an engine rank")):
        assert f"{name} {memory[pool]['bytes'] / GIB:.2f} GiB" in text
    assert "**Not run yet**" in text or "](curve.svg)" in text


def test_marks_of_wordle():
    """Worked out by hand: a letter is marked as often as the word has it, in its place first."""
    assert wordle.marks("crane", "crane") == "GGGGG"
    assert wordle.marks("speed", "abide") == "--Y-Y"
    assert wordle.marks("eagle", "exact") == "GY---"
    assert wordle.marks("llama", "label") == "GYY--"
    assert wordle.marks("geese", "eerie") == "-GY-G"


def test_a_game_of_wordle():
    said = []

    def play(*answers):
        left = list(answers)

        async def sample():
            return left.pop(0)

        prompt = SimpleNamespace(answer="crane")
        return asyncio.run(wordle.play(SimpleNamespace(prompt=prompt, turns=3, sample=sample, say=said.append)))

    assert play("I think of [Crane]") == 1 and said == []
    assert play("no idea", "[other] or [react]", "[crane]") == 0.8
    assert said == ["Please end with a guess such as [crane].", "react\nYYGY-"]
    assert play("[react]", "[react]", "[react]") == 0


def test_words_of_wordle_are_held_out(monkeypatch, tmp_path):
    monkeypatch.setattr(words, "FOLDER", tmp_path)
    words.main()
    heldout, train = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("heldout", "train")
    )
    rows = heldout + train
    assert len(heldout) == 20 and len(train) > 200
    assert len({row["answer"] for row in rows}) == len({row["prompt"] for row in rows}) == len(rows)
    assert all(re.fullmatch("[a-z]{5}", row["answer"]) for row in rows)


def test_prompts_with_a_tool_say_so(monkeypatch, tmp_path):
    monkeypatch.setattr(python_tool, "FOLDER", tmp_path)
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps({"question": "6 × 7?", "answer": "It is\n#### 42"}) + "\n")
    python_tool.main(*[str(tmp_path / "gsm8k.jsonl")] * 2)
    row = json.loads((tmp_path / "heldout.jsonl").read_text())
    assert row["answer"] == "42" and row["prompt"].startswith("6 × 7?") and row["prompt"].endswith(python_tool.TOOL)


def test_an_agent_of_the_sdk_is_one_trajectory(tmp_path):
    """The real SDK, which is in no list of requirements."""
    pytest.importorskip("agents")
    from examples.openai_agents.agent import run

    call = '<tool_call>\n{"name": "calculate", "arguments": {"formula": "6 * (3 + 4)"}}\n</tool_call>'
    world = World(tmp_path, run, lambda _, number: [call, "right"][number], turns=4, max_new_tokens=2000)
    world.config.data.max_prompt_tokens = 2000
    (ended,) = asyncio.run(world.sample())
    context = ended.context
    sampled = [token for text in (call, "right") for token in [*spelled(text), END]]
    assert context.tokens[context.loss_mask == 1].tolist() == sampled, "both answers, and nothing else"
    said = world.tokenizer.decode(context.tokens[context.loss_mask == 0])
    assert "42" in said and ended.score.correct and world.judge.asked == ["right"]
    assert world.episodes.account() == {"workflow_failures": 0, "refused_calls": 0}
