"""The output of a job's processes, line by line: what is kept of it, and what comes.

Rules: who follows has one question at each agent, which is answered when something was printed; so nothing is asked while nobody prints. An
agent that is late is asked again; one that is gone has ended what it had to say, and when all have, there is no more to come.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator
from typing import Any

from monarch_async._core.lines import LineAssembler
from monarch_async.errors import ActorDied, UsageError
from monarch_async.ids import ProcAddress
from monarch_async.observe.actors import find_procs
from monarch_async.observe.inside.cells import Name
from monarch_async.observe.names import Target, parse
from monarch_async.observe.records import LogLine
from monarch_async.observe.survey import NoAnswer, Survey, label

__all__ = ["log_lines"]

GATHERED = 0.1
"""Seconds for which output is gathered at its agent before it is asked for again."""
LATE = 0.5
"""Seconds after which an agent that has not answered is asked again."""
WAIT = 20.0
"""Seconds for which an agent may keep a question; and between two looks for agents of other hosts that have joined."""
NONE_LEFT = None
"""In place of an answer: an agent is gone."""


async def log_lines(survey: Survey, target: Target | None, *, follow: bool, grep: str) -> AsyncGenerator[LogLine, None]:
    """Lines in which the pattern is found, of the processes of a target, or all. Raises `UsageError` for what is no pattern."""
    try:
        pattern = re.compile(grep)
    except re.error as error:
        raise UsageError(f"{grep!r} is no regular expression: {error}") from None
    names = None if target is None else await _names(survey, target)
    reader = _Reader(pattern)
    agents = [proc.address for proc in await survey.procs() if proc.kind == "agent"]
    if not follow:
        for agent in agents:
            while answer := await survey.inspect(agent, "output", names, reader.read, 0.0):
                for line in reader.take(answer):
                    yield line
        for line in reader.rest():
            yield line
        return
    answers: asyncio.Queue[Any] = asyncio.Queue(10)
    feeds = {agent.uid: asyncio.create_task(_feed(survey, agent, names, reader, answers), name="output of a host") for agent in agents}
    try:
        while not all(feed.done() for feed in feeds.values()) or not answers.empty():
            try:
                async with asyncio.timeout(WAIT):
                    answer = await answers.get()
            except TimeoutError:
                for agent in [proc.address for proc in await survey.procs() if proc.kind == "agent" and proc.address.uid not in feeds]:
                    feeds[agent.uid] = asyncio.create_task(_feed(survey, agent, names, reader, answers), name="output of a host")
                continue
            for line in reader.take(answer or []):
                yield line
        for line in reader.rest():
            yield line
    finally:
        for feed in feeds.values():
            feed.cancel()
        await asyncio.gather(*feeds.values(), return_exceptions=True)


async def _names(survey: Survey, target: Target) -> list[Name]:
    """Which processes, by name, since one that is started again has another uid; some that have printed may be gone for good."""
    mesh, rank = parse(target)
    for proc in await survey.procs():
        if proc.kind == "agent":
            with contextlib.suppress(NoAnswer):
                if await survey.inspect(proc.address, "output", [(mesh, rank)], {}, 0.0):
                    return [(mesh, rank)]
    found = [proc for proc in await find_procs(survey, target) if proc.kind == "proc"]
    if not found:
        raise UsageError(f"the output of {target} is where it was started: only that of processes is kept")
    return [(proc.address.name, proc.address.rank) for proc in found]


async def _feed(survey: Survey, agent: ProcAddress, names: list[Name] | None, reader: _Reader, answers: asyncio.Queue[Any]) -> None:
    while True:
        try:
            answer = await survey.inspect(agent, "output", names, reader.read, WAIT, limit=WAIT + survey.patience)
        except NoAnswer as error:
            if isinstance(error.__cause__, ActorDied):
                await answers.put(NONE_LEFT)
                return
            await asyncio.sleep(LATE)
            continue
        reader.read.update({me.uid: total for me, _, total in answer})
        if answer:
            await answers.put(answer)
            await asyncio.sleep(GATHERED)


class _Reader:
    """Makes lines of what comes."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self.read: dict[str, int] = {}  # bytes of each process, by uid
        self._pattern = pattern
        self._begun: dict[str, tuple[ProcAddress, LineAssembler]] = {}

    def take(self, answer: list[tuple[ProcAddress, bytes, int]]) -> list[LogLine]:
        lines = []
        for me, data, total in answer:
            self.read[me.uid] = max(total, self.read.get(me.uid, 0))
            _, assembler = self._begun.setdefault(me.uid, (me, LineAssembler()))
            lines += self._matching(me, assembler.feed(data, 0.0))
        return lines

    def rest(self) -> list[LogLine]:
        """The lines that were not ended."""
        return [line for me, assembler in self._begun.values() for line in self._matching(me, assembler.close())]

    def _matching(self, me: ProcAddress, lines: list[str]) -> list[LogLine]:
        return [LogLine(label(me), me.rank, line) for line in lines if self._pattern.search(line)]
