"""Evaluates a model: avg@n and pass@k with 95% confidence intervals, on data sets in their published formats.

    python -m areal_megatron.evaluate MODEL DATA [--n 8] [--k 1,8] [--temperature 1] [--top-p 1] [--top-k 0]
                                      [--max-new-tokens N] [--reward FUNCTION] [--seed 1] [--device auto] [--tp 1]
                                      [--vllm FLAG=VALUE …] [--out FOLDER] [--pass-rates FILE.jsonl]

MODEL is a Hugging Face folder or a name on the hub, DATA whatever data.train of a run may be (docs/data.md). Starts one
vLLM engine, asks it n times for each item and writes OUT/answers.jsonl as answers come, and OUT/result.json at the end.
The same command with the same OUT resumes an evaluation that was interrupted. Exit code 0: done, 1: the engine failed,
2: wrong input, 130: interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
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

from areal_megatron import config_file, descriptors, hub
from areal_megatron.arguments import Parser
from areal_megatron.config import (
    Config,
    ConfigError,
    DataConfig,
    MachineConfig,
    ModelConfig,
    ReshardConfig,
    RewardConfig,
    RolloutConfig,
)
from areal_megatron.controller.engine import Engine, connect
from areal_megatron.data.files import fetch, records, source_names
from areal_megatron.data.prompts import Prompt, read_prompts
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.engine.client import EngineError
from areal_megatron.errors import first_cause
from areal_megatron.files import new_folder, write_atomically, write_json
from areal_megatron.launch.engines import slots
from areal_megatron.launch.failure import Failure
from areal_megatron.launch.hosts import Here
from areal_megatron.launch.local import device_of
from areal_megatron.launch.option_check import check_for_device, check_options
from areal_megatron.launch.orders import start_order
from areal_megatron.launch.pools import Process, Slot
from areal_megatron.launch.processes import Child
from areal_megatron.model_check import check_model, longest_of
from areal_megatron.models.architecture import read_config
from areal_megatron.models.dtypes import ITEMSIZE
from areal_megatron.observe.estimates import figures
from areal_megatron.observe.evaluation_folder import Folder, Sampled, digest, files_digest
from areal_megatron.reward.answers import problem_with_answers
from areal_megatron.reward.function import load_function
from areal_megatron.reward.trial import try_rewards
from areal_megatron.reward.workers import RewardWorkers, default_count
from areal_megatron.run import Run, RunError, engine_name
from areal_megatron.shown import guard
from areal_megatron.workflows import single_turn
from areal_megatron.workflows.sampling import Decoding, Sampling, sampling_seed
from areal_megatron.workflows.scoring import Scorer

_PROGRESS_S = 5.0
_POLL_S = 0.2
_LENGTH = "--max-new-tokens:"
_ENGINE = engine_name(0)


class OfflineEvaluation:
    """An evaluation of one model by one engine of its own. Raises ConfigError for whatever cannot work."""

    def __init__(self, options: argparse.Namespace):
        self.config = config_of(options)
        self.config.machine.device = device_of(self.config)
        self.tokenizer = Tokenizer(options.model, untried=True)
        self.prompts = read_prompts(self.config, "eval", self.tokenizer)
        longest = self.config.data.max_prompt_tokens = max(len(prompt.tokens) for prompt in self.prompts)
        if options.max_new_tokens is None:
            rollout, read = self.config.rollout, read_config(options.model)
            limit, _ = longest_of(read, longest + rollout.max_new_tokens)
            rollout.max_new_tokens = max(1, min(rollout.max_new_tokens, limit - longest))
        check_model(self.config, trains=False)
        check_for_device(self.config)
        for line in check_options(self.config, python={}):
            _say(f"warning: {line}")
        self.n = options.n
        self.decoding = Decoding(options.temperature, options.top_p, options.top_k)
        self.rewards = {
            prompt.id: options.reward or prompt.reward or RewardConfig().function for prompt in self.prompts
        }
        problems = {}
        for name in set(self.rewards.values()):
            load_function(name)
            problems[name] = problem_with_answers(name)
        for prompt in self.prompts:
            name = self.rewards[prompt.id]
            if problem := problems[name](prompt.answer):
                raise ConfigError(f"{prompt.where}: the reward {name} cannot use the answer: {problem}")
        try_rewards(self.config, self.prompts, _say)

    @property
    def settings(self) -> dict[str, object]:
        """The settings on which answers depend, apart from the order in which an engine happens to batch them; and
        where the rows are."""
        config = self.config
        items = [[prompt.digest.hex(), self.rewards[prompt.id]] for prompt in self.prompts]
        tokenizer, template = self.tokenizer.digests
        return {
            "model": config.model.path,
            "tokenizer": tokenizer,
            "template": template,
            "model_files": files_digest(Path(config.model.path)),
            "data": config.data.eval,
            "rewards": sorted(set(self.rewards.values())),
            "rows": digest(items),
            "n": self.n,
            **asdict(self.decoding),
            "max_new_tokens": config.rollout.max_new_tokens,
            "seed": config.seed,
            "vllm": config.rollout.vllm or None,
        }

    @property
    def files(self) -> dict[int, str]:
        """The name of the file of each item."""
        names = source_names(self.config.data.eval)
        return {prompt.id: names[prompt.source] for prompt in self.prompts}

    def missing(self, folder: Folder) -> list[tuple[Prompt, int]]:
        """Returns (item, number of its sample) of all missing answers, the samples of an item in a row."""
        asked = ((prompt, sample) for prompt in self.prompts for sample in range(self.n))
        return [(prompt, sample) for prompt, sample in asked if (prompt.id, sample) not in folder.answers]

    async def run(self, child: Child, run: Run, folder: Folder) -> None:
        """Runs until every answer is in the folder. Raises EngineError, RunError or ConfigError."""
        workers = {
            name: RewardWorkers(replace(self.config.reward, function=name), self.config.model.path)
            for name in set(self.rewards.values())
        }
        try:
            await asyncio.gather(*(pool.start() for pool in workers.values()))
            async with asyncio.TaskGroup() as group:
                background = [group.create_task(watch(child))]
                async with serving(self.config, run) as engine:
                    silent_s, stuck_s = self.config.rollout.silence_s, self.config.machine.peer_timeout_s
                    background.append(group.create_task(engine.watch(stuck_s, silent_s)))
                    background.append(group.create_task(_progress(engine, folder, self.n * len(self.prompts))))
                    longest = self.config.rollout.max_new_tokens
                    scorers = {name: Scorer(self.config.reward, pool, longest) for name, pool in workers.items()}
                    await self._ask(engine, scorers, folder)
                    for task in background:
                        task.cancel()
        finally:
            await asyncio.gather(*(pool.close() for pool in workers.values()))
        if refused := sum(pool.refused for pool in workers.values()):
            _say(f"{refused} answers were not worked out, or several at once, and count as wrong (docs/rewards.md)")
        if failed := sum(pool.failures for pool in workers.values()):
            _say(
                f"warning: the rewards of {failed} answers failed, the first ones are named above: they are left out; "
                "the same command with the same --out asks for them again"
            )

    async def _ask(self, engine: Engine, scorers: dict[str, Scorer], folder: Folder) -> None:
        queue, most = iter(self.missing(folder)), self.config.rollout.max_running
        running = asyncio.Semaphore(most)

        async def ask_in_turn() -> None:
            for prompt, sample in queue:
                answer = await self._answer(engine, scorers[self.rewards[prompt.id]], running, prompt, sample)
                if answer is not None:
                    folder.add(answer)

        async with asyncio.TaskGroup() as group:  # twice as many, so that no engine waits for scoring
            for _ in range(2 * most):
                group.create_task(ask_in_turn())

    async def _answer(
        self, engine: Engine, scorer: Scorer, running: asyncio.Semaphore, prompt: Prompt, sample: int
    ) -> Sampled | None:
        """Returns the answer with its score; None if its reward failed."""
        seed = sampling_seed(self.config.seed, "eval", prompt.id) + sample
        async with running:
            engine.occupy(1)
            try:
                stop_tokens, rollout = self.tokenizer.stop_tokens, self.config.rollout
                sampling = Sampling(engine.client, rollout, stop_tokens, cache_salt=None, decoding=self.decoding)
                (completion,) = await single_turn.sample(sampling, prompt, 1, f"item-{prompt.id}-{sample}", seed)
            finally:
                engine.release(1)
        (score,) = await scorer.score(prompt, [completion])
        if score.failed:
            return None
        return Sampled(
            item=prompt.id,
            sample=sample,
            seed=seed,
            score=score.reward,
            correct=score.correct,
            truncated=score.truncated,
            tokens=len(completion.tokens),
            response=self.tokenizer.decode(completion.tokens.tolist()),
        )


def config_of(options: argparse.Namespace) -> Config:
    """Returns the config of a run that has an engine only. Raises ConfigError."""
    described = read_config(options.model)
    dtype = described.get("dtype", described.get("torch_dtype"))
    config = Config(
        name="engine",
        updates=1,
        seed=options.seed,
        model=ModelConfig(path=str(Path(options.model).absolute()), dtype=dtype if dtype in ITEMSIZE else "bfloat16"),
        data=DataConfig(train=options.data, eval=options.data, max_prompt_tokens=sys.maxsize),
        machine=MachineConfig(device=options.device),
        rollout=RolloutConfig(
            tp=options.tp, max_new_tokens=options.max_new_tokens or RolloutConfig.max_new_tokens, first_weights="model"
        ),
        reshard=ReshardConfig(staging="streamed"),  # no updates: no memory for a second copy of the weights
        reward=RewardConfig(
            function=options.reward or RewardConfig.function,
            workers=options.workers,
            timeout_s=options.reward_timeout_s,
            wrong=0.0,
            right=1.0,
            truncated="scored",
        ),
    )
    config.rollout.vllm = config_file.options(options.vllm)
    return config


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


def fill(evaluation: OfflineEvaluation, folder: Folder) -> None:
    """Runs an engine until all answers are in the folder. Raises EngineError, RunError or ConfigError."""
    config, run = evaluation.config, Run(folder.path / "engine")
    own = slots(config, 1)[0]
    shutil.rmtree(run.folder, ignore_errors=True)  # left by an evaluation that was killed
    run.create()
    config_file.save(config, run.config)
    here = socket.gethostname()
    process = Process(_ENGINE, "rollout", 0, here, tuple(Slot(here, index) for index in own))
    _say(f"starting {_ENGINE}; its log: {run.log(_ENGINE)}")
    with Here() as host:
        host.start(start_order(config, run, process, host.supervisor(process)))
        asyncio.run(evaluation.run(host.by_name[_ENGINE], run, folder))


@asynccontextmanager
async def serving(config: Config, run: Run) -> AsyncIterator[Engine]:
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
    _say("\n".join(last_lines))
    raise (ConfigError if failure.is_refusal else EngineError)(problem.removeprefix("error: "))


async def _progress(engine: Engine, folder: Folder, total: int) -> None:
    begin, before = time.monotonic(), len(folder.answers)
    while True:
        await asyncio.sleep(_PROGRESS_S)
        done = len(folder.answers)
        left = (
            f", about {(total - done) * (time.monotonic() - begin) / (done - before):.0f} s left"
            if done > before
            else ""
        )
        right = f", {sum(answer.correct for answer in folder.answers.values()) / done:.1%} correct" if done else ""
        _say(f"{done} of {total} answers{right}, {engine.tokens_per_s:,.0f} tokens/s{left}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _in_options(problem: str) -> str:
    """Returns an error about a config in the words of this program's options."""
    for key, option in (("model.path: ", ""), ("rollout.vllm.", "--vllm "), ("rollout.max_new_tokens:", _LENGTH)):
        problem = problem.replace(key, option, 1) if problem.startswith(key) else problem
    return problem


