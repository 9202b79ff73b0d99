"""What is sent arrives once, in order, unshared; each call settles once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from monarch_async import ProcMesh
from tests.api.recorders import Parent, Recorder, Threaded, scribble_on


async def test_order_holds_under_load(place: ProcMesh) -> None:
    """Casts and calls, small and large, to async and def endpoints, in one order; every call has its own answer."""
    recorder = place.spawn("recorder", Recorder)
    rng = random.Random(7)
    expected, calls = [], []
    for number in range(3000):
        kind = rng.randrange(6)
        size = rng.choice([0, 0, 0, 100, 40_000, 300_000]) if number % 10 == 0 else 0
        expected.append(number)
        if kind == 0:
            recorder.take.broadcast(number, bytes(size))
        elif kind == 1:
            calls.append((number, recorder.pause.call_one(number)))
        elif kind == 2:
            calls.append((number, recorder.in_thread.call_one(number)))
        elif kind == 3:
            await recorder.take.broadcast(number, bytes(size))
        else:
            calls.append((number, recorder.take.call_one(number, bytes(size))))
    assert [number for number, _ in calls] == await asyncio.gather(*(future for _, future in calls))
    assert expected == await recorder.all.call_one()
    assert ["actor recorder[0]"] == list(await recorder.thread_names.call_one())


async def test_order_holds_between_actors(pair: ProcMesh) -> None:
    """From an actor to one in another process, and to one in its own."""
    first, second = pair.slice(gpus=0).spawn("first", Recorder), pair.slice(gpus=1).spawn("second", Recorder)
    beside = pair.slice(gpus=0).spawn("beside", Recorder)
    assert list(range(500)) == await first.drive.call_one(second, 500)
    assert list(range(500)) == await first.drive.call_one(beside, 500)


VALUES: dict[str, Callable[[], Any]] = {
    "dict": lambda: {"list": [1, 2, 3]},
    "bytearray": lambda: bytearray(100_000),
    "array": lambda: np.arange(100_000),
    "small array": lambda: np.arange(10),
    "tensor": lambda: torch.arange(100_000),
    "small tensor": lambda: torch.arange(10),
}


def same(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray):
        return bool(np.array_equal(left, right))
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    return bool(left == right)


@pytest.mark.parametrize("thread", [False, True])
async def test_nothing_is_shared(place: ProcMesh, thread: bool) -> None:
    """What the caller changes after the call, and the receiver later, the other does not see; sent from the loop or from a thread."""
    recorder = place.spawn("recorder", Recorder)
    await recorder
    for kind, make in VALUES.items():
        original = make()

        def call(make: Callable[[], Any] = make) -> Any:
            value = make()
            future = recorder.keep.call_one(value)
            scribble_on(value)
            return future

        future = await asyncio.to_thread(call) if thread else call()
        result = await future
        assert same(original, result), kind
        scribble_on(result)
        assert same(original, await recorder.show.call_one()), kind
        shown = await recorder.show.call_one()
        await recorder.scribble.call_one()
        assert same(original, shown), kind
        assert not same(original, await recorder.show.call_one()), kind


async def test_many_broadcasts_each_awaited(pair: ProcMesh) -> None:
    """Awaiting them keeps the sender at the receivers' pace; all arrive, once."""
    recorders = pair.spawn("recorders", Recorder)
    for number in range(20_000):
        await recorders.take.broadcast(number)
    assert [list(range(20_000))] * 2 == list((await recorders.all.call()).values())


async def test_def_endpoints_have_a_thread_of_their_own(place: ProcMesh) -> None:
    """They may block on other actors by get(), even in the same process; the thread ends with the actor."""
    threaded, recorder = place.spawn("threaded", Threaded), place.spawn("recorder", Recorder)
    assert ("actor threaded[0]", "actor threaded[0]", "threaded") == await threaded.names.call_one()
    calls = [threaded.ask.call_one(recorder, 20) for _ in range(3)]
    assert [list(range(20))] * 3 == await asyncio.gather(*calls)
    await threaded.stop()
    assert 0 == await recorder.take.call_one(0)


async def test_spawning_in_a_constructor_and_in_supervise_has_the_right_owner(place: ProcMesh) -> None:
    """What an actor spawns outside of any message is its own too, and ends with it."""
    parent = place.spawn("parent", Parent)
    child = await parent.child.call_one()
    assert 1 == await child.take.call_one(1)
    await parent.stop()
    with pytest.raises(Exception, match="stopped"):
        await child.take.call_one(1)
