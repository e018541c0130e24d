"""Launches a run from processes that something else has started, one a node, told apart by RANK and WORLD_SIZE:

    torchrun --nnodes 4 --nproc-per-node 1 … -m areal_megatron.launch.ranks CONFIG [key=value …]

So do Kubernetes' JobSet and SkyPilot, by the files in launch/manifests/, PyTorchJob, and pbsdsh. Every process
supervises its node; the one of rank 0 also watches the run. The others find it by a file in the run folder, which all
nodes share. Whoever gets SIGTERM asks the run to save a checkpoint and to stop. All exit with the same code, as
areal train does; with resume=auto the same command goes on. Imports neither torch nor vllm.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from areal_megatron.config import Config, ConfigError, config_file
from areal_megatron.launch.supervision import dry_run, start
from areal_megatron.launch.supervision.hosts import HostError, Nodes
from areal_megatron.launch.supervision.node import LAUNCHER_SILENCE, POLL_S, Supervisor, hello
from areal_megatron.launch.supervision.orders import Alive, Event, Leave, NodeHello, Order, Present
from areal_megatron.launch.supervision.supervise import Outcome, supervise
from areal_megatron.process.files import read_replaced, write_atomically
from areal_megatron.process.shown import guard
from areal_megatron.process.silence import SIGN_S, AwakeClock, Repeater, sign_interval
from areal_megatron.programs.fetch import fetch_all
from areal_megatron.run.folder import Replaced, RunFolder
from areal_megatron.run.json_input import read_record
from areal_megatron.run.network import address
from areal_megatron.run.zeromq import listen, open_socket

_RETRY_S = 5.0
"""How long a process waits for an answer before it looks whether another launcher has taken the place of the first."""
_OVER_S = 60.0
"""How long the others may take to end their processes, and to be told the exit code."""
_SILENT_S = 6 * SIGN_S
"""After so long without a sign another process may take a rank's place."""


class Meeting(msgspec.Struct):
    """Where the process of rank 0 listens: a file in the run folder, which is this user's alone."""

    endpoint: str
    key: str
    """Its public key, which nobody else can read: who knows it may join."""


class Joined(msgspec.Struct, tag=True):
    """The first message of every other process, repeated until it is answered."""

    rank: int
    world: int
    hello: NodeHello


class Over(msgspec.Struct, tag=True):
    """Tells the others with which code to exit, and what is wrong."""

    code: int
    problem: str = ""


_encode = msgspec.json.encode
_decode_order = msgspec.json.Decoder(Order | Over).decode
_decode_event = msgspec.json.Decoder(Event | Joined).decode


@dataclass(frozen=True)
class Rank:
    """Which of the processes this one is."""

    number: int
    world: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Rank:
        """Reads the variables. Raises ConfigError if one is missing or no such number, or a node has several
        processes."""
        found = {}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            text = environment.get(name, "0" if name == "LOCAL_RANK" else "")
            if not re.fullmatch(r"[0-9]{1,6}", text):
                raise ConfigError(
                    f"{name}={text}: areal_megatron.launch.ranks needs RANK and WORLD_SIZE, as torchrun and jobs of "
                    "Kubernetes set them; on one machine use areal train"
                )
            found[name] = int(text)
        if found["LOCAL_RANK"]:
            raise ConfigError("LOCAL_RANK is not 0: start one process a node, as by torchrun --nproc-per-node=1")
        if found["RANK"] >= found["WORLD_SIZE"]:
            raise ConfigError(f"RANK={found['RANK']} is not below WORLD_SIZE={found['WORLD_SIZE']}")
        return cls(found["RANK"], found["WORLD_SIZE"])

    @property
    def name(self) -> str:
        return _name(self.number)


def _name(rank: int) -> str:
    """Returns the name of a rank's node."""
    return f"rank-{rank}"


def main(arguments: list[str] | None = None) -> int:
    guard()
    parser = start.parser("areal_megatron.launch.ranks", __doc__)
    dry_run.add_flags(parser)
    options = parser.parse_intermixed_args(arguments)
    try:
        if sizes := dry_run.imagined(options, here=False):
            return dry_run.show_imagined(options, sizes)
        own, config = Rank.of(os.environ), config_file.load(options.config, options.overrides)
        return _lead(own, config, options) if own.number == 0 else _follow(own, config)
    except (ConfigError, HostError, Replaced) as e:
        print(f"error: {e}", file=sys.stderr)
        return {ConfigError: 2, HostError: Outcome.LOST, Replaced: Outcome.REPLACED}[type(e)]


