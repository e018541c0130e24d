"""The whole configuration of a run, as typed dataclasses: every key, its default, its range and what it means.

A user writes a YAML file with the few keys that differ from the defaults and may override any of them on the command
line (`key=value`): config_file.py loads both, rules.py checks them. Imports neither torch nor vllm: a login node reads
a config in a fraction of a second.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from dataclasses import Field, asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from areal_megatron.config.algorithms import PUBLISHED


class ConfigError(ValueError):
    """Wrong input by the user: one line with the key or file, the problem and the remedy."""


def key(
    default: Any,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] = (),
    needs: str = "",
) -> Any:
    """A field with its default and the values that it may have. Without a key of the same section that it `needs`, any
    other value than the default has no meaning, and is refused."""
    limits = {"at least": at_least, "above": above, "at most": at_most, "below": below}
    limits = {name: limit for name, limit in limits.items() if limit is not None}
    return field(default=default, metadata={"limits": limits, "choices": choices, "needs": needs})


@dataclass
class ModelConfig:
    path: str = MISSING
    """Model to start from: a Hugging Face folder, or OWNER/NAME[@REVISION] on the hub (docs/data.md, "By name")."""
    dtype: str = key("bfloat16", choices=("bfloat16", "float16", "float32"))
    """Dtype of parameters in trainers and engines (docs/algorithms.md, "Numerics"); gradients and optimizer states are
    float32."""
    head_dtype: str = key("float32", choices=("float32", "model"))
    """Dtype of the logits in trainers and engines; `model`: as `dtype`."""


@dataclass
class LoraConfig:
    """Low-rank adapters (LoRA), which are trained in place of the model's weights."""

    rank: int = key(0, at_least=0, at_most=512)
    """Rank of the adapters; 0: none, all weights are trained."""
    alpha: float = key(32.0, above=0, needs="rank")
    """An adapter's output is multiplied by alpha/rank."""
    targets: str = key("all-linear", needs="rank")
    """Linear layers that get an adapter, by PEFT's names: `q_proj,v_proj`; `all-linear`: all that may have one
    (docs/adapters.md)."""
    experts: bool = key(False, needs="rank")
    """Adapt the experts that routers choose as well; engines then need `merge` (docs/adapters.md)."""
    dropout: float = key(0.0, at_least=0, below=1, needs="rank")
    """Share of an adapter's input that is set to zero in training (docs/adapters.md)."""
    use_rslora: bool = key(False, needs="rank")
    """Multiply by alpha/√rank instead (rsLoRA)."""
    start: str = key("", needs="rank")
    """Adapter to start from: PEFT's folder, or OWNER/NAME[@REVISION] on the hub."""
    adapters: int = key(1, at_least=1, at_most=64, needs="rank")
    """Adapters that a program trains side by side, and engines hold (docs/loop.md)."""
    merge: bool = key(False, needs="rank")
    """Send engines whole weights, with the adapters added."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names in `targets`."""
        return tuple(name.strip() for name in self.targets.split(","))


@dataclass
class DataConfig:
    train: str = ""
    """File, folder, or OWNER/NAME[@REVISION][:[SUBSET/]SPLIT] on the hub (docs/data.md, docs/supervised.md); several:
    `a.jsonl,b.parquet`, with shares `a.jsonl:0.7,b.parquet:0.3`."""
    eval: str = ""
    """Held-out prompts, given likewise but without shares. Empty: no evaluation."""
    max_prompt_tokens: int = key(1024, at_least=1)
    """Longer prompts are skipped and counted."""
    unusable_rows: str = key("refuse", choices=("refuse", "skip"))
    """With an unusable row the run does not start, or it is left out and counted (docs/data.md)."""
    allow_overlap: bool = False
    """Start although prompts of `eval` are in `train` too."""


@dataclass
class MachineConfig:
    slots: int = key(0, at_least=0)
    """GPUs (or CPU cores) for both pools; 0: all of this machine."""
    shared: bool = False
    """Trainer ranks and engines share slots: for one GPU, or a few (docs/launching.md)."""
    device: str = key("auto", choices=("auto", "cpu", "cuda"))
    """What trainers and engines compute on; `auto`: GPUs where there are some."""
    host: str = "127.0.0.1"
    """Where controller, engines and rendezvous listen: an address, a network interface such as ib0, or `auto`, the
    interface of the default route."""
    peer_timeout_s: float = key(600.0, above=0)
    """Longest wait for another process of the run; then the run ends and names it."""
    silence_s: float = key(180.0, at_least=30)
    """A node (or MPI slot) that is silent for so long is lost; longer than a file server or network takes to fail
    over."""
    gather_s: float = key(600.0, above=0)
    """Longest wait for all nodes (or MPI slots) at the start; then a Slurm job is queued again."""
    lease_s: float = key(90.0, at_least=5)
    """A launcher whose heartbeat has stalled for so long may be replaced; longer than a file server takes to fail
    over."""
    check_versions: bool = True
    """Refuse other versions of torch, megatron-core, vLLM and TransformerEngine (docs/operations.md, "Versions")."""

    @property
    def ask_again_s(self) -> float:
        """How long a trainer's request may wait before it is told to ask again, well before it gives up."""
        return min(5.0, self.peer_timeout_s / 4)

    @property
    def is_cpu(self) -> bool:
        """Whether processes on this machine compute on its CPU; looks for NVIDIA's driver where `device` is auto."""
        return self.device == "cpu" or (self.device == "auto" and not Path("/dev/nvidiactl").exists())


