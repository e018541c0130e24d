"""The figures of an evaluation, and the folder in which a killed one continues."""

import asyncio
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from fractions import Fraction
from statistics import NormalDist, mean, stdev
from types import SimpleNamespace

import numpy as np
import pytest

from areal_megatron.checkpoint import folder as checkpoint_folder
from areal_megatron.checkpoint import peft
from areal_megatron.config import (
    Config,
    ConfigError,
    DataConfig,
    LoraConfig,
    ModelConfig,
    RewardConfig,
    ServedConfig,
    ServedModelConfig,
    config_file,
)
from areal_megatron.config.config_file import save
from areal_megatron.controller.changed import Changed
from areal_megatron.controller.engine import Engine
from areal_megatron.controller.environment import Environment, Environments
from areal_megatron.controller.evaluation import Evaluation
from areal_megatron.controller.sampler import Sampler
from areal_megatron.data.prompts import read_prompts
from areal_megatron.engine.client import Completion
from areal_megatron.engine.server import engine_arguments
from areal_megatron.launch import evaluate
from areal_megatron.models.architecture import architecture, read_config
from areal_megatron.observe.estimates import difference, estimate, figures, pass_at_k
from areal_megatron.observe.evaluation_folder import Folder, Sampled, files_digest
from areal_megatron.observe.metrics import write_status
from areal_megatron.observe.status import Status
from areal_megatron.observe.timeline import Timeline
from areal_megatron.programs import comparison
from areal_megatron.programs.comparison import differences, names_of
from areal_megatron.programs.evaluation_config import export_of
from areal_megatron.run.folder import RunFolder
from areal_megatron.workflows.runner import EpisodeRunner
from areal_megatron.workflows.sampling import Decoding
from areal_megatron.workflows.scoring import Score, Scorer
from areal_megatron.workflows.single_turn import SingleTurn
from areal_megatron.workflows.workflow import Workflow
from tests.support.adapter_oracle import write_adapter
from tests.support.chat_world import InThisProcess, Judge, equals
from tests.support.reshard_oracle import CONFIG
from tests.support.tiny_models import save_model
from tests.unit.controller.test_evaluation import Kept


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_all_subsets_with_a_correct_answer(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        answers = [True] * c + [False] * (n - c)
        subsets = [any(subset) for subset in itertools.combinations(answers, k)]
        assert pass_at_k(n, c, k) == float(Fraction(sum(subsets), len(subsets)))


@pytest.mark.parametrize(
    ("n", "c", "k", "value"),
    [
        (5, 2, 2, 0.7),
        (10, 3, 1, 0.3),
        (10, 3, 5, 11 / 12),
        (200, 1, 100, 0.5),
        (200, 0, 100, 0.0),
        (200, 101, 100, 1.0),
        (64, 64, 1, 1.0),
        (100_000, 1, 1, 1e-5),
    ],
)
def test_recorded_cases(n, c, k, value):
    assert pass_at_k(n, c, k) == value


@pytest.mark.parametrize(("n", "c", "k"), [(200, 3, 100), (1000, 1, 10), (4096, 17, 512), (100_000, 2, 50_000)])
def test_large_cases_agree_with_the_product_of_the_paper(n, c, k):
    log = math.fsum(math.log1p(-k / i) for i in range(n - c + 1, n + 1))
    assert pass_at_k(n, c, k) == pytest.approx(-math.expm1(log), rel=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 5, 1), (4, 1, 0), (4, -1, 1)])
def test_what_cannot_be_estimated_is_refused(n, c, k):
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(n, c, k)


def test_intervals_are_the_normal_ones_where_there_are_many_items():
    values = np.random.default_rng(1).choice([0, 0.25, 0.5, 1], 2000).tolist()
    found, half = estimate(values), NormalDist().inv_cdf(0.975) * stdev(values) / len(values) ** 0.5
    assert found.value == pytest.approx(mean(values))
    assert (found.low, found.high) == pytest.approx((mean(values) - half, mean(values) + half), abs=0.05 * half)
    assert estimate(values) == found


def test_intervals_hold_the_truth_as_often_as_they_say():
    """40 items of four answers, the items of very different difficulty: answers of one item are alike."""
    draw = np.random.default_rng(2)
    held = 0
    for _ in range(200):
        difficulty = draw.beta(0.7, 0.7, 40)
        found = estimate(draw.binomial(4, difficulty) / 4)
        held += found.low <= 0.5 <= found.high
    assert 0.89 <= held / 200 <= 0.99


@pytest.mark.parametrize("items", [1, 7, 30])
def test_where_every_item_is_alike_the_interval_is_that_of_a_binomial(items):
    """The chance of no success at the upper bound is 2.5%."""
    nothing, everything = estimate([0.0] * items), estimate([1.0] * items)
    assert (nothing.value, nothing.low) == (0, 0) and (1 - nothing.high) ** items == pytest.approx(0.025)
    assert (everything.value, everything.high) == (1, 1) and everything.low**items == pytest.approx(0.025)


