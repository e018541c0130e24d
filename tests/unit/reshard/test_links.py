"""What travels over a link, and when: one communicator, one message at a time on a stream, also through the host."""

import os
import queue
import threading
import time
import weakref
from collections import Counter, defaultdict
from dataclasses import replace
from math import inf
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from areal_megatron.models.architecture import read_config
from areal_megatron.reshard import carriers, reception, staging, transport
from areal_megatron.reshard.carriers.base import Deadline, LinkEnd, LinkError, Members
from areal_megatron.reshard.plan import Planner
from areal_megatron.reshard.transport import Link
from tests.support.link_store import open_store
from tests.support.links import Pools
from tests.support.reshard_oracle import write_model


class RecordedNccl:
    """Stands for torch's ProcessGroupNCCL: chooses communicators as it does, and carries messages within the process.

    ProcessGroupNCCL.cpp, torch 2.13: a message that is neither batched nor sent after eager_connect_single_device gets
    a communicator of its pair; all others use that of the device, for which each member asks the store. The first call
    for a pair returns once both of its members have made theirs (NCCL 2.29, ncclTransportP2pSetup).
    """

    made: list
    mail: dict
    """(sender, receiver, tag) → the messages on their way."""
    posted: set
    """The receives that were posted: (sender, receiver, tag)."""
    meetings: dict
    """(sender, receiver) → where both wait for each other in their first call."""
    hangs = False
    """Whether its messages never end, as those to a peer that is gone."""
    ending_s = 0.0
    """How long an abort takes."""
    takes_s = 0.002
    """How long a message takes."""
    connecting = None
    """An event that must come before a communicator connects."""

    class Options:
        def __init__(self):
            self.config = SimpleNamespace()

    def __init__(self, store, rank, size, options):
        self.store, self.rank, self.size, self.options = store, rank, size, options
        self.environment = {name: os.environ.get(name) for name in carriers.nccl.SETTINGS}
        self.communicators, self.under_way, self.most = Counter(), 0, 0
        self.looks, self.aborted = [], None
        self._eager, self._connected = False, set()
        self.made.append(self)

    def eager_connect_single_device(self, device):
        if self.connecting is not None:
            assert self.connecting.wait(30)
        if self.rank == 0:
            self.store.set("0", bytes(range(128)))
        else:
            assert self.store.get("0") == bytes(range(128))
        self._eager = True

    def send(self, tensors, peer, tag):
        if self._connects(self.rank, peer):
            assert tensors[0].numel() == 1, "NCCL takes so little without its receive"
        else:  # one that waits on the GPU for its receive may close a circle
            self.posted.remove((self.rank, peer, tag))
        self.mail[self.rank, peer, tag].put(tensors[0].clone())
        return self._work(peer, lambda timeout: None)

    def recv(self, tensors, peer, tag):
        letters = self.mail[peer, self.rank, tag]
        if not self._connects(peer, self.rank):
            self.posted.add((peer, self.rank, tag))
        return self._work(peer, lambda timeout: tensors[0].copy_(letters.get(timeout=timeout.total_seconds())))

    def _connects(self, *pair):
        """Whether this was the first call for the pair."""
        if pair in self._connected:
            return False
        self._connected.add(pair)
        try:
            self.meetings.setdefault(pair, threading.Barrier(2)).wait(5)
        except threading.BrokenBarrierError:
            raise RuntimeError(f"{pair} did not both make their first call") from None
        return True

    def abort(self):
        time.sleep(self.ending_s)
        self.aborted = time.monotonic()

    def _work(self, peer, take):
        self.communicators["device" if self._eager else tuple(sorted((self.rank, peer)))] += 1
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        return Work(take, inf if self.hangs else time.monotonic() + self.takes_s, self)


