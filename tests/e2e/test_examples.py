"""The folders of examples/: each run starts and trains, with a tiny model on CPU in place of its own."""

import json
import subprocess
import sys

import pytest

from areal_megatron.observe.metrics import read_metrics
from areal_megatron.programs.audit import audit
from areal_megatron.run.folder import RunFolder
from tests.conftest import ROOT
from tests.support.chat_world import make_tokenizer
from tests.support.tiny_models import save_model

SMALL = {
    "model.dtype": "float32",
    "updates": 2,
    "batch_size": 16,
    "data.max_prompt_tokens": 1500,
    "trainer.tp": 1,
    "trainer.dp": 1,
    "ppo.minibatches": 2,
    "rollout.engines": 1,
    "rollout.group_size": 4,
    "rollout.max_new_tokens": 600,
    "rollout.max_running": 16,
    "rollout.filter_groups": False,  # a random model is always wrong
    "eval.every": 0,
    "eval.n": 1,
    "machine.slots": 2,
    "machine.device": "cpu",
}
FOLDERS = sorted(path.parent.name for path in (ROOT / "examples").glob("*/config.yaml"))


def gsm8k(path, numbers):
    """Writes rows as GSM8K has them."""
    rows = ({"question": f"What is {n} + {n}?", "answer": f"Twice.\n#### {2 * n}"} for n in numbers)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.soak
@pytest.mark.parametrize("name", FOLDERS)
def test_it_trains(name, local_run, tmp_path):
    if name == "openai_agents":
        pytest.importorskip("agents")
    model, data = tmp_path / "model", {key: tmp_path / f"{key}.jsonl" for key in ("train", "eval")}
    make_tokenizer(save_model("qwen3", model))
    gsm8k(data["train"], range(64))
    gsm8k(data["eval"], range(100, 104))
    program = ROOT / "examples" / name / "make_data.py"
    if name == "python_tool":
        make = "import sys; from pathlib import Path; from examples.python_tool import make_data as m; "
        make += "m.FOLDER = Path(sys.argv[1]); m.main(*sys.argv[2:])"
        subprocess.run([sys.executable, "-c", make, tmp_path, *data.values()], cwd=ROOT, check=True, timeout=60)
    elif program.exists():
        make = f"import sys; from pathlib import Path; from examples.{name} import make_data as m; "
        make += "m.FOLDER = Path(sys.argv[1]); m.main()"
        subprocess.run([sys.executable, "-c", make, tmp_path], cwd=ROOT, check=True, timeout=60)
    if program.exists():
        data["eval"] = tmp_path / "heldout.jsonl"
    keys = {**SMALL, "model.path": model, **{f"data.{key}": path for key, path in data.items()}}
    overrides = [f"{key}={value}" for key, value in keys.items()]
    run = local_run("example", *overrides, config=f"examples/{name}/config.yaml")
    assert run.wait() == 0, run.output
    updates = [line for line in read_metrics(RunFolder(run.folder)) if line["kind"] == "update"]
    assert len(updates) == 2 and audit(RunFolder(run.folder)) == []