@dataclass
class TrainerConfig:
    tp: int = key(1, at_least=1)
    """Tensor-parallel size."""
    cp: int = key(1, at_least=1)
    """Context-parallel size: ranks that divide the tokens of a micro-batch."""
    pp: int = key(1, at_least=1)
    """Pipeline stages."""
    dp: int = key(1, at_least=1)
    """Data-parallel replicas."""
    ep: int = key(1, at_least=1)
    """Expert-parallel size; divides tp · cp · dp / etp."""
    etp: int = key(0, at_least=0)
    """Tensor-parallel size of the experts; 0: as tp."""
    vpp: int = key(1, at_least=1)
    """Virtual pipeline stages of each rank: smaller bubbles, more messages."""
    recompute: str = key("auto", choices=("auto", "none", "elementwise", "mlp", "full"))
    """What the backward pass recomputes instead of keeping it; `auto`: the least that fits (docs/launching.md)."""
    recompute_layers: int = key(0, at_least=0)
    """The first n layers of each virtual pipeline stage use `recompute`, the others the next cheaper value. 0: all use
    it."""
    attention: str = key("auto", choices=("auto", "fa2", "fa3", "fa4"))
    """FlashAttention on GPUs: this version, or the fastest that works (docs/hardware.md)."""
    expert_dispatch: str = key("alltoall", choices=("alltoall", "flex"))
    """How tokens reach experts of other ranks: by NCCL; `flex`: by DeepEP (docs/hardware.md)."""
    microbatch_tokens: int = key(32768, at_least=1)
    """Most tokens of a packed micro-batch, over all of its cp ranks; a longer trajectory gets one of its own."""
    share_prompts: bool = True
    """Compute a group's prompt once for its answers in a micro-batch, where that pays (docs/packing.md)."""
    megatron: dict[str, Any] = field(default_factory=dict)
    """Fields of megatron-core's TransformerConfig, by its own names (docs/options.md)."""

    @property
    def recompute_modules(self) -> tuple[str, ...]:
        """What megatron-core recomputes of each layer, as `megatron` asks."""
        if not self.megatron.get("recompute_granularity"):
            return ()
        return tuple(self.megatron.get("recompute_modules") or ("core_attn",))  # megatron-core's default

    @property
    def microbatch_multiple(self) -> int:
        """Micro-batches come in multiples of this: virtual stages take as many at a time as there are stages."""
        return self.pp if self.vpp > 1 else 1

    def recomputed(self, layers: int) -> list[str]:
        """Returns what is recomputed of each of the `layers` layers of a virtual stage: none, elementwise, mlp or full;
        none while `auto` is undecided."""
        most = "none" if self.recompute == "auto" else self.recompute
        less = {"full": "mlp", "mlp": "elementwise"}.get(most, "none")
        count = min(self.recompute_layers or layers, layers)
        return [most] * count + [less] * (layers - count)


@dataclass
class OptimizerConfig:
    """AdamW."""

    lr: float = key(2e-5, at_least=0, at_most=1)
    """Learning rate after the warm-up."""
    schedule: str = key("constant", choices=("constant", "cosine", "linear"))
    """Course of the learning rate after the warm-up; cosine and linear end at 0."""
    warmup_steps: int = key(20, at_least=0)
    """Steps over which the learning rate rises from 0; by default at most a tenth of all."""
    weight_decay: float = key(0.05, at_least=0)
    """Decay of the weights."""
    beta1: float = key(0.9, at_least=0, below=1)
    """Decay of the mean of gradients, β₁."""
    beta2: float = key(0.95, at_least=0, below=1)
    """Decay of the mean of squared gradients, β₂."""
    eps: float = key(1e-5, above=0)
    """Added to the root of that mean, ε."""
    staleness_kl: float = key(0.02, at_least=0)
    """Largest KL divergence from stale samples, as a share of the entropy; rates are scaled down to keep to it
    (docs/staleness.md). 0: never."""
    clip_grad: float = key(1.0, at_least=0)
    """Largest norm of the gradient; 0: not clipped."""
    on_host: bool = False
    """Keep main parameters and moments in the hosts' memory: slower, and 12 bytes a parameter less on GPUs
    (docs/launching.md)."""


