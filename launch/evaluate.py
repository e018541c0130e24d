"""Evaluates a model: avg@n and pass@k with 95% confidence intervals, on data sets in their published formats.

    areal evaluate RUN [DATA]         what a run has trained, as the run evaluates itself
    areal evaluate MODEL DATA [--n 8] [--k 1,8] [--temperature 1] [--top-p 1] [--top-k 0]
                                      [--max-new-tokens N] [--reward FUNCTION] [--seed 1] [--device auto] [--tp 1]
                                      [--workflow NAME] [--program COMMAND] [--turns 1] [--user MODEL]
                                      [--base MODEL] [--vllm FLAG=VALUE …] [--out FOLDER] [--pass-rates FILE.jsonl]
    areal evaluate MODEL DATA --adapters FOLDER …     the model and adapters of it, side by side

MODEL is a Hugging Face folder or a name on the hub, or PEFT's folder of an adapter, whose base is --base or what its
config names; DATA whatever data.train of a run may be (docs/data.md). Starts one vLLM engine, asks it n times for each
item and writes OUT/answers.jsonl as answers come, and OUT/result.json at the end. With --adapters the engine serves all
of them, and the model itself, at the same time; each has such files in a folder of OUT.
The same command with the same OUT resumes an evaluation that was interrupted. Exit code 0: done, 1: the engine failed,
2: wrong input, 130: interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from areal_megatron.config import (
    Config,
    ConfigError,
    RewardConfig,
    RolloutConfig,
    config_file,
)
from areal_megatron.controller.engine import Engine, connect
from areal_megatron.controller.environment import Environment, Environments
from areal_megatron.data.files import fetch, file_names, records
from areal_megatron.data.prompts import Prompt, no_problems, read_prompts
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.engine import served
from areal_megatron.engine.adapters import BASE, Named, told
from areal_megatron.engine.client import EngineError
from areal_megatron.engine.environment import ADAPTERS
from areal_megatron.hub import hub
from areal_megatron.launch.engines import consecutive
from areal_megatron.launch.local import device_of
from areal_megatron.launch.supervision.failure import Failure
from areal_megatron.launch.supervision.hosts import Here
from areal_megatron.launch.supervision.orders import start_order
from areal_megatron.launch.supervision.processes import Child
from areal_megatron.launch.supervision.start import check_adapters
from areal_megatron.model_check import check_model, longest_of
from areal_megatron.models.architecture import read_config
from areal_megatron.observe.estimates import figures
from areal_megatron.observe.evaluation_folder import Folder, Sampled, digest, files_digest
from areal_megatron.planning.option_check import check_for_device, check_options
from areal_megatron.planning.pools import Process, Slot
from areal_megatron.process.errors import first_cause
from areal_megatron.process.files import new_folder, write_atomically, write_json
from areal_megatron.process.shown import guard
from areal_megatron.programs import comparison
from areal_megatron.programs.comparison import Model, differences
from areal_megatron.programs.evaluation_config import (
    config_of,
    config_of_run,
    find_models,
    first_given,
    run_of,
    say,
)
from areal_megatron.reward.answers import problem_with_answers
from areal_megatron.reward.function import BUILT_IN, load_function
from areal_megatron.reward.trial import try_rewards
from areal_megatron.reward.workers import default_count
from areal_megatron.run import descriptors
from areal_megatron.run.arguments import Parser
from areal_megatron.run.folder import RunError, RunFolder
from areal_megatron.run.process_names import engine_name, served_name
from areal_megatron.workflows.episode import EpisodeSpec
from areal_megatron.workflows.sampling import Decoding, Sampling, sampling_seed
from areal_megatron.workflows.trial import try_workflows
from areal_megatron.workflows.workflow import check_workflow

_PROGRESS_S = 5.0
_POLL_S = 0.2
_LENGTH = "--max-new-tokens:"
_ENGINE = engine_name(0)
Folders = Mapping[Model, Folder]
"""The folder of each model."""

MANY_CUT = 0.2
"""The share of answers cut at their limit from which on this is spoken of."""


class OfflineEvaluation:
    """An evaluation of one model, or of several adapters beside it, by one engine of its own. Raises ConfigError for
    whatever cannot work."""

    def __init__(self, options: argparse.Namespace):
        self.run_folder = run_of(options)
        self.models = [Model()] if self.run_folder else find_models(options)
        self.config = config_of_run(options, self.run_folder) if self.run_folder else config_of(options, self.models)
        self.config.machine.device = device_of(self.config)
        self.tokenizer = Tokenizer(self.config.model.path, untried=True)
        problems_of = problem_with_answers if self.run_folder and not options.data else no_problems
        read = read_prompts(self.config, "eval", self.tokenizer, problems_of)
        longest = max(len(prompt.tokens) for prompt in read)
        if not self.run_folder:
            self.config.data.max_prompt_tokens = longest
            if options.max_new_tokens is None:
                self._fit_length(longest)
        check_model(self.config, trains=False)
        for name, model in self.config.served_models.items():
            model.path = hub.model_folder(model.path, f"served.{name}.path")
            model.adapter = model.adapter and hub.model_folder(model.adapter, f"served.{name}.adapter")
            model.max_length = served.longest(self.config, name)
        check_adapters(self.config)
        check_for_device(self.config)
        for line in check_options(self.config, python={}):
            say(f"warning: {line}")
        self.n, own = self.config.eval.n, self.config.eval
        self.decoding = Decoding(own.temperature, own.top_p, own.top_k)
        self.ks = options.k or sorted({1, self.n})
        if problem := _problem_with_samples(self.n, self.ks, own.temperature):
            raise ConfigError(problem)
        self.kinds: list[Config] = []
        """A config for each environment and reward that the prompts need; `Prompt.environment` is a place in it."""
        self.prompts = self._sorted(read, options.reward)
        self._check_rewards()

    def _fit_length(self, longest: int) -> None:
        """Lowers the most tokens of an answer to what the model has room for after the longest prompt."""
        rollout = self.config.rollout
        limit, _ = longest_of(read_config(self.config.model.path), longest + rollout.max_new_tokens)
        rollout.max_new_tokens = max(1, int(min(rollout.max_new_tokens, limit - longest)))

    def _sorted(self, prompts: Sequence[Prompt], reward: str | None) -> list[Prompt]:
        """Returns the prompts that are short enough, each with its place in `kinds`. A built-in reward of the config
        gives way to the one that a row's format is made for, if no `reward` is named."""
        environments, places, found = self.config.by_environment(), {}, []
        for prompt in prompts:
            own = environments[prompt.environment]
            name = own.reward.function
            if not reward and name in BUILT_IN:
                name = prompt.reward or name
            key = prompt.environment, name
            if key not in places:
                places[key] = len(self.kinds)
                self.kinds.append(replace(own, reward=replace(own.reward, function=name)))
            if len(prompt.tokens) <= own.data.max_prompt_tokens:
                found.append(replace(prompt, environment=places[key]))
        if too_long := len(prompts) - len(found):
            say(f"{too_long} prompts are longer than data.max_prompt_tokens, and are not asked, as in the run")
        return found

    def _check_rewards(self) -> None:
        problems = {}
        for name in {kind.reward.function for kind in self.kinds}:
            load_function(name)
            problems[name] = problem_with_answers(name)
        for prompt in self.prompts:
            name = self.kinds[prompt.environment].reward.function
            if problem := problems[name](prompt.answer):
                raise ConfigError(f"{prompt.where}: the reward {name} cannot use the answer: {problem}")
        for number, kind in enumerate(self.kinds):
            check_workflow(kind)
            own = [replace(prompt, environment=0) for prompt in self.prompts if prompt.environment == number]
            try_rewards(kind, own, say)
            try_workflows(kind, own, say)

    @property
    def adapters(self) -> list[Named]:
        """What the engine serves beside the model itself."""
        return [model.adapter for model in self.models if model.adapter]

    def settings(self, model: Model) -> dict[str, object]:
        """Returns the settings on which answers of a model depend, apart from the order in which an engine happens to
        batch them; and where the rows are."""
        config, adapter = self.config, model.adapter.folder if model.adapter else None
        items = [[prompt.digest.hex(), self.kinds[prompt.environment].reward.function] for prompt in self.prompts]
        tokenizer, template = self.tokenizer.digests
        return {
            "model": config.model.path,
            "tokenizer": tokenizer,
            "template": template,
            "model_files": files_digest(Path(config.model.path)),
            "adapter": adapter,
            "adapter_files": files_digest(Path(adapter)) if adapter else None,
            "data": ",".join(own.data.eval for own in config.by_environment() if own.data.eval),
            "rewards": sorted({kind.reward.function for kind in self.kinds}),
            "rows": digest(items),
            "n": self.n,
            **asdict(self.decoding),
            "max_new_tokens": config.rollout.max_new_tokens,
            "seed": config.seed,
            "vllm": config.rollout.vllm or None,
            "program": config.rollout.workflow_program or None,
            "served": {name: [one.path, one.adapter] for name, one in config.served_models.items()} or None,
            "scoring": digest([_scoring(kind) for kind in self.kinds]) if self._has_own_scoring else None,
        }

    @property
    def _has_own_scoring(self) -> bool:
        return bool(self.run_folder) or self.config.rollout.workflow != RolloutConfig.workflow

    @property
    def files(self) -> dict[int, str]:
        """The name of the file of each item."""
        names = file_names(self.config, "eval")
        return {prompt.id: names[prompt.source] for prompt in self.prompts}

    def missing(self, folders: Folders) -> list[tuple[Model, Prompt, int]]:
        """Returns (model, item, number of its sample) of all missing answers: all to an item in a row, whichever model
        gives them, so that the engine has requests of all models at the same time."""
        return [
            (model, prompt, sample)
            for prompt in self.prompts
            for model in self.models
            for sample in range(self.n)
            if (prompt.id, sample) not in folders[model].answers
        ]

    async def run(self, children: Sequence[Child], run: RunFolder, folders: Folders) -> None:
        """Runs until every answer is in its folder. Raises EngineError, RunError or ConfigError."""
        log_file = run.folder.parent / "rewards.log"
        environments = Environments(self.kinds, run if self.config.served_models else None, log_file)
        try:
            await environments.start()
            async with asyncio.TaskGroup() as group:
                background = [group.create_task(watch(child)) for child in children]
                async with serving(self.config, run) as engine:
                    silent_s, stuck_s = self.config.rollout.silence_s, self.config.machine.peer_timeout_s
                    background.append(group.create_task(engine.watch(stuck_s, silent_s)))
                    total = self.n * len(self.prompts) * len(self.models)
                    background.append(group.create_task(_progress(engine, [*folders.values()], total)))
                    await self._ask(engine, environments.all, folders)
                    for task in background:
                        task.cancel()
        finally:
            await environments.close()
        self._tell_rewards(environments, log_file)

    def _tell_rewards(self, environments: Environments, log_file: Path) -> None:
        if refused := environments.refused:
            say(f"{refused} answers were not worked out, or several at once, and count as wrong (docs/graders.md)")
        if failed := environments.failures:
            say(
                f"warning: the rewards of {failed} answers failed, the first ones are named above, what they print is "
                f"in {log_file}: they are left out; the same command with the same --out asks for them again"
            )

    async def _ask(self, engine: Engine, environments: Sequence[Environment], folders: Folders) -> None:
        queue, most = iter(self.missing(folders)), self.config.rollout.max_running
        running = asyncio.Semaphore(most)

        async def ask_in_turn() -> None:
            for model, prompt, sample in queue:
                adapter = model.adapter.name if model.adapter else ""
                answer = await self._answer(engine, adapter, environments[prompt.environment], running, prompt, sample)
                if answer is not None:
                    folders[model].add(answer)

        async with asyncio.TaskGroup() as group:  # twice as many, so that no engine waits for scoring
            for _ in range(2 * most):
                group.create_task(ask_in_turn())

    async def _answer(
        self,
        engine: Engine,
        adapter: str,
        environment: Environment,
        running: asyncio.Semaphore,
        prompt: Prompt,
        sample: int,
    ) -> Sampled | None:
        """Returns the answer with its score; None if its reward failed."""
        seed = sampling_seed(self.config.seed, "eval", prompt.id) + sample
        spec = EpisodeSpec(prompt, 0, f"{adapter or 'item'}-{prompt.id}-{sample}", seed, "eval")
        await running.acquire()
        engine.occupy(1)
        with contextlib.ExitStack() as slot:
            slot.callback(running.release)
            slot.callback(engine.release, 1)
            sampling = Sampling(
                engine.client,
                environment.config.rollout,
                self.tokenizer.stop_tokens,
                cache_salt=None,
                decoding=self.decoding,
                adapter=adapter,
                sampled=lambda _: slot.close(),
            )
            sampled = await environment.runner.sample(sampling, spec, 1)
        assert sampled is not None
        (ended,) = sampled
        score = ended.score
        if score.failed:
            return None
        return Sampled(
            item=prompt.id,
            sample=sample,
            seed=seed,
            score=score.score,
            correct=score.correct,
            truncated=score.truncated,
            tokens=ended.length,
            response="\n\n".join(self.tokenizer.decode(one.tokens.tolist()) for one in ended.samples),
            prompt=prompt.text,
            answer=prompt.answer,
        )


