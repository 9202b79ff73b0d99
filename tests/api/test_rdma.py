"""One-sided copies: every way to make one, both directions, all kinds of memory, batches."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import numpy
import pytest
import torch

from monarch_async import (
    BufferGone,
    ProcMesh,
    RDMAAction,
    RDMABuffer,
    RDMAError,
    configure,
    shared_buffer,
    shutdown_context,
    this_host,
    this_proc,
)
from monarch_async.ambient import current_runtime
from monarch_async.options import Options
from tests.api.owners import Owner, pattern

SMALL, LARGE = 5000, 40 << 20
"""Bytes that are copied at once, and bytes that are copied in slices, or pieces, with a rest."""


@pytest.mark.parametrize("size", [SMALL, LARGE + 777])
async def test_read_and_write(owner: Any, backend: str, size: int) -> None:
    """The whole of a buffer, and parts of it from any byte to any byte; what was not asked for is left alone."""
    content = pattern(size)
    buffer = await owner.make.call_one(content, backend)
    assert (backend, size) == (buffer.backend, buffer.size)
    target = bytearray(size)
    await buffer.read_into(target)
    assert content == target
    part = bytearray(b"-" * 1000)
    await buffer.read_into(part, offset=size - 1000)
    assert content[-1000:] == part
    await buffer.read_into(part, offset=3, size=10)
    assert content[3:13] + content[-990:] == part
    await buffer.read_into(part, size=1)
    assert content[:1] == part[:1]

    await buffer.write_from(target[::-1])
    expected = bytearray(content[::-1])
    assert expected == await owner.content.call_one(buffer)
    await buffer.write_from(b"some bytes", offset=1001)
    await buffer.write_from(b"no more than two", offset=size - 2, size=2)
    await buffer.write_from(b"first", size=5)
    expected[1001:1011], expected[-2:], expected[:5] = b"some bytes", b"no", b"first"
    assert expected == await owner.content.call_one(buffer)
    await buffer.read_into(bytearray(), offset=size)
    await buffer.write_from(b"", offset=7)
    assert expected == await owner.content.call_one(buffer)


@pytest.mark.parametrize("backend", ["local", "cma", "segment", "tcp"])
async def test_shared_memory_of_this_process(backend: str) -> None:
    """By every way by name, also of memory that only may be read."""
    content = pattern(3 << 20)
    memory = shared_buffer(len(content))
    memory[:] = content
    for what in (memory, memory.toreadonly()):
        target = bytearray(len(content))
        await RDMABuffer(what, backend=backend).read_into(target)
        assert content == target


async def test_tensors_and_arrays(owner: Any, backend: str) -> None:
    """Every kind of memory on either side: what matters is dtype and size, and a tensor keeps its values.

    Weights are read into a leaf that requires grad, and stay one.
    """
    tensor = torch.arange(6000, dtype=torch.float32).reshape(60, 100)
    buffer = await owner.make_tensor.call_one(tensor, backend)
    assert ("float32", (60, 100), 24000) == (buffer.dtype, buffer.shape, buffer.size)
    target = torch.zeros(60, 100)
    await buffer.read_into(target)
    assert torch.equal(tensor, target)
    array = numpy.zeros(6000, dtype=numpy.float32)
    await buffer.read_into(array)
    assert tensor.flatten().tolist() == array.tolist()
    row = torch.zeros(100)
    await buffer.read_into(row, offset=3 * 400)
    assert torch.equal(tensor[3], row)
    await buffer.write_from(tensor[5], offset=7 * 400)
    await buffer.read_into(target[1], offset=7 * 400)
    assert torch.equal(tensor[5], target[1])
    plain = bytearray(24000)
    await buffer.read_into(memoryview(plain)[:400], size=400)
    assert plain[:400] == tensor[0].numpy().tobytes()
    halves = torch.ones(10, dtype=torch.bfloat16)
    other = await owner.make_tensor.call_one(torch.zeros(10, dtype=torch.bfloat16), backend)
    await other.write_from(halves)
    back = torch.zeros(10, dtype=torch.bfloat16)
    await other.read_into(back)
    assert torch.equal(halves, back)
    weights = await owner.make_tensor.call_one(torch.full((4, 4), 3.0), backend)
    parameter = torch.nn.Parameter(torch.zeros(4, 4))
    await weights.read_into(parameter)
    assert (48.0, True) == (parameter.sum().item(), parameter.requires_grad)


async def test_a_batch(owner: Any, backend: str) -> None:
    """Many copies of both directions between several buffers, small and large, in one action, which may be submitted again."""
    sizes = [1, 17, 4096, 300_000, 3 << 20] * 3
    sources = [await owner.make.call_one(pattern(size), backend) for size in sizes]
    sinks = [await owner.make_zeros.call_one(size, backend) for size in sizes]
    targets = [bytearray(size) for size in sizes]
    action = RDMAAction()
    for source, target, sink in zip(sources, targets, sinks, strict=True):
        assert action is action.read_into(source, target).write_from(sink, pattern(sink.size)[::-1])
    for _ in range(2):
        await action.submit()
        assert [pattern(size) for size in sizes] == targets
        assert [pattern(size)[::-1] for size in sizes] == [await owner.content.call_one(sink) for sink in sinks]
        for target in targets:
            target[:] = bytes(len(target))
    await RDMAAction().submit()


async def test_very_many_in_a_batch(owner: Any, backend: str) -> None:
    """More pieces than one system call takes."""
    content = pattern(5000)
    buffer = await owner.make.call_one(content, backend)
    target = bytearray(5000)
    action = RDMAAction()
    for start in range(0, 5000, 2):
        action.read_into(buffer, memoryview(target)[start : start + 2], offset=start)
    await action.submit()
    assert content == target


async def test_several_owners_in_a_batch(pair: ProcMesh) -> None:
    """Two processes, and this one, by different backends at the same time."""
    owners = [pair.slice(gpus=0).spawn("one", Owner), pair.slice(gpus=1).spawn("two", Owner), this_proc().spawn("three", Owner)]
    makes = zip(owners, [None, "tcp", None], strict=True)
    buffers = [await owner.make.call_one(pattern(LARGE), backend) for owner, backend in makes]
    assert ["cma", "tcp", "local"] == [buffer.backend for buffer in buffers]
    targets = [bytearray(LARGE) for _ in buffers]
    action = RDMAAction()
    for buffer, target in zip(buffers, targets, strict=True):
        action.read_into(buffer, target)
    await action.submit()
    assert [pattern(LARGE)] * 3 == targets


async def test_a_buffer_travels(pair: ProcMesh) -> None:
    """It is small, equal to itself wherever it has been, and used alike in actors, in their threads, and by the owner."""
    owner, other = pair.slice(gpus=0).spawn("owner", Owner), pair.slice(gpus=1).spawn("other", Owner)
    buffer = await owner.make_in_thread.call_one(b"bytes of the owner")
    assert len(pickle.dumps(buffer)) < 500
    assert {buffer} == {pickle.loads(pickle.dumps(buffer))}
    assert b"bytes of the owner" == await other.read.call_one(buffer)
    assert b"bytes of the owner" == await other.read_in_thread.call_one(buffer)
    assert b"bytes of the owner" == await owner.read.call_one(buffer)
    mine = RDMABuffer(bytearray(b"bytes of the program"))
    assert b"bytes of the program" == await other.read.call_one(mine)
    assert "local" == mine.backend
    assert "bytes" in repr(mine)
    await mine.drop()


async def test_overlapping_memory_of_one_process() -> None:
    """A copy within one array moves it, wherever the slices of the copy end."""
    array = numpy.arange(LARGE // 4, dtype=numpy.uint32)
    buffer = RDMABuffer(array[:-1000])
    await buffer.read_into(array[1000:])
    assert numpy.array_equal(numpy.arange(LARGE // 4 - 1000, dtype=numpy.uint32), array[1000:])
    await buffer.drop()


@pytest.mark.parametrize("name", ["cma", "segment", "tcp"])
async def test_the_option_chooses_the_backend(name: str) -> None:
    """What the option names is used for buffers that name nothing, and is named when it fails."""
    configure(rdma_backend=name)
    try:
        owner = this_host().spawn_procs().spawn("owner", Owner)
        buffer = await owner.make.call_one(b"by whatever is named")
        assert name == buffer.backend
        target = bytearray(20)
        await buffer.read_into(target)
        assert b"by whatever is named" == target
        await buffer.drop()
        with pytest.raises(BufferGone, match=f"by {name} failed") as caught:
            await buffer.read_into(target)
        assert name == caught.value.backend
        other = "segment" if name == "cma" else "cma"
        assert other == (await owner.make.call_one(b"", other)).backend
    finally:
        configure(rdma_backend=Options().rdma_backend)


async def test_an_option_that_can_not_be_followed() -> None:
    """It fails by its name, and nothing else is tried; a name that is none is refused."""
    configure(rdma_backend="local")
    try:
        buffer = await this_host().spawn_procs().spawn("owner", Owner).make.call_one(b"elsewhere")
        target = bytearray(9)
        with pytest.raises(RDMAError, match=r"by local failed: .* is another process") as caught:
            await buffer.read_into(target)
        assert "local" == caught.value.backend
        assert bytes(9) == target
    finally:
        configure(rdma_backend=Options().rdma_backend)
    with pytest.raises(ValueError, match="local, cma"):
        configure(rdma_backend="carrier pigeon")
    with pytest.raises(ValueError, match="local, cma"):
        RDMABuffer(bytearray(1), backend="carrier pigeon")


async def test_a_batch_asks_its_owner_once(owner: Any, backend: str) -> None:
    """Of hundreds of small copies to and from as many buffers: whether all are there, then what is read, and what is written."""
    buffers = [await owner.make.call_one(bytes([number]) * 100, backend) for number in range(200)]
    targets = [bytearray(100) for _ in buffers[:100]]
    action = RDMAAction()
    for buffer, target in zip(buffers, targets, strict=False):
        action.read_into(buffer, target)
    for buffer in buffers[100:]:
        action.write_from(buffer, b"w" * 100)
    requests = current_runtime().requests
    before = next(requests)
    await action.submit()
    asked = next(requests) - before - 1
    assert {"local": 0, "cma": 1, "segment": 3, "tcp": 3}[backend] == asked
    assert [bytes([number]) * 100 for number in range(100)] == targets
    assert b"w" * 100 == await owner.content.call_one(buffers[-1])


async def test_calls_pass_a_large_copy(owner: Any, backend: str) -> None:
    """While gigabytes are copied the owner answers, and this loop goes round: twenty calls are over first."""
    buffer = await owner.make_zeros.call_one(32 << 20, backend)
    target = bytearray(32 << 20)
    action = RDMAAction()
    for _ in range(1000):
        action.read_into(buffer, target)
    copying = action.submit()
    for _ in range(20):
        await owner.rank.call_one()
    assert not copying.done()
    copying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await copying


def test_without_a_loop() -> None:
    """A synchronous program blocks on what an asynchronous one awaits."""
    owner = this_host().spawn_procs().spawn("owner", Owner)
    buffer = owner.make.call_one(b"here it is").get()
    target = bytearray(10)
    buffer.read_into(target).get()
    assert b"here it is" == target
    mine = RDMABuffer(bytearray(b"of a script"))
    assert b"of a script" == owner.read.call_one(mine).get()
    mine.write_from(b"OF", size=2).get()
    assert b"OF a script" == owner.read_in_thread.call_one(mine).get()
    mine.drop().get()
    shutdown_context().get()
