"""A model of GPUs that hold the work of all their streams in a few queues, and of the threads that fill them.

Work leaves the front of its queue and runs once the work before it on its stream is done; until then everything behind
it in the queue waits too (CUDA_DEVICE_MAX_CONNECTIONS is the number of queues). A message is done when it runs at both
ends, a collective when it runs on all its ranks, since each waits for the others on the GPU.

Each stream here has a communicator of its own. Behind each kernel NCCL puts a wait for it on a further stream of the
communicator (ncclLaunchFinish), somewhere in the queues: at the front of one, it holds up everything behind it until
the message or the collective is done.
"""

import random
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import Literal, NamedTuple


class Thread(NamedTuple):
    """What one thread of a rank puts on streams, in this order."""

    rank: Hashable
    work: Sequence[tuple[Hashable, Hashable]]
    """(stream, what), where `what` is the same on every rank that takes part."""
    one_at_a_time: bool
    """Whether it waits for what it has put on a stream before it puts more there."""
    after: Literal["", "next", "posted", "running"] = ""
    """What it waits for before it puts a message on its stream: that it is the next of a thread at the other end, which
    waits for nothing else; that the other end has put it there; or that the other end runs it."""


class Gpus:
    """Ranks with a GPU each, and the threads that give them work.

    `queues`: how many the GPU of a rank has. `nccl_waits`: whether NCCL puts waits for its kernels there.
    """

    def __init__(self, threads: Sequence[Thread], queues: Callable[[Hashable], int], nccl_waits: bool = True):
        self._what = _Numbers()
        ranks, streams = _Numbers(), _Numbers()
        self._queues_of = []  # of each stream: the range of its rank's queues
        self._threads, self._queues = [], 0
        ranges: list[range] = []
        for thread in threads:
            if ranks[thread.rank] == len(ranges):
                ranges.append(range(self._queues, self._queues + queues(thread.rank)))
                self._queues = ranges[-1].stop
            work = []
            for stream, what in thread.work:
                number = streams[thread.rank, stream]
                if number == len(self._queues_of) // 2:
                    self._queues_of += [ranges[ranks[thread.rank]]] * 2  # its own, and the one of NCCL's waits
                work.append((number, self._what[what]))
            self._threads.append((work, thread.one_at_a_time, thread.after))
        self._parties = [0] * len(self._what)
        for work, _, _ in self._threads:
            for _, what in work:
                self._parties[what] += 1
        self._nccl_waits = nccl_waits

    def stuck(self, order: random.Random) -> set[Hashable]:
        """Returns what is never done when streams get queues by chance and the threads take turns in a random order."""
        random_number = order.random
        places = [own.start + int(random_number() * len(own)) for own in self._queues_of]
        held = [deque() for _ in range(self._queues)]
        last: list[int | None] = [None] * (len(places) // 2)  # put on each stream
        left, done = self._parties.copy(), [False] * len(self._parties)
        happened = set()
        blocked = defaultdict(list)  # threads by the event that they wait for
        held_up = defaultdict(list)  # queues by what their fronts wait for
        at = [0] * len(self._threads)
        ready: list[int] = []

        def happens(event: tuple[str, int]) -> None:
            if event not in happened:
                happened.add(event)
                for thread in blocked.pop(event, ()):
                    consider(thread)

        def consider(number: int) -> None:
            """Says that a thread is ready, or waits for what keeps it from its next work."""
            work, one_at_a_time, after = self._threads[number]
            if at[number] == len(work):
                return
            stream, what = work[at[number]]
            before = last[stream]
            if one_at_a_time and before is not None and not done[before]:
                blocked["done", before].append(number)
            elif after and (after, what) not in happened:
                blocked[after, what].append(number)
                if after != "next":
                    happens(("next", what))
            else:
                ready.append(number)

        def advance(place: int) -> None:
            look = [place]
            while look:
                queue = held[place := look.pop()]
                while queue:
                    needed, what = queue[0]
                    if needed is not None and not done[needed]:
                        held_up[needed].append(place)
                        break
                    queue.popleft()
                    if what is None:
                        continue
                    left[what] -= 1
                    happens(("running", what))
                    if not left[what]:
                        done[what] = True
                        look += held_up.pop(what, ())
                        happens(("done", what))

        def put(place: int, entry: tuple[int | None, int | None]) -> None:
            held[place].append(entry)
            if len(held[place]) == 1:
                advance(place)

        for number in range(len(self._threads)):
            consider(number)
        while ready:
            chosen = int(random_number() * len(ready))
            ready[chosen], number = ready[-1], ready[chosen]
            ready.pop()
            stream, what = self._threads[number][0][at[number]]
            at[number] += 1
            put(places[2 * stream], (last[stream], what))
            if self._nccl_waits:
                put(places[2 * stream + 1], (what, None))
            last[stream] = what
            happens(("posted", what))
            consider(number)
        return {name for name, number in self._what.items() if not done[number]}


class _Numbers(dict[Hashable, int]):
    """Numbers things in the order in which they are first asked for."""

    def __missing__(self, name: Hashable) -> int:
        return self.setdefault(name, len(self))