class Work:
    """Stands for torch's WorkNCCL, which does not hold the group either."""

    def __init__(self, take, ready, group):
        self._take, self._ready, self._group = take, ready, weakref.proxy(group)
        self._looks = group.looks
        self._looks.append(0)
        self._number = len(self._looks) - 1

    def is_completed(self):
        self._looks[self._number] += 1
        return time.monotonic() >= self._ready

    def wait(self, timeout):
        assert time.monotonic() >= self._ready, "torch's wait comes after the message, or it holds up the GPU's queue"
        self._take(timeout)
        self._group.under_way -= 1


@pytest.fixture
def nccl(monkeypatch):
    own = {"made": [], "mail": defaultdict(queue.Queue), "posted": set(), "meetings": {}}
    recorded = type("ProcessGroupNCCL", (RecordedNccl,), own)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", recorded, raising=False)
    monkeypatch.setitem(carriers.CARRIERS, "device", carriers.Nccl)
    monkeypatch.setattr(carriers.nccl, "library", lambda: "NCCL 2.29.7")
    return recorded.made


def until(condition, timeout_s=10.0):
    """Returns the seconds until the condition holds."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < timeout_s
        time.sleep(0.001)
    return time.monotonic() - begin


def test_updates_leave_nothing_in_the_store(pools):
    """Else ten thousand of them for a thousand engines would fill gigabytes of the first trainer rank's host."""
    link = pools(sizes={"tp": 2, "pp": 2}, tp=2)
    link.join(1)
    keys = []
    for version in range(1, 5):
        link.update(version)
        keys.append(link.store.num_keys())
    link.assert_committed()
    assert len(set(keys)) == 1


def test_a_failed_link_holds_the_next_step_no_longer_than_it_takes_to_say_so(pools, nccl):
    """However long NCCL takes to end the communicator: torch's watchdog alone may wait for a minute."""
    link = pools(sizes={}, tp=1, timeout_s=30.0)
    link.join(1)
    link.update(1)
    group = next(group for group in nccl if group.rank == 0)
    type(group).ending_s = 2.0
    link.publish(2)
    (update,) = link.publishers[0]._updates
    until(lambda: update.thread.is_alive())
    update.outlet.say_failed(2, "engine rank 0 is gone")
    assert until(update._read.is_set) < 0.1
    *_, error = link.delivered.get(timeout=0.1)
    assert error == "engine rank 0 is gone" and group.aborted is None
    until(lambda: group.aborted)


def test_giving_an_engine_up_inside_a_message_holds_neither_the_step_nor_the_thread(pools, nccl):
    link = pools(sizes={}, tp=1, timeout_s=30.0)
    link.join(1)
    link.update(1)
    type(nccl[0]).ending_s, type(nccl[0]).hangs = 2.0, True
    link.start()
    link.publish(2)
    (update,) = link.publishers[0]._updates
    until(lambda: update.outlet._link._under_way and nccl[0].under_way)
    link.publishers[0].give_up(0, 1)
    assert until(update._read.is_set) < 0.1
    assert until(lambda: not update.thread.is_alive()) < 1


def test_a_receive_is_posted_once_its_sender_has_turned_to_it(pools, nccl):
    """On the GPU it could hold up the collective that the sender's turn waits for (test_circles.py)."""
    link = pools(sizes={}, tp=2, timeout_s=30.0)
    link.join(1)
    link.update(1)
    trainer, *engine = sorted(nccl, key=lambda group: group.rank)
    type(trainer).hangs = True
    link.start()
    link.publish(2)
    until(lambda: trainer.under_way)
    time.sleep(0.1)
    assert sum(group.under_way for group in engine) == 1, "that of the rank to which the trainer sends"
    link.publishers[0].give_up(0, 1)


def test_a_message_whose_receive_is_never_posted_is_not_sent_and_ends_with_its_link(pools, nccl, monkeypatch):
    link = pools(sizes={}, tp=1, timeout_s=30.0)
    link.join(1)
    link.update(1)
    posts = threading.Event()
    unsaid = SimpleNamespace(wait=lambda timeout: posts.set())
    monkeypatch.setattr(link.inlets[0].link.carrier._words, "send", lambda *told: unsaid)
    link.start()
    link.publish(2)
    (update,) = link.publishers[0]._updates
    assert posts.wait(10)
    trainer = next(group for group in nccl if group.rank == 0)
    time.sleep(0.1)
    assert not trainer.under_way and update.thread.is_alive()
    link.publishers[0].give_up(0, 1)
    assert until(lambda: not update.thread.is_alive()) < 1


