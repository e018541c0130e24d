"""Where the processes of a run are started: on this machine (Here), or by the supervisors of nodes (Nodes)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Protocol

from areal_megatron.launch.supervision.orders import (
    Alive,
    Cleared,
    End,
    EndAll,
    Ended,
    Event,
    NodeHello,
    Order,
    StartOrder,
    carry_out,
)
from areal_megatron.launch.supervision.processes import Child, Children, Log
from areal_megatron.planning.pools import Process, whole
from areal_megatron.process.silence import AwakeClock
from areal_megatron.run.process_names import is_engine

_POLL_S = 0.05
_END_S = 60.0
_PROGRESS_S = 10.0
"""Interval between two lines about supervisors that are waited for."""
_NAMED = 8


class HostError(RuntimeError):
    """A node, or the connection to it, is lost."""


class Hosts(Protocol):
    """Starts, watches and ends the processes of a run. A context manager: leaving it ends every process.

    Example:
        with Here() as hosts:
            for process in placement.processes:
                hosts.start(start_order(config, run, process, hosts.supervisor(process)))
            hosts.refresh()
            hosts.by_name["trainer-0"].exit_code  # None while it runs
    """

    lost: set[str]
    """Processes of engines that are gone with their nodes; the run continues without them."""

    @property
    def by_name(self) -> Mapping[str, Child | Remote]: ...

    @property
    def guardian(self) -> int | None:
        """The process of this machine, if there is one, that ends all others if this one is killed (guardian.py)."""

    @property
    def supervisor(self) -> Callable[[Process], str]:
        """What returns the name of the supervisor that is to start a process."""
        ...

    def start(self, order: StartOrder) -> None: ...

    def kill(self, process: Process) -> None:
        """Ends a process, which gets little time to end by itself."""

    def refresh(self) -> None:
        """Brings exit codes and `lost` up to date. Raises HostError if the run cannot do without a lost node."""

    def end(self, keep: Collection[str] = ()) -> None:
        """Ends all processes but those to `keep`, and forgets them. Raises HostError if they do not end."""

    def __enter__(self) -> Hosts: ...
    def __exit__(self, *error) -> None: ...


class Here:
    """Hosts on this machine alone."""

    def __init__(self):
        self._children = Children()
        self.by_name = self._children.by_name
        self.lost: set[str] = set()

    @property
    def guardian(self) -> int:
        return self._children.guardian

    def supervisor(self, process: Process) -> str:
        return process.node

    def start(self, order: StartOrder) -> None:
        carry_out(order, self._children)

    def kill(self, process: Process) -> None:
        self._children.kill(process.name)

    def refresh(self) -> None:
        self._children.look_after()

    def end(self, keep: Collection[str] = ()) -> None:
        self._children.end(keep)
        self._children.forget(keep)

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *error) -> None:
        self._children.__exit__(*error)


class Remote(Log):
    """A process that a supervisor has started."""

    def __init__(self, order: StartOrder):
        super().__init__(order.name, Path(order.log))
        self.supervisor = order.supervisor
        self.exit_code: int | None = None
        self.out_of_memory = False


class Channel(Protocol):
    """The connection to all supervisors."""

    def send(self, order: Order) -> None: ...

    def receive(self) -> list[Event]:
        """Returns the events since the last call, without waiting. Raises HostError if the connection is lost."""
        ...

    def close(self) -> None:
        """Makes the supervisors end their processes and themselves."""


class Nodes:
    """Hosts on the nodes whose supervisors a channel reaches. One that is silent for silence_s is lost."""

    def __init__(
        self, channel: Channel, silence_s: float, place: Callable[[Process], str] = lambda process: process.node
    ):
        """`place` returns the name of the supervisor that is to start a process."""
        self._channel, self.supervisor = channel, place
        self._silence_s, self._clock = silence_s, AwakeClock(silence_s)
        self.by_name: dict[str, Remote] = {}
        self.lost: set[str] = set()
        self.guardian = None
        self._heard: dict[str, float] = {}
        self._uncleared: set[str] = set()

    def gather(self, expected: list[str], timeout_s: float) -> list[NodeHello]:
        """Waits for all supervisors and returns what they have, in the order of `expected`. Says now and then which are
        missing.

        Raises HostError with the names of those that did not answer within timeout_s.
        """
        found: dict[str, NodeHello] = {}
        begun = said = self._clock.now()
        while missing := [name for name in expected if name not in found]:
            now = self._clock.now()
            which = f"{len(missing)} of {len(expected)} nodes"
            names = ", ".join(missing[:_NAMED]) + (", …" if len(missing) > _NAMED else "")
            if now - begun > timeout_s:
                raise HostError(
                    f"{which} did not answer within {timeout_s:.0f} s: {names}; is the folder of this installation "
                    "there, and machine.gather_s long enough?"
                )
            if now - said > _PROGRESS_S:
                said = now
                print(f"waiting for {which}, {now - begun:.0f} s so far: {names}", file=sys.stderr, flush=True)
            found |= {event.supervisor: event for event in self._channel.receive() if isinstance(event, NodeHello)}
            time.sleep(_POLL_S)
        self._heard = dict.fromkeys(expected, self._clock.now())
        return [found[name] for name in expected]

    def start(self, order: StartOrder) -> None:
        self.by_name[order.name] = Remote(order)
        self._channel.send(order)

    def kill(self, process: Process) -> None:
        self._channel.send(End(self.supervisor(process), process.name))

    def refresh(self) -> None:
        now = self._clock.now()
        for event in self._channel.receive():
            self._heard[event.supervisor] = now
            match event:
                case Ended() if event.name in self.by_name:
                    self.by_name[event.name].exit_code = event.code
                    self.by_name[event.name].out_of_memory = event.out_of_memory
                case Cleared():
                    self._uncleared.discard(event.supervisor)
                case Alive() | _:
                    pass
        for name in [name for name, heard in self._heard.items() if now - heard > self._silence_s]:
            self._lose(name)

    def end(self, keep: Collection[str] = ()) -> None:
        self._uncleared = set(self._heard)
        self._channel.send(EndAll(list(keep)))
        longest_s = self._silence_s + _END_S
        deadline = self._clock.now() + longest_s
        while self._uncleared:
            if self._clock.now() > deadline:
                raise HostError(
                    f"{', '.join(sorted(self._uncleared))} did not end their processes within {longest_s:.0f} s"
                )
            self.refresh()
            time.sleep(_POLL_S)
        for name in self.by_name.keys() - keep:
            del self.by_name[name]

    def _lose(self, node: str) -> None:
        """Gives up a node that has fallen silent. Raises HostError if the run cannot do without it."""
        silent = f"node {node} has said nothing for {self._silence_s:.0f} s"
        broken = {whole(name) for name, process in self.by_name.items() if process.supervisor == node}
        gone = {name for name in self.by_name if whole(name) in broken}
        left = {name for name, process in self.by_name.items() if process.exit_code is None} - gone - self.lost
        if not all(map(is_engine, gone)) or not any(map(is_engine, left)):
            raise HostError(silent)
        print(f"{silent}: the run continues without {', '.join(sorted(gone)) or 'it'}", file=sys.stderr, flush=True)
        self.lost |= gone
        del self._heard[node]
        for process in [self.by_name[name] for name in sorted(gone)]:  # parts of its engines on other nodes
            if process.supervisor in self._heard and process.exit_code is None:
                self._channel.send(End(process.supervisor, process.name))

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_) -> None:
        self._channel.close()
