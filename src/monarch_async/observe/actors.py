"""The actors of a job, of whichever process: from itself where it answers, else from who owns them and from the agent."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from monarch_async.errors import UsageError
from monarch_async.observe.inside.cells import Name
from monarch_async.observe.names import Target, parse, unknown
from monarch_async.observe.records import ActorRow, ProcRow, TopRow
from monarch_async.observe.survey import NoAnswer, Proc, Survey

__all__ = ["ALIVE", "Found", "actor_rows", "find_actors", "find_procs", "proc_rows", "rates"]

ALIVE = ("client", "proc")
"""Kinds of processes that have actors, and own some."""


class Found:
    """Actors of some names: the rows, and for each the process that it is in."""

    def __init__(self, rows: list[ActorRow], procs: list[Proc], homes: list[Proc]) -> None:
        self.rows = rows
        self.procs = procs  # all of the job
        self.homes = homes  # of each row

    def by_proc(self) -> Iterator[tuple[Proc, list[Name]]]:
        """Each process with the names of those in it."""
        grouped: dict[str, tuple[Proc, list[Name]]] = {}
        for row, proc in zip(self.rows, self.homes, strict=True):
            grouped.setdefault(proc.uid, (proc, []))[1].append((parse(row.actor)[0], row.rank))
        yield from grouped.values()


async def actor_rows(survey: Survey, names: Sequence[Name] | None = None) -> Found:
    """The actors of these names, or all."""
    procs = await survey.procs()
    asked = list(names) if names is not None else None
    uids = [proc.uid for proc in procs]
    silent = [proc.uid for proc in procs if proc.kind in ALIVE and not proc.answers]
    well = [uid for uid in uids if uid not in silent]
    answers, told = await asyncio.gather(survey.everywhere(procs, "cells", asked), survey.everywhere(procs, "owned", silent, well))
    late = [proc.uid for proc in procs if proc.kind in ALIVE and proc.answers and proc.uid not in answers]
    if late:
        told = await survey.everywhere([proc for proc in procs if proc.uid in answers], "owned", [*silent, *late], uids)
    rows, homes = [], []
    for proc in procs:
        for entry in answers.get(proc.uid, ()):
            rows.append(_row(proc, entry))
            homes.append(proc)
    for proc, row in await _of_silent(survey, procs, {*silent, *late}, told):
        if names is None or any(parse(row.actor)[0] == mesh and rank in (-1, row.rank) for mesh, rank in names):
            rows.append(row)
            homes.append(proc)
    return Found(rows, procs, homes)


def _row(proc: Proc, entry: tuple[Any, ...]) -> ActorRow:
    _, mesh, class_name, rank, incarnation, state, since, endpoint, mailbox, in_flight, _, _ = entry
    rss = proc.usage[0] if proc.usage else None
    actor = f"{mesh}[{rank}]"
    return ActorRow(actor, class_name, rank, proc.name, proc.host, proc.pid, state, since, endpoint, mailbox, in_flight, incarnation, rss)


async def _of_silent(
    survey: Survey, procs: Sequence[Proc], silent: Collection[str], told: Mapping[str, Any]
) -> list[tuple[Proc, ActorRow]]:
    """What is in processes that don't answer, or are ending: as their owners have told it, and as they have listed it themselves before."""
    by_uid = {proc.uid: proc for proc in procs}
    members = [entry for entries in told.values() for entry in entries if entry[2]]
    gone = {uid: address for uid, address, *_ in members if uid not in by_uid}
    if gone:
        for proc in await survey.procs(list(gone)):
            if proc.uid in gone:
                by_uid[proc.uid] = proc._replace(address=gone[proc.uid])
    rows: dict[tuple[str, str], ActorRow] = {}
    for uid, _, _, mesh, class_name, rank, incarnation, _ in members:
        if uid in by_uid:
            rows[uid, f"{mesh}[{rank}]"] = _silent_row(by_uid[uid], mesh, class_name, rank, incarnation)
    for uid in silent:
        proc = by_uid[uid]
        if proc.kind == "proc" and proc.health.pid:
            try:
                listed: list[str] = await survey.inspect(proc.agent, "roster", proc.uid)
            except NoAnswer:
                continue
            for actor in listed:
                rows.setdefault((proc.uid, actor), _silent_row(proc, parse(actor)[0], "", max(0, parse(actor)[1]), 0))
    return [(by_uid[uid], row) for (uid, _), row in rows.items()]


def _silent_row(proc: Proc, mesh: str, class_name: str, rank: int, incarnation: int) -> ActorRow:
    health = proc.health
    actor = f"{mesh}[{rank}]"
    endpoint = health.endpoint if health.actor == actor else ""
    state = str(health.state) if not proc.answers else "unreachable"
    rss = proc.usage[0] if proc.usage else None
    in_flight = 1 if endpoint else None
    return ActorRow(
        actor, class_name, rank, proc.name, proc.host, proc.pid, state, health.since, endpoint, None, in_flight, incarnation, rss
    )


