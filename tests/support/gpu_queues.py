"""A model of GPUs that hold the work of all their streams in a few queues, and of the threads that fill them.

Work leaves the front of its queue and runs once the work before it on its stream is done; until then everything behind
it in the queue waits too (CUDA_DEVICE_MAX_CONNECTIONS is the number of queues). A message is done when it runs at both
ends, a collective when it runs on all its ranks, since each waits for the others on the GPU.

Each stream here has a communicator of its own. Behind each kernel NCCL puts a wait for it on a further stream of the
communicator (ncclLaunchFinish), somewhere in the queues: at the front of one, it holds up everything behind it until
the message or the collective is done.
"""

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple


class Thread(NamedTuple):
    """What one thread of a rank puts on streams, in this order."""

    rank: Hashable
    work: Sequence[tuple[Hashable, Hashable]]
    """(stream, what), where `what` is the same on every rank that takes part."""
    one_at_a_time: bool
    """Whether it waits for what it has put on a stream before it puts more there."""
    is_second: bool = False
    """Whether it waits for the other end of each message to be put on its stream before it puts its own."""


def stuck(
    threads: Sequence[Thread], queues: Callable[[Hashable], int], order: random.Random, nccl_waits: bool = True
) -> set:
    """Returns what is never done when the threads take turns in a random order.

    `queues`: how many the GPU of a rank has. `nccl_waits`: whether NCCL puts waits for its kernels there.
    """
    parties = Counter(what for thread in threads for _, what in thread.work)
    ranks = defaultdict(set)
    for thread in threads:
        for _, what in thread.work:
            ranks[what].add(thread.rank)
    streams = {
        (t.rank, own): queues(t.rank) for t in threads for stream, _ in t.work for own in (stream, _waits(stream))
    }
    places = {(rank, stream): (rank, order.randrange(count)) for (rank, stream), count in streams.items()}
    of_rank = defaultdict(set)
    for rank, place in places.values():
        of_rank[rank].add((rank, place))
    held = defaultdict(deque)
    running, runs, done, posted = {}, Counter(), {None}, set()

    def advance(place):
        look = [place]
        while look:
            place = look.pop()
            queue = held[place]
            while queue:
                stream, what = queue[0]
                if (what if stream is None else running.get((place[0], stream))) not in done:
                    break
                queue.popleft()
                if stream is None:
                    continue
                running[place[0], stream] = what
                runs[what] += 1
                if runs[what] == parties[what]:
                    done.add(what)
                    look += [other for rank in ranks[what] for other in of_rank[rank]]

    def may_go_on(thread, work, last):
        stream, what = work[0]
        return (not thread.is_second or what in posted) and (not thread.one_at_a_time or last.get(stream) in done)

    left = [(thread, deque(thread.work), {}) for thread in threads if thread.work]
    while left:
        ready = [turn for turn in left if may_go_on(*turn)]
        if not ready:
            break
        turn = order.choice(ready)
        thread, work, last = turn
        stream, what = work.popleft()
        last[stream] = what
        posted.add(what)
        put = [(places[thread.rank, stream], stream)]
        if nccl_waits:
            put.append((places[thread.rank, _waits(stream)], None))
        for place, of_stream in put:
            held[place].append((of_stream, what))
        for place, _ in put:
            advance(place)
        if not work:
            left.remove(turn)
    return parties.keys() - done


def _waits(stream: Hashable) -> Hashable:
    """The stream of NCCL's own beside one that carries its kernels."""
    return "waits", stream
