"""A process to start, as asked for (`ProcSpec`), as it runs (`Child`), and how it ended (`Exit`).

Rules: `ProcSpec` refuses what can be on no host; what can't be on this one is for the launcher. A `Child` owns its descriptors until
`close()`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from monarch_async._core.events import describe_exit
from monarch_async.errors import UsageError

__all__ = ["Child", "Exit", "ProcSpec", "is_gone"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcSpec:
    """What to start. Raises `UsageError` for what can't be.

    Args:
        name: shown by `ps` (15 bytes) and as `sys.argv[0]`.
        entry: ``"module:function"``, called as ``function(payload: bytes, control: socket.socket) -> None`` on the main thread.
        payload: handed to the entry.
        env: variables to set, or to remove (`None`), before the entry runs.
        cwd: directory to run in; `None` is the agent's.
        sys_path: put in front of `sys.path`, where it lacks them.
        preload: modules imported before the fork and shared by all processes that name the same ones.
        cpus: the CPUs to run on; `None` is the agent's. `OMP_NUM_THREADS` follows their number unless it is set.
    """

    name: str
    entry: str
    payload: bytes = b""
    env: Mapping[str, str | None]
    cwd: str | None = None
    sys_path: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    cpus: frozenset[int] | None = None

    def __post_init__(self) -> None:
        module, _, function = self.entry.partition(":")
        if not module or not function:
            raise UsageError(f'entry must be "module:function", got {self.entry!r}')
        for name, value in self.env.items():
            if not name or "=" in name or "\0" in name or "\0" in (value or ""):
                raise UsageError(f"{name!r}={value!r} can't be an environment variable: no '=' in names, no NUL in either, no empty name")
        if self.cpus == frozenset():
            raise UsageError("cpus must not be empty; None means no restriction")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a process ended, from the kernel. Neither `code` nor `signal`: it is gone, but who watched it died first.

    `max_rss` is its largest resident size in bytes (0: unknown). `oom` is true only if the kernel counted an out-of-memory kill in the
    cgroup meanwhile.
    """

    code: int | None = None
    signal: int | None = None
    max_rss: int = 0
    oom: bool = False

    def describe(self) -> str:
        """E.g. ``"killed by signal 9 (SIGKILL), out of memory"`` or ``"exited with code 3"``."""
        return describe_exit(self.code, self.signal) + (", out of memory" if self.oom else "")


class Child:
    """A process that was started, until `close()`.

    Attributes:
        spec: what was asked for.
        pid, pidfd: the process. The pid may be reused once `exited` is done; the pidfd never is.
        control: this end of its control socket (`SOCK_SEQPACKET`, non-blocking).
        stdout, stderr: non-blocking descriptors to read its output from.
        exited: done when the process is gone and its group has been killed.
        halted: whether a signal has halted it (SIGSTOP), until SIGCONT; `on_halt` is called when that changes.
    """

    def __init__(self, spec: ProcSpec, loop: asyncio.AbstractEventLoop, on_close: Callable[[Child], object]) -> None:
        self.spec = spec
        self.pid = 0
        self.pidfd = self.stdout = self.stderr = -1
        self.exited: asyncio.Future[Exit] = loop.create_future()
        self.halted = False
        self.on_halt: Callable[[], object] = lambda: None
        self._loop = loop
        self._on_close = on_close
        self._watching = False

    def open(self) -> list[int]:
        """Make the socket and the pipes; returns the process's ends: control, stdout, stderr. Raises `OSError`, with nothing left open."""
        with contextlib.ExitStack() as undo:
            control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.callback(control.close)
            control.setblocking(False)
            ends = [theirs.detach()]
            undo.callback(os.close, ends[0])
            pipes = []
            for _ in range(2):
                read, write = os.pipe2(os.O_CLOEXEC)
                undo.callback(os.close, read)
                undo.callback(os.close, write)
                os.set_blocking(read, False)
                pipes.append(read)
                ends.append(write)
            undo.pop_all()
        self.control = control
        self.stdout, self.stderr = pipes
        return ends

    def signal(self, number: int) -> None:
        """Send a signal to the process alone. Nothing happens if it is gone."""
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> None:
        """SIGKILL the process with its group; its zygote then kills what had left the group. Nothing happens if it is gone."""
        if self.pidfd >= 0 and not is_gone(self.pidfd):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def abandon(self) -> None:
        """Kill, and close when it is gone: nobody wants it any more."""
        self.exited.add_done_callback(lambda _: self.close())
        self.kill()

    def halt(self, halted: bool) -> None:
        """A signal has halted it, or it goes on. For the launcher."""
        if halted != self.halted:
            self.halted = halted
            self.on_halt()

    def settle(self, how: Exit) -> None:
        """Say how it ended. For the launcher."""
        self._stop_watching()
        if not self.exited.done() and not self._loop.is_closed():
            self.exited.set_result(how)

    def settle_when_gone(self) -> None:
        """Nobody is left to say how it ends: settle when it is gone. For the launcher."""
        self._watching = True
        self._loop.add_reader(self.pidfd, self.settle, Exit())

    def _stop_watching(self) -> None:
        if self._watching:
            self._watching = False
            self._loop.remove_reader(self.pidfd)

    def close(self) -> None:
        """Give back the descriptors; does not end the process. Stop reading them first."""
        if self._watching:
            self.settle(Exit())
        if self.stdout >= 0:
            self.control.close()
        for fd in (self.pidfd, self.stdout, self.stderr):
            if fd >= 0:
                os.close(fd)
        self.pidfd = self.stdout = self.stderr = -1
        self._on_close(self)


def is_gone(pidfd: int, timeout: float = 0.0) -> bool:
    """Whether the process has ended, or does within `timeout` seconds (blocking)."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout * 1000))
