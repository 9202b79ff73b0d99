"""One answer for a whole job: all its processes are asked at once, and what they say is added up.

Rules:

* A process has `patience` seconds to answer. One that does not is counted as unreachable, and the others' answers are what there is.
* A counter never goes back: the last counts of a process that has ended, or does not answer now, stay in the sums.
* Who asks while another does waits for the same answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

from monarch_async._runtime.runtime import Runtime
from monarch_async.health import ProcState
from monarch_async.observe.metrics.counters import Labels, Snapshot, Value, merge
from monarch_async.observe.metrics.families import FAMILIES
from monarch_async.observe.survey import Proc, Survey

__all__ = ["Collector"]

_SILENT = (ProcState.STUCK, ProcState.FROZEN, ProcState.UNREACHABLE)
"""States of a process that is there and does not answer."""
_ADDING = {family.name: family for family in FAMILIES if family.kind in ("counter", "histogram")}


class Collector:
    """Asks by way of a runtime of the job."""

    def __init__(self, runtime: Runtime, patience: float) -> None:
        self._survey = Survey(runtime, (), patience)
        self._last: dict[str, tuple[str, Snapshot]] = {}  # by uid: of those that have answered once and are not gone, agent and counts
        self._gone: Snapshot = {}  # the sum of those of processes that are
        self._asking: asyncio.Task[Snapshot] | None = None

    async def collect(self) -> Snapshot:
        """The values of the job."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._ask())
        return await asyncio.shield(self._asking)

    async def close(self) -> None:
        """Give up what is being asked."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])

    async def end(self) -> None:
        """Nobody asks any more: let the processes know, as far as they can be told."""
        await self._survey.everywhere(await self._survey.procs(), "metrics", True, agents=True)

    async def _ask(self) -> Snapshot:
        survey = self._survey
        start = survey.runtime.loop.time()
        procs = [proc for proc in await survey.procs() if not self._is_absent(proc)]
        answers: dict[str, Snapshot] = await survey.everywhere(procs, "metrics", agents=True)
        self._remember(answers, {proc.uid: proc for proc in procs})
        total: Snapshot = {}
        for snapshot in (*answers.values(), *(last for uid, (_, last) in self._last.items() if uid not in answers), self._gone):
            _add(total, snapshot)
        self._count_processes(total, procs, answers)
        total["scrape_seconds"] = {(): survey.runtime.loop.time() - start}
        return total

    def _is_absent(self, proc: Proc) -> bool:
        """Whether this is a host that is not there yet, or not any more."""
        runtime = self._survey.runtime
        up, peer = runtime.hosts_up.get(proc.address.host), runtime.peers.get(proc.uid)
        return proc.kind == "agent" and ((up is not None and not up.done()) or (peer is not None and peer.why_gone is not None))

    def _remember(self, answers: dict[str, Snapshot], procs: Mapping[str, Proc]) -> None:
        for uid, (agent, last) in list(self._last.items()):
            if uid not in procs and agent in procs and procs[agent].answers:  # else nobody knows whether it is gone
                del self._last[uid]
                _add(self._gone, last)
        for uid, snapshot in answers.items():
            self._last[uid] = procs[uid].agent.uid, {name: values for name, values in snapshot.items() if name in _ADDING}

    def _count_processes(self, total: Snapshot, procs: list[Proc], answers: Collection[str]) -> None:
        silent = [proc for proc in procs if proc.uid not in answers and (proc.answers or proc.health.state in _SILENT)]
        hidden = self._last.keys() - {proc.uid for proc in procs}  # by an agent that does not answer
        total["unreachable_processes"] = {(): float(len(silent) + len(hidden))}
        states: dict[Labels, Value] = {}
        memory: dict[Labels, Value] = {}
        for proc in procs:
            _count(states, (proc.kind, str(proc.health.state)), 1)
            if proc.usage is not None:
                _count(memory, (proc.kind,), proc.usage[0])
        total["processes"], total["resident_bytes"] = states, memory


def _count(into: dict[Labels, Value], labels: Labels, value: float) -> None:
    before = into.get(labels, 0.0)
    assert isinstance(before, float)
    into[labels] = before + value


def _add(into: Snapshot, snapshot: Snapshot) -> None:
    for family in FAMILIES:
        values = snapshot.get(family.name)
        if values:
            merge(family, into.setdefault(family.name, {}), values)
