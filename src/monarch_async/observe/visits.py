"""A runtime that visits a job.

Theory: the job's file names its agent and has its key (`_runtime.jobfile`). A visitor is a runtime of its own, that dials the job's
processes like any other of them, and says in its handshakes that it visits (`_runtime.visiting`). On the client's host it goes over the
agent's unix socket; with a copy of the file on another host, over TCP, where the job listens.
"""

from __future__ import annotations

import getpass
import os
from typing import Any

from monarch_async._runtime.config import Network
from monarch_async._runtime.connect import join_network
from monarch_async._runtime.context import Message
from monarch_async._runtime.current import find_runtime, install, uninstall
from monarch_async._runtime.jobfile import JobFile
from monarch_async._runtime.runtime import Runtime
from monarch_async._runtime.service import base_service
from monarch_async._runtime.visiting import READ, VISITOR, WRITE
from monarch_async.ids import ProcAddress, new_uid
from monarch_async.observe.errors import JobError
from monarch_async.options import Options

__all__ = ["LEASE", "leave", "visiting_runtime"]

LEASE = 2.0
"""Seconds for which a visitor tries to reach a process."""


def visiting_runtime(file: JobFile, *, write: bool) -> Runtime:
    """A runtime in the running loop that visits a job. Raises `JobError` for one that can't be reached from here."""
    agent = ProcAddress(**file.agent)
    local = file.is_here and os.path.exists(agent.unix)
    if not local and (not agent.tcp or file.network is None):
        text = "its agent's socket is gone" if file.is_here else "it runs on another host, and listens on no network"
        raise JobError(f"the job {file.name!r} can't be reached: {text}")
    me = ProcAddress(new_uid(), agent.host if local else new_uid(), "", name="visitor")
    service, table = base_service()
    runtime = Runtime(me, bytes.fromhex(file.key), Options(lease=LEASE), {**table, "proc_exited": _nothing, "warn": _nothing})
    service.bind(runtime)
    runtime.me = me._replace(unix=agent.unix if local else "")  # not before: it has no inbox for descriptors there
    runtime.agent, runtime.client = agent, ProcAddress(**file.client)
    runtime.hello = {VISITOR: f"{WRITE if write else READ}:{_who()}"}
    if file.network is not None:
        join_network(runtime, Network.from_map({**file.network, "key": bytes.fromhex(file.network["key"])}))
    if find_runtime() is None:  # else this is part of a job itself, and what it spawns belongs to that
        install(runtime)
    return runtime


async def leave(runtime: Runtime) -> None:
    """End a visit."""
    uninstall(runtime)
    await runtime.close("the visit is over")


def _who() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{os.uname().nodename} (pid {os.getpid()})"


def _nothing(message: Message, *args: Any) -> None:
    """What concerns only those who take part."""
