"""The agent's side of the zygotes: start a process, know its end, kill it.

Theory: `Launcher.start` forks the root zygote; `attach` takes the launcher into an event loop. `spawn` finds or makes the zygote
that has what the process wants imported, makes the ends of its control socket and output, and has it forked. Each end of a process comes
as an `exited` message from its zygote, and settles `Child.exited`.

Rules:

* Zygotes are kept, one for each set of preloads, import path and variables that libraries read while they are loaded.
* A zygote that dies takes its processes with it. What it did not report any more has an `Exit` without code or signal: what is not
  known is not guessed.
* Every descriptor is close-on-exec and has one owner: `Child` until `Child.close()`, the launcher for its own.
* Bound: requests are small and wait in user memory until the zygote takes them; nothing blocks the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Self

from monarch_async._runtime.child import Child, Exit, ProcSpec, is_gone
from monarch_async._runtime.fdwire import FdWire, Received
from monarch_async._runtime.zygote import start_zygote
from monarch_async.errors import SpawnError, UsageError

__all__ = ["Child", "Exit", "Launcher", "ProcSpec"]

_LOAD_TIME = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "TORCH_LOGS")
"""Prefixes of variables that native libraries read once, while they are loaded: too late to set after a preload."""

_CLOSE_TIMEOUT = 2.0


class _Connection:
    """A wire to a zygote that the event loop drives."""

    def __init__(
        self, sock: socket.socket, loop: asyncio.AbstractEventLoop, on_message: Callable[[Received], None], on_end: Callable[[], None]
    ) -> None:
        self._wire = FdWire(sock)
        self._loop = loop
        self._on_message = on_message
        self._on_end = on_end
        self._open = True
        loop.add_reader(self._wire.fileno(), self._read)

    def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Queue a request, the descriptors given away. A zygote that is gone does not raise here: `on_end` is on its way."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._wire.send(message, fds)
            if self._wire.pending:
                self._loop.add_writer(self._wire.fileno(), self._write)

    def drain(self) -> None:
        """Take what the zygote wrote before it ended, and close."""
        if self._open:
            self._read()
            self.close()

    def close(self) -> None:
        if self._open:
            self._open = False
            if not self._loop.is_closed():
                self._loop.remove_reader(self._wire.fileno())
                self._loop.remove_writer(self._wire.fileno())
            self._wire.close()

    def _read(self) -> None:
        try:
            batch = self._wire.receive()
        except (EOFError, OSError):
            self.close()
            self._on_end()
            return
        for received in batch:
            self._on_message(received)

    def _write(self) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._wire.flush()
        if not self._wire.pending:
            self._loop.remove_writer(self._wire.fileno())


class _Zygote:
    """What the launcher knows of one proc zygote and its processes. `usable` until its connection ends."""

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop, on_end: Callable[[_Zygote], None]) -> None:
        self._loop = loop
        self._on_end = on_end
        self.usable = True
        self.ready: asyncio.Future[None] = loop.create_future()
        self.starting: dict[int, tuple[Child, asyncio.Future[None]]] = {}
        self.running: dict[int, Child] = {}
        self.connection = _Connection(sock, loop, self._receive, self._ended)

    def _receive(self, received: Received) -> None:
        message, fds = received
        request = message["id"]
        match message["kind"], request:
            case "started", 0:
                _settle(self.ready)
            case "refused", 0:
                self.usable = False
                text = message["text"].strip()
                _fail(self.ready, SpawnError(f"the preload failed: {text.splitlines()[-1]}\n\n{text}"))
            case "started", _:
                child, started = self.starting.pop(request)
                child.pid, child.pidfd = message["pid"], fds[0]
                self.running[request] = child
                if started.cancelled():
                    child.abandon()
                _settle(started)
            case "refused", _:
                child, started = self.starting.pop(request)
                child.close()
                _fail(started, SpawnError(f"{child.spec.name} could not be started: {message['text']}"))
            case "halted" | "continued", _:
                self.running[request].halt(message["kind"] == "halted")
            case _:
                self.running.pop(request).settle(
                    Exit(code=message["code"], signal=message["signal"], max_rss=message["max_rss"], oom=message["oom"])
                )

    def _ended(self) -> None:
        self.usable = False
        self._on_end(self)

    def end(self, reason: str) -> None:
        """The zygote is gone: settle all that it will not settle any more."""
        self.usable = False
        self.connection.drain()
        _fail(self.ready, SpawnError(f"nothing could be started: {reason}"))
        for child, started in self.starting.values():
            child.close()
            _fail(started, SpawnError(f"{child.spec.name} could not be started: {reason}"))
        self.starting.clear()
        for child in self.running.values():
            child.settle_when_gone()
        self.running.clear()


Key = tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[str, str | None], ...]]
"""What makes a zygote: preloads, import path, variables that matter while loading."""


class Launcher:
    """Starts processes by forking zygotes; see the module's text. Make it with `start()`.

    `lost` (after `attach`) is done when the root zygote died: everything below it is gone and nothing can be started any more.
    """

    def __init__(self, pid: int, sock: socket.socket) -> None:
        self._root_pid = pid
        self._root_pidfd = os.pidfd_open(pid)
        self._root_sock = sock
        self._root: _Connection | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._exit: Exit | None = None
        self._stopping = False
        self._requests = itertools.count(1)
        self._zygotes: dict[int, _Zygote] = {}
        self._by_key: dict[Key, _Zygote] = {}
        self._children: set[Child] = set()

    @classmethod
    def start(cls) -> Self:
        """Fork the root zygote. Raises `UsageError` where a loop or a thread exists already, `SpawnError` where the system refuses."""
        if asyncio._get_running_loop() is not None or threading.active_count() > 1:
            raise UsageError("Launcher.start() must be called before this process has an event loop or a second thread")
        try:
            return cls(*start_zygote())
        except OSError as error:
            raise SpawnError(f"the zygote could not be forked: {error}") from error

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Be driven by `loop` from now on. Once only."""
        self._loop = loop
        self.lost: asyncio.Future[Exit] = loop.create_future()
        self._root = _Connection(self._root_sock, loop, self._receive, lambda: None)
        loop.add_reader(self._root_pidfd, self._root_died)

    async def spawn(self, spec: ProcSpec) -> Child:
        """Fork a process; returns once it exists, before its entry has done anything.

        Raises `SpawnError`: an import failed (with its traceback), the system refused, or the launcher is stopping or lost its zygote.
        Cancelling it kills the process.
        """
        if self._loop is None or self._root is None:
            raise UsageError("Launcher.attach(loop) must be called before spawn()")
        self._check_open()
        _check_host(spec)
        zygote = self._zygote(spec, self._loop, self._root)
        await asyncio.shield(zygote.ready)
        self._check_open()
        if not zygote.usable:
            raise SpawnError(f"{spec.name} could not be started: its zygote died")
        request = next(self._requests)
        child = Child(spec, self._loop, self._children.discard)
        try:
            fds = child.open()
        except OSError as error:
            raise SpawnError(f"{spec.name} could not be started: {error}") from error
        self._children.add(child)
        started: asyncio.Future[None] = self._loop.create_future()
        zygote.starting[request] = child, started
        zygote.connection.send(
            {
                "id": request,
                "entry": spec.entry,
                "name": spec.name,
                "payload": spec.payload,
                "env": _environment(spec),
                "cwd": spec.cwd,
                "cpus": sorted(spec.cpus or ()),
            },
            fds,
        )
        try:
            await started
            self._check_open()
        except BaseException:
            # Where the future was cancelled instead, the process is abandoned as soon as it exists.
            if child.pidfd >= 0:
                child.abandon()
            raise
        return child

    async def stop_all(self, timeout: float) -> None:
        """SIGTERM to every process, up to `timeout` seconds for them to end, then SIGKILL. Refuses `spawn` from now on.

        Raises `TimeoutError` if some are not gone even then.
        """
        self._stopping = True
        exits = {child.exited: child for child in self._children if child.pid and not child.exited.done()}
        for child in exits.values():
            child.signal(signal.SIGTERM)
        if exits:
            _, late = await asyncio.wait(exits, timeout=timeout)
            for exited in late:
                exits[exited].kill()
            if late:
                _, late = await asyncio.wait(late, timeout=_CLOSE_TIMEOUT)
            if late:
                names = ", ".join(f"{exits[exited].spec.name} (pid {exits[exited].pid})" for exited in late)
                raise TimeoutError(f"not gone {_CLOSE_TIMEOUT:g} s after SIGKILL: {names}")

    def close(self) -> None:
        """Kill everything and give back every descriptor; blocks until it is gone, at most for about 2 s."""
        if self._root_pidfd < 0:
            return
        self._stopping = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._root_pidfd)
        if self._root is not None:
            self._root.close()
        self._root_sock.close()
        if self._exit is None:
            if not is_gone(self._root_pidfd, _CLOSE_TIMEOUT):
                os.kill(self._root_pid, signal.SIGKILL)
            os.waitpid(self._root_pid, 0)
        for zygote in list(self._zygotes.values()):
            zygote.end("the launcher was closed")
        self._zygotes.clear()
        self._by_key.clear()
        for child in list(self._children):
            child.close()
        os.close(self._root_pidfd)
        self._root_pidfd = -1

    def _check_open(self) -> None:
        if self._exit is not None:
            raise SpawnError(f"nothing can be started on this host any more: its root zygote was lost ({self._exit.describe()})")
        if self._stopping:
            raise SpawnError("nothing can be started on this host any more: it is stopping")

    def _zygote(self, spec: ProcSpec, loop: asyncio.AbstractEventLoop, root: _Connection) -> _Zygote:
        """The zygote that has what `spec` wants imported, or will have."""
        load_time = {name: value for name, value in _environment(spec).items() if name.startswith(_LOAD_TIME)} if spec.preload else {}
        key: Key = spec.preload, spec.sys_path, tuple(sorted(load_time.items(), key=itemgetter(0)))
        zygote = self._by_key.get(key)
        if zygote is None or not zygote.usable:
            ours, theirs = socket.socketpair()
            zygote = self._by_key[key] = _Zygote(ours, loop, self._zygote_ended)
            request = next(self._requests)
            self._zygotes[request] = zygote
            root.send(
                {"id": request, "preload": spec.preload, "sys_path": spec.sys_path, "env": load_time},
                [theirs.detach()],
            )
        return zygote

    def _receive(self, received: Received) -> None:
        """What the root says of proc zygotes."""
        message, fds = received
        for fd in fds:
            os.close(fd)
        if message["kind"] == "refused":
            self._zygotes.pop(message["id"]).end(f"its zygote could not be started: {message['text']}")
        elif message["kind"] == "exited":
            how = Exit(code=message["code"], signal=message["signal"], max_rss=message["max_rss"], oom=message["oom"])
            self._zygotes.pop(message["id"]).end(f"its zygote was lost ({how.describe()})")

    def _root_died(self) -> None:
        """Proc zygotes kill everything below them now; what they still report is taken until their connections end."""
        assert self._loop is not None
        assert self._root is not None
        self._loop.remove_reader(self._root_pidfd)
        self._root.drain()
        _, status, usage = os.wait4(self._root_pid, 0)
        code = os.waitstatus_to_exitcode(status)
        self._exit = Exit(code=code if code >= 0 else None, signal=-code if code < 0 else None, max_rss=usage.ru_maxrss * 1024)
        for child in self._children:
            child.kill()
        for zygote in list(self._zygotes.values()):
            if not zygote.usable:
                self._zygote_ended(zygote)
        self.lost.set_result(self._exit)

    def _zygote_ended(self, zygote: _Zygote) -> None:
        """A connection ended; the root will say why, unless there is no root."""
        if self._exit is not None:
            self._zygotes = {request: other for request, other in self._zygotes.items() if other is not zygote}
            zygote.end(f"its zygote was lost with the root zygote ({self._exit.describe()})")


def _check_host(spec: ProcSpec) -> None:
    usable = os.sched_getaffinity(0)
    if spec.cpus is not None and not spec.cpus <= usable:
        raise SpawnError(f"{spec.name} could not be started: cpus {sorted(spec.cpus)} are not all usable here, {sorted(usable)} are")
    if spec.cwd is not None and not os.path.isdir(spec.cwd):
        raise SpawnError(f"{spec.name} could not be started: its cwd {spec.cwd!r} is no directory on this host")


def _environment(spec: ProcSpec) -> dict[str, str | None]:
    env = dict(spec.env)
    # Unbound, each of n processes would start as many threads as the host has CPUs.
    if spec.cpus is not None and "OMP_NUM_THREADS" not in os.environ:
        env.setdefault("OMP_NUM_THREADS", str(len(spec.cpus)))
    return env


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _fail(future: asyncio.Future[None], error: SpawnError) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # whoever waited may have been cancelled, and that is no news for the log
