"""A policy that a program of the user samples from and trains, in a loop of its own (docs/loop.md).

    import areal_megatron as areal

    with areal.Policy("configs/tiny_cpu.yaml", name="mine") as policy:
        [answers] = policy.sample(["12+34="], n=8)
        for answer in answers:
            answer.advantage = float(answer.text.endswith("46")) - 0.5
        policy.forward_backward(answers, "grpo")
        policy.step()
        policy.publish()

The trainers and engines belong to a run, started by the same launcher (mode=driven).
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
from msgspec.structs import replace

from areal_megatron.api import given
from areal_megatron.api.run import Run, RunFailed
from areal_megatron.config import Config, ConfigError, config_file
from areal_megatron.config.algorithms import PUBLISHED
from areal_megatron.data.formats import Chat
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.data.trajectory import Trajectory, checksum
from areal_megatron.protocol import (
    Await,
    ControllerClient,
    ControllerError,
    Finish,
    GetReady,
    GiveSamples,
    LoadVersion,
    NotYet,
    ProgramReply,
    ProgramRequest,
    PublishVersion,
    SampledAnswer,
    SaveAdapter,
    SaveVersion,
    ScoreText,
    TakeStep,
    Ticket,
    TurnTo,
)
from areal_megatron.run.folder import RunError, RunFolder
from areal_megatron.run.process_names import CONTROLLER

LOSSES = (*PUBLISHED, "sft")
"""What `loss` may be: the loss of an algorithm (docs/algorithms.md), or the negative log-probability."""
_LOOK_S = 0.2
_END_S = 60.0

Numbers = Sequence[float] | np.ndarray
"""One for each token."""
Prompt = str | Chat | Sequence[int]
"""A text or messages, which the model's template renders, or tokens."""


@dataclass(eq=False)
class Response:
    """An answer of R tokens to a prompt, sampled or to be trained.

    A field with a value for each token may be one number for all.
    """

    prompt: Sequence[int] | np.ndarray
    """Its tokens."""
    tokens: Sequence[int] | np.ndarray
    logprobs: Numbers = ()
    """[R]: the log-probability with which each token was sampled; without any, only `sft` can train them."""
    versions: Sequence[int] | np.ndarray = ()
    """[R]: the version that sampled each token; without any, the present one."""
    text: str = ""
    finish_reason: str = "stop"
    """`stop`, or `length` for one that was cut at max_tokens."""
    advantage: float | Numbers = 0.0
    """How much better each token is than expected; `sft` takes none."""
    weight: float | Numbers | None = None
    """What the loss of each token is multiplied by before all are summed. None: a share of the mean that the loss
    stands for, such as 1 / (trained tokens of all samples)."""
    mask: Sequence[bool] | None = None
    """[R]: which tokens are trained; None: all."""
    routes: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8), repr=False)
    """As data/trajectory.py has them."""


@dataclass(frozen=True)
class Likelihood:
    """How likely the engines find a text of n tokens, at temperature 1."""

    logprobs: np.ndarray
    """float32 [n − 1]: of each token but the first, given those before it."""
    likely_tokens: np.ndarray
    """int32 [n − 1, k]: the likeliest tokens in the place of each, the likeliest first."""
    likely_logprobs: np.ndarray
    """float32 [n − 1, k]"""


@dataclass(frozen=True)
class Gradient:
    """The result of `Policy.forward_backward` or `Policy.forward`."""

    loss: float
    """The weighted sum of the tokens' losses."""
    metrics: dict[str, float]
    """Means over trained tokens, by the names of docs/metrics.md."""
    logprobs: list[np.ndarray]
    """float32 for each sample: the log-probabilities of its trained tokens under the present weights."""


