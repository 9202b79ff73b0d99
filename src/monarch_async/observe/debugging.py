"""Speaking with handlers that have stopped at ``breakpoint()``; docs/repl.md says what stops there and what goes on."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from monarch_async.ids import ProcAddress
from monarch_async.observe.actors import find_actors
from monarch_async.observe.names import Target, parse
from monarch_async.observe.survey import Survey

__all__ = ["Breakpoints", "Said", "Stopped"]

A_WHILE = 86_400.0
"""Seconds for which pdb may go on until it stops again."""


class Said(NamedTuple):
    """What pdb has to say to a command. `state` is ``waits`` for the next one, or ``over``; `prompt` is what pdb would ask with."""

    text: str
    state: str
    prompt: str


class Stopped(NamedTuple):
    """A handler in pdb: the actor (or the thread, where it is no actor's), its endpoint, where it stands.

    `waits` says whether it takes a command, or goes on between two of them. `text` is what pdb has printed last.
    """

    actor: str
    endpoint: str
    file: str
    line: int
    waits: bool
    text: str
    process: str
    mesh: str
    rank: int
    number: int
    address: ProcAddress


class Breakpoints:
    """Base of `Job`."""

    _survey: Survey

    async def stopped(self, *targets: Target) -> list[Stopped]:
        """The handlers that have stopped: all, or those of these actors (or threads, by name)."""
        survey = self._survey
        procs = {proc.uid: proc for proc in await survey.procs()}
        chosen = [parse(target) for target in targets]
        found = []
        for uid, stops in (await survey.everywhere(procs.values(), "stops")).items():
            proc = procs[uid]
            for number, mesh, rank, endpoint, thread, file, line, waits, text in stops:
                actor = f"{mesh}[{rank}]" if mesh else thread
                if not chosen or any(name in (mesh, thread) and wanted in (-1, rank) for name, wanted in chosen):
                    found.append(Stopped(actor, endpoint, file, line, waits, text, proc.name, mesh, rank, number, proc.address))
        return sorted(found, key=lambda one: (one.mesh, one.rank, one.number))

    async def pdb(self, handler: Stopped, line: str) -> Said:
        """Give pdb a line; done when it waits for the next one, or is over. Cancelled, it leaves the handler as it is.

        Raises `UsageError` when it does not wait for a line, or is over, and `NoAnswer` when its process has ended.
        """
        said = await self._survey.alter(handler.address, "pdb_command", handler.actor, line, handler.number, line, limit=A_WHILE)
        return Said(*said)

    async def stop_next(self, target: Target) -> list[str]:
        """Have actors stop at the first line of the next message that they handle; returns which. Raises `UnknownName`."""
        found = await find_actors(self._survey, target)
        mesh, rank = parse(target)
        answers = await asyncio.gather(
            *(self._survey.alter(proc.address, "stop_next", str(target), "", mesh, rank) for proc, _ in found.by_proc())
        )
        return sorted(name for names in answers for name in names)
