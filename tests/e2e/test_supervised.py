"""Supervised runs: stopped, killed and resumed; what they learn from pairs."""

import json
import math
import os
import random
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from areal_megatron.checkpoint.folder import complete
from areal_megatron.data.dumps import dumped
from areal_megatron.data.dumps import read as read_dump
from areal_megatron.data.pairs import read_pairs
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.observe.metrics import read_metrics
from areal_megatron.page.report import write_report
from areal_megatron.run.folder import RunFolder
from tests.e2e.test_run import small
from tools.make_arithmetic import good_answer, hasty_answer, make_tokenizer

UPDATES = 24


@pytest.fixture
def fine_tuning(world, tmp_path):
    """Overrides of a supervised run with a learning rate that falls; 300 examples, so that a second epoch begins."""
    lines = (world / "sft.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(lines[:300]))
    (tmp_path / "held-out.jsonl").write_text("".join(lines[-20:]))
    return [
        "mode=sft",
        f"model.path={world / 'model'}",
        f"data.train={tmp_path / 'train.jsonl'}",
        f"data.eval={tmp_path / 'held-out.jsonl'}",
        "data.allow_overlap=true",
        f"updates={UPDATES}",
        "batch_size=16",
        "optimizer.schedule=cosine",
        "optimizer.lr=1e-3",
        "checkpoint.every=8",
        "checkpoint.keep=10",
        "checkpoint.hf_every=6",
        "eval.every=12",
    ]


def steps(run: RunFolder, kind: str = "sft") -> list[dict]:
    return [line for line in read_metrics(run) if line["kind"] == kind]


@pytest.mark.soak  # test_resume.py resumes RL, of the same trainers
def test_a_resumed_run_is_bit_equal_to_one_that_was_never_stopped(local_run, fine_tuning, tmp_path):
    """The one is asked to stop, as Slurm does before it preempts, and then loses its trainer."""
    straight = local_run("straight", *fine_tuning)
    stopped = local_run("stopped", *fine_tuning)
    run = RunFolder(stopped.folder)
    stopped.wait_for(lambda: steps(run))
    run.stop.touch()
    assert stopped.wait() == 75, stopped.output
    first = len(steps(run))
    assert 0 < first < UPDATES and complete(run)[-1].name == f"version-{first:06d}"
    again = local_run("stopped", *fine_tuning, "resume=auto", "--restarts=1", output="again")
    again.wait_for(lambda: complete(run)[-1].name > f"version-{first:06d}")
    os.kill(again.pid("trainer-0"), signal.SIGKILL)
    assert again.wait() == 0, again.output
    assert "starting again, 0 restarts are left" in again.output
    assert straight.wait() == 0, straight.output

    whole = RunFolder(straight.folder)
    assert [line["version"] for line in steps(run)] == [*range(1, UPDATES + 1)]
    for name in ("loss", "lr", "grad_norm"):
        assert [line[name] for line in steps(run)] == [line[name] for line in steps(whole)]
    assert steps(whole)[-1]["lr"] < 1e-5 < max(line["lr"] for line in steps(whole))
    expected, found = (load_file(each.hf / "model.safetensors") for each in (whole, run))
    assert expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in expected)
    for each in (whole, run):
        exported = load_file(each.exports / f"version-{UPDATES:06d}" / "model.safetensors")
        assert exported.keys() == expected.keys()
        assert all(torch.equal(expected[name], exported[name]) for name in expected)
    held = {folder.name for folder in whole.exports.iterdir()} | {"version-000018"}
    # that one is left out if the two before it take longer than its updates
    assert sorted(held) == [f"version-{version:06d}" for version in (6, 12, 18, UPDATES)]

    evaluations = steps(whole, "eval")
    assert [line["version"] for line in evaluations] == [0, 12, 24]
    assert evaluations[-1]["loss"] < evaluations[0]["loss"] and evaluations[-1]["accuracy"] > 0.3
    assert evaluations == [
        line | {"time": own["time"]} for line, own in zip(steps(run, "eval"), evaluations, strict=True)
    ]