def _lead(own: Rank, config: Config, options: argparse.Namespace) -> int:
    code, problem = int(Outcome.LOST), ""
    with start.lease(config) as lease, Gathering(own, lease.run, config) as gathering:
        signal.signal(signal.SIGTERM, _leave)  # until there is a run to stop
        try:
            nodes = Nodes(gathering, config.machine.silence_s)
            found = nodes.gather([_name(number) for number in range(own.world)], config.machine.gather_s)
            fetch_all(config, lease.run)
            start.check_input(config)
            beginning = start.check_nodes(config, found, lease.run, options.python)
            print(beginning.plan.table(), flush=True)
            beginning.begin()
            code = supervise(beginning, nodes, options, lease, term_stops=True)
        except (ConfigError, HostError) as e:
            code, problem = 2 if isinstance(e, ConfigError) else code, f"rank 0 says: {e}"
            raise
        except SystemExit:
            code = Outcome.STOPPED
            raise
        finally:
            gathering.dismiss(code, problem)
    return code


def _leave(*_: Any) -> None:
    sys.exit(int(Outcome.STOPPED))


class Gathering:
    """The connection of rank 0 to the supervisors of all nodes, its own included. A context manager."""

    def __init__(self, own: Rank, run: RunFolder, config: Config):
        self._own, self._file = own, run.folder / "ranks.json"
        self._orders: list[Order] = []
        self._events: list[Event] = [hello(own.name)]
        self._identities: dict[str, bytes] = {}
        """Name → how ZeroMQ calls the connection."""
        self._heard: dict[str, float] = {}
        self._rivals: dict[bytes, float] = {}
        """Connections of further processes with a rank that is taken, and when they came."""
        self._using = threading.Lock()
        self._socket = open_socket(zmq.ROUTER)
        public, secret = zmq.curve_keypair()
        host = address(config.machine.host)
        try:
            endpoint = listen(self._socket, host, secret)
        except zmq.ZMQError as e:
            raise ConfigError(f"machine.host={config.machine.host}: cannot listen on {host}: {e}") from None
        self._meeting = _encode(Meeting(endpoint, public.decode()))
        self._supervised = ExitStack()
        self._supervisor = self._supervised.enter_context(Supervisor(own.name))
        write_atomically(self._file, self._meeting)
        self._alive = Repeater(lambda: self._tell(Present()), sign_interval(config.machine.silence_s))

    def send(self, order: Order) -> None:
        supervisor = getattr(order, "supervisor", "")
        if supervisor in ("", self._own.name):
            self._orders.append(order)
        if supervisor != self._own.name:
            self._tell(order, supervisor)

    def receive(self) -> list[Event]:
        orders, self._orders = self._orders, []
        events, self._events = self._events, []
        events += [*self._supervisor.step(orders), Alive(self._own.name)]
        with self._using:
            while self._socket.poll(0):
                identity, data = self._socket.recv_multipart()
                event = _decode_event(data)
                if isinstance(event, Joined):
                    events += self._joined(event, identity)
                elif self._identities.get(event.supervisor) == identity:
                    self._heard[event.supervisor] = time.monotonic()
                    events.append(event)
        return events

    def _joined(self, who: Joined, identity: bytes) -> list[Event]:
        """Answers a process that wants to join. Returns its hello; nothing if it is refused, or is to wait since it has
        the rank of one that was there a moment ago."""
        name, now = _name(who.rank), time.monotonic()
        is_taken = self._identities.get(name, identity) != identity and now < self._heard[name] + _SILENT_S
        came = self._rivals.setdefault(identity, now)
        problem = ""
        if who.world != self._own.world:
            problem = f"rank {who.rank} has WORLD_SIZE={who.world}, and rank 0 has WORLD_SIZE={self._own.world}"
        elif who.rank == 0 or (is_taken and self._heard[name] > came + 2 * SIGN_S):
            problem = f"another process has RANK={who.rank}"
        if problem:
            self._socket.send_multipart([identity, _encode(Over(2, problem))])
        if problem or is_taken or self._is_begun(name, identity):
            return []
        self._identities[name], self._heard[name] = identity, now
        self._socket.send_multipart([identity, _encode(Present())])
        return [who.hello]

    def _is_begun(self, name: str, identity: bytes) -> bool:
        """Whether all were there, so that one in place of another that is lost is for the next start."""
        return len(self._identities) == self._own.world - 1 and self._identities.get(name) != identity

    def close(self) -> None:
        """Has every supervisor end its processes."""
        self._tell(Leave())
        self._supervised.close()

    def dismiss(self, code: int, problem: str) -> None:
        """Tells all others that the run is over, also those yet to join within the next seconds."""
        deadline = time.monotonic() + 2 * _RETRY_S
        while len(self._identities) < self._own.world - 1 and time.monotonic() < deadline:
            self.receive()
            time.sleep(POLL_S)
        self._tell(Over(code, problem))

    def _tell(self, message: Order | Over, name: str = "") -> None:
        """Sends to one of the others, or to all."""
        with self._using:
            for identity in [self._identities[name]] if name else self._identities.values():
                self._socket.send_multipart([identity, _encode(message)])

    def __enter__(self) -> Gathering:
        self._alive.__enter__()
        return self

    def __exit__(self, *_: Any) -> None:
        self._alive.__exit__()
        self._supervised.close()
        with suppress(OSError):
            if self._file.read_bytes() == self._meeting:  # else of a launcher that has taken this one's place
                self._file.unlink()
        self._socket.close(linger=int(1000 * _OVER_S))