def test_differences_of_items_hold_the_truth_as_often_as_they_say():
    """Two models differ by 0.1 on items of very different difficulty: the interval of the difference is nearly always
    much narrower than those of the two."""
    draw = np.random.default_rng(3)
    held = narrower = 0
    for _ in range(200):
        difficulty = 0.9 * draw.beta(0.7, 0.7, 40)
        first, second = ({k: v / 8 for k, v in enumerate(draw.binomial(8, difficulty + by))} for by in (0, 0.1))
        found, alone = difference(first, second), estimate([*second.values()])
        assert found.value == pytest.approx(mean(second.values()) - mean(first.values()))
        held += found.low <= 0.1 <= found.high
        narrower += found.high - found.low < 0.8 * (alone.high - alone.low)
    assert 0.89 <= held / 200 <= 0.99 and narrower > 180


@pytest.mark.parametrize(("before", "after"), [(0.0, 1.0), (1.0, 0.0), (0.5, 0.5), (0.25, 0.5)])
def test_where_all_items_differ_alike_others_may_be_unseen(before, after):
    """The share of others of which there is none among 20 is at most 16.8%, with a chance of error of 2.5%."""
    share, apart = 1 - 0.025 ** (1 / 20), after - before
    found = difference(dict.fromkeys(range(25), before), dict.fromkeys(range(5, 30), after))  # 20 in both
    assert found.value == apart
    assert (found.low, found.high) == pytest.approx(
        ((1 - share) * apart - share, (1 - share) * apart + share), abs=1e-12
    )


def sampled(item, sample, correct=True, **changes):
    return Sampled(
        item=item,
        sample=sample,
        seed=7,
        score=float(correct),
        correct=correct,
        **({"truncated": False, "tokens": 3, "response": 'ü\n"x"'} | changes),
    )


def test_figures_follow_from_the_answers_in_whatever_order():
    correct = {0: [1, 0, 0, 0], 3: [1, 1, 1, 1], 5: [0, 0, 0, 0]}
    answers = [
        sampled(item, k, bool(own[k]), tokens=k, truncated=k == 0) for item, own in correct.items() for k in range(4)
    ]
    files = {0: "a", 3: "b", 5: "a"}
    result = evaluate.result_of(answers, 4, [1, 2], files)
    assert (result["items"], result["n"]) == (3, 4)
    assert result["avg@4"]["value"] == result["pass@1"]["value"] == pytest.approx(5 / 12)
    assert result["pass@2"]["value"] == pytest.approx((0.5 + 1 + 0) / 3)
    assert (result["truncated_share"], result["response_tokens_mean"]) == (0.25, 1.5)
    assert evaluate.result_of(answers[::-1], 4, [1, 2], files) == result
    assert evaluate.result_of(sorted(answers, key=lambda answer: answer.sample), 4, [1, 2], files) == result
    table = evaluate.table(result)
    assert "pass@2" in table and "3 items × 4 answers" in table and "2 items × 4 answers" in table
    assert table.count("raise --max-new-tokens") == 1
    assert "raise" not in evaluate.table(result | {"truncated_share": 0.1})
    assert list(result["files"]) == ["a", "b"]
    for name, items in (("a", [0, 5]), ("b", [3])):
        own = [answer for answer in answers if answer.item in items]
        alone = evaluate.result_of(own, 4, [1, 2], {item: files[item] for item in items})
        assert "files" not in alone and {"n": 4, "failed": 0} | result["files"][name] == alone
    failed = evaluate.result_of(answers[1:], 4, [1, 2], files)
    assert (result["failed"], failed["failed"], failed["items"]) == (0, 1, 3)
    assert "left out" not in table and "1 answers left out, since their rewards failed" in evaluate.table(failed)


def test_items_that_lack_an_answer_count_with_those_they_have():
    """An answer whose reward failed is none."""
    answers = [sampled(0, k, correct=k == 0) for k in range(3)] + [sampled(1, 0), sampled(1, 1, correct=False)]
    found = figures(answers, 3, [2, 3])
    assert found["items"] == 2
    assert found["avg@3"]["value"] == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert found["pass@2"]["value"] == pytest.approx((2 / 3 + 1) / 2)
    assert found["pass@3"]["value"] == 1  # of the first item alone
    assert figures([], 3, [3]) == {"items": 0}


class Answering:
    """An engine's client whose answers are two tokens."""

    async def generate(self, prompt, *, n, **_):
        return [Completion(np.ones(2, np.int32), np.zeros(2, np.float32), np.zeros(2, np.int32), "stop")] * n


