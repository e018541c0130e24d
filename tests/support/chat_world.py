"""A tokenizer with a chat template, and an engine client that answers from a script."""

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from areal_megatron.config import Config, DataConfig, ModelConfig, RewardConfig, RolloutConfig
from areal_megatron.data import tokenizer as product
from areal_megatron.data.prompts import Prompt
from areal_megatron.engine.client import Completion
from areal_megatron.reward.function import checked
from areal_megatron.reward.worker import Scored
from areal_megatron.workflows.episode import EpisodeSpec
from areal_megatron.workflows.runner import EpisodeRunner
from areal_megatron.workflows.sampling import Sampling
from areal_megatron.workflows.scoring import Scorer
from areal_megatron.workflows.workflow import Workflow

SPECIAL = ["<|im_start|>", "<|im_end|>"]
CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
IDS = {token: number for number, token in enumerate([*SPECIAL, "<unk>", *CHARACTERS, "ab"])}
END = IDS["<|im_end|>"]
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

FORGETTING = """\
{%- set last = namespace(at=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.at = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- set content = message.content %}
{%- if message.role == 'assistant' and loop.index0 < last.at %}
{%- set content = content.split('</think>')[-1] %}{% endif %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Drops what was thought before the last message of the user, as Qwen3's template does; what follows a tool's result
goes on."""


def make_tokenizer(folder, template=TEMPLATE):
    """Makes a tokenizer of one token a character, except for `ab`, which is one token too."""
    library = Tokenizer(models.WordLevel(IDS, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Split(Regex(r"ab|[\s\S]"), "isolated")
    library.decoder = decoders.Fuse()
    library.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    folder.mkdir(parents=True, exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>"} | ({"chat_template": template} if template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return product.Tokenizer(folder)


def spelled(text):
    """Returns the token ids of the single characters, also of `ab`, unlike the tokenizer."""
    return [IDS[character] for character in text]


class Scripted:
    """An engine's client that answers with `answer(prompt tokens, number of the call)`.

    A text gets an end token, or if it ends in `…` is repeated for as long as tokens are left; a Completion is returned
    as it is, an exception raised.
    """

    name = "engine-0"

    def __init__(self, answer):
        self.answer, self.calls = answer, []

    async def generate(self, prompt, *, n, max_tokens, request_id, seed, stop_tokens, **_):
        assert n == 1 and max_tokens > 0
        number = len(self.calls)
        self.calls.append(SimpleNamespace(prompt=prompt, seed=seed, request_id=request_id, max_tokens=max_tokens))
        text = self.answer(prompt, number)
        if isinstance(text, Completion | BaseException):
            return completed(text)
        endless = text.endswith("…")
        tokens = spelled(text.rstrip("…")) * (max_tokens if endless else 1) + [END] * (not endless)
        reason = "stop" if len(tokens) <= max_tokens and not endless else "length"
        tokens = tokens[:max_tokens]
        return [
            Completion(
                np.array(tokens, np.int32),
                np.linspace(-1, -2, len(tokens)).astype(np.float32),
                np.full(len(tokens), number, np.int32),
                reason,
            )
        ]


def completed(result):
    if isinstance(result, BaseException):
        raise result
    return [result]


class Judge:
    """Takes the place of the reward workers: calls the reward function in this process."""

    def __init__(self, function):
        self._function, self.asked = function, []

    async def judge(self, answers):
        self.asked += [answer.response for answer in answers]
        return [self._judged(answer) for answer in answers]

    def _judged(self, answer):
        try:
            score, feedback = checked(self._function(answer.prompt, answer.response, answer.answer))
            return Scored(score, feedback=feedback)
        except ConnectionError as e:
            return Scored(problem=str(e))


def equals(prompt, response, answer):
    return float(response == answer)


class InThisProcess:
    """Runs groups of episodes as WorkflowRunner does, but in this process."""

    resumes = False

    def __init__(self, runner):
        self._runner = runner

    async def sample(self, sampling, spec, n, interrupted=()):
        specs = [replace(spec, request_id=f"{spec.request_id}-{k}", seed=spec.seed + k) for k in range(n)]
        found = await asyncio.gather(*(self._runner.sample(sampling, own) for own in specs))
        return None if None in found else found


class World:
    """Episodes of one workflow, on a scripted engine."""

    def __init__(
        self,
        folder,
        run,
        answer,
        *,
        turns=3,
        max_new_tokens=400,
        reward=equals,
        truncated="incorrect",
        template=TEMPLATE,
        timeout_s=5.0,
        batch_size=8,
        environment="",
        samples="auto",
    ):
        self.config = Config(
            name="x",
            updates=1,
            batch_size=batch_size,
            model=ModelConfig(path=str(folder)),
            data=DataConfig(train="x"),
            rollout=RolloutConfig(group_size=2, max_new_tokens=max_new_tokens, samples=samples),
            reward=RewardConfig(truncated=truncated, retry_s=0.0),
        )
        self.config.rollout.workflow_timeout_s = timeout_s
        self.config.rollout.workflow_environment = environment
        self.config.data.max_prompt_tokens = 400
        self.tokenizer = make_tokenizer(folder, template)
        self.client, self.judge = Scripted(answer), Judge(reward)
        self.scorer = Scorer(self.config.reward, self.judge, max_new_tokens)
        self._workflow, self.interrupting = Workflow(run, turns), False
        self.serve_at(None)

    def serve_at(self, endpoint):
        """Has agents find the model at this endpoint; None: on the loopback."""
        self.episodes = EpisodeRunner(self.config, self._workflow, self.tokenizer, self.scorer, endpoint=endpoint)
        self.groups = InThisProcess(self.episodes)

    def prompt(self, text="hi?", answer="right", forced=None):
        (tokens,) = self.tokenizer.prompts([text])
        return Prompt(7, text, answer, tokens, response_tokens=forced, where="rows.jsonl:8")

    async def sample(self, n=1, seed=100, version=0, **prompt):
        sampling = Sampling(
            self.client, self.config.rollout, self.tokenizer.stop_tokens, None, lambda: self.interrupting
        )
        try:
            spec = EpisodeSpec(self.prompt(**prompt), version, "group-3", seed, "train")
            return await self.groups.sample(sampling, spec, n)
        finally:
            await self.episodes.close()
