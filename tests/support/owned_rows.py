"""The rows of docs/options.md for options that are not passed through, as the code has them."""

from areal_megatron.config.passed_through import Owned


def rows_of_owned(groups: tuple[Owned, ...]) -> str:
    return "".join(f"| {', '.join(f'`{name}`' for name in group.names)} | {group.reason} |\n" for group in groups)