class Away:
    """Scores answers; the rewards of the first ones fail."""

    def __init__(self, failures):
        self.failures = failures

    async def score(self, prompt, completions):
        self.failures -= 1
        score = Score(reward=1.0, correct=True, truncated=False, trained=True)
        return [score.failed_by("the service is away") if self.failures >= 0 else score for _ in completions]


def test_answers_whose_rewards_failed_are_asked_for_again(world, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": 2}\n{"prompt": "1+2=", "answer": 3}\n')
    options = [str(world / "model"), str(data), "--n", "3", "--max-new-tokens", "8"]
    evaluation = evaluate.OfflineEvaluation(evaluate._options(options))
    for failures, left in ((2, 2), (1, 1), (0, 0)):
        engine = Engine(0, SimpleNamespace(name="engine-0", generate=Answering().generate), None)
        (model,) = evaluation.models
        with Folder(tmp_path / "out", evaluation.settings(model)) as folder:
            scorer, folders = Away(failures), {model: folder}
            environment = Environment(evaluation.kinds[0], scorer, SingleTurn(scorer))
            asyncio.run(evaluation._ask(engine, [environment], folders))
            assert len(evaluation.missing(folders)) == left and len(folder.answers) == 6 - left
            result = evaluate.result_of(list(folder.answers.values()), 3, [1], evaluation.files)
            assert result["failed"] == left and result["avg@3"]["value"] == 1
        rated = tmp_path / "rated.jsonl"
        evaluate.write_pass_rates(str(data), [a for a in folder.answers.values() if a.item == 0], rated)
        assert [json.loads(line).get("pass_rate") for line in rated.read_text().splitlines()] == [1, None]


async def two_samples(episode):
    await episode.sample()
    episode.context = episode.new_transcript(list(episode.prompt.tokens))
    await episode.sample()
    return 1.0


def test_an_answer_has_the_tokens_and_the_text_of_all_samples_of_its_episode(world, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": 2}\n')
    evaluation = evaluate.OfflineEvaluation(evaluate._options([str(world / "model"), str(data)]))
    config, (model,) = evaluation.kinds[0], evaluation.models
    scorer = Scorer(config.reward, Judge(equals), config.rollout.max_new_tokens)
    runner = InThisProcess(EpisodeRunner(config, Workflow(two_samples, 2), evaluation.tokenizer, scorer))
    engine = Engine(0, SimpleNamespace(name="engine-0", generate=Answering().generate), None)
    with Folder(tmp_path / "out", evaluation.settings(model)) as folder:
        asyncio.run(evaluation._ask(engine, [Environment(config, scorer, runner)], {model: folder}))
        (found,) = folder.answers.values()
    text = evaluation.tokenizer.decode([1, 1])
    assert (found.tokens, found.response, found.score) == (4, f"{text}\n\n{text}", 1)


SETTINGS = {"model": "m", "n": 2, "temperature": 0.7}


def test_answers_are_there_again_and_a_torn_line_is_not(tmp_path):
    with Folder(tmp_path / "out", SETTINGS) as folder:
        folder.add(sampled(0, 1))
        folder.add(sampled(4, 0, correct=False))
        whole = (tmp_path / "out" / "answers.jsonl").read_bytes()  # flushed by now
        folder.add(sampled(4, 1))
    path = tmp_path / "out" / "answers.jsonl"
    full = path.read_bytes()
    for length in range(len(whole), len(full)):
        path.write_bytes(full[:length])
        with Folder(tmp_path / "out", SETTINGS) as folder:
            assert folder.answers == {(0, 1): sampled(0, 1), (4, 0): sampled(4, 0, correct=False)}
            assert path.read_bytes() == whole
            folder.add(sampled(4, 1))
        assert path.read_bytes() == full
    assert [json.loads(line)["item"] for line in path.read_text().splitlines()] == [0, 4, 4]


def test_another_setting_is_refused_in_one_line_and_changes_nothing(tmp_path):
    with Folder(tmp_path / "out", SETTINGS) as folder:
        folder.add(sampled(0, 1))
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    for change in ({"n": 4}, {"model": "other"}, {"temperature": 0.8}):
        with pytest.raises(ConfigError, match="was begun with") as error:
            Folder(tmp_path / "out", SETTINGS | change)
        ((key, value),) = change.items()
        assert f"{key}={SETTINGS[key]}, not {value}" in str(error.value) and "\n" not in str(error.value)
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before


def test_an_evaluation_goes_on_with_the_same_rows_wherever_they_are_and_with_no_others(world, tmp_path):
    """The template shows the second: what it renders is no setting."""
    model, data, out = tmp_path / "model", tmp_path / "data.jsonl", tmp_path / "out"
    shutil.copytree(world / "model", model)
    template = model / "chat_template.jinja"
    template.write_text("{{ strftime_now('%f') }}{{ messages[0]['content'] }}")
    data.write_text('{"prompt": "1+1=", "answer": 2}\n{"prompt": "1+2=", "answer": 3}\n')

    def go_on(place):
        evaluation = evaluate.OfflineEvaluation(evaluate._options([str(model), str(place), "--max-new-tokens", "8"]))
        with Folder(out, evaluation.settings(*evaluation.models)):
            pass

    go_on(data)
    moved, edited = tmp_path / "moved.json", tmp_path / "edited.jsonl"
    moved.write_text('[{"answer": "2", "prompt": "1+1="}, {"answer": "3", "prompt": "1+2="}]')
    go_on(moved)
    for line in ('{"prompt": "1+3=", "answer": 3}', '{"prompt": "1+2=", "answer": 4}'):
        edited.write_text('{"prompt": "1+1=", "answer": 2}\n' + line)
        with pytest.raises(ConfigError, match=r"out: was begun with other rows; choose another --out"):
            go_on(edited)
    template.write_text("{{ strftime_now('%f') }} {{ messages[0]['content'] }}")
    with pytest.raises(ConfigError, match=r"out: was begun with another chat template; choose another --out"):
        go_on(data)


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "engine").mkdir()
    with pytest.raises(ConfigError, match="holds something else than an evaluation"):
        Folder(tmp_path, SETTINGS)
    assert [file.name for file in tmp_path.iterdir()] == ["engine"]


def test_a_line_that_is_no_answer_is_named(tmp_path):
    with Folder(tmp_path / "out", SETTINGS) as folder:
        folder.add(sampled(0, 1))
    with (tmp_path / "out" / "answers.jsonl").open("a") as file:
        file.write('{"item": "x"}\n')
    with pytest.raises(ConfigError, match=r"answers.jsonl:2: no answer"):
        Folder(tmp_path / "out", SETTINGS)


def test_two_evaluations_do_not_write_into_one_folder(tmp_path):
    code = (
        "import sys; from areal_megatron.observe.evaluation_folder import *; "
        "Folder(Path(sys.argv[1]), {'n': 2}).add; sys.exit(9)"
    )
    with Folder(tmp_path / "out", {"n": 2}):
        second = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "out")],
            capture_output=True,
            text=True,
            env={"PYTHONPATH": "."},
            timeout=60,
        )
    assert "another evaluation is writing here" in second.stderr


