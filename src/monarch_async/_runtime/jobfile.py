"""Job files: how a process of this user finds the jobs that run on this host, and may join them.

Each client writes one when its agent serves: address, key, pid. It is in the user's state folder, in a directory that only the user can
enter, with mode 0600, and is removed at the job's end, by the client or by its agent, whichever ends last. What a machine that went down
has left is removed by who lists the jobs.

Rules: whoever can read a job's file can join that job, so a file that others could read is not believed. Only the standard library is
used here, so that listing jobs is quick.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Self

__all__ = ["RELEASE", "JobFile", "birth_of", "default_name", "job_files", "jobs_folder", "remove_job_file", "this_machine"]

RELEASE = "0.1.0"
"""The version of this package, as `pyproject.toml` says it: to ask what is installed takes longer than starting."""
FORMAT = 1
"""The version of what stands in the file."""
_LARGEST = 1 << 16


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

    def write(self) -> Self:
        """Write it, for the first time or anew; returns it with its path. Raises `OSError`."""
        folder = jobs_folder()
        os.makedirs(folder, mode=0o700, exist_ok=True)
        path = os.path.join(folder, f"{self.id}.json")
        fields = {name: value for name, value in self._asdict().items() if name != "path"}
        draft = f"{path}.{os.getpid()}"
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            json.dump({"format": FORMAT, **fields}, file)
        os.replace(draft, path)
        return self._replace(path=path)

    @classmethod
    def read(cls, path: str) -> Self:
        """Raises `OSError`; `ValueError` for what is none, or could have been read by others."""
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid not in (os.geteuid(), 0) or stat.S_IMODE(status.st_mode) & 0o077:
                raise ValueError(f"{path} can be read by others, so its key is worth nothing: chmod 600 it, if it is yours")
            data = file.read(_LARGEST)
        try:
            fields = json.loads(data)
            if fields.pop("format") != FORMAT:
                raise ValueError("it is of another version")
            return cls(**fields, path=path)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} is no job file: {error}") from error

    @property
    def is_here(self) -> bool:
        """Whether its client runs, or ran, on this machine; else nothing can be told from here."""
        return self.machine == this_machine()

    @property
    def runs(self) -> bool:
        """Whether its client is there, for one of this machine."""
        return birth_of(self.pid) == self.born


def jobs_folder() -> str:
    """Where this user's job files are."""
    state = os.environ.get("XDG_STATE_HOME", "")
    base = state if os.path.isabs(state) else os.path.expanduser("~/.local/state")
    return os.path.join(base, "monarch_async", "jobs")


def job_files() -> Iterator[JobFile]:
    """Those that can be read, the newest first."""
    found = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(jobs_folder()):
            if entry.name.endswith(".json"):
                with contextlib.suppress(OSError, ValueError):
                    found.append(JobFile.read(entry.path))
    yield from sorted(found, key=lambda file: -file.started)


def remove_job_file(id: str) -> None:
    """Remove the file of a job that has ended. Nothing happens if there is none."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(jobs_folder(), f"{id}.json"))


def birth_of(pid: int) -> int:
    """When a process was started, in the kernel's ticks since boot; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            line = file.read()
    except OSError:
        return 0
    fields = line[line.rindex(b")") + 2 :].split()
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


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
