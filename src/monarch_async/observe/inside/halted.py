"""The stack of a process that a signal has halted: it is let go on for a moment, so that it can tell, and halted again.

Rules:

* One moment at a time for each process, a task of its own, which ends as it should whoever gives up waiting for it. Who asks meanwhile, or
  later while the process stands there, gets what it has brought.
* Only a process that is still halted when the moment comes is let go on, since one that somebody else has let go on must not be halted.
* A ``thaw`` that comes within the moment holds: then it is not halted again. A SIGCONT from elsewhere can't be told from our own, and is
  lost if it comes in these some 10 ms.
"""

from __future__ import annotations

import asyncio
import signal
import time
from typing import TYPE_CHECKING

from monarch_async._runtime.pulse import STACK, Slot
from monarch_async._runtime.runtime import Runtime
from monarch_async._runtime.stacks import Frames, dump_from_outside, is_plumbing, read_dump, render, state_of

if TYPE_CHECKING:  # where there is no agent, what it needs is not loaded either
    from monarch_async._runtime.agent import Agent, Proc

__all__ = ["frames_from_outside", "send", "stack_of_halted"]

ASLEEP = 0.3
"""Seconds after which a watchdog that was halted in its sleep wakes as soon as it goes on."""
LOOKS = 25
"""How many times, 2 ms apart, it is looked whether a process that was halted has told where it stands, and whether it is halted again."""
SAME = 0.1
"""Seconds by which two times may differ that are the same."""


class _Halted:
    """What is known of one process."""

    __slots__ = ("began", "moment", "text", "wanted")

    def __init__(self) -> None:
        self.moment: asyncio.Task[None] | None = None
        self.wanted = True  # whether it shall be halted again at the end of the moment
        self.began = 0.0  # since when it was halted when the stack was taken
        self.text = ""


def _halted(runtime: Runtime) -> dict[str, _Halted]:
    found: dict[str, _Halted] = runtime.parts.setdefault("halted", {})
    return found


def send(runtime: Runtime, uid: str, proc: Proc, number: int) -> None:
    """Halt a process, or let it go on, for somebody: that holds after a moment in which it tells its stack too."""
    one = _halted(runtime).get(uid)
    if one is not None:
        one.wanted = number == signal.SIGSTOP
    proc.child.signal(number)


async def frames_from_outside(agent: Agent, uid: str, pid: int) -> Frames:
    """The calls of a process, which is asked for them by a signal."""
    slot = agent.health.slot_of(uid)
    if slot is None:
        return []
    pulse = slot.read()
    return read_dump(await dump_from_outside(pid, pulse), pulse.main)


async def stack_of_halted(runtime: Runtime, agent: Agent, uid: str, proc: Proc, since: float) -> str | None:
    """Where a process was halted, `since` seconds ago; `None` if it is not any more."""
    known = _halted(runtime)
    for other in known.keys() - agent.procs.keys():
        del known[other]
    one = known.setdefault(uid, _Halted())
    began = time.monotonic() - since
    if abs(began - one.began) > SAME:  # else it stands where it did
        if one.moment is None or one.moment.done():
            one.moment = runtime.tasks.start(_take(agent, uid, proc, one, began), name=f"taking the stack of {proc.request.me}")
        await asyncio.shield(one.moment)
    return one.text if abs(began - one.began) <= SAME else None


async def _take(agent: Agent, uid: str, proc: Proc, one: _Halted, began: float) -> None:
    await asyncio.sleep(max(0.0, began + ASLEEP - time.monotonic()))
    child, slot = proc.child, agent.health.slot_of(uid)
    if slot is None or child.exited.done() or not child.halted or state_of(child.pid) != "T":
        return
    one.wanted = True
    with agent.health.as_if_frozen(uid):
        one.text = await _moment(agent, uid, proc, one, slot)
        one.began = began


async def _moment(agent: Agent, uid: str, proc: Proc, one: _Halted, slot: Slot) -> str:
    """In a call, or, if its loop only waited, where its handlers stand, as its watchdog tells when it wakes."""
    child = proc.child
    slot.ask(True)
    dump = asyncio.ensure_future(frames_from_outside(agent, uid, child.pid))
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
        slot.ask(False)
        if one.wanted:
            child.signal(signal.SIGSTOP)
            for _ in range(LOOKS):
                if child.exited.done() or state_of(child.pid) == "T":
                    break
                await asyncio.sleep(0.002)
