"""What a config passes through to megatron-core (`trainer.megatron`): fields of its TransformerConfig."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, get_type_hints

import msgspec
from megatron.core.transformer.transformer_config import TransformerConfig

from areal_megatron.config import ConfigError
from areal_megatron.config.passed_through import MEGATRON
from areal_megatron.process.errors import printable


def with_fields(
    own: dict[str, Any], given: Mapping[str, Any], kind: type[TransformerConfig] = TransformerConfig
) -> TransformerConfig:
    """Returns the TransformerConfig, of the class `kind`, with the trainer's own fields and those that a config passes
    through.

    Raises ConfigError, which names the key, for an unknown field, a value of another type, and what megatron-core
    refuses.
    """
    passed = {name: _checked(name, value) for name, value in given.items()}
    if not passed:
        return kind(**own)
    try:
        return kind(**own | passed)
    except (AssertionError, ValueError, TypeError, ImportError) as e:
        text = printable(" ".join(str(e).split()), 600) or type(e).__name__
        raise ConfigError(f"{MEGATRON}: megatron-core refuses it: {text}") from None


def _checked(name: str, value: Any) -> Any:
    """Returns the value in the type of the field."""
    kinds = get_type_hints(TransformerConfig)
    if name not in kinds:
        near = difflib.get_close_matches(name, kinds, 1)
        hint = f", did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{MEGATRON}.{name}: megatron-core's TransformerConfig has no such field{hint}")
    try:
        return msgspec.convert(value, kinds[name])
    except msgspec.ValidationError as e:
        raise ConfigError(f"{MEGATRON}.{name}: {e}, is {value!r}") from None
