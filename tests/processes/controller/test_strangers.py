"""What strangers, and a trainer that has lost its mind, can do to the controller's socket: nothing."""

import json
import random
import re
import resource
import secrets
import selectors
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress

import psutil
import pytest
import zmq
from zmq.utils import z85

from areal_megatron.data.trajectory import decoder, encoder
from areal_megatron.protocol import (
    Bye,
    ControllerClient,
    ControllerError,
    Envelope,
    Ok,
    ReplyEnvelope,
    Trained,
    public_key,
)
from areal_megatron.run.folder import SecretKeys

KEYS, OTHERS = (SecretKeys(secrets.token_bytes(32), secrets.token_bytes(32)) for _ in range(2))
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + b"\0" + bytes(31)
_encode = encoder().encode
_decode_answer = decoder(ReplyEnvelope).decode


class Serving:
    def __init__(self, limit):
        command = [sys.executable, "-m", "tests.support.serving", *(key.hex() for key in KEYS), str(limit)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(command, text=True, **pipes)
        self.endpoint = self.process.stdout.readline().strip()
        assert self.endpoint, self.process.stderr.read()
        host, port = self.endpoint.removeprefix("tcp://").split(":")
        self.address = host, int(port)

    def report(self):
        out, err = self.process.communicate(timeout=20)
        assert self.process.returncode == 0, err[-3000:]
        assert err.count("\n") < 30, f"a line for every stranger:\n{err[:3000]}"
        return json.loads(out), err


@pytest.fixture
def serve():
    """serve(limit): a Service in a process that may have so many descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 16384), hard))
    started = []

    def new(limit=1024):
        started.append(Serving(limit))
        return started[-1]

    yield new
    for served in started:
        served.process.kill()
        served.process.communicate()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def connections():
    with ExitStack() as held:

        def connect(address):
            connection = held.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex(address)
            return connection

        connect.close = held.close
        yield connect


def dealer(endpoint, client, server, **options):
    """Returns a raw socket with the given secret keys of both sides; without encryption if `client` is None."""
    made = zmq.Context.instance().socket(zmq.DEALER)
    made.setsockopt(zmq.LINGER, 0)
    if client:
        made.setsockopt(zmq.CURVE_SERVERKEY, public_key(server))
        made.setsockopt(zmq.CURVE_PUBLICKEY, public_key(client))
        made.setsockopt(zmq.CURVE_SECRETKEY, z85.encode(client))
    made.connect(endpoint)
    return made


def ask(endpoint, timeout_s=15.0):
    with ControllerClient(endpoint, KEYS, "trainer-0", timeout_s) as client:
        return client.request(Bye())


def attack(serving, connections, openings, seconds):
    """Sends each of `openings` over a connection of its own, all at once, as far as they are taken, and keeps them."""
    waiting, end = selectors.DefaultSelector(), time.monotonic() + seconds
    for opening in openings:
        waiting.register(connections(serving.address), selectors.EVENT_WRITE, opening)
    while (left := end - time.monotonic()) > 0:
        for key, _ in waiting.select(left) if waiting.get_map() else time.sleep(left) or ():
            waiting.unregister(key.fileobj)
            with suppress(OSError):
                key.fileobj.send(key.data)


def garbled(dice):
    """Returns what looks like a command of the handshake, or like a message before there was one."""
    name = dice.choice([b"\x05HELLO", b"\x08INITIATE", b"\x07MESSAGE", b"\x05ERROR", b"\x05READY", b""])
    body = name + dice.randbytes(dice.choice([0, 1, 192, 194, 200, 240]))
    flag = dice.choice([0, 1, 2, 4, 4, 4, 6, 255])
    if flag in (2, 6):
        return bytes([flag]) + dice.choice([len(body), 2**40, 2**63]).to_bytes(8, "big") + body
    return bytes([flag, len(body)]) + body


OPENINGS = {
    "silence": (2000, lambda dice: b""),
    "a first byte": (2000, lambda dice: b"\xff"),
    "a greeting": (2000, lambda dice: GREETING),
    "noise": (2000, lambda dice: dice.randbytes(dice.randrange(1, 4096))),
    "a garbled handshake": (1000, lambda dice: GREETING + garbled(dice)),
}
"""What each connection opens with, and how many there are."""


@pytest.mark.parametrize("opening", OPENINGS)
def test_connections_without_the_key_cost_the_controller_nothing(serve, connections, opening):
    count, make = OPENINGS[opening]
    serving = serve(256)
    dice = random.Random(7)
    with ControllerClient(serving.endpoint, KEYS, "trainer-0", 15) as trainer:
        assert isinstance(trainer.request(Bye()), Ok)
        attack(serving, connections, [make(dice) for _ in range(count)], seconds=1.0)
        assert isinstance(trainer.request(Bye()), Ok), "a trainer that was there is not answered any more"
    connections.close()
    assert isinstance(ask(serving.endpoint), Ok), "no trainer gets in any more"
    report, _ = serving.report()
    assert (report["failed"], report["lost"], report["dropped"]) == (0, 0, 0)
    assert report["late_ms_p99"] < 50 + report["quiet_ms_p99"]  # which is nothing, unless the machine is busy


def test_only_the_trainers_key_is_let_in_and_nothing_is_decoded_before(serve):
    serving = serve()
    trainers, controller = KEYS.trainers, KEYS.controller
    strangers = [
        dealer(serving.endpoint, None, None),
        dealer(serving.endpoint, OTHERS.trainers, controller),
        dealer(serving.endpoint, controller, controller),
        dealer(serving.endpoint, trainers, OTHERS.controller),
    ]
    for stranger in strangers:
        stranger.send(nested(1200))
        stranger.send(_encode(Envelope("trainer-0", 1, Bye())))
    time.sleep(2.2)  # strangers are counted every second, after a second's grace
    assert not any(stranger.poll(0) for stranger in strangers)
    for stranger in strangers:
        stranger.close()
    report, log = serving.report()
    assert report["dropped"] == 0
    assert re.search(r"closed \d+ connections, since the start, that did not show the trainers' key", log)


def test_what_holders_of_the_key_send_never_ends_the_controller(serve):
    serving = serve()
    dice, sent = random.Random(7), 0
    with dealer(serving.endpoint, KEYS.trainers, KEYS.controller) as trainer:
        for _ in range(10_000):
            sent += dropped(trainer, [dice.randbytes(dice.randrange(200))])
        for depth in range(200, 1200):
            trainer.send(nested(depth))  # some are deep enough to be refused, the others are answered
        sent += dropped(trainer, [b""])
        sent += dropped(trainer, [b"two", b"frames"])
        sent += dropped(trainer, [b""] * 5000)
        sent += dropped(trainer, [b"x" * (2**20 - 100)])
        trainer.send(_encode(Envelope("trainer-0", 7, Bye())))
        while _decode_answer(trainer.recv()).number != 7:
            pass
    with dealer(serving.endpoint, KEYS.trainers, KEYS.controller) as trainer:
        trainer.send(b"x" * 2**21)  # its connection is closed
        assert isinstance(ask(serving.endpoint), Ok)
    report, _ = serving.report()
    assert sent < report["dropped"] < sent + 1000
    assert report["lost"] == 0


def test_a_later_owner_of_the_port_learns_nothing_and_is_not_believed():
    impostor = zmq.Context.instance().socket(zmq.ROUTER)
    impostor.setsockopt(zmq.LINGER, 0)
    impostor.setsockopt(zmq.CURVE_SERVER, 1)
    impostor.setsockopt(zmq.CURVE_SECRETKEY, OTHERS.controller)
    port = impostor.bind_to_random_port("tcp://127.0.0.1")
    with impostor, pytest.raises(ControllerError, match="did not answer"):
        ask(f"tcp://127.0.0.1:{port}", timeout_s=1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        with ControllerClient(endpoint, KEYS, "trainer-0", 1) as client:
            impostor = threading.Thread(target=speak_without_encryption, args=(listener, heard := []))
            impostor.start()
            for _ in range(2):  # by the second time ZeroMQ has given up the connection
                with pytest.raises(ControllerError, match="did not answer"):
                    client.request(Trained(3, 3, True, {"a metric": 1.0}))
            impostor.join()
    assert heard and not any(b"Trained" in data or KEYS.trainers in data for data in heard)


def speak_without_encryption(listener, heard):
    """Greets as a server that wants none, and keeps what it is sent."""
    connection, _ = listener.accept()
    with connection:
        connection.settimeout(2)
        heard.append(connection.recv(65536))  # ZeroMQ that sees the whole greeting first gives up without a word
        connection.sendall(GREETING.replace(b"CURVE", b"NULL\0"))
        with suppress(OSError):
            while data := connection.recv(65536):
                heard.append(data)


def test_the_process_in_front_and_the_controller_end_together(serve):
    serving = serve()
    (front,) = psutil.Process(serving.process.pid).children()
    front.kill()
    serving.process.wait(10)
    _, err = serving.process.communicate()
    assert "the process in front of the controller ended with code -9" in err
    serving = serve()
    (front,) = psutil.Process(serving.process.pid).children()
    serving.process.kill()
    front.wait(10)


def dropped(trainer, frames):
    trainer.send_multipart(frames)
    return 1


def nested(depth):
    """Returns a valid envelope with an unknown field, nested that deep."""
    return b"\x83\xa6sender\xa9trainer-0\xa6number\x01\xa4body\x82\xa4type\xa3Bye\xa1x" + b"\x91" * depth + b"\xc0"
