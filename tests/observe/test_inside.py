"""What is put into a process for as long as somebody looks, and that nothing of it is left."""

from __future__ import annotations

import asyncio

import pytest

from monarch_async import Actor, endpoint, this_proc
from monarch_async._runtime.cell import Cell
from monarch_async._runtime.runtime import Runtime
from monarch_async.observe.inside import counting, tracing
from monarch_async.observe.job import Job, attach
from tests.observe.zoo import Zoo


class Counted(Actor):
    """Does little."""

    @endpoint
    async def get(self) -> int:
        return 1

    @endpoint
    def get_blocking(self) -> int:
        return 2


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> float:
    """Who does not come back has gone sooner."""
    monkeypatch.setattr(counting, "IDLE", 0.1)
    monkeypatch.setattr(tracing, "IDLE", 0.1)
    return 0.1


async def actor() -> tuple[Runtime, Cell, Counted]:
    mesh = await this_proc().spawn("counted", Counted)
    runtime = Job.here().runtime
    (cell,) = [cell for cell in runtime.cells.values() if cell.identity.mesh == "counted"]
    return runtime, cell, mesh.slice(gpus=0) if "gpus" in mesh.extent else mesh


@pytest.mark.parametrize("first", [0, 1])
async def test_traces_that_overlap(first: int) -> None:
    """Each sees its messages, whichever ends first; when both have ended the handlers are those from before."""
    runtime, cell, mesh = await actor()
    before = cell.handlers
    numbers = [(await tracing.trace(runtime, [("counted", 0)], []))[0] for _ in range(2)]
    assert 1 == await mesh.get.call_one()
    await tracing.trace(runtime, [], numbers[first], True)
    assert 2 == await mesh.get_blocking.call_one()
    _, seen = await tracing.trace(runtime, [], numbers[1 - first], True)
    assert ["get", "get_blocking"] == [entry[2] for entry in seen]
    assert before is cell.handlers
    assert {} == runtime.parts["traces"]


async def test_a_trace_whose_asker_is_gone(short: float) -> None:
    """Is taken off."""
    runtime, cell, _ = await actor()
    before = cell.handlers
    await tracing.trace(runtime, [("counted", 0)], [])
    async with asyncio.timeout(10):
        while cell.handlers is not before:
            await asyncio.sleep(short)


async def test_a_counter_is_taken_off_every_link(zoo: Zoo, short: float) -> None:
    """Also those that were made while it was on, of a visitor too, and the process delivers as before."""
    job = Job.here()
    runtime = job.runtime
    await this_proc().spawn("counted", Counted)
    plain = runtime.deliver
    counting.counts(runtime)
    assert runtime.deliver != plain
    async with attach("zoo") as visiting:
        await visiting.ps()
        later = await zoo.cages.spawn("later", Counted)
        await asyncio.gather(later.get.call(), zoo.animals.pid.call())
        async with asyncio.timeout(10):
            while "counter" in runtime.parts:
                await asyncio.sleep(short)
        assert plain == runtime.deliver
        visits = runtime.parts["visits"]
        assert [] == [link for link in runtime.links if link not in visits and link._deliver != plain]
        assert 1 == len(visits)
        assert "counted[0]" in [row.actor for row in await visiting.ps()]