def test_a_file_system_without_locks_is_named(tmp_path):
    compiler = shutil.which("cc") or pytest.skip("there is no C compiler")
    library, out = tmp_path / "flock.so", tmp_path / "out"
    text = "#include <errno.h>\nint flock(int file, int operation) { errno = ENOSYS; return -1; }"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, "-xc", "-"], input=text, text=True, check=True)
    code = f"from areal_megatron.observe.evaluation_folder import *; Folder(Path({str(out)!r}), {{'n': 2}})"
    settings = {"PYTHONPATH": ".", "LD_PRELOAD": str(library)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=settings, timeout=60)
    assert f"{out}: its file system locks no files: Function not implemented" in done.stderr


def test_a_model_that_was_written_anew_is_another_model(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    before = files_digest(tmp_path)
    assert files_digest(tmp_path) == before
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").write_bytes(b"1235")
    assert files_digest(tmp_path) != before


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--n", "2", "--k", "1,4"], "--k: pass@4 needs --n 4"),
        (["--n", "0"], "--n: must be above 0"),
        (["--k", "0"], "--k: must be above 0"),
        (["--k", "x"], "--k"),
        (["--temperature", "0", "--n", "2"], "--temperature: 0 with --n 2"),
        (["--temperature", "-1"], "--temperature"),
        (["--seed", "-1"], "--seed"),
        (["--top-p", "0"], "--top-p: must be above 0"),
        (["--top-p", "1.1"], "--top-p"),
        (["--top-k", "-1"], "--top-k: must be 0 or more"),
    ],
)
def test_wrong_options(arguments, problem, capsys):
    with pytest.raises(SystemExit) as ended:
        evaluate.main(["model", "data", *arguments])
    assert ended.value.code == 2 and problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "data", "arguments", "problem"),
    [
        ("nowhere", "good", [], "nowhere"),
        ("model", "nowhere.jsonl", [], "nowhere.jsonl: cannot read the dataset"),
        ("model", "bad", [], "bad.jsonl:2: field 'answer' is missing"),
        ("model", "good", ["--reward", "maths"], "'maths' is no reward"),
        ("model", "good", ["--reward", "choice"], "good.jsonl:1: the reward choice cannot use the answer"),
        ("model", "good", ["--max-new-tokens", "100000"], "max_position_embeddings=512"),
    ],
)
def test_wrong_input_ends_with_one_line_before_anything_starts(
    world, tmp_path, capsys, model, data, arguments, problem
):
    (tmp_path / "good.jsonl").write_text('{"prompt": "1+1=", "answer": 2}\n')
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1+1=", "answer": 2}\n{"prompt": "1+1="}\n')
    path = tmp_path / f"{data}.jsonl" if data in ("good", "bad") else data
    common = ["--max-new-tokens", "8", "--out", str(tmp_path / "out")]
    assert evaluate.main([str(world / model), str(path), *common, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and problem in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_model_is_evaluated_in_the_dtype_that_it_is_stored_in(tmp_path, dtype):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"dtype": dtype}))
    assert evaluate.config_of(evaluate._options([str(tmp_path), "data"])).model.dtype == dtype


