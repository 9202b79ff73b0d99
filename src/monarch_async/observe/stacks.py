"""The stacks of processes: their agents tell those that can't, the processes themselves the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from monarch_async.health import ProcState
from monarch_async.observe.records import StackRow
from monarch_async.observe.survey import NoAnswer, Proc, Survey

__all__ = ["stack_rows"]

PROMPT = 0.3
"""Seconds in which a process that is well tells its stack itself."""


async def stack_rows(survey: Survey, procs: Sequence[Proc], *, native: bool) -> list[StackRow]:
    """One of each process."""
    return list(await asyncio.gather(*(_stack(survey, proc, native=native) for proc in procs)))


async def _stack(survey: Survey, proc: Proc, *, native: bool) -> StackRow:
    health, text, source = proc.health, "", ""
    if proc.kind == "proc":
        limit = survey.patience + (10.0 if native else 1.0)
        health, text, source = await survey.inspect(proc.agent, "stack", proc.uid, native, False, limit=limit)
    if not source and health.state in (ProcState.READY, ProcState.BUSY):
        try:
            text, source = await survey.inspect(proc.address, "stack_here", limit=PROMPT), "itself"
        except NoAnswer as error:
            if proc.kind != "proc":
                why = f"{error}; py-spy dump --pid {proc.pid} on its host tells where it is"
                return StackRow(proc.name, proc.pid, str(health.state), "", "", "", "", why)
            health, text, source = await survey.inspect(proc.agent, "stack", proc.uid, native, True)
    return StackRow(proc.name, health.pid or proc.pid, str(health.state), health.actor, health.endpoint, source, text, health.why)
