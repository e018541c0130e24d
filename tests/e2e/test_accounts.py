"""The recipe of AReaL-SEA whole and small, on the domain of tools/accounts in τ²-bench's package: SFT on conversations
in the published form, RL against a scripted and against a served user, and an evaluation of the workflow."""

import os
import re
import subprocess
import sys
from statistics import mean

import pytest

from areal_megatron.data import dumps
from areal_megatron.observe.metrics import read_metrics
from areal_megatron.programs.audit import audit
from areal_megatron.run.folder import RunFolder
from tests.conftest import ROOT
from tests.support.published_tau2 import FILE, python
from tools import demo

DOMAIN = ROOT / "tools/accounts/domain.py"


class Recipe:
    """A world with the models that are trained in it."""

    def __init__(self, folder, packages):
        self.folder, self.world, self.packages = folder, folder / "world", packages
        self._run("-m", "tools.accounts.make_world", self.world)
        for split in ("train", "test"):
            rows = python(packages, FILE, "rows", "accounts", "--split", split, "--domains", DOMAIN)
            (self.world / f"{split}.jsonl").write_text(rows.stdout)

    def sft(self, of, updates):
        """Returns the run that has taught the agent or the user from its conversations."""
        own = [f"model.path={self.world / of}", f"data.train={self.world / f'{of}-sft.jsonl'}", f"updates={updates}"]
        return self._train("tiny_sft", f"{of}-sft", *own)

    def rl(self, name, model, user, *keys):
        """`user`: the benchmark's name for its kind."""
        rows = [f"data.train={self.world / 'train.jsonl'}", f"data.eval={self.world / 'test.jsonl'}"]
        task = ["rollout.workflow=program", f"rollout.workflow_program={self.program(user)}", "rollout.turns=6"]
        lengths = ["data.max_prompt_tokens=64", "rollout.max_new_tokens=64"]
        own = [f"model.path={model}", "rollout.samples=individual", "rollout.dump=true"]
        return self._train("tiny_cpu", name, *rows, *task, *lengths, *own, *keys)

    def program(self, user):
        return f"env PYTHONPATH={self.packages} {sys.executable} {FILE} serve --user {user} --domains {DOMAIN}"

    def evaluate(self, *arguments):
        """Returns what `areal evaluate` prints."""
        return self._run("-m", "areal_megatron.launch.evaluate", *arguments)

    def _train(self, config, name, *keys):
        own = [f"runs_dir={self.folder}", f"name={name}"]
        self._run("-m", "areal_megatron.launch.local", f"configs/{config}.yaml", *own, *keys)
        return RunFolder(self.folder / name)

    def _run(self, *arguments):
        command = [sys.executable, *map(str, arguments)]
        done = subprocess.run(command, cwd=ROOT, env=os.environ, text=True, stdout=subprocess.PIPE, timeout=3600)
        assert done.returncode == 0, done.stdout
        return done.stdout


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_small_domain_is_learned_against_a_scripted_user(tmp_path, tau2_packages):
    """The reward is that of the batches, 1,280 episodes at either end; the held-out tasks are 90."""
    recipe = Recipe(tmp_path, tau2_packages)
    warm = recipe.sft("agent", 350).hf
    run = recipe.rl("rl", warm, "accounts_user", "updates=120", "batch_size=128", "optimizer.lr=3e-4")
    updates = [line for line in read_metrics(run) if line["kind"] == "update"]
    first, last = (mean(line["accuracy"] for line in part) for part in (updates[:10], updates[-10:]))
    before, after = demo.accuracy(run.folder)
    print(f"batches: {first:.3f} → {last:.3f}; held out: {before:.3f} → {after:.3f}")
    assert last >= first + 0.3 and after >= before + 0.15
    assert audit(run) == []


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_recipe_runs_whole_against_a_served_user(tmp_path, tau2_packages):
    """Few steps of each: SFT of agent and user, RL, and an evaluation with pass^k."""
    recipe = Recipe(tmp_path, tau2_packages)
    user, warm = recipe.sft("user", 80).hf, recipe.sft("agent", 120).hf
    sizes = ["updates=2", "batch_size=16", "rollout.group_size=4", "machine.slots=3", "eval.share=1"]
    served = [f"served.user.path={user}", "served.user.max_new_tokens=8", "served.user.max_length=256"]
    run = recipe.rl("rl", warm, "user_simulator", *sizes, *served)
    updates = [line for line in read_metrics(run) if line["kind"] == "update"]
    assert len(updates) == 2 and audit(run) == []
    assert updates[-1]["workflow_failures"] == updates[-1]["reward_failures"] == 0
    assert all(1 <= line["turns_mean"] <= 6 for line in updates)
    trained = [t for path in dumps.dumped(run.trajectories).values() for t in dumps.read(path).trajectories]
    assert len(trained) > 32 and all(t.loss_mask.all() for t in trained), "each answer is a sample, and nothing else"
    assert max(len(t.prompt) for t in trained) > 20, "later answers follow what the user and the tools said"

    told = recipe.evaluate(
        *(run.hf, recipe.world / "test.jsonl", "--n", 2, "--max-new-tokens", 64, "--out", tmp_path / "evaluation"),
        *("--workflow", "program", "--turns", 6, "--program", recipe.program("user_simulator"), "--user", user),
    )
    assert re.search(r"^pass\^2 +\d+\.\d\d%", told, re.MULTILINE) and "90 items × 2 answers" in told