def test_the_next_update_does_not_wait_for_one_that_was_given_up_while_its_link_connected(pools, nccl):
    """As NCCL does for minutes once a node is gone that it connects to."""
    link = pools(sizes={}, tp=1, timeout_s=30.0)
    connecting = dist.ProcessGroupNCCL.connecting = threading.Event()
    link.join(1)
    link.start()
    link.publish(1)
    until(lambda: len(nccl) == 2)
    (stuck,) = link.updates
    link.publishers[0].give_up(0, 1)
    stuck.abandon()
    *_, error = link.delivered.get(timeout=10)
    assert error
    dist.ProcessGroupNCCL.connecting = None
    link.join(2)
    link.update(2, generation=2)
    held = {name: parameter.clone() for name, parameter in link.held[0].items()}
    assert stuck._thread.is_alive()
    connecting.set()
    until(lambda: not stuck._thread.is_alive())
    assert all(torch.equal(parameter, held[name]) for name, parameter in link.held[0].items())
    link.assert_committed()


def test_no_update_writes_beside_one_that_may_even_if_another_was_given_up_between_them(pools, nccl):
    """The one between waits for the first, and the third must not take it for over."""
    link = pools(sizes={}, tp=1, timeout_s=30.0)
    link.join(1)
    link.update(1)
    writes, goes_on = threading.Event(), threading.Event()
    (inlet,) = link.inlets
    original = inlet.link.receive

    def receive(*message):
        writes.set()
        assert goes_on.wait(20)
        return original(*message)

    inlet.link.receive = receive
    link.start()
    link.publish(2)
    (first,) = link.updates
    assert writes.wait(10)
    first.abandon()
    link.join(2)
    link.start()
    (second,) = link.updates
    second.abandon()
    link.join(3)
    link.start()
    link.publish(1, generation=3)
    (third,) = link.updates
    time.sleep(0.2)
    assert first._thread.is_alive() and third._thread.is_alive() and not third._may_write
    goes_on.set()
    until(lambda: not third._thread.is_alive())
    assert not first._thread.is_alive() and not third.problem()


def test_an_abandoned_update_ends_at_once(pools, nccl):
    """vLLM waits for the whole device right after, and so for a receive that no trainer will answer."""
    link = pools(sizes={}, tp=1, timeout_s=30.0)
    link.join(1)
    link.update(1)
    group = next(group for group in nccl if group.rank == 1)
    type(group).ending_s, type(group).hangs = 2.0, True
    before = group.under_way
    link.start()
    link.publish(2)
    (reception,) = link.updates
    until(lambda: group.under_way > before)
    begin = time.monotonic()
    reception.abandon()
    assert time.monotonic() - begin < 0.1
    assert until(lambda: not reception._thread.is_alive()) < 1
    assert reception.problem().endswith("update 2 cannot be committed: abandoned by the controller")
    assert until(lambda: group.aborted, 3) > 1, "begun with the call, ended by itself"
    *_, error = link.delivered.get(timeout=10)
    assert error.endswith("update 2: abandoned by the controller")


def test_whoever_lets_go_of_a_group_is_a_thread_of_its_own(pools, nccl):
    """Its destructor waits for torch's watchdog."""
    link = pools(sizes={}, tp=1)
    link.join(1)
    link.update(1)
    dropped = []
    for group in list(nccl):
        weakref.finalize(group, lambda: dropped.append(threading.current_thread().name))
    del group
    nccl.clear()
    for end in (link.inlets[0].link, link.publishers[0]._outlets[0].link()):
        end.abort()
    until(lambda: len(dropped) == 2)
    assert dropped == ["end-link to engine 0, generation 1"] * 2