class Policy:
    """A run's trainers and engines, driven by the calls of a program. A context manager.

    `config` and `keys` are as for `Run`; `updates` is the number of steps that optimizer.schedule counts, and data,
    rewards and batch sizes mean nothing. With `resume="auto"` it goes on from its last checkpoint. Calls return when
    they are done, and may come from several threads: `sample` goes on beside all others, which take turns.

    Raises ConfigError for wrong input, for which nothing is done, and RunFailed when a process of the run has failed.
    """

    _open: ClassVar[Policy | None] = None

    def __init__(self, config: str | Path | Config, *, quiet: bool = True, **keys: Any):
        """Returns when trainers and engines are ready. The progress of the start is printed unless `quiet`."""
        if Policy._open is not None:
            raise ConfigError(f"this process has a policy already, {Policy._open.folder}: close() that one first")
        self._run = Run(config, **(keys | {"mode": "driven"}))
        self.folder = self._run.folder
        """The folder of the run."""
        self._keys, self._endpoint, self._closed = None, "", False
        Policy._open = self
        try:
            before = RunFolder(self.folder).announced(CONTROLLER)
            self._run.start(quiet=quiet, tied=True)
            self._connect(before)
            self._ask(GetReady())
        except BaseException:
            self._kill()
            raise

    def sample(
        self,
        prompts: Sequence[Prompt],
        n: int = 1,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float = 1.0,
        top_k: int = 0,
        stop_tokens: Sequence[int] | None = None,
        seed: int | None = None,
        adapter: str | Path = "",
    ) -> list[list[Response]]:
        """Returns n answers to each prompt, all sampled at once. An engine that gets new weights goes on with them.

        `max_tokens` and `temperature`: by default rollout.max_new_tokens and rollout.temperature; losses assume that
        tokens were sampled at the latter. `stop_tokens`: by default the model's own. `seed`: the same one gives the
        same answers under the same weights; None: others in every call. `adapter`: a folder of `save_adapter`; it
        answers in place of what was published last.
        """
        rollout, longest = self.config.rollout, self.config.longest_sequence
        max_tokens = rollout.max_new_tokens if max_tokens is None else max_tokens
        temperature = rollout.temperature if temperature is None else temperature
        stop_tokens = self.tokenizer.stop_tokens if stop_tokens is None else stop_tokens
        seed = secrets.randbits(given.SEED_BITS - 1) if seed is None else seed
        drawn = given.answer_settings(n, max_tokens, temperature, top_p, top_k, stop_tokens, seed)
        asked = self._all_tokens(prompts, "prompt")
        for place, tokens in enumerate(asked):
            if len(tokens) + drawn.max_tokens > longest:
                raise ConfigError(
                    f"prompt {place} has {len(tokens)} tokens and may get {drawn.max_tokens} more, and "
                    f"data.max_prompt_tokens + rollout.max_new_tokens is {longest}"
                )
        folder = self._adapter_folder(adapter)
        requests = [
            replace(drawn, tokens=tokens, seed=(drawn.seed + place * drawn.n) % 2**given.SEED_BITS, adapter=folder)
            for place, tokens in enumerate(asked)
        ]
        replies = self._ask(*requests)
        pairs, times = zip(asked, replies, strict=True), int(n) // drawn.n
        return [[self._response(tokens, answer) for answer in reply.answers * times] for tokens, reply in pairs]

    def score(self, texts: Sequence[Prompt], top_k: int = 0, adapter: str | Path = "") -> list[Likelihood]:
        """Returns how likely the engines find the tokens of each text, and which `top_k` they find likeliest.
        `adapter`: as in `sample`."""
        asked, longest = self._all_tokens(texts, "text"), self.config.longest_sequence
        top_k = given.top_k(top_k, self.config.rollout)
        for place, tokens in enumerate(asked):
            if not 1 < len(tokens) < longest:  # an engine always samples a token more
                raise ConfigError(
                    f"text {place} has {len(tokens)} tokens: must be 2 or more, and fewer than "
                    f"data.max_prompt_tokens + rollout.max_new_tokens, {longest}"
                )
        folder = self._adapter_folder(adapter)
        replies = self._ask(*(ScoreText(tokens, top_k, folder) for tokens in asked))
        shapes = [(len(reply.logprobs), top_k) for reply in replies]
        return [
            Likelihood(reply.logprobs, reply.likely_tokens.reshape(shape), reply.likely_logprobs.reshape(shape))
            for reply, shape in zip(replies, shapes, strict=True)
        ]

    def forward_backward(self, samples: Sequence[Response], loss: str = "", **settings: float | str) -> Gradient:
        """Computes the gradient of a loss, and adds it to those since the last step.

        `loss`: one of LOSSES, by default ppo.algorithm. `settings`: other values for the keys objective, clip_low,
        clip_high and dual_clip of the section ppo.
        """
        return self._compute(samples, loss, settings, learns=True)

    def forward(self, samples: Sequence[Response], loss: str = "sft", **settings: float | str) -> Gradient:
        """Computes the same without a gradient; by default for the log-probabilities at temperature 1."""
        return self._compute(samples, loss, settings, learns=False)

    def step(self, lr: float | None = None) -> dict[str, float]:
        """Takes an optimizer step with the accumulated gradient, and returns metrics. `lr`: None for the schedule's.

        The version counts steps. One whose gradient is not finite changes nothing: `skipped_steps` is 1 then.
        """
        [reply] = self._ask(TakeStep(None if lr is None else given.number(lr, "lr", 0)))
        return reply.metrics

    def publish(self) -> int:
        """Brings the present weights to the engines, and returns their version. Answers that are being sampled go on
        with them."""
        [reply] = self._ask(PublishVersion())
        return reply.version

    def save(self) -> Path:
        """Saves weights and optimizer, and returns the folder of the checkpoint: one of the last checkpoint.keep."""
        [reply] = self._ask(SaveVersion())
        return Path(reply.folder)

    def load(self, checkpoint: str | Path) -> None:
        """Brings trainers to a checkpoint of this model, as a new version; `publish` brings it to the engines."""
        self._ask(LoadVersion(str(given.path(checkpoint, "checkpoint").absolute())))

    def turn_to(self, adapter: int, new: bool = False) -> None:
        """Switches to one of lora.adapters adapters, counted from 0, the first one: later calls train, save, load and
        publish it. It keeps its optimizer and gradient between switches; `new` starts it afresh."""
        if not self.config.has_adapters:
            raise ConfigError("lora.rank: without adapters there is one model: give their rank")
        adapter = given.whole(adapter, "adapter", 0)
        if not adapter < (most := self.config.lora.adapters):
            raise ConfigError(f"adapter {adapter}: there are {most}, counted from 0: start with a larger lora.adapters")
        self._ask(TurnTo(adapter, new))

    def save_adapter(self, folder: str | Path) -> Path:
        """Writes the adapter that is trained as PEFT's folder, which must not be there yet, and returns it. `sample`
        and `score` use it as long as it is there."""
        folder = given.path(folder, "folder").absolute()
        if not self.config.has_adapters:
            raise ConfigError("lora.rank: there is no adapter to save: give its rank")
        if folder.exists():
            raise ConfigError(f"{folder} is there already, and engines may have read it: choose another folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._ask(SaveAdapter(str(folder)))
        return folder

    def close(self) -> None:
        """Ends the run. What was not saved is lost."""
        if self._closed:
            return
        try:
            with self._client() as client:
                client.request(Finish())  # the run may end before one could ask what has become of that
            with suppress(TimeoutError):
                self._run.wait(_END_S)
        finally:
            self._kill()

    @property
    def version(self) -> int:
        """The version that the trainers have."""
        return self._version

    def __enter__(self) -> Policy:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        if kind and issubclass(kind, RunError | KeyboardInterrupt):
            self._kill()
        else:
            self.close()

    def _connect(self, before: tuple[int, int] | None) -> None:
        """`before`: the announcement of the last start's controller, which may still be there for a moment."""
        run = RunFolder(self.folder)
        while not self._endpoint:
            self._look()
            if run.announced(CONTROLLER) in (None, before):
                time.sleep(_LOOK_S)
                continue
            with suppress(RunError):  # it is started once more
                self._endpoint = run.endpoint(CONTROLLER)
        self._keys, self.config = run.keys, config_file.load(run.config)
        self.tokenizer = Tokenizer(self.config.model.path)
        self._version = run.start.version

    def _look(self) -> None:
        """Raises RunFailed or ConfigError if the run has ended."""
        if not self._run.is_running:
            self._run.wait()
            raise RunFailed(f"the run in {self.folder} has ended")

    def _kill(self) -> None:
        self._closed = True
        self._run.kill()
        if Policy._open is self:
            Policy._open = None

    def _client(self) -> ControllerClient:
        name, patience = f"program-{threading.get_native_id()}", self.config.machine.peer_timeout_s
        assert self._keys is not None  # read when the policy was opened
        return ControllerClient(self._endpoint, self._keys, name, patience, self._look)

    def _ask(self, *messages: ProgramRequest) -> list[ProgramReply]:
        """Has all of this done at once, and returns when it is."""
        if self._closed:
            raise ConfigError(f"the policy of {self.folder} is closed")
        try:
            with self._client() as client:
                tickets = [cast(Ticket, client.request(message)) for message in messages]
                replies = [_wait(client, ticket.number) for ticket in tickets]
        except ControllerError as e:
            self._look()
            raise RunFailed(str(e)) from None
        for reply in replies:
            self._version = max(self._version, reply.version)
            if reply.wrong:
                raise ConfigError(reply.wrong)
            if reply.failed:
                raise RunFailed(reply.failed)
        return replies

    def _compute(
        self, samples: Sequence[Response], loss: str, settings: Mapping[str, float | str], learns: bool
    ) -> Gradient:
        loss = loss or self.config.ppo.algorithm
        if loss not in LOSSES:
            raise ConfigError(f"loss: must be one of {', '.join(LOSSES)}, is {loss!r}")
        changes = given.loss_settings(settings)
        if not all(isinstance(sample, Response) for sample in given.several(samples, "samples", Response)):
            raise ConfigError("samples: must be a list of Response; `sample` returns a list of them for each prompt")
        if len(samples) < self.config.trainer.dp:
            raise ConfigError(f"{len(samples)} samples cannot be split over trainer.dp={self.config.trainer.dp}")
        if loss != "sft" and loss != self.config.ppo.algorithm:
            published = PUBLISHED[loss]
            changes = {"clip_low": published.clip_low, "clip_high": published.clip_high} | changes
            changes["algorithm"] = loss
        made = [self._trajectory(place, sample, loss) for place, sample in enumerate(samples)]
        masks = [trajectory.loss_mask == 1 for trajectory in made]
        weighed = [sample.weight is not None for sample in samples]
        if any(weighed) and not all(weighed):
            raise ConfigError(f"sample {weighed.index(False)} has no weight, and others have one")
        columns = {
            name: [
                given.of_tokens(getattr(sample, name), len(mask), f"sample {place}: {name}")[mask]
                for place, (sample, mask) in enumerate(zip(samples, masks, strict=True))
            ]
            for name in ("advantage", *(("weight",) if all(weighed) else ()))
        }
        message = GiveSamples(
            samples=made,
            loss=loss,
            advantages=columns["advantage"],
            weights=columns.get("weight", []),
            settings=changes,
            learns=learns,
        )
        [reply] = self._ask(message)
        bounds = np.cumsum([own.size for own in columns["advantage"]])[:-1]
        return Gradient(reply.metrics["loss"], reply.metrics, np.split(reply.logprobs, bounds))

    def _trajectory(self, place: int, sample: Response, loss: str) -> Trajectory:
        """Raises ConfigError for lengths that differ, and for what the model has no room for."""
        where = f"sample {place}"
        prompt, tokens = (given.tokens(getattr(sample, own), f"{where}: {own}") for own in ("prompt", "tokens"))
        length = len(tokens)
        if not len(prompt) or not length:
            raise ConfigError(f"{where}: has {len(prompt)} tokens of a prompt and {length} after it; needs one of each")
        if (whole := len(prompt) + length) > self.config.longest_sequence:
            raise ConfigError(
                f"{where}: has {whole} tokens, and data.max_prompt_tokens + rollout.max_new_tokens is "
                f"{self.config.longest_sequence}"
            )
        if not (has_logprobs := _is_given(sample.logprobs)) and loss != "sft":
            raise ConfigError(f"{where}: has no logprobs, which {loss} compares with; loss='sft' needs none")
        logprobs = given.of_tokens(sample.logprobs if has_logprobs else 0.0, length, f"{where}: logprobs")
        versions = sample.versions if _is_given(sample.versions) else self._version
        versions = given.of_tokens(versions, length, f"{where}: versions", "iu", np.int32)
        mask = given.of_tokens(True if sample.mask is None else sample.mask, length, f"{where}: mask", "b", np.bool_)
        return Trajectory(
            uid=place,
            epoch=0,
            prompt_id=checksum(prompt),
            admission_version=int(versions[0]),
            prompt=prompt,
            response=tokens,
            logprobs=logprobs,
            versions=versions,
            loss_mask=mask.astype(np.uint8),
            reward=0.0,
            truncated=sample.finish_reason == "length",
            routes=given.routes(sample.routes, f"{where}: routes"),
        )

    def _adapter_folder(self, adapter: str | Path) -> str:
        if not adapter:
            return ""
        folder = given.path(adapter, "adapter").absolute()
        if not self.config.engines_adapt:
            raise ConfigError("adapter: engines apply adapters with lora.rank, and without lora.merge, alone")
        if not (folder / "adapter_config.json").is_file():
            raise ConfigError(f"adapter: there is none in {folder}")
        return str(folder)

    def _all_tokens(self, prompts: Sequence[Prompt], what: str) -> list[list[int]]:
        found = []
        for place, prompt in enumerate(given.several(prompts, f"{what}s", dict)):
            taken = given.prompt(prompt, f"{what} {place}")
            tokens = taken.tolist() if isinstance(taken, np.ndarray) else self.tokenizer.prompts([taken])[0]
            if not tokens:
                raise ConfigError(f"{what} {place} has no tokens")
            found.append(tokens)
        return found

    def _response(self, prompt: list[int], answer: SampledAnswer) -> Response:
        tokens = answer.tokens.tolist()
        return Response(
            prompt=prompt,
            tokens=tokens,
            logprobs=answer.logprobs,
            versions=answer.versions,
            text=self.tokenizer.decode(tokens),
            finish_reason=answer.finish_reason,
            routes=answer.routes,
        )


def _wait(client: ControllerClient, ticket: int) -> ProgramReply:
    while isinstance(reply := client.request(Await(ticket)), NotYet):
        pass
    assert isinstance(reply, ProgramReply)
    return reply


def _is_given(numbers: Numbers | float) -> bool:
    return numbers is not None and np.size(numbers) > 0
