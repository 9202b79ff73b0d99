"""What can be done to a job by hand. The processes themselves refuse it to a visitor that only looks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from monarch_async.errors import UsageError
from monarch_async.observe.actors import ALIVE, find_actors, find_procs
from monarch_async.observe.names import Target, parse
from monarch_async.observe.records import Done, Evaluated
from monarch_async.observe.survey import NoAnswer, Proc, Survey

__all__ = ["Actions"]

ENDING = 20.0
"""Seconds that a mesh may take to stop."""


class Actions:
    """Base of `Job`."""

    def __init__(self, survey: Survey) -> None:
        self._survey = survey

    async def stop(self, target: Target, reason: str = "", kind: str = "") -> list[Done]:
        """Stop a mesh of actors or processes, or one actor of it, which its policy may start again. Returns when a mesh has ended.

        Raises `UsageError` for a name that actors and processes have, unless `kind` says which are meant (``actors``, ``processes``);
        `NoAnswer` where the process of an actor, or of the owner of a mesh, does not answer: then there is `kill`.
        """
        mesh, rank = parse(target)
        if rank < 0 and not str(target).isdigit():
            procs = await self._survey.procs()
            answers = await self._survey.everywhere(procs, "wards")
            owned = {proc: kinds for proc in procs if (kinds := _kinds(answers.get(proc.uid, ()), mesh, kind))}
            if len(kinds := set().union(*owned.values())) > 1:
                raise UsageError(f"{mesh} are {' and '.join(sorted(kinds))}: say which with --kind (kind=)")
            silent = [proc.name for proc in procs if proc.kind in ALIVE and proc.uid not in answers]
            if not owned and silent:
                await find_actors(self._survey, target)
                raise NoAnswer(f"no process that answers owns {mesh}; {_some(silent)}: kill may help")
            done = []
            for owner in owned:
                (what,) = kinds
                count = await self._survey.alter(owner.address, "stop_mesh", mesh, reason, mesh, what, reason, limit=ENDING)
                done.append(Done(mesh, f"{count} {what} of {owner.name} were stopped"))
            if owned:
                return done + ([Done(mesh, f"there may be more of that name: {_some(silent)}")] if silent else [])
        found = await find_actors(self._survey, target)
        done = []
        for proc, names in found.by_proc():
            answer = await self._survey.alter_proc(proc, "stop_member", str(target), reason, names, reason)
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
            rows += await self._survey.alter_proc(
                proc, "eval", str(actor), expression, expression, names, limit=self._survey.patience + 10.0
            )
        return [Evaluated(*row) for row in rows]

    async def _each(self, target: Target, name: str) -> list[Done]:
        return [await self._at_agent(proc, name, proc.name) for proc in await find_procs(self._survey, target)]

    async def _at_agent(self, proc: Proc, name: str, subject: str) -> Done:
        if proc.kind != "proc":
            raise UsageError(f"{proc.name} is no process that can be told to {name}: it is the {proc.kind} of this job")
        return Done(proc.name, await self._survey.alter(proc.agent, name, subject, "", proc.uid))


def _kinds(wards: Iterable[Mapping[str, Any]], mesh: str, kind: str) -> set[str]:
    """Whether meshes of this name, of this kind if there is one, are of actors, of processes, or there are both."""
    return {ward["kind"] for ward in wards if ward["name"] == mesh and kind in ("", ward["kind"])}


def _some(silent: Sequence[str]) -> str:
    more = f" and {len(silent) - 5} more" if len(silent) > 5 else ""
    return f"{', '.join(silent[:5])}{more} {'does' if len(silent) == 1 else 'do'} not answer"
