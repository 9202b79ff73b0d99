"""What a whole job does for some seconds, as a timeline: recorded in all its processes, fetched while it goes on, put together here.

Clocks: those of processes on this host are one, CLOCK_MONOTONIC. What another host's is ahead of it is measured: its agent is asked for the
time some times, and the answer that took the shortest counts, as if it had been given half way. The calls that were seen on both sides make
that better, since none begins before it was made.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from monarch_async.ids import ProcAddress
from monarch_async.observe.inside.recording import CALL, HANDLER, Event, Page
from monarch_async.observe.records import Recorded
from monarch_async.observe.survey import NoAnswer, Proc, Survey
from monarch_async.observe.trace_events import Recording, Silence, trace_events

__all__ = ["Recordings", "record"]

FETCH = 0.5
"""Seconds between two rounds of fetching what was recorded, and looking which processes there are."""
MOST = 1_000_000
"""Events that are kept of a job; what comes after them is dropped, and counted."""
ASKED = 9
"""How often a host is asked for its time."""


class Recordings:
    """Base of `Job`."""

    _survey: Survey

    async def timeline(self, file: str | Path, seconds: float = 5.0) -> Recorded:
        """Record what all processes do for some seconds, into a file that ui.perfetto.dev opens. Raises `OSError`."""
        path = Path(file)
        recordings, begin, end = await record(self._survey, seconds)
        flows = await asyncio.to_thread(_write, path, recordings, begin, end)
        silent = sum(recording.silence is not None for recording in recordings)
        events = sum(len(recording.events) for recording in recordings)
        dropped = sum(recording.dropped for recording in recordings)
        return Recorded(str(path), round(end - begin, 3), len(recordings) - silent, events, flows, dropped, silent)


class _Followed:
    """A process that is recorded."""

    def __init__(self, proc: Proc, number: int) -> None:
        self.proc = proc
        self.number = number
        self.events: list[Event] = []
        self.host = proc.address.host
        self.dropped = 0  # here, for lack of room
        self.dropped_there = 0


class _Session(NamedTuple):
    survey: Survey
    followed: dict[str, _Followed]
    silent: dict[str, tuple[Proc, float]]  # and when that was found


async def record(survey: Survey, seconds: float) -> tuple[list[Recording], float, float]:
    """What happened in each process; and from when to when, by this process's clock."""
    session = _Session(survey, {}, {})
    begin = time.monotonic()
    try:
        await _follow(session)
        ahead = await _clocks(session)
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            await asyncio.sleep(min(FETCH, left))
            await asyncio.gather(*(_fetch(session, one) for one in list(session.followed.values())))
            await _follow(session)  # some are new, or answer again
        end = time.monotonic()
    finally:
        ends = [_fetch(session, one, end=True) for one in session.followed.values()]
        await asyncio.gather(*ends)
    ahead = _corrected(ahead, list(session.followed.values()), survey.runtime.me.host)
    found = [
        Recording(
            one.proc.uid, one.proc.name, one.proc.host, one.proc.pid, one.events, ahead.get(one.host, 0.0), one.dropped + one.dropped_there
        )
        for one in session.followed.values()
    ]
    for uid, (proc, when) in session.silent.items():
        if uid not in session.followed:
            state = str(proc.health.state) if not proc.answers else "unreachable"
            silence = Silence(state, proc.health.place, when - proc.health.since)
            found.append(Recording(uid, proc.name, proc.host, proc.pid, (), 0.0, 0, silence))
    return sorted(found, key=_place), begin, end


def _place(recording: Recording) -> tuple[Any, ...]:
    """The program first, agents last, ranks in order."""
    name, _, rank = recording.name.rstrip("]").partition("[")
    return (name != "client", name.startswith("agent"), name, int(rank) if rank.isdigit() else 0)


async def _follow(session: _Session) -> None:
    """Begin to record those processes that are not yet."""
    procs = [proc for proc in await session.survey.procs() if proc.uid not in session.followed and proc.kind in ("client", "proc", "agent")]
    pages: dict[str, Page] = await session.survey.everywhere(procs, "record", agents=True)
    now = time.monotonic()
    for proc in procs:
        page = pages.get(proc.uid)
        if page is not None:
            session.followed[proc.uid] = _Followed(proc, page.number)
            session.silent.pop(proc.uid, None)
        elif proc.pid:
            session.silent.setdefault(proc.uid, (proc, now))


async def _fetch(session: _Session, one: _Followed, *, end: bool = False) -> None:
    """What there is. One that does not answer is asked again the next time; what it keeps meanwhile is bounded."""
    while True:
        try:
            page: Page | None = await session.survey.inspect(one.proc.address, "record", one.number, end)
        except NoAnswer:
            return
        if page is None:  # it was not asked for too long
            return
        room = MOST - sum(len(other.events) for other in session.followed.values())
        fetched = [*page.events, *page.unfinished]
        one.events += fetched[: max(0, room)]
        one.dropped += max(0, len(fetched) - max(0, room))
        one.dropped_there = page.dropped
        if not page.more:
            return


async def _clocks(session: _Session) -> dict[str, float]:
    """By host, what its clock is ahead of this one's."""
    survey = session.survey
    here = survey.runtime.me.host
    agents = {one.host: one.proc.agent for one in session.followed.values() if one.host != here}
    aheads = await asyncio.gather(*(_ahead(survey, agent) for agent in agents.values()))
    return dict(zip(agents, aheads, strict=True))


async def _ahead(survey: Survey, agent: ProcAddress) -> float:
    best = float("inf"), 0.0
    for _ in range(ASKED):
        before = time.monotonic()
        try:
            there: float = await survey.inspect(agent, "clock")
        except NoAnswer:
            break
        after = time.monotonic()
        best = min(best, (after - before, there - (before + after) / 2))
    return best[1]


def _corrected(ahead: Mapping[str, float], followed: Sequence[_Followed], here: str) -> dict[str, float]:
    """The same, as far as calls between these hosts and this one allow it."""
    starts = {(event[5], event[6]): (one.host, event[1]) for one in followed for event in one.events if event[0] == HANDLER and event[6]}
    least, most = dict.fromkeys(ahead, float("-inf")), dict.fromkeys(ahead, float("inf"))
    for one in followed:
        for event in one.events:
            host, start = starts.get((one.proc.uid, event[3]), ("", 0.0)) if event[0] == CALL else ("", 0.0)
            if host in most and one.host == here:
                most[host] = min(most[host], start - event[1])
            elif host == here and one.host in least:
                least[one.host] = max(least[one.host], event[1] - start)
    return {host: min(max(value, least[host]), most[host]) for host, value in ahead.items()}


def _write(path: Path, recordings: Sequence[Recording], begin: float, end: float) -> int:
    """Write the file, whole or not at all; returns how many flows are in it."""
    trace = trace_events(recordings, begin, end)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with draft.open("w", encoding="utf-8") as file:
            json.dump(trace, file, separators=(",", ":"))
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return sum(event["ph"] == "s" for event in trace["traceEvents"])