def _whole_numbers(text: str) -> list[int]:
    return sorted({int(part) for part in text.split(",")})


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser("areal_megatron.evaluate", __doc__)
    parser.add_argument("model", metavar="MODEL", help="Hugging Face folder, or OWNER/NAME of the hub")
    parser.add_argument("data", metavar="DATA", help="what data.train may be, without weights")
    parser.add_argument("--n", type=int, default=1, help="answers to each item; default 1")
    parser.add_argument(
        "--k", type=_whole_numbers, help="the k of pass@k, separated by commas, at most n; default: 1,n"
    )
    parser.add_argument("--temperature", type=float, default=RolloutConfig().temperature, help="0: greedy; default 1")
    parser.add_argument("--top-p", type=float, default=1.0, help="as eval.top_p; default: 1, from all tokens")
    parser.add_argument("--top-k", type=int, default=0, help="as eval.top_k; default: 0, from all tokens")
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        help=f"most tokens of an answer; default: {RolloutConfig.max_new_tokens}, or all that the model has room for",
    )
    parser.add_argument("--reward", help="as reward.function; default: the format's own, or math")
    parser.add_argument(
        "--workers", type=int, default=default_count(), help="reward processes; default: a quarter of the cores"
    )
    parser.add_argument(
        "--reward-timeout-s",
        type=float,
        default=RewardConfig().timeout_s,
        help="as reward.timeout_s; default: %(default)s",
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of samples and of the order of choices; default: 1")
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="as machine.device; default: auto"
    )
    parser.add_argument("--tp", type=int, default=1, help="GPUs of the engine; default: 1")
    parser.add_argument(
        "--vllm",
        action="append",
        default=[],
        metavar="FLAG=VALUE",
        help="an option of vLLM, as rollout.vllm, e.g. kv_cache_dtype=fp8; may be repeated",
    )
    parser.add_argument("--out", type=Path, help="new folder, or one to resume; default: runs/evaluation-N")
    parser.add_argument(
        "--pass-rates",
        type=Path,
        metavar="FILE.jsonl",
        help="write the rows of DATA here, each with its pass_rate, for rollout.draw_min_pass_rate",
    )
    options = parser.parse_args(arguments)
    options.k = options.k or sorted({1, options.n})
    positive = {
        "--n": options.n,
        "--max-new-tokens": 1 if options.max_new_tokens is None else options.max_new_tokens,
        "--workers": options.workers,
        "--tp": options.tp,
        "--reward-timeout-s": options.reward_timeout_s,
        "--k": options.k[0],
    }
    for name, value in positive.items():
        if value <= 0:
            parser.error(f"{name}: must be above 0, is {value}")
    if options.seed < 0:
        parser.error(f"--seed: must be 0 or more, is {options.seed}")
    if not 0 < options.top_p <= 1:
        parser.error(f"--top-p: must be above 0 and at most 1, is {options.top_p:g}")
    if options.top_k < 0:
        parser.error(f"--top-k: must be 0 or more, is {options.top_k}")
    if options.k[-1] > options.n:
        parser.error(f"--k: pass@{options.k[-1]} needs --n {options.k[-1]} or more, it is {options.n}")
    if options.temperature < 0 or (options.temperature == 0 and options.n > 1):
        parser.error(f"--temperature: {options.temperature:g} with --n {options.n}: must be above 0, or 0 with --n 1")
    return options


