"""Large values between processes of one host: right, unshared, in order, whatever way they go, and their memory comes back."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from monarch_async import Actor, ActorError, Channel, DecodeError, Restart, configure, endpoint, this_host
from monarch_async._channel.segment import SUPPORTED
from monarch_async.options import Options
from monarch_async.testing.faults import Faults
from monarch_async.testing.plugin import MonarchProcs
from tests.api.lending_actors import Holder, few_descriptors, lending_here, loans_here
from tests.api.waiting import until

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="needs memfd")
MIB = 1 << 20


def same(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray):
        content = left.tolist() == right.tolist() if left.dtype == object else left.tobytes() == right.tobytes()
        return bool(left.dtype == right.dtype and left.shape == right.shape and content)
    if isinstance(left, memoryview):
        return (left.format, left.shape, left.tobytes()) == (right.format, right.shape, right.tobytes())
    return bool(left == right)


def random_bytes(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


VALUES: dict[str, Any] = {
    "bytes": random_bytes(300_000),
    "bytes of exactly a block": random_bytes(MIB),
    "bytearray": bytearray(random_bytes(300_001)),
    "view": memoryview(bytearray(random_bytes(70_000))),
    "read-only view": memoryview(random_bytes(100_000)),
    "matrix view": memoryview(bytearray(random_bytes(160_000))).cast("d", (100, 200)),
    "stepped view": memoryview(bytearray(random_bytes(300_000)))[::3],
    "array": np.arange(100_000),
    "Fortran's order": np.asfortranarray(np.arange(90_000.0).reshape(300, 300)),
    "transposed": np.arange(90_000).reshape(300, 300).T,
    "stepped": np.arange(300_000)[::-3],
    "broadcast": np.broadcast_to(np.arange(1000), (200, 1000)),
    "structured": np.zeros(30_000, "i4,f8,S3"),
    "big-endian": np.arange(50_000).astype(">f8"),
    "dates": np.arange(50_000).astype("datetime64[s]"),
    "text": "äöü" * 50_000,
    "objects": np.array([{"a": 1}, None] * 30_000, dtype=object),
    "large": np.arange(2 * MIB),
    "many": [np.full(5000 + index, index) for index in range(40)],
    "body and buffers": [random_bytes(40_000), np.arange(20_000), random_bytes(70_000), "x", np.arange(3)],
    "empty among large ones": [np.arange(0), np.arange(100_000), b"", bytearray()],
}


async def test_values_arrive(monarch_procs: MonarchProcs, caplog: pytest.LogCaptureFixture) -> None:
    """There and back, by async and def endpoints, ports and streams; all of it rides, and what carried it is used again."""
    holder = monarch_procs(1).spawn("holder", Holder)
    await holder.echo.call_one(None)
    for name, value in VALUES.items():
        parts = value if name in ("many", "body and buffers", "empty among large ones") else [value]
        for call in (holder.echo.call_one, holder.echo_in_thread.call_one):
            back = await call(value)
            for left, right in zip(parts, back if parts is value else [back], strict=True):
                assert type(left) is type(right), name
                assert same(left, right), name
            del back, left, right
    port, receiver = Channel[Any].open()
    for value in VALUES.values():
        if not isinstance(value, list):
            await holder.through.call_one(port, value)
            assert same(value, await receiver.recv())
    receiver.close()
    async for back in holder.echo.stream(VALUES["large"]):
        assert same(VALUES["large"], back)
    del back
    gc.collect()
    await until(lambda: not loans_here() and not lending_here().borrowing._leased)
    assert lending_here()._tenants
    assert lending_here().pool.allocated < 80 * MIB
    assert [] == caplog.records


async def test_what_is_changed_later_does_not_show(monarch_procs: MonarchProcs) -> None:
    """The sender's later changes, the receiver's, those of another receiver in the same process, and of one in another."""
    procs = monarch_procs(2)
    one, beside = procs.slice(procs=0).spawn("one", Holder), procs.slice(procs=0).spawn("beside", Holder)
    other = procs.slice(procs=1).spawn("other", Holder)
    both = procs.spawn("both", Holder)
    await asyncio.gather(*(actor.echo.call_one(1) for actor in (one, beside, other)))
    array = np.full(MIB, ord("a"), "u1")
    calls = [actor.keep.call_one(array) for actor in (one, beside, other)]
    calls.append(both.keep.call(array))
    array[:] = ord("b")
    await asyncio.gather(*calls)
    assert [b"a" * 16] == await one.content.call_one() == await beside.content.call_one() == await other.content.call_one()
    await one.fill.call_one(ord("c"))
    assert [b"a" * 16] == await beside.content.call_one() == await other.content.call_one()
    assert [[b"a" * 16]] * 2 == [value for _, value in (await both.content.call()).items()]
    # What is sent next, in memory that was written to at the receiver, is right there.
    await one.drop.call_one()
    for byte in b"defg":
        array[:] = byte
        await one.keep.call_one(array)
        await beside.keep.call_one(array)
        await one.fill.call_one(0)
        assert bytes([byte]) * 16 == (await beside.content.call_one())[-1]
        await one.drop.call_one()


async def test_what_was_sent_can_be_resized(monarch_procs: MonarchProcs) -> None:
    """Nothing holds its memory when the call has returned, from the loop or from a thread, sent once or to be sent again."""
    holder = monarch_procs(1).spawn("holder", Holder)
    memory = bytearray(b"m") * MIB

    def send(retry: int) -> Any:
        sent = holder.echo.options(retry=retry).call_one(memory)
        memory.append(ord("n"))
        return sent

    arrived = []
    for retry in (0, 1):
        arrived += [await send(retry), await (await asyncio.to_thread(send, retry))]
    assert [bytearray(b"m" * MIB + b"n" * more) for more in range(4)] == arrived


async def test_a_cast_to_all_is_one_block(monarch_procs: MonarchProcs) -> None:
    """However many receivers, and however many of them in one process; through the tree too, where the agent fills one for all."""
    procs = monarch_procs(3)
    actors = procs.spawn("actors", Holder)
    await actors.echo.call(1)
    pool = lending_here().pool
    for _ in range(3):
        await actors.keep.broadcast(np.ones(5 * MIB, "u1"))
        await actors.echo.call(1)
        assert 5 * MIB == pool.allocated
        await actors.drop.call()
        await until(lambda: not loans_here())
    await actors.keep.call(random_bytes(5 * MIB))
    assert 5 * MIB <= pool.allocated < 12 * MIB


async def test_order_holds_between_large_and_small(monarch_procs: MonarchProcs) -> None:
    """Whatever goes by memory, by the socket in chunks because memory is short, or inside a frame."""
    configure(segment_bytes=MIB)
    try:
        recorder = monarch_procs(1).spawn("recorder", Recorder)
        await recorder.all.call_one()
        sizes = [0, 10, 70_000, 3 * MIB, 300_000, 40_000] * 20
        for number, size in enumerate(sizes):
            recorder.take.broadcast(number, bytearray(size) if number % 2 else bytes(size))
        assert list(enumerate(sizes)) == await recorder.all.call_one()
    finally:
        configure(segment_bytes=Options().segment_bytes)


class Recorder(Actor):
    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    @endpoint
    async def take(self, number: int, data: Any) -> None:
        self.seen.append((number, len(data)))

    @endpoint
    async def all(self) -> list[tuple[int, int]]:
        return self.seen


@pytest.fixture
def little_memory() -> Iterator[None]:
    """In runtimes that are started from now on, and their processes, there is 1 MiB of shared memory. Ask for it before any place."""
    configure(segment_bytes=MIB)
    yield
    configure(segment_bytes=Options().segment_bytes)


async def test_case_12_little_shared_memory(
    little_memory: None, monarch_procs: MonarchProcs, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """8 MiB with 1 MiB of segments: right data by the socket both ways, one warning on each side however often, and never SIGBUS."""
    holder = monarch_procs(1).spawn("holder", Holder)
    await holder.echo.call_one(None)
    value = np.frombuffer(random_bytes(8 * MIB), "u1")
    for _ in range(4):
        assert same(value, await holder.echo.call_one(value))
    small = value[:200_000]
    for _ in range(4):
        assert same(small, await holder.echo.call_one(small))
    (record,) = caplog.records
    assert logging.WARNING == record.levelno
    assert "would pass the option segment_bytes=1048576" in record.getMessage()
    await holder.stop()
    await monarch_procs(1)  # what was printed has been shown by now
    out, err = capfd.readouterr()
    assert 1 == (out + err).count("a large message takes the socket")


class Slow:
    """Can't be put together again."""

    def __init__(self, data: bytearray) -> None:
        self.data = data

    def __reduce__(self) -> tuple[Any, ...]:
        return _fail, (memoryview(self.data),)


