"""Workflows for runs of untrained models, whose answers are noise."""


async def twice(episode) -> None:
    """Whatever the first answer is, there is another one."""
    await episode.sample()
    episode.say("+")
    await episode.sample()