async def find_actors(survey: Survey, *targets: Target) -> Found:
    """The actors of these targets. Raises `UnknownName` for one that fits none."""
    names = [parse(target) for target in targets]
    found = await actor_rows(survey, names)
    for target, (mesh, rank) in zip(targets, names, strict=True):
        if not any(parse(row.actor)[0] == mesh and rank in (-1, row.rank) for row in found.rows):
            everyone = await actor_rows(survey)
            raise unknown(target, "actor", (row.actor for row in everyone.rows))
    return found


async def find_procs(survey: Survey, target: Target) -> list[Proc]:
    """The processes of a target: its name, its mesh, its pid, its rank where there is one mesh of them; or those of actors.

    Raises `UnknownName`, and `UsageError` for a number that several have: on several hosts, or one as its pid and one as its rank.
    """
    procs = await survey.procs()
    text = str(target)
    mesh, rank = parse(target)
    found = [proc for proc in procs if text in (proc.name, proc.uid)]
    found = found or [proc for proc in procs if proc.kind == "proc" and rank < 0 and proc.address.name == mesh]
    if not found and text.isdigit():
        found = _by_number(procs, int(text))
    if not found:
        actors = await actor_rows(survey, [(mesh, rank)])
        found = list({proc.uid: proc for proc in actors.homes}.values())
    if not found:
        everyone = await actor_rows(survey)
        raise unknown(target, "actor or process", [*(row.actor for row in everyone.rows), *(proc.name for proc in procs)])
    return found


def _by_number(procs: Sequence[Proc], number: int) -> list[Proc]:
    """Those with this pid or, where all are of one mesh, rank."""
    workers = [proc for proc in procs if proc.kind == "proc"]
    alone = len({proc.address.name for proc in workers}) == 1
    found = {proc.uid: f"pid {number} on {proc.host}" for proc in procs if proc.pid == number != 0}
    found |= {proc.uid: f"rank {number}" for proc in workers if alone and proc.address.rank == number and proc.uid not in found}
    fitting = [proc for proc in procs if proc.uid in found]
    if len(fitting) > 1:
        which = " and ".join(f"{proc.name} ({found[proc.uid]})" for proc in fitting)
        raise UsageError(f"{number} is {which}: say which by its name")
    return fitting


def proc_rows(procs: Sequence[Proc]) -> list[ProcRow]:
    rows = []
    for proc in procs:
        health, (rss, cpu, threads) = proc.health, proc.usage or (None, None, None)
        state = str(health.state)
        rows.append(
            ProcRow(proc.name, proc.kind, proc.host, proc.pid, state, health.since, health.place, health.why, rss, cpu, threads, proc.uid)
        )
    return rows


Look = tuple[dict[str, Proc], dict[str, tuple[float, list[tuple[Any, ...]], dict[int, int]]], list[ActorRow]]


async def look(survey: Survey) -> Look:
    """One look of two that make a rate."""
    procs = await survey.procs()
    counts = await survey.everywhere(procs, "counts")
    silent = [proc.uid for proc in procs if proc.kind in ALIVE and proc.uid not in counts]
    rest: list[tuple[Proc, ActorRow]] = []
    if silent:
        told = await survey.everywhere([proc for proc in procs if proc.uid in counts], "owned", silent, [proc.uid for proc in procs])
        rest = await _of_silent(survey, procs, silent, told)
    return {proc.uid: proc for proc in procs}, counts, [row for _, row in rest]


def rates(before: Look, now: Look, seconds: float) -> list[TopRow]:
    """What happened between two looks, `seconds` apart."""
    rows = []
    for uid, (when, entries, counts) in now[1].items():
        proc = now[0][uid]
        cpu = _cores(before[0].get(uid), proc, seconds)
        first = before[1].get(uid)
        waited = {entry[0]: entry[8] for entry in first[1]} if first is not None else {}
        for entry in entries:
            handled = None
            if first is not None and when > first[0]:
                key, mailbox = entry[0], entry[8]
                came = counts.get(key, 0) - first[2].get(key, 0)
                handled = max(0.0, (came + waited.get(key, 0) - mailbox) / (when - first[0]))
            row = _row(proc, entry)
            rows.append(TopRow(row.actor, row.process, row.pid, row.state, row.endpoint, row.mailbox, row.in_flight, handled, cpu, row.rss))
    by_name = {proc.name: proc for proc in now[0].values()}
    old = {proc.name: proc for proc in before[0].values()}
    for row in now[2]:
        cpu = _cores(old.get(row.process), by_name[row.process], seconds)
        rows.append(TopRow(row.actor, row.process, row.pid, row.state, row.endpoint, None, row.in_flight, None, cpu, row.rss))
    return sorted(rows, key=lambda row: (-(row.handled or 0.0), -(row.cpu or 0.0), row.actor))


def _cores(before: Proc | None, now: Proc, seconds: float) -> float | None:
    if before is None or before.usage is None or now.usage is None or before.pid != now.pid:
        return None
    return max(0.0, (now.usage[1] - before.usage[1]) / seconds)
