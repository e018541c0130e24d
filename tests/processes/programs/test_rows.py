"""What `areal rows` shows of a run's data."""

import json
import re
import shutil
import subprocess
import sys

import pytest

from areal_megatron.programs import rows
from tests.conftest import ROOT

GOOD = {"problem": "What is 6 * 7?", "answer": "42"}


@pytest.fixture
def show(world, tmp_path, capsys):
    """Shows these rows, with a model that has a chat template; returns (exit code, output, errors)."""
    model = shutil.copytree(world / "model", tmp_path / "model")
    (model / "chat_template.jinja").write_text("777 {{ messages[-1]['content'] }} 888")

    def show(found, *options):
        (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
        keys = ["name=x", f"model.path={model}", f"data.train={tmp_path / 'data.jsonl'}", "data.eval="]
        code = rows.main([str(ROOT / "configs/tiny_cpu.yaml"), *keys, "data.max_prompt_tokens=150", *options])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return show


def test_prompts_answers_rewards_and_what_is_left_out(show):
    bad = {"problem": "?", "answer": None}
    code, out, _ = show([GOOD, bad, GOOD | {"problem": "x" * 200}, bad, GOOD], "--rows", "1")
    assert code == 0
    assert "data.jsonl:1: " in out and "data.jsonl:3: " not in out
    assert "--- answer\n42\n--- reward math of '\\\\boxed{42}': 1" in out
    assert "3 of 5 rows can be used; 1 of them are longer than data.max_prompt_tokens and skipped" in out
    assert "2 rows keep the run from starting (data.unusable_rows=skip leaves them out):\n2 × field 'answer' is" in out
    assert "2 rows are left out:" in show([GOOD, bad, bad], "data.unusable_rows=skip")[1]


def test_no_number_of_rows_is_below_0(show, capsys):
    code, out, _ = show([GOOD], "--rows", "0")
    assert code == 0 and "data.jsonl:1: " not in out and "1 of 1 rows can be used" in out
    with pytest.raises(SystemExit, match=r"^2$"):
        show([GOOD, GOOD], "--rows", "-1")
    assert "--rows: expected a whole number, at least 0, is '-1'" in capsys.readouterr().err


def test_the_prompt_is_what_the_model_gets(show):
    _, out, _ = show([{"prompt": "1 + 1 = ", "answer": "2"}])
    assert "777 1 + 1 =  888" in out


def test_tests_are_counted_and_a_reward_that_fails_is_shown(show, isolation):
    tests = {"inputs": ["1", "2"], "outputs": ["1", "2"]}
    assert "reward code: 2 tests" in show([{"prompt": "1", "answer": tests}], "reward.function=code")[1]
    _, out, _ = show([{"prompt": "1", "answer": "2"}], "reward.function=tests.support.rewards:broken")
    assert "of '2' fails: RuntimeError: this reward always fails" in out


def test_supervised_rows_and_wrong_input(show):
    code, out, _ = show([{"prompt": "1 + 1 = ", "response": "2"}], "mode=sft")
    assert code == 0 and "--- not trained\n777 1 + 1 =  888\n--- trained\n2" in out and "rows: 1; samples: 1" in out
    code, out, _ = show([{"prompt": "1 + 1 = ", "chosen": "2", "rejected": "33"}], "mode=dpo")
    assert (
        code == 0
        and "data.jsonl:1, chosen: " in out
        and "data.jsonl:1, rejected: " in out
        and "rows: 1; answers: 2" in out
    )
    assert "--- not trained\n777 1 + 1 =  888\n--- trained\n2" in out and "888\n--- trained\n33" in out
    bad, answered, preferred = {"prompt": "1 + 1 = "}, {"response": "2"}, {"chosen": "2", "rejected": "33"}
    for mode, more, found in [
        ("sft", answered, "rows: 1; samples: 1"),
        ("dpo", preferred, "rows: 1; answers: 2"),
        ("reward_model", preferred | {"tools": []}, "rows: 1; answers: 2"),
    ]:
        code, out, _ = show([bad, bad | more, bad], f"mode={mode}")
        assert code == 0 and "data.jsonl:2" in out and found in out
        missing = f"2 × field '{next(iter(more))}' is missing"
        assert f"2 rows keep the run from starting (data.unusable_rows=skip leaves them out):\n{missing}" in out
        assert "2 rows are left out:" in show([bad, bad | more, bad], f"mode={mode}", "data.unusable_rows=skip")[1]
        unused = rf"data.jsonl: no row can be used: \S+data.jsonl:1: field '{next(iter(more))}' .*\(2 rows\)\n$"
        assert re.search(unused, show([bad, bad], f"mode={mode}")[2])
    code, _, err = show([{"text": "1"}])
    assert code == 2 and err.startswith("error: data.train: no row can be used: ")
    assert "data.jsonl:1: field 'prompt' is missing, found 'text'; rename 'text' to 'prompt'?" in err
    assert show([GOOD], "--eval")[2] == "error: data.eval: there is none\n"


CHATML = (
    "{%- for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{%- endfor %}"
    "{%- if add_generation_prompt %}<assistant>{%- endif %}"
)


def test_what_is_trained_of_a_conversation_is_in_colour(show, tmp_path, monkeypatch):
    (tmp_path / "model" / "chat_template.jinja").write_text(CHATML)
    turns = [("user", "1+1"), ("assistant", "2"), ("user", "2+2"), ("assistant", "4")]
    row = {"messages": [{"role": role, "content": said} for role, said in turns]}
    keys = ("mode=sft", "sft.max_tokens=60")
    _, out, _ = show([row, {"prompt": "1", "response": "2" * 60}], *keys)
    trained = ["2<eos>", "4<eos>"]
    assert [part.split("\n")[1] for part in out.split("---") if part.startswith(" trained")] == trained
    assert "rows: 1; samples: 1" in out and "1 × longer than sft.max_tokens=60, such as" in out
    assert "1 trained messages in 1 rows are beyond sft.max_tokens=30" in show([row], keys[0], "sft.max_tokens=30")[1]
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    code, out, _ = show([row], *keys)
    assert code == 0 and re.findall("\x1b\\[1;32m(.*?)\x1b\\[0m", out) == trained and "---" not in out


def test_it_needs_neither_torch_nor_vllm():
    imports = "import sys; from areal_megatron.programs import fetch, rows"
    code = f"{imports}; print(*{{'torch', 'vllm', 'megatron'}} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).strip() == ""
