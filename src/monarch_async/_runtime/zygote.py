"""Zygotes: single-threaded processes that fork, watch, kill and reap other processes.

Theory::

    agent ── root zygote ─┬─ zygote for preload ()         ── proc, proc
                          └─ zygote for preload ("torch",) ── proc, proc, proc

The *root* is forked by the agent before that has a loop or a thread, and forks zygotes only. A *proc zygote* imports what it is for,
once, and forks procs, which share that memory. Both are a blocking loop over the socket to the agent and a pipe that signals write to
(pidfds would not tell of adopted children, SIGCHLD does).

Nothing outlives its owner, whichever one process is lost to SIGKILL:

* a proc: its process group is killed while its pid is still held, and what escaped the group is adopted by its zygote, a child subreaper;
  a zygote kills every child that it did not fork, again after each death, until none is left. A proc is a subreaper too, so that a daemon
  it started stays below it as long as it lives.
* a proc zygote: its procs die with it (PR_SET_PDEATHSIG), and what they leave comes to the root, which kills it.
* the root: proc zygotes get SIGTERM, by which they kill everything below them.
* the agent: end of file on the socket, or SIGTERM, has the same effect on the root and the proc zygotes.

Rules: a pid is signalled only between its fork and its reaping, both done here, so never one that was reused. Zygotes never collect
garbage: it would unshare the memory. They answer each request with `started` (and a pidfd) or `refused`, and report each end of a child
with `exited`, and each time that it is halted by a signal or goes on with `halted` and `continued`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, NoReturn, Self

from monarch_async._runtime.fdwire import FdWire, Received
from monarch_async._runtime.forked import CONTROL_FD, Entry, add_to_path, apply_environment, fork_quietly, reset_signals, run_forked
from monarch_async._runtime.linux import (
    become_subreaper,
    children,
    close_all_but,
    die_with_parent,
    oom_kills,
    open_descriptors,
    set_process_name,
)

__all__ = ["start_zygote"]


def start_zygote() -> tuple[int, socket.socket]:
    """Fork the root zygote of this process; returns its pid and the socket to it. Call before there is a loop or a thread.

    Raises `OSError` when the system refuses to fork.
    """
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    try:
        pid = fork_quietly()
    except OSError:
        ours.close()
        raise
    finally:
        gc.unfreeze()
        if os.getpid() == parent:
            theirs.close()
    if pid == 0:
        _live(lambda: _RootZygote(theirs, parent, "monarch-root").run())
    return pid, ours


def _live(life: Callable[[], NoReturn]) -> NoReturn:
    """Run a zygote in a fresh fork; never unwinds into the frames of the process that it was forked from."""
    try:
        life()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


class _Zygote(ABC):
    """The loop that both kinds share: requests in, children watched, everything killed at the end."""

    def __init__(self, sock: socket.socket, parent: int, name: str) -> None:
        die_with_parent(signal.SIGKILL, parent)
        reset_signals()
        set_process_name(name)
        become_subreaper()
        gc.disable()
        self._parent = parent
        self._wire = FdWire(_settle_descriptors(sock))
        self._wakeup, self._wakeup_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._children: dict[int, int] = {}  # pid → id of the request, from the fork until it is reaped
        self._ooms = oom_kills() or 0
        self._listen()

    def run(self) -> NoReturn:
        """Serve until the agent is gone or SIGTERM comes."""
        die_with_parent(signal.SIGTERM, self._parent)
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        try:
            while True:
                poll.register(self._wire, select.POLLIN | (select.POLLOUT if self._wire.pending else 0))
                ready = dict(poll.poll())
                if self._wakeup in ready and signal.SIGTERM in os.read(self._wakeup, 4096):
                    break
                self._reap()
                self._tell_halts()
                if ready.get(self._wire.fileno(), 0) & ~select.POLLOUT:
                    for received in self._wire.receive():
                        self._serve(received)
                self._wire.flush()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            pass  # the agent is gone
        self._kill_all()

    @abstractmethod
    def _serve(self, received: Received) -> None:
        """Act on one request; its descriptors belong to this now."""

    def _listen(self) -> None:
        """Have signals wake the loop; called again after each import, which may have changed that."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup_in, warn_on_full_buffer=False)

    def _fork(self, request: int) -> int | None:
        """`os.fork()`, booked under the request; `None`: the system refused, and the agent knows."""
        try:
            pid = fork_quietly()
        except OSError as error:
            self._refuse(request, f"the system refused to fork: {error} (see `ulimit -u` and the pids limit of the cgroup)")
            return None
        if pid:
            with contextlib.suppress(PermissionError, ProcessLookupError):  # the child was faster
                os.setpgid(pid, pid)
            self._children[pid] = request
            self._wire.send({"kind": "started", "id": request, "pid": pid}, [os.pidfd_open(pid)])
        return pid

    def _refuse(self, request: int, text: str) -> None:
        self._wire.send({"kind": "refused", "id": request, "text": text})

    def _reap(self) -> None:
        """Bury every dead child, after what it left behind has been killed."""
        while pid := _dead_child():
            request = self._children.pop(pid, None)
            if request is not None:
                _kill_group(pid)
            self._kill_orphans()
            _, status, usage = os.wait4(pid, 0)
            if request is not None:
                self._report(request, status, usage.ru_maxrss * 1024)

    def _tell_halts(self) -> None:
        """Tell of children that a signal has halted, or let go on."""
        while change := _halted_or_continued():
            pid, kind = change
            if pid in self._children:
                self._wire.send({"kind": kind, "id": self._children[pid]})

    def _report(self, request: int, status: int, max_rss: int) -> None:
        ooms = oom_kills() or 0
        code = os.waitstatus_to_exitcode(status)
        report = {
            "kind": "exited",
            "id": request,
            "code": code if code >= 0 else None,
            "signal": -code if code < 0 else None,
            "max_rss": max_rss,
            "oom": code == -signal.SIGKILL and ooms > self._ooms,
        }
        self._ooms = ooms
        self._wire.send(report)

    def _kill_orphans(self) -> None:
        for pid in children():
            if pid not in self._children:
                _kill(pid)

    def _kill_all(self) -> NoReturn:
        """Kill and bury everything below this process, and exit."""
        for pid in self._children:
            _kill_group(pid)
        while True:
            for pid in children():
                _kill(pid)
            try:
                os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            except ChildProcessError:
                os._exit(0)
            with contextlib.suppress(OSError):  # nobody may be left to read the reports
                self._reap()


