"""A job that runs, as whoever looks into it sees it: this program's own (`Job.here`), or another's (`attach`).

Targets are named as everywhere: ``trainer[3]`` is an actor, ``trainer`` all of that mesh, ``gpus[3]`` a process; ``client`` and ``agent``
are the program and the agent of its host; a number is a pid. A name that does not exist raises `UnknownName`, which suggests the nearest.

Rules:

* Whatever is asked ends within `patience` seconds for each process that does not answer; what that can't say itself its agent does.
* What changes something (`stop`, `kill`, `restart`, `freeze`, `thaw`, `eval`) needs a job that was attached with ``write=True``; the job
  refuses it else with `ReadOnlyError`, and logs it if not.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from monarch_async._runtime.jobfile import JobFile, default_name
from monarch_async._runtime.runtime import Runtime
from monarch_async.ids import ProcAddress
from monarch_async.observe.actions import Actions
from monarch_async.observe.actors import actor_rows, find_actors, find_procs, look, proc_rows, rates
from monarch_async.observe.bundle import write_bundle
from monarch_async.observe.debugging import Breakpoints
from monarch_async.observe.errors import JobError
from monarch_async.observe.flame import flame_graph
from monarch_async.observe.listing import find_job
from monarch_async.observe.logs import log_lines
from monarch_async.observe.names import Target, parse, unknown
from monarch_async.observe.records import (
    ActorRow,
    CallRow,
    Cause,
    DeadLetterRow,
    Event,
    Hop,
    LinkRow,
    LogLine,
    ProcRow,
    Profile,
    StackRow,
    StateRow,
    TopRow,
    Traced,
    TreeRow,
)
from monarch_async.observe.stacks import stack_rows
from monarch_async.observe.stories import all_events, causes
from monarch_async.observe.survey import NoAnswer, Proc, Survey, label
from monarch_async.observe.timeline import Recordings
from monarch_async.observe.tree import tree_rows
from monarch_async.observe.visits import LEASE, leave, visiting_runtime
from monarch_async.observe.waits import call_rows, hops
from monarch_async.shape import Shape

__all__ = ["Job", "attach", "enter"]

_AMBIENT, _MESH = "monarch_async.ambient", "monarch_async.mesh"
"""What a program has loaded already, and a command that looks into one does without: it takes half of the time until that answers."""
LIMITS = (100_000, 1 << 30)
"""Bounds on what is under way to the actors of a reference, in messages and bytes."""


class Job(Actions, Breakpoints, Recordings):
    """See the module's text. Use it in the event loop in which it was made."""

    def __init__(
        self,
        runtime: Runtime,
        name: str,
        agents: Sequence[ProcAddress] = (),
        patience: float = 1.0,
        on_close: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        super().__init__(Survey(runtime, agents, patience))
        self.name = name
        self.id = runtime.agent.uid
        self._on_close = on_close

    @classmethod
    def here(cls, patience: float = 1.0) -> Job:
        """The job that this code belongs to. Nothing has to be closed."""
        runtime: Runtime = import_module(_AMBIENT).current_runtime()
        return cls(runtime, runtime.options.job_name or default_name(), patience=patience)

    @property
    def runtime(self) -> Runtime:
        """That by which it is asked: of this process."""
        return self._survey.runtime

    async def close(self) -> None:
        """Leave a job that was attached to."""
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            await on_close()

    async def ps(self, *targets: Target) -> list[ActorRow]:
        """The actors: all, or those of these targets."""
        found = await (find_actors(self._survey, *targets) if targets else actor_rows(self._survey))
        return sorted(found.rows, key=lambda row: (parse(row.actor)[0], row.rank))

    async def procs(self) -> list[ProcRow]:
        """The processes."""
        return proc_rows(await self._survey.procs())

    async def tree(self) -> list[TreeRow]:
        """Who owns what, from the program down, with policies and budgets."""
        return await tree_rows(self._survey)

    async def top(self, interval: float = 1.0) -> list[TopRow]:
        """Rates over `interval` seconds."""
        loop = asyncio.get_running_loop()
        before, began = await look(self._survey), loop.time()
        await asyncio.sleep(interval)
        now = await look(self._survey)
        return rates(before, now, loop.time() - began)

    async def tops(self, interval: float = 1.0) -> AsyncIterator[list[TopRow]]:
        """The same again and again."""
        loop = asyncio.get_running_loop()
        before, began = await look(self._survey), loop.time()
        while True:
            await asyncio.sleep(interval)
            now, ended = await look(self._survey), loop.time()
            yield rates(before, now, ended - began)
            before, began = now, ended

    async def calls(self, older: float = 0.0) -> list[CallRow]:
        """The calls that wait for an answer for at least `older` seconds, the oldest first."""
        return await call_rows(self._survey, older)

    async def where(self, actor: Target) -> list[Hop]:
        """Where the handlers of an actor stand, and on through whom they wait for, in whatever process."""
        return await hops(self._survey, actor)

    async def stack(self, target: Target, *, native: bool = False) -> list[StackRow]:
        """The stack of a process, also of one that is stuck, frozen, or keeps the interpreter's lock.

        With `native` with the frames of C code, by ``py-spy``; raises `UsageError` where that is missing.
        """
        return await stack_rows(self._survey, await find_procs(self._survey, target), native=native)

    async def links(self) -> list[LinkRow]:
        """The links of every process."""
        procs = {proc.uid: proc for proc in await self._survey.procs()}
        rows = []
        for uid, entries in (await self._survey.everywhere(procs.values(), "links", agents=True)).items():
            for peer, connected, connections, *rest in entries:
                kind = "unix" if peer.host == procs[uid].address.host else "tcp"
                rows.append(LinkRow(procs[uid].name, label(peer), kind, connected, max(0, connections - 1), *rest))
        return sorted(rows, key=lambda row: (row.process, row.peer))

    async def deadletters(self) -> list[DeadLetterRow]:
        """Messages that nobody got, the oldest first."""
        procs = {proc.uid: proc for proc in await self._survey.procs()}
        answers = await self._survey.everywhere(procs.values(), "letters")
        rows = [DeadLetterRow(procs[uid].name, *letter) for uid, letters in answers.items() for letter in letters]
        return sorted(rows, key=lambda row: row.when)

    async def why(self, actor: Target) -> list[Cause]:
        """What led to the last end of an actor or process, the end itself first; nothing for one that has not ended."""
        return await causes(self._survey, actor)

    async def events(self) -> list[Event]:
        """What has happened, the oldest first, as far as it is remembered."""
        return await all_events(self._survey)

    def logs(self, target: Target | None = None, *, follow: bool = False, grep: str = "") -> AsyncGenerator[LogLine, None]:
        """The output of processes, as far as it is kept; with `follow` also what comes, until the job has ended.

        `grep` is a regular expression: only lines in which it is found. Raises `UsageError` for what is none.
        """
        return log_lines(self._survey, target, follow=follow, grep=grep)

    async def state(self, actor: Target) -> list[StateRow]:
        """The attributes of actors. Raises `NoAnswer` where none of their processes answers."""
        found = await find_actors(self._survey, actor)
        rows = []
        for proc, names in found.by_proc():
            for name, attributes, omitted in await self._survey.inspect_proc(proc, "state", names):
                rows.append(StateRow(name, proc.name, tuple(tuple(attribute) for attribute in attributes), omitted))
        return rows

    async def trace(self, actor: Target, max: int = 10) -> AsyncIterator[Traced]:
        """The next `max` messages of an actor, as it handles them."""
        found = await find_actors(self._survey, actor)
        traces: dict[Proc, tuple[list[Any], list[int]]] = {proc: (names, []) for proc, names in found.by_proc()}
        count = 0
        try:
            while count < max:
                for proc, (names, numbers) in traces.items():
                    begun, seen = await self._survey.inspect_proc(proc, "trace", names, numbers, limit=self._survey.patience + 1.0)
                    traces[proc] = names, begun
                    for entry in seen:
                        if count < max:
                            count += 1
                            yield Traced(*entry)
        finally:
            for proc, (names, numbers) in traces.items():
                if numbers:
                    try:
                        await self._survey.inspect(proc.address, "trace", names, numbers, True)
                    except NoAnswer:
                        continue  # it takes the trace off by itself

    async def profile(self, target: Target, seconds: float = 5.0) -> Profile:
        """Where a process spends its time, in up to ten minutes. Raises `UsageError` for more, and for a process that is frozen."""
        proc = (await find_procs(self._survey, target))[0]
        limit = 15.0 + (seconds if 0 < seconds < math.inf else 0.0)
        pid, samples, tool, folded, svg = await self._survey.inspect(proc.agent, "profile", proc.uid, seconds, limit=limit)
        return Profile(proc.name, pid, seconds, samples, tool, folded, svg or flame_graph(folded, f"{proc.name} (pid {pid})"))

    async def bundle(self, path: str | Path) -> Path:
        """All of this in one ``.tar.gz`` for a report, without keys and values of environment variables."""
        return await write_bundle(self, Path(path))

    async def reference(self, actor: str) -> Any:
        """A mesh of actors by its name, to be called like the one that `spawn` returned. Raises `UnknownName`."""
        procs = await self._survey.procs()
        answers = await self._survey.everywhere(procs, "reference", actor)
        found = next((answer for answer in answers.values() if answer is not None), None)
        if found is None:
            raise unknown(actor, "mesh of actors", [row.actor for row in (await actor_rows(self._survey)).rows])
        key, class_name, endpoints, addresses, extent = found
        return import_module(_MESH).ActorMesh(
            self.runtime, key, actor, class_name, endpoints, addresses, extent, Shape(extent), None, LIMITS
        )


@contextlib.asynccontextmanager
async def attach(job: str = "", *, write: bool = False, patience: float = 1.0) -> AsyncIterator[Job]:
    """Visit a job of this user; it is left at the end of the ``async with``.

    Args:
        job: its name, the beginning of its id, the pid of its client, or its file; ``""`` where only one runs.
        write: whether to be allowed to change something: the job refuses it else.
        patience: seconds in which each of its processes is to answer.

    Raises `JobError` when it can't be reached, and why.
    """
    visited = await enter(find_job(job), write=write, patience=patience)
    try:
        yield visited
    finally:
        await visited.close()


async def enter(file: JobFile, *, write: bool = False, patience: float = 1.0) -> Job:
    """The same for a file that was found already; to be left by `Job.close`."""
    runtime = visiting_runtime(file, write=write)
    job = Job(runtime, file.name, [ProcAddress(**agent) for agent in file.agents], patience, lambda: leave(runtime))
    try:
        await job._survey.inspect(runtime.agent, "self", limit=max(patience, LEASE) + 1.0)
    except NoAnswer as error:
        await job.close()
        raise JobError(f"the job {file.name!r} can't be attached to: {error}") from None
    except BaseException:
        await job.close()
        raise
    return job
