"""Nothing grows without bound: what one process may have under way to an actor or a port, and how senders are held back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from monarch_async import (
    Actor,
    Channel,
    ChannelFull,
    FrameTooLarge,
    Port,
    PortClosed,
    ProcMesh,
    concurrent_endpoint,
    configure,
    endpoint,
    this_host,
)
from monarch_async.options import Options


class Slow(Actor):
    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.gate = asyncio.Event()

    @endpoint
    async def take(self, value: Any) -> None:
        await self.gate.wait()
        self.seen.append(value if not isinstance(value, bytes) else len(value))

    @concurrent_endpoint
    async def open(self) -> None:
        self.gate.set()

    @endpoint
    async def all(self) -> list[Any]:
        return self.seen

    @endpoint
    async def fill(self, port: Port[int], count: int) -> int:
        for number in range(count):
            await port.send(number)
        return count


@pytest.fixture
def small() -> Iterator[None]:
    """Mailboxes and ports of ten messages, in runtimes that are started from now on. Ask for it before any place."""
    before = Options()
    configure(mailbox_messages=10)
    yield
    configure(mailbox_messages=before.mailbox_messages)


async def test_case_13_a_thousand_sends_to_a_slow_actor_with_a_mailbox_of_ten(place: ProcMesh) -> None:
    """The eleventh raises ChannelFull with the figure and the option's name, and so do calls."""
    control = place.spawn("slow", Slow)
    actor = place.options(mailbox_messages=10).spawn("bounded", Slow)
    await asyncio.gather(control.initialized, actor.initialized)

    sent, full = [], []
    for number in range(1000):
        try:
            actor.take.broadcast(number)
            sent.append(number)
        except ChannelFull as error:
            full.append(error)
    assert list(range(10)) == sent
    assert 990 == len(full)
    assert (10, "mailbox_messages") == (full[0].limit, full[0].option)
    assert "10 messages are under way to bounded[0], as many as the option mailbox_messages=10 allows" in str(full[0])
    with pytest.raises(ChannelFull):
        actor.take.call_one(1000)
    with pytest.raises(ChannelFull):
        actor.take.call(1000)
    with pytest.raises(ChannelFull):
        actor.take.stream(1000)


async def test_a_full_mailbox_recovers(place: ProcMesh) -> None:
    """Once the actor has taken what there was, awaited broadcasts go through without ever meeting the limit, each once and in order."""
    actor = place.options(mailbox_messages=10).spawn("bounded", Open)

    for number in range(1000):
        await actor.take.broadcast(number)
    assert list(range(1000)) == await actor.all.call_one()


class Open(Slow):
    def __init__(self) -> None:
        super().__init__()
        self.gate.set()

    @endpoint
    async def much(self, size: int) -> bytes:
        return bytes(size)


async def test_bounds_in_bytes() -> None:
    """One message larger than the bound passes when nothing else is under way; then it is full by the other option's name."""
    procs = this_host().spawn_procs()
    actor = procs.options(mailbox_bytes=100_000).spawn("bounded", Slow)
    await actor

    actor.take.broadcast(bytes(200_000))
    with pytest.raises(ChannelFull, match="would pass the option mailbox_bytes=100000") as caught:
        actor.take.broadcast(b"x")
    assert (100_000, "mailbox_bytes") == (caught.value.limit, caught.value.option)


async def test_small_calls_and_one_over_the_bound_in_bytes_pass_each_other() -> None:
    """A message over the bound passes beside small ones that are not answered yet; and a call without arguments beside that."""
    actor = this_host().spawn_procs().options(mailbox_bytes=1 << 20).spawn("bounded", Open)
    await actor
    small, large = actor.take.call_one(1), actor.take.call_one(bytes(2 << 20))
    with pytest.raises(ChannelFull, match="would pass the option mailbox_bytes"):
        actor.take.broadcast(1)
    nothing = actor.all.call_one()
    await asyncio.gather(small, large)
    assert [1, 2 << 20] == await nothing
    half = actor.take.call_one(bytes(1 << 19))
    with pytest.raises(ChannelFull, match="would pass the option mailbox_bytes"):
        actor.take.call_one(bytes(2 << 20))
    await half


async def test_a_cast_to_an_actor_that_is_gone_gives_its_room_back(place: ProcMesh) -> None:
    """Credit for it must come too, or the sender would be held back for ever by an actor that takes nothing."""
    actor = place.options(mailbox_messages=4).spawn("bounded", Slow)
    await actor
    mesh: Any = actor
    reference = mesh.slice()
    await actor.stop()

    async with asyncio.timeout(5):
        for number in range(100):
            await reference.take.broadcast(number)


async def test_ports_hold_their_senders_back(small: None, place: ProcMesh) -> None:
    """An awaited send waits for the receiver, from another process and in this one; an un-awaited one meets the limit."""
    actor = place.spawn("actor", Slow)
    await actor
    port, receiver = Channel[int].open()
    filling = actor.fill.call_one(port, 100)
    await asyncio.sleep(0.05)
    assert not filling.done()
    assert list(range(100)) == [await receiver.recv() for _ in range(100)]
    assert 100 == await filling
    for number in range(10):
        port.send(number)
    with pytest.raises(ChannelFull, match="mailbox_messages=10"):
        port.send(10)
    receiver.close()


async def test_a_sender_that_waits_for_room_at_a_port_is_woken_by_its_end(small: None, place: ProcMesh) -> None:
    """Closing the receiver gives back what was not received: the sender finds out instead of waiting for ever."""
    actor = place.spawn("actor", Slow)
    port, receiver = Channel[int].open()
    filling = actor.fill.call_one(port, 100)
    await receiver.recv()
    receiver.close()
    async with asyncio.timeout(5):
        with pytest.raises(PortClosed, match="closed: its receiver takes nothing more"):
            await filling


async def test_a_message_over_the_frame_limit_is_refused_at_the_call() -> None:
    """FrameTooLarge names the option; nothing is sent, and the actor goes on. A result that is too large is the caller's error."""
    before = Options()
    configure(max_frame=1 << 20)
    try:
        actor = this_host().spawn_procs().spawn("actor", Open)
        with pytest.raises(FrameTooLarge, match="over the option max_frame=1048576"):
            actor.take.call_one(bytes(2 << 20))
        with pytest.raises(FrameTooLarge, match="max_frame"):
            await actor.much.call_one(2 << 20)
        assert 1000 == len(await actor.much.call_one(1000))
    finally:
        configure(max_frame=before.max_frame)
