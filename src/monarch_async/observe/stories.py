"""Why something ended: what the processes of a job remember, put into the order of cause and effect."""

from __future__ import annotations

from collections.abc import Sequence

from monarch_async._runtime.service import REFUSED
from monarch_async.observe.actors import actor_rows
from monarch_async.observe.names import Target, concerns, parse, unknown
from monarch_async.observe.records import Cause, Event
from monarch_async.observe.survey import NoAnswer, Proc, Survey

__all__ = ["all_events", "causes"]

NEAR = 5.0
"""Seconds before an end within which something may be its cause."""
LAST_LINES = 20
_ENDS = ("failed", "exited", "ended")


async def all_events(survey: Survey) -> list[Event]:
    """The events of every process, the oldest first; what several have noted, once."""
    procs = await survey.procs()
    return _merge(procs, await survey.everywhere(procs, "events", agents=True))


def _merge(procs: Sequence[Proc], answers: dict[str, list[tuple[float, str, str, str, str]]]) -> list[Event]:
    names = {proc.uid: proc.name for proc in procs}
    events = [
        Event(when, names[uid], kind, subject, text, detail) for uid, told in answers.items() for when, kind, subject, text, detail in told
    ]
    return sorted(events)


async def causes(survey: Survey, target: Target) -> list[Cause]:
    """The last end of an actor or process and what led to it, the end first. Empty for one that has not ended.

    Raises `UnknownName` for one that nobody has ever heard of.
    """
    mesh, rank = parse(target)
    procs, events, told, known = await _ends_of(survey, mesh, rank)
    if not told and not known:
        actors = (row.actor for row in (await actor_rows(survey)).rows)
        here = [*actors, *(proc.name for proc in procs), *(event.subject for event in events)]
        if any(mesh == parse(name)[0] and rank in (-1, parse(name)[1]) for name in here):
            return []
        procs, events, told, known = await _ends_of(survey, mesh, rank)  # it may have ended between the two questions
        if not told and not known:
            raise unknown(target, "actor or process", here)
    if not told:  # stopped on purpose, of which nobody is told
        mesh, rank, _, text = known[-1]
        return [Cause(0.0, f"{mesh}[{rank}]", text, "")]
    end = told[-1]
    story = [end, *(event for event in reversed(events) if event is not end and _may_have_led(event, end, mesh, rank))]
    return [Cause(event.when, *_what(event, mesh, rank), await _detail(survey, procs, event)) for event in _once(story)]


async def _ends_of(survey: Survey, mesh: str, rank: int) -> tuple[list[Proc], list[Event], list[Event], list[tuple[str, int, int, str]]]:
    """The processes, all events, those that are ends of these, and what their own processes know of their ends."""
    procs = await survey.procs()
    events = _merge(procs, await survey.everywhere(procs, "events", agents=True))
    told = [event for event in events if event.kind in _ENDS and _is_about(event, mesh, rank)]
    ends = await survey.everywhere(procs, "ends", [(mesh, rank)])
    return procs, events, told, [entry for entries in ends.values() for entry in entries]


def _is_about(event: Event, mesh: str, rank: int) -> bool:
    if concerns(event.subject, mesh, rank):
        return True
    return event.kind == "exited" and any(concerns(actor, mesh, rank) for actor in event.detail.split(", "))


def _may_have_led(event: Event, end: Event, mesh: str, rank: int) -> bool:
    """Whether something came shortly before: to the same member, by hand, or to those that take it along when they end."""
    if not end.when - NEAR <= event.when <= end.when:
        return False
    if event.kind == "write":
        by_hand = any(f": {verb} " in event.text for verb in ("stop", "kill", "restart", "freeze")) and not event.text.endswith(REFUSED)
        return by_hand and (event.subject == end.subject or event.subject == mesh or concerns(event.subject, mesh, rank))
    if event.kind not in _ENDS:
        return False
    if _is_about(event, mesh, rank):
        return event.subject != end.subject or event.kind != end.kind
    if "with others of" in end.text:
        return _is_about(event, mesh, -1)
    return f"process of its owner {event.subject} " in end.text


def _once(events: Sequence[Event]) -> list[Event]:
    seen: set[tuple[str, str]] = set()
    kept = []
    for event in events:
        if (event.subject, event.text) not in seen:
            seen.add((event.subject, event.text))
            kept.append(event)
    return kept


def _what(event: Event, mesh: str, rank: int) -> tuple[str, str]:
    """To whom, and what: of a process that took the one along that was asked for, that."""
    if event.kind == "exited" and rank >= 0 and not concerns(event.subject, mesh, rank) and _is_about(event, mesh, rank):
        return f"{mesh}[{rank}]", f"its process {event.subject} {event.text}"
    return event.subject, event.text


async def _detail(survey: Survey, procs: Sequence[Proc], event: Event) -> str:
    """The traceback; or, of a process, its last lines of output."""
    if event.kind != "exited":
        return event.detail
    for agent in [proc for proc in procs if proc.kind == "agent"]:
        try:
            text = await survey.inspect(agent.address, "last_output", event.subject)
            if text.strip():
                return "\n".join(text.splitlines()[-LAST_LINES:])
        except NoAnswer:
            continue
    return ""
