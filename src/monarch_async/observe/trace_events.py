"""A recording as Trace Event JSON, which ui.perfetto.dev and chrome://tracing open.

Theory: a process of the job is a process of the trace, an actor is a thread of it. Handlers are complete slices (``X``); those of one actor
that overlap are spread over further threads of its name. From where a call was made to the handler that it has led to goes a flow (``s``,
``f``). Load is counters (``C``), failures are instants (``i``).

Rules:

* What the viewer asks for: slices of one thread do not overlap; a flow has both of its ends, in slices, and does not go back in time;
  within a thread times ascend; every process and thread has its name.
* Pids and tids are numbers of this trace alone: processes of several hosts may share a pid. The real one is in the name.
* Times are in microseconds from the beginning of the recording, by the clock of who has asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from monarch_async.observe.inside.recording import CALL, COLLECTIVE, COUNTER, FAULT, HANDLER, Event

__all__ = ["Recording", "Silence", "trace_events"]

PROGRAM = "program"
"""The track of calls that no actor has made."""
MOMENT = 1.0
"""Microseconds that a call takes in the picture, where no handler that makes it is one."""


class Silence(NamedTuple):
    """A process did not answer: its state, what it is in, since when (by the asker's clock)."""

    state: str
    place: str
    since: float


class Recording(NamedTuple):
    """What was recorded of one process. `ahead` is what its clock is ahead of the asker's; `silence` says why there is nothing."""

    uid: str
    name: str
    host: str
    pid: int
    events: Sequence[Event]
    ahead: float = 0.0
    dropped: int = 0
    silence: Silence | None = None


class _Process:
    """The threads of one process, and the events on them."""

    def __init__(self, number: int, recording: Recording, begin: float, end: float) -> None:
        self.number = number
        self.recording = recording
        self.events: list[dict[str, Any]] = []
        self._tids: dict[str, int] = {}
        self._begin, self._end = begin + recording.ahead, end + recording.ahead
        self.tid("process")

    def at(self, when: float) -> float:
        """Microseconds of the trace."""
        return round(1e6 * (min(max(when, self._begin), self._end) - self._begin), 3)

    def tid(self, name: str) -> int:
        return self._tids.setdefault(name, len(self._tids))

    def add(self, phase: str, tid: int, ts: float, name: str, **more: Any) -> None:
        self.events.append({"ph": phase, "pid": self.number, "tid": tid, "ts": ts, "name": name, **more})

    def names(self) -> Iterable[dict[str, Any]]:
        who = self.recording
        about = f" ({who.host}, pid {who.pid})" if who.pid else ""
        yield self._meta("process_name", 0, {"name": who.name + about})
        yield self._meta("process_sort_index", 0, {"sort_index": self.number})
        for name, tid in self._tids.items():
            yield self._meta("thread_name", tid, {"name": name})
            yield self._meta("thread_sort_index", tid, {"sort_index": tid})

    def _meta(self, name: str, tid: int, args: dict[str, Any]) -> dict[str, Any]:
        return {"ph": "M", "pid": self.number, "tid": tid, "ts": 0, "name": name, "args": args}


class _Slice(NamedTuple):
    tid: int
    start: float
    end: float


def trace_events(recordings: Sequence[Recording], begin: float, end: float) -> dict[str, Any]:
    """The whole file, of what happened between `begin` and `end` by the asker's clock."""
    processes = [_Process(number, recording, begin, end) for number, recording in enumerate(recordings, 1)]
    handled: dict[tuple[str, int], tuple[_Process, _Slice, str]] = {}  # by sender and request
    slices: dict[tuple[int, str], list[_Slice]] = {}  # of handlers, by process and actor, ascending
    for process in processes:
        for event, place in _in_lanes(process, [event for event in process.recording.events if event[0] == HANDLER]):
            _, _, _, actor, endpoint, sender, request, outcome = event
            args = {"outcome": outcome}
            process.add("X", place.tid, place.start, f"{actor}.{endpoint}", dur=round(place.end - place.start, 3), cat="handler", args=args)
            slices.setdefault((process.number, actor), []).append(place)
            if request and sender:
                handled[sender, request] = process, place, f"{actor}.{endpoint}"
        _draw_rest(process)
    _draw_calls(processes, handled, slices)
    events = [event for process in processes for event in process.names()]
    for process in processes:
        events += sorted(process.events, key=lambda event: (event["tid"], event["ts"], -event.get("dur", 0.0)))
    dropped = {process.recording.name: process.recording.dropped for process in processes if process.recording.dropped}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"dropped": dropped}}


