"""Models side by side in one evaluation: a base and adapters of it, which one engine serves together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from areal_megatron.engine.adapters import BASE, Named
from areal_megatron.observe.estimates import Graded, difference, item_values

_OWN = (BASE, "engine", "result.json", "rewards.log")
"""What OUT holds beside the folders of adapters."""


@dataclass(frozen=True)
class Model:
    """One of the models that an evaluation asks."""

    name: str = ""
    """Its folder in OUT; empty if it is the only one, whose folder OUT is."""
    adapter: Named | None = None
    """None: the model as its own folder has it."""


def names_of(folders: Sequence[str]) -> list[str]:
    """Returns a name for each folder: the last parts of its path, as many as tell the folders apart."""
    parts = [Path(folder).absolute().parts[1:] for folder in folders]
    names = [own[-1] for own in parts]
    for length in range(2, max(map(len, parts)) + 1):
        if len({*names, *_OWN}) == len(names) + len(_OWN):
            break
        names = ["-".join(own[-length:]) for own in parts]
    return names


def differences(
    answers: Mapping[str, Sequence[Graded]], n: int, ks: Sequence[int]
) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns by how much each model but the first is better, by its name and the name of the figure: value, low, high
    and the number of items that both have. `answers`: of each model."""
    (_, first), *others = ((name, item_values(own, n, ks)) for name, own in answers.items())
    return {
        name: {
            figure: asdict(difference(first[figure], own[figure])) | {"items": len(first[figure].keys() & own[figure])}
            for figure in own
            if first.get(figure, {}).keys() & own[figure]
        }
        for name, own in others
    }


def table(results: Mapping[str, dict[str, Any]], found: Mapping[str, dict[str, dict[str, float]]]) -> str:
    """Returns the figures of all models side by side, of their results and `differences`."""
    first, *_ = results
    width, rows = max(map(len, results)), []
    for figure, value in results[first].items():
        if not isinstance(value, dict) or "value" not in value:
            continue
        rows.append(f"{figure:<{width}}  {'':>8}   {'95% interval':<17}  {f'minus {first}':>12}   95% interval")
        for name, result in results.items():
            row = f"{name:<{width}}  "
            if own := result.get(figure):
                between = f"{own['low']:.2%} – {own['high']:.2%}"
                row += f"{own['value']:>8.2%}   {between:<17}"
            if apart := found.get(name, {}).get(figure):
                row += f"  {apart['value']:>+12.2%}   {apart['low']:+.2%} – {apart['high']:+.2%}"
            rows.append(row.rstrip())
        rows.append("")
    for name, result in results.items():
        tokens, cut = f"{result['response_tokens_mean']:.1f} tokens each", f"{result['truncated_share']:.1%}"
        row = f"{name:<{width}}  {result['items']} items × {result['n']} answers, {tokens}; {cut} cut at their limit"
        rows.append(row + (f"; {result['failed']} left out, since their rewards failed" if result["failed"] else ""))
    return "\n".join(rows)