def test_a_model_of_a_dtype_that_engines_do_not_compute_in_is_evaluated_in_bfloat16(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"dtype": "float64"}))
    assert evaluate.config_of(evaluate._options([str(tmp_path), "data"])).model.dtype == "bfloat16"


RUN = """
name: mine
updates: 3
batch_size: 4
seed: 3
model: {path: MODEL}
data: {train: TRAIN, eval: EVAL, max_prompt_tokens: 5}
rollout: {group_size: 2, max_new_tokens: 7, workflow: WORKFLOW, turns: 2, max_running: 3}
reward: {function: "tests.support.rewards:coarse", wrong: -2, right: 4}
eval: {n: 3, temperature: 0.5, top_p: 0.9}
"""


class Seeded:
    """An engine's client: tokens follow from the prompt and the seed, and answers from what it is asked for."""

    name = "engine-0"

    def __init__(self):
        self.asked = set()

    async def generate(self, prompt, *, n, seed, max_tokens, **options):
        decoding = options["temperature"], options["top_p"], options["top_k"]
        self.asked |= {(tuple(prompt), seed + k, max_tokens, decoding) for k in range(n)}
        return [self._answer([*prompt, seed + k], max_tokens) for k in range(n)]

    def _answer(self, key, most):
        draw = np.random.default_rng([abs(number) for number in key])
        tokens = draw.integers(4, 14, draw.integers(1, most + 1)).astype(np.int32)
        return Completion(tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32), "stop")


async def twice(episode):
    await episode.sample()
    await episode.sample()


