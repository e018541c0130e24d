"""The figures that a run's page shows, as data; the browser draws them."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from areal_megatron.config import Config

TRAIN, HELD_OUT, THIRD, GREY = "#2563eb", "#ea580c", "#0d9488", "#94a3b8"
_BY_STALENESS = ("#7c3aed", "#2563eb", "#0891b2", "#0d9488", "#65a30d", "#ca8a04", "#ea580c")


@dataclass(frozen=True)
class Curve:
    """One metric of metrics.jsonl over versions."""

    key: str
    colour: str
    label: str = ""
    """Its name in the legend; a figure with a single curve has none."""


@dataclass(frozen=True)
class Figure:
    title: str
    unit: str
    curves: tuple[Curve, ...] = ()
    kind: str = "lines"
    """`lines`; `accuracy`: with the evaluations and their intervals; `held_out`: a single curve with its evaluations;
    `histogram` of staleness, all updates together; `utilisation` of the pools over time."""
    zero: bool = False
    """The axis begins at 0."""
    log: bool = False
    scale: float = 1.0


@dataclass(frozen=True)
class Section:
    title: str
    text: str
    figures: tuple[Figure, ...]


def sections(config: Config, keys: Collection[str]) -> list[Section]:
    """Returns what to show of a run whose updates have the metrics `keys`."""
    if config.is_supervised:
        return [_supervised(config.mode)]
    shown = [_learning(config), _groups(), _asynchrony(), _weight_updates(), _off_policy(keys), _optimisation()]
    return [*shown, *([_critic()] if config.has_critic else [])]


def _supervised(mode: str) -> Section:
    def with_held_out(title: str, unit: str, key: str) -> Figure:
        return Figure(title, unit, (Curve(key, TRAIN, "training batch"),), kind="held_out")

    unit, right = "nats per pair", "share of pairs ranked right"
    if mode == "sft":
        unit, right = "nats per token", "share of tokens that are the likeliest"
    figures = [with_held_out("Loss", unit, "loss"), with_held_out("Accuracy", right, "accuracy")]
    if mode == "dpo":
        rewards = (
            Curve("reward_chosen", THIRD, "chosen"),
            Curve("reward_rejected", HELD_OUT, "rejected"),
            Curve("margin", TRAIN, "margin"),
        )
        figures += [Figure("Implicit rewards", "nats", rewards), with_held_out("KL", "nats", "kl")]
    if mode == "reward_model":
        figures.append(with_held_out("Margin", "difference of scores", "margin"))
    figures += [
        Figure("Speed", "tokens/s", (Curve("tokens_per_s", THIRD),), zero=True),
        Figure("Learning rate", "", (Curve("lr", GREY),)),
    ]
    return Section("Training", "", tuple(figures))


def _learning(config: Config) -> Section:
    return Section(
        "Learning",
        "Training figures are of the answers trained at each update, sampled up to "
        f"{config.rollout.max_staleness} versions earlier; held-out ones of prompts never trained, with "
        "95% intervals, at the mean version that sampled them. What each figure should look like: docs/metrics.md.",
        (
            Figure(
                "Accuracy",
                "share of right answers",
                (Curve("accuracy", TRAIN, "training batch"), Curve("sampled_accuracy", THIRD, "all that was sampled")),
                kind="accuracy",
            ),
            Figure("Reward", "mean of the batch", (Curve("reward_mean", TRAIN),)),
            Figure(
                "Answer length",
                "tokens",
                (Curve("response_tokens_mean", TRAIN, "mean"), Curve("response_tokens_max", GREY, "longest")),
                zero=True,
            ),
            Figure(
                "Length of right and wrong answers",
                "tokens, mean",
                (Curve("response_tokens_right", THIRD, "right"), Curve("response_tokens_wrong", HELD_OUT, "wrong")),
                zero=True,
            ),
            Figure(
                "Entropy",
                "nats per token",
                (
                    Curve("entropy", TRAIN, "all"),
                    Curve("entropy_right", THIRD, "right answers"),
                    Curve("entropy_wrong", HELD_OUT, "wrong answers"),
                ),
                zero=True,
            ),
        ),
    )


def _groups() -> Section:
    return Section(
        "Groups",
        "All groups that were sampled since the update before, whether they were trained or not.",
        (
            Figure(
                "Solved groups",
                "share",
                (Curve("solved_all", THIRD, "all answers right"), Curve("solved_none", HELD_OUT, "all wrong")),
                zero=True,
            ),
            Figure(
                "Thrown away", "tokens of groups that were filtered", (Curve("filtered_tokens", HELD_OUT),), zero=True
            ),
        ),
    )


def _asynchrony() -> Section:
    return Section(
        "Asynchrony",
        "Staleness: versions between an answer's admission, or the sampling of a token, and its "
        "training. Utilisation: share of the time in which a pool's processes work, averaged over them.",
        (
            Figure("Staleness of trained answers", "share", (Curve("staleness_histogram", TRAIN),), kind="histogram"),
            Figure(
                "Staleness of trained tokens", "share", (Curve("token_staleness_histogram", TRAIN),), kind="histogram"
            ),
            Figure("Effective speed", "trained tokens/s", (Curve("effective_tokens_per_s", THIRD),), zero=True),
            Figure(
                "Waiting per update",
                "seconds",
                (
                    Curve("trainer_wait_s", TRAIN, "trainer for a batch"),
                    Curve("straggler_wait_s", HELD_OUT, "batch for a straggler"),
                ),
                zero=True,
            ),
            Figure(
                "Pool utilisation",
                "share of time at work",
                (Curve("trainer_idle_share", TRAIN, "trainer"), Curve("engine_idle_share", HELD_OUT, "rollout")),
                kind="utilisation",
            ),
        ),
    )


def _weight_updates() -> Section:
    def difference(title: str, name: str) -> Figure:
        return Figure(
            title,
            "nats, difference of log-probabilities",
            (
                Curve(f"{name}_max", HELD_OUT, "largest"),
                Curve(f"{name}_p99", THIRD, "99%"),
                Curve(f"{name}_mean", TRAIN, "mean"),
            ),
            log=True,
        )

    return Section(
        "Weight updates",
        "Publish: weights travel while engines generate and trainers train. "
        "Commit: the short pause in which an engine takes them. "
        "Probe: excerpts that both score with the same version, however stale the trained answers are.",
        (
            Figure("Publish", "seconds", (Curve("publish_s", TRAIN),), zero=True),
            Figure("Commit", "milliseconds", (Curve("commit_s", HELD_OUT),), zero=True, scale=1000),
            Figure("Prefilled again after updates", "tokens", (Curve("prefilled_again", THIRD),), zero=True),
            Figure("Sent to all engines", "megabytes", (Curve("weights_bytes", TRAIN),), zero=True, scale=1e-6),
            Figure("Elements that were sent", "%", (Curve("weights_changed", HELD_OUT),), zero=True, scale=100),
            difference("Trainer − engine, probe", "mismatch"),
            difference("Trainer − engine, tokens of the trained version", "logprob_diff"),
        ),
    )


def _off_policy(keys: Collection[str]) -> Section:
    return Section(
        "Off-policy weights",
        "w = proximal / behaviour policy of each trained token, before corrections, by the token's staleness.",
        (
            Figure(
                "Effective share",
                "effective sample size / tokens",
                (Curve("effective_share", TRAIN, "all"), *_by_staleness("effective_share", keys)),
                zero=True,
            ),
            Figure(
                "Effective share of answers",
                "effective sample size / answers, w multiplied over each",
                (Curve("effective_share_answers", TRAIN),),
                zero=True,
            ),
            Figure(
                "KL of the policy from its samples",
                "nats per token, made by the steps in between",
                (Curve("kl_staleness", TRAIN),),
                zero=True,
            ),
            Figure("Mean of w", "of trained tokens", _by_staleness("weight_mean", keys)),
            Figure("Mean of log w", "of trained tokens", _by_staleness("log_weight_mean", keys)),
            Figure(
                "Largest w",
                "of trained tokens",
                (Curve("weight_max", HELD_OUT, "largest"), Curve("weight_p99", THIRD, "99%")),
                log=True,
            ),
            Figure(
                "Mean of w by sign of the advantage",
                "of trained tokens",
                (
                    Curve("weight_mean/advantage_above_0", THIRD, "above 0"),
                    Curve("weight_mean/advantage_below_0", HELD_OUT, "below 0"),
                ),
            ),
        ),
    )


def _by_staleness(name: str, keys: Collection[str]) -> tuple[Curve, ...]:
    """Returns the metrics of that name by staleness that the run has, the freshest first."""
    found = [key for key in keys if key.startswith(f"{name}/staleness_")]
    ordered = sorted(found, key=lambda key: int(re.findall(r"\d+", key.rpartition("_")[2])[0]))
    colours = [_BY_STALENESS[min(place, len(_BY_STALENESS) - 1)] for place in range(len(ordered))]
    return tuple(Curve(key, colour, key.rpartition("_")[2]) for key, colour in zip(ordered, colours, strict=True))


def _optimisation() -> Section:
    return Section(
        "Optimisation",
        "",
        (
            Figure("Loss", "PPO objective", (Curve("loss", TRAIN),)),
            Figure("Gradient norm", "before clipping", (Curve("grad_norm", TRAIN),), zero=True),
            Figure("Size of updates", "‖Δθ‖ / ‖θ‖", (Curve("update_size", TRAIN),), log=True),
            Figure(
                "Clipped, capped and masked tokens",
                "share",
                (
                    Curve("clip_share_high", TRAIN, "clipped above"),
                    Curve("clip_share_low", GREY, "clipped below"),
                    Curve("capped_share", HELD_OUT, "weight at its cap"),
                    Curve("masked_share", THIRD, "weight 0"),
                ),
                zero=True,
            ),
            Figure(
                "Advantage",
                "of trained tokens",
                (
                    Curve("advantage_max", HELD_OUT, "largest"),
                    Curve("advantage_mean", TRAIN, "mean"),
                    Curve("advantage_std", GREY, "deviation"),
                    Curve("advantage_min", THIRD, "least"),
                ),
            ),
            Figure(
                "Tokens that teach nothing",
                "share with advantage 0",
                (Curve("zero_advantage_share", GREY),),
                zero=True,
            ),
            Figure("Learning rate", "", (Curve("lr", GREY),), zero=True),
            Figure("Learning rate over what is scheduled", "", (Curve("lr_factor", TRAIN),), zero=True),
            Figure("Time of an update", "seconds in the trainer", (Curve("step_s", THIRD),), zero=True),
        ),
    )


def _critic() -> Section:
    return Section(
        "Critic",
        "Values before each update, and the returns towards which it trains them.",
        (
            Figure("Explained variance", "of returns by values", (Curve("explained_variance", TRAIN),)),
            Figure(
                "Means",
                "of trained tokens",
                (Curve("value_mean", TRAIN, "value"), Curve("return_mean", HELD_OUT, "return")),
            ),
            Figure("Value loss", "", (Curve("value_loss", TRAIN),), zero=True),
            Figure("Gradient norm of the critic", "before clipping", (Curve("value_grad_norm", TRAIN),), zero=True),
        ),
    )