@pytest.mark.soak  # test_checkpoint.py resumes in other layouts
def test_two_replicas_go_on_where_one_was(local_run, fine_tuning):
    fine_tuning += ["data.eval=", "checkpoint.hf_every=0"]
    straight = local_run("straight", *fine_tuning)
    assert straight.wait() == 0, straight.output
    middle = RunFolder(straight.folder).checkpoints / "version-000016"
    replicas = ["trainer.dp=2", "machine.slots=2", f"resume={middle}", "checkpoint.every=0"]
    other = local_run("other", *fine_tuning, *replicas)
    assert other.wait() == 0, other.output
    losses = {line["version"]: line["loss"] for line in steps(RunFolder(straight.folder))}
    found = steps(RunFolder(other.folder))
    assert len(found) == UPDATES - 16
    for line in found:
        assert line["loss"] == pytest.approx(losses[line["version"]], abs=1e-4)


TEMPLATE = (
    "{%- for m in messages %}{%- if m.role == 'user' %}{{ m.content }}{%- else %}"
    "{%- if loop.last and m.reasoning_content %}{{ m.reasoning_content + ' ' }}{%- endif %}{{ m.content + eos_token }}"
    "{%- endif %}{%- endfor %}"
)


def test_conversations_are_learned_as_the_template_shows_them(local_run, world, tmp_path):
    """Two questions a row, and a template that drops the working of the first answer: two samples. The last held-out
    loss is that of the exported model on texts rendered by hand, each row counting alike."""
    model = shutil.copytree(world / "model", tmp_path / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    draw, rows, texts = random.Random(3), [], []
    for _ in range(240):
        messages, before, seen = [], "", []
        for _ in range(draw.choice((1, 2))):
            a, b = draw.randint(10, 59), draw.randint(10, 59)
            working, _, boxed = good_answer(a, b).rpartition(" ")
            asked = f"{a}+{b}="
            messages.append({"role": "user", "content": asked})
            messages.append({"role": "assistant", "thinking": working, "content": boxed})
            seen.append((before + asked, f"{working} {boxed}<eos>"))
            before += f"{asked}{boxed}<eos>"
        rows.append(json.dumps({"messages": messages}))
        texts.append(seen)
    (tmp_path / "train.jsonl").write_text("\n".join(rows[40:]))
    (tmp_path / "held-out.jsonl").write_text("\n".join(rows[:40]))
    keys = {
        "mode": "sft",
        "model.path": model,
        "data.train": tmp_path / "train.jsonl",
        "data.eval": tmp_path / "held-out.jsonl",
        "data.allow_overlap": "true",
        "sft.mean": "row",
        "updates": 20,
        "batch_size": 16,
        "optimizer.lr": 1e-3,
    }
    started = local_run("conversations", *(f"{key}={value}" for key, value in keys.items()))
    assert started.wait() == 0, started.output
    run, library, losses = RunFolder(started.folder), make_tokenizer(), []
    trained = AutoModelForCausalLM.from_pretrained(run.hf, dtype=torch.float32)
    for seen in texts[:40]:
        own = []
        for asked, answer in seen:
            ids, begin = library(asked + answer).input_ids, len(library(asked).input_ids)
            with torch.no_grad():
                logprobs = trained(torch.tensor([ids])).logits[0].log_softmax(-1)
            own += [-logprobs[place - 1, ids[place]].item() for place in range(begin, len(ids))]
        losses.append(sum(own) / len(own))
    before, after = steps(run, "eval")
    assert after["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4) and after["loss"] < before["loss"] / 2
    assert after["items"] == sum(map(len, texts[:40])) > 40
    assert [line["version"] for line in steps(run)] == [*range(1, 21)]


@pytest.mark.parametrize("mode", [pytest.param("dpo", marks=pytest.mark.soak), "reward_model"])
def test_pairs_are_learned_in_seconds(local_run, world, tmp_path, mode):
    """Answers with working against hasty ones. What is exported of a reward model is what transformers reads."""
    sums = [(a, b) for a in range(10, 60) for b in range(10, 60)]
    pairs = [{"prompt": f"{a}+{b}=", "chosen": good_answer(a, b), "rejected": hasty_answer(a, b)} for a, b in sums[::5]]
    lines = [json.dumps(pair) for pair in random.Random(1).sample(pairs, len(pairs))]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines[100:]))
    (tmp_path / "held-out.jsonl").write_text("\n".join(lines[:100]))
    keys = {
        "mode": mode,
        "model.path": world / "model",
        "data.train": tmp_path / "pairs.jsonl",
        "data.eval": tmp_path / "held-out.jsonl",
        "updates": 30,
        "batch_size": 16,
        "optimizer.lr": 1e-3,
        "checkpoint.every": 30,
        "checkpoint.hf_every": 30,
    }
    started = local_run(mode, *(f"{key}={value}" for key, value in keys.items()))
    assert started.wait() == 0, started.output
    run = RunFolder(started.folder)
    before, after = steps(run, "eval")
    assert before["loss"] == pytest.approx(math.log(2), abs=1e-3) and before["accuracy"] < 0.6
    assert after["loss"] < 0.3 and after["accuracy"] >= 0.95
    assert f"held-out accuracy {100 * before['accuracy']:.0f}% (version 0) → " in started.output
    folders = run.hf, run.exports / "version-000030"
    whole, exported = (load_file(folder / "model.safetensors") for folder in folders)
    assert whole.keys() == exported.keys() and all(torch.equal(whole[name], exported[name]) for name in whole)
    if mode == "reward_model":
        model = AutoModelForSequenceClassification.from_pretrained(folders[1], dtype=torch.float32)
        tokenizer = Tokenizer(folders[1])
        rows = read_pairs(tmp_path / "held-out.jsonl", tokenizer)
        assert model.config.num_labels == 1 and model.config.pad_token_id == tokenizer.pad_token is not None
        scores = [[model(torch.from_numpy(t[None])).logits.item() for t in (row.chosen, row.rejected)] for row in rows]
        assert sum(chosen > rejected for chosen, rejected in scores) == round(100 * after["accuracy"])
        assert write_report(run, tmp_path / "report.html") is None
        assert "reward model, 30 of 30 steps" in (tmp_path / "report.html").read_text()