def main(arguments: list[str] | None = None) -> int:
    guard()
    options = _options(arguments)
    descriptors.raise_limit()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        options.model = hub.model_folder(options.model, "MODEL")
        options.data = fetch(options.data, "DATA")
        evaluation = OfflineEvaluation(options)
        out = options.out or new_folder("evaluation")
        with Folder(out, evaluation.settings) as folder:
            if folder.answers:
                _say(f"continuing after {len(folder.answers)} answers in {out}")
            if evaluation.missing(folder):
                fill(evaluation, folder)
            if not folder.answers:
                raise RunError("the rewards of all answers failed, see above; the same command asks for them again")
            result = result_of(list(folder.answers.values()), options.n, options.k, evaluation.files)
            write_json(out / "result.json", {"settings": evaluation.settings} | result)
            if options.pass_rates:
                write_pass_rates(options.data, list(folder.answers.values()), options.pass_rates)
    except KeyboardInterrupt:
        _say("interrupted; the same command with the same --out continues")
        return 128 + signal.SIGINT
    except (ConfigError, EngineError, RunError, BaseExceptionGroup) as e:
        cause = first_cause(e)
        if not isinstance(cause, ConfigError | EngineError | RunError):
            raise
        _say(f"error: {_in_options(str(cause))}")
        return 2 if isinstance(cause, ConfigError) else 1
    print(f"{table(result)}\n{out}/answers.jsonl, {out}/result.json")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the engine too
    sys.exit(main())
