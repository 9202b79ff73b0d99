"""Starting an agent: a fresh interpreter that runs `bootstrap`. Apart from it, so that whoever starts one need not import what it does."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys

from monarch_async._runtime.config import AgentConfig
from monarch_async.ids import new_uid

__all__ = ["READY", "make_directory", "remove_directory", "start_agent"]

READY = b"r"
"""What an agent says over its control socket when it serves."""
_BOOT = "import sys; sys.path.insert(0, sys.argv[2]); from monarch_async._runtime.bootstrap import main; main(int(sys.argv[1]))"
_LONGEST_BASE = 56  # the path of a unix socket has at most 107 bytes, and inboxes have long names
_PACKAGE_PARENT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def make_directory() -> str:
    """A new private directory for an agent's files, where temporary files go, unless the path would be too long for a socket."""
    base = os.environ.get("TMPDIR", "")
    path = os.path.join(base if base and len(base) <= _LONGEST_BASE else "/tmp", f"monarch-async-{new_uid()}")
    os.mkdir(path, 0o700)
    return path


def remove_directory(path: str) -> None:
    """Remove such a directory and the files in it; nothing happens if it is gone."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for entry in os.scandir(path):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(entry.path)
        os.rmdir(path)


def start_agent(config: AgentConfig) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start an agent as a process of its own; returns it and the control socket to it, on which it says `READY` when it serves.

    Raises `OSError` when the system refuses.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(theirs.fileno()), _PACKAGE_PARENT],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        ours.send(config.pack())
    except BaseException:
        ours.close()
        raise
    ours.setblocking(False)
    return process, ours