@pytest.mark.parametrize("workflow", ["single_turn", f"{__name__}:twice"])
def test_a_run_is_evaluated_as_it_evaluates_itself(world, tmp_path, workflow):
    """The same prompts, seeds, limits, ways to draw and scores, whatever the model: of an evaluation in the controller
    and of one by itself, with the run's folder alone."""
    data = tmp_path / "eval.jsonl"
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in (1, 22, 3, 44)] + [{"prompt": "111+111=", "answer": 1}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = tmp_path / "mine"
    shutil.copytree(world / "model", run / "hf")
    values = {"MODEL": world / "model", "TRAIN": data, "EVAL": data, "WORKFLOW": workflow}
    text = RUN
    for name, value in values.items():
        text = text.replace(name, str(value))
    (run / "config.yaml").write_text(text if workflow != "single_turn" else text.replace("turns: 2, ", ""))
    evaluation = evaluate.OfflineEvaluation(evaluate._options([str(run)]))
    config = config_file.load(run / "config.yaml")
    apart, inside = Seeded(), Seeded()

    async def both(folder):
        environments = Environments(config.by_environment(), RunFolder(run))
        await environments.start()
        engine = Engine(0, inside, Timeline(tmp_path / "timeline", "x"), Changed())
        sampler = Sampler(
            engines=[engine],
            is_lost=None,
            stop_tokens=evaluation.tokenizer.stop_tokens,
            environments=environments.all,
            timeline=Timeline(tmp_path / "timeline", "x"),
            evaluation=Decoding(config.eval.temperature, config.eval.top_p, config.eval.top_k),
        )
        prompts = read_prompts(config, "eval", evaluation.tokenizer)
        try:
            found = await Evaluation(config, sampler, prompts, Changed(), str, Kept()).run(0)
            await evaluation._ask(Engine(0, apart, None), environments.all, {evaluation.models[0]: folder})
        finally:
            await environments.close()
        return found

    with Folder(tmp_path / "out", evaluation.settings(*evaluation.models)) as folder:
        found = asyncio.run(asyncio.wait_for(both(folder), 300))
        result = evaluate.result_of(list(folder.answers.values()), evaluation.n, evaluation.ks, evaluation.files)
    assert apart.asked == inside.asked and (len(apart.asked) > 12) == (workflow != "single_turn")
    assert found["too_long"] == 1 and result["items"] == found["items"] == 4
    assert result["avg@3"]["value"] == found["accuracy"]
    assert 0 < found["accuracy"] < 1
    for key in ("truncated_share", "response_tokens_mean"):
        assert result[key] == found[key]
    answer = json.loads((tmp_path / "out/answers.jsonl").read_text().splitlines()[0])
    row = rows[answer["item"]]
    assert (answer["prompt"], answer["answer"]) == (row["prompt"], row["answer"])
    options = evaluate._options([str(run), "--n", "1", "--temperature", "0", "--max-new-tokens", "3", "--tp", "2"])
    changed = evaluate.config_of_run(options, run)
    assert (changed.eval.n, changed.eval.temperature, changed.eval.top_p) == (1, 0, 0.9)
    assert (changed.rollout.max_new_tokens, changed.rollout.tp, changed.seed) == (3, 2, 3)
    assert evaluate.config_of(evaluate._options([str(run / "hf"), "x"])).reward.function.endswith(":coarse") is False
    (run / "incarnations").mkdir()
    assert evaluate.config_of(evaluate._options([str(run / "hf"), "x"])).reward.function.endswith(":coarse")


def test_a_run_with_adapters_is_evaluated_by_its_whole_model(world, tmp_path):
    run, data = tmp_path / "mine", tmp_path / "eval.jsonl"
    shutil.copytree(world / "model", run / "hf")
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    text = RUN.replace("WORKFLOW, turns: 2", "single_turn") + "lora: {rank: 8}\n"
    for name, value in {"MODEL": world / "model", "TRAIN": data, "EVAL": data}.items():
        text = text.replace(name, str(value))
    (run / "config.yaml").write_text(text)
    config = evaluate.config_of_run(evaluate._options([str(run)]), run)
    assert config.model.path == str(run / "hf") and not config.engines_adapt
    assert "--enable-lora" not in engine_arguments(config)


def test_what_cannot_be_evaluated_of_an_adapter_is_said_in_one_line(world, tmp_path, capsys):
    base, data, run = world / "model", tmp_path / "eval.jsonl", tmp_path / "mine"
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    run.mkdir()
    (run / "config.yaml").write_text("name: mine\nupdates: 1\nmodel: {path: m}\ndata: {train: t}\n")
    adapter = write_adapter(tmp_path / "adapter", base, 3, 6, base_model_name_or_path="/nowhere/model")
    partial = write_adapter(tmp_path / "partial", base, 3, 6, ["q_proj"])
    (partial / "adapter_model.safetensors").write_bytes((adapter / "adapter_model.safetensors").read_bytes())

    def refused(*arguments):
        assert evaluate.main([*map(str, arguments), "--out", str(tmp_path / "out")]) == 2
        (line,) = [each for each in capsys.readouterr().err.splitlines() if each.startswith("error: ")]
        return line

    assert "adapter is an adapter of /nowhere/model, which is not here: name its folder" in refused(adapter, data)
    assert "model is no adapter, which has adapter_config.json and no config.json" in refused(
        base, data, "--base", base
    )
    assert "mine is a run, which has its model; leave it out" in refused(run, "--base", base)
    assert "has a tensor base_model.model.model.layers.0.mlp" in refused(partial, data)
    (adapter / "adapter_config.json").write_text("[]")
    assert "adapter_config.json" in refused(adapter, data, "--base", base)

    several = base, data, "--adapters", write_adapter(tmp_path / "other", base, 2, 4)
    assert f"MODEL is their base, and {adapter} is an adapter too" in refused(adapter, *several[1:])
    assert "mine is a run, which has its model; leave it out" in refused(run, *several[1:])
    assert "--pass-rates: are those of one model" in refused(*several, "--pass-rates", tmp_path / "rates.jsonl")
    assert "other/../other is named twice" in refused(*several, tmp_path / "other" / ".." / "other")
    assert "has a tensor base_model.model.model.layers.0.mlp" in refused(*several, partial)
    wide = save_model("qwen3", tmp_path / "wide")
    of_wide = write_adapter(tmp_path / "of_wide", wide, 2, 4)
    assert "has shape [2, 64], its config and the base's ask for [2, 128]: it is of another base" in refused(
        *several, of_wide
    )
    unknown = write_adapter(tmp_path / "unknown", base, 2, 4)
    (unknown / "adapter_config.json").write_text(
        (unknown / "adapter_config.json").read_text().replace("q_proj", "q_porj")
    )
    assert "target_modules: q_porj is no linear layer" in refused(*several, unknown)
    large = write_adapter(tmp_path / "large", base, 513, 4, ["q_proj"])
    assert "its rank is 513, and engines take up to 512: merge it" in refused(*several, large)
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "out" / "settings.json").write_text("{}")
    assert "out: holds something else than an evaluation with --adapters" in refused(*several)