def _scoring(kind: Config) -> list[Any]:
    """What of a run's config answers and scores depend on beside the settings that are named."""
    rollout, reward = kind.rollout, kind.reward
    limits = [kind.data.max_prompt_tokens, rollout.max_new_tokens, kind.model.dtype, kind.model.head_dtype]
    return [*limits, rollout.workflow, rollout.turns, reward.wrong, reward.right, reward.truncated]


def result_of(answers: Sequence[Sampled], n: int, ks: Sequence[int], files: Mapping[int, str]) -> dict[str, Any]:
    """Returns the figures of answers in any order, n for each item but for those whose rewards failed.

    `files` holds the name of the file of each item; if they are several, there are also figures of each.
    """
    result = {"n": n, "failed": n * len(files) - len(answers)} | figures(answers, n, ks)
    of_file: dict[str, list[Sampled]] = {}
    for answer in sorted(answers, key=lambda answer: answer.item):
        of_file.setdefault(files[answer.item], []).append(answer)
    if len(of_file) > 1:
        result["files"] = {name: figures(own, n, ks) for name, own in of_file.items()}
    return result


def write_pass_rates(data: str, answers: Sequence[Sampled], file: Path) -> None:
    """Writes the rows of `data` as JSONL, each with its share of correct answers as `pass_rate`, if it has any answer.

    Raises ConfigError.
    """
    given: dict[int, list[bool]] = {}
    for answer in answers:
        given.setdefault(answer.item, []).append(answer.correct)
    rates = {item: {"pass_rate": sum(own) / len(own)} for item, own in given.items()}
    rows = (record.row | rates.get(record.id, {}) for record in records(data))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, "".join(msgspec.json.encode(row).decode() + "\n" for row in rows))
    except OSError as e:
        raise ConfigError(f"--pass-rates: {file} cannot be written: {e.strerror}") from None