@pytest.fixture
def reward_model(world, tmp_path):
    """The folder of a reward model with a random head, which prefers some texts by far."""
    torch.manual_seed(5)
    model = AutoModelForSequenceClassification.from_pretrained(world / "model", num_labels=1, dtype=torch.float32)
    model.score.weight.data = 0.3 * torch.randn_like(model.score.weight)
    model.save_pretrained(tmp_path / "scorer")
    make_tokenizer().save_pretrained(tmp_path / "scorer")
    return tmp_path / "scorer"


@pytest.mark.soak
def test_answers_are_trained_on_the_scores_of_a_reward_model(local_run, world, reward_model):
    """Its engine is killed meanwhile: answers wait until it is there again, and no reward fails. The prompts have no
    right answers."""
    prompts = world / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{a}+{a + 1}="}}\n' for a in range(10, 90)))
    changes = {
        "data.train": prompts,
        "data.eval": "",
        "reward.function": "model",
        "served.reward.path": reward_model,
        "reward.truncated": "scored",
        "rollout.dump": True,
        "rollout.max_staleness": 1,
        "machine.slots": 3,
        "updates": 5,
    }
    started = local_run("scored", *small(world, **changes), "--restarts=1")
    run = RunFolder(started.folder)
    started.wait_for(lambda: steps(run, "update"))
    os.kill(started.pid("reward-0"), signal.SIGKILL)
    assert started.wait() == 0, started.output
    assert "reward-0 was killed by SIGKILL" in started.output
    updates = steps(run, "update")
    assert len(updates) == 5 and updates[-1]["reward_failures"] == 0

    model = AutoModelForSequenceClassification.from_pretrained(reward_model, dtype=torch.float32)
    tokenizer, spread = Tokenizer(reward_model), []
    for path in dumped(run.trajectories).values():
        for trajectory in read_dump(path).trajectories:
            (response,) = tokenizer.responses([tokenizer.decode(trajectory.response.tolist())])
            with torch.no_grad():
                score = float(model(torch.tensor([[*trajectory.prompt.tolist(), *response]])).logits)
            assert trajectory.reward == pytest.approx(-5 + 10 / (1 + math.exp(-score)), abs=2e-3)
            spread.append(trajectory.reward)
    assert len(spread) == 5 * 32 and max(spread) - min(spread) > 1
