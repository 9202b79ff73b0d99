"""What can't be copied is refused with an error that says why, and by what, and nothing has been written then."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import numpy
import pytest
import torch

from monarch_async import (
    BufferGone,
    BufferMismatch,
    CallTimeout,
    ProcMesh,
    RDMAAction,
    RDMABuffer,
    RDMAError,
)
from tests.api.owners import Owner, Powerless, Shy, halves, pattern

GAPS: dict[str, tuple[Any, str]] = {
    "a column": (torch.zeros(4, 4)[:, 1], r"\.contiguous\(\)"),
    "a transposed tensor": (torch.zeros(3, 4).T, r"\.contiguous\(\)"),
    "a sparse tensor": (torch.zeros(3, 3).to_sparse(), r"\.to_dense\(\)"),
    "a tensor without memory": (torch.zeros(3, device="meta"), "meta"),
    "a conjugated view": (torch.zeros(3, dtype=torch.complex64).conj(), "resolve_conj"),
    "every second element": (numpy.zeros(10)[::2], "ascontiguousarray"),
    "an array of objects": (numpy.array([{}, None], dtype=object), "references"),
    "every second byte": (memoryview(bytearray(10))[::2], "contiguous"),
}


@pytest.mark.parametrize("what", GAPS)
async def test_memory_with_gaps(what: str) -> None:
    """Neither a buffer nor a target; the error is a `ValueError` too, and says what would do."""
    memory, text = GAPS[what]
    with pytest.raises(BufferMismatch, match=text):
        RDMABuffer(memory)
    buffer = RDMABuffer(bytearray(8))
    with pytest.raises(ValueError, match=text):
        buffer.read_into(memory)
    with pytest.raises(TypeError, match="a list has no memory"):
        buffer.read_into([0])
    await buffer.drop()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((bytearray(99),), "dst has 99 bytes; give"),
        ((bytearray(101),), "dst has 101 bytes; give"),
        ((bytearray(100), 1), "bytes 1 to 101 are not all in it"),
        ((bytearray(100), 101), "offset 101"),
        ((bytearray(100), -1), "offset -1"),
        ((bytearray(100), 0, -1), "size -1"),
        ((bytearray(10), 0, 11), "less than size=11"),
        ((bytearray(200), 0, 101), "bytes 0 to 101 are not all in it"),
        ((bytearray(10), 95), "bytes 95 to 105"),
        ((bytes(100),), "dst is read-only"),
        ((torch.zeros(25, dtype=torch.int32),), "it is float32, dst is int32"),
        ((numpy.zeros(25, dtype=numpy.int32),), "it is float32, dst is int32"),
    ],
)
async def test_what_does_not_fit(arguments: Any, text: str) -> None:
    """Sizes, ranges, dtypes and read-only targets are refused at the call, also in a batch, which is then as it was."""
    source = torch.ones(25)
    buffer = RDMABuffer(source)
    with pytest.raises(BufferMismatch, match=text):
        buffer.read_into(*arguments)
    target = bytearray(100)
    action = RDMAAction().read_into(buffer, target)
    with pytest.raises(BufferMismatch, match=text):
        action.read_into(buffer, *arguments)
    await action.submit()
    assert source.numpy().tobytes() == target
    if "dst is read-only" not in text:
        with pytest.raises(BufferMismatch, match=text.replace("dst", "src")):
            buffer.write_from(*arguments)
    assert 25.0 == source.sum().item()
    await buffer.drop()


async def test_read_only_memory(owner: Any, backend: str) -> None:
    """It can be read, and what would write to it is refused at the call; the owner would refuse it too."""
    buffer = await owner.make_readonly.call_one(b"stays", backend)
    target = bytearray(5)
    await buffer.read_into(target)
    assert b"stays" == target
    with pytest.raises(BufferMismatch, match="read-only"):
        buffer.write_from(b"other")
    with pytest.raises(BufferMismatch, match="read-only"):
        RDMAAction().write_from(buffer, b"other")
    assert b"stays" == await owner.content.call_one(buffer)


async def test_a_dropped_buffer(owner: Any, backend: str) -> None:
    """Whoever drops it, all copies fail from then on, naming the backend; nothing is written; to drop it again is nothing."""
    for drop_by_owner in (False, True):
        buffer = await owner.make.call_one(pattern(5000), backend)
        other = await owner.make.call_one(pattern(5000), backend)
        target = bytearray(5000)
        await buffer.read_into(target)
        await (owner.drop.call_one(buffer) if drop_by_owner else buffer.drop())
        target[:] = bytes(5000)
        with pytest.raises(BufferGone, match=f"read_into of 5000 bytes .* by {backend} failed: it was dropped") as caught:
            await buffer.read_into(target)
        assert backend == caught.value.backend
        with pytest.raises(BufferGone, match="write_from"):
            await buffer.write_from(bytes(5000))
        with pytest.raises(BufferGone, match="and 2 more"):
            await RDMAAction().read_into(other, target).write_from(other, bytes(5000)).read_into(buffer, bytearray(5000)).submit()
        assert bytes(5000) == target
        assert pattern(5000) == await owner.content.call_one(buffer) == await owner.content.call_one(other)
        await buffer.drop()
        await owner.drop.call_one(buffer)


async def test_memory_freed_under_a_buffer(owner: Any, backend: str) -> None:
    """A tensor whose storage is gone is found out by its owner, which is asked before any large copy."""
    buffer = await owner.make_tensor.call_one(torch.ones(2 << 20), backend)
    target = torch.zeros(2 << 20)
    await buffer.read_into(target)
    await owner.free.call_one(buffer)
    target.zero_()
    with pytest.raises(BufferGone, match="storage of its tensor was freed"):
        await buffer.read_into(target)
    with pytest.raises(BufferGone, match="storage of its tensor was freed"):
        await buffer.write_from(torch.ones(2 << 20))
    assert 0.0 == target.sum().item()


async def test_one_of_several_owners_fails(pair: ProcMesh) -> None:
    """The error names what failed; nothing of any other owner's has been written, since all are asked first."""
    one, two = pair.slice(gpus=0).spawn("one", Owner), pair.slice(gpus=1).spawn("two", Owner)
    for backends in [("cma", "tcp"), ("tcp", "cma")]:
        whole = await one.make.call_one(pattern(5000), backends[0])
        gone = await two.make.call_one(pattern(6000), backends[1])
        await gone.drop()
        for first, second in [(whole, gone), (gone, whole)]:
            target = bytearray(6000)
            action = RDMAAction().read_into(first, target, size=5000).read_into(second, target, size=5000).write_from(whole, bytes(5000))
            with pytest.raises(BufferGone, match=rf"buffer {gone._ref.key:016x} of pair\[1\].* by {backends[1]} failed"):
                await action.submit()
            assert bytes(6000) == target
            assert pattern(5000) == await one.content.call_one(whole)


