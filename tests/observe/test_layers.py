"""Layers around handlers: they go on and off in any order, for every life, also under what others put around them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from monarch_async import Restart, this_proc
from monarch_async._runtime.cell import Cell
from monarch_async.ambient import current_runtime
from monarch_async.observe.inside import layers as module
from monarch_async.observe.inside.layers import Function, layers_of
from monarch_async.observe.inside.tracing import _Trace
from monarch_async.observe.job import Job
from tests.observe.working import Worker


class Seen:
    """Writes down what is handled."""

    def __init__(self, name: str, into: list[str]) -> None:
        self.name = name
        self.into = into

    def around_async(self, actor: str, endpoint: str, function: Callable[..., Awaitable[Any]]) -> Function:
        async def seen(*args: Any, **kwargs: Any) -> Any:
            self.into.append(f"{self.name} {actor}.{endpoint}")
            return await function(*args, **kwargs)

        return seen

    def around_sync(self, actor: str, endpoint: str, function: Function) -> Function:
        def seen(*args: Any, **kwargs: Any) -> Any:
            self.into.append(f"{self.name} {actor}.{endpoint}")
            return function(*args, **kwargs)

        return seen


def cell_of(mesh: str) -> Cell:
    return next(cell for cell in current_runtime().cells.values() if cell.identity.mesh == mesh)


async def test_layers_go_on_and_off_in_any_order() -> None:
    """The last is the outermost; when none is left handlers are as they were, the very same."""
    worker: Any = this_proc().spawn("worker", Worker)
    await worker.step.call_one()
    cell, layers = cell_of("worker"), layers_of(current_runtime())
    before = cell.handlers
    found: list[str] = []
    first, second = Seen("first", found), Seen("second", found)
    layers.add(first)
    layers.add(second)
    await worker.step.call_one()
    await worker.block.call_one(0)
    assert ["second Worker.step", "first Worker.step", "second Worker.block", "first Worker.block"] == found
    layers.remove(first)
    found.clear()
    other: Any = this_proc().spawn("other", Worker)
    await asyncio.gather(worker.step.call_one(), other.step.call_one())
    assert ["second Worker.step"] * 2 == found
    assert cell.handlers is cell_of("other").handlers
    layers.remove(second)
    assert before is cell.handlers
    assert before is cell_of("other").handlers


async def test_a_later_life_is_watched() -> None:
    """An actor that was started again has other handlers, with the same around them."""
    worker: Any = this_proc().spawn("worker", Worker, restart=Restart())
    await worker
    found: list[str] = []
    layer = Seen("all", found)
    layers = layers_of(current_runtime())
    layers.add(layer)
    await worker.fail.broadcast()
    await worker.step.options(retry=3).call_one()
    assert ["all Worker.fail", "all Worker.step"] == found
    assert 1 == cell_of("worker").identity.incarnation
    layers.remove(layer)
    assert cell_of("worker").behavior.handlers is cell_of("worker").handlers


async def test_what_others_put_around_is_left_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace that goes on while a layer goes: when it ends it leaves what has gone, which is put right soon after."""
    monkeypatch.setattr(module, "AGAIN", 0.05)
    worker: Any = this_proc().spawn("worker", Worker)
    await worker
    cell, layers = cell_of("worker"), layers_of(current_runtime())
    before = cell.handlers
    layer = Seen("all", [])
    layers.add(layer)
    trace = Job.here().trace("worker[0]", 2)
    first = asyncio.ensure_future(anext(trace))
    async with asyncio.timeout(10):
        while not first.done():
            await worker.step.call_one()
            await asyncio.sleep(0.01)
    layers.remove(layer)
    assert before is not cell.handlers
    await trace.aclose()  # type: ignore[attr-defined]
    async with asyncio.timeout(10):
        while before is not cell.handlers:
            await asyncio.sleep(0.02)


async def test_a_trace_that_ends_under_a_layer_notes_no_more() -> None:
    """Of neither kind of endpoint, though its functions are still called."""
    worker: Any = this_proc().spawn("worker", Worker)
    await worker
    layer, layers = Seen("all", []), layers_of(current_runtime())
    trace = _Trace(current_runtime(), cell_of("worker"), 0)
    layers.add(layer)
    for over in (False, True):
        if over:
            trace.end()
        await worker.step.call_one()
        await worker.block.call_one(0)
        assert ["step", "block"] == [seen[2] for seen in trace.seen]
    layers.remove(layer)


async def test_an_actor_that_is_never_idle_is_watched_all_the_same() -> None:
    """What is queued when a layer comes is seen by it, from some message on."""
    worker: Any = this_proc().spawn("worker", Worker)
    await worker
    found: list[str] = []
    layer = Seen("all", found)
    calls = [worker.step.call_one() for _ in range(500)]
    await calls[0]
    assert not calls[-1].done()
    layers_of(current_runtime()).add(layer)
    await asyncio.gather(*calls)
    assert 200 < len(found) < 500
    layers_of(current_runtime()).remove(layer)
