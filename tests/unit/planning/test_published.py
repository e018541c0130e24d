"""The configs and sbatch scripts of the published runs: sizes, hyper-parameters, and what the scripts start."""

import json
import os
import re
import signal
import subprocess
from math import prod
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from areal_megatron.config import Config, config_file
from areal_megatron.models.architecture import architecture, read_config
from areal_megatron.planning.memory.engine import kv_tokens
from areal_megatron.planning.memory.parts import GIB
from areal_megatron.planning.plan import main, plan
from areal_megatron.planning.pools import Node
from areal_megatron.reshard.plan import Planner
from areal_megatron.reshard.trainer_layout import MegatronSizes

ROOT = Path(__file__).resolve().parents[3]
MODELS = ROOT / "configs/models"
SCRIPTS = sorted((ROOT / "slurm").glob("train_*.sh"))
GPU_GIB = 80


class Published(NamedTuple):
    nodes: int = 0
    """0 if not published, or for another GPU."""
    updates: int = 0
    """0 if not published."""
    prompts: int = 512
    answers: int = 16
    prompt_tokens: int = 1024
    new_tokens: int = 27648
    microbatch_tokens: int = 32768
    minibatches: int = 4
    clip: tuple[float, float] = (0.2, 0.2)
    lr: float = 2e-5
    weight_decay: float = 0.05
    adam: tuple[float, ...] = (0.9, 0.95, 1e-5)
    clip_grad: float = 1.0
    warmup_steps: int = 1
    correction: tuple[float, float] = (0, 0)
    """truncate, mask_high"""
    temperature: float = 1.0
    staleness: int = 8
    engines: str = ""
    """Engines × tp, then tp × pp × dp of the trainer; empty if the layout is not published."""


MASKED = (5, 5)
"""AReaL's behav_imp_weight_cap, above which it masks."""
BOBA2 = Published(
    correction=MASKED, prompts=128, prompt_tokens=2048, microbatch_tokens=30720, minibatches=1, staleness=16
)
PUBLISHED = {
    # arXiv 2505.24298, Table 1 (nodes, PPO steps) and Table 3 (a warm-up of 0.001 of all steps); staleness: 8 for math,
    # 4 for code; Equation 5 leaves its weights as they are
    "r1_1.5b": Published(16, 250),
    "r1_7b": Published(24, 250),
    "r1_14b": Published(32, 80, staleness=4),
    "r1_32b": Published(48, 60, staleness=4),
    # blog/AReaL_v0_3.md (batch, mini-batches, staleness), examples/configs/qwen3-code/8b.yaml and 14b.yaml of AReaL
    "qwen3_8b": BOBA2._replace(nodes=24, engines="80 × 2, 2 × 4 × 4"),
    "qwen3_14b": BOBA2._replace(nodes=48, engines="80 × 4, 2 × 8 × 4"),
    "qwen3_32b": BOBA2,
}
PARAMETERS = {
    "DeepSeek-R1-Distill-Qwen-1.5B": 1.777,
    "DeepSeek-R1-Distill-Qwen-7B": 7.616,
    "DeepSeek-R1-Distill-Qwen-14B": 14.770,
    "DeepSeek-R1-Distill-Qwen-32B": 32.764,
    "Qwen3-8B": 8.191,
    "Qwen3-14B": 14.768,
    "Qwen3-32B": 32.762,
    "Qwen3-235B-A22B-Thinking-2507": 235.094,
    "Qwen2.5-72B-Instruct": 72.706,
}
"""Billions, counted in the published checkpoints."""


def load(run):
    """Returns the run's config with configs/models/ in place of the folder of its model."""
    path = ROOT / "configs" / f"{run}.yaml"
    name = Path(config_file.load(path).model.path).name
    return config_file.load(path, [f"model.path={MODELS / name}"])


def option(script, name):
    return re.search(rf"^#SBATCH --{name}=(\S+)$", script.read_text(), re.MULTILINE)[1]


def named_config(script):
    return re.search(r"^CONFIG=configs/(\S+)\.yaml$", script.read_text(), re.MULTILINE)[1]