def _fail(data: Any) -> None:
    raise ValueError("this never decodes")


async def test_memory_comes_back_whatever_becomes_of_the_message(monarch_procs: MonarchProcs) -> None:
    """Calls that raise, that can't be decoded, that time out, are cancelled while they run and while they are queued; dead letters."""
    procs = monarch_procs(1)
    holder = procs.spawn("holder", Holder)
    await holder.echo.call_one(None)
    value = np.ones(MIB)
    with pytest.raises(ActorError, match="for the caller"):
        await holder.raises.call_one(value)
    with pytest.raises(DecodeError, match="this never decodes"):
        await holder.keep.call_one(Slow(bytearray(MIB)))
    with pytest.raises(DecodeError, match="this never decodes"):
        await holder.echo.call_one([Slow(bytearray(MIB))])
    running, queued = holder.wait.call_one(value), [holder.echo.call_one(value) for _ in range(3)]
    await asyncio.sleep(0)
    for call in (*queued, running):
        call.cancel()
    await asyncio.wait([*queued, running])
    with pytest.raises(TimeoutError):
        await holder.wait.options(timeout=0.05).call_one(value)
    await holder.stop()
    with pytest.raises(Exception, match="stopped"):
        await holder.echo.call_one(value)
    await holder.keep.broadcast(value)
    await procs.spawn("last", Holder).collect.call_one()  # what was cancelled may be in a circle with its traceback
    gc.collect()
    await until(lambda: not loans_here())


