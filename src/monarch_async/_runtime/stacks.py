"""Stacks of Python code: of a process that can take its own, and, from outside, of one that can't.

Theory: while C code holds the interpreter's lock, no Python code of the process runs, its watchdog included. But `faulthandler` can write
the stacks of all threads without that lock, in the handler of a signal. The handler writes to a memfd of the process, which the agent opens
through ``/proc`` and reads.

Rules:

* The agent sends the signal only while the process still has a handler for it and the file is still the one for this: without a handler
  the signal would kill, and a process may have closed all its descriptors and opened others.
* A loop's thread that sleeps is in a system call, which a signal might cut short. Then the signal goes to the *watchdog's* thread, which
  only waits for its turn; the frames of a thread that sleeps stay as they are meanwhile.
* A loop's thread that runs gets it itself: its frames may be changing, since Python code that gives the lock away for a moment, often, can
  keep the watchdog from getting it.
* `Frames` are innermost first, as Python's `f_back` goes; text has the innermost last, as tracebacks do.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import fcntl
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from monarch_async._runtime.linux import stat_of
from monarch_async._runtime.pulse import Pulse

__all__ = [
    "Code",
    "Frames",
    "dump_from_outside",
    "find_endpoint",
    "frames_of",
    "is_plumbing",
    "last_place",
    "offer_dumps",
    "read_dump",
    "render",
    "state_of",
    "trim",
]

Code = tuple[str, int, str]
"""File, line and function: of a call, or where the function begins."""
Frames = list[Code]
"""The calls of a thread."""

SIGNAL = signal.SIGRTMAX - 7
"""One that nobody else is known to use."""
NAME = "monarch-stacks"
LONGEST_WAIT = 0.3
"""Seconds for which a dump may take: the thread that makes it must come to run."""
_LOOK = 0.005
_LIBRARY = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_ASYNCIO = os.path.dirname(os.path.abspath(asyncio.__file__)) + os.sep
_THREADING = ("/threading.py", "/selectors.py", "/queue.py", "/concurrent/futures/thread.py")
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+) .*$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+),? in (.*)$', re.MULTILINE)

_libc = ctypes.CDLL(None, use_errno=True)


def offer_dumps() -> int:
    """Have the stacks of all threads written at `SIGNAL`; returns the descriptor to which. The process keeps it to its end."""
    if signal.getsignal(SIGNAL) is not signal.SIG_DFL:
        return -1
    file = os.memfd_create(NAME)
    fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)  # so that the reader may empty it
    faulthandler.register(SIGNAL, file=file, all_threads=True)
    return file


def frames_of(frame: FrameType | None) -> Frames:
    """The calls that led to a frame."""
    frames: Frames = []
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
        frame = frame.f_back
    return frames


def trim(frames: Frames) -> Frames:
    """The same without the calls of this library and of asyncio that led to the user's code; all where there is none of that."""
    count = len(frames)
    while count and is_plumbing(frames[count - 1][0]):
        count -= 1
    return frames[: count or None]


def render(frames: Frames) -> str:
    """As text, trimmed."""
    return "\n".join(f'  File "{file}", line {line}, in {function}' for file, line, function in reversed(trim(frames)))


def is_plumbing(file: str) -> bool:
    """Whether a file is of this library or of asyncio."""
    return file.startswith((_LIBRARY, _ASYNCIO, "<string>")) or file.endswith(_THREADING)


def last_place(text: str) -> str:
    """``file.py:12`` of the innermost call of a rendered stack; empty if there is none."""
    found = _FRAME.findall(text)
    return f"{os.path.basename(found[-1][0])}:{found[-1][1]}" if found else ""


def read_dump(text: str, main: int) -> Frames:
    """The stack that matters in a dump of all threads: that of thread `main`, or, if that only waits for its turn, of one that does not.

    Which thread holds the lock a dump does not say.
    """
    pieces = _THREAD.split(text)
    threads = {
        int(ident, 16): [(file, int(line), function) for file, line, function in _FRAME.findall(body)]
        for ident, body in zip(pieces[1::2], pieces[2::2], strict=True)
    }
    own = threads.pop(main, [])
    if own and not is_plumbing(own[0][0]):
        return own
    return next((frames for frames in threads.values() if frames and not is_plumbing(frames[0][0])), own)


def find_endpoint(frames: Frames, roster: Sequence[tuple[str, str, Code]]) -> tuple[str, str]:
    """Actor and endpoint whose handler a stack is in, by a list of actors, endpoints and the code of these.

    Where several actors of one class fit, which of them it is stays open; where none does, the outermost of the user's calls is most likely
    the handler.
    """
    for file, line, function in reversed(frames):
        fitting = [entry for entry in roster if entry[2][::2] == (file, function) and entry[2][1] <= line]
        if fitting:
            first = max(code[1] for _, _, code in fitting)
            actors = [actor for actor, _, code in fitting if code[1] == first]
            endpoint = next(endpoint for _, endpoint, code in fitting if code[1] == first)
            return (actors[0] if len(actors) == 1 else ""), endpoint
    return "", next((function for file, _, function in reversed(frames) if not is_plumbing(file)), "")


def state_of(pid: int, thread: int = 0) -> str:
    """The state of a process's main thread, or another, by the kernel: ``"R"`` runs or could, ``"S"`` asleep, ``"T"`` halted…

    Empty if it is gone.
    """
    fields = stat_of(pid, thread or pid)
    return fields[0].decode() if fields else ""


async def dump_from_outside(pid: int, pulse: Pulse) -> str:
    """What `faulthandler` says of a process that has offered dumps; empty where it can't be had. The process must not be reaped yet."""
    if pulse.file < 0 or not _has_handler(pid):
        return ""
    path = f"/proc/{pid}/fd/{pulse.file}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{NAME}"):
            return ""
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        os.ftruncate(file, 0)
        if _libc.tgkill(pid, pid if state_of(pid) == "R" else pulse.watchdog, int(SIGNAL)):
            return ""
        size, waited = 0, 0.0
        mark = b"0x%016x" % pulse.main
        while waited < LONGEST_WAIT:
            await asyncio.sleep(_LOOK)
            waited += _LOOK
            before, size = size, os.fstat(file).st_size
            if size and size == before and mark in os.pread(file, size, 0):
                break
        return os.pread(file, size, 0).decode(errors="replace")
    finally:
        os.close(file)


def _has_handler(pid: int) -> bool:
    """Whether the process would handle the signal, and not end by it."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (SIGNAL - 1) & 1)
    return False
