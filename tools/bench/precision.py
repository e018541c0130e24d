"""How far log-probabilities of trainer and engine are apart at equal weights, for each dtype of a real model.

    python tools/bench/precision.py MODEL [--data FILE.jsonl] [--answers 8] [--max-new-tokens 256] [--json FILE]

For each dtype, with logits in that dtype and in float32 (`model.dtype`, `model.head_dtype`), one after another on one
device: an engine samples answers as in a run, a trainer rank computes the log-probabilities of the same tokens, and so
does transformers, in float32 from the weights as that dtype holds them. Every answer is from the first version, so
nothing is stale: what differs is numerics alone. Differences are absolute; the 99th percentile is the
`logprob_diff_p99` of a run. MODEL is a Hugging Face folder with a tokenizer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from areal_megatron.config import (
    Config,
    ConfigError,
    DataConfig,
    MachineConfig,
    ModelConfig,
    ReshardConfig,
    RolloutConfig,
    TrainerConfig,
    config_file,
)
from areal_megatron.data.prompts import Prompt, read_prompts
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.data.trajectory import BatchPart, Trajectory, decoder, store
from areal_megatron.engine.client import EngineError
from areal_megatron.launch.engines import slots
from areal_megatron.launch.evaluate import serving, watch
from areal_megatron.launch.local import device_of
from areal_megatron.launch.supervision.hosts import Here
from areal_megatron.launch.supervision.orders import start_order
from areal_megatron.launch.supervision.processes import Child
from areal_megatron.model_check import check_model
from areal_megatron.packing.partition import split
from areal_megatron.planning.pools import Process, Slot
from areal_megatron.process.files import new_folder
from areal_megatron.run.folder import RunError, RunFolder
from areal_megatron.run.process_names import engine_name
from areal_megatron.workflows import single_turn
from areal_megatron.workflows.sampling import Sampling, sampling_seed
from tools.bench import common

VARIANTS = [(dtype, head) for dtype in ("bfloat16", "float16") for head in ("model", "float32")]
VARIANTS += [("float32", "float32")]
"""(model.dtype, model.head_dtype)"""
COMPUTE = "--compute"
"""Begins the command of a process that computes log-probabilities."""
BATCH = "batch.msgpack"
"""The file in a run folder with the answers, as a replica's part of a batch."""
PAIRS = [("engine", "trainer"), ("trainer", "transformers"), ("engine", "transformers")]
QUESTIONS = [
    "What is 17 times 24? Explain each step.",
    "Write a Python function that returns the n-th Fibonacci number, and explain how fast it is.",
    "A train travels 180 km in 2.5 hours. What is its average speed?",
    "Describe how rain forms, for a child of ten.",
    "Solve the equation 3x + 7 = 25 and check your answer.",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "List five ways to save energy at home, and say why each one works.",
    "What is the difference between a stack and a queue? Give an example of each.",
    "How many positive divisors does 360 have?",
    "Translate into French: The library opens at nine and closes when the last reader has left.",
    "Explain why the sky is blue.",
    "Write a SQL query that finds the three customers with the most orders.",
    "A box holds 3 red and 5 blue balls. Two are drawn without replacement. What is the chance that both are blue?",
    "Summarise the causes of the First World War in one paragraph.",
    "Prove that the sum of two odd numbers is even.",
    "Write a polite letter that asks a neighbour to play music less loudly at night.",
]
_PROGRESS_S = 10.0
_COMPUTE_S = 3600.0
"""The longest time that a trainer rank, or transformers, may take."""