def _in_lanes(process: _Process, events: Sequence[Event], name: str = "") -> Iterable[tuple[Event, _Slice]]:
    """Each with its place: on the thread of its actor, or the next one of that name that is free."""
    lanes: dict[str, list[float]] = {}
    for event in sorted(events, key=lambda event: event[1]):
        start, end = process.at(event[1]), process.at(event[2])
        track = name or event[3]
        free = lanes.setdefault(track, [])
        lane = next((index for index, busy_until in enumerate(free) if busy_until <= start), len(free))
        if lane == len(free):
            free.append(end)
        free[lane] = end
        yield event, _Slice(process.tid(f"{track} ({lane + 1})" if lane else track), start, end)


def _draw_rest(process: _Process) -> None:
    """What is neither a handler nor a call."""
    recording = process.recording
    for event in recording.events:
        if event[0] == COUNTER:
            _, when, name, value = event
            process.add("C", 0, process.at(when), name, args={"value": value})
        elif event[0] == FAULT:
            _, when, kind, subject, text = event
            process.add("i", 0, process.at(when), f"{kind}: {subject}", s="p", cat="fault", args={"text": text})
    collectives = [event for event in recording.events if event[0] == COLLECTIVE]
    for event, place in _in_lanes(process, collectives, "collectives"):
        _, called, _, operation, state, started = event
        args = {"state": state, "waited_ms": round(1000 * (started - called), 3) if started else None}
        process.add("X", place.tid, place.start, operation, dur=round(place.end - place.start, 3), cat="collective", args=args)
    if recording.silence is not None:
        state, where, since = recording.silence
        start, end = process.at(since), process.at(float("inf"))
        name = f"{state}: {where}" if where else state
        process.add("X", process.tid("does not answer"), start, name, dur=round(end - start, 3), cat="silence", args={})


def _draw_calls(
    processes: Sequence[_Process],
    handled: dict[tuple[str, int], tuple[_Process, _Slice, str]],
    slices: dict[tuple[int, str], list[_Slice]],
) -> None:
    """A flow for each call whose handler was seen."""
    number = 0
    for process in processes:
        busy_until: dict[str, float] = {}
        for event in process.recording.events:
            found = handled.get((process.recording.uid, event[3])) if event[0] == CALL else None
            if found is None:
                continue
            _, when, actor, _ = event
            callee, place, name = found
            start = process.at(when)
            inside = _enclosing(slices.get((process.number, actor), ()), start)
            if inside is not None:
                tid = inside.tid
            else:
                track = f"calls of {actor}" if actor else PROGRAM
                tid, start = process.tid(track), max(start, busy_until.get(track, 0.0))
                busy_until[track] = round(start + MOMENT, 3)
                process.add("X", tid, start, f"call {name}", dur=MOMENT, cat="call", args={})
            arrival = max(start, place.start)  # clocks of two hosts agree to within a part of a round trip
            if arrival > place.end:
                continue
            number += 1
            process.add("s", tid, start, "call", cat="call", id=number)
            callee.add("f", place.tid, arrival, "call", cat="call", id=number, bp="e")


def _enclosing(slices: Sequence[_Slice], when: float) -> _Slice | None:
    """The one that this falls into; the last, where there are several. They ascend by their start."""
    low, high = 0, len(slices)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if slices[middle].start <= when else (low, middle)
    return next((slices[index] for index in range(low - 1, max(-1, low - 17), -1) if slices[index].end >= when), None)
