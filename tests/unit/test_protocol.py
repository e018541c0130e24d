"""Trainers' client against the controller's service over real sockets."""

import asyncio
import gc
import secrets
import threading

import numpy as np
import pytest
import zmq

from areal_megatron.controller.service import Service
from areal_megatron.data.trajectory import BatchPart, Trajectory
from areal_megatron.protocol import (
    BatchReply,
    Bye,
    ControllerClient,
    ControllerError,
    Hello,
    Links,
    NextBatch,
    Ok,
    Publish,
    Refused,
    Welcome,
)
from areal_megatron.run.folder import SecretKeys

KEYS, OTHERS = (SecretKeys(secrets.token_bytes(32), secrets.token_bytes(32)) for _ in range(2))


def trajectory(uid):
    return Trajectory(
        uid=uid,
        epoch=0,
        prompt_id=uid,
        admission_version=1,
        prompt=np.array([5, 6], np.int32),
        response=np.arange(uid, dtype=np.int32),
        logprobs=np.linspace(-3, -0.5, uid, dtype=np.float32),
        versions=np.full(uid, 2, np.int32),
        loss_mask=np.ones(uid, np.uint8),
        reward=-5.0,
        truncated=True,
    )


PART = BatchPart(
    version=2,
    trajectories=[trajectory(uid) for uid in (3, 4)],
    minibatches=[[[[1]], []], [[[0]]]],
    groups=4,
    group_of=[3, 0],
    episodes=8,
    episode_of=[7, 0],
)


async def answer(message):
    match message:
        case NextBatch(replica=9):
            await asyncio.sleep(60)
        case NextBatch():
            return BatchReply(PART)
        case Bye():
            return Ok()
        case Publish():
            return Refused("no engine is left")
    return Links([])


@pytest.fixture
def service():
    """A service in its own thread and event loop."""
    ready, box = threading.Event(), {}

    async def serve():
        box["service"] = Service("127.0.0.1", KEYS, answer)
        box["task"], box["loop"] = asyncio.current_task(), asyncio.get_running_loop()
        ready.set()
        try:
            await box["service"].run()
        finally:
            box["service"].close()

    def run():
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(60)  # as long as the process in front of it may take to start
    yield box["service"]
    box["loop"].call_soon_threadsafe(box["task"].cancel)
    thread.join(10)
    assert not thread.is_alive()


@pytest.fixture
def connect(service):
    clients = []

    def new(keys=KEYS, timeout_s=10.0):
        clients.append(ControllerClient(service.endpoint, keys, "trainer-3", timeout_s))
        return clients[-1]

    yield new
    for client in clients:
        client.close()


def test_a_part_of_a_batch_arrives_as_it_was_sent(connect):
    client = connect()
    assert isinstance(client.request(Hello(3)), Welcome)
    part = client.request(NextBatch(0, 0, 2)).part
    assert (part.version, part.minibatches) == (PART.version, PART.minibatches)
    for got, sent in zip(part.trajectories, PART.trajectories, strict=True):
        for name in Trajectory.__struct_fields__:
            value, expected = getattr(got, name), getattr(sent, name)
            if isinstance(expected, np.ndarray):
                assert value.dtype == expected.dtype
                np.testing.assert_array_equal(value, expected)
            else:
                assert value == expected
    assert isinstance(client.request(Bye()), Ok)


def test_a_message_that_waits_does_not_hold_up_others(connect):
    with pytest.raises(ControllerError, match=r"did not answer NextBatch of trainer-3 within 0 s"):
        connect(timeout_s=0.3).request(NextBatch(9, 0, 0))
    assert isinstance(connect().request(Bye()), Ok)


def test_another_version_of_the_protocol_is_refused(connect):
    with pytest.raises(ControllerError, match="trainer rank 3 speaks protocol 0"):
        connect().request(Hello(3, protocol=0))


def test_a_refusal_carries_its_reason(connect):
    with pytest.raises(ControllerError, match="refused Publish: no engine is left"):
        connect().request(Publish(1, "127.0.0.1:1"))


def test_a_service_that_has_ended_closes_no_socket_but_its_own():
    """ZeroMQ gives the address of a closed socket to one that is made later."""
    made = []

    async def end_and_make():
        service = Service("127.0.0.1", KEYS, answer)
        service.close()
        made.extend(zmq.Context.instance().socket(zmq.ROUTER) for _ in range(20))
        del service
        gc.collect()

    for _ in range(8):
        asyncio.run(end_and_make())
    assert not any(socket.closed for socket in made)
    for socket in made:
        socket.close(linger=0)