@dataclass
class CorrectionConfig:
    """Bounds on importance weights w = π_prox/π_behav; 0 switches one off, and all that are on are applied
    (docs/algorithms.md)."""

    truncate: float = key(5.0, at_least=0)
    """w is capped at this."""
    product_truncate: float = key(0.0, at_least=0)
    """w becomes the product of w over the trajectory's tokens, capped at this."""
    mask_low: float = key(0.0, at_least=0, below=1)
    """Tokens with w below this are masked …"""
    mask_high: float = key(0.0, at_least=0)
    """… and those with w above this."""
    sequence_mask_low: float = key(0.0, at_least=0, below=1)
    """Trajectories whose geometric mean of w is below this are masked …"""
    sequence_mask_high: float = key(0.0, at_least=0)
    """… and those above this."""
    product_mask_low: float = key(0.0, at_least=0, below=1)
    """Trajectories whose product of w is below this are masked …"""
    product_mask_high: float = key(0.0, at_least=0)
    """… and those above this."""
    negative_mask: float = key(0.0, at_least=0)
    """Tokens with a negative advantage are masked in trajectories whose mean of log π_behav/π_θ is above this."""
    m2po: float = key(0.0, at_least=0)
    """Tokens with the largest (log w)² of a mini-batch are masked until the mean of the others is at most this."""

    @property
    def bounds(self) -> dict[str, float]:
        """Name → bound of each correction that is on."""
        return {name: bound for name, bound in asdict(self).items() if bound}


SERVED_TEACHER = "served.teacher"
"""The kl_model that is a served one, or several."""
EXACT_KL = ("forward", "reverse")
"""The forms of kl_form that are divergences themselves, and no estimates from sampled tokens."""


@dataclass
class PenaltyConfig:
    """What is added to the policy loss of every trained token (docs/algorithms.md)."""

    entropy: float = key(0.0, at_least=0)
    """Coefficient of the entropy bonus."""
    kl: float = key(0.0, at_least=0)
    """Coefficient of the KL divergence from model.path, of which trainers keep a copy."""
    kl_form: str = key("k2", choices=("k1", "k2", "k3", "forward", "reverse"), needs="kl")
    """Its estimator; k1 is subtracted from the advantages. `forward`, `reverse`: the divergence itself, over
    served.teacher's likeliest tokens."""
    kl_top_k: int = key(16, at_least=1, needs="kl")
    """Number of these tokens; all others count as one."""
    kl_model: str = key("", needs="kl")
    """Another model that the divergence is from, given as `model.path`, or `served.teacher` (docs/algorithms.md,
    "Distillation"). Empty: model.path."""
    kl_weighted: bool = True
    """k2 and k3 are times π_θ/π_behav, up to ppo.correction.truncate."""
    kl_cov: float = key(0.0, at_least=0)
    """Coefficient of |log π_θ/π_prox| of the tokens by which entropy falls most (KL-Cov)."""
    kl_cov_share: float = key(0.002, above=0, at_most=1, needs="kl_cov")
    """Share of a mini-batch's tokens that count."""

    @property
    def asks_teacher(self) -> bool:
        """Whether the divergence is from a model that engines serve, and the trainers keep none."""
        return self.kl > 0 and self.kl_model == SERVED_TEACHER

    @property
    def top_k(self) -> int:
        """How many of a teacher's likeliest tokens the divergence is over; 0 where it is of the sampled ones."""
        return self.kl_top_k if self.asks_teacher and self.kl_form in EXACT_KL else 0

    @property
    def kl_folder(self) -> str:
        """The folder of another model that the trainers keep; empty without one."""
        return "" if self.kl_model == SERVED_TEACHER else self.kl_model

    @property
    def coefficients(self) -> dict[str, float]:
        """Name (`entropy`, `kl_k1`, `kl_forward`, `kl_cov` and the like) → coefficient of each penalty that is on."""
        named = {"entropy": self.entropy, f"kl_{self.kl_form}": self.kl, "kl_cov": self.kl_cov}
        return {name: coefficient for name, coefficient in named.items() if coefficient}


@dataclass
class CriticConfig:
    """A value model with an optimizer of its own (docs/algorithms.md)."""

    lr: float = key(0.0, at_least=0, at_most=1)
    """The critic's learning rate; 0: no critic."""
    gamma: float = key(1.0, above=0, at_most=1, needs="lr")
    """Discount of rewards, γ."""
    gae_lambda: float = key(1.0, at_least=0, at_most=1, needs="lr")
    """λ of generalised advantage estimation."""
    clip: float = key(0.0, at_least=0, needs="lr")
    """A value gains nothing from moving by more than this in one update; 0: not clipped."""
    warmup: int = key(0, at_least=0, needs="lr")
    """First updates, in which the critic alone is trained."""


