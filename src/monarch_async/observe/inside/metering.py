"""The metrics of this process. They are counted from when somebody first asks, or, with the option `metrics`, from its start.

What a process knows anyhow (links, dead letters, mailboxes) is only read when it is asked for. Handlers are measured where they begin
(`steps`), restarts and collectives by the hooks of `monarch_async.instrument`, the loop by a timer. All of it is taken off when nobody has
asked for `IDLE` seconds, unless the option holds it.
"""

from __future__ import annotations

import asyncio
import signal
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from importlib import import_module

from monarch_async._core.events import Failure
from monarch_async._runtime.link import Link
from monarch_async._runtime.peer import Peer
from monarch_async._runtime.runtime import Runtime
from monarch_async.instrument import on_collective, on_restart
from monarch_async.observe.inside.layers import layers_of
from monarch_async.observe.inside.steps import Tallies
from monarch_async.observe.metrics.counters import Labels, Series, Snapshot, Value
from monarch_async.observe.metrics.families import CALL_BOUNDS, FAMILIES, LAG_BOUNDS

__all__ = ["Meter", "begin", "metrics", "reason_of"]

IDLE = 600.0
PACE = 0.5
"""Seconds between two looks at how late the loop is."""
_SERVING = "monarch_async.observe.metrics.serving"