def test_latents_have_no_adapter_in_engines(tmp_path):
    base = save_model("moonlight", tmp_path / "base")
    adapter = write_adapter(tmp_path / "adapter", base, 2, 4, ["kv_b_proj", "o_proj"])
    with pytest.raises(ConfigError, match="adapter: engines apply an adapter of kv_b_proj wrongly: merge it, `areal "):
        peft.for_engines(adapter, architecture(read_config(base)))


def test_adapters_have_the_names_that_tell_them_apart(world, tmp_path):
    assert names_of(["/runs/rl/adapter"]) == ["adapter"]
    assert names_of(["/runs/rl/adapter", "/runs/sft/adapter", "other"])[:2] == ["rl-adapter", "sft-adapter"]
    assert names_of(["/a/b/c", "/d/b/c"]) == ["a-b-c", "d-b-c"]
    assert names_of(["/runs/base"]) == ["runs-base"]
    adapters = [write_adapter(tmp_path / name / "adapter", world / "model", 2, 4) for name in ("x", "y")]
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": 2}\n{"prompt": "1+2=", "answer": 3}\n')
    options = [str(world / "model"), str(data), "--n", "2", "--max-new-tokens", "8", "--adapters", *map(str, adapters)]
    evaluation = evaluate.OfflineEvaluation(evaluate._options(options))
    folders = {model: SimpleNamespace(answers={}) for model in evaluation.models}
    asked = [(model.name, prompt.id, sample) for model, prompt, sample in evaluation.missing(folders)]
    assert asked == [(name, item, k) for item in (0, 1) for name in ("base", "x-adapter", "y-adapter") for k in (0, 1)]


def test_the_table_of_several_models():
    """The second of two items alone is answered by both."""
    answers = {
        "base": [sampled(0, 0, False), sampled(1, 0, False), sampled(1, 1, True)],
        "rl-adapter": [sampled(1, 0, True), sampled(1, 1, True)],
    }
    files = dict.fromkeys(range(2), "a")
    results = {name: evaluate.result_of(own, 2, [2], files) for name, own in answers.items()}
    found = differences(answers, 2, [2])
    assert found.keys() == {"rl-adapter"} and found["rl-adapter"]["avg@2"]["items"] == 1
    assert found["rl-adapter"]["avg@2"]["value"] == 0.5
    first, base, adapter, *_ = comparison.table(results, found).splitlines()
    assert first.split() == ["avg@2", "95%", "interval", "minus", "base", "95%", "interval"]
    assert base.split()[:3] == ["base", "25.00%", "0.00%"] and adapter.split()[:2] == ["rl-adapter", "100.00%"]
    assert "+50.00%" in adapter and "1 left out" in comparison.table(results, found)


def test_models_are_served_where_a_workflow_or_a_reward_may_ask_them(world, tmp_path):
    run, data = tmp_path / "mine", tmp_path / "eval.jsonl"
    shutil.copytree(world / "model", run / "hf")
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    models = "".join(f"{name}: {{path: {world / 'model'}}}, " for name in ("user", "judge"))

    def served(workflow, *given, reward="function: math"):
        values = {"MODEL": world / "model", "TRAIN": data, "EVAL": data, "WORKFLOW, turns: 2": workflow}
        text = RUN.replace("reward:", f"reward: {{{reward}}}\n#") + f"served: {{{models}}}\n"
        for name, value in values.items():
            text = text.replace(name, str(value))
        (run / "config.yaml").write_text(text)
        return {*evaluate.config_of_run(evaluate._options([str(run), *given]), run).served_models}

    assert served("mine:run") == {"user", "judge"} and served("single_turn") == set()
    assert served("single_turn", reward="function: judge") == {"judge"}
    assert served("single_turn", "--reward", "math", reward="function: judge") == set()


def test_a_model_that_shared_the_policys_engines_has_its_own_in_an_evaluation(world, tmp_path):
    """The policy that is evaluated has its adapter in its weights."""
    run, path = tmp_path / "mine", str(world / "model")
    shutil.copytree(path, run / "hf")
    data = DataConfig(train=str(world / "train.jsonl"), eval=str(world / "heldout.jsonl"))
    lodger = ServedConfig(judge=ServedModelConfig(path, engines=0))
    reward, lora = RewardConfig(function="judge"), LoraConfig(rank=4)
    config = Config("mine", updates=1, model=ModelConfig(path), data=data, served=lodger, reward=reward, lora=lora)
    save(config, run / "config.yaml")
    own = evaluate.config_of_run(evaluate._options([str(run)]), run)
    assert own.served_models["judge"].engines == 1 and not own.lodgers