@dataclass
class PPOConfig:
    objective: str = key("decoupled", choices=("decoupled", "naive", "loglinear"))
    """`naive`: the behaviour policy is the proximal one; `loglinear`: the proximal one is interpolated, which saves a
    forward pass (docs/algorithms.md)."""
    minibatches: int = key(4, at_least=1)
    """Optimizer steps per batch."""
    algorithm: str = key("ppo", choices=tuple(PUBLISHED))
    """Advantage, loss and mean (docs/algorithms.md), and the defaults of clips and rewards."""
    clip_low: float = key(0.2, above=0, at_most=1)
    """The ratio π_θ/π_prox is clipped at 1 − clip_low from below …"""
    clip_high: float = key(0.2, above=0)
    """… and at 1 + clip_high from above."""
    dual_clip: float = key(0.0, at_least=0)
    """Most that the ratio counts where the advantage is negative. 0: no bound."""
    sapo_positive: float = key(1.0, above=0)
    """Temperature of `sapo`'s gate for positive advantages …"""
    sapo_negative: float = key(1.05, above=0)
    """… and for negative ones: the higher, the sooner a ratio away from 1 counts for little."""
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    rewards: bool = True
    """Train on rewards; without them on the penalties alone, as in distillation."""
    penalty: PenaltyConfig = field(default_factory=PenaltyConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)

    @property
    def has_unit_ratio(self) -> bool:
        """Whether π_θ/π_prox is 1 at every step, so that nothing that bounds it has an effect."""
        return self.minibatches == 1 and self.objective != "naive"

    @property
    def has_reference(self) -> bool:
        return self.penalty.kl > 0 and not self.penalty.asks_teacher

    @property
    def has_critic(self) -> bool:
        return self.critic.lr > 0

    @property
    def all_have_gradients(self) -> bool:
        """Whether every trained token has a gradient, whatever its advantage."""
        return self.has_critic or bool(self.penalty.coefficients)

    @property
    def all_count(self) -> bool:
        """Whether tokens with advantage 0 change a step that others have a gradient for: M2PO masks by all tokens."""
        return self.all_have_gradients or self.correction.m2po > 0


@dataclass
class SFTConfig:
    """Supervised fine-tuning on conversations (docs/supervised.md)."""

    turns: str = key("all", choices=("all", "last", "marked"))
    """Trained messages of the assistant; `marked`: those with `weight` 1 or `train` true."""
    mean: str = key("token", choices=("token", "row"))
    """What counts alike in the loss: every trained token, or every row."""
    max_tokens: int = key(0, at_least=0)
    """Longest sample: a longer one ends with the last trained message that fits, or is left out. 0: any length."""


@dataclass
class DPOConfig:
    """Direct preference optimisation (docs/supervised.md); the reference is the model of model.path."""

    beta: float = key(0.1, above=0)
    """How strongly the policy is kept near the reference."""
    label_smoothing: float = key(0.0, at_least=0, below=0.5)
    """Share of the pairs that are taken to be the wrong way round."""


@dataclass
class RolloutConfig:
    """How engines sample answers."""

    engines: int = key(1, at_least=1)
    """Engines that the launcher starts; `areal engines` adds others."""
    tp: int = key(1, at_least=1)
    """Tensor-parallel size of an engine."""
    expert_parallel: bool = False
    """Ranks of an engine hold whole experts instead of a part of each; on GPUs."""
    replay_routes: bool = False
    """Train tokens through the experts that their engine chose (docs/algorithms.md); with engines on GPUs."""
    group_size: int = key(16, at_least=1)
    """Answers sampled per prompt (n)."""
    max_staleness: int = key(8, at_least=0)
    """η: no trajectory is trained more than this many versions after its admission."""
    temperature: float = key(1.0, above=0)
    """Temperature at which answers to train are sampled."""
    max_new_tokens: int = key(27648, at_least=1)
    """Most tokens of an answer, or after the prompt of a trajectory of several turns."""
    max_running: int = key(256, at_least=1)
    """Most requests that one engine decodes at a time."""
    silence_s: float = key(180.0, above=0)
    """Longest silence of an engine's server; then it is lost and started again."""
    start_timeout_s: float = key(1800.0, above=0)
    """Longest time for engines to load their model."""
    first_weights: str = key("auto", choices=("auto", "model", "trainers"))
    """Engines begin with model.path, or with the first version that trainers publish; `auto`: `trainers` on GPUs,
    unless adapters are sent."""
    kv_policy: str = key("recompute", choices=("recompute", "keep"))
    """The KV cache of running requests is recomputed at a weight update, or kept."""
    filter_groups: bool = False
    """Leave out groups whose answers all have the same score, or whose pass rate is outside the next two keys
    (docs/difficulty.md)."""
    min_pass_rate: float = key(0.0, at_least=0, at_most=1, needs="filter_groups")
    """Least share of right answers of a trained group …"""
    max_pass_rate: float = key(1.0, at_least=0, at_most=1, needs="filter_groups")
    """… and the largest."""
    draw_min_pass_rate: float = key(0.0, at_least=0, at_most=1)
    """Prompts whose known pass rate is below this are not drawn …"""
    draw_max_pass_rate: float = key(1.0, at_least=0, at_most=1)
    """… and neither are those above this."""
    remeasure_after: int = key(100, at_least=1)
    """A pass rate is forgotten after this number of versions."""
    easiest_first: bool = False
    """Draw prompts in the order of their rows' `pass_rate`, the highest first."""
    dump: bool = False
    """Keep every trained trajectory in the run folder (docs/trajectories.md)."""
    dump_gb: float = key(0.0, at_least=0)
    """Most of the disk that these may take, in 10⁹ bytes. 0: no bound."""
    workflow: str = "single_turn"
    """`single_turn`, `multi_turn`, `tool_use`, `program`, or `package.module:function` of yours (docs/workflows.md)."""
    workflow_program: str = ""
    """Command of the program of workflow=program (docs/environments.md)."""
    turns: int = key(1, at_least=1)
    """Most answers of the model in one episode."""
    samples: str = key("auto", choices=("auto", "individual", "concat"))
    """What is trained of an episode of several answers (docs/workflows.md)."""
    workflow_workers: int = key(0, at_least=0, at_most=1024)
    """Processes that run episodes. 0: a quarter of the controller's cores, 1 to 32."""
    workflow_timeout_s: float = key(600.0, above=0)
    """Longest time in which a workflow may be idle: it neither asks the model nor ends."""
    endpoint: str = key("loopback", choices=("loopback", "tls"))
    """Where agents reach the model: on the controller's machine alone, or on others too (docs/agents.md, "Agents on
    other machines")."""
    workflow_environment: str = ""
    """Environment variables for agents in processes of their own: `NAME,NAME` (docs/agents.md)."""
    vllm: dict[str, Any] = field(default_factory=dict)
    """Options of vLLM for the engines, by its own names with underscores (docs/options.md)."""

    @property
    def agent_variables(self) -> list[str]:
        """The names in workflow_environment."""
        return [name.strip() for name in self.workflow_environment.split(",") if name.strip()]


