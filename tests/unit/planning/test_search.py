"""What `areal plan --best` proposes: it fits by the planner's word, is what the YAML says, and is the fastest there
is; the formulas that rank against the simulator, and the checkpoint interval against a search for it."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from areal_megatron.config import ConfigError, config_file
from areal_megatron.planning.best import slow
from areal_megatron.planning.forecast.accelerators import accelerator
from areal_megatron.planning.forecast.checkpoint_interval import checkpoint_interval, updates_between
from areal_megatron.planning.forecast.layouts import Cluster
from areal_megatron.planning.forecast.lengths import LognormalLengths
from areal_megatron.planning.forecast.pace import BatchLengths, draw_batches, pace
from areal_megatron.planning.forecast.search import Found, Proposal, Search, SearchBounds, ordered
from areal_megatron.planning.forecast.simulator import Circumstances, Simulator
from areal_megatron.planning.forecast.step_limit import StepLimit
from areal_megatron.planning.forecast.times import times_of
from areal_megatron.planning.plan import ASK_BEST, main, plan
from areal_megatron.planning.pools import Node, allocate

ROOT = Path(__file__).resolve().parents[3]
H100 = accelerator("h100")
MODELS = {"r1_1.5b": "DeepSeek-R1-Distill-Qwen-1.5B", "r1_32b": "DeepSeek-R1-Distill-Qwen-32B"}


def load(run, *overrides):
    model = f"model.path={ROOT / 'configs/models' / MODELS[run]}"
    return config_file.load(ROOT / f"configs/{run}.yaml", [model, *overrides])


def nodes_of(cluster):
    return [Node(f"node{number:02}", tuple(range(cluster.gpus))) for number in range(cluster.nodes)]


def search(config, cluster, median=2000, bounds=None):
    lengths = LognormalLengths(median, 0.9, config.rollout.max_new_tokens)
    bounds = bounds or SearchBounds(config.rollout.max_staleness)
    return Search(config, nodes_of(cluster), cluster, H100, lengths, bounds)


SMALL = ("batch_size=256", "rollout.max_staleness=2", "trainer.tp=2", "trainer.dp=2", "rollout.engines=12")
"""A run for two nodes."""


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """The arguments of a command with --best, what it prints, and what it writes as JSON."""
    file, capture = tmp_path_factory.mktemp("best") / "best.json", pytest.MonkeyPatch()
    lines = []
    capture.setattr("builtins.print", lambda *what, **how: lines.append(str(what[0])) if "file" not in how else None)
    arguments = [f"{ROOT}/configs/r1_1.5b.yaml", f"model.path={ROOT}/configs/models/{MODELS['r1_1.5b']}", *SMALL]
    sizes = ["--nodes", "2", "--gpus", "8"]
    try:
        best = ["--gpu", "h100", "--best", "--median", "2000", "--mtbf-hours", "500", "--json", str(file)]
        assert main([*arguments, *sizes, *best]) == 0
    finally:
        capture.undo()
    return arguments, "\n".join(lines), json.loads(file.read_text())


def pasted(arguments, block, file):
    """Writes the command's config with a proposal's lines in it to `file`, and returns that loaded."""
    tree = yaml.safe_load(Path(arguments[0]).read_text())
    for section, keys in yaml.safe_load(block).items():
        tree[section] = {**tree.get(section, {}), **keys}
    file.write_text(yaml.safe_dump(tree))
    given = [text for text in arguments[1:] if text.split("=")[0] in ("model.path", "batch_size")]
    return config_file.load(file, given)


@pytest.mark.soak
def test_pasted_lines_give_the_plan_that_was_printed(printed, tmp_path, capsys):
    arguments, said, _ = printed
    first, planned = said.split("\n\n")[0], said[said.index("2 nodes: ") :]
    pasted(arguments, first, tmp_path / "pasted.yaml")
    given = [str(tmp_path / "pasted.yaml"), *arguments[1:3], "--nodes", "2", "--gpus", "8", "--gpu-gb", "80"]
    assert main(given) == 0
    assert capsys.readouterr().out.strip() == f"{planned.strip()}\n{ASK_BEST}"


def test_every_proposal_fits_by_the_planner_and_says_what_binds(printed, tmp_path):
    arguments, said, figures = printed
    blocks = said.split("\n\n")[: len(figures["proposals"])]
    assert len(blocks) >= 2
    for number, (block, found) in enumerate(zip(blocks, figures["proposals"], strict=True), 1):
        config = pasted(arguments, block, tmp_path / "pasted.yaml")
        config.machine.device = "cuda"
        made = plan(config, nodes_of(Cluster(2, 8, 80)), gpu_gib=80, weights=False)
        assert f"# {number}: " in block and f"{made.memory.trainer.total / 2**30:.2f} of 80 GiB" in block
        for section, keys in found["sizes"].items():
            assert {key: getattr(getattr(config, section), key) for key in keys} == keys
        assert found["binds"] in ("memory", "decoding", "training", "tail", "network")
        assert f"; {found['binds']} binds" in block and config.rollout.max_staleness <= 2
    assert "# as it is: " in said


def test_checkpoints_are_as_far_apart_as_failures_ask_for(printed):
    arguments, _, figures = printed
    config = config_file.load(arguments[0], arguments[1:])
    for found in figures["proposals"]:
        t, sizes = found["sizes"]["trainer"], found["sizes"]
        ranks = t["tp"] * t["cp"] * t["pp"] * t["dp"]
        made = replace(config, trainer=replace(config.trainer, **t))
        made = replace(made, rollout=replace(config.rollout, **sizes["rollout"]))
        _, times = times_of(made, H100)
        interval = checkpoint_interval(times.weights.checkpoint, 500 * 3600 / math.ceil(ranks / 8))
        update = max(found["least_s"][key] for key in ("decoding", "tail"))
        update = max(update, found["least_s"]["training"] + found["least_s"]["network"])
        assert sizes["checkpoint"]["every"] == min(updates_between(interval, update), config.updates)


@pytest.mark.parametrize(
    ("run", "cluster", "shipped"),
    [
        ("r1_1.5b", Cluster(2, 8, 80), ["trainer.dp=4", "rollout.engines=12"]),
        pytest.param(
            "r1_32b", Cluster(6, 8, 80), ["trainer.cp=2", "trainer.dp=1", "rollout.engines=8"], marks=pytest.mark.soak
        ),
    ],
)
def test_the_best_is_at_least_as_fast_as_the_shipped_layout_in_small(run, cluster, shipped):
    config = load(run, "batch_size=256", "updates=20", "rollout.max_staleness=2", *shipped)
    found = search(config, cluster, 4000).best(2)
    assert found.own and found.proposals[0].run.tokens_per_s >= 0.99 * found.own.run.tokens_per_s


def test_less_staleness_comes_first_where_more_gains_nothing():
    def proposed(speed, staleness, steps=1.0):
        rollout = SimpleNamespace(max_staleness=staleness)
        candidate = SimpleNamespace(config=SimpleNamespace(rollout=rollout))
        return Proposal(candidate, SimpleNamespace(tokens_per_s=speed / steps), 1.0, steps)

    found = [
        (each.progress, each.config.rollout.max_staleness)
        for each in ordered(
            [proposed(900, 0), proposed(1000, 8, 0.5), proposed(995, 4), proposed(996, 4, 0.25), proposed(980, 2)]
        )
    ]
    assert found == [(996, 4), (995, 4), (1000, 8), (980, 2), (900, 0)], "whatever part of it is speed"


def test_sizes_that_are_much_slower_than_the_best_are_told():
    def found(best, own):
        best, own = (Proposal(None, SimpleNamespace(tokens_per_s=speed), 1.0, 1.0) for speed in (best, own))
        return Found([best], own, "")

    assert list(slow(found(1999, 1000))) == list(slow(replace(found(2, 1), own=None))) == []
    assert list(slow(found(7040, 1000))) == [
        "as it is the run would take 7.0 times as long as with proposal 1, on the same GPUs"
    ]


def test_what_staleness_costs_steps_is_weighed_against_speed():
    config = load("r1_1.5b", "batch_size=64", "updates=20", "trainer.dp=2")
    cluster, bounds = Cluster(1, 4, 80), SearchBounds(8, steps=StepLimit(0.5))
    fast, weighed = (search(config, cluster, 500, each).best(1).proposals[0] for each in (SearchBounds(8), bounds))
    assert fast.steps == 1 and weighed.run.tokens_per_s < fast.run.tokens_per_s
    assert weighed.config.rollout.max_staleness < fast.config.rollout.max_staleness
    assert weighed.progress > fast.run.tokens_per_s * bounds.steps.share(fast.run.staleness)


def test_the_staleness_bound_holds():
    config = load("r1_1.5b", "batch_size=64", "updates=20", "trainer.dp=2")
    found = search(config, Cluster(1, 4, 80), 500, SearchBounds(1))
    best = found.best(3)
    assert best.own is None and best.own_problem == "rollout.max_staleness is above 1"
    assert all(each.config.rollout.max_staleness <= 1 for each in best.proposals)


def test_as_many_engines_as_have_room_are_counted():
    rng, config = random.Random(0), load("r1_1.5b")
    config.machine.device = "cuda"
    for _ in range(300):
        cluster = Cluster(rng.randint(1, 5), rng.choice([1, 2, 4, 8]), 80)
        tp = rng.choice([1, 2, 4, 8, 16])
        ranks = rng.randint(1, cluster.size)
        config.trainer = replace(config.trainer, tp=1, dp=ranks)
        engines = cluster.engines(ranks, tp)
        config.rollout.tp, config.rollout.engines = tp, engines + 1
        with pytest.raises(ConfigError):
            allocate(config, nodes_of(cluster))
        if engines:
            config.rollout.engines = engines
            assert len(allocate(config, nodes_of(cluster)).pool("rollout")) == engines


@pytest.mark.parametrize("overrides", [(), ("trainer.dp=6", "rollout.engines=4"), ("trainer.dp=1",)])
def test_formulas_are_near_the_simulator(overrides):
    config, times = times_of(load("r1_1.5b", *SMALL, *overrides), H100)
    lengths = LognormalLengths(2000, 0.5, 27648)
    batches = draw_batches(lengths, config)
    training = np.mean([times.trainer.update(np.repeat(p, a.shape[1]), a.ravel()) for p, a in batches])
    found = pace(config, BatchLengths.of(batches), times.engine, times.weights, times.kv_tokens, training)
    run = Simulator(config, times, lengths, Circumstances()).run(40)
    assert found.update == pytest.approx(run.update_s, rel=0.3)


@pytest.mark.parametrize(("pause", "mtbf"), [(1, 3600), (60, 7200), (300, 1e4), (5, 1e6)])
def test_the_checkpoint_interval_loses_the_least(pause, mtbf):
    def lost(interval):
        """Seconds for a second of work, if failures come at random and each restarts the interval at once."""
        return mtbf * math.expm1((interval + pause) / mtbf) / interval

    found = checkpoint_interval(pause, mtbf)
    tried = np.geomspace(found / 10, found * 10, 20001)
    best = tried[np.argmin([lost(each) for each in tried])]
    assert found == pytest.approx(best, rel=0.01)
    assert found == pytest.approx(math.sqrt(2 * pause * mtbf) - pause, rel=0.15)


def test_checkpoints_of_runs_without_failures_and_of_hopeless_ones():
    assert checkpoint_interval(10, math.inf) == math.inf and updates_between(math.inf, 60) == 0
    assert checkpoint_interval(100, 20) == 20
    assert updates_between(10, 600) == 1 and updates_between(1800, 600) == 3


R1 = f"model.path={ROOT}/configs/models/{MODELS['r1_1.5b']}"
LARGE = f"model.path={ROOT}/configs/models/Qwen3-235B-A22B-Thinking-2507"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["r1_1.5b", R1, "--best", "--gpu", "h100-pcie"], "the nearest name is h100, "),
        (["r1_1.5b", R1, "--best"], "--best: say which GPUs"),
        (["r1_1.5b", R1, "--median", "9"], "--median: has no meaning without --gpu"),
        (["r1_1.5b", R1, "--mtbf-hours", "9"], "--mtbf-hours: has no meaning without --best"),
        (["r1_1.5b", R1, "--best", "--gpu", "h100", "--max-staleness", "-1"], "--max-staleness -1"),
        (["r1_1.5b", R1, "--best", "--gpu", "h100", "--mtbf-hours", "0"], "--mtbf-hours 0"),
        (["r1_1.5b", R1, "--gpu", "h100", "--steps-of", "runs/none"], "--steps-of: has no meaning without --best"),
        (["r1_1.5b", R1, "--best", "--gpu", "h100", "--steps-of", "/"], "/ is no run folder"),
        (["r1_1.5b", R1, "--best", "--gpu", "h100", "--median", "-1"], "lengths: median=-1"),
        (["r1_1.5b", R1, "--best", "--gpu", "h100", "machine.shared=true"], "--best: divides GPUs between the pools"),
        (["r1_1.5b", R1, "--best", "--gpu", "h100", "mode=sft", "data.eval="], "there is nothing to divide"),
        (["r1_1.5b", R1, "--best", "--gpu", "h100", "--nodes", "1", "--gpus", "1"], "no room for both trainers and"),
        (["r1_1.5b", R1, "--best", "--gpu", "h100", "--gpu-gb", "2"], "the nearest, rollout.tp="),
        (["qwen3_235b", LARGE, "--best", "--gpu", "h100"], "the nearest, trainer.tp="),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, says):
    name, *rest = arguments
    rest = rest if "--nodes" in rest else [*rest, "--nodes", "4", "--gpus", "8"]
    assert main([f"{ROOT}/configs/{name}.yaml", *rest]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert says in lines[-1] and [line for line in lines if line.startswith("error: ")] == lines[-1:]