def table(result: dict[str, Any]) -> str:
    n, rows = result["n"], []
    for name, file in result.get("files", {}).items():
        rows += [name, *(f"  {row}" for row in _rows(file, n)), ""]
    rows += ["all files"] if rows else []
    rows += _rows(result, n)
    cut = "many answers are cut, and most rewards look for the result at their end: raise --max-new-tokens"
    rows += [cut] * (result["truncated_share"] >= MANY_CUT)
    rows += [f"{result['failed']} answers left out, since their rewards failed"] if result["failed"] else []
    return "\n".join(rows)


def _rows(result: dict[str, Any], n: int) -> list[str]:
    rows = [
        f"{name:<10}{figure['value']:>8.2%}   95% interval {figure['low']:.2%} – {figure['high']:.2%}"
        for name, figure in result.items()
        if isinstance(figure, dict) and "value" in figure
    ]
    return [
        *rows,
        f"{result['items']} items × {n} answers, {result['response_tokens_mean']:.1f} tokens each; "
        f"{result['truncated_share']:.1%} cut at their limit",
    ]


def fill(evaluation: OfflineEvaluation, out: Path, folders: Folders) -> None:
    """Runs an engine until all answers are in their folders. Raises EngineError, RunError or ConfigError."""
    config, run = evaluation.config, RunFolder(out / "engine")
    processes = _processes(config)
    shutil.rmtree(run.folder, ignore_errors=True)  # left by an evaluation that was killed
    run.create()
    config_file.save(config, run.config)
    run.begin()
    with Here() as host:
        for process in processes:
            say(f"starting {process.name}; its log: {run.log(process.name)}")
            order = start_order(config, run, process, host.supervisor(process))
            if process.pool == "rollout":
                order.settings[ADAPTERS] = told(evaluation.adapters)
            host.start(order)
        asyncio.run(evaluation.run([host.by_name[process.name] for process in processes], run, folders))


