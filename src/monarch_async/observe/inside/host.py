"""What the agent of a host knows of the processes there, and can do to them, whatever they are doing themselves.

Rules: a stack is taken in whatever state a process is in. One that runs answers a signal (see `_runtime.stacks`); one that is halted can't,
so it is let go on for as long as that takes, some 10 ms, and halted again, unless ``py-spy`` is there, which reads it as it lies.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monarch_async._runtime.pulse import STACK
from monarch_async._runtime.runtime import Runtime
from monarch_async._runtime.stacks import Frames, dump_from_outside, is_plumbing, read_dump, render, state_of, trim
from monarch_async.errors import UsageError
from monarch_async.health import Health, ProcState
from monarch_async.ids import ProcAddress

if TYPE_CHECKING:  # where there is no agent, what it needs is not loaded either
    from monarch_async._runtime.agent import Agent, Proc

__all__ = ["freeze", "kill", "output", "outputs", "procs", "profile", "restart", "roster", "stack", "thaw"]

PY_SPY = "py-spy"
LONGEST = 10.0
"""Seconds that `py-spy` may take for one stack."""
ASLEEP = 0.3
"""Seconds after which a watchdog that was halted in its sleep wakes as soon as it goes on."""
LOOKS = 25
"""How many times, 2 ms apart, it is looked whether a process that was halted has told where it stands."""
SAME = 0.1
"""Seconds by which two times may differ that are the same."""
HALTED_AGAIN = 0.05
"""Seconds after which the zygote has told that a process was halted again."""
SAMPLES = 100
"""Stacks a second, at most."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")

Usage = tuple[int, float, int]
"""Resident memory in bytes, processor time in seconds, threads."""


def _agent(runtime: Runtime) -> Agent:
    agent = runtime.parts.get("agent")
    if agent is None:
        raise UsageError(f"{runtime.me} is no agent")
    found: Agent = agent
    return found


def _py_spy() -> str:
    """Where it is; empty if it is not installed."""
    paths = (os.path.join(folder, PY_SPY) for folder in os.get_exec_path())
    return next((path for path in paths if os.access(path, os.X_OK)), "")


