"""Who waits for whom, put together from what the processes of a job say: the calls, and the chain of handlers behind one actor."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from monarch_async.observe.actors import find_actors
from monarch_async.observe.names import Target
from monarch_async.observe.records import CallRow, Frame, Hop
from monarch_async.observe.survey import NoAnswer, Proc, Survey

__all__ = ["call_rows", "frames_in", "hops"]

MOST_HOPS = 50
_NUMBERED = re.compile(r"task Task-\d+")
_FRAME = re.compile(r'^  File "(.*)", line (\d+),? in (.*)$', re.MULTILINE)


def frames_in(text: str) -> tuple[Frame, ...]:
    """The calls of a rendered stack."""
    return tuple(Frame(file, int(line), function) for file, line, function in _FRAME.findall(text))


async def call_rows(survey: Survey, older: float) -> list[CallRow]:
    """Each call once, as its caller knows it, with what its callee says of it."""
    procs = {proc.uid: proc for proc in await survey.procs()}
    answers = await survey.everywhere(procs.values(), "calls", agents=False)
    taken = {(caller, request): rest for uid, answer in answers.items() for caller, request, *rest in answer["got"]}
    made = [(uid, *entry) for uid, answer in answers.items() for entry in answer["made"]]
    rivals = Counter((callee, mesh, rank) for _, _, _, callee, _, mesh, rank, *_ in made)
    rows = []
    for uid, who, blocks, callee, _, mesh, rank, request, age, endpoint, state in made:
        if age < older:
            continue
        actor, proc = f"{mesh}[{rank}]", procs.get(callee)
        asked_by = ""
        if (uid, request) in taken:
            _, endpoint, state, _, asked_by = taken[uid, request]
        elif proc is not None and not proc.answers and proc.health.actor == actor and rivals[callee, mesh, rank] == 1:
            endpoint, state = proc.health.endpoint, "running"  # the only one that it can be in the middle of
        caller = who if who and not who.startswith("task ") else asked_by or _task_of(procs[uid].name, who)
        place = proc.name if proc is not None else ""
        rows.append(CallRow(caller, procs[uid].name, actor, place, endpoint, state or "sent", age, blocks))
    return sorted(rows, key=lambda row: -(row.age or 0.0))


def _task_of(process: str, who: str) -> str:
    """A task of a process; that it is the seventh says nothing."""
    return process if not who or _NUMBERED.fullmatch(who) else f"{process}, {who}"


async def hops(survey: Survey, target: Target) -> list[Hop]:
    """The handlers of an actor, and those that they wait for, depth first, each once."""
    found = await find_actors(survey, target)
    procs = {proc.uid: proc for proc in found.procs}
    chain: list[Hop] = []
    seen: set[tuple[str, str]] = set()
    for proc, names in found.by_proc():
        for mesh, rank in names:
            await _follow(survey, procs, proc, mesh, rank, chain, seen)
    return chain


async def _follow(
    survey: Survey, procs: dict[str, Proc], proc: Proc, mesh: str, rank: int, chain: list[Hop], seen: set[tuple[str, str]]
) -> None:
    actor = f"{mesh}[{rank}]"
    if (proc.uid, actor) in seen or len(chain) >= MOST_HOPS:
        return
    seen.add((proc.uid, actor))
    answer = await _handlers(survey, proc, mesh, rank)
    if answer is None:
        chain.append(await _silent_hop(survey, proc, actor))
        return
    for entry in answer:
        waits = [f"{to}[{of}]" for _, _, to, of, _ in entry["waits"]]
        frames = tuple(Frame(*frame) for frame in entry["frames"])
        state = "running" if entry["endpoint"] else entry["inner"]
        waits_for = ", ".join(waits) or (entry["inner"] if entry["endpoint"] else "")
        chain.append(Hop(actor, proc.name, entry["endpoint"], state, entry["age"], frames, waits_for))
        for uid, _, to, of, _ in entry["waits"]:
            if uid in procs:
                await _follow(survey, procs, procs[uid], to, of, chain, seen)


async def _handlers(survey: Survey, proc: Proc, mesh: str, rank: int) -> Any:
    if not proc.answers:
        return None
    try:
        return await survey.inspect(proc.address, "handlers", [(mesh, rank)])
    except NoAnswer:
        return None


async def _silent_hop(survey: Survey, proc: Proc, actor: str) -> Hop:
    """What the agent knows of an actor whose process does not answer."""
    health, text = proc.health, ""
    if proc.kind == "proc":
        try:
            health, text, _ = await survey.inspect(proc.agent, "stack", proc.uid, False, True)
        except NoAnswer as error:
            return Hop(actor, proc.name, "", "unreachable", None, (), str(error))
    mine = health.actor in ("", actor)
    frames = frames_in(text)
    waits_for = health.why if mine else f"{health.why}, in {health.place}"
    return Hop(actor, proc.name, health.endpoint if mine else "", str(health.state), health.since, frames if mine else (), waits_for)