def _processes(config: Config) -> list[Process]:
    """Returns the engine, and the served models' engines, each on GPUs (or cores) of its own. Raises ConfigError."""
    named = [(_ENGINE, "rollout", 0, config.rollout.tp)]
    for name, model in config.served_models.items():
        named += [(served_name(name, index), name, index, model.tp) for index in range(model.engines)]
    here, own = socket.gethostname(), iter(consecutive(config, [tp for *_, tp in named]))
    return [
        Process(name, pool, index, here, tuple(Slot(here, at) for at in next(own))) for name, pool, index, _ in named
    ]


@asynccontextmanager
async def serving(config: Config, run: RunFolder) -> AsyncIterator[Engine]:
    """Connects to the engine. Raises EngineError or RunError if it does not serve within rollout.start_timeout_s."""
    deadline = time.monotonic() + config.rollout.start_timeout_s
    while not run.announced_engines() and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_S)
    engine = connect(config, run, 0)
    try:
        await engine.wait_until_ready(config.rollout.start_timeout_s)
        yield engine
    finally:
        await engine.client.close()


async def watch(child: Child, code: int | None = None) -> None:
    """Returns when the process has ended with this exit code; without one it may not end.

    Prints the last lines of its log and raises EngineError if it ends in another way, ConfigError if it refuses its
    input.
    """
    while child.exit_code is None:
        await asyncio.sleep(_POLL_S)
    if child.exit_code == code:
        return
    failure = Failure.of(child)
    *last_lines, problem = failure.text.split("\n")
    say("\n".join(last_lines))
    raise (ConfigError if failure.is_refusal else EngineError)(problem.removeprefix("error: "))


