"""The part of fault injection that runs in the processes where faults happen: it counts messages, and does what a plan says.

`Installation` is what a process is given as its ``bootstrap``. It installs an `Inside` at the seams of the runtime: `on_life`, where it
puts itself before the handlers and the constructor of every actor, `wrap_connection` for links, and a service by which the client
tells what shall happen at its time.

Rules:

* Who decides is the client (`director`): nothing happens before it has agreed, so that no fault happens twice, also where a process is
  started anew. It is told every count, and a new process goes on from these.
* A fault happens before the handler's own code; an exception, in place of it.
* While nothing is planned for an actor, a message costs it one call.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import mmap
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NamedTuple, cast

from monarch_async._runtime.asking import ask, tell
from monarch_async._runtime.behavior import Behavior
from monarch_async._runtime.cell import Cell
from monarch_async._runtime.context import SYNC, Handler, Message
from monarch_async.ambient import current_runtime
from monarch_async.errors import UsageError
from monarch_async.testing.links import Links
from monarch_async.testing.plan import Fault, member

__all__ = ["Inside", "Installation", "State", "check_rank", "make_error"]


class State(NamedTuple):
    """What a process has to know of a plan: the faults, which of them have happened, and how far each of the others has counted."""

    faults: tuple[Fault, ...]
    taken: frozenset[int]
    counts: Mapping[int, int]


class Installation:
    """A bootstrap function; `then` is another one, that is called first."""

    def __init__(self, service: str, state: State, then: Callable[[], Any] | None) -> None:
        self.service = service
        self.state = state
        self.then = then

    def __call__(self) -> Any:
        result = self.then() if self.then is not None else None
        return Inside(self.service, self.state).load(result)


class Inside:
    """See the module's docstring."""

    def __init__(self, service: str, state: State) -> None:
        self._service = service
        self._runtime = runtime = current_runtime()
        if runtime.wrap_connection is not None:
            raise UsageError(f"{runtime.me} has the faults of another plan already: use one plan for a process")
        self._faults = list(state.faults)
        self._taken = set(state.taken)
        self._counts = dict(state.counts)
        self._armed: set[int] = set()  # exceptions whose time has come: the next message raises them
        self._loaded: asyncio.Future[None] | None = runtime.loop.create_future()  # None: it is up to date
        self._filled: list[mmap.mmap] = []  # what fills the memory
        self._links = Links(runtime, lambda index: self._tell("done", index, ""))
        runtime.on_life.append(self._spawned)
        runtime.wrap_connection = self._links.wrap
        runtime.service = {**runtime.service, service: self._hear}

    async def load(self, first: Any) -> None:
        """Ask the client how far the plan has come."""
        if inspect.isawaitable(first):
            await first
        me, loaded = self._runtime.me, self._loaded
        assert loaded is not None
        try:
            state: State = await ask(self._runtime, self._runtime.client, self._service, "register", me, os.getpid())
        except BaseException as error:
            loaded.set_exception(error)
            loaded.exception()  # it is the bootstrap's; who waits here too is told as well
            raise
        self._faults[:] = state.faults
        self._taken |= state.taken
        for index, count in state.counts.items():
            self._counts[index] = max(count, self._counts.get(index, 0))
        self._loaded = None
        loaded.set_result(None)

    def _hear(self, message: Message, what: str, index: int, value: Any) -> None:
        """What the client has to say."""
        if what == "plan":
            if index == len(self._faults):  # else it came with the state
                self._faults.append(value)
        elif self._faults[index].kind == "fail":
            self._armed.add(index)
        else:
            self._taken.add(index)
            self._perform(index, value)

    def _tell(self, *what: Any) -> None:
        tell(self._runtime, self._runtime.client, self._service, *what)

    # Actors.

    def _spawned(self, cell: Cell) -> None:
        mesh, _, rank, *_ = cell.identity
        size = cell.place.extent.nelements
        for fault in self._faults:
            check_rank(fault, mesh, size)
        cell.handlers = {name: self._wrap(cell, name.partition("(")[0], handler) for name, handler in cell.handlers.items()}
        cell.behavior = cast("Behavior", _Constructing(cell.behavior, lambda: self._constructing(cell)))
        self._tell("spawned", self._runtime.me.uid, mesh, rank, size)

    def _wrap(self, cell: Cell, name: str, handler: Handler) -> Handler:
        function = handler.function

        async def run(instance: Any, /, *args: Any, **kwargs: Any) -> Any:
            if len(self._taken) < len(self._faults) or self._loaded is not None:
                error = await self._handling(cell, name)
                if error is not None:
                    raise error
            return await function(instance, *args, **kwargs)

        def run_in_thread(instance: Any, /, *args: Any, **kwargs: Any) -> Any:
            if len(self._taken) < len(self._faults) or self._loaded is not None:
                error = asyncio.run_coroutine_threadsafe(self._handling(cell, name), self._runtime.loop).result()
                if error is not None:
                    raise error
            return function(instance, *args, **kwargs)

        return Handler(run_in_thread if handler.kind == SYNC else run, handler.kind, handler.concurrent, handler.explicit_port)

    def _concerns(self, fault: Fault, cell: Cell) -> bool:
        me = self._runtime.me
        return (fault.mesh, fault.rank) in ((cell.identity.mesh, cell.identity.rank), (me.name, me.rank))

    async def _handling(self, cell: Cell, name: str) -> BaseException | None:
        """A message is about to be handled: count it, and let happen what is due; returns what the handler shall raise."""
        if self._loaded is not None:
            await asyncio.shield(self._loaded)
        due = []
        for index, fault in enumerate(self._faults):
            if index in self._taken or fault.family == "constructor" or not self._concerns(fault, cell):
                continue
            if index in self._armed:
                due.append(index)
            elif fault.step is not None and fault.endpoint in ("", name):
                if self._count(index) == fault.step:
                    due.append(index)
                else:
                    self._tell("count", index, self._counts[index])
        self._taken.update(due)
        raised: BaseException | None = None
        for index in due:
            to = await ask(self._runtime, self._runtime.client, self._service, "due", index)
            if to is not None:
                raised = self._perform(index, to) or raised
        return raised

    def _count(self, index: int) -> int:
        self._counts[index] = count = self._counts.get(index, 0) + 1
        return count

    def _constructing(self, cell: Cell) -> None:
        """An actor is about to be constructed, here or in its own thread."""
        for index, fault in enumerate(self._faults):
            if index in self._taken or fault.family != "constructor" or not self._concerns(fault, cell):
                continue
            happens = self._count(index) == fault.step
            what = ("constructed", index) if happens else ("count", index, self._counts[index])
            if threading.get_ident() == self._runtime.thread:
                self._tell(*what)
            else:
                self._runtime.loop.call_soon_threadsafe(self._tell, *what)
            if happens:
                self._taken.add(index)
                raise make_error(fault)

    # What happens.

    def _perform(self, index: int, to: str) -> BaseException | None:
        """Let a fault happen, on the loop; returns what a handler shall raise for it. `to` is the process at the other end of a link."""
        fault = self._faults[index]
        try:
            match fault.kind:
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "exit":
                    os._exit(fault.value("code"))
                case "leave_child":
                    pid = os.posix_spawnp("sleep", ["sleep", f"{fault.value('seconds'):.3f}"], os.environ, setsid=True)
                    self._tell("done", index, f"pid {pid}")
                case "exhaust_memory":
                    return self._exhaust(fault.value("limit"), fault.value("seconds"))
                case "block":
                    time.sleep(fault.value("seconds"))
                case "hold_gil":
                    ctypes.PyDLL(None).poll(None, 0, round(fault.value("seconds") * 1000))
                case "fail":
                    return make_error(fault)
                case _ if fault.family == "link" and to:
                    self._links.inject(index, fault, to)
        except (OSError, ImportError, AttributeError, TypeError) as error:
            self._tell("failed", index, f"{type(error).__name__}: {error}")
        return None

    def _exhaust(self, limit: int, seconds: float) -> MemoryError | None:
        """Let this process have no more than `limit` bytes in addition, and use them up, untouched; for `seconds`."""
        before = resource.getrlimit(resource.RLIMIT_AS)
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        bound = used + limit if before[0] == resource.RLIM_INFINITY else min(before[0], used + limit)
        resource.setrlimit(resource.RLIMIT_AS, (bound, before[1]))
        size = limit
        while size >= resource.getpagesize():
            try:
                self._filled.append(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            except (OSError, MemoryError):
                size //= 2
        error: MemoryError | None = None
        try:
            bytearray(limit)
        except MemoryError as raised:
            error = MemoryError(f"no more than {limit} bytes in addition")
            error.__cause__ = raised
        if seconds:
            self._runtime.loop.call_later(seconds, self._relieve, before)
        else:
            self._relieve(before)
        return error

    def _relieve(self, limits: tuple[int, int]) -> None:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        for block in self._filled:
            block.close()
        self._filled.clear()


class _Constructing:
    """A behavior with something that comes before its constructor."""

    def __init__(self, behavior: Behavior, before: Callable[[], None]) -> None:
        self._behavior = behavior
        self._before = before

    def construct(self) -> Any:
        self._before()
        return self._behavior.construct()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._behavior, name)


def check_rank(fault: Fault, mesh: str, size: int) -> None:
    """`UsageError` if a fault, or the other end of its link, is of a rank that its mesh, of `size` members, does not have."""
    ends = [(fault.mesh, fault.rank), fault.to if fault.family == "link" else None]
    for end in ends:
        if end is not None and end[0] == mesh and end[1] >= size:
            raise UsageError(f"a fault is planned for {member(*end)}, but {mesh} has {size} members, ranks 0 to {size - 1}: {fault}")


def make_error(fault: Fault) -> BaseException:
    """The exception that a fault of an actor raises. Raises `ImportError`, `AttributeError` or `TypeError` where there is no such type."""
    module, _, name = fault.value("type").partition(":")
    found: Any = import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    error = found(fault.value("text"))
    if not isinstance(error, BaseException):
        raise TypeError(f"{fault.value('type')} is no exception")
    return error