async def test_a_backend_that_can_not_reach(pair: ProcMesh) -> None:
    """One that is asked for by name is used or fails: there is no other way out."""
    owner = pair.slice(gpus=0).spawn("owner", Owner)
    buffer = await owner.make.call_one(b"elsewhere", "local")
    assert "local" == buffer.backend
    with pytest.raises(RDMAError, match=r"by local failed: .* is another process") as caught:
        await buffer.read_into(bytearray(9))
    assert "local" == caught.value.backend
    assert not isinstance(caught.value, (BufferGone, BufferMismatch))


async def test_a_timeout(owner: Any, backend: str) -> None:
    """`CallTimeout`, which is a `TimeoutError`, says what was not done; and no thread copies any more."""
    buffer = await owner.make_zeros.call_one(32 << 20, backend)
    target, last = bytearray(32 << 20), bytearray(b"x")
    action = RDMAAction()
    for _ in range(2000):
        action.read_into(buffer, target)
    action.read_into(buffer, last, size=1)
    with pytest.raises(CallTimeout, match=r"2001 copies: not done within 0.05 s"):
        await action.submit(timeout=0.05)
    assert b"x" == last
    with pytest.raises(TimeoutError, match="read_into"):
        await buffer.read_into(target, timeout=1e-6)
    await buffer.read_into(target, timeout=60.0)


async def test_where_the_system_forbids_it(pair: ProcMesh) -> None:
    """EPERM: another backend does, after one warning; where ``cma`` was asked for by name the error says what the system said."""
    shy, powerless = pair.slice(gpus=0).spawn("shy", Shy), pair.slice(gpus=1).spawn("powerless", Powerless)
    buffers = [await shy.make.call_one(content) for content in (b"first", b"second")]
    backends, contents, warnings = await powerless.refused.call_one(buffers)
    assert ["cma", "cma", "segment", "segment"] == backends
    assert [b"first", b"second"] == contents
    assert b"tsrif" == await shy.content.call_one(buffers[0])
    assert 1 == len([text for text in warnings if "process_vm_readv" in text])
    text = await powerless.forced.call_one(await shy.make.call_one(b"third", "cma"))
    assert f"by cma failed: {OSError(errno.EPERM, 'Operation not permitted').strerror}" in text


async def test_what_a_stranger_asks_for() -> None:
    """An owner checks the range of whatever message comes: `BufferMismatch` there too."""
    buffers, _ = halves()
    buffer = RDMABuffer(bytearray(10))
    with pytest.raises(BufferMismatch, match="10 bytes, and byte 10 was asked for"):
        buffers.find(buffer._ref.key, end=11)
    with pytest.raises(BufferGone):
        buffers.find(buffer._ref.key + 1)
    await buffer.drop()
    await asyncio.sleep(0)
