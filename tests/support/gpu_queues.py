"""A model of GPUs that hold the work of all their streams in a few queues, and of the threads that fill them.

Work leaves the front of its queue and runs once the work before it on its stream is done; until then everything behind
it in the queue waits too (CUDA_DEVICE_MAX_CONNECTIONS is the number of queues). A message is done when it runs at both
ends, a collective when it runs on all its ranks, since each waits for the others on the GPU.

Each stream here has a communicator of its own. Behind each kernel NCCL puts a wait for it on a further stream of the
communicator (ncclLaunchFinish), somewhere in the queues: at the front of one, it holds up everything behind it until
the message or the collective is done.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Literal, NamedTuple

import numba
import numpy as np

After = Literal["", "next", "posted", "running"]
_NEXT, _POSTED, _RUNNING, _DONE = range(4)
_AFTER: dict[After, int] = {"": -1, "next": _NEXT, "posted": _POSTED, "running": _RUNNING}
_NONE = -1


class Thread(NamedTuple):
    """What one thread of a rank puts on streams, in this order."""

    rank: Hashable
    work: Sequence[tuple[Hashable, Hashable]]
    """(stream, what), where `what` is the same on every rank that takes part."""
    one_at_a_time: bool
    """Whether it waits for what it has put on a stream before it puts more there."""
    after: After = ""
    """What it waits for before it puts a message on its stream: that it is the next of a thread at the other end, which
    waits for nothing else; that the other end has put it there; or that the other end runs it."""
    takes_place: bool = False
    """Whether it then waits for one of its rank's places too, until a message that has it is done."""


class Gpus:
    """Ranks with a GPU each, and the threads that give them work.

    `queues`: how many the GPU of a rank has. `nccl_waits`: whether NCCL puts waits for its kernels there. `places`: how
    many messages of threads that take a place a rank has on its streams at most.
    """

    def __init__(
        self,
        threads: Sequence[Thread],
        queues: Callable[[Hashable], int],
        nccl_waits: bool = True,
        places: int = 8,
    ):
        self._what, ranks, streams = _Numbers(), _Numbers(), _Numbers()
        work = [
            (streams[thread.rank, stream], ranks[thread.rank], self._what[what])
            for thread in threads
            for stream, what in thread.work
        ]
        each = np.array(
            [(ranks[t.rank], len(t.work), t.one_at_a_time, _AFTER[t.after], t.takes_place) for t in threads]
        )
        of_stream = {stream: rank for stream, rank, _ in work}
        most = np.array([queues(rank) for rank in ranks])
        self._arguments = (
            np.array(work),
            each,
            np.array([of_stream[stream] for stream in range(len(streams))]),
            most,
            np.bincount([what for _, _, what in work]),
            nccl_waits,
            places,
        )

    def stuck(self, schedule: int) -> set[Hashable]:
        """Returns what is never done when streams get queues by chance and the threads take turns in a random order."""
        done = _schedule(schedule, *self._arguments)
        return {name for name, number in self._what.items() if not done[number]}

    def circles(self, schedules: int) -> int:
        """Returns in how many of the schedules 0, 1, … something is never done."""
        return _count(schedules, *self._arguments)


class _Numbers(dict[Hashable, int]):
    """Numbers things in the order in which they are first asked for."""

    def __missing__(self, name: Hashable) -> int:
        return self.setdefault(name, len(self))


@numba.njit
def _count(schedules, work, each, rank_of, most, parties, nccl_waits, places):
    stuck = 0
    for number in range(schedules):
        stuck += not _schedule(number, work, each, rank_of, most, parties, nccl_waits, places).all()
    return stuck


@numba.njit
def _move(chains, index, following, stack, size):
    """Moves a chain's members to a stack, and returns its new size."""
    member = chains[index]
    chains[index] = _NONE
    while member != _NONE:
        stack[size] = member
        size += 1
        member = following[member]
    return size


