"""Streams of links: the same updates over TLS to another site, and what strangers, liars and cuts come to."""

import contextlib
import socket
import ssl
import struct
import threading
import time
from datetime import timedelta

import msgspec
import pytest
import torch
import torch.distributed as dist

from areal_megatron.reshard import carriers
from areal_megatron.reshard.carriers import streams
from areal_megatron.reshard.carriers.base import LinkEnd, Members
from areal_megatron.reshard.carriers.streams import Dialer, Listener, RemoteKeys, Stream, Streams, dial, serve_keys
from areal_megatron.run.credentials import Credentials, new_credentials
from areal_megatron.run.network import address, join_address
from tests.support.probing import probed

LINK = "10.0.0.1:1 0/1"
SECRET = bytes(range(32))
SOON = timedelta(seconds=20)


def credentials_in(folder, name):
    path = folder / name
    path.write_bytes(new_credentials())
    return Credentials(path)


@pytest.fixture(scope="module")
def credentials(tmp_path_factory):
    return credentials_in(tmp_path_factory.mktemp("run"), "site.pem")


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Credentials of another run."""
    return credentials_in(tmp_path_factory.mktemp("other"), "site.pem")


@pytest.fixture
def listener(credentials):
    """That of engine rank 0, whose link has begun."""
    listener = Listener("127.0.0.1", 0, credentials.listening())
    listener.begin(LINK)
    yield listener
    listener.close()


def dialer(listener, credentials):
    return Dialer(f"127.0.0.1:{listener.port - 1}", credentials.calling())


def soon():
    return time.monotonic() + 20


@pytest.fixture(params=["TLS", "TCP"])
def ends(request, credentials):
    """Both ends of a stream: the trainer's, and the engine's."""
    shown, asked = (credentials.calling(), credentials.listening()) if request.param == "TLS" else (SECRET, SECRET)
    listener = Listener("127.0.0.1", 0, asked)
    listener.begin(LINK)
    dialed = dial("127.0.0.1", listener.port, "engine rank 0", shown, LINK, "member 0", soon())
    yield dialed, listener.take(LINK, "member 0", soon())
    listener.close()


def changed(tensors, number):
    generator = torch.manual_seed(number)
    return {
        name: tensor + (torch.rand(tensor.shape, generator=generator) < 0.01).to(tensor.dtype) / 8
        for name, tensor in tensors.items()
    }


ON_GPU = pytest.param(
    "device", "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
)


@pytest.mark.parametrize("staging", ["full", "streamed"])
@pytest.mark.parametrize(("link", "device"), [("device", "cpu"), ("host", "cpu"), ON_GPU])
@pytest.mark.parametrize(("update", "dtype"), [("full", torch.float32), ("delta", torch.bfloat16)])
def test_updates_arrive_as_over_any_other_link(pools, credentials, staging, link, device, update, dtype):
    settings = {"staging": staging, "link": link, "device": device, "update": update, "dtype": dtype}
    link = pools(sizes={"tp": 2, "pp": 2}, tp=2, credentials=credentials, **settings)
    link.join(1)
    whole = link.update(1).bytes
    link.assert_committed()
    for version in (2, 3):
        link.train(changed(link.tensors, version))
        received = link.update(version)
        link.assert_committed()
    assert (received.bytes < whole / 5) == (update == "delta")


def test_a_new_generation_begins_after_a_cut(pools, credentials):
    """With what has changed: the engine has what it had."""
    link = pools(sizes={"pp": 2}, tp=1, update="delta", dtype=torch.bfloat16, credentials=credentials)
    link.join(1)
    whole = link.update(1).bytes
    for stream in link.listeners[0]._taken:
        stream.end()
    link.train(changed(link.tensors, 1))
    begun = time.monotonic()
    _, error = link.deliver(2)
    assert "link to engine 0, generation 1: lost engine rank 0: " in error and time.monotonic() - begun < 10
    link.join(2)
    assert link.update(2, generation=2).bytes < whole / 5
    link.assert_committed()


def test_an_engine_of_another_run_gets_nothing(pools, credentials, others):
    link = pools(sizes={"tp": 1}, tp=1, timeout_s=3, credentials=credentials, trainer_credentials=others)
    link.join(1)
    _, error = link.deliver(1)
    assert "engine rank 0 at 127.0.0.1:" in error and "do not know each other" in error
    assert all(not tensor.any() for tensor in link.held[0].values())


def trusting(credentials=None):
    """A client that would believe anybody, and shows these credentials, or none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if credentials:
        context.load_cert_chain(credentials.path)
    return context


