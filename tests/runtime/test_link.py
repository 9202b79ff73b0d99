"""Links over real sockets: order, batching, backpressure, limits, the end."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator

import pytest

from monarch_async._channel.stream import HIGH_WATER
from monarch_async._core.framing import CALL, CREDIT, REPLY, pack_message
from monarch_async._runtime.link import INLINE
from monarch_async._runtime.outgoing import CHUNK_SIZE, MAX_SMALL
from monarch_async.errors import ChannelFull, FrameTooLarge, ProtocolError
from tests.channel.turns import turns_until
from tests.core.wire import call
from tests.runtime.link_pair import End, Wall, acknowledged, finish, join


@pytest.fixture
async def pair() -> AsyncIterator[tuple[End, End]]:
    """Two links that are connected."""
    ends = End(), End()
    await join(*ends)
    yield ends
    await finish(*ends)


async def test_small_and_large_keep_their_order(pair: tuple[End, End]) -> None:
    """Messages of all sizes sent with `send` and `send_large` arrive in order and whole, and the buffers come back."""
    one, other = pair
    sizes = [
        (0, 0),
        (INLINE, INLINE + 1),
        (0, CHUNK_SIZE - 1),
        (0, CHUNK_SIZE),
        (1, CHUNK_SIZE),
        (0, 3 * CHUNK_SIZE + 5),
        (CHUNK_SIZE, 9, 64),
    ]
    for number in range(70):
        if number % 10 < len(sizes):
            one.large(number, *sizes[number % 10])
        one.small(number)
        one.small(number, 5000)
    one.large(99, 2 * CHUNK_SIZE)
    await other.until(lambda: len(other.got) == len(one.sent))
    assert one.sent == other.got
    await acknowledged(one)
    assert 0 == one.pool.out


async def test_control_overtakes_large(pair: tuple[End, End]) -> None:
    """A control message sent behind a large one arrives before it; a small ordinary one behind it."""
    one, other = pair
    one.large(1, 0, 64 << 20)
    one.small(2)
    one.link.send_control(pack_message((CREDIT, 7, 1, 1)))
    await other.until(lambda: len(other.got) == 3)
    assert [CREDIT, CALL, CALL] == [fields[0] for fields, _ in other.got]
    assert one.sent == other.got[1:]


async def test_one_iteration_is_one_batch(pair: tuple[End, End]) -> None:
    """The first message of an iteration leaves alone, the rest of it together; each iteration anew."""
    one, other = pair
    for number in range(100):
        one.small(number)
    await other.until(lambda: len(other.got) == 100)
    one.small(100)
    await other.until(lambda: len(other.got) == 101)
    assert [1, 99, 1] == other.batches


async def test_many_messages_fill_many_frames() -> None:
    """What gathers while there is no connection is cut into frames that the peer takes, however much it is."""
    one, other = End(), End()
    for number in range(3000):
        one.small(number, 10_000)
    assert one.link.backlog >= 30_000_000
    await join(one, other)
    await other.until(lambda: len(other.got) == 3000)
    assert one.sent == other.got
    assert max(other.batches) < 10
    await finish(one, other)


async def test_a_peer_that_does_not_read() -> None:
    """The connection is given no more than its high-water mark and a chunk, new or resent; the rest waits, and is counted."""
    one = End()
    wall = Wall()
    one.link.attach(wall, 0, None)
    for number in range(20):
        one.large(number, 0, 4 << 20)
        for _ in range(100):
            one.small(number, 1000)
            one.link.send_control(pack_message((REPLY, number, bytes(1000))))
    await asyncio.sleep(0)
    assert wall.written <= HIGH_WATER + CHUNK_SIZE + 100_000
    assert 84_000_000 < one.link.backlog < 92_000_000
    assert not one.link.idle
    swamp = Wall(math.inf)
    one.link.attach(swamp, 0, None)
    assert swamp.written > 80_000_000
    other = Wall()
    one.link.attach(other, 0, None)
    assert HIGH_WATER < other.written <= HIGH_WATER + CHUNK_SIZE + 100_000
    written = other.written
    one.link.ping()
    assert written == other.written
    one.link.end()
    assert (0, True) == (one.link.backlog, one.link.idle)


async def test_slow_reader_gets_everything() -> None:
    """A peer that reads nothing for a while, then everything: the sender waits on `drain` meanwhile and nothing is lost."""
    one, other = End(), End()
    await join(one, other)
    assert other.stream is not None
    assert other.stream._transport is not None
    other.stream._transport.pause_reading()
    one.large(1, 0, 8 << 20)
    for number in range(1000):
        one.small(number)
    drained = asyncio.ensure_future(one.link.drain())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not drained.done()
    other.stream._transport.resume_reading()
    await drained
    await other.until(lambda: len(other.got) == 1001)
    assert one.sent == other.got
    await finish(one, other)


async def test_too_large_is_told_at_once(pair: tuple[End, End]) -> None:
    """A message past a limit raises at the sender, sends nothing, and the link goes on."""
    one, other = End(max_frame=100_000), pair[1]
    await join(one, other)
    with pytest.raises(FrameTooLarge, match="max_frame=100000"):
        one.link.send_large(call(1), b"", [memoryview(bytes(100_001))])
    for send in (one.link.send, one.link.send_control):
        with pytest.raises(FrameTooLarge, match=str(MAX_SMALL)):
            send(bytes(MAX_SMALL + 1))
    assert (True, 0) == (one.link.idle, one.pool.out)
    one.small(2)
    await other.until(lambda: bool(other.got))
    assert one.sent == other.got
    await finish(one)


async def test_the_largest_small_message_passes(pair: tuple[End, End]) -> None:
    """A message just under the limit gets through, alone and behind others of its iteration."""
    one, other = pair
    for number in range(3):
        one.small(number, MAX_SMALL - 100)
    await other.until(lambda: len(other.got) == 3)
    assert one.sent == other.got


async def test_the_caller_may_change_its_buffers_at_once(pair: tuple[End, End]) -> None:
    """What is sent is what the buffers held at the call."""
    one, other = pair
    data = bytearray(b"a" * (5 << 20))
    one.link.send_large(call(1), b"", [memoryview(data)])
    data[:] = bytes(len(data))
    await other.until(lambda: bool(other.got))
    assert [b"a" * len(data)] == other.got[0][1]


async def test_end_wakes_and_drops(pair: tuple[End, End]) -> None:
    """`end` wakes who waits on `drain`, and an ended link takes messages, drops them and refuses a new connection."""
    one, _ = pair
    one.link.attach(Wall(), 0, None)
    one.large(1, 0, 8 << 20)
    drained = asyncio.ensure_future(one.link.drain())
    await asyncio.sleep(0)
    assert not drained.done()
    one.link.end()
    await drained
    one.small(1)
    one.large(2, 0, 1 << 20)
    one.link.send_control(pack_message((REPLY, 1, b"")))
    one.link.ping()
    one.link.say_goodbye()
    assert (0, True) == (one.link.backlog, one.link.idle)
    with pytest.raises(ProtocolError, match="over"):
        one.link.attach(Wall(), 0, None)


async def test_signs_of_life(pair: tuple[End, End]) -> None:
    """A ping is answered, a goodbye is heard, and neither delivers anything."""
    one, other = pair
    one.link.ping()
    await turns_until(lambda: one.link._reader.pongs == 1)  # not by `last_heard`: a loop's clock may stand still meanwhile
    other.link.say_goodbye()
    await turns_until(lambda: one.link.said_goodbye)
    assert ([], []) == (one.got, other.got)


async def test_an_idle_link_does_nothing(pair: tuple[End, End]) -> None:
    """With nothing to send, no callback of a link is scheduled: two idle links write no byte."""
    one, other = pair
    one.small(1)
    one.large(2, 0, 3 << 20)
    await other.until(lambda: len(other.got) == 2)
    await acknowledged(one)
    written: list[bytes | memoryview] = []
    for end in (one, other):
        assert end.stream is not None
        end.stream.write = written.append  # type: ignore[method-assign, assignment]
    for _ in range(50):
        await asyncio.sleep(0)
    assert [] == written
    assert not one.link._scheduled


async def test_large_messages_that_wait_are_bounded(pair: tuple[End, End]) -> None:
    """Past `link_bytes` a large message is refused with the figure and the option's name; later ones pass again."""
    one, other = pair
    one.link._link_bytes = 5 << 20
    one.link.send_large([CALL, 1, "a", 0, 0, b"", None], b"x" * (4 << 20), [])
    with pytest.raises(ChannelFull, match="link_bytes=5242880") as caught:
        one.link.send_large([CALL, 2, "a", 0, 0, b"", None], b"x" * (4 << 20), [])
    assert ("link_bytes", 5 << 20) == (caught.value.option, caught.value.limit)
    await other.until(lambda: len(other.got) == 1)
    await acknowledged(one)
    one.link.send_large([CALL, 3, "a", 0, 0, b"", None], b"x" * (4 << 20), [])
    await other.until(lambda: len(other.got) == 2)