def _follow(own: Rank, config: Config) -> int:
    """Supervises this node until rank 0 says with which code to exit. Raises HostError if rank 0 is gone."""
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # some starters pass it on to all; rank 0 acts on it
    with Membership(own, RunFolder(config.run_dir), config) as membership:
        membership.join()
        signal.signal(signal.SIGTERM, membership.ask_to_stop)
        return membership.serve()


class Membership:
    """The connection of another rank's process to rank 0. A context manager."""

    def __init__(self, own: Rank, run: RunFolder, config: Config):
        self._name, self._silence_s, self._config = own.name, config.machine.silence_s, config
        self._joining = Joined(own.number, own.world, hello(own.name))
        self._file, self._longest_s = run.folder / "ranks.json", config.machine.gather_s
        self._run, self._is_to_stop = run, False
        self._meeting: Meeting | None = None
        self._using = threading.Lock()
        self._alive = Repeater(lambda: self._say(Alive(self._name)), sign_interval(self._silence_s))

    def join(self) -> None:
        """Returns when rank 0 has answered. Raises HostError after machine.gather_s, ConfigError if it refuses, or if
        the run is there and is not to be resumed."""
        clock = AwakeClock(self._silence_s)
        while clock.now() < self._longest_s:
            self._look()
            if self._meeting is None:
                with suppress(OSError):
                    start.check_begun(self._config)  # which ends rank 0 before it can say so
                time.sleep(POLL_S)
                continue
            self._say(self._joining)
            if self._socket.poll(int(1000 * _RETRY_S)):
                answer = _decode_order(self._socket.recv())
                if isinstance(answer, Over):
                    raise ConfigError(answer.problem or "the run is over")
                return
        raise HostError(
            f"rank 0 did not answer within {self._longest_s:.0f} s: does it run, and do all nodes share "
            f"{self._file.parent}?"
        )

    def _look(self) -> None:
        """Connects to where rank 0 listens now, if that is known."""
        found = None
        with suppress(OSError, ConfigError):
            found = read_replaced(self._file, lambda content: read_record(content, Meeting, self._file))
        if found is None or found == self._meeting:
            return
        self._disconnect()
        self._meeting, self._socket = found, open_socket(zmq.DEALER)
        public, secret = zmq.curve_keypair()
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, found.key.encode())
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self._socket.connect(found.endpoint)

    def serve(self) -> int:
        """Carries out orders; returns the exit code. Raises HostError if rank 0 is gone."""
        clock = AwakeClock(LAUNCHER_SILENCE * self._silence_s)
        heard, longest_s = clock.now(), LAUNCHER_SILENCE * self._silence_s
        with self._alive, Supervisor(self._name) as supervisor:
            while clock.now() < heard + longest_s:
                with self._using:
                    taken = [_decode_order(self._socket.recv()) for _ in iter(lambda: self._socket.poll(0), 0)]
                heard = clock.now() if taken else heard
                if any(isinstance(order, Leave | Over) for order in taken):
                    break
                for event in supervisor.step(taken):
                    self._say(event)
                if self._is_to_stop:
                    self._stop()
                time.sleep(POLL_S)
            else:
                raise HostError(f"rank 0 has said nothing for {longest_s:.0f} s")
        return self._exit_code(taken)

    def ask_to_stop(self, *_: Any) -> None:
        self._is_to_stop = True

    def _stop(self) -> None:
        """Asks the run to stop, again if it has only begun since."""
        with suppress(OSError):  # not there yet, or away
            if self._run.has_begun():
                self._run.stop.touch()

    def _exit_code(self, taken: list[Order | Over]) -> int:
        while not (over := next((order for order in taken if isinstance(order, Over)), None)):
            if not self._socket.poll(int(1000 * _OVER_S)):
                raise HostError(f"rank 0 has not said within {_OVER_S:.0f} s how the run ended")
            taken = [_decode_order(self._socket.recv())]
        if over.problem:
            print(f"error: {over.problem}", file=sys.stderr, flush=True)
        return over.code

    def _say(self, event: Event | Joined) -> None:
        with self._using, suppress(zmq.Again):
            self._socket.send(_encode(event), zmq.DONTWAIT)

    def _disconnect(self) -> None:
        if self._meeting:
            self._socket.close(linger=1000)

    def __enter__(self) -> Membership:
        return self

    def __exit__(self, *_: Any) -> None:
        self._disconnect()


if __name__ == "__main__":
    sys.exit(main())