def usage(pid: int) -> Usage | None:
    """What the kernel says of a process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    return int(fields[21]) * _PAGE, (int(fields[11]) + int(fields[12])) / _TICKS, int(fields[17])


def procs(runtime: Runtime, others: Sequence[str] = ()) -> tuple[str, list[tuple[Any, ...]]]:
    """The name of this host; address, kind, pid, health and usage of each process here, and of `others`, which may be gone, by uid."""
    agent = _agent(runtime)
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


def outputs(runtime: Runtime) -> list[ProcAddress]:
    """The processes whose output is kept, also of some that are gone."""
    return [me for me, _ in _agent(runtime).printed.values()]


def roster(runtime: Runtime, uid: str) -> list[str]:
    """The actors of a process, as that has listed them: not all, where there are many."""
    return _agent(runtime).health.actors_of(uid)


def output(runtime: Runtime, uid: str, total: int = 0) -> tuple[str, int]:
    """What a process has printed after its first `total` bytes, and how many there are."""
    printed = _agent(runtime).printed
    return printed[uid][1](total) if uid in printed else ("", total)


def _running(agent: Agent, uid: str, name: str) -> Proc:
    proc = agent.procs.get(uid)
    if proc is None:
        raise UsageError(f"{name or uid} does not run: {agent.health.glance(uid)}")
    return proc


async def stack(runtime: Runtime, uid: str, native: bool = False, force: bool = False) -> tuple[Health, str, str]:
    """The health of a process, its stack, and who has told it. Without `force`, one whose loop comes round is left to tell it itself."""
    agent = _agent(runtime)
    (health,) = await agent.health.tell(None, [uid])
    proc = agent.procs.get(uid)
    if proc is None:
        return health, "", ""
    pid = proc.child.pid
    if native or (health.state is ProcState.FROZEN and _py_spy()):
        return health, await _spy("dump", "--pid", str(pid), *(["--native"] if native else [])), PY_SPY
    if health.state is ProcState.FROZEN:
        halted: dict[str, tuple[float, str]] = runtime.parts.setdefault("halted", {})
        began = time.monotonic() - health.since
        known, text = halted.get(uid, (0.0, ""))
        if not text or abs(began - known) > SAME:  # else it stands where it did
            text = await _stack_of_halted(agent, uid, proc, health.since)
            for other in halted.keys() - agent.procs.keys():
                del halted[other]
            halted[uid] = began, text
        return health, text, "signal"
    if health.stack:
        return health, health.stack, "signal" if "interpreter's lock" in health.why else "watchdog"
    if force or health.state is ProcState.STUCK:
        return health, render(await _frames(agent, uid, pid)), "signal"
    return health, "", ""


async def _frames(agent: Agent, uid: str, pid: int) -> Frames:
    slot = agent.health.slot_of(uid)
    if slot is None:
        return []
    pulse = slot.read()
    return read_dump(await dump_from_outside(pid, pulse), pulse.main)


async def _stack_of_halted(agent: Agent, uid: str, proc: Proc, since: float) -> str:
    """Where a process was halted: in a call; or, if its loop only waited, where its handlers stand, as its watchdog tells when it wakes."""
    child, slot = proc.child, agent.health.slot_of(uid)
    if slot is None:
        return ""
    await asyncio.sleep(ASLEEP - since)
    with agent.health.as_if_frozen(uid):
        slot.ask(True)
        dump = asyncio.ensure_future(_frames(agent, uid, child.pid))
        await asyncio.sleep(0)  # the signal waits for it before it goes on
        start = time.monotonic()
        child.signal(signal.SIGCONT)
        try:
            frames = await dump
            if frames and not is_plumbing(frames[0][0]):
                return render(frames)
            for _ in range(LOOKS):
                if slot.read().stacked >= start:
                    return slot.read_text(STACK).decode(errors="replace")
                await asyncio.sleep(0.002)
            return ""
        finally:
            child.signal(signal.SIGSTOP)
            slot.ask(False)
            await asyncio.sleep(HALTED_AGAIN)


async def _spy(*words: str, limit: float = LONGEST) -> str:
    """What `py-spy` says. Raises `UsageError` where it is missing or fails, with what to do."""
    if not _py_spy():
        raise UsageError("py-spy is not installed on that host: pip install py-spy")
    process = await asyncio.create_subprocess_exec(PY_SPY, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(limit):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise UsageError(f"py-spy did not answer within {limit:g} s") from None
    if process.returncode:
        raise UsageError(f"py-spy: {err.decode(errors='replace').strip()[-500:]}")
    return out.decode(errors="replace")


async def profile(runtime: Runtime, uid: str, seconds: float) -> tuple[int, int, str, str, str]:
    """Pid, samples, tool, collapsed stacks, and a flame graph where the tool draws one."""
    agent = _agent(runtime)
    proc = _running(agent, uid, "")
    pid = proc.child.pid
    if proc.child.halted:
        raise UsageError(f"process {pid} is frozen, so that it spends no time anywhere: thaw it")
    if _py_spy():
        path = Path(os.path.dirname(runtime.me.unix)) / f"profile-{pid}-{time.monotonic_ns()}.svg"
        try:
            await _spy("record", "--pid", str(pid), "--duration", str(max(1, round(seconds))), "-o", str(path), limit=seconds + LONGEST)
            return pid, 0, PY_SPY, "", path.read_text(encoding="utf-8", errors="replace")
        finally:
            path.unlink(missing_ok=True)
    counted: Counter[str] = Counter()
    end = time.monotonic() + seconds
    while time.monotonic() < end and not proc.ended.done():
        due = time.monotonic() + 1 / SAMPLES
        frames = await _frames(agent, uid, pid)
        names = [f"{function} ({os.path.basename(file)}:{line})" for file, line, function in reversed(trim(frames))]
        counted[";".join(names) or "(no answer)"] += 1
        await asyncio.sleep(max(0.0, due - time.monotonic()))
    folded = "\n".join(f"{names} {count}" for names, count in counted.most_common())
    return pid, counted.total(), "signals", folded, ""


def kill(runtime: Runtime, who: str, subject: str, uid: str) -> str:
    """SIGKILL a process, which its policy may start again."""
    agent = _agent(runtime)
    pid = _running(agent, uid, subject).child.pid
    agent.health.kill(uid, f"by {who}")
    return f"pid {pid} was killed"


def restart(runtime: Runtime, who: str, subject: str, uid: str) -> str:
    """The same for one that is started again. Raises `UsageError` for one that would not be."""
    agent = _agent(runtime)
    proc = _running(agent, uid, subject)
    if not proc.returns:
        raise UsageError(f"{subject} has no restart policy, so nothing would start it again: use kill, or spawn it with restart=Restart()")
    agent.health.kill(uid, f"to be started again, by {who}")
    return f"pid {proc.child.pid} was killed, to be started again"


def freeze(runtime: Runtime, who: str, subject: str, uid: str) -> str:
    """SIGSTOP a process."""
    child = _running(_agent(runtime), uid, subject).child
    child.signal(signal.SIGSTOP)
    return f"pid {child.pid} was frozen"


def thaw(runtime: Runtime, who: str, subject: str, uid: str) -> str:
    """SIGCONT a process."""
    child = _running(_agent(runtime), uid, subject).child
    child.signal(signal.SIGCONT)
    return f"pid {child.pid} was thawed"