@dataclass
class ReshardConfig:
    """How new weights reach the engines."""

    update: str = key("auto", choices=("auto", "full", "delta"))
    """Send all weights, or only what has changed; `auto`: all over NCCL, elsewhere the faster of the two
    (docs/resharding.md)."""
    compression: str = key("none", choices=("none", "zstd"))
    """Compression of changes, which pays on links below about 10 Gb/s."""
    staging: str = key("full", choices=("full", "streamed"))
    """An engine receives weights into a second copy of its shard while it generates, or layer by layer while it is
    paused (docs/resharding.md)."""
    link: str = key("auto", choices=("auto", "device", "host"))
    """Path of the weights: NCCL between GPUs, or host memory and TCP; `auto`: `host` where the pools share GPUs
    (docs/resharding.md)."""
    check_finite: bool = False
    """Refuse to publish a weight that is NaN or Inf; costs a pass over the weights."""
    check_logprobs: bool = True
    """End the run if an engine's log-probabilities differ from the trainers' by more than model.dtype explains
    (docs/metrics.md)."""
    timeout_s: float = key(120.0, above=0)
    """Longest time for a version to reach an engine; a slower one keeps its old version."""


@dataclass
class CheckpointConfig:
    every: int = key(20, at_least=0)
    """Updates between checkpoints (docs/measurements.md, "When nodes fail"), by default 200 in supervised runs; 0:
    none."""
    keep: int = key(2, at_least=1)
    """How many of the newest stay."""
    keep_every: int = key(0, at_least=0)
    """Versions that are a multiple of this are kept for good; 0: none."""
    hf_every: int = key(0, at_least=0)
    """Versions between exports to Hugging Face format; 0: none."""
    timeout_s: float = key(3600.0, above=0)
    """Longest time for writing one; then the run ends with an error."""


JUDGE_PROMPT = """\
Grade the response to a question by the reference answer.

Question:
{prompt}

Reference answer:
{answer}

Response:
{response}

Does the final answer of the response agree with the reference answer? Think, then end with the line "Verdict: 1" if it
does, or "Verdict: 0" if it does not."""
"""What a judge is asked by default."""


@dataclass
class JudgeConfig:
    """What served.judge is asked with reward.function=judge (docs/rewards.md)."""

    prompt: str = ""
    """Question to the judge, with `{prompt}`, `{response}` and `{answer}`; by default whether the last two agree."""
    verdict: str = r"Verdict:\s*(-?\d+(?:\.\d+)?)"
    """Regular expression with one group, the number; its last match is the verdict."""
    worst: float = 0.0
    """The verdict with score 0 …"""
    best: float = 1.0
    """… and that with score 1."""
    samples: int = key(1, at_least=1, at_most=64)
    """How often the judge is asked; the score is the mean."""

    @property
    def question(self) -> str:
        """`prompt`, or the default."""
        return self.prompt or JUDGE_PROMPT


