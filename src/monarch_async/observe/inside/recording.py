"""What this process does, written down for a timeline while somebody asks.

Handlers are seen by a layer around them (`layers`). That a call is made is seen where it gets its number: the runtime's counter of requests
is one that notes for that time who has asked it. Load is sampled by a timer, failures are in the history anyhow.

Rules: at most `KEPT` events wait to be fetched; when more come the oldest are dropped, and counted. Who asks comes back at least every
`IDLE` seconds, or has gone.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from monarch_async._runtime.branch import RelayedOrigin
from monarch_async._runtime.context import Message, current_cell, current_message
from monarch_async._runtime.numbering import listen, unlisten
from monarch_async._runtime.runtime import Runtime
from monarch_async.instrument import on_collective
from monarch_async.observe.inside.cells import running
from monarch_async.observe.inside.layers import Function, layers_of
from monarch_async.observe.inside.steps import outcome_of

__all__ = ["CALL", "COLLECTIVE", "COUNTER", "FAULT", "HANDLER", "Page", "clock", "record"]

IDLE = 5.0
KEPT = 50_000
PAGE = 5_000
"""Events in one answer: to pickle more at once would hold up the loop."""
PACE = 0.1
"""Seconds between two samples of the load."""

HANDLER, CALL, COUNTER, FAULT, COLLECTIVE = range(5)
"""The first item of an event. The others are times by `time.monotonic`, and:

* HANDLER: start, end, actor, endpoint, uid of the sender and number of the request (0: it is not known, or none), outcome;
* CALL: time, actor that calls (``""``: the program), number of the request;
* COUNTER: time, name, value;
* FAULT: time, kind and subject as in `records.Event`, text;
* COLLECTIVE: start, end, operation, ``done`` or ``failed``, start of the transfer (0.0: never).
"""
Event = tuple[Any, ...]


class Page(NamedTuple):
    """What is fetched at once: the number to come back with, the time here, events, whether there are more, how many were dropped so far.

    `unfinished` are the handlers that run, as HANDLER events: only at the end.
    """

    number: int
    now: float
    events: list[Event]
    more: bool
    dropped: int
    unfinished: list[Event]


class _Recorder:
    """One recording."""

    def __init__(self, runtime: Runtime, number: int) -> None:
        self._runtime = runtime
        self._number = number
        self._events: deque[Event] = deque(maxlen=KEPT)
        self._lock = threading.Lock()
        self._noted = 0
        self._taken = 0
        self._open: dict[Message, Event] = {}  # the handlers that have begun since
        self._uids: dict[Any, str] = {}  # of processes, by where messages come from
        self._handled = 0
        self._began = time.monotonic()
        self._faults_until = time.time()
        self.asked = self._began
        layers_of(runtime).add(self)
        on_collective.append(self._collective)
        listen(runtime, self._call)
        self._task = runtime.tasks.start(self._watch(), name="recording")
        self._task.add_done_callback(lambda done: self.end())

    def end(self) -> None:
        """Write nothing down any more."""
        runtime = self._runtime
        if _recorders(runtime).pop(self._number, None) is None:
            return
        self._task.cancel()
        layers_of(runtime).remove(self)
        on_collective.remove(self._collective)
        unlisten(runtime, self._call)

    def _note(self, event: Event) -> None:
        with self._lock:  # handlers of other threads note, too
            self._noted += 1
            self._handled += event[0] == HANDLER
            self._events.append(event)

    # What happens.

    def around_async(self, actor: str, endpoint: str, function: Callable[..., Awaitable[Any]]) -> Function:
        async def recorded(instance: Any, /, *args: Any, **kwargs: Any) -> Any:
            message = self._begins(endpoint)
            try:
                result = await function(instance, *args, **kwargs)
            except BaseException as error:
                self._ends(message, outcome_of(error))
                raise
            self._ends(message, "ok")
            return result

        return recorded

    def around_sync(self, actor: str, endpoint: str, function: Function) -> Function:
        def recorded(instance: Any, /, *args: Any, **kwargs: Any) -> Any:
            message = self._begins(endpoint)
            try:
                result = function(instance, *args, **kwargs)
            except BaseException as error:
                self._ends(message, outcome_of(error))
                raise
            self._ends(message, "ok")
            return result

        return recorded

    def _begins(self, endpoint: str) -> Message | None:
        message = current_message.get()
        if message is not None:
            sender, request = self._source(message)
            self._open[message] = (HANDLER, time.monotonic(), 0.0, str(message.cell.identity), endpoint, sender, request)
        return message

    def _ends(self, message: Message | None, outcome: str) -> None:
        begun = self._open.pop(message, None) if message is not None else None
        if begun is not None:
            self._note((HANDLER, begun[1], time.monotonic(), *begun[3:], outcome))

    def _source(self, message: Message) -> tuple[str, int]:
        """Who has sent a message, and by what number it knows it."""
        origin, request = message.origin, message.request
        if isinstance(origin, RelayedOrigin):  # on its way it got another one
            chain = (message.extras or {}).get("c", ())
            request = chain[-1][2] if request and chain else 0
        uid = self._uids.get(origin)
        if uid is None:
            address = self._runtime.address_of(origin)
            uid = self._uids[origin] = address.uid if address is not None else ""
        return uid, request

    def _call(self, number: int) -> None:
        message = current_message.get()
        cell = message.cell if message is not None else current_cell.get()
        self._note((CALL, time.monotonic(), str(cell.identity) if cell is not None else "", number))

    def _collective(self, operation: str, called: float, started: float, ended: float, state: str) -> None:
        self._note((COLLECTIVE, called, ended, operation, state, started))

    async def _watch(self) -> None:
        """Sample the load, until nobody asks any more or the runtime closes."""
        while time.monotonic() - self.asked < IDLE:
            due = time.monotonic() + PACE
            await asyncio.sleep(PACE)
            self._sample(max(0.0, time.monotonic() - due))

    def _sample(self, late: float) -> None:
        runtime, now = self._runtime, time.monotonic()
        waiting = sum(len(cell.mailbox) for cell in list(runtime.busy))
        samples = (
            ("mailbox messages", waiting),
            ("link bytes queued", sum(link.backlog for link in runtime.links)),
            ("loop lag (ms)", round(1000 * late, 3)),
            ("handlers ended", self._handled),
        )
        self._handled = 0
        for name, value in samples:
            self._note((COUNTER, now, name, value))

    # What is fetched.

    def take(self, *, end: bool) -> Page:
        """The next page."""
        self.asked = time.monotonic()
        self._note_faults()
        events = self._events
        with self._lock:
            found = [events.popleft() for _ in range(min(PAGE, len(events)))]
            self._taken += len(found)
            more, dropped = len(events) > 0, self._noted - self._taken - len(events)
        return Page(self._number, self.asked, found, more, dropped, self._unfinished() if end and not more else [])

    def _note_faults(self) -> None:
        since, self._faults_until = self._faults_until, time.time()
        shift = time.monotonic() - self._faults_until
        for entry in list(self._runtime.history.entries):
            if since < entry.when <= self._faults_until:
                self._note((FAULT, entry.when + shift, entry.kind, entry.subject, entry.text))

    def _unfinished(self) -> list[Event]:
        now = time.monotonic()
        found = [(*event[:2], now, *event[3:], "unfinished") for event in list(self._open.values())]
        for cell in list(self._runtime.busy):
            for message, age in running(self._runtime, cell):
                if message not in self._open:
                    start = min(now - age, self._began)
                    found.append((HANDLER, start, now, str(cell.identity), message.endpoint, "", 0, "unfinished"))
        return found


def _recorders(runtime: Runtime) -> dict[int, _Recorder]:
    recorders: dict[int, _Recorder] = runtime.parts.setdefault("recorders", {})
    return recorders


def record(runtime: Runtime, number: int = 0, end: bool = False) -> Page | None:
    """Begin to record, with 0, or go on: what has happened since. With `end` it is over once there is no more to fetch.

    `None` if it is over already, as when nobody has come back for it in time.
    """
    recorders = _recorders(runtime)
    if not number:
        number = next(runtime.requests)
        recorders[number] = _Recorder(runtime, number)
    recorder = recorders.get(number)
    if recorder is None:
        return None
    page = recorder.take(end=end)
    if end and not page.more:
        recorder.end()
    return page


def clock(runtime: Runtime) -> float:
    """The time here."""
    return time.monotonic()
