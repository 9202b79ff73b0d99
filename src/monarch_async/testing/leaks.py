"""Finds what was left behind: tasks, threads, processes, file descriptors and shared memory.

Theory: a `LeakCheck` remembers what exists, and later tells what exists in addition. What it looks at:

* *task*: an asyncio task, of any loop of this process, that is not done.
* *thread*: a Python thread, daemon or not. Native threads that Python only met (`threading._DummyThread`) don't count.
* *process*: a child, reaped or not, and any process that descends from one, even where its parent is gone. Descendants are known
  by an entry that a check adds to the environment, so they are missed if they were started with an environment without it.
* *fd*: an open file descriptor, named by what it leads to.
* *segment*: shared memory that is mapped here (``/dev/shm`` and memfd), and names in ``/dev/shm`` that no live process uses.

Rules:

* A remembered thing is told from a new one by identity (object, pid, inode), so one leak can't hide behind one thing that went away.
* Reference cycles are collected before anything is called a leak, and what is on its way out gets `timeout` seconds.
* Take the snapshot after what is meant to stay exists: an event loop, a pool, a CUDA context own file descriptors too, and
  multiprocessing's resource tracker is a child that stays.

In a synchronous test::

    with LeakCheck():
        ...

In a coroutine, ``async with`` does the same and lets the loop run while it waits. Processes, file descriptors and segments are read
from ``/proc``; where there is none (outside Linux) only tasks and threads are looked at.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self, get_args

__all__ = ["KINDS", "Kind", "Leak", "LeakCheck", "LeakError"]

Kind = Literal["task", "thread", "process", "fd", "segment"]

KINDS: tuple[Kind, ...] = get_args(Kind)

MARK = "MONARCH_ASYNC_LEAK_MARK"
"""Environment variable with one token for each ancestor that checks for leaks, nearest last."""

_FIRST_POLL, _LONGEST_POLL = 0.001, 0.05


@dataclass(frozen=True, slots=True)
class Leak:
    """One thing left behind: its kind and, in words, which one."""

    kind: Kind
    what: str

    def __str__(self) -> str:
        return f"{self.kind} {self.what}"


class LeakError(AssertionError):
    """Something was left behind; `leaks` lists it, and so does the text, one a line."""

    def __init__(self, leaks: Collection[Leak], timeout: float) -> None:
        lines = "".join(f"\n  {leak}" for leak in leaks)
        super().__init__(f"{len(leaks)} left behind after {timeout:g} s:{lines}")
        self.leaks = tuple(leaks)


class LeakCheck:
    """What exists now, to be compared with what exists later.

    Args:
        kinds: what to look at.
        timeout: seconds that things on their way out get before they count.
        ignore: regular expressions, searched in ``"kind what"``; what they find is not a leak.

    Raises:
        ValueError: for an unknown kind or a negative timeout.
    """

    def __init__(self, kinds: Iterable[Kind] = KINDS, *, timeout: float = 2.0, ignore: Iterable[str] = ()) -> None:
        self.kinds = tuple(kinds)
        for kind in self.kinds:
            if kind not in KINDS:
                raise ValueError(f"unknown kind {kind!r}; known are {', '.join(KINDS)}")
        if timeout < 0:
            raise ValueError(f"timeout must be 0 or more seconds, got {timeout!r}")
        self.timeout = timeout
        self._ignore = [re.compile(pattern) for pattern in ignore]
        _mark()
        self.snapshot()

    def snapshot(self) -> None:
        """Remember what exists now, in place of what was remembered."""
        # Kept by reference and not by id(), which a later object could have again.
        self._tasks = set(_pending_tasks()) if "task" in self.kinds else set()
        self._threads = set(threading.enumerate())
        self._pids = _pids()
        self._fds = _fds()
        self._mapped = _mapped() if "segment" in self.kinds else set()
        self._shm = _shm()

    def find(self) -> list[Leak]:
        """What exists now and did not at the snapshot: no waiting, no collecting of garbage."""
        finders = {
            "task": self._find_tasks,
            "thread": self._find_threads,
            "process": self._find_processes,
            "fd": self._find_fds,
            "segment": self._find_segments,
        }
        leaks = [leak for kind in self.kinds for leak in finders[kind]()]
        return [leak for leak in leaks if not any(pattern.search(str(leak)) for pattern in self._ignore)]

    def assert_none(self) -> None:
        """Wait until nothing is left, blocking this thread for at most `timeout` seconds.

        Raises:
            LeakError: something is still there.
        """
        gc.collect()
        deadline, pause = time.monotonic() + self.timeout, _FIRST_POLL
        while leaks := self.find():
            if time.monotonic() >= deadline:
                raise LeakError(leaks, self.timeout)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL)
            gc.collect()

    async def wait_none(self) -> None:
        """As `assert_none`, for coroutines: the loop runs on, so that its tasks can end. The awaiting task does not count.

        Raises:
            LeakError: something is still there.
        """
        gc.collect()
        deadline, pause = time.monotonic() + self.timeout, _FIRST_POLL
        while leaks := self.find():
            if time.monotonic() >= deadline:
                raise LeakError(leaks, self.timeout)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL)
            gc.collect()

    def __enter__(self) -> Self:
        self.snapshot()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # An error keeps alive, through its traceback, what its frames hold; it is also the better news.
        if error is None:
            self.assert_none()

    async def __aenter__(self) -> Self:
        self.snapshot()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            await self.wait_none()

    def _find_tasks(self) -> Iterable[Leak]:
        try:
            current = asyncio.current_task()
        except RuntimeError:
            current = None
        for task in _pending_tasks():
            if task is not current and task not in self._tasks:
                coroutine = task.get_coro()
                yield Leak("task", f"{task.get_name()!r} of {getattr(coroutine, '__qualname__', coroutine)}")

    def _find_threads(self) -> Iterable[Leak]:
        for thread in threading.enumerate():
            if thread not in self._threads and not isinstance(thread, threading._DummyThread):
                yield Leak("thread", f"{thread.name!r}{' (daemon)' if thread.daemon else ''}")

    def _find_processes(self) -> Iterable[Leak]:
        mine, token = os.getpid(), _mark()
        for pid in sorted(_pids() - self._pids):
            status = _status(pid)
            if status is None:
                continue
            name, state, parent = status
            if parent == mine or token in _environment_mark(pid):
                command = _read(f"/proc/{pid}/cmdline").replace("\0", " ").strip() or name
                role = "child" if parent == mine else f"descendant (parent is {parent})"
                yield Leak("process", f"{pid}, {role}{', not waited for' if state == 'Z' else ''}: {command}")

    def _find_fds(self) -> Iterable[Leak]:
        for fd, target in sorted(_fds().items()):
            if self._fds.get(fd) != target:
                yield Leak("fd", f"{fd} → {target}{_ends(fd) if target.startswith('socket:') else ''}")

    def _find_segments(self) -> Iterable[Leak]:
        mapped = _mapped()
        for segment in sorted(mapped - self._mapped):
            yield Leak("segment", f"{segment[1]} (inode {segment[0]}), mapped")
        names = _shm() - self._shm
        if not names:
            return
        # A name in /dev/shm says nothing about who made it. While another process maps it, it is that one's: if that one is ours, it
        # is reported as a process.
        used = {name for pid in _pids() for _, name in _mapped(pid)}
        for name in sorted(names):
            if name not in used:
                yield Leak("segment", f"{name}, a name that outlives its processes")


def _mark() -> str:
    """This process's token, and every process started from now on carries it."""
    mine = f"{os.getpid()}-"
    tokens = [token for token in os.environ.get(MARK, "").split(",") if token]
    if not tokens or not tokens[-1].startswith(mine):
        tokens.append(mine + secrets.token_hex(6))
        os.environ[MARK] = ",".join(tokens)
    return tokens[-1]


