"""What members are seldom given, and what they do wrong: the rest of what `work` has, in the same way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import torch

from monarch_async import UsageError
from monarch_async.tensor import FP8, CollectiveTimeout
from tests.tensor.members import Member
from tests.tensor.work import check, raises, reference, values

MANY = 20_000
SELDOM = (
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.complex128),
    *(torch.uint16, torch.uint32, torch.uint64),
)


async def strided_everywhere(member: Member) -> None:
    """What is not contiguous goes into, and out of, every operation as what is."""
    comm = member.comm
    me, size = comm.rank, comm.size
    other = 1 % size
    for columns in (3, 90):

        def turned(index: int, salt: int = 0, columns: int = columns) -> torch.Tensor:
            return values(index, (columns, 8 * size), torch.float32, salt).t()

        parts = [turned(index) for index in range(size)]
        for expected, actual in zip(parts, await comm.all_gather(parts[me]), strict=True):
            check(expected, actual, "all_gather")
        for expected, actual in zip(parts, await comm.gather(parts[me], other) or parts, strict=True):
            check(expected, actual, "gather")
        check(parts[me], await comm.scatter(parts if me == 0 else None, 0), "scatter")
        for source, actual in enumerate(await comm.all_to_all([turned(me, target) for target in range(size)])):
            check(turned(source, me), actual, "all_to_all")
        whole = reference("sum", parts)
        check(torch.split(whole, 8)[me], await comm.reduce_scatter(parts[me]), "reduce_scatter")
        rows = [1] * (size - 1) + [7 * size + 1]
        check(torch.split(whole, rows)[me], await comm.reduce_scatter(parts[me], sizes=rows), "uneven reduce_scatter")
        mine = turned(me)
        await comm.reduce(mine, 0)
        check(whole if me == 0 else parts[me], mine, "reduce")
        mine = turned(me)
        await comm.reduce(mine, other, premul=0.5 * (me + 1))
        scaled = reference("sum", [part * 0.5 * (index + 1) for index, part in enumerate(parts)])
        check(scaled if me == other else parts[me], mine, "reduce with a factor")
        if size == 1:
            continue
        after, before, into = (me + 1) % size, (me - 1) % size, torch.zeros(columns, 8 * size).t()
        sent = comm.send(parts[me], after)
        await comm.recv(before, into)
        await sent
        check(parts[before], into, "send and recv")


async def seldom(member: Member) -> None:
    """Types that backends do not have: moved as they are; 8-bit floats are added in float32, unsigned ones of many bits not at all."""
    comm = member.comm
    for dtype in SELDOM:
        for count in (4, MANY):
            parts = [values(index, (count,), torch.float64).to(dtype) for index in range(comm.size)]
            for expected, actual in zip(parts, await comm.all_gather(parts[comm.rank]), strict=True):
                assert expected.dtype == actual.dtype
                assert torch.equal(expected.view(torch.uint8), actual.view(torch.uint8)), dtype
            mine = parts[comm.rank].clone()
            await comm.broadcast(mine, 1 % comm.size)
            assert torch.equal(parts[1 % comm.size].view(torch.uint8), mine.view(torch.uint8)), dtype
            if dtype in (torch.uint16, torch.uint32, torch.uint64):
                for call in (comm.all_reduce, comm.reduce, comm.reduce_scatter):
                    raises(TypeError, "can't be reduced: convert the tensor first", lambda call=call, mine=mine: call(mine))  # type: ignore[misc]
                continue
            exact = reference("sum", parts).to(dtype)
            whole = await comm.all_reduce(parts[comm.rank].clone())
            assert torch.equal(exact.view(torch.uint8), whole.view(torch.uint8)), dtype
            part = await comm.reduce_scatter(parts[comm.rank])
            assert torch.equal(torch.split(exact, count // comm.size)[comm.rank].view(torch.uint8), part.view(torch.uint8)), dtype


async def seen_otherwise(member: Member) -> None:
    """Tensors whose numbers are to be conjugated, or negated, when they are read: what moves is what they are read as."""
    comm = member.comm
    me = comm.rank

    def conjugated(index: int, count: int) -> torch.Tensor:
        return torch.full((count,), complex(1, index + 1)).conj()

    def negated(index: int, count: int) -> torch.Tensor:
        return torch._neg_view(torch.full((count,), float(index + 1)))

    for count in (4, MANY):
        for make in (conjugated, negated):
            parts = [make(index, count) for index in range(comm.size)]
            for expected, actual in zip(parts, await comm.all_gather(parts[me]), strict=True):
                check(expected, actual, "all_gather")
            for expected, actual in zip(parts, await comm.all_to_all([parts[me]] * comm.size), strict=True):
                check(expected, actual, "all_to_all")
            mine = make(me, count)
            await comm.broadcast(mine, 1 % comm.size)
            check(parts[1 % comm.size], mine, "broadcast")
            mine = make(me, count)
            await comm.all_reduce(mine)
            check(reference("sum", parts), mine, "all_reduce")
            check(torch.split(reference("sum", parts), count // comm.size)[me], await comm.reduce_scatter(parts[me]), "reduce_scatter")


async def empty(member: Member) -> None:
    """A reduction of nothing to be divided, and one of which most members get nothing."""
    comm = member.comm
    assert (0, 5) == tuple((await comm.reduce_scatter(torch.empty(0, 5))).shape)
    sizes = [0] * (comm.size - 1) + [3]
    part = await comm.reduce_scatter(torch.ones(3, 2), sizes=sizes)
    assert [[float(comm.size)] * 2] * sizes[comm.rank] == part.tolist()
    async with comm.coalesce():
        pass


async def not_to_be_written(member: Member) -> None:
    """A tensor whose elements are one number is refused where it is called, and the group hears nothing of it; it can be read."""
    comm = member.comm
    one = torch.ones(1).expand(MANY)
    calls: list[Callable[[], object]] = [lambda: comm.all_reduce(one), lambda: comm.reduce(one, comm.rank)]
    other = (comm.rank + 1) % comm.size
    if comm.size > 1:
        calls += [lambda: comm.broadcast(one, other), lambda: comm.recv(other, one)]
    for call in calls:
        raises(UsageError, "clone() it first", call)
    assert [float(comm.size)] * 2 == (await comm.reduce_scatter(torch.ones(1).expand(2 * comm.size))).tolist()


async def coalesced_wrongly(member: Member) -> None:
    """Nothing waits for ever for what begins when the block is left: neither an await, nor a wait for several, nor a thread."""
    comm = member.comm
    try:
        async with comm.coalesce():
            await comm.all_reduce(torch.ones(3))
    except UsageError as error:
        assert "begins when the block is left" in str(error)  # noqa: PT017
    else:
        raise AssertionError("it can't have been done")
    try:
        async with comm.coalesce(timeout=0.2):
            await asyncio.gather(comm.all_reduce(torch.ones(3)), comm.all_reduce(torch.ones(4)))
    except CollectiveTimeout as error:
        assert "was not left within 0.2 s" in str(error)  # noqa: PT017
    else:
        raise AssertionError("it can't have been done")
    late: Any = None
    try:
        async with comm.coalesce(timeout=0.05):
            await asyncio.sleep(0.1)
            late = comm.all_reduce(torch.ones(3))
    except CollectiveTimeout:
        assert isinstance(late.exception(), CollectiveTimeout)
    else:
        raise AssertionError("its time was over")
    async with comm.coalesce():
        raises(UsageError, "leave that block first", lambda: comm.coalesce().__aenter__().send(None))
    await comm.barrier()


async def lines(member: Member) -> list[str]:
    """Where the ledger says that the last operations were called: in a thread, with others, and in steps."""
    comm = member.comm
    await asyncio.to_thread(lambda: comm.all_reduce(torch.ones(MANY)).get())
    async with comm.coalesce():
        comm.all_reduce(torch.ones(MANY))
    await comm.all_reduce(torch.ones(MANY), compress=FP8())
    await comm.barrier()
    return [entry.line.partition(":")[0] for entry in comm.ledger()[-5:]]
