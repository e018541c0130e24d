"""Time limits for others do not count the time in which this process was not there."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from areal_megatron.process import lateness
from areal_megatron.process.lateness import TICK_S, AttendedTime, within


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_the_clock_goes_on_while_it_is_ticked_and_stands_still_while_it_is_not():
    clock = Clock()
    attended = AttendedTime(clock, tick_s=0.5)
    begin = attended.now()
    for _ in range(4):
        clock.now += 0.5
        assert attended.tick() == 0
    assert attended.now() - begin == 2.0 and attended.late_s == 0
    clock.now += 0.2
    assert attended.now() - begin == pytest.approx(2.2)
    clock.now += 60
    assert attended.now() - begin == pytest.approx(2.5), "known before the late tick itself"
    assert attended.tick() == pytest.approx(59.7) and attended.late_s == pytest.approx(59.7)
    assert attended.now() - begin == pytest.approx(2.5)
    clock.now += 0.5
    attended.tick()
    assert attended.now() - begin == pytest.approx(3.0)


def test_the_clock_never_goes_back():
    clock, seen = Clock(), []
    attended = AttendedTime(clock, tick_s=0.5)
    for step in (0.1, 0.6, 0.0, 3.0, 0.5, 0.51, 0.49, 10.0):
        clock.now += step
        seen.append(attended.now())
        attended.tick()
        seen.append(attended.now())
    assert seen == sorted(seen)


def test_a_limit_passes_in_a_loop_that_attends():
    async def wait():
        begin = time.monotonic()
        with pytest.raises(TimeoutError):
            await within(0.4, asyncio.Event().wait())
        return time.monotonic() - begin

    assert 0.4 <= asyncio.run(wait()) < 2


def test_results_errors_and_cancellation_pass_through():
    async def fail():
        raise KeyError("x")

    async def play():
        assert await within(5, asyncio.sleep(0, "result")) == "result"
        with pytest.raises(KeyError):
            await within(5, fail())
        inner = asyncio.ensure_future(asyncio.sleep(30))
        outer = asyncio.ensure_future(within(60, inner))
        await asyncio.sleep(0.05)
        outer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await outer
        assert inner.cancelled()

    asyncio.run(play())


@pytest.mark.parametrize("away_s", [0.0, 1.0])
def test_what_arrived_while_the_loop_was_away_or_as_the_limit_passed_is_in_time(away_s):
    """The timer and the data come up in the same turn of the loop."""

    async def play():
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        lateness.now()
        await asyncio.sleep(2 * TICK_S)
        limit = 0.3
        answer = asyncio.ensure_future(within(limit, reader.readexactly(100_000)))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(limit - 0.02, time.sleep, away_s + 0.04)
        theirs.setblocking(False)
        asyncio.get_running_loop().call_later(limit - 0.03, theirs.send, b"x" * 100_000)
        data = await answer
        writer.close()
        theirs.close()
        return data

    assert len(asyncio.run(play())) == 100_000


STOPPED = """
import asyncio, time
from areal_megatron.process.lateness import within

async def main():
    print("up", flush=True)
    begin = time.monotonic()
    try:
        await within(1.5, asyncio.Event().wait())
    except TimeoutError:
        print(time.monotonic() - begin)

asyncio.run(main())
"""


def test_the_time_in_which_the_process_was_stopped_does_not_count():
    process = subprocess.Popen([sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "up\n"
    time.sleep(0.7)
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(2)
    os.kill(process.pid, signal.SIGCONT)
    waited = float(process.communicate(timeout=20)[0])
    assert 3.0 < waited < 6.0, "1.5 s of its own, and 2 s in which it was stopped"


def test_pauses_grow_until_the_time_is_over(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(lateness, "now", lambda: clock[0])

    def waited(limit_s, each_takes_s=0.0):
        pauses = []
        for pause_s in lateness.pauses(limit_s):
            pauses.append(pause_s)
            clock[0] += pause_s + each_takes_s
        return pauses

    assert waited(0) == [1] and waited(1) == [1]
    assert waited(30) == [1, 2, 4, 8, 16]
    assert waited(60) == [1, 2, 4, 8, 16, 16, 16]
    assert waited(30, each_takes_s=20) == [1, 2]
    assert waited(0, each_takes_s=20) == [1]
