"""What Linux offers for watching processes and Python's library does not: prctl, the list of children, OOM counts.

Rules: nothing here keeps state or allocates lazily, since most of it runs between a fork and the code that the fork is for.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

__all__ = [
    "become_subreaper",
    "children",
    "close_all_but",
    "die_with_parent",
    "flush_c_streams",
    "oom_kills",
    "open_descriptors",
    "set_process_name",
    "stat_of",
]

_libc = ctypes.CDLL(None, use_errno=True)

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, argument: int | bytes) -> None:
    if _libc.prctl(option, ctypes.c_char_p(argument) if isinstance(argument, bytes) else ctypes.c_ulong(argument), 0, 0, 0):
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


def die_with_parent(signal: int, parent: int) -> None:
    """Have the kernel send `signal` to this process when the *thread* that forked it ends; exits at once if that has happened already."""
    _prctl(_PR_SET_PDEATHSIG, signal)
    if os.getppid() != parent:
        os._exit(1)


def become_subreaper() -> None:
    """Orphaned descendants become children of this process instead of init's. Not inherited by forks."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_process_name(name: str) -> None:
    """What `ps` and `top` show; the kernel keeps 15 bytes."""
    _prctl(_PR_SET_NAME, name.encode()[:15])


def flush_c_streams() -> None:
    """`fflush(NULL)`: what C code printed, which `os._exit` would throw away and a fork would print twice."""
    _libc.fflush(None)


def children() -> list[int]:
    """Pids of this (single-threaded) process's children, zombies and adopted orphans included."""
    me = os.getpid()
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{me}/children").read_text().split()]
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent(pid) == me]


def _parent(pid: int) -> int:
    fields = stat_of(pid)
    return int(fields[1]) if fields else 0


def stat_of(pid: int, thread: int = 0) -> list[bytes]:
    """What stands in ``/proc/PID/stat`` of a process or one of its threads, from the third field on, its state; nothing if it is gone."""
    try:
        with open(f"/proc/{pid}/task/{thread}/stat" if thread else f"/proc/{pid}/stat", "rb") as file:
            line = file.read()
    except OSError:
        return []
    # The second field is the command in parentheses and may contain anything, so the fields are counted from its end.
    return line[line.rindex(b")") + 1 :].split()


def open_descriptors() -> set[int]:
    """Every open descriptor of this process."""
    with os.scandir("/proc/self/fd") as entries:
        listing = {int(entry.name) for entry in entries}
    # One of them was the listing's own.
    return {fd for fd in listing if _is_open(fd)}


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def close_all_but(keep: Iterable[int]) -> None:
    """Close every other descriptor. Only for a fresh fork, whose inherited Python objects are never collected."""
    for fd in open_descriptors().difference(keep):
        os.close(fd)


def oom_kills(root: str = "/sys/fs/cgroup", membership: str = "/proc/self/cgroup") -> int | None:
    """How many processes of this process's cgroup the kernel has killed for want of memory; `None` where it does not tell."""
    try:
        lines = Path(membership).read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            count = _counter(Path(f"{root}{path}/memory.events"))
        elif "memory" in controllers.split(","):
            count = _counter(Path(f"{root}/memory{path}/memory.oom_control"))
        else:
            continue
        if count is not None:
            return count
    return None


def _counter(path: Path) -> int | None:
    try:
        fields = dict(line.split() for line in path.read_text().splitlines())
    except OSError:
        return None
    return int(fields["oom_kill"]) if "oom_kill" in fields else None