@dataclass
class RewardConfig:
    function: str = "math"
    """`math`, `choice`, `code`, `model`, `judge`, the address of a service, or `package.module:function` of yours
    (docs/rewards.md)."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    group_function: str = ""
    """Function that adds named terms to the rewards of a group's answers (docs/rewards.md)."""
    workers: int = key(0, at_least=0, at_most=1024)
    """Processes that score answers. 0: a quarter of the controller's cores, 1 to 32."""
    timeout_s: float = key(10.0, above=0)
    """How long a reward may take; by default, with a judge, a quarter more than served.judge.timeout_s."""
    retry_s: float = key(60.0, at_least=0)
    """How long a failed reward or episode is tried again, at least once; then its answer is not trained."""
    failed_share: float = key(0.1, at_least=0, at_most=1)
    """The run ends when more than this share of the last batch_size rewards (at least ten groups) have failed."""
    away_s: float = key(600.0, at_least=0)
    """How long answers wait for a service of rewards or a served model that is away."""
    wrong: float = key(-5.0, at_least=-1e6, at_most=1e6)
    """Reward of a wrong answer (score 0)."""
    right: float = key(5.0, at_least=-1e6, at_most=1e6)
    """Reward of a right answer (score 1)."""
    turn_discount: float = key(1.0, at_least=0, at_most=1)
    """Factor by which a reward counts less for each answer before the one that earned it (docs/workflows.md)."""
    truncated: str = key("incorrect", choices=("incorrect", "masked", "scored", "overlong"))
    """An answer cut at max_new_tokens is wrong, not trained, or scored as it is; `overlong`: scored, with a loss for
    length (docs/algorithms.md)."""

    @property
    def of_model(self) -> bool:
        """Whether a reward model scores the answers."""
        return self.function == "model"

    @property
    def of_judge(self) -> bool:
        """Whether a judge scores the answers."""
        return self.function == "judge"

    @property
    def of_served(self) -> bool:
        """Whether a model that is served beside the policy scores the answers."""
        return self.of_model or self.of_judge

    @property
    def needs_answers(self) -> bool:
        """Whether rows need a right answer."""
        return not self.of_model and not (self.of_judge and "{answer}" not in self.judge.question)

    @property
    def is_own(self) -> bool:
        """Whether `function` is an import path: neither built in, nor a served model, nor a service."""
        return ":" in self.function and "://" not in self.function


TEACHERS = ("teacher", "teacher_2", "teacher_3")
"""The served models that distillation asks, each for the rows that name it."""
SERVED = ("user", "judge", *TEACHERS, "reward")
"""The names of the models that may be served beside the policy, as ServedConfig has them."""


@dataclass
class ServedModelConfig:
    """A frozen model that engines of its own serve to workflows and rewards (docs/served.md)."""

    path: str = ""
    """The model, given as `model.path`. Empty: none is served."""
    adapter: str = key("", needs="path")
    """Adapter that it answers with, as `lora.start`."""
    engines: int = key(1, at_least=0, needs="path")
    """Engines that serve it. 0: the policy's engines do (docs/served.md)."""
    tp: int = key(1, at_least=1, needs="path")
    """Tensor-parallel size of such an engine."""
    dtype: str = key("model", choices=("model", "bfloat16", "float16", "float32"), needs="path")
    """Dtype of its parameters; `model`: that of the policy, model.dtype."""
    max_length: int = key(0, at_least=0, needs="path")
    """Most tokens of a question and its answer. 0: 1,024 more than the policy's, as far as the model takes them."""
    max_new_tokens: int = key(1024, at_least=1, needs="path")
    """Most tokens of its answer."""
    temperature: float = key(1.0, at_least=0, needs="path")
    """Temperature of its answers; 0: greedy."""
    timeout_s: float = key(120.0, above=0, needs="path")
    """Longest time for an answer; then it is asked for again."""
    vllm: dict[str, Any] = field(default_factory=dict)
    """Options of vLLM for its engines (docs/options.md)."""


@dataclass
class ServedConfig:
    """The models that are served beside the policy. NAME is `user`, `judge`, `teacher`, `teacher_2`, `teacher_3` or
    `reward`."""

    user: ServedModelConfig = field(default_factory=ServedModelConfig)
    judge: ServedModelConfig = field(default_factory=ServedModelConfig)
    teacher: ServedModelConfig = field(default_factory=ServedModelConfig)
    teacher_2: ServedModelConfig = field(default_factory=ServedModelConfig)
    teacher_3: ServedModelConfig = field(default_factory=ServedModelConfig)
    reward: ServedModelConfig = field(default_factory=ServedModelConfig)


@dataclass
class EvalConfig:
    """How data.eval is evaluated during a run (docs/evaluation.md); supervised runs know `every` alone."""

    every: int = key(0, at_least=0)
    """Updates between evaluations; 0: only before the first and after the last."""
    n: int = key(1, at_least=1)
    """Answers sampled to each prompt."""
    temperature: float = key(1.0, at_least=0)
    """0: greedy, with n=1."""
    top_p: float = key(1.0, above=0, at_most=1)
    """Draw from the likeliest tokens that have this probability together; 1: from all."""
    top_k: int = key(0, at_least=0)
    """Draw from the n likeliest tokens; 0: from all."""
    share: float = key(0.25, above=0, at_most=1)
    """Share of rollout.max_running that an evaluation may take of each engine; with 1 prompts to train wait."""