def test_a_thread_that_waits_for_a_message_seldom_wakes_up(pools, nccl):
    """A rank has as many of them as links, beside the one that launches training's kernels."""
    link = pools(sizes={}, tp=1)
    link.join(1)
    link.update(1)
    type(nccl[0]).takes_s = 0.05
    link.update(2)
    looks = [n for group in nccl for n in group.looks[len(group.looks) // 2 :]]
    assert 20 < max(looks) <= 60


class ManyLinks:
    """Stands for the groups of all links of a trainer rank, to engines that have posted their receives."""

    def __init__(self, links):
        end = LinkEnd(0, 1, "127.0.0.1:1", torch.device("cpu"), 30.0)
        self.carriers = [carriers.Nccl(end) for _ in range(links)]
        self.under_way, self.most, self.hang, self.lock = 0, 0, False, threading.Lock()
        for carrier in self.carriers:
            carrier.group, carrier._connected = self, {1}
            carrier._words = SimpleNamespace(
                send=lambda *_: None,
                receive=lambda *_: None,
                wait=lambda *_: None,
                abort=lambda: None,
                close=lambda: None,
            )

    def send(self, tensors, peer, tag):
        with self.lock:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        return ManyWork(self, inf if self.hang else time.monotonic() + 0.005)

    def abort(self):
        pass


class ManyWork:
    def __init__(self, links, ready):
        self._links, self._ready = links, ready

    def is_completed(self):
        return time.monotonic() >= self._ready

    def wait(self, timeout):
        with self._links.lock:
            self._links.under_way -= 1


def sending(carrier, deadline, messages=5):
    def run():
        for tag in range(messages):
            carrier.wait(carrier.send(torch.zeros(1), 1, tag, deadline), deadline)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_a_rank_with_many_links_sends_eight_messages_at_a_time():
    links = ManyLinks(24)
    for thread in [sending(carrier, Deadline(30.0)) for carrier in links.carriers]:
        thread.join(30)
        assert not thread.is_alive()
    assert links.most == 8 and links.under_way == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_messages_that_never_arrive_hold_up_those_of_other_links_until_they_are_given_up(how):
    links, deadline = ManyLinks(9), Deadline(30.0)
    links.hang = True
    *stuck, carrier = links.carriers
    for each in stuck:
        sending(each, deadline)
    until(lambda: links.under_way == 8)
    links.hang = False
    thread = sending(carrier, Deadline(30.0))
    time.sleep(0.05)
    assert links.under_way == 8 and thread.is_alive()
    if how == "abort":
        stuck[0].abort()
    else:
        deadline.expire()
    assert until(lambda: not thread.is_alive()) < 1
    deadline.expire()


def test_a_link_over_nccl_has_one_communicator_on_each_rank(pools, nccl):
    link = pools(sizes={"tp": 2, "pp": 2}, tp=2)
    link.join(1)
    for version in (1, 2):
        link.update(version)
    link.assert_committed()
    plan = link.planner.plan(0)
    assert len({t.source for t in plan.transfers if t.destination == 0}) > 1, "or one a pair would be one a link"
    assert len(nccl) == link.sizes.ranks + link.tp, "one group for both updates"
    assert {group.size for group in nccl} == {link.sizes.ranks + link.tp}
    for group in nccl:
        assert list(group.communicators) == ["device"]
        assert group.most == 1, "messages on the stream of the communicator at the same time"


def test_what_nccl_is_told(pools, nccl):
    link = pools(sizes={}, tp=1)
    link.join(1)
    link.update(1)
    for group in nccl:
        config = group.options.config
        assert (config.blocking, config.min_ctas, config.max_ctas) == (1, 2, 4)
        assert group.options.is_high_priority_stream
        assert group.environment["TORCH_NCCL_ENABLE_MONITORING"] == "0", "its monitor may end the process"
        assert group.environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"
    assert not set(carriers.nccl.SETTINGS) & set(os.environ)


def test_trainer_ranks_that_send_nothing_neither_join_nor_wait(pools, nccl, monkeypatch):
    """Rank 0 sends nothing, but reports what arrived; its next step need not wait for that."""
    link = pools(sizes={"dp": 2}, tp=1)
    whole = link.planner.plan(0)
    plan = replace(whole, transfers=tuple(replace(t, source=1) for t in whole.transfers))
    monkeypatch.setattr(Planner, "plan", lambda planner, engine: plan)
    for publisher in link.publishers:
        publisher._trainer.plans[0] = plan
    link.join(1)
    link.publish(1)  # and the engine has not started to receive
    begin = time.monotonic()
    link.publishers[0].wait_until_read()
    assert time.monotonic() - begin < 5
    link.start()
    *_, received, error = link.delivered.get(timeout=60)
    assert not error and received.bytes == sum(transfer.receive.box.size for transfer in plan.transfers) * 4
    assert sorted((group.rank, group.size) for group in nccl) == [(0, 2), (1, 2)]


def test_a_member_that_dies_while_it_connects_holds_nobody_beyond_the_deadline(nccl):
    """Nor the other links of the process, which use the same connection to the store."""
    store = open_store()
    address, device = f"127.0.0.1:{store.port}", torch.device("cpu")
    link, other = (
        Link(LinkEnd(engine=engine, generation=1, store=address, device=device, timeout_s=30.0)) for engine in range(2)
    )
    link.join(Members([0], 1), 1)
    link.say("member/0")  # so it was there a moment ago
    errors = queue.Queue()

    def meet():
        try:
            link.meet(Deadline(4), update=1, stop=lambda: None)
        except LinkError as e:
            errors.put(str(e))

    threading.Thread(target=meet, daemon=True).start()
    time.sleep(0.5)
    begin = time.monotonic()
    other.say("ready/1/0")
    assert other.failure(1) == ""
    assert time.monotonic() - begin < 2 and errors.empty()
    said = errors.get(timeout=10)
    assert said.startswith("link to engine 0, generation 1: ") and "member 0" in said and "\n" not in said


@pytest.fixture
def record(monkeypatch):
    """Returns (direction, source, destination, when posted, when seen to arrive) of each message, as they come."""
    messages = []

    class Recorded(transport.Message):
        def __init__(self, link, what, *args):
            super().__init__(link, what, *args)
            words = what.split()
            source, destination = words[words.index("trainer") + 2], words[-1]
            self._record = [words[0], source, destination, time.monotonic(), float("inf")]
            messages.append(self._record)

        def wait(self, deadline):
            super().wait(deadline)
            self._record[-1] = min(self._record[-1], time.monotonic())

    monkeypatch.setattr(transport, "Message", Recorded)
    return messages


@pytest.fixture
def slow(monkeypatch):
    """Makes engine rank 1 slow to take its messages."""
    receive = Link.receive

    def slowly(link, place, bucket, deadline):
        if bucket.destination == 1:
            time.sleep(0.01)
        return receive(link, place, bucket, deadline)

    monkeypatch.setattr(Link, "receive", slowly)


def most_under_way(times):
    return max(sum(posted <= moment < arrived for posted, arrived in times) for moment, _ in times)


def test_over_nccl_a_rank_has_one_message_of_a_link_under_way(pools, nccl, record, slow):
    link = pools(sizes={"tp": 2, "pp": 2}, tp=2)
    link.join(1)
    link.update(1)
    link.assert_committed()
    of_rank = defaultdict(list)
    for direction, source, destination, *times in record:
        of_rank[direction, source if direction == "send" else destination].append(times)
    assert len(of_rank) == link.sizes.ranks + link.tp and min(map(len, of_rank.values())) > 10
    assert {rank: most_under_way(times) for rank, times in of_rank.items()} == dict.fromkeys(of_rank, 1)


def test_through_the_host_a_pair_has_as_many_under_way_as_buffers(pools, record, slow):
    link = pools(sizes={"tp": 2, "pp": 2}, tp=2, link="host")
    link.join(1)
    link.update(1)
    link.assert_committed()
    of_pair = defaultdict(list)
    for direction, source, destination, *times in record:
        of_pair[direction, source, destination].append(times)
    pairs = {(transfer.source, transfer.destination) for transfer in link.planner.plan(0).transfers}
    assert len(of_pair) == 2 * len(pairs)
    assert max(most_under_way(times) for times in of_pair.values()) == 2


ON_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=ON_CUDA)])
@pytest.mark.parametrize("kind", ["full", "streamed"])
def test_a_link_through_the_host_delivers_every_parameter(pools, kind, device):
    """Twice, so that its buffers are used again."""
    link = pools(sizes={"tp": 2, "pp": 2}, tp=2, link="host", staging=kind, device=device)
    link.join(1)
    for version in (1, 2):
        for tensor in (tensor for held in link.held for tensor in held.values()):
            tensor.zero_()
        link.update(version)
        link.assert_committed()
    links = [inlet.link for inlet in link.inlets] + [publisher._outlets[0].link() for publisher in link.publishers]
    own = {tensor.data_ptr() for publisher in link.publishers for tensor in publisher._trainer.parameters().values()}
    for end in links:
        wires = [wire for turns in end.carrier.wires.values() for wire in turns]
        assert len(wires) == 2 * len(end.carrier.wires) > 0 and not own & {wire.data_ptr() for wire in wires}
        assert all(wire.is_pinned() == (device != "cpu") for wire in wires)