@pytest.fixture
def decoded(monkeypatch):
    """What anybody has decoded, while every refusal has its line, however many there were in earlier tests."""
    monkeypatch.setattr(streams.log, "filters", [])
    seen, decode = [], msgspec.msgpack.decode

    def note(content, **options):
        seen.append(content)
        return decode(content, **options)

    monkeypatch.setattr(msgspec.msgpack, "decode", note)
    return seen


GREETING = msgspec.msgpack.encode({"link": LINK, "role": "member 0"})
GREETED = struct.pack("<I", len(GREETING)) + GREETING


@pytest.mark.parametrize("stranger", ["plain", "without", "others", "old"])
def test_nothing_of_a_stranger_is_decoded(listener, credentials, others, decoded, caplog, stranger):
    with socket.create_connection(("127.0.0.1", listener.port)) as connection:
        connection.settimeout(20)
        with contextlib.suppress(OSError):
            if stranger != "plain":
                context = trusting({"others": others, "old": credentials}.get(stranger))
                if stranger == "old":
                    context.maximum_version = ssl.TLSVersion.TLSv1_2
                connection = context.wrap_socket(connection)
            connection.sendall(GREETED)
            assert not connection.recv(1)
    with pytest.raises(TimeoutError):
        listener.take(LINK, "member 0", time.monotonic() + 0.2)
    assert decoded == []
    assert "refused a stream from 127.0.0.1" in caplog.text


@pytest.mark.parametrize("shown", [bytes(32), SECRET[:31], b""])
def test_nothing_of_a_stranger_without_the_secret_is_decoded(decoded, caplog, shown):
    listener = Listener("127.0.0.1", 0, SECRET)
    listener.begin(LINK)
    with socket.create_connection(("127.0.0.1", listener.port)) as connection:
        connection.settimeout(20)
        connection.sendall(shown)
        connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            assert not connection.recv(1)
    with pytest.raises(ConnectionError, match=r"engine rank 0 at 127\.0\.0\.1:\d+ and this trainer rank do not know"):
        dial("127.0.0.1", listener.port, "engine rank 0", bytes(32), LINK, "member 0", soon())
    assert decoded == [] and "refused a stream from 127.0.0.1" in caplog.text
    dial("127.0.0.1", listener.port, "engine rank 0", SECRET, LINK, "member 0", soon())
    listener.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", address("auto")])
def test_an_engine_rank_listens_in_the_network_of_the_trainers_store(host):
    end = LinkEnd(engine=0, generation=1, store=join_address(host, 29500), device=torch.device("cpu"), timeout_s=20.0)
    keys, engine = dist.HashStore(), carriers.carrier_of(end)
    engine.join(keys, Members([0], 1), 1)
    told = msgspec.json.decode(keys.get("listens/1"))
    assert told["host"] == socket.gethostbyname(host)
    engine.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((told["host"], told["port"]))


def test_a_generation_that_another_replaces_listens_no_more(pools):
    link = pools(sizes={}, tp=1)
    link.join(1)
    link.update(1)
    listener = link.inlets[0].link.carrier._listener
    link.join(2)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", listener.port))
    link.update(2, generation=2)
    link.assert_committed()


