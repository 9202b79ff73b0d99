"""The client's part of fault injection: it holds the plan, says when something happens, and does what can be done from outside.

Rules:

* A fault is *taken* when it is decided on, and from then on never happens again, whichever process asks. The log tells what has happened:
  a fault of frames once the last of them was hit, an exception that waits for a message when it is raised, all else when it begins.
* A fault whose time has come while its member, or the other end of its link, is not there yet, waits for it.
* Signals go to processes of this host only, by a pidfd that was opened while the process waited, so that no other process gets them.
* A link's fault is injected at the client's end if the client is one of the two, otherwise by the process that is named first.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any, NamedTuple

from monarch_async._runtime.asking import tell
from monarch_async._runtime.context import Message
from monarch_async._runtime.runtime import Runtime
from monarch_async.errors import UsageError
from monarch_async.ids import ProcAddress, new_uid
from monarch_async.testing.inside import Installation, State, check_rank
from monarch_async.testing.links import Links
from monarch_async.testing.plan import Fault, member

__all__ = ["Director", "Injection"]

SAID_LATER = {"leave_child", "drop", "duplicate", "corrupt"}
"""What the process tells of when it has happened."""


class Injection(NamedTuple):
    """What has happened: seconds after the start, the fault, and what else there is to say."""

    at: float
    fault: Fault
    note: str = ""

    def __str__(self) -> str:
        return f"{self.at:8.3f} s  {self.fault}{f'  ({self.note})' if self.note else ''}"


class _Proc(NamedTuple):
    address: ProcAddress
    pidfd: int  # -1: it is on another host


class Director:
    """Injects `faults`, which the caller adds to, from a client's runtime. Used from its loop only."""

    def __init__(self, runtime: Runtime, faults: list[Fault], log: list[Injection]) -> None:
        if runtime.wrap_connection is not None:
            raise UsageError("another Faults object is in use in this program: close it first")
        self.runtime = runtime
        self.sizes: dict[str, int] = {}  # of meshes, as far as they are known
        self.errors: list[str] = []  # why faults could not be injected
        self.started: float | None = None
        self.service = f"faults {new_uid()}"
        self._faults = faults
        self._log = log
        self._taken: set[int] = set()
        self._said: set[int] = set()  # those in the log
        self._counts: dict[int, int] = {}
        self._waiting: set[int] = set()  # their time has come
        self._procs: dict[str, _Proc] = {}
        self._where: dict[tuple[str, int], str] = {}  # the process of each member
        self._frozen: set[int] = set()  # by pidfd
        self._timers: list[asyncio.TimerHandle] = []
        self._waiters: list[asyncio.Future[None]] = []
        self._links = Links(runtime, lambda index: self._note(index))
        runtime.wrap_connection = self._links.wrap
        runtime.service = {**runtime.service, self.service: self._hear}

    def installation(self, then: Callable[[], Any] | None) -> Installation:
        """What a process that starts now is given."""
        return Installation(self.service, State(tuple(self._faults), frozenset(self._taken), dict(self._counts)), then)

    def start(self) -> None:
        """Time begins, unless it has."""
        if self.started is None:
            self.started = self.runtime.loop.time()
            for index in range(len(self._faults)):
                self._schedule(index)

    def added(self, index: int) -> None:
        """There is one more fault."""
        fault = self._faults[index]
        for proc in self._procs.values():
            tell(self.runtime, proc.address, self.service, "plan", index, fault)
        if self.started is not None:
            self._schedule(index)

    async def changed(self) -> None:
        """Wait until something has happened."""
        waiter = self.runtime.loop.create_future()
        self._waiters.append(waiter)
        await waiter

    def why_waiting(self) -> str:
        """Which faults have not happened, and what they wait for."""
        lines = []
        for index, fault in enumerate(self._faults):
            if index in self._waiting and (fault.mesh, fault.rank) not in self._where:
                known = ", ".join(member(mesh, rank) for mesh, rank in self._where) or "nobody"
                lines.append(f"{fault}: there is no {member(fault.mesh, fault.rank)}, only {known}")
            elif index in self._counts and index not in self._taken:
                lines.append(f"{fault}: {self._counts[index]} counted so far")
            elif index not in self._taken:
                lines.append(f"{fault}: its moment has not come")
            elif index not in self._said:
                lines.append(f"{fault}: under way")
        return "".join(f"\n  {line}" for line in lines)

    # What processes say.

    def _hear(self, message: Message, what: str, *args: Any) -> Any:
        match what, args:
            case "register", (ProcAddress() as address, int(pid)):
                return self._register(address, pid)
            case "spawned", (str(uid), str(mesh), int(rank), int(size)):
                self.sizes[mesh] = size
                self._here(mesh, rank, uid)
            case "count", (int(index), int(count)):
                self._counts[index] = count
            case "due", (int(index),):
                return self._take(index)
            case "constructed", (int(index),):
                self._taken.add(index)
                self._note(index)
            case "done", (int(index), str(note)):
                self._note(index, note)
            case "failed", (int(index), str(text)):
                self._failed(index, text)
            case _:
                raise ValueError(f"a process says {what!r} of faults, which is not understood")
        return None

    def _register(self, address: ProcAddress, pid: int) -> State:
        here = address.host == self.runtime.me.host
        self._procs[address.uid] = _Proc(address, os.pidfd_open(pid) if here else -1)
        # The answer leaves first.
        self.runtime.loop.call_soon(self.start)
        self.runtime.loop.call_soon(self._here, address.name, address.rank, address.uid)
        return State(tuple(self._faults), frozenset(self._taken), dict(self._counts))

    def _here(self, mesh: str, rank: int, uid: str) -> None:
        self._where[mesh, rank] = uid
        for index in sorted(self._waiting):
            self._inject(index)

    # Injecting.

    def _schedule(self, index: int) -> None:
        time = self._faults[index].time
        if time is not None:
            assert self.started is not None
            self._timers.append(self.runtime.loop.call_at(self.started + time, self._on_time, index))

    def _on_time(self, index: int) -> None:
        self._waiting.add(index)
        self._inject(index)

    def _inject(self, index: int) -> None:
        """Let a fault happen, whose time has come, if all who take part are there."""
        fault = self._faults[index]
        uid = self._where.get((fault.mesh, fault.rank))
        if uid is None or (fault.family == "link" and self._other_end(fault) is None):
            return
        to: str | None = ""
        if fault.kind != "fail":  # which its process asks for when there is a message
            self._waiting.discard(index)
            to = self._take(index)
        if to is not None and fault.family != "signal" and not (fault.family == "link" and fault.to is None):
            tell(self.runtime, self._procs[uid].address, self.service, "inject", index, to)

    def _other_end(self, fault: Fault) -> str | None:
        return "" if fault.to is None else self._where.get(fault.to)

    def _take(self, index: int) -> str | None:
        """A fault shall happen: do the client's part.

        `None` if it has happened already, or can't; else the process at the other end of a link, where the rest is to be done.
        """
        fault = self._faults[index]
        if index in self._taken:
            return None
        self._taken.add(index)
        self._waiting.discard(index)
        uid = self._where.get((fault.mesh, fault.rank), "")
        to: str | None = ""
        if fault.family == "link":
            to = self._other_end(fault)
            if to is None:
                self._failed(index, f"there is no {fault.value('to')}")
                return None
        if fault.kind not in SAID_LATER:
            self._note(index)
        if fault.family == "link" and fault.to is None:
            self._links.inject(index, fault, uid, turned=True)
        elif fault.family == "signal":
            self._signal(index, fault, self._procs[uid])
        return to

    def _signal(self, index: int, fault: Fault, proc: _Proc) -> None:
        pidfd = proc.pidfd
        if pidfd < 0:
            self._failed(index, f"{proc.address} is on another host, where this program can't send signals")
            return
        number = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "thaw": signal.SIGCONT}[fault.kind]
        _send(pidfd, number)
        if fault.kind == "freeze":
            self._frozen.add(pidfd)
            if fault.value("seconds"):
                self._timers.append(self.runtime.loop.call_later(fault.value("seconds"), self._thaw, pidfd))
        elif fault.kind == "thaw":
            self._frozen.discard(pidfd)

    def _thaw(self, pidfd: int) -> None:
        if pidfd in self._frozen:
            self._frozen.discard(pidfd)
            _send(pidfd, signal.SIGCONT)

    def _note(self, index: int, note: str = "") -> None:
        at = self.runtime.loop.time() - self.started if self.started is not None else 0.0
        self._said.add(index)
        self._log.append(Injection(round(at, 3), self._faults[index], note))
        self._wake()

    def _failed(self, index: int, text: str) -> None:
        self.errors.append(f"{self._faults[index]} could not be injected: {text}")
        self._wake()

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    def members(self, mesh: str) -> int | None:
        """How many there are in a mesh, if there are any."""
        return self.sizes.get(mesh) or sum(known == mesh for known, _ in self._where) or None

    def expect(self, mesh: str, size: int) -> None:
        """There is to be a mesh of this size. `UsageError` if that refutes the plan."""
        for fault in self._faults:
            check_rank(fault, mesh, size)
        self.sizes[mesh] = size

    def check(self, fault: Fault) -> None:
        """`UsageError` for a rank that its mesh, or that of the other end, is known not to have."""
        for mesh, size in self.sizes.items():
            check_rank(fault, mesh, size)

    # The end.

    def calm(self) -> None:
        """Nothing more happens by itself; what is frozen goes on, links are as they should be."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self._waiting.clear()
        for pidfd in list(self._frozen):
            self._thaw(pidfd)
        if not self.runtime.loop.is_closed():
            self._links.calm()

    def close(self) -> None:
        """Calm down, and leave the runtime as it was."""
        self.calm()
        self.runtime.wrap_connection = None
        self.runtime.service = {name: function for name, function in self.runtime.service.items() if name != self.service}
        for proc in self._procs.values():
            if proc.pidfd >= 0:
                os.close(proc.pidfd)
        self._procs.clear()


def _send(pidfd: int, number: int) -> None:
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        pass  # it is gone already
