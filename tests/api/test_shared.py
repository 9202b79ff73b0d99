"""Memory that is not copied when it is sent: at the receiver it is the same memory, until one of both lets go of it."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import numpy as np
import pytest

from monarch_async import configure, shared_buffer, shared_empty, this_proc
from monarch_async._channel.segment import SUPPORTED
from monarch_async._core.address import address_of
from monarch_async.options import Options
from monarch_async.testing.plugin import MonarchProcs
from tests.api.lending_actors import Holder, lending_here, loans_here
from tests.api.waiting import until

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="needs memfd")
torch = pytest.importorskip("torch")
MIB = 1 << 20


async def test_it_is_sent_without_a_copy(monarch_procs: MonarchProcs) -> None:
    """No block but its own is used; what is written before it is sent arrives, and what is written later shows; a view goes as well."""
    procs = monarch_procs(1)
    holder = procs.spawn("holder", Holder)
    await holder.echo.call_one(None)
    buffer = shared_buffer(5 * MIB)
    pool = lending_here().pool
    allocated = pool.allocated
    buffer[:] = b"a" * (5 * MIB)
    await holder.keep.call_one(buffer)
    assert allocated == pool.allocated
    assert [b"a" * 16] == await holder.content.call_one()
    buffer[:4] = b"bbbb"
    assert [b"bbbbaaaa" + b"a" * 8] == await holder.content.call_one()
    await holder.fill.call_one(b"c" * (5 * MIB))
    buffer[:4] = b"dddd"
    assert [b"c" * 16] == await holder.content.call_one()
    assert b"ddddaaaa" == bytes(buffer[:8])
    await holder.drop.call_one()
    allocated = pool.allocated
    await holder.keep.call_one(buffer[MIB : 2 * MIB])
    array = np.frombuffer(buffer, "u1")
    array[MIB] = ord("x")
    assert [b"x" + b"a" * 15] == await holder.content.call_one()
    assert allocated == pool.allocated
    del array


async def test_what_is_read_only_is_not_copied_either(monarch_procs: MonarchProcs) -> None:
    """And arrives so that it can't be written to."""
    holder = monarch_procs(1).spawn("holder", Holder)
    await holder.echo.call_one(None)
    buffer = shared_buffer(5 * MIB)
    buffer[:] = b"a" * (5 * MIB)
    pool = lending_here().pool
    allocated = pool.allocated
    await holder.keep.call_one(buffer.toreadonly()[: 2 * MIB])
    assert allocated == pool.allocated
    assert [b"a" * 16] == await holder.content.call_one()
    with pytest.raises(TypeError, match="read-only"):
        await holder.fill.call_one(b"b" * (2 * MIB))


async def test_two_actors_of_one_process_do_not_share_it(monarch_procs: MonarchProcs) -> None:
    """The second gets a copy of what the owner wrote, whatever the first has written to its own."""
    procs = monarch_procs(1)
    first, second = procs.spawn("first", Holder), procs.spawn("second", Holder)
    await first.echo.call_one(None)
    for size in (100_000, 5 * MIB):
        buffer = shared_buffer(size)
        buffer[:] = b"a" * size
        await first.keep.call_one(buffer)
        await first.fill.call_one(b"b" * size)
        await second.keep.call_one(buffer)
        assert [b"a" * 16] == await second.content.call_one()
        await second.fill.call_one(b"c" * size)
        assert [b"b" * 16] == await first.content.call_one()
        assert b"a" * size == bytes(buffer)
        await asyncio.gather(first.drop.call_one(), second.drop.call_one())
        await first.keep.call_one(buffer)
        assert [b"a" * 16] == await first.content.call_one()
        await first.drop.call_one()
        del buffer


async def test_of_what_is_held_already_only_what_is_sent_is_copied(monarch_procs: MonarchProcs) -> None:
    """Slices of a large buffer of which the process has one already take as much memory as they have bytes, and are right and apart."""
    holder = monarch_procs(1).spawn("holder", Holder)
    await holder.echo.call_one(None)
    buffer = shared_buffer(64 * MIB)
    np.frombuffer(buffer, "u4")[:] = np.arange(16 * MIB, dtype="u4")
    await holder.keep.call_one(buffer[:100_000])
    before = await holder.private_memory.call_one()
    for start in range(0, 64 * MIB, 8 * MIB):
        await holder.keep.call_one(buffer[start : start + 100_000])
    ends = [buffer[-70_000:], buffer[:70_000]]
    await holder.keep.call_one(ends)
    assert await holder.private_memory.call_one() - before < 8 * MIB
    assert [bytes(part[:8]) for part in ends] == await holder.write_first.call_one(b"")
    expected = [bytes(buffer[start : start + 8]) + bytes(buffer[start + 99_992 : start + 100_000]) for start in range(0, 64 * MIB, 8 * MIB)]
    await holder.forget_last.call_one()
    assert [expected[0], *expected] == await holder.content.call_one()