async def test_retried_with_what_it_had_when_it_was_called(monarch_procs: MonarchProcs) -> None:
    """In the process that has taken the place of one that was killed; the bytes are those of the call, from the same block."""
    holder = this_host().spawn_procs(restart=Restart()).spawn("holder", Holder)
    await holder.echo.call_one(None)
    pid, *_ = await holder.numbers.call_one()
    array = np.full(5 * MIB, 7, "u1")
    call = holder.echo.options(retry=3).call_one(array)
    array[:] = 8
    killed = holder.kill.broadcast()
    more = holder.echo.options(retry=3).call_one(np.full(5 * MIB, 9, "u1"))
    await killed
    assert np.array_equal(np.full(5 * MIB, 7, "u1"), await call)
    assert np.array_equal(np.full(5 * MIB, 9, "u1"), await more)
    assert pid != (await holder.numbers.call_one())[0]
    # What comes next, to a process that knows none of the segments.
    assert np.array_equal(array, await holder.echo.call_one(array))
    del call, more
    gc.collect()
    await until(lambda: not loans_here())


@pytest.mark.parametrize("kind", ["reset", "cut", "drop", "duplicate", "corrupt"])
async def test_after_a_lost_connection(monarch_procs: MonarchProcs, faults: Faults, kind: str) -> None:
    """What was lent when the connection went arrives once, in order, and right; nothing stays lent."""
    holder = (await monarch_procs(1, name="one")).spawn("holder", Holder)
    link = faults.at(step=3, mesh="holder", rank=0).link("client")
    {
        "reset": lambda: link.reset(),
        "cut": lambda: link.cut(0.2),
        "drop": lambda: link.drop(3, "in"),
        "duplicate": lambda: link.duplicate(4, "in"),
        "corrupt": lambda: link.corrupt(way="in"),
    }[kind]()
    calls = []
    for number in range(24):
        calls.append(holder.echo.call_one(np.full(100_000 + number, number % 256, "u1")))
        if number % 4 == 0:
            await asyncio.sleep(0.005)
    for number, call in enumerate(calls):
        assert np.array_equal(np.full(100_000 + number, number % 256, "u1"), await call)
    calls.clear()
    del call
    gc.collect()
    await until(lambda: not loans_here())


