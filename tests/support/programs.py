"""Episodes of `rollout.workflow=program`, on a scripted engine."""

import asyncio
from dataclasses import replace

from areal_megatron.workflows.episode import EpisodeSpec
from areal_megatron.workflows.program import Program
from areal_megatron.workflows.sampling import Sampling
from tests.support.chat_world import World


class ProgramWorld:
    """A world whose workflow is a program."""

    def __init__(self, folder, command, answer=lambda *_: "right", **settings):
        """`settings`: those of World."""
        self.program = Program(command)
        self.world = World(folder / "model", self.program.run, answer, **settings)

    async def sample(self, n=1, **row):
        prompt, world = replace(self.world.prompt(), row=row), self.world
        spec = EpisodeSpec(prompt, 0, "group-3", 100, "train")
        sampling = Sampling(world.client, world.config.rollout, world.tokenizer.stop_tokens, None)
        return await world.groups.sample(sampling, spec, n)

    def run(self, then, timeout_s=60):
        """Returns what `then` returns, called with this; ends the program."""

        async def live():
            try:
                return await asyncio.wait_for(then(self), timeout_s)
            finally:
                await self.world.episodes.close()
                await self.program.close()

        return asyncio.run(live())