async def test_parts_of_one_message_that_overlap_do_so_in_a_copy(monarch_procs: MonarchProcs) -> None:
    """As they do where they are looked at: a write to one of them shows in the other."""
    holder = monarch_procs(1).spawn("holder", Holder)
    await holder.echo.call_one(None)
    buffer = shared_buffer(MIB)
    buffer[:] = b"a" * MIB
    parts = [buffer[8:100_000], buffer[12:100_000], buffer[99_990:200_000], buffer[200_000:300_000]]
    for _ in range(2):
        await holder.keep.call_one(parts)
        assert [b"bbbbbbaa", b"bbaaaaaa", b"a" * 8, b"a" * 8] == await holder.write_first.call_one(b"b" * 6)
    assert b"a" * MIB == bytes(buffer)


async def test_it_is_given_back_when_nobody_refers_to_it(monarch_procs: MonarchProcs) -> None:
    """Not when the sender lets go of it, while a receiver has it; its memory then is the next one's."""
    holder = monarch_procs(1).spawn("holder", Holder)
    await holder.echo.call_one(None)
    pool = lending_here().pool
    buffer = shared_buffer(5 * MIB)
    buffer[:] = bytes([7]) * (5 * MIB)
    address = address_of(buffer)
    part = np.frombuffer(buffer, "u1")[100:200]
    await holder.keep.call_one(buffer)
    del buffer, part
    gc.collect()
    assert 1 == loans_here()
    other = shared_buffer(5 * MIB)
    other[:] = bytes(5 * MIB)
    assert address != address_of(other)
    assert [bytes([7]) * 16] == await holder.content.call_one()
    await holder.drop.call_one()
    await until(lambda: not loans_here())
    assert address == shared_empty(5 * MIB, dtype=torch.uint8).data_ptr()
    assert 10 * MIB == pool.allocated


SHAPES: list[tuple[Any, ...]] = [(3,), ((),), (2, 3), ((4, 5),), ([6],), (0,), (3, 0), (torch.Size((2, 2)),)]


@pytest.mark.parametrize("size", SHAPES, ids=repr)
@pytest.mark.parametrize("dtype", [None, torch.bool, torch.bfloat16, torch.complex128], ids=str)
async def test_arguments_are_those_of_torch_empty(size: tuple[Any, ...], dtype: Any) -> None:
    """Any shape, written as numbers or as a sequence, and any type of element."""
    expected, tensor = torch.empty(*size, dtype=dtype), shared_empty(*size, dtype=dtype)
    assert (expected.shape, expected.dtype, expected.stride()) == (tensor.shape, tensor.dtype, tensor.stride())
    tensor.zero_()
    assert torch.equal(torch.zeros_like(expected), tensor)


async def test_bad_arguments() -> None:
    """As torch says it; and a size that is none."""
    with pytest.raises(RuntimeError, match="negative dimension"):
        shared_empty(-1)
    with pytest.raises(TypeError):
        shared_empty("3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one byte, got size=0"):
        shared_buffer(0)


async def test_without_room_it_says_so() -> None:
    """By the option's name, and nothing is lost by it."""
    configure(segment_bytes=MIB)
    try:
        kept = shared_buffer(MIB)
        with pytest.raises(MemoryError, match="would pass the option segment_bytes=1048576"):
            shared_empty(10)
        del kept
        assert 10 == shared_empty(10).numel()
    finally:
        configure(segment_bytes=Options().segment_bytes)


async def test_within_a_process_it_is_copied() -> None:
    """As all that is sent to an actor here."""
    holder = this_proc().spawn("holder", Holder)
    buffer = shared_buffer(100_000)
    buffer[:8] = b"original"
    await holder.keep.call_one(buffer)
    buffer[:8] = b"changed!"
    assert b"original" == (await holder.content.call_one())[0][:8]


async def test_from_a_thread(monarch_procs: MonarchProcs) -> None:
    """It can be made in any thread that belongs to a program with a runtime, and be sent from there."""
    holder = monarch_procs(1).spawn("holder", Holder)
    await holder.echo.call_one(None)

    def send() -> Any:
        buffer = shared_buffer(MIB)
        buffer[:] = b"t" * MIB
        return holder.keep.call_one(buffer)

    for call in await asyncio.gather(*(asyncio.to_thread(send) for _ in range(4))):
        await call
    assert [b"t" * 16] * 4 == await holder.content.call_one()