async def test_threads_send_what_they_had(monarch_procs: MonarchProcs) -> None:
    """From `def` endpoints and the program's own threads: the bytes at the time of the call, whatever is written afterwards."""
    procs = monarch_procs(2)
    first, second = procs.slice(procs=0).spawn("first", Holder), procs.slice(procs=1).spawn("second", Holder)
    await asyncio.gather(first.echo.call_one(1), second.echo.call_one(1))
    await first.send_on.call_one(second, 100)
    for _ in range(3):
        await first.send_from_thread.call_one(second, MIB)
    assert [b"t" * 16] * 3 == (await second.content.call_one())[1:]

    def send() -> Any:
        memory = bytearray(b"m") * MIB
        sent = second.keep.call_one(memory)
        memory[:] = bytes(MIB)
        return sent

    calls = await asyncio.gather(*(asyncio.to_thread(send) for _ in range(4)))
    await asyncio.gather(*calls)
    assert [b"m" * 16] * 4 == (await second.content.call_one())[4:]


@pytest.mark.parametrize("side", ["sender", "receiver"])
async def test_without_descriptors(monarch_procs: MonarchProcs, side: str) -> None:
    """With 64 open files allowed, and none left: right data in both directions, over and over, with new segments again and again."""
    procs = monarch_procs(1, bootstrap=few_descriptors)
    holder = procs.spawn("holder", Holder)
    await holder.echo.call_one(None)
    assert await holder.exhaust.call_one() > 10
    for size in (100_000, 5 * MIB, 6 * MIB, 7 * MIB, 5 * MIB):
        if side == "receiver":
            value = bytearray(random_bytes(size))
            await holder.keep.call_one(value)
            assert [bytes(value[:8]) + bytes(value[-8:])] == await holder.content.call_one()
            await holder.drop.call_one()
        else:
            assert bytearray(b"\x05") * size == await holder.make.call_one(size, 5)
    await holder.release.call_one()
    assert bytearray(b"\x05") * MIB == await holder.make.call_one(MIB, 5)
    assert same(VALUES["large"], await holder.echo.call_one(VALUES["large"]))


async def test_a_segment_that_was_missed_is_introduced_again(monarch_procs: MonarchProcs) -> None:
    """The message fails with a `DecodeError` that says why, and only those that were on their way with it."""
    holder = monarch_procs(1).spawn("holder", Holder)
    await holder.echo.call_one(None)
    value = np.arange(100_000)
    await holder.keep.call_one(value)
    await holder.drop.call_one()
    await until(lambda: not loans_here())
    await holder.lose_segments.call_one()
    calls = [holder.keep.call_one(value) for _ in range(3)]
    for call in calls:
        with pytest.raises(DecodeError, match=r"could not get at: segment 1 of .* is not known: it was never introduced"):
            await call
    await holder.keep.call_one(value)
    assert [value.tobytes()[:8] + value.tobytes()[-8:]] == await holder.content.call_one()
    assert 1 == loans_here()
    await holder.drop.call_one()
    await until(lambda: not loans_here())
