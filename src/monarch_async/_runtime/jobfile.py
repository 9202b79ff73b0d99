"""Job files: how a process of this user finds the jobs that run on this host, and may join them.

Each client writes one when its agent serves: address, key, pid. It is in the user's state folder, in a directory that only the user can
enter, with mode 0600, and is removed at the job's end, by the client or by its agent, whichever ends last. What a machine that went down
has left is removed by who lists the jobs.

Here is what is in one, and where they are; `jobfiles` writes and reads them.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from monarch_async._runtime.linux import stat_of

__all__ = ["RELEASE", "JobFile", "birth_of", "default_name", "jobs_folder", "remove_job_file", "state_folder", "this_machine"]

RELEASE = "0.1.0"
"""The version of this package, as `pyproject.toml` says it: to ask what is installed takes longer than starting."""


class JobFile(NamedTuple):
    """What stands in one. `agent` and `client` are the addresses of processes, field by field; `network` is how hosts are reached.

    `born` is when the client's process was started, by the kernel's clock, which tells it from a later one with the same pid; `machine` is
    where that holds. `agents` are those of other hosts.
    """

    id: str
    name: str
    pid: int
    born: int
    machine: str
    started: float
    version: str
    protocol: int
    agent: Mapping[str, Any]
    client: Mapping[str, Any]
    key: str
    network: Mapping[str, Any] | None = None
    agents: tuple[Mapping[str, Any], ...] = ()
    path: str = ""

    @property
    def is_here(self) -> bool:
        """Whether its client runs, or ran, on this machine; else nothing can be told from here."""
        return self.machine == this_machine()

    @property
    def runs(self) -> bool:
        """Whether its client is there, for one of this machine."""
        return birth_of(self.pid) == self.born


def state_folder() -> str:
    """Where this user's files are that last longer than a program. Raises `OSError` for a user without a home."""
    state = os.environ.get("XDG_STATE_HOME", "")
    base = state if os.path.isabs(state) else os.path.expanduser("~/.local/state")
    if not os.path.isabs(base):
        raise FileNotFoundError("there is no home folder: set XDG_STATE_HOME")
    return os.path.join(base, "monarch_async")


def jobs_folder() -> str:
    """Where this user's job files are. Raises `OSError` for a user without a home."""
    return os.path.join(state_folder(), "jobs")


def remove_job_file(id: str) -> None:
    """Remove the file of a job that has ended. Nothing happens if there is none."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(jobs_folder(), f"{id}.json"))


def birth_of(pid: int) -> int:
    """When a process was started, in the kernel's ticks since boot; 0 if it is gone."""
    fields = stat_of(pid)
    return 0 if not fields or fields[0] in (b"Z", b"X") else int(fields[19])


def default_name() -> str:
    """What a job is called that nobody has named: after the program."""
    program = os.path.basename(sys.argv[0] if sys.argv else "")
    return program.removesuffix(".py").lstrip("-") or "python"


def this_machine() -> str:
    """This boot of this machine, and the pids that mean something here: a home folder may be shared by hosts and containers."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return os.uname().nodename
