"""Handlers are measured in whatever way they run, once each."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from monarch_async import Actor, Port, endpoint, this_proc
from monarch_async.ambient import current_runtime
from monarch_async.observe.inside.layers import layers_of
from monarch_async.observe.inside.steps import Tallies


class Kinds(Actor):
    """An endpoint of each kind."""

    @endpoint
    async def at_once(self, n: int = 0) -> int:
        return n

    @endpoint
    async def waits(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    @endpoint
    def in_thread(self, seconds: float) -> None:
        time.sleep(seconds)

    @endpoint
    def fails_in_thread(self) -> None:
        raise ValueError("on purpose")

    @endpoint(concurrent=True)
    async def overlaps(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    @endpoint(explicit_response_port=True)
    async def through_port(self, port: Port[int]) -> None:
        port.send(1)

    @endpoint
    async def fails_at_once(self) -> None:
        raise ValueError("on purpose")

    @endpoint
    async def fails_later(self) -> None:
        await asyncio.sleep(0)
        raise ValueError("on purpose")


async def test_every_way_is_measured_once() -> None:
    """At once, waiting, queued, overlapping, through a port, in a thread; errors and cancellations by their name."""
    kinds: Any = this_proc().spawn("kinds", Kinds)
    await kinds
    tallies, layers = Tallies(), layers_of(current_runtime())
    layers.measure(tallies)
    assert 3 == await kinds.at_once.call_one(3)
    await asyncio.gather(kinds.waits.call_one(0.02), *(kinds.at_once.call_one() for _ in range(5)))
    await kinds.in_thread.call_one(0.02)
    await asyncio.gather(*(kinds.overlaps.call_one(0.03) for _ in range(3)))
    assert 1 == await kinds.through_port.call_one()
    for name in ("fails_at_once", "fails_later", "fails_in_thread"):
        with pytest.raises(ValueError, match="on purpose"):
            await getattr(kinds, name).call_one()
    with pytest.raises(TimeoutError):
        await kinds.waits.options(timeout=0.05).call_one(60)
    await kinds.at_once.call_one()
    layers.measure(None)
    await kinds.at_once.call_one()
    counts = {endpoint: int(sum(tally[:-1])) for (_, endpoint), tally in tallies.found.items() if any(tally)}
    expected = {"at_once": 7, "waits": 2, "in_thread": 1, "overlaps": 3, "through_port": 1}
    assert expected | {"fails_at_once": 1, "fails_later": 1, "fails_in_thread": 1} == counts
    failed = {("Kinds", name, "error"): 1 for name in ("fails_at_once", "fails_later", "fails_in_thread")}
    assert failed | {("Kinds", "waits", "cancelled"): 1} == tallies.failed
    seconds = {endpoint: tally[-1] for (_, endpoint), tally in tallies.found.items()}
    assert 0.06 < seconds["waits"] < 5
    assert 0.02 <= seconds["in_thread"] < 5
    assert 0.08 <= seconds["overlaps"] < 15  # timers may be early by the clock's resolution
    assert 0 < seconds["at_once"] < 1
