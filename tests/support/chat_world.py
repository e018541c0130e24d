"""A tokenizer with a chat template, and an engine whose answers are written down."""

import json
from types import SimpleNamespace

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from areal_megatron.config import Config, Data, Model, Reward, Rollout
from areal_megatron.data import tokenizer as product
from areal_megatron.data.prompts import Prompt
from areal_megatron.engine.client import Completion
from areal_megatron.reward.function import checked
from areal_megatron.reward.worker import Scored
from areal_megatron.workflows.episode import Place
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


def make_tokenizer(folder, template=TEMPLATE):
    """One token a character, but for `ab`."""
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
    """Token ids by characters: not how the tokenizer would write `ab`."""
    return [IDS[character] for character in text]


class Scripted:
    """An engine's client. `answer(prompt tokens, number of the call)` → text; an end token follows unless it ends in
    `…`."""

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
    """In the workers' place: the reward function, in this process."""

    def __init__(self, function):
        self._function, self.asked = function, []

    async def judge(self, answers):
        self.asked += [answer.response for answer in answers]
        found = [checked(self._function(answer.prompt, answer.response, answer.answer)) for answer in answers]
        return [Scored(score, feedback=feedback) for score, feedback in found]


def equals(prompt, response, answer):
    return float(response == answer)


class World:
    """Episodes of one workflow, on a scripted engine."""

    def __init__(
        self,
        folder,
        run,
        answer,
        *,
        turns=3,
        longest=400,
        reward=equals,
        rule="incorrect",
        template=TEMPLATE,
        timeout_s=5.0,
        batch_size=8,
    ):
        self.config = Config(
            name="x",
            updates=1,
            batch_size=batch_size,
            model=Model(path=str(folder)),
            data=Data(train="x"),
            rollout=Rollout(group_size=2, max_new_tokens=longest),
            reward=Reward(truncated=rule),
        )
        self.config.machine.timeout_s = timeout_s
        self.config.data.max_prompt_tokens = 400
        self.tokenizer = make_tokenizer(folder, template)
        self.client, self.judge = Scripted(answer), Judge(reward)
        scorer = Scorer(self.config.reward, self.judge, longest)
        self.episodes = EpisodeRunner(self.config, Workflow(run, turns), self.tokenizer, scorer)
        self.breaking_off = False

    def prompt(self, text="hi?", answer="right", forced=None):
        (tokens,) = self.tokenizer.prompts([text])
        return Prompt(id=7, text=text, answer=answer, tokens=tokens, response_tokens=forced)

    async def sample(self, n=1, seed=100, version=0, **prompt):
        sampling = Sampling(
            self.client, self.config.rollout, self.tokenizer.stop_tokens, None, lambda: self.breaking_off
        )
        try:
            return await self.episodes.sample(
                sampling, Place(self.prompt(**prompt), version, "group-3", seed, "train"), n
            )
        finally:
            await self.episodes.close()