async def _progress(engine: Engine, folders: Sequence[Folder], total: int) -> None:
    begin, before = time.monotonic(), sum(len(folder.answers) for folder in folders)
    while True:
        await asyncio.sleep(_PROGRESS_S)
        answers = [answer for folder in folders for answer in folder.answers.values()]
        done = len(answers)
        left = (
            f", about {(total - done) * (time.monotonic() - begin) / (done - before):.0f} s left"
            if done > before
            else ""
        )
        right = f", {sum(answer.correct for answer in answers) / done:.1%} correct" if done else ""
        say(f"{done} of {total} answers{right}, {engine.tokens_per_s:,.0f} tokens/s{left}")


def _silence_libraries() -> None:
    """Has warnings of this project alone on the console."""
    handler = logging.StreamHandler()
    handler.addFilter(lambda record: record.name.startswith("areal_megatron"))
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", handlers=[handler])
    logging.captureWarnings(True)


def _problem_with_samples(n: int, ks: Sequence[int], temperature: float) -> str:
    if ks[-1] > n:
        return f"--k: pass@{ks[-1]} needs --n {ks[-1]} or more, it is {n}"
    if temperature < 0 or (temperature == 0 and n > 1):
        return f"--temperature: {temperature:g} with --n {n}: must be above 0, or 0 with --n 1"
    return ""


