"""A model of GPUs that hold the work of all their streams in a few queues, and of the threads that fill them.

Work leaves the front of its queue and runs once the work before it on its stream is done; until then everything behind
it in the queue waits too (CUDA_DEVICE_MAX_CONNECTIONS is the number of queues). A message is done when it runs at both
ends, a collective when it runs on all its ranks, since each waits for the others on the GPU.
"""

import random
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Sequence
from typing import NamedTuple


class Thread(NamedTuple):
    """What one thread of a rank puts on streams, in this order."""

    rank: Hashable
    work: Sequence[tuple[Hashable, Hashable]]
    """(stream, what), where `what` is the same on every rank that takes part."""
    one_at_a_time: bool
    """Whether it waits for what it has put on a stream before it puts more there."""


def stuck(threads: Sequence[Thread], queues: int, order: random.Random) -> set:
    """Returns what is never done when the threads take turns in a random order."""
    parties = Counter(what for thread in threads for _, what in thread.work)
    ranks = defaultdict(set)
    for thread in threads:
        for _, what in thread.work:
            ranks[what].add(thread.rank)
    places = {(t.rank, stream): (t.rank, order.randrange(queues)) for t in threads for stream, _ in t.work}
    of_rank = defaultdict(set)
    for rank, place in places.values():
        of_rank[rank].add((rank, place))
    held = defaultdict(deque)
    running, runs, done = {}, Counter(), {None}

    def advance(place):
        look = [place]
        while look:
            place = look.pop()
            queue = held[place]
            while queue:
                stream, what = queue[0]
                if running.get((place[0], stream)) not in done:
                    break
                queue.popleft()
                running[place[0], stream] = what
                runs[what] += 1
                if runs[what] == parties[what]:
                    done.add(what)
                    look += [other for rank in ranks[what] for other in of_rank[rank]]

    left = [(thread, deque(thread.work), {}) for thread in threads if thread.work]
    while left:
        ready = [turn for turn in left if not turn[0].one_at_a_time or turn[2].get(turn[1][0][0]) in done]
        if not ready:
            break
        turn = order.choice(ready)
        thread, work, last = turn
        stream, what = work.popleft()
        last[stream] = what
        held[places[thread.rank, stream]].append((stream, what))
        advance(places[thread.rank, stream])
        if not work:
            left.remove(turn)
    return parties.keys() - done
