"""What the agent of a host knows of the processes there, and can do to them, whatever they are doing themselves.

Rules: a stack is taken in whatever state a process is in. One that runs answers a signal (see `_runtime.stacks`); for one that is halted
see `halted`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from monarch_async._runtime.linux import stat_of
from monarch_async._runtime.runtime import Runtime
from monarch_async._runtime.stacks import render, state_of
from monarch_async.errors import UsageError
from monarch_async.health import Health, ProcState
from monarch_async.observe.doctor import PY_SPY
from monarch_async.observe.inside.halted import frames_from_outside, send, stack_of_halted
from monarch_async.observe.inside.spying import native_stack, profile_of

if TYPE_CHECKING:  # where there is no agent, what it needs is not loaded either
    from monarch_async._runtime.agent import Agent, Proc

__all__ = ["agent_of", "freeze", "kill", "procs", "profile", "restart", "roster", "stack", "thaw"]

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")

Usage = tuple[int, float, int]
"""Resident memory in bytes, processor time in seconds, threads."""


def agent_of(runtime: Runtime) -> Agent:
    """The agent that this process is. Raises `UsageError` where it is none."""
    agent = runtime.parts.get("agent")
    if agent is None:
        raise UsageError(f"{runtime.me} is no agent")
    found: Agent = agent
    return found


def usage(pid: int) -> Usage | None:
    """What the kernel says of a process."""
    fields = stat_of(pid)
    return (int(fields[21]) * _PAGE, (int(fields[11]) + int(fields[12])) / _TICKS, int(fields[17])) if fields else None


def procs(runtime: Runtime, others: Sequence[str] = ()) -> tuple[str, list[tuple[Any, ...]]]:
    """The name of this host; address, kind, pid, health and usage of each process here, and of `others`, which may be gone, by uid."""
    agent = agent_of(runtime)
    me = Health(ProcState.READY, pid=os.getpid())
    rows: list[tuple[Any, ...]] = [(runtime.me, "agent", os.getpid(), me, usage(os.getpid()))]
    if runtime.client.host == runtime.me.host:
        pid = os.getppid()
        state = ProcState.FROZEN if state_of(pid) == "T" else ProcState.READY
        rows.append((runtime.client, "client", pid, Health(state, pid=pid), usage(pid)))
    here = {request.me.uid: request.me for request in agent.health.requests()}
    for uid in (*here, *(other for other in others if other not in here)):
        health = agent.health.glance(uid)
        address = here.get(uid) or runtime.me._replace(uid=uid, name="", rank=0)
        rows.append((address, "proc", health.pid, health, usage(health.pid) if health.pid and uid in here else None))
    return os.uname().nodename, rows


def roster(runtime: Runtime, uid: str) -> list[str]:
    """The actors of a process, as that has listed them: not all, where there are many."""
    return agent_of(runtime).health.actors_of(uid)


def _running(agent: Agent, uid: str, name: str) -> Proc:
    proc = agent.procs.get(uid)
    if proc is None:
        raise UsageError(f"{name or uid} does not run: {agent.health.glance(uid)}")
    return proc


async def stack(runtime: Runtime, uid: str, native: bool = False, force: bool = False) -> tuple[Health, str, str]:
    """The health of a process, its stack, and who has told it. Without `force`, one whose loop comes round is left to tell it itself."""
    agent = agent_of(runtime)
    (health,) = await agent.health.tell(None, [uid])
    proc = agent.procs.get(uid)
    if proc is None:
        return health, "", ""
    pid = proc.child.pid
    if native:
        return health, await native_stack(proc), PY_SPY
    if health.state is ProcState.FROZEN:
        text = await stack_of_halted(runtime, agent, uid, proc, health.since)
        if text is not None:
            return health, text, "signal"
        (health,) = await agent.health.tell(None, [uid])
    if health.stack:
        return health, health.stack, "signal" if "interpreter's lock" in health.why else "watchdog"
    if force or health.state is ProcState.STUCK:
        return health, render(await frames_from_outside(agent, uid, pid)), "signal"
    return health, "", ""


async def profile(runtime: Runtime, uid: str, seconds: float) -> tuple[int, int, str, str, str]:
    """Pid, samples, tool, collapsed stacks, and a flame graph where the tool draws one. Raises `UsageError`."""
    agent = agent_of(runtime)
    return await profile_of(runtime, agent, uid, _running(agent, uid, ""), seconds)


def kill(runtime: Runtime, who: str, subject: str, uid: str) -> str:
    """SIGKILL a process, which its policy may start again."""
    agent = agent_of(runtime)
    pid = _running(agent, uid, subject).child.pid
    agent.health.kill(uid, f"by {who}")
    return f"pid {pid} was killed"


def restart(runtime: Runtime, who: str, subject: str, uid: str) -> str:
    """The same for one that is started again. Raises `UsageError` for one that would not be."""
    agent = agent_of(runtime)
    proc = _running(agent, uid, subject)
    if not proc.returns:
        raise UsageError(f"{subject} has no restart policy, so nothing would start it again: use kill, or spawn it with restart=Restart()")
    agent.health.kill(uid, f"to be started again, by {who}")
    return f"pid {proc.child.pid} was killed, to be started again"


def freeze(runtime: Runtime, who: str, subject: str, uid: str) -> str:
    """SIGSTOP a process."""
    proc = _running(agent_of(runtime), uid, subject)
    send(runtime, uid, proc, signal.SIGSTOP)
    return f"pid {proc.child.pid} was frozen"


def thaw(runtime: Runtime, who: str, subject: str, uid: str) -> str:
    """SIGCONT a process."""
    proc = _running(agent_of(runtime), uid, subject)
    send(runtime, uid, proc, signal.SIGCONT)
    return f"pid {proc.child.pid} was thawed"