def _in_options(problem: str) -> str:
    """Returns an error about a config in the words of this program's options."""
    for key, option in (
        ("model.path: ", ""),
        ("reward.function: ", "--reward: "),
        ("rollout.vllm.", "--vllm "),
        ("rollout.max_new_tokens:", _LENGTH),
        ("data.max_prompt_tokens: ", "DATA: the longest prompt's "),
    ):
        problem = problem.replace(key, option, 1) if problem.startswith(key) else problem
    return problem


def _whole_numbers(text: str) -> list[int]:
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected whole numbers such as 1,8, is {text!r}") from None


def _parser() -> Parser:
    parser = Parser("areal_megatron.launch.evaluate", __doc__)
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="Hugging Face or PEFT folder, OWNER/NAME of the hub, or the folder of a run, whose settings are defaults",
    )
    parser.add_argument("data", metavar="DATA", nargs="?", help="what data.train may be, without weights")
    parser.add_argument("--n", type=int, help="as eval.n; default: 1")
    parser.add_argument(
        "--k", type=_whole_numbers, help="the k of pass@k, separated by commas, at most n; default: 1,n"
    )
    parser.add_argument("--temperature", type=float, help="as eval.temperature; default: 1")
    parser.add_argument("--top-p", type=float, help="as eval.top_p; default: 1, from all tokens")
    parser.add_argument("--top-k", type=int, help="as eval.top_k; default: 0, from all tokens")
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        help=f"most tokens of an answer; default: {RolloutConfig.max_new_tokens}, or all that the model has room for",
    )
    parser.add_argument("--workflow", help="as rollout.workflow; default: single_turn")
    parser.add_argument("--program", metavar="COMMAND", help="as rollout.workflow_program, with --workflow program")
    parser.add_argument("--turns", type=int, help="as rollout.turns; default: 1")
    parser.add_argument("--user", metavar="MODEL", help="as served.user.path, for workflows that talk to a model")
    parser.add_argument("--base", help="the model that an adapter is for; default: the one that it names")
    parser.add_argument("--reward", help="as reward.function; default: the format's own, or math")
    parser.add_argument(
        "--workers", type=int, default=default_count(), help="reward processes; default: a quarter of the cores"
    )
    parser.add_argument(
        "--reward-timeout-s", type=float, help=f"as reward.timeout_s; default: {RewardConfig.timeout_s:g}"
    )
    parser.add_argument("--seed", type=int, help="seed of samples and of the order of choices; default: 1")
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="as machine.device; default: auto"
    )
    parser.add_argument("--tp", type=int, help="as rollout.tp; default: 1")
    parser.add_argument(
        "--vllm",
        action="append",
        default=[],
        metavar="FLAG=VALUE",
        help="an option of vLLM, as rollout.vllm, e.g. kv_cache_dtype=fp8; may be repeated",
    )
    parser.add_argument(
        "--adapters",
        nargs="+",
        default=[],
        metavar="FOLDER",
        help="adapters of MODEL, PEFT's folders or on the hub, to evaluate beside it in one engine",
    )
    parser.add_argument("--out", type=Path, help="new folder, or one to resume; default: runs/evaluation-N")
    parser.add_argument(
        "--pass-rates",
        type=Path,
        metavar="FILE.jsonl",
        help="write the rows of DATA here, each with its pass_rate, for rollout.draw_min_pass_rate",
    )
    return parser


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = _parser()
    options = parser.parse_args(arguments)
    positive = ("n", "turns", "max_new_tokens", "workers", "tp", "reward_timeout_s")
    given = {f"--{name.replace('_', '-')}": getattr(options, name) for name in positive}
    given["--k"] = options.k[0] if options.k else None
    for name, value in given.items():
        if value is not None and value <= 0:
            parser.error(f"{name}: must be above 0, is {value}")
    if first_given(options.seed, 0) < 0:
        parser.error(f"--seed: must be 0 or more, is {options.seed}")
    if not 0 < first_given(options.top_p, 1) <= 1:
        parser.error(f"--top-p: must be above 0 and at most 1, is {options.top_p:g}")
    if first_given(options.top_k, 0) < 0:
        parser.error(f"--top-k: must be 0 or more, is {options.top_k}")
    temperature = first_given(options.temperature, 1.0)
    if options.n and (problem := _problem_with_samples(options.n, options.k or [1], temperature)):
        parser.error(problem)
    if temperature < 0:
        parser.error(f"--temperature: must be 0 or more, is {temperature:g}")
    return options