class Meter:
    """Counts for one process until `end`."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._series = {family.name: Series(family) for family in FAMILIES}
        self._ended_links: dict[str, Counter[str]] = {}  # by kind, what links had counted that are no more
        self._tallies = Tallies()
        self._lag = self._series["loop_lag_seconds"].at()
        self.held = False  # by the option
        self.asked = time.monotonic()
        layers_of(runtime).measure(self._tallies)
        on_restart.append(self._restarted)
        on_collective.append(self._collective)
        runtime.on_session_over.append(self._link_over)
        self._task = runtime.tasks.start(self._watch(), name="metering")
        self._task.add_done_callback(lambda done: self.end())

    def end(self) -> None:
        """Count no more."""
        runtime = self._runtime
        if runtime.parts.get("meter") is self:
            del runtime.parts["meter"]
            self._task.cancel()
            layers_of(runtime).measure(None)
            on_restart.remove(self._restarted)
            on_collective.remove(self._collective)
            runtime.on_session_over.remove(self._link_over)

    async def _watch(self) -> None:
        """Look at the loop, until nobody asks any more or the runtime closes."""
        loop = self._runtime.loop
        while self.held or time.monotonic() - self.asked < IDLE:
            due = loop.time() + PACE
            await asyncio.sleep(PACE)
            late = max(0.0, loop.time() - due)
            self._lag[bisect_left(LAG_BOUNDS, late)] += 1
            self._lag[-1] += late

    # The hooks.

    def _restarted(self, tasks: object, failure: Failure | None) -> None:
        if tasks is self._runtime.tasks:
            self._series["restarts_total"].at(reason_of(failure))[0] += 1

    def _collective(self, operation: str, called: float, started: float, ended: float, state: str) -> None:
        self._series["collectives_total"].at(operation, "ok" if state == "done" else "error")[0] += 1
        self._observe("collective_duration_seconds", ended - called, operation)
        if started:
            self._observe("collective_wait_seconds", started - called, operation)

    def _observe(self, name: str, seconds: float, *labels: str) -> None:
        histogram = self._series[name].at(*labels)
        histogram[bisect_left(CALL_BOUNDS, seconds)] += 1
        histogram[-1] += seconds

    def _link_over(self, peer: Peer, link: Link) -> None:
        self._add_link(self._ended_links.setdefault(self._kind(peer), Counter()), link)

    # What is read.

    def snapshot(self) -> Snapshot:
        """All values now."""
        runtime = self._runtime
        self._read_calls()
        found: Snapshot = {name: values for name, series in self._series.items() if (values := series.snapshot())}
        self._read_actors(found)
        self._read_links(found)
        pool = runtime.lending.pool
        found["segment_bytes"] = {("in use",): float(pool.allocated - pool.kept), ("kept",): float(pool.kept)}
        found["dead_letters_total"] = {(): float(runtime.dead_letters.count)}
        found["folded_series"] = {(): float(sum(len(series.folded) for series in self._series.values()))}
        return found

    def _read_calls(self) -> None:
        durations, calls = self._fresh("call_duration_seconds"), self._fresh("calls_total")
        for (actor, endpoint), tally in list(self._tallies.found.items()):
            if count := sum(tally[:-1]):
                for index, value in enumerate(tally):
                    durations.at(actor, endpoint)[index] += value
                calls.at(actor, endpoint, "ok")[0] += count
        for (actor, endpoint, outcome), count in list(self._tallies.failed.items()):
            calls.at(actor, endpoint, outcome)[0] += count
            calls.at(actor, endpoint, "ok")[0] -= count
        calls.values = {labels: value for labels, value in calls.values.items() if value[0]}
        self._series["call_duration_seconds"], self._series["calls_total"] = durations, calls

    def _read_actors(self, found: Snapshot) -> None:
        counted: dict[str, list[int]] = {}  # by class: actors, messages that wait, the most that do, handlers
        for cell in list(self._runtime.cells.values()):
            name = cell.identity[1]
            counts = counted.get(name)
            if counts is None:
                counts = counted[name] = [0, 0, 0, 0]
            counts[0] += 1
            if cell.mailbox or cell.current is not None or cell.overlapping:
                waiting = len(cell.mailbox)
                counts[1] += waiting
                counts[2] = max(counts[2], waiting)
                counts[3] += (cell.current is not None) + len(cell.overlapping)
        for index, name in enumerate(("actors", "mailbox_messages", "mailbox_messages_max", "calls_running")):
            series = self._fresh(name)
            for actor, counts in counted.items():
                value = series.at(actor)
                value[0] = max(value[0], counts[index]) if series.family.kind == "peak" else value[0] + counts[index]
            found[name] = series.snapshot()

    def _fresh(self, name: str) -> Series:
        return Series(self._series[name].family)

    def _read_links(self, found: Snapshot) -> None:
        kinds = {kind: Counter(counts) for kind, counts in self._ended_links.items()}
        for link in self._runtime.links:
            counts = kinds.setdefault(self._kind(self._runtime.peer_of(link)), Counter())
            self._add_link(counts, link)
            counts["links"] += link.connection is not None
            counts["link_queued_bytes"] += link.backlog
        for kind, counts in kinds.items():
            for name, value in counts.items():
                values: dict[Labels, Value] = found.setdefault(name, {})
                values[kind,] = float(value)

    @staticmethod
    def _add_link(counts: Counter[str], link: Link) -> None:
        counts["link_sent_bytes_total"] += link.sent_bytes
        counts["link_received_bytes_total"] += link.received_bytes
        counts["link_reconnects_total"] += max(0, link.connections - 1)

    def _kind(self, peer: Peer) -> str:
        return "unix" if peer.address.host == self._runtime.me.host else "tcp"


def reason_of(failure: Failure | None) -> str:
    """What ended the life before, in one of few words: the signal's name, ``exit``, ``exception``, ``stopped``, ``sibling``, ``lost``."""
    if failure is None:
        return "sibling"
    if failure.signal is not None:
        known = {number.value: number.name for number in signal.Signals}
        return known.get(failure.signal, "signal")
    if failure.exit_code is not None:
        return "exit"
    if failure.error:
        return "exception"
    return "stopped" if failure.reason.startswith("stopped itself") else "lost"


def _meter(runtime: Runtime) -> Meter:
    meter: Meter | None = runtime.parts.get("meter")
    if meter is None:
        meter = runtime.parts["meter"] = Meter(runtime)
    return meter


def metrics(runtime: Runtime, end: bool = False) -> Snapshot:
    """The values of all metrics of this process; with `end` nobody asks any more."""
    meter = _meter(runtime)
    meter.asked = time.monotonic()
    found = meter.snapshot()
    if end and not meter.held:
        meter.end()
    return found


def begin(runtime: Runtime) -> None:
    """The option says so: count from now on, and, in the program itself, serve them."""
    _meter(runtime).held = True
    runtime.loop.call_soon(_serve, runtime)


def _serve(runtime: Runtime) -> None:
    if "client" in runtime.parts and not runtime.closing:
        serve: Callable[[Runtime], asyncio.Task[None]] = import_module(_SERVING).serve_by_option
        serve(runtime)