@dataclass(frozen=True)
class Variant:
    """One dtype of the model and of its logits, and where it is measured."""

    config: Config
    run: RunFolder
    prompts: Sequence[Prompt]
    stop_tokens: list[int]
    answers: int
    """To each prompt."""

    @property
    def name(self) -> str:
        model = self.config.model
        return f"{model.dtype}, logits in {model.dtype if model.head_dtype == 'model' else model.head_dtype}"

    def measure(self) -> dict[str, object]:
        """Returns its row of the table. Raises EngineError, RunError or ConfigError."""
        self.run.create()
        config_file.save(self.config, self.run.config)
        here, seconds = socket.gethostname(), {}
        places = tuple(Slot(here, index) for index in slots(self.config, 1)[0])
        begin = time.monotonic()
        with Here() as host:
            process = Process(engine_name(0), "rollout", 0, here, places)
            host.start(start_order(self.config, self.run, process, host.supervisor(process)))
            trajectories = asyncio.run(self._sample(host.by_name[process.name]))
        seconds["engine"] = time.monotonic() - begin
        cap = self.config.trainer.microbatch_tokens
        [part] = split(trajectories, version=0, replicas=1, minibatches=1, cap=cap, seed=0)
        store(part, self.run.folder / BATCH)
        order = [i for microbatch in part.members[0] for i in microbatch]
        logprobs = {"engine": np.concatenate([part.trajectories[i].logprobs for i in order])}
        for by in ("trainer", "transformers"):
            begin = time.monotonic()
            logprobs[by] = self._compute(by, places[:1])
            seconds[by] = time.monotonic() - begin
        _say(f"  {', '.join(f'{by} {taken:.0f} s' for by, taken in seconds.items())}, with their starts")
        return {
            "name": self.name,
            "dtype": self.config.model.dtype,
            "head_dtype": self.config.model.head_dtype,
            "tokens": len(logprobs["engine"]),
            **{f"{a} − {b}": difference(logprobs[a], logprobs[b]) for a, b in PAIRS},
        }

    async def _sample(self, child: Child) -> list[Trajectory]:
        end = asyncio.create_task(watch(child))
        sample = asyncio.create_task(self._ask())
        await asyncio.wait([end, sample], return_when=asyncio.FIRST_COMPLETED)
        first = sample if sample.done() else end
        for task in (end, sample):
            task.cancel()
        await asyncio.gather(end, sample, return_exceptions=True)
        return first.result()

    async def _ask(self) -> list[Trajectory]:
        async with serving(self.config, self.run) as engine:
            sampling = Sampling(engine.client, self.config.rollout, self.stop_tokens, cache_salt=None)
            asked = [asyncio.create_task(self._answers(sampling, prompt)) for prompt in self.prompts]
            left = set(asked)
            while left:
                _, left = await asyncio.wait(left, timeout=_PROGRESS_S)
                _say(f"  {len(asked) - len(left)} of {len(asked)} prompts answered")
            return [trajectory for task in asked for trajectory in task.result()]

    async def _answers(self, sampling: Sampling, prompt: Prompt) -> list[Trajectory]:
        seed = sampling_seed(self.config.seed, "eval", prompt.id)
        completions = await single_turn.sample(sampling, prompt, self.answers, f"prompt-{prompt.id}", seed)
        return [
            Trajectory(
                uid=prompt.id * self.answers + number,
                epoch=0,
                prompt_id=prompt.id,
                admission_version=0,
                prompt=np.array(prompt.tokens, np.int32),
                response=completion.tokens,
                logprobs=completion.logprobs,
                versions=completion.versions,
                loss_mask=np.ones(len(completion.tokens), np.uint8),
                reward=0.0,
                truncated=completion.finish_reason == "length",
            )
            for number, completion in enumerate(completions)
        ]

    def _compute(self, by: str, places: tuple[Slot, ...]) -> np.ndarray:
        """Returns the log-probabilities of all sampled tokens, by the trainer or by transformers."""
        process = Process(by, "trainer", 0, places[0].node, places)
        with Here() as host:
            order = start_order(self.config, self.run, process, host.supervisor(process))
            order.command = [sys.executable, __file__, COMPUTE, by, str(self.run.folder)]
            host.start(order)
            asyncio.run(asyncio.wait_for(watch(host.by_name[by], code=0), _COMPUTE_S))
        return np.load(self.run.folder / f"{by}.npy")


def of_trainer(config: Config, run: RunFolder, part: BatchPart) -> torch.Tensor:
    from areal_megatron.trainer.trainer import Trainer

    with Trainer(config, run, rank=0) as trainer:
        return trainer.ppo.logprobs(part)


@torch.no_grad()
def of_transformers(config: Config, _: RunFolder, part: BatchPart) -> torch.Tensor:
    """The weights are those of model.dtype, and everything is computed in float32."""
    from transformers import AutoModelForCausalLM

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, config.model.dtype)
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=dtype, local_files_only=True)
    model = model.float().to(device).eval()
    found = []
    for index in (i for microbatch in part.members[0] for i in microbatch):
        trajectory = part.trajectories[index]
        row = torch.from_numpy(np.concatenate((trajectory.prompt, trajectory.response))).long().to(device)
        logits = model(row[None], logits_to_keep=len(trajectory.response) + 1).logits[0, :-1]
        chosen = row[len(trajectory.prompt) :, None]
        found.append(torch.log_softmax(logits / config.rollout.temperature, -1).gather(1, chosen)[:, 0])
    return torch.cat(found)