def _environment_mark(pid: int) -> list[str]:
    for entry in _read(f"/proc/{pid}/environ").split("\0"):
        if entry.startswith(f"{MARK}="):
            return entry.partition("=")[2].split(",")
    return []


def _pending_tasks() -> list[asyncio.Task[object]]:
    # asyncio.all_tasks() knows one loop at a time; the garbage collector knows every task.
    tasks = [thing for thing in gc.get_objects() if issubclass(type(thing), asyncio.Task)]
    return [task for task in tasks if not task.done()]


def _pids() -> set[int]:
    return {int(name) for name in _list("/proc") if name.isdigit()}


def _status(pid: int) -> tuple[str, str, int] | None:
    """Name, state and parent; None once the process is gone."""
    name, found, rest = _read(f"/proc/{pid}/stat").rpartition(") ")
    if not found:
        return None
    state, parent = rest.split()[:2]
    return name.partition("(")[2], state, int(parent)


def _fds() -> dict[int, str]:
    found = {}
    for name in _list("/proc/self/fd"):
        # The descriptor that listed the folder is gone by now.
        with contextlib.suppress(OSError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def _ends(fd: int) -> str:
    """Family and addresses of a socket, as far as it has them."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as end:
        peer: object = ""
        with contextlib.suppress(OSError):
            peer = end.getpeername()
        return f" {end.family.name} {end.getsockname() or '-'} to {peer or '-'}"
    return ""


def _mapped(pid: int | Literal["self"] = "self") -> set[tuple[int, str]]:
    """Inode and name of the shared memory a process has mapped."""
    found = set()
    for line in _read(f"/proc/{pid}/maps").splitlines():
        if "/memfd:" in line or "/dev/shm/" in line:
            _, _, _, _, inode, name = line.split(maxsplit=5)
            found.add((int(inode), name))
    return found


def _shm() -> set[str]:
    return {f"/dev/shm/{name}" for name in _list("/dev/shm")}


def _list(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except FileNotFoundError:
        return []


def _read(path: str) -> str:
    """Empty for what is gone, or not ours to read."""
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""
