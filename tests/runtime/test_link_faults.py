"""Links over real sockets, when things go wrong: cuts, late events, garbage. Whatever happens, everything arrives once and in order."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from monarch_async._core.framing import DATA, PRELUDE
from monarch_async._core.seal import POLY1305, SHA256
from monarch_async._runtime.link import INLINE, Link
from monarch_async.errors import ProtocolError
from tests.channel.turns import turns_until
from tests.core.wire import Writer, call
from tests.runtime.link_pair import End, Wall, acknowledged, attach, finish, gone, has, join, opened


@pytest.fixture
async def pair() -> AsyncIterator[tuple[End, End]]:
    """Two links that are connected."""
    ends = End(), End()
    await join(*ends)
    yield ends
    await finish(*ends)


@pytest.mark.parametrize("sealed", ["", SHA256, POLY1305], ids=["bare", SHA256, POLY1305])
@pytest.mark.parametrize("seed", range(3))
async def test_cut_again_and_again(seed: int, sealed: str) -> None:
    """Both directions send thousands of messages of all sizes while the connection is cut at random: exactly once, in order, intact."""
    rng = random.Random(seed)
    ends = one, other = End(), End()
    await join(one, other, sealed=sealed, buffer=30_000)
    total = 1500
    cuts = 0

    async def send(end: End) -> None:
        for number in range(total):
            kind = rng.random()
            if kind < 0.02:
                end.large(number, rng.randrange(100), rng.randrange(3 << 20))
            elif kind < 0.1:
                end.large(number, rng.randrange(INLINE, 4 * INLINE))
            else:
                end.small(number, rng.randrange(300))
            if rng.random() < 0.2:
                await asyncio.sleep(0)

    sending = [asyncio.ensure_future(send(end)) for end in ends]
    while not all(task.done() for task in sending) or any(len(a.got) < total for a in ends):
        for _ in range(rng.randrange(40)):
            await asyncio.sleep(0)
        if cuts < 60:
            cuts += 1
            rng.choice(ends).link.drop_connection()
            if rng.random() < 0.5:  # the other side may learn of it before or after the new connection is there
                await ends[0].until(lambda: ends[0].link.connection is None)
            await join(one, other, sealed=sealed, buffer=30_000)
        for end, peer in (ends, ends[::-1]):
            end.link._outbound.validate()
            end.link._inbound.validate()
            assert len(end.got) <= len(peer.sent)
    assert one.sent == other.got
    assert other.sent == one.got
    for end in ends:
        await acknowledged(end)
        end.link._outbound.validate()
    assert all(error is None or isinstance(error, OSError) for end in ends for error in end.lost)
    await finish(one, other)


async def test_an_old_connection_says_nothing_any_more(pair: tuple[End, End]) -> None:
    """Bytes and the end of a connection that was replaced reach nobody; the new one goes on."""
    one, other = pair
    old = one.stream, other.stream
    assert old[0] is not None
    assert old[1] is not None
    streams = await opened()
    old[1].write(PRELUDE.pack(99, 0, 0, 0, 0, 0, 0))  # on its way when the new connection comes
    attach(one, other, streams)
    one.small(1)
    other.small(2)
    await other.until(lambda: len(other.got) == 1)
    await one.until(lambda: len(one.got) == 1)
    for stream in old:
        assert stream is not None
        await turns_until(functools.partial(gone, stream))
    assert ([], []) == (one.lost, other.lost)
    assert one.link.connection is one.stream


async def test_garbage_ends_the_connection_then_the_link(pair: tuple[End, End]) -> None:
    """What came before garbage is delivered; the same frame bad over a second connection makes the link `broken`."""
    one, other = pair
    writer = Writer()
    writer.small(call(1))
    for attempt in range(2):
        assert other.stream is not None
        other.stream.write(writer.bytes + PRELUDE.pack(DATA, 0, 0, 1, 0, 2, 0) + b"\xc1")
        await one.until(functools.partial(has, one.lost, attempt + 1))
        assert isinstance(one.lost[-1], ProtocolError)
        assert (attempt == 1) == (one.link.broken is not None)
        assert writer.sent == one.got
        await other.until(functools.partial(has, other.lost, attempt + 1))
        if not attempt:
            other.link._outbound.number(DATA, 0, b"")  # as if it had sent what `one` has received
            await join(one, other)


async def test_a_peer_that_acknowledges_what_was_not_sent(pair: tuple[End, End]) -> None:
    """An acknowledgement from the future is the peer's fault, but the messages that came with it are delivered."""
    one, other = pair
    writer = Writer()
    writer.acknowledged = 1000
    writer.small(call(1))
    assert other.stream is not None
    other.stream.write(writer.bytes)
    await one.until(lambda: bool(one.lost))
    assert isinstance(one.lost[0], ProtocolError)
    assert writer.sent == one.got


async def test_a_link_that_ends_in_a_delivery(pair: tuple[End, End]) -> None:
    """When a message's delivery ends the link, nothing behind it in the same read is delivered."""
    one, other = pair

    def deliver_and_end(link: Link, messages: list[list[Any]], buffers: list[memoryview] | None) -> None:
        other.deliver(link, messages, buffers)
        link.end()

    other.link._deliver = deliver_and_end
    writer = Writer()
    for number in range(5):
        writer.small(call(number))
    assert one.stream is not None
    one.stream.write(writer.bytes)
    await other.until(lambda: bool(other.got))
    await one.until(lambda: bool(one.lost))
    assert writer.sent[:1] == other.got


async def test_an_attachment_that_fails_keeps_the_connection(pair: tuple[End, End]) -> None:
    """A claim that can't be is refused, and the connection that works is kept."""
    one, other = pair
    with pytest.raises(ProtocolError, match="only 0 were sent"):
        one.link.attach(Wall(), 5, None)
    one.small(1)
    await other.until(lambda: bool(other.got))
    assert one.sent == other.got