def main(arguments: list[str] | None = None) -> int:
    guard()
    options = _options(arguments)
    descriptors.raise_limit()
    _silence_libraries()
    try:
        if not run_of(options):
            if not options.data and not os.path.exists(options.model):
                raise ConfigError(f"{config_file.no_run(Path(options.model))}; a model goes with DATA")
            if not options.data:
                raise ConfigError("DATA missing: areal evaluate MODEL DATA; the folder of a run brings its own")
        elif options.base or options.adapters:
            given = "--base" if options.base else "--adapters"
            raise ConfigError(f"{given}: {options.model} is a run, which has its model; leave it out")
        if options.adapters and options.pass_rates:
            raise ConfigError("--pass-rates: are those of one model; leave it out, or --adapters")
        options.data = options.data and fetch(options.data, "DATA")
        evaluation = OfflineEvaluation(options)
        if options.pass_rates and evaluation.config.environments:
            raise ConfigError("--pass-rates: the run has several environments, name the DATA of one")
        out = options.out or _new_folder()
        shown = evaluated(evaluation, out, options.pass_rates)
    except KeyboardInterrupt:
        say("interrupted; the same command with the same --out continues")
        return 128 + signal.SIGINT
    except (ConfigError, EngineError, RunError, BaseExceptionGroup) as e:
        cause = first_cause(e)
        if not isinstance(cause, ConfigError | EngineError | RunError):
            raise
        say(f"error: {_in_options(str(cause))}")
        return 2 if isinstance(cause, ConfigError) else 1
    print(shown)
    return 0


def _new_folder() -> Path:
    """Makes and returns a folder for the answers. Raises ConfigError."""
    try:
        return new_folder("evaluation")
    except OSError as e:
        raise ConfigError(
            f"{e.filename}: cannot be written: {e.strerror}; say where answers are kept, --out FOLDER"
        ) from None


def evaluated(evaluation: OfflineEvaluation, out: Path, pass_rates: Path | None) -> str:
    """Brings an evaluation to its end, and returns its table. Raises ConfigError, EngineError and RunError."""
    several = len(evaluation.models) > 1
    if several:
        check_out(out)
    with contextlib.ExitStack() as stack:
        folders = {}
        for model in evaluation.models:
            folders[model] = stack.enter_context(Folder(out / model.name, evaluation.settings(model)))
        if done := sum(len(folder.answers) for folder in folders.values()):
            say(f"continuing after {done} answers in {out}")
        if evaluation.missing(folders):
            fill(evaluation, out, folders)
        answers = {model.name: list(folder.answers.values()) for model, folder in folders.items()}
        if not all(answers.values()):
            raise RunError("the rewards of all answers failed, see above; the same command asks for them again")
        results = {}
        for model, folder in folders.items():
            result = result_of(answers[model.name], evaluation.n, evaluation.ks, evaluation.files)
            write_json(folder.path / "result.json", {"settings": evaluation.settings(model)} | result)
            results[model.name] = result
        if several:
            found = differences(answers, evaluation.n, evaluation.ks)
            write_json(out / "result.json", {"models": results, "differences": found})
            return f"{comparison.table(results, found)}\n{out}/*/answers.jsonl, {out}/*/result.json, {out}/result.json"
        if pass_rates:
            write_pass_rates(evaluation.config.data.eval, answers[""], pass_rates)
        return f"{table(results[''])}\n{out}/answers.jsonl, {out}/result.json"


def check_out(out: Path) -> None:
    """Raises ConfigError for a folder that holds something else than an evaluation of several models."""
    if os.path.isdir(out) and any(out.iterdir()) and not (out / BASE / "settings.json").exists():
        raise ConfigError(f"{out}: holds something else than an evaluation with --adapters; choose another --out")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the engine too
    sys.exit(main())
