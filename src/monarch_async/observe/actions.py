"""What can be done to a job by hand. The processes themselves refuse it to a visitor that only looks."""

from __future__ import annotations

from monarch_async.errors import UsageError
from monarch_async.observe.actors import find_actors, find_procs
from monarch_async.observe.names import Target, parse
from monarch_async.observe.records import Done, Evaluated
from monarch_async.observe.survey import Proc, Survey

__all__ = ["Actions"]

ENDING = 20.0
"""Seconds that a mesh may take to stop."""


class Actions:
    """Base of `Job`."""

    def __init__(self, survey: Survey) -> None:
        self._survey = survey

    async def stop(self, target: Target, reason: str = "") -> list[Done]:
        """Stop a mesh of actors or processes, or one actor of it, which its policy may start again. Returns when a mesh has ended.

        Raises `NoAnswer` where the process of an actor does not answer: then there is `kill`.
        """
        mesh, rank = parse(target)
        if rank < 0 and not str(target).isdigit():
            procs = await self._survey.procs()
            for uid, wards in (await self._survey.everywhere(procs, "wards")).items():
                if any(ward["name"] == mesh for ward in wards):
                    owner = next(proc for proc in procs if proc.uid == uid)
                    count = await self._survey.alter(owner.address, "stop_mesh", mesh, reason, mesh, reason, limit=ENDING)
                    return [Done(mesh, f"{count} members were stopped")]
        found = await find_actors(self._survey, target)
        done: list[Done] = []
        for proc, names in found.by_proc():
            answer = await self._survey.alter(proc.address, "stop_member", str(target), reason, names, reason)
            done += [Done(*entry) for entry in answer]
        return done

    async def kill(self, target: Target) -> list[Done]:
        """SIGKILL a process, or that of an actor."""
        return await self._each(target, "kill")

    async def restart(self, target: Target) -> list[Done]:
        """End the present life of an actor, or of a process, whose policy then starts the next.

        Raises `UsageError` for what has none. An actor in a process that does not answer is started again with its process.
        """
        procs = await find_procs(self._survey, target)
        if parse(target)[0] in {proc.address.name for proc in procs} or str(target).isdigit():
            return await self._each(target, "restart_proc")
        found = await find_actors(self._survey, target)
        done: list[Done] = []
        for proc, names in found.by_proc():
            if proc.answers:
                done += [Done(*entry) for entry in await self._survey.alter(proc.address, "restart", str(target), "", names)]
            else:
                done.append(await self._at_agent(proc, "restart_proc", str(target)))
        return done

    async def freeze(self, target: Target) -> list[Done]:
        """SIGSTOP."""
        return await self._each(target, "freeze")

    async def thaw(self, target: Target) -> list[Done]:
        """SIGCONT."""
        return await self._each(target, "thaw")

    async def eval(self, actor: Target, expression: str) -> list[Evaluated]:
        """The value of an expression in an actor, which is ``self`` there; awaited where it can be.

        Raises `UsageError` for what is none.
        """
        found = await find_actors(self._survey, actor)
        rows = []
        for proc, names in found.by_proc():
            rows += await self._survey.alter(
                proc.address, "eval", str(actor), expression, expression, names, limit=self._survey.patience + 10.0
            )
        return [Evaluated(*row) for row in rows]

    async def _each(self, target: Target, name: str) -> list[Done]:
        return [await self._at_agent(proc, name, proc.name) for proc in await find_procs(self._survey, target)]

    async def _at_agent(self, proc: Proc, name: str, subject: str) -> Done:
        if proc.kind != "proc":
            raise UsageError(f"{proc.name} is no process that can be told to {name}: it is the {proc.kind} of this job")
        return Done(proc.name, await self._survey.alter(proc.agent, name, subject, "", proc.uid))
