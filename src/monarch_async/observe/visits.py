"""The jobs that there are, and a runtime that visits one.

Theory: the job's file names its agent and has its key (`_runtime.jobfile`). A visitor is a runtime of its own, that dials the job's
processes like any other of them, and says in its handshakes that it visits (`_runtime.visiting`). On the client's host it goes over the
agent's unix socket; with a copy of the file on another host, over TCP, where the job listens.
"""

from __future__ import annotations

import getpass
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from monarch_async._channel.tls import TLS
from monarch_async._core.handshake import PROTOCOL_VERSION
from monarch_async._runtime.config import Network
from monarch_async._runtime.connect import join_network
from monarch_async._runtime.context import Message
from monarch_async._runtime.current import install, uninstall
from monarch_async._runtime.jobfile import JobFile, job_files, jobs_folder, remove_job_file
from monarch_async._runtime.runtime import Runtime
from monarch_async._runtime.service import base_service
from monarch_async._runtime.visiting import READ, VISITOR, WRITE
from monarch_async.errors import UsageError
from monarch_async.ids import ProcAddress, new_uid
from monarch_async.observe.errors import JobError
from monarch_async.observe.records import JobInfo
from monarch_async.options import Options

__all__ = ["LEASE", "find_job", "jobs", "leave", "visiting_runtime"]

LEASE = 2.0
"""Seconds for which a visitor tries to reach a process."""


def jobs(*, clean: bool = True) -> list[JobInfo]:
    """The jobs of this user, the newest first. Files that jobs of this machine have left are removed unless told not to be."""
    found = []
    for file in job_files():
        state = "elsewhere" if not file.is_here else "running" if file.runs else "ended"
        if state == "ended" and clean:
            remove_job_file(file.id)
        agent = file.agent
        address = str(agent.get("tcp") or agent.get("unix", ""))
        found.append(JobInfo(file.name, file.id, file.pid, file.started, file.version, state, file.path, address))
    return found


def find_job(job: str = "") -> JobFile:
    """The file of a job: by its name, the beginning of its id, the pid of its client, or its path; ``""`` where only one runs.

    Raises `JobError` where it is none, none any more, or not clear which.
    """
    if os.sep in job or job.endswith(".json"):
        return _check(_read(Path(job)))
    files = list(job_files())
    alive = [file for file in files if file.runs or not file.is_here]
    named = [file for file in alive if job in (file.name, str(file.pid)) or (len(job) > 3 and file.id.startswith(job))] if job else alive
    if len(named) == 1:
        return _check(named[0])
    if named:
        several = ", ".join(f"{file.name} ({file.id}, pid {file.pid})" for file in named)
        raise JobError(f"several jobs fit: {several}; say which by its id")
    if any(job in (file.name, file.id, str(file.pid)) for file in files):
        raise JobError(f"the job {job!r} has ended")
    there = ", ".join(sorted({file.name for file in alive}))
    raise JobError(f"no job {job!r} runs; there are {there}" if job and there else f"no job runs here (looked in {jobs_folder()})")


def _read(path: Path) -> JobFile:
    try:
        return JobFile.read(path)
    except FileNotFoundError:
        raise JobError(f"there is no job file {path}: the job has ended") from None
    except (OSError, ValueError) as error:
        raise JobError(f"the job's file can't be used: {error}") from error


def _check(file: JobFile) -> JobFile:
    if file.is_here and not file.runs:
        raise JobError(f"the job {file.name!r} has ended, and left its file behind: its client (pid {file.pid}) is gone")
    if file.protocol != PROTOCOL_VERSION:
        ours = f"this is {PROTOCOL_VERSION}"
        raise JobError(
            f"the job {file.name!r} speaks version {file.protocol} of the protocol, {ours}: use the monarch-async of its program"
        )
    return file


def visiting_runtime(file: JobFile, *, write: bool) -> Runtime:
    """A runtime in the running loop that visits a job. Raises `JobError` for one that can't be reached from here."""
    agent = ProcAddress(**file.agent)
    local = file.is_here and os.path.exists(agent.unix)
    if not local and (not agent.tcp or file.network is None):
        text = "its agent's socket is gone" if file.is_here else "it runs on another host, and listens on no network"
        raise JobError(f"the job {file.name!r} can't be reached: {text}")
    uid = new_uid()
    me = ProcAddress(uid, agent.host if local else uid, "", name="visitor")
    service, table = base_service()
    runtime = Runtime(me, bytes.fromhex(file.key), Options(lease=LEASE), {**table, "proc_exited": _nothing, "warn": _nothing})
    service.bind(runtime)
    runtime.me = me._replace(unix=agent.unix if local else "")  # not before: it has no inbox for descriptors there
    runtime.agent, runtime.client = agent, ProcAddress(**file.client)
    runtime.hello = {VISITOR: f"{WRITE if write else READ}:{_who()}"}
    if file.network is not None:
        join_network(runtime, _network(file.network))
    install(runtime)
    return runtime


async def leave(runtime: Runtime) -> None:
    """End a visit."""
    uninstall(runtime)
    await runtime.close("the visit is over")


def _network(fields: Mapping[str, Any]) -> Network:
    try:
        return Network(bytes.fromhex(fields["key"]), TLS(**fields["tls"]) if fields["tls"] else None)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"the job's file says nothing usable of its network: {error}") from error


def _who() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{os.uname().nodename} (pid {os.getpid()})"


def _nothing(message: Message, *args: Any) -> None:
    """What concerns only those who take part."""
