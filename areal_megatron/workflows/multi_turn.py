"""The multi-turn workflow: the model is told that its answer is wrong, and may try again."""

from __future__ import annotations

from areal_megatron.workflows.episode import Episode

FEEDBACK = "\nThis answer is wrong. Find the mistake and answer again.\n"
"""The message after a wrong answer for which the reward function returns no feedback."""
DISCOUNT = 0.9
"""The factor on the score for each further try: the turn_discount of AReaL's multi-turn workflow."""


async def run(episode: Episode) -> float:
    """Samples until an answer is right or no turn is left. Returns the score of the last answer.

    Each further try lowers the episode's discount.
    """
    for turn in range(1, episode.turns + 1):
        await episode.sample()
        scored = await episode.score()
        if scored.score >= 1 or turn == episode.turns:
            break
        episode.say(scored.feedback or FEEDBACK)
        episode.discount *= DISCOUNT
    return scored.score  # pyright: ignore[reportPossiblyUnboundVariable]: there is a turn at least