def planned(run):
    (script,) = (s for s in SCRIPTS if named_config(s) == run)
    config = load(run)
    config.machine.device = "cuda"
    gpus = tuple(range(int(option(script, "gpus-per-node"))))
    nodes = [Node(f"node{number:02}", gpus) for number in range(int(option(script, "nodes")))]
    return config, plan(config, nodes, gpu_gib=GPU_GIB, weights=False)


@pytest.mark.parametrize("run", PUBLISHED)
def test_a_config_is_short_says_whose_numbers_it_has_and_repeats_no_default(run):
    text = (ROOT / "configs" / f"{run}.yaml").read_text()
    assert len(text.splitlines()) <= 30
    assert re.match(r"# .*(arXiv 2505\.24298|AReaL's (blog|examples)).*docs/published_runs\.md$", text.splitlines()[0])
    tree, defaults = yaml.safe_load(text), Config()
    for key, value in tree.items():
        for name, leaf in value.items() if isinstance(value, dict) else [(key, value)]:
            section = getattr(defaults, key) if isinstance(value, dict) else defaults
            assert getattr(section, name) != leaf, f"{key}.{name}"


@pytest.mark.parametrize("run", PUBLISHED)
def test_hyper_parameters_are_the_published_ones(run):
    config, published = load(run), PUBLISHED[run]
    t, o, p, r = config.trainer, config.optimizer, config.ppo, config.rollout
    layout = f"{r.engines} × {r.tp}, {t.tp} × {t.pp} × {t.dp}"
    found = Published(
        published.nodes,
        config.updates if published.updates else 0,
        config.groups_per_batch,
        r.group_size,
        config.data.max_prompt_tokens,
        r.max_new_tokens,
        t.microbatch_tokens,
        p.minibatches,
        (p.clip_low, p.clip_high),
        o.lr,
        o.weight_decay,
        (o.beta1, o.beta2, o.eps),
        o.clip_grad,
        o.warmup_steps if o.schedule == "constant" else None,
        (p.correction.truncate, p.correction.mask_high),
        r.temperature,
        r.max_staleness,
        layout if published.engines else "",
    )
    assert found == published
    assert (p.objective, config.reward.wrong, config.reward.right) == ("decoupled", -5.0, 5.0)


BOBA_106K = "hf://datasets/inclusionAI/AReaL-boba-Data/AReaL-boba-106k.jsonl"
DEEPCODER = "agentica-org/DeepCoder-Preview-Dataset"
BOBA2_CODE = "hf://datasets/inclusionAI/AReaL-boba-2-RL-Code/train/train.jsonl"
SOURCES = {
    # base that was trained, data sets that are trained and evaluated here
    "r1_1.5b": ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", {BOBA_106K}, "HuggingFaceH4/aime_2024"),
    "r1_7b": ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", {BOBA_106K}, "HuggingFaceH4/aime_2024"),
    "r1_14b": ("deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", {DEEPCODER}, DEEPCODER),
    "r1_32b": ("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", {DEEPCODER}, DEEPCODER),
    "qwen3_8b": ("Qwen/Qwen3-8B", {BOBA2_CODE}, DEEPCODER),
    "qwen3_14b": ("Qwen/Qwen3-14B", {BOBA2_CODE}, DEEPCODER),
    "qwen3_32b": ("Qwen/Qwen3-32B", {BOBA2_CODE}, DEEPCODER),
}
NAMED = {
    BOBA_106K: "AReaL-boba-106k",
    DEEPCODER: "DeepCoder",
    BOBA2_CODE: "AReaL-boba-2-RL-Code",
    "HuggingFaceH4/aime_2024": "AIME24",
}
"""What the docs call them."""


def name_of(source):
    """Returns the name of the data set, or of the file where a repository holds several."""
    return source if source.startswith("hf://") else source.strip().partition(":")[0]