@dataclass
class TrackConfig:
    to: str = ""
    """Trackers beside TensorBoard: wandb, mlflow, swanlab, trackio; several: `wandb,mlflow` (docs/watching.md)."""
    online: bool = False
    """Send to the trackers' servers instead of writing into the run folder."""
    project: str = "areal_megatron"
    """Project (MLflow: experiment) of the run."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.to.split(",")) if self.to else ()


TRACKERS = ("wandb", "mlflow", "swanlab", "trackio")


@dataclass
class EnvironmentConfig:
    """One of several kinds of prompts in a run (docs/data.md). What is 0 or empty is as in the rest of the config."""

    name: str = MISSING
    """How metrics name it: letters, digits, `_`, `-` and `.`."""
    train: str = MISSING
    """Its `data.train`, without weights."""
    eval: str = ""
    """Its `data.eval`."""
    share: float = key(0.0, at_least=0)
    """Share of the prompts that are drawn; 0, then for all: every row once an epoch."""
    max_prompt_tokens: int = key(0, at_least=0)
    """Its `data.max_prompt_tokens`."""
    max_new_tokens: int = key(0, at_least=0)
    """Its `rollout.max_new_tokens`."""
    workflow: str = ""
    """Its `rollout.workflow`."""
    turns: int = key(0, at_least=0)
    """Its `rollout.turns`; 1 for one that has a workflow of its own."""
    reward: str = ""
    """Its `reward.function`."""
    group_reward: str = ""
    """Its `reward.group_function`."""
    teacher: str = key("", choices=("", *TEACHERS))
    """Its teacher, for rows whose column `teacher` names none."""


@dataclass
class Config:
    """The configuration of a run (docs/keys.md)."""

    name: str = MISSING
    """Run folder: runs_dir/name."""
    runs_dir: str = "runs"
    """Folder of run folders."""
    resume: str = ""
    """`auto`: from the newest complete checkpoint, if there is one; or the path of one."""
    mode: str = key("rl", choices=("rl", "sft", "dpo", "reward_model", "replay", "driven"))
    """`sft`, `dpo`, `reward_model`: supervised training (docs/supervised.md). `replay`: training on the `trajectories`
    of another run, data.train. `driven`: a program of yours says what is done (docs/loop.md)."""
    seed: int = key(1, at_least=0, below=2**32)
    """Seed of orders and of what is sampled."""
    updates: int = key(MISSING, at_least=1)
    """PPO updates, or optimizer steps of supervised training."""
    batch_size: int = key(512, at_least=1)
    """Trajectories of a PPO update (B), or rows or pairs of a supervised step."""
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DataConfig = field(default_factory=DataConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    sft: SFTConfig = field(default_factory=SFTConfig)
    dpo: DPOConfig = field(default_factory=DPOConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reshard: ReshardConfig = field(default_factory=ReshardConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    served: ServedConfig = field(default_factory=ServedConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    track: TrackConfig = field(default_factory=TrackConfig)
    environments: list[EnvironmentConfig] = field(default_factory=list)
    """Several in one run, in place of data.train and data.eval (docs/data.md)."""

    def by_environment(self) -> list[Config]:
        """Returns a config for each of `environments`, as a run with that one alone has it; else this one."""
        return [self._of(environment) for environment in self.environments] or [self]

    def _of(self, own: EnvironmentConfig) -> Config:
        data, rollout, reward = self.data, self.rollout, self.reward
        return replace(
            self,
            environments=[],
            data=replace(
                data, train=own.train, eval=own.eval, max_prompt_tokens=own.max_prompt_tokens or data.max_prompt_tokens
            ),
            rollout=replace(
                rollout,
                workflow=own.workflow or rollout.workflow,
                turns=own.turns or (1 if own.workflow else rollout.turns),
                max_new_tokens=own.max_new_tokens or rollout.max_new_tokens,
            ),
            reward=replace(
                reward,
                function=own.reward or reward.function,
                group_function=own.group_reward or reward.group_function,
            ),
        )

    @property
    def reads_rows(self) -> bool:
        """Whether a function of the user gets whole rows: a reward or a workflow."""
        return self.reward.is_own or ":" in self.rollout.workflow or self.rollout.workflow == "program"

    @property
    def served_models(self) -> dict[str, ServedModelConfig]:
        """The models that are served beside the policy, by name."""
        named = {name: getattr(self.served, name) for name in SERVED} if self.mode == "rl" else {}
        return {name: model for name, model in named.items() if model.path}

    @property
    def lodgers(self) -> dict[str, ServedModelConfig]:
        """The served models without engines of their own: the policy's serve them, as their base or with an adapter."""
        return {name: model for name, model in self.served_models.items() if not model.engines}

    @property
    def teachers(self) -> list[str]:
        """The names of the served models that are asked how likely they find what was sampled."""
        return [name for name in TEACHERS if name in self.served_models] if self.ppo.penalty.asks_teacher else []

    @property
    def trainer_ranks(self) -> int:
        return self.trainer.tp * self.trainer.cp * self.trainer.pp * self.trainer.dp

    @property
    def shares_gpus(self) -> bool:
        """Whether a trainer rank and an engine rank divide a GPU and its memory."""
        return self.machine.shared and self.has_engines and not self.machine.is_cpu

    @property
    def link(self) -> str:
        """reshard.link, where `auto` is decided: NCCL connects no two processes on one GPU."""
        return self.reshard.link if self.reshard.link != "auto" else "host" if self.shares_gpus else "device"

    def may_send_changes(self, at_other_site: bool = False) -> bool:
        """Whether trainers may send an engine only what has changed in a message. By `auto` they do not over NCCL,
        which reaches no other site: a whole message arrives before its changes could be found."""
        over_nccl = self.link == "device" and not self.machine.is_cpu and not at_other_site
        return self.reshard.update == "delta" or (self.reshard.update == "auto" and not over_nccl)

    @property
    def optimizer_steps(self) -> int:
        """The most steps that the policy's optimizer makes in the run."""
        return self.updates * (1 if self.is_supervised or self.is_driven else self.ppo.minibatches)

    @property
    def has_engines(self) -> bool:
        """Whether the run has engines that generate with the policy."""
        return self.mode in ("rl", "driven")

    @property
    def has_data(self) -> bool:
        """Whether the run reads rows, of data.train and data.eval or of `environments`."""
        return self.mode not in ("replay", "driven")

    @property
    def is_driven(self) -> bool:
        """Whether a program of the user says what trainers and engines do: there is no data, reward or schedule."""
        return self.mode == "driven"

    @property
    def is_supervised(self) -> bool:
        """Whether the run learns from data alone: it has neither controller nor engines, nor a critic."""
        return self.mode in ("sft", "dpo", "reward_model")

    @property
    def has_reference(self) -> bool:
        """Whether trainers keep a frozen model beside the policy."""
        return self.ppo.has_reference if not self.is_supervised else self.mode == "dpo"

    @property
    def has_critic(self) -> bool:
        return self.ppo.has_critic and not self.is_supervised

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are trained, and the model's own weights are not."""
        return self.lora.rank > 0

    @property
    def engines_adapt(self) -> bool:
        """Whether engines hold the model as it is, and get adapters to it from the trainers."""
        return self.has_adapters and not self.lora.merge

    @property
    def groups_per_batch(self) -> int:
        return self.batch_size // self.rollout.group_size

    @property
    def engines_start_empty(self) -> bool:
        """Whether an engine has no weights of its own to generate with before it has committed a version."""
        first = self.rollout.first_weights
        if first != "auto":
            return first == "trainers"
        return not self.engines_adapt and (not self.machine.is_cpu or bool(self.lora.start))

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt and the longest answer together."""
        return self.data.max_prompt_tokens + self.rollout.max_new_tokens

    @property
    def longest_in_engine(self) -> int:
        """The most tokens of a sequence in the policy's engines; vLLM's max_model_len."""
        return max([self.longest_sequence, *(model.max_length for model in self.lodgers.values())])

    @property
    def run_dir(self) -> Path:
        return Path(self.runs_dir) / self.name


CRITIC_ALGORITHMS = ("ppo", "ppo_sequence")
"""Algorithms whose baseline may be a critic; the others' is the group."""