@pytest.mark.parametrize("link", ["device", "host"])
@pytest.mark.parametrize("kind", ["full", "streamed"])
def test_what_has_a_dtype_of_its_own_arrives_unrounded(tmp_path, kind, link):
    tensors = write_model("glm4-moe", tmp_path / "model")
    sizes = {"tp": 2, "dp": 2, "ep": 2}
    subject = Pools(
        tmp_path,
        tensors,
        read_config(tmp_path / "model"),
        sizes=sizes,
        tp=2,
        staging=kind,
        link=link,
        dtype=torch.bfloat16,
    )
    subject.join(1)
    for version in (1, 2):
        for tensor in (tensor for held in subject.held for tensor in held.values()):
            tensor.zero_()
        assert subject.update(version).bytes == sum(
            arrival.place.nbytes for inlet in subject.inlets for arrival in inlet.arrivals
        )
        subject.assert_committed()
    subject.close()


@pytest.mark.parametrize(
    "said", ["0123 0:1 run:2", '{"plan":"0123","to_check":""}', '{"plan":1,"to_check":"","has":null}']
)
def test_a_message_of_another_release_is_one_line(pools, said):
    link = pools(sizes={}, tp=1)
    link.store.set("link/0/1/ready/1/0", said)
    link.publish(1)
    *_, error = link.delivered.get(timeout=20)
    assert error.startswith("link to engine 0, generation 1: do all ranks run the same release? EngineReady: ")
    assert "\n" not in error


def test_two_ends_that_go_through_different_memory_still_meet(pools):
    """TCP carries both kinds, so a setting that differs costs a copy and no more."""
    link = pools(sizes={"tp": 2}, tp=1, link="host")
    link._link = "device"
    link.join(1)
    link.update(1)
    link.assert_committed()


def test_a_commit_ends_when_the_device_has_done_it(pools, monkeypatch):
    link = pools(sizes={}, tp=1)
    done = []
    link.shards[0] = replace(link.shards[0], repack=lambda: done.append("repacked"))
    for module, name in ((staging, "unpack"), (reception, "settle")):
        whole = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, name=name, whole=whole: (done.append(name), whole(*a)))
    link.join(1)
    link.update(1)
    assert done[-2:] == ["repacked", "settle"] and done.count("unpack") == len(link.inlets[0].arrivals)
