"""What a process does between the fork that made it and the function it was made for, and how it ends.

Theory: a forked process inherits everything of its zygote, wanted or not. `run_forked` sheds what isn't wanted (descriptors, signal
handlers, exit handlers, random state), puts on what the request says (environment, directory, CPUs, output), calls the entry and
leaves by `os._exit`, so that it never returns into the zygote's frames.

Rules: nothing here unwinds past `run_forked`, for the objects that the frames below it hold own descriptors whose numbers now belong to
others. The order matters: death with the parent first, the environment before any of the user's code.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn

from monarch_async._runtime.linux import become_subreaper, close_all_but, die_with_parent, flush_c_streams, set_process_name

__all__ = ["CONTROL_FD", "Entry", "add_to_path", "apply_environment", "fork_quietly", "reset_signals", "run_forked"]

Entry = Callable[[bytes, socket.socket], None]

CONTROL_FD = 3
"""The descriptor of a proc's control socket, as of a zygote's own, so that nothing else ever sits there; 0 to 2 are the usual ones."""

_kept: list[object] = []
"""Objects that would close a descriptor that is not theirs any more if they were collected."""


def fork_quietly() -> int:
    """`os.fork()` with all memory shared and no buffered output to be written twice.

    The child starts with every signal blocked, until it calls `reset_signals`. Raises `OSError` when the system refuses.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    flush_c_streams()
    gc.freeze()
    before = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    pid = -1
    try:
        pid = os.fork()
    finally:
        if pid != 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid


def reset_signals() -> None:
    """Handlers and mask as in a fresh interpreter."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if number in (signal.SIGPIPE, signal.SIGXFSZ):
            wanted: Any = signal.SIG_IGN
        elif number == signal.SIGINT:
            wanted = signal.default_int_handler
        else:
            wanted = signal.SIG_DFL
        if signal.getsignal(number) not in (wanted, None):
            signal.signal(number, wanted)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def apply_environment(env: Mapping[str, str | None]) -> None:
    """Set variables, and remove those whose value is `None`."""
    for name, value in env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if "TZ" in env:
        time.tzset()


def add_to_path(entries: Sequence[str]) -> None:
    """Put the entries that `sys.path` lacks in front of it, in their order."""
    known = set(sys.path)
    sys.path[:0] = [entry for entry in dict.fromkeys(entries) if entry not in known]


def run_forked(entry: Entry, spec: Mapping[str, Any], fds: tuple[int, int, int], keep: set[int], parent: int) -> NoReturn:
    """Become the process that `spec` describes: run `entry` and exit.

    Args:
        entry: called with the payload and the control socket.
        spec: `name`, `payload`, `env`, `cwd`, `cpus` of the request.
        fds: the control socket, and where standard output and standard error go.
        keep: descriptors to leave open besides: those that preloaded modules opened.
        parent: pid of the zygote.
    """
    code = 1
    try:
        die_with_parent(signal.SIGKILL, parent)
        os.setpgid(0, 0)
        # Orphans made while this process lives (a daemon it started) stay below it; when it ends they are the zygote's to kill.
        become_subreaper()
        control = _take_descriptors(fds, keep)
        reset_signals()
        atexit._clear()
        _take_identity(spec)
        gc.enable()
        code = _call(entry, spec["payload"], control)
        code = _finish(code)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        flush_c_streams()
        os._exit(code & 0xFF)


def _take_descriptors(fds: tuple[int, int, int], keep: set[int]) -> socket.socket:
    control, out, err = fds
    for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (err, 2), (control, CONTROL_FD)):
        os.dup2(source, target, inheritable=target != CONTROL_FD)
    close_all_but({0, 1, 2, CONTROL_FD} | keep)
    _kept.extend((sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__))
    sys.stdin = sys.__stdin__ = _text(0, "r")  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _text(1, "w")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _text(2, "w")  # type: ignore[misc]
    return socket.socket(fileno=CONTROL_FD)


def _text(fd: int, mode: Literal["r", "w"]) -> io.TextIOWrapper:
    return open(fd, mode, buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _take_identity(spec: Mapping[str, Any]) -> None:
    sys.argv[:] = [spec["name"]]
    set_process_name(spec["name"])
    apply_environment(spec["env"])
    if spec["cwd"] is not None:
        os.chdir(spec["cwd"])
    if spec["cpus"]:
        os.sched_setaffinity(0, spec["cpus"])
    random.seed()
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()


def _call(entry: Entry, payload: bytes, control: socket.socket) -> int:
    """The exit code that a script with this body would have."""
    try:
        entry(payload, control)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        sys.stderr.write(f"{stop.code}\n")
        return 1
    except BaseException as error:
        # Without this frame: the story starts at the entry.
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _finish(code: int) -> int:
    """What the interpreter does at its end: wait for the threads that are no daemons, then the exit handlers."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return code