@numba.njit
def _schedule(number, work, each, rank_of, most, parties, nccl_waits, places):
    """Returns for each piece of work whether it is done in the end.

    work: [N, 3], (stream, rank, what) of the threads one after the other; each: [threads, 5], their rank, number of
    pieces, and what Thread has; rank_of: of each stream; most: of each rank, its queues; parties: of each `what`.

    Lists of what waits are chains: the first of each, and the next of each member.
    """
    np.random.seed(number)
    threads, whats, streams = len(each), len(parties), len(rank_of)
    first_queue = np.cumsum(most) - most
    queue_of = np.empty((2, streams), np.int64)  # of a stream, and of NCCL's waits for what is on it
    for kind in range(2):
        for stream in range(streams):
            rank = rank_of[stream]
            queue_of[kind, stream] = first_queue[rank] + np.random.randint(most[rank])

    entries = np.empty((2 * len(work), 3), np.int64)  # what it waits for, what it is, the next in its queue
    size = 0
    front, back = np.full(most.sum(), _NONE), np.full(most.sum(), _NONE)
    held_up, next_held = np.full(whats, _NONE), np.full(most.sum(), _NONE)  # queues whose fronts wait for this
    looks, looked = np.empty(most.sum() + 1, np.int64), 0

    last = np.full(streams, _NONE)  # put on each stream
    left, happened = parties.copy(), np.zeros((4, whats), np.bool_)
    blocked, next_blocked = np.full((4, whats), _NONE), np.full(threads, _NONE)  # threads that wait for an event
    free, crowd = np.full(len(most), places), np.full(len(most), _NONE)  # places, and threads that wait for one
    sender = np.full(whats, _NONE)  # the thread with a place for it
    at = np.zeros(threads, np.int64)
    ends = np.cumsum(each[:, 1])
    at[1:] = ends[:-1]
    ready, is_ready = np.empty(threads, np.int64), 0
    turns, turned = np.empty(4 * threads + 8, np.int64), 0  # threads to be looked at
    for thread in range(threads):
        turns[turned] = thread
        turned += 1

    while True:
        # What each thread waits for, if for anything.
        while turned:
            turned -= 1
            thread = turns[turned]
            if at[thread] == ends[thread]:
                continue
            stream, rank, what = work[at[thread]]
            after, before = each[thread, 3], last[stream]
            event = what
            kind = _NONE
            if each[thread, 2] and before != _NONE and not happened[_DONE, before]:
                kind, event = _DONE, before
            elif after != _NONE and not happened[after, what]:
                kind = after
            if kind != _NONE:
                next_blocked[thread] = blocked[kind, event]
                blocked[kind, event] = thread
                if kind != _DONE and after != _NEXT and not happened[_NEXT, what]:
                    happened[_NEXT, what] = True
                    turned = _move(blocked[_NEXT], what, next_blocked, turns, turned)
            elif each[thread, 4] and not free[rank]:
                next_blocked[thread] = crowd[rank]
                crowd[rank] = thread
            else:
                if each[thread, 4]:
                    free[rank] -= 1
                    sender[what] = thread
                ready[is_ready] = thread
                is_ready += 1
        if not is_ready:
            return happened[_DONE]

        # One thread that may puts its next work on a stream.
        chosen = np.random.randint(is_ready)
        thread = ready[chosen]
        is_ready -= 1
        ready[chosen] = ready[is_ready]
        stream, rank, what = work[at[thread]]
        at[thread] += 1
        for kind in range(1 + nccl_waits):
            queue = queue_of[kind, stream]
            entries[size, 0] = what if kind else last[stream]
            entries[size, 1] = _NONE if kind else what
            entries[size, 2] = _NONE
            if back[queue] == _NONE:
                front[queue] = size
                looks[looked] = queue
                looked += 1
            else:
                entries[back[queue], 2] = size
            back[queue] = size
            size += 1

            # What leaves queues now.
            while looked:
                looked -= 1
                queue = looks[looked]
                while front[queue] != _NONE:
                    needed, runs, following = entries[front[queue]]
                    if needed != _NONE and not happened[_DONE, needed]:
                        next_held[queue] = held_up[needed]
                        held_up[needed] = queue
                        break
                    front[queue] = following
                    if following == _NONE:
                        back[queue] = _NONE
                    if runs == _NONE:
                        continue
                    left[runs] -= 1
                    for event in range(_RUNNING, _DONE + (not left[runs])):
                        happened[event, runs] = True
                        turned = _move(blocked[event], runs, next_blocked, turns, turned)
                    if left[runs]:
                        continue
                    looked = _move(held_up, runs, next_held, looks, looked)
                    if sender[runs] != _NONE:
                        own = each[sender[runs], 0]
                        free[own] += 1
                        if crowd[own] != _NONE:
                            turns[turned] = crowd[own]
                            turned += 1
                            crowd[own] = next_blocked[crowd[own]]
        last[stream] = what
        happened[_POSTED, what] = True
        turned = _move(blocked[_POSTED], what, next_blocked, turns, turned)
        turns[turned] = thread
        turned += 1
