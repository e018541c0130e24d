"""How many trajectories the controller believes to run on an engine, from what it sent and what the engine counts."""

import asyncio
import contextlib
import time

from areal_megatron.controller.engine import Engine
from areal_megatron.engine.client import Load


class Counters:
    """The engine's counters, in the place of its HTTP client; `during` happens while they are read."""

    name = "engine-0"

    def __init__(self, running, waiting=0, during=lambda: None):
        self._load, self._during = Load(running, waiting, generated_tokens=0), during

    async def load(self, timeout_s):
        self._during()
        return self._load


def poll(engine, counters):
    engine.client, room = counters, []

    async def once():
        watching = asyncio.create_task(engine.watch(60, 60))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(engine.changed.wait(), 0.5)
            room.append(engine.running)
        watching.cancel()

    asyncio.run(once())
    assert room, "room was not announced"


def test_answers_that_ended_inside_unfinished_groups_leave_room():
    engine = Engine(0, Counters(0), timeline=None)
    engine.occupy(8)
    engine.occupy(8)
    assert engine.running == 16
    poll(engine, Counters(running=3, waiting=1))
    assert engine.running == 4
    engine.occupy(8)
    assert engine.running == 12


def test_engines_are_polled_one_after_the_other():
    """The fourth of four comes when three quarters of the time between two polls are over: 1.5 s."""

    async def first_polls():
        begun, seen = time.monotonic(), {}
        engines = {index: Engine(index, Counters(0), timeline=None) for index in (0, 3)}
        watching = [asyncio.create_task(engine.watch(60, 60, engines=4)) for engine in engines.values()]
        for index, engine in engines.items():
            await asyncio.wait_for(engine.changed.wait(), 10)
            seen[index] = time.monotonic() - begun
        for task in watching:
            task.cancel()
        return seen

    seen = asyncio.run(first_polls())
    assert seen[0] + 1.2 < seen[3]


def test_what_starts_during_a_poll_is_counted():
    engine = Engine(0, Counters(0), timeline=None)
    engine.occupy(8)
    poll(engine, Counters(running=5, during=lambda: engine.occupy(8)))
    assert engine.running == 13


def test_finished_groups_count_no_more_before_the_next_poll():
    engine = Engine(0, Counters(0), timeline=None)
    engine.occupy(8)
    engine.occupy(8)
    poll(engine, Counters(running=16))
    engine.release(8)
    assert engine.running == 8


def test_the_time_in_which_it_is_full():
    engine = Engine(0, Counters(0), timeline=None, room=8)
    engine.occupy(8)
    time.sleep(0.1)
    assert engine.take_full_s() == 0
    engine.occupy(8)
    time.sleep(0.1)
    engine.release(8)
    time.sleep(0.1)
    assert 0.1 <= engine.take_full_s() < 0.2 and engine.take_full_s() == 0


def test_an_engine_whose_requests_wait_for_memory_is_full():
    engine = Engine(0, Counters(0), timeline=None, room=100)
    engine.occupy(8)
    poll(engine, Counters(running=5, waiting=3))
    engine.take_full_s()
    time.sleep(0.1)
    assert engine.take_full_s() >= 0.1
    poll(engine, Counters(running=8))
    engine.take_full_s()
    time.sleep(0.1)
    assert engine.take_full_s() == 0