@pytest.mark.parametrize("run", PUBLISHED)
def test_the_docs_say_which_base_and_data_a_config_has_and_what_differs(run):
    config = config_file.load(ROOT / "configs" / f"{run}.yaml")
    train = {name_of(source) for source in config.data.train.split(",")}
    assert (config.model.path, train, name_of(config.data.eval)) == SOURCES[run]
    page = (ROOT / "docs/published_runs.md").read_text()
    (row, *_) = (line for line in page.splitlines() if re.match(rf"\| (`\S+`, )*`{run}`(, `\S+`)* \|", line))
    _, _, data, differs = (cell.strip() for cell in row.strip("|").split("|"))
    trained, _, evaluated = data.partition("; ")
    assert trained == ", ".join(NAMED[name] for name in train) and NAMED[SOURCES[run][2]] in evaluated
    assert differs, "none of them is the published run in all"
    if PUBLISHED[run].engines == "":
        assert "layout" in differs


@pytest.mark.parametrize("run", PUBLISHED)
def test_it_fits_the_nodes_of_its_script_with_a_tenth_of_a_gpu_free(run):
    config, found = planned(run)
    nodes = len(found.placement.nodes)
    assert PUBLISHED[run].nodes in (nodes, 0) and found.placement.idle == 0
    assert found.memory.trainer.total <= 0.9 * GPU_GIB * GIB
    share = config.rollout.engines * config.rollout.tp / (8 * nodes)
    assert 0.6 <= share <= 0.85


NETS = ("qwen3_next_80b", "qwen3.5_9b", "qwen3.5_35b_a3b", "qwen3.5_397b_a17b")
OTHERS = ("moonlight", "qwen3_30b_a3b", "glm4.7_flash", *NETS, "glm4.5_air", "qwen3_235b", "glm4.5", "deepseek_v3")
"""Models for which nothing but their sizes is published."""


@pytest.mark.parametrize("run", OTHERS)
def test_other_models_fit_the_nodes_of_their_scripts(run):
    """Every GPU has work, and the docs say what becomes of its memory."""
    config, found = planned(run)
    trainer = found.memory.trainer.total / GIB
    tokens = kv_tokens(config, read_config(config.model.path), found.memory.engine.of("KV cache"), True)
    assert found.placement.idle == 0 and trainer <= 0.9 * GPU_GIB
    assert tokens >= 8000 * config.rollout.max_running and config.rollout.max_running % config.rollout.group_size == 0
    row = next(r for r in (ROOT / "docs/published_runs.md").read_text().splitlines() if f", `{run}` |" in r)
    assert f"| {len(found.placement.nodes)} |" in row and f"| {trainer:.2f} ({trainer / GPU_GIB:.0%}) |" in row
    assert f"{tokens:,} |" in row


GAINS = {"r1_7b": 0.25, "r1_14b": 0.17, "qwen3_8b": 0.30, "qwen3_14b": 0.20, "r1_32b": 0.06, "qwen3_32b": 0.04}
"""What trainers gain at least, in FLOPs, over recomputing whole layers."""


@pytest.mark.parametrize("run", PUBLISHED)
def test_memory_that_is_free_is_put_to_use(run):
    config, found = planned(run)
    decided, gib = found.memory.recompute, found.memory.trainer.total / GIB
    assert config.trainer.recompute == "auto" != decided.recompute
    assert decided.flops_if_full / decided.flops - 1 >= GAINS.get(run, 0)
    rows = (ROOT / "docs/published_runs.md").read_text().splitlines()
    what = decided.recompute
    if decided.recompute_layers:
        what += f" in {decided.recompute_layers} of {decided.layers} layers"
    figures = f"| {what} | {gib:.2f} ({gib / GPU_GIB:.0%}) | {decided.flops:.3f} |"
    assert any(row.startswith(f"| `{run}` |") and figures in row for row in rows)


FIRST = {
    "r1_32b": ["trainer.cp=1", "trainer.dp=12"],
    "qwen3_32b": ["trainer.cp=1", "trainer.dp=12"],
    "qwen3_235b": ["trainer.tp=4", "trainer.cp=1", "trainer.dp=2", "optimizer.on_host=false"],
}
"""What makes the layouts of today those that the configs had first."""


