"""A wrong answer is told so and may be tried again."""

from __future__ import annotations

from areal_megatron.workflows.episode import Episode

FEEDBACK = "\nThis answer is wrong. Find the mistake and answer again.\n"
"""Where the reward function has nothing to say."""
DISCOUNT = 0.9
"""Of the score, for each further try: the turn_discount of AReaL's multi-turn workflow."""


async def run(episode: Episode) -> float:
    """The score of the last answer, discounted; the first right one is the last."""
    for turn in range(1, episode.turns + 1):
        await episode.sample()
        judged = await episode.score()
        if judged.score >= 1 or turn == episode.turns:
            break
        episode.say(judged.feedback or FEEDBACK)
        episode.discount *= DISCOUNT
    return judged.score