def test_a_server_of_another_run_learns_nothing(credentials, others):
    """Not even for which link the stream is."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        heard = []

        def serve():
            connection, _ = server.accept()
            with contextlib.suppress(OSError):
                heard.append(others.listening().wrap_socket(connection, server_side=True).recv(100))

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(ConnectionError, match="do not know each other"):
            Dialer(f"127.0.0.1:{server.getsockname()[1] - 1}", credentials.calling()).dial(0, LINK, "keys", soon())
        thread.join(20)
        assert heard == []


def test_nobody_there(credentials):
    with socket.socket() as deaf:  # nobody else gets the port
        deaf.bind(("127.0.0.1", 0))
        port = deaf.getsockname()[1]
        with pytest.raises(ConnectionError, match=f"cannot reach engine rank 0 at 127.0.0.1:{port}: .*refused"):
            Dialer(f"127.0.0.1:{port - 1}", credentials.calling()).dial(0, LINK, "keys", soon())


def test_both_ends_of_a_silent_stream_are_probed(listener, credentials):
    """Or firewalls forget it, and an end whose machine is gone is never closed."""
    dialed = dialer(listener, credentials).dial(0, LINK, "member 0", soon())
    taken = listener.take(LINK, "member 0", soon())
    deadline = soon()
    while probed(listener.port) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert probed(listener.port) == 2
    dialed.end()
    taken.end()


def test_silent_strangers_keep_nobody_out(listener, credentials, monkeypatch):
    monkeypatch.setattr(streams, "_MOST_STRANGERS", 8)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", listener.port))) for _ in range(30)]
        dialer(listener, credentials).dial(0, LINK, "member 0", soon())
        listener.take(LINK, "member 0", soon())
        silent[0].settimeout(20)
        assert not silent[0].recv(1), "the oldest are closed"


def test_a_slow_stranger_has_little_time(listener, monkeypatch):
    monkeypatch.setattr(streams, "STRANGER_S", 0.3)
    with socket.create_connection(("127.0.0.1", listener.port)) as connection:
        connection.settimeout(20)
        begun = time.monotonic()
        assert not connection.recv(1) and 0.2 < time.monotonic() - begun < 10


def test_a_stream_for_which_there_is_no_thread_keeps_nobody_out(listener, credentials, monkeypatch, caplog):
    start, refused = threading.Thread.start, []

    def start_all_but_one(thread):
        if thread.name == "greet" and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_all_but_one)
    with socket.create_connection(("127.0.0.1", listener.port)) as connection:
        connection.settimeout(20)
        assert not connection.recv(1) and not listener._strangers
    assert "no stream can be greeted: can't start new thread" in caplog.text
    dialer(listener, credentials).dial(0, LINK, "member 0", soon())
    listener.take(LINK, "member 0", soon())


@pytest.mark.parametrize("content", [b"\xc1", msgspec.msgpack.encode({"link": 7, "role": 8}), b""])
def test_a_greeting_that_says_nothing(listener, credentials, content):
    connection = credentials.calling().wrap_socket(socket.create_connection(("127.0.0.1", listener.port)))
    connection.settimeout(20)
    connection.sendall(struct.pack("<I", len(content)) + content)
    with contextlib.suppress(OSError):
        assert not connection.recv(1)
    connection.close()
    dialer(listener, credentials).dial(0, LINK, "member 0", soon())


def test_no_memory_is_taken_because_a_peer_says_so(ends):
    trainer, engine = ends
    trainer.write(struct.pack("<I", 2**32 - 1))
    with pytest.raises(ConnectionError, match="announces 4294967295 bytes, more than 1048576"):
        engine.read_bounded(soon())


def carried(ends):
    """The messages of both ends, whose other member is 0."""
    return [Streams(member, lambda *_, end=end: end, 20) for member, end in enumerate(ends)]


def test_messages_arrive_in_order_whenever_they_are_waited_for(ends):
    trainer, engine = carried(ends)
    sent = [torch.arange(n, dtype=torch.float32) * n for n in (1, 70_000, 5, 3_000_000)]
    works = [trainer.send([tensor], 0, tag) for tag, tensor in enumerate(sent)]
    places = [torch.zeros_like(tensor) for tensor in sent]
    received = [engine.recv([place], 0, tag) for tag, place in enumerate(places)]
    received[2].wait(SOON)
    assert [work.is_completed() for work in received] == [True, True, True, False]
    received[3].wait(SOON)
    for work in works:
        work.wait(SOON)
    assert all(torch.equal(*pair) for pair in zip(sent, places, strict=True))


@pytest.mark.parametrize(("tag", "size"), [(8, 10), (7, 11), (7, 2**60)])
def test_another_message_than_the_next_one_is_refused(ends, tag, size):
    trainer, _ = ends
    _, engine = carried(ends)
    place = torch.zeros(10, dtype=torch.uint8)
    message = engine.recv([place], 0, 7)
    trainer.write(struct.pack("<QQ", tag, size), b"\1" * 11)
    with pytest.raises(RuntimeError, match=f"message {tag} of {size} bytes came in place of message 7 of 10"):
        message.wait(SOON)
    assert not place.any()


def test_a_stream_that_is_cut_in_a_message(ends):
    trainer, _ = ends
    _, engine = carried(ends)
    message = engine.recv([torch.zeros(10)], 0, 7)
    trainer.write(struct.pack("<QQ", 7, 40), b"\1" * 39)
    trainer.end()
    with pytest.raises(RuntimeError, match=r"closed|EOF|reset"):
        message.wait(SOON)


def test_deadlines(ends):
    trainer, engine = carried(ends)
    message = engine.recv([torch.zeros(10)], 0, 7)
    with pytest.raises(RuntimeError, match="timed out"):
        message.wait(timedelta(seconds=0.1))
    large = trainer.send([torch.zeros(50_000_000)], 0, 8)  # more than any buffer between takes
    with pytest.raises(RuntimeError, match="timed out"):
        large.wait(timedelta(seconds=0.2))
    trainer.end()
    with pytest.raises(RuntimeError):
        large.wait(SOON)
    with pytest.raises(RuntimeError):
        trainer.send([torch.zeros(1)], 0, 9).wait(SOON)


def test_a_new_generation_ends_the_streams_of_the_last(listener, credentials):
    dialed = dialer(listener, credentials).dial(0, LINK, "member 0", soon())
    _, engine = carried([dialed, listener.take(LINK, "member 0", soon())])
    message = engine.recv([torch.zeros(10)], 0, 7)
    threading.Timer(0.2, listener.begin, ["the next"]).start()
    with pytest.raises(RuntimeError):
        message.wait(SOON)
    with pytest.raises(ConnectionError, match="another generation"):
        listener.take(LINK, "member 1", soon())


@pytest.fixture
def keys(listener, credentials):
    """The engine's keys, the trainers' store, and the end at the trainers."""
    store = dist.HashStore()
    served = dialer(listener, credentials).dial(0, LINK, streams.KEYS, soon())
    serve_keys(served, store)
    return RemoteKeys(lambda until: listener.take(LINK, streams.KEYS, until), 60), store, served


def test_keys_are_those_of_the_store(keys):
    remote, store, _ = keys
    remote.set("ready/1/0", "digest é")
    assert store.get("ready/1/0").decode() == "digest é"
    assert remote.compare_set("failed/1", "", "why") == b"why"
    assert remote.compare_set("failed/1", "", "later") == b"why" == store.get("failed/1")
    store.set("sending/1/3", "whole")
    assert remote.check(["ready/1/0", "sending/1/3"]) and not remote.check(["ready/1/0", "sent/1/3"])
    assert remote.get("sending/1/3") == b"whole"
    assert remote.multi_get(["failed/1", "sending/1/3"]) == [b"why", b"whole"]


def test_a_key_that_is_not_there_holds_nobody_up(keys):
    remote, _, _ = keys
    begun = time.monotonic()
    with pytest.raises(dist.DistError, match="no such keys"):
        remote.get("nothing")
    assert time.monotonic() - begun < 20
    remote.set("something", "")


def test_requests_that_are_none_end_the_stream_or_are_refused(listener, credentials):
    store = dist.HashStore()
    for content, expected in (
        (msgspec.msgpack.encode({"do": "delete_key", "keys": ["a"]}), None),
        (b"\xc1", None),
        (msgspec.msgpack.encode({"do": "set", "keys": ["a", "b"], "values": [b"1"]}), "not as many values"),
        (msgspec.msgpack.encode({"do": "compare_set", "keys": ["a"], "values": [b"\xff", b"1"]}), "decode"),
    ):
        serve_keys(dialer(listener, credentials).dial(0, LINK, streams.KEYS, soon()), store)
        stream = listener.take(LINK, streams.KEYS, soon())
        stream.write_bounded(content)
        if expected is None:
            with pytest.raises(OSError):
                stream.read_bounded(soon())
        else:
            assert expected in msgspec.msgpack.decode(stream.read_bounded(soon()))["problem"]
    assert not store.check(["a"])


def test_keys_that_do_not_answer_are_given_up_once(listener, credentials):
    served = dialer(listener, credentials).dial(0, LINK, streams.KEYS, soon())
    taken = listener.take(LINK, streams.KEYS, soon())
    remote = RemoteKeys(lambda until: taken, 2)
    with pytest.raises(dist.DistError, match="timed out"):
        remote.set("a", "b")
    begun = time.monotonic()
    with pytest.raises(dist.DistError, match="timed out"):
        remote.set("a", "b")
    assert time.monotonic() - begun < 1.5
    served.end()


def test_keys_end_with_the_trainers(keys):
    remote, _, served = keys
    remote.set("a", "b")
    served.end()
    with pytest.raises(dist.DistError):
        remote.set("a", "c")


def test_what_a_stream_held_is_given_back(listener, credentials, ends):
    dialed, taken = ends
    descriptor = dialed._connection.fileno()
    assert isinstance(taken, Stream)
    dialed.end()
    assert dialed._connection.fileno() == descriptor, "another file could get the number while a thread still uses it"