@pytest.mark.parametrize("run", FIRST)
def test_updates_are_shorter_than_with_the_first_layouts_by_the_same_model(run, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    config, found = planned(run)
    asked = [f"configs/{run}.yaml", f"model.path={config.model.path}", "--gpus=8", "--gpu=h100"]
    asked += [f"--nodes={len(found.placement.nodes)}", f"--json={tmp_path / 'plan.json'}"]
    figures = []
    for layout in (FIRST[run], []):
        assert main([*asked, *layout]) == 0
        parts = json.loads((tmp_path / "plan.json").read_text())["trainer_s"]
        figures.append((sum(parts.values()), parts["useful"] / sum(parts.values())))
    (first_s, first), (now_s, now) = figures
    assert now_s <= 0.85 * first_s
    told = f": {first_s:.1f} s, MFU {first:.0%} | {now_s:.1f} s, MFU {now:.0%} |"
    rows = (ROOT / "docs/published_runs.md").read_text().splitlines()
    assert any(row.startswith(f"| `{run}` |") and row.endswith(told) for row in rows)


TRAFFIC = {
    "r1_1.5b": (1, 3, 1.001),
    "r1_7b": (1, 3, 1.001),
    "r1_14b": (2, 3, 1.001),
    "r1_32b": (4, 6, 1.05),
    # 1,187 parts of 128 rows make a vocabulary of 151,936, so Megatron's two halves are not the engine's: a trainer
    # rank of the first stage and one of the last more
    "qwen3_8b": (4 + 2, 20, 1.16),  # the first and the last stage send the embedding and the output layer too
    "qwen3_14b": (8 + 2, 20, 1.32),
    "qwen3_32b": (4 + 2, 6, 1.05),
    "qwen3_235b": (12 * 8, 24, 1.05),  # a part of every expert, and these are on 8 ranks of each of 12 stages
}
"""Trainer ranks from which an engine rank takes, engines to which a trainer rank sends, busiest over mean."""


@pytest.mark.parametrize("run", TRAFFIC)
def test_few_and_evenly_loaded_trainers_send(run, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    config, file = load(run), tmp_path / "plan.json"
    path, nodes = f"model.path={config.model.path}", len(planned(run)[1].placement.nodes)
    assert main([f"configs/{run}.yaml", path, f"--nodes={nodes}", "--gpus=8", "--gpu-gb=80", f"--json={file}"]) == 0
    found, (sources, communicators, busiest) = json.loads(file.read_text()), TRAFFIC[run]
    assert found["sources_per_engine_rank"] == sources
    assert found["communicators_per_engine_rank"] == 1
    assert found["communicators_per_trainer_rank"] == communicators
    assert found["busiest_sender_over_mean"] <= busiest
    assert found["busiest_sender_over_least"] <= 1.005, "no plan has a busiest sender that sends less"
    for pool, share in (("trainer", 0.9), ("engine", 0.92)):
        assert found["memory"][pool]["bytes"] <= share * GPU_GIB * GIB
    names = {part["name"] for part in found["memory"]["engine"]["parts"] + found["memory"]["trainer"]["parts"]}
    assert names >= {"link", "links", "sending weights", "staging", "KV cache", "activations"}
    assert ("optimizer" in names) != config.optimizer.on_host
    assert f"weights: sources per engine rank {sources}; communicators per engine rank 1," in capsys.readouterr().out


@pytest.mark.parametrize("run", TRAFFIC)
def test_each_element_is_sent_once_to_each_engine_rank_that_needs_it(run):
    config = load(run)
    planner = Planner.of(config, read_config(config.model.path), MegatronSizes.of(config.trainer))
    for engine in (0, config.rollout.engines - 1):
        received = [0] * len(planner.destinations)
        for transfer in planner.plan(engine).transfers:
            received[transfer.destination] += transfer.receive.box.size
        assert received == [layout.size for layout in planner.destinations]


@pytest.mark.parametrize("run", PUBLISHED)
def test_an_engine_has_keys_and_values_for_all_that_it_may_run(run):
    """At least 8,000 tokens for each of rollout.max_running answers, whose number is a multiple of the group's."""
    config, found = planned(run)
    tokens = kv_tokens(config, read_config(config.model.path), found.memory.engine.of("KV cache"), True)
    assert tokens >= 8000 * config.rollout.max_running
    assert config.rollout.max_running % config.rollout.group_size == 0


@pytest.mark.parametrize("name", PARAMETERS)
def test_sizes_of_a_model_add_up_to_its_parameters(name):
    shapes = architecture(read_config(MODELS / name)).canonical.values()
    assert sum(map(prod, shapes)) / 1e9 == pytest.approx(PARAMETERS[name], abs=0.001)


SEA = {"sea_235b_sft": 6, "sea_235b": 11}
"""The two steps of AReaL-SEA-235B-A22B, and the nodes of their scripts."""
SEA_MODELS = {"model.path": "Qwen3-235B-A22B-Thinking-2507", "served.user.path": "Qwen2.5-72B-Instruct"}
H200_GIB = 140


def sea_lines(run):
    """Returns the arguments that plan a step of the recipe: no folder of weights is at hand."""
    models = [f"{key}={MODELS / name}" for key, name in SEA_MODELS.items() if run == "sea_235b" or key == "model.path"]
    return [str(ROOT / "configs" / f"{run}.yaml"), *models]


def test_the_rl_of_sea_has_the_numbers_of_its_published_config():
    """AReaL's examples/tau2/config_235b_moe_airline.yaml; rewards of 1 and 0, scaled there by 10 after −0.5."""
    path, *models = sea_lines("sea_235b")
    config = config_file.load(path, models)
    t, o, p, r, u = config.trainer, config.optimizer, config.ppo, config.rollout, config.served.user
    assert (config.updates, config.groups_per_batch, r.group_size, r.temperature) == (500, 16, 16, 1.0)
    assert (t.tp, t.pp, t.dp, t.cp, t.ep, t.etp, t.microbatch_tokens) == (4, 12, 1, 1, 4, 1, 32768)
    assert (r.engines, r.tp, r.engines * r.max_running, r.max_staleness, r.samples) == (4, 8, 128, 2, "individual")
    assert config.data.max_prompt_tokens + r.max_new_tokens == 30000
    assert "--steps 50 --answer-tokens 8192" in r.workflow_program and r.turns == 50
    assert (o.lr, o.weight_decay, o.beta1, o.beta2, o.eps, o.clip_grad) == (5e-6, 0.005, 0.9, 0.999, 1e-8, 1.0)
    assert (o.schedule, o.warmup_steps) == ("constant", 1)
    assert (p.minibatches, p.clip_low, p.clip_high, p.objective) == (1, 0.4, 0.4, "decoupled")
    assert (p.correction.truncate, p.correction.mask_high, p.penalty.kl) == (*MASKED, 0)
    assert (config.reward.wrong, config.reward.right, config.reward.turn_discount) == (-5.0, 5.0, 1.0)
    assert r.filter_groups and (u.engines, u.tp, u.max_new_tokens, u.temperature) == (2, 4, 2048, 0)


def test_sea_is_trained_from_its_published_base_and_conversations():
    sft = config_file.load(ROOT / "configs/sea_235b_sft.yaml")
    rl = config_file.load(ROOT / "configs/sea_235b.yaml")
    assert sft.model.path == "Qwen/Qwen3-235B-A22B-Thinking-2507"
    assert sft.data.train == "hf://datasets/inclusionAI/AReaL-tau2-data/tau2_sft_train.jsonl"
    assert rl.model.path == f"runs/{sft.name}/hf", "what the first step has trained is the second's model"
    page = (ROOT / "docs/published_runs.md").read_text()
    assert "AReaL-SEA-235B-A22B" in page and f"{sft.updates:,} updates" in page


@pytest.mark.parametrize("run", SEA)
def test_sea_fits_the_nodes_of_its_script(run, capsys, tmp_path):
    (script,) = (s for s in SCRIPTS if named_config(s) == run)
    file = tmp_path / "plan.json"
    sizes = [f"--nodes={option(script, 'nodes')}", "--gpus=8", f"--gpu-gb={H200_GIB}", f"--json={file}"]
    assert main([*sea_lines(run), *sizes]) == 0 and SEA[run] == int(option(script, "nodes"))
    found, page = json.loads(file.read_text()), (ROOT / "docs/published_runs.md").read_text()
    pools = {name: found["memory"][name]["bytes"] for name in ("trainer", "engine") if found["memory"].get(name)}
    assert max(pools.values()) <= 0.92 * H200_GIB * GIB and len(pools) == (2 if run == "sea_235b" else 1)
    trainer = pools["trainer"] / GIB
    (row,) = (line for line in page.splitlines() if line.startswith(f"| `{run}` |"))
    assert f"| {SEA[run]} |" in row and f"{trainer:.2f} ({trainer / H200_GIB:.0%})" in row
    assert f"{SEA[run]} nodes: 48 trainer ranks" in capsys.readouterr().out


def test_every_config_has_one_script():
    patterns = ("r1_*.yaml", "qwen3_*.yaml", "sea_*.yaml")
    runs = [path.stem for pattern in patterns for path in (ROOT / "configs").glob(pattern)]
    assert sorted({*runs} - {*OTHERS}) == sorted((*PUBLISHED, *SEA))
    assert sorted(map(named_config, SCRIPTS)) == sorted((*PUBLISHED, *SEA, *OTHERS))
    assert {option(script, "gpus-per-node") for script in SCRIPTS} == {"8"}


@pytest.mark.parametrize(
    "script", [*SCRIPTS, ROOT / "slurm/run.sh", ROOT / "slurm/add_engines.sh"], ids=lambda path: path.name
)
def test_bash_reads_the_script(script):
    subprocess.run(["bash", "-n", script], check=True)


@pytest.fixture
def submitted(tmp_path):
    """Starts a copy of a script as slurmd does, with a program in place of Python that prints its arguments."""
    fake, copy = tmp_path / "python", tmp_path / "slurm_script"
    fake.write_text('#!/bin/bash\nprintf \'%s\\0\' "$$" "$@"\n')
    fake.chmod(0o755)

    def submit(script, *arguments, folder=ROOT, python=fake):
        copy.write_text(script.read_text())
        environment = {**os.environ, "PYTHON": str(python), "SLURM_SUBMIT_DIR": str(folder)}
        return subprocess.Popen(
            ["bash", copy, *arguments],
            env=environment,
            cwd=tmp_path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    return submit


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_launcher_takes_the_place_of_the_script_and_gets_every_argument_whole(submitted, script):
    hostile = ["name=a b", "data.train=*", "x=$(touch owned)", "y='\";exit 1;#", "", "z=`id`\nnext"]
    process = submitted(script, *hostile)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 0 and not err
    expected = [
        "-m",
        "areal_megatron.launch.slurm",
        f"configs/{named_config(script)}.yaml",
        "--restarts=10",
        f"--batch-script={process.args[1]}",
        "resume=auto",
        "machine.host=auto",
        *hostile,
    ]
    assert out.split("\0")[:-1] == [str(process.pid), *expected]
    assert not (ROOT / "owned").exists()


def test_the_signal_before_the_time_limit_reaches_the_launcher(submitted, tmp_path):
    waiting = tmp_path / "waiting"
    waiting.write_text("#!/bin/bash\ntrap 'echo saved; exit 0' USR1\necho ready\nwhile :; do sleep 0.05; done\n")
    waiting.chmod(0o755)
    process = submitted(SCRIPTS[0], python=waiting)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR1)
    assert process.communicate(timeout=20)[0] == "saved\n" and process.returncode == 0


def test_what_is_missing_is_said_in_one_line(submitted, tmp_path):
    script = SCRIPTS[0]
    for arguments, problem in (
        ({"folder": tmp_path}, f"no slurm/run.sh in {tmp_path}: submit from the repository's folder"),
        ({"python": tmp_path / "nowhere"}, "run 'make setup' there, or set PYTHON"),
    ):
        process = submitted(script, **arguments)
        _, err = process.communicate(timeout=20)
        assert process.returncode == 2 and problem in err
        assert err.startswith("error: ") and err.count("\n") == 1