class _RootZygote(_Zygote):
    """Forks one zygote per set of preloads: a request brings the socket by which the agent will speak to it."""

    def __init__(self, sock: socket.socket, parent: int, name: str) -> None:
        os.setsid()  # away from the terminal: neither its Ctrl-C nor its hangup is for what is below
        super().__init__(sock, parent, name)

    def _serve(self, received: Received) -> None:
        request, (fd,) = received.message, received.fds
        sock, parent = socket.socket(fileno=fd), os.getpid()
        if self._fork(request["id"]) == 0:
            _live(lambda: _ProcZygote(sock, parent, "monarch-zygote").preload(request).run())
        sock.close()


class _ProcZygote(_Zygote):
    """Imports what it is for, then forks procs."""

    def __init__(self, sock: socket.socket, parent: int, name: str) -> None:
        super().__init__(sock, parent, name)
        self._modules_own: set[int] = set()  # descriptors that imported modules opened, and so rely on
        self._entries: dict[str, Entry] = {}

    def preload(self, request: Mapping[str, Any]) -> Self:
        """Import the preloads and tell the agent, as request 0; exits where that fails."""
        apply_environment(request["env"])
        add_to_path(request["sys_path"])
        trouble = self._import(lambda: [importlib.import_module(name) for name in request["preload"]])
        if trouble:
            self._refuse(0, trouble)
            os._exit(1)
        self._wire.send({"kind": "started", "id": 0})
        return self

    def _import(self, load: Callable[[], object]) -> str:
        """Call `load`; returns what went wrong, or `""`."""
        before = open_descriptors()
        try:
            load()
        except BaseException as error:
            frames = error.__traceback__ and error.__traceback__.tb_next and error.__traceback__.tb_next.tb_next
            return "".join(traceback.format_exception(type(error), error, frames))
        finally:
            self._modules_own |= open_descriptors() - before
            self._listen()
        threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
        if threads:
            names = ", ".join(threads)
            return f"the import started threads ({names}), which a fork would lose: import this in the process itself, not before its fork"
        return ""

    def _serve(self, received: Received) -> None:
        request, fds = received.message, received.fds
        parent = os.getpid()
        try:
            entry = self._entry(request)
            if entry is not None and self._fork(request["id"]) == 0:
                run_forked(entry, request, (fds[0], fds[1], fds[2]), self._modules_own, parent)
        finally:
            for fd in fds:
                os.close(fd)

    def _entry(self, request: Mapping[str, Any]) -> Entry | None:
        """The function that a request names, imported once; `None` where that failed, and the agent knows."""
        name: str = request["entry"]
        if name not in self._entries:
            module, _, function = name.partition(":")
            trouble = self._import(lambda: self._entries.update({name: attrgetter(function)(importlib.import_module(module))}))
            if trouble:
                self._entries.pop(name, None)
                self._refuse(request["id"], trouble)
                return None
        return self._entries[name]


def _settle_descriptors(sock: socket.socket) -> socket.socket:
    """In a fresh fork: keep standard output and error and `sock`, which moves to `CONTROL_FD`; close everything else."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    is_open = open_descriptors()
    for fd in (0, 1, 2):
        if fd == 0 or fd not in is_open:
            os.dup2(null, fd)
    os.dup2(sock.fileno(), CONTROL_FD, inheritable=False)
    close_all_but(range(CONTROL_FD + 1))
    return socket.socket(fileno=CONTROL_FD)


def _dead_child() -> int:
    """The pid of a child that waits to be reaped, which keeps it from being reused; 0 if there is none."""
    try:
        state = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    return state.si_pid if state else 0


def _halted_or_continued() -> tuple[int, str] | None:
    """The pid of a child that was halted or continued, and which of the two; each change once."""
    try:
        state = os.waitid(os.P_ALL, 0, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
    except ChildProcessError:
        return None
    return (state.si_pid, "continued" if state.si_code == os.CLD_CONTINUED else "halted") if state else None


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # a set-uid program is not ours to kill
        os.kill(pid, signal.SIGKILL)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