def compute(by: str, folder: str) -> None:
    """Writes the log-probabilities of a run folder's answers, by `trainer` or by `transformers`."""
    run = RunFolder(folder)
    part = decoder(BatchPart).decode((run.folder / BATCH).read_bytes())
    of = {"trainer": of_trainer, "transformers": of_transformers}[by]
    np.save(run.folder / f"{by}.npy", of(config_file.load(run.config), run, part).cpu().numpy())


def difference(ones: np.ndarray, others: np.ndarray) -> dict[str, float]:
    """Returns mean, 99th percentile and maximum of the absolute difference."""
    found = np.abs(ones.astype(np.float64) - others)
    p99 = np.quantile(found, 0.99, method="inverted_cdf")
    return {"mean": float(found.mean()), "p99": float(p99), "max": float(found.max())}


def variants(options: argparse.Namespace) -> list[Variant]:
    """Returns what is to be measured. Raises ConfigError."""
    folder = new_folder("bench-precision", options.out)
    data = options.data
    if not data:
        data = str(folder / "questions.jsonl")
        rows = ({"prompt": question, "answer": "-"} for question in QUESTIONS)
        Path(data).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    tokenizer, found = Tokenizer(options.model), []
    for dtype, head in VARIANTS:
        if dtype not in options.dtypes:
            continue
        config = Config(
            name=f"{dtype}-{head}",
            runs_dir=str(folder),
            updates=1,
            batch_size=len(QUESTIONS),
            model=ModelConfig(path=str(Path(options.model).absolute()), dtype=dtype, head_dtype=head),
            data=DataConfig(train=data, eval=data, max_prompt_tokens=sys.maxsize),
            machine=MachineConfig(device=options.device),
            trainer=TrainerConfig(microbatch_tokens=options.microbatch_tokens),
            rollout=RolloutConfig(
                tp=options.tp, max_new_tokens=options.max_new_tokens, max_running=64, first_weights="model"
            ),
            reshard=ReshardConfig(staging="streamed"),  # no updates: no memory for a second copy of the weights
        )
        config.machine.device = device_of(config)
        prompts = read_prompts(config, "eval", tokenizer)[: options.prompts]
        config.data.max_prompt_tokens = max(len(prompt.tokens) for prompt in prompts)
        check_model(config)
        found.append(Variant(config, RunFolder(config.run_dir), prompts, tokenizer.stop_tokens, options.answers))
    return found


def table(rows: Sequence[dict[str, object]]) -> str:
    """Returns the rows as a Markdown table."""
    titles = ["model.dtype and logits", "tokens", *(f"{a} − {b}: mean, p99, max" for a, b in PAIRS)]
    lines = [titles, ["---"] * len(titles)]
    for row in rows:
        cells = ("{mean:.2g}, **{p99:.2g}**, {max:.2g}".format(**row[f"{a} − {b}"]) for a, b in PAIRS)
        lines.append([row["name"], f"{row['tokens']:,}", *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = common.parser(__doc__, out="bench-precision")
    parser.add_argument("model", metavar="MODEL", help="Hugging Face folder")
    parser.add_argument("--data", default="", help="prompts, in a format of docs/data.md; default: sixteen questions")
    parser.add_argument("--prompts", type=int, help="take the first N; default: all")
    parser.add_argument("--answers", type=int, default=8, help="to each prompt; default: %(default)s")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="default: %(default)s")
    parser.add_argument("--microbatch-tokens", type=int, default=8192, help="default: %(default)s")
    dtypes = list(dict.fromkeys(dtype for dtype, _ in VARIANTS))
    parser.add_argument("--dtypes", nargs="+", choices=dtypes, default=dtypes, help="default: all", metavar="DTYPE")
    parser.add_argument("--tp", type=int, default=1, help="GPUs of the engine; default: 1")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    options = parser.parse_args(arguments)
    rows = []
    try:
        found = variants(options)
        for number, variant in enumerate(found, 1):
            _say(f"{number} of {len(found)}: {variant.name}; logs: {variant.run.folder / 'logs'}")
            rows.append(variant.measure())
            _say(table(rows[-1:]))
    except (ConfigError, FileExistsError) as e:
        _say(f"error: {e}")
        return 2
    except (EngineError, RunError, TimeoutError) as e:
        _say(f"error: {e}")
        return 1
    print(table(rows))
    common.keep(options.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(compute(*sys.argv[2:]) if sys.argv[1:2] == [COMPUTE] else main())
