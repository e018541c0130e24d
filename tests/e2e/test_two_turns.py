"""Learning in two turns: a question, a tool's answer, and the result (tools/make_lookup.py)."""

import subprocess
import sys

import pytest

from areal_megatron.run.folder import RunFolder
from tests.conftest import ROOT
from tools import demo


class TwoTurns:
    """A world with its warm-started model, and what is trained from it."""

    def __init__(self, folder, *options):
        self.folder, self.world = folder, folder / "world"
        self._run("-m", "tools.make_lookup", self.world, *options)
        rows = [f"model.path={self.world / 'model'}", f"data.train={self.world / 'sft.jsonl'}"]
        self.warm = self.launch("tiny_sft", "sft", *rows).hf

    def launch(self, config, name, *keys):
        self._run(
            "-m",
            "areal_megatron.launch.local",
            f"configs/{config}.yaml",
            f"runs_dir={self.folder}",
            f"name={name}",
            *keys,
        )
        return RunFolder(self.folder / name)

    def trained(self, name, model, *keys):
        rows = [f"data.train={self.world / 'train.jsonl'}", f"data.eval={self.world / 'heldout.jsonl'}"]
        task = ["rollout.workflow=tools.make_lookup:ask", "rollout.turns=2", f"model.path={model}"]
        return self.launch("tiny_cpu", name, *rows, *task, *keys)

    def _run(self, *arguments):
        subprocess.run([sys.executable, *map(str, arguments)], cwd=ROOT, check=True, timeout=2400)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_question_is_learned_as_a_template_that_drops_thinking_shows_it(tmp_path):
    """With `concat`, what is learned is not what the model meets in use."""
    two = TwoTurns(tmp_path)
    run = two.trained("individual", two.warm, "rollout.samples=individual")
    before, after = demo.accuracy(run.folder)
    concat = two.trained("concat", two.warm, "rollout.samples=concat")
    _, as_trained = demo.accuracy(concat.folder)
    used = two.trained("used", concat.hf, "rollout.samples=individual", "updates=1")
    as_used, _ = demo.accuracy(used.folder)
    print(
        f"individual: {before:.3f} → {after:.3f}; concat: {as_trained:.3f} with what was thought before, "
        f"{as_used:.3f} as the template shows it"
    )
    assert before < 0.6 and after >= 0.9


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_question_is_learned_where_the_template_keeps_thinking(tmp_path):
    two = TwoTurns(tmp_path, "--keep-thinking")
    longer = "updates=240"  # what was thought stays in the second turn's context, which takes longer to learn from
    before, after = demo.accuracy(two.trained("rl", two.warm, "rollout.samples=individual", longer).folder)
    print(f"{before:.3f} → {after:.3f}")
    assert before < 0.6 and after >= 0.9
