"""What is sent arrives once, in order, unshared; each call settles once."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from monarch_async import Actor, ProcMesh, context, endpoint, this_proc


class Recorder(Actor):
    def __init__(self) -> None:
        self.seen: list[int] = []
        self.kept: Any = None
        self.threads: set[str] = set()

    @endpoint
    async def take(self, number: int, filler: bytes = b"") -> int:
        self.seen.append(number)
        return number

    @endpoint
    async def pause(self, number: int) -> int:
        self.seen.append(number)
        await asyncio.sleep(0)
        return number

    @endpoint
    def in_thread(self, number: int) -> int:
        self.seen.append(number)
        self.threads.add(threading.current_thread().name)
        return number

    @endpoint
    async def all(self) -> list[int]:
        seen, self.seen = self.seen, []
        return seen

    @endpoint
    async def keep(self, value: Any) -> Any:
        self.kept = value
        return value

    @endpoint
    async def scribble(self) -> None:
        _scribble(self.kept)

    @endpoint
    async def show(self) -> Any:
        return self.kept

    @endpoint
    async def thread_names(self) -> set[str]:
        return self.threads

    @endpoint
    async def drive(self, other: Any, count: int) -> list[int]:
        """Send from one actor to another; what came, in order."""
        for number in range(count):
            other.take.broadcast(number, bytes(100_000 if number % 50 == 0 else 0))
        seen: list[int] = await other.all.call_one()
        return seen


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


def _scribble(value: Any) -> None:
    if isinstance(value, dict):
        value["list"].append("scribbled")
    elif isinstance(value, np.ndarray):
        value[:] = -1
    elif isinstance(value, torch.Tensor):
        value.fill_(-1)
    else:
        value[0] = 255


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


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("thread", [False, True])
async def test_nothing_is_shared(place: ProcMesh, kind: str, thread: bool) -> None:
    """What the caller changes after the call, and the receiver later, the other does not see; sent from the loop or from a thread."""
    recorder = place.spawn("recorder", Recorder)
    await recorder
    original = VALUES[kind]()

    def call() -> Any:
        value = VALUES[kind]()
        future = recorder.keep.call_one(value)
        _scribble(value)
        return future

    future = await asyncio.to_thread(call) if thread else call()
    result = await future
    assert same(original, result)
    _scribble(result)
    assert same(original, await recorder.show.call_one())
    shown = await recorder.show.call_one()
    await recorder.scribble.call_one()
    assert same(original, shown)
    assert not same(original, await recorder.show.call_one())


async def test_many_broadcasts_each_awaited(pair: ProcMesh) -> None:
    """Awaiting them keeps the sender at the receivers' pace; all arrive, once."""
    recorders = pair.spawn("recorders", Recorder)
    for number in range(20_000):
        await recorders.take.broadcast(number)
    assert [list(range(20_000))] * 2 == list((await recorders.all.call()).values())


class Threaded(Actor):
    """All endpoints are def: the constructor and the cleanup run in the actor's thread too."""

    def __init__(self) -> None:
        self.born = threading.current_thread().name
        self.me = context().actor_instance.name

    @endpoint
    def names(self) -> tuple[str, str, str]:
        return self.born, threading.current_thread().name, self.me

    @endpoint
    def ask(self, other: Any, count: int) -> list[int]:
        return [other.take.call_one(number).get() for number in range(count)]


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


class Parent(Actor):
    def __init__(self) -> None:
        self.mine = this_proc().spawn("child", Recorder)

    @endpoint
    async def child(self) -> Any:
        return self.mine