def test_answers_of_another_user_are_of_another_evaluation(world, tmp_path, monkeypatch):
    """The same --out is refused then: its answers would be of two users."""
    data, other = tmp_path / "eval.jsonl", tmp_path / "other"
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    shutil.copytree(world / "model", other)
    monkeypatch.setattr(evaluate, "try_workflows", lambda *_: None)

    def settings(user):
        given = ["--workflow", "tests.support.served_flows:asks_a_user", "--turns", "2", "--user", str(user)]
        options = evaluate._options([str(world / "model"), str(data), "--device", "cpu", *given])
        evaluation = evaluate.OfflineEvaluation(options)
        return evaluation.settings(*evaluation.models)

    own, others = settings(world / "model"), settings(other)
    assert {key for key in own if own[key] != others[key]} == {"served"}


@pytest.mark.parametrize("option", ["--workflow", "--program", "--turns", "--user"])
def test_a_run_has_its_own_workflow(world, tmp_path, option):
    shutil.copytree(world / "model", tmp_path / "run" / "hf")
    values = {"MODEL": world / "model", "TRAIN": "x.jsonl", "EVAL": "x.jsonl", "WORKFLOW": "multi_turn"}
    text = RUN
    for name, value in values.items():
        text = text.replace(name, str(value))
    (tmp_path / "run" / "config.yaml").write_text(text)
    options = evaluate._options([str(tmp_path / "run"), option, "2"])
    with pytest.raises(ConfigError, match=f"^{option}: .* is a run, which has its own; leave it out$"):
        evaluate.config_of_run(options, tmp_path / "run")


def test_a_mistake_in_a_runs_workflow_is_told_before_an_engine_is_started(world, tmp_path, monkeypatch):
    (tmp_path / "mistaken.py").write_text("async def run(episode):\n    await episode.sample(1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    run, data = tmp_path / "mine", tmp_path / "eval.jsonl"
    shutil.copytree(world / "model", run / "hf")
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    values = {"MODEL": world / "model", "TRAIN": data, "EVAL": data, "WORKFLOW": "mistaken:run"}
    text = RUN
    for name, value in values.items():
        text = text.replace(name, str(value))
    (run / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"^rollout\.workflow: mistaken:run fails .*TypeError.*mistaken\.py:2"):
        evaluate.OfflineEvaluation(evaluate._options([str(run)]))


def test_what_cannot_be_evaluated_of_a_run_is_said_in_one_line(world, tmp_path, capsys):
    run = tmp_path / "mine"
    RunFolder(run).create()
    RunFolder(run).begin()
    text = RUN.replace("WORKFLOW, turns: 2", "single_turn").replace("EVAL", "''").replace("MODEL", str(world / "model"))

    def refused(config, *arguments):
        (run / "config.yaml").write_text(config)
        assert evaluate.main([str(run), *arguments]) == 2
        return capsys.readouterr().err

    assert "mine has no data.eval: name the data, areal evaluate" in refused(text)
    supervised = "name: x\nupdates: 1\nmode: sft\nmodel: {path: m}\ndata: {train: t}\n"
    assert "mine is a run of mode=sft, which has no reward" in refused(supervised)
    told = refused(text, str(world / "heldout.jsonl"))
    assert "mine has no model yet, neither hf/ nor one in exports/" in told and "resume it with resume=auto" in told
    saved = checkpoint_folder.partial(RunFolder(run), 3)
    (saved / "trainer").mkdir(parents=True)
    (saved / "trainer" / "__0_0.distcp").write_bytes(b"state")
    checkpoint_folder.seal(RunFolder(run), 3, 3)
    told = refused(text, str(world / "heldout.jsonl"))
    assert f"areal convert to-hf {run / 'checkpoints' / 'version-000003'} MODEL" in told
    assert evaluate.main([str(world / "model")]) == 2
    assert "DATA missing: areal evaluate MODEL DATA" in capsys.readouterr().err


def test_the_newest_model_of_a_run_is_evaluated(tmp_path):
    """Also of one that was done, was given more updates and has failed in them."""
    run = RunFolder(tmp_path)

    def newest(phase, *exported):
        """`exported`: (folder, when it was written)."""
        for folder, time in exported:
            folder.mkdir(parents=True)
            (folder / "model.safetensors").touch()
            (folder / "config.json").touch()
            os.utime(folder / "config.json", (time, time))
        write_status(run, Status(phase=phase))
        return export_of(tmp_path).relative_to(tmp_path).as_posix()

    first, second, third = (run.exports / f"version-{number:06d}" for number in (5, 10, 15))
    assert newest("training", (second, 20), (first, 30)) == "exports/version-000010"
    assert newest("done", (run.hf, 25)) == newest("training") == "hf"
    assert newest("training", (third, 40)) == "exports/version-000015"
    assert newest("done") == "hf"  # the files of a copied run are as old as the copying