def decide_defaults(config: Config, given: Container[str]) -> None:
    """Sets the keys whose defaults other keys decide, except those in `given` (dotted keys): the published settings of
    ppo.algorithm, a warm-up of at most a tenth of the run, the checkpoint interval of supervised runs, and the time of
    a judge."""
    defaults: dict[str, Any] = {"checkpoint.every": 200} if config.is_supervised else {}
    if config.ppo.algorithm in PUBLISHED:
        defaults |= PUBLISHED[config.ppo.algorithm].defaults
    defaults["optimizer.warmup_steps"] = min(OptimizerConfig().warmup_steps, max(config.optimizer_steps, 0) // 10)
    judge_s = config.served.judge.timeout_s
    if any(own.reward.of_judge for own in config.by_environment()) and 0 < judge_s < math.inf:  # others are refused
        defaults["reward.timeout_s"] = 1.25 * judge_s
    for place, value in defaults.items():
        if place not in given:
            section, name = place.split(".")
            setattr(getattr(config, section), name, value)


def config_fields(node: Any, prefix: str = "") -> Iterator[tuple[str, Field, Any]]:
    """(dotted key, field, value) of every key of a Config, in the order of this file; sections come before their
    keys."""
    for f in fields(node):
        value = getattr(node, f.name)
        yield prefix + f.name, f, value
        if is_dataclass(value):
            yield from config_fields(value, f"{prefix}{f.name}.")
        for number, entry in enumerate(value if isinstance(value, list) else ()):
            yield from config_fields(entry, f"{prefix}{f.name}.{number}.")


def describe(f: Field) -> str:
    """The values that a field may have, e.g. "a whole number, at least 1"."""
    if choices := f.metadata.get("choices"):
        return f"one of {', '.join(choices)}"
    kinds = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}
    kind = kinds.get(str(f.type), "a section of options")
    limits = f.metadata.get("limits", {})
    bounds = " and ".join(f"{name} {limit:.10g}" for name, limit in limits.items())
    return f"{kind}, {bounds}" if bounds else kind
