"""What members of a mesh do in tests: functions that they are sent, and that compare with a reference in double precision."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import torch

from monarch_async.tensor import Communicator
from tests.tensor.members import Member

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WHOLE = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
DTYPES = (*FLOATS, *WHOLE, torch.bool, torch.complex64)
SHAPES = ((), (0,), (0, 3), (5,), (3, 4), (40, 33), (300, 220))
"""A single number, nothing, little, what goes in the announcement between hosts only, and what is too much for it."""
TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 4e-2, torch.float32: 1e-5, torch.complex64: 1e-5}


def values(index: int, shape: tuple[int, ...], dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """What member `index` brings: small numbers, the same for whoever asks."""
    count = math.prod(shape)
    numbers = (torch.arange(count, dtype=torch.float64) * 7 + index * 3 + salt) % 5
    if dtype is torch.bool:
        return (numbers > 2).view(shape)
    if dtype.is_floating_point:
        numbers = numbers / 4 + 0.5
    return numbers.view(shape).to(dtype)


def check(expected: torch.Tensor, actual: torch.Tensor, what: object) -> None:
    assert expected.shape == actual.shape, (what, expected.shape, actual.shape)
    wide = torch.complex128 if expected.is_complex() or actual.is_complex() else torch.float64
    tolerance = TOLERANCE.get(actual.dtype, 0.0)
    assert torch.allclose(expected.to(wide), actual.to(wide), rtol=tolerance, atol=tolerance), (what, expected, actual)


def reference(op: str, parts: list[torch.Tensor]) -> torch.Tensor:
    wide = torch.complex128 if parts[0].is_complex() else torch.float64
    stacked = torch.stack([part.to(wide) for part in parts])
    if op == "sum":
        return stacked.sum(0)
    if op == "mean":
        return stacked.mean(0)
    if op == "product":
        return stacked.prod(0)
    return stacked.amin(0) if op == "min" else stacked.amax(0)


def reductions_of(dtype: torch.dtype) -> tuple[str, ...]:
    if dtype is torch.bool:
        return ("min", "max")
    if dtype.is_complex:
        return ("sum", "mean")
    return ("sum", "min", "max", "product", *(("mean",) if dtype.is_floating_point else ()))


def group_of(member: Member, which: Any) -> Communicator:
    if which == "all":
        return member.comm
    if isinstance(which, list):
        return member.comm.subset(which)
    return member.comm[which]


async def reductions(member: Member, which: Any) -> int:
    """Every reduction, in place and to one, for every dtype and shape."""
    comm, count = group_of(member, which), 0
    for dtype in DTYPES:
        for shape in SHAPES:
            parts = [values(index, shape, dtype) for index in range(comm.size)]
            for op in reductions_of(dtype):
                expected = reference(op, parts)
                mine = parts[comm.rank].clone()
                assert mine is await comm.all_reduce(mine, op)  # type: ignore[arg-type]
                check(expected, mine, (op, dtype, shape))
                to = comm.size - 1
                mine = parts[comm.rank].clone()
                await comm.reduce(mine, to, op)  # type: ignore[arg-type]
                check(expected if comm.rank == to else parts[comm.rank], mine, ("reduce", op, dtype, shape))
                count += 2
            if dtype.is_floating_point:
                mine = parts[comm.rank].clone()
                await comm.all_reduce(mine, premul=0.5 * (comm.rank + 1))
                scaled = [part.double() * 0.5 * (index + 1) for index, part in enumerate(parts)]
                check(reference("sum", scaled), mine, ("premul", dtype, shape))
    return count


async def movements(member: Member, which: Any) -> int:
    """Everything that moves tensors as they are, for every dtype and shape, even and uneven."""
    comm, count = group_of(member, which), 0
    me, size = comm.rank, comm.size
    for dtype in DTYPES:
        for shape in SHAPES:
            parts = [values(index, shape, dtype) for index in range(size)]
            mine = parts[me].clone()
            await comm.broadcast(mine, size - 1)
            check(parts[-1], mine, ("broadcast", dtype, shape))
            for expected, actual in zip(parts, await comm.all_gather(parts[me]), strict=True):
                check(expected, actual, ("all_gather", dtype, shape))
            gathered = await comm.gather(parts[me], 0)
            assert (gathered is not None) == (me == 0)
            for expected, actual in zip(parts, gathered or parts, strict=True):
                check(expected, actual, ("gather", dtype, shape))
            check(parts[me], await comm.scatter(parts if me == 0 else None, 0), ("scatter", dtype, shape))
            sent = [[values(source, shape, dtype, target) for target in range(size)] for source in range(size)]
            for source, actual in enumerate(await comm.all_to_all(sent[me])):
                check(sent[source][me], actual, ("all_to_all", dtype, shape))
            count += 5
        count += await _uneven(comm, dtype)
    return count


async def _uneven(comm: Communicator, dtype: torch.dtype) -> int:
    me, size = comm.rank, comm.size
    for width in (2, 700):
        parts = [values(index, (index, width), dtype) for index in range(size)]
        for expected, actual in zip(parts, await comm.all_gather(parts[me]), strict=True):
            check(expected, actual, ("uneven all_gather", dtype))
        for expected, actual in zip(parts, await comm.gather(parts[me], size - 1) or parts, strict=True):
            check(expected, actual, ("uneven gather", dtype))
        check(parts[me], await comm.scatter(parts if me == 1 % size else None, 1 % size), ("uneven scatter", dtype))
        sent = [[values(source, (source, target, width), dtype) for target in range(size)] for source in range(size)]
        for source, actual in enumerate(await comm.all_to_all(sent[me])):
            check(sent[source][me], actual, ("uneven all_to_all", dtype))
    return 8


async def scattered_reductions(member: Member, which: Any) -> int:
    """reduce_scatter, even and uneven."""
    comm, count = group_of(member, which), 0
    me, size = comm.rank, comm.size
    for dtype in DTYPES:
        for op in reductions_of(dtype):
            for sizes in (None, list(range(size))):
                rows = sum(sizes) if sizes else 2 * size
                parts = [values(index, (rows, 7), dtype) for index in range(size)]
                whole = reference(op, parts)
                expected = torch.split(whole, sizes or 2)[me]
                check(expected, await comm.reduce_scatter(parts[me], op, sizes=sizes), (op, dtype, sizes))  # type: ignore[arg-type]
                count += 1
    return count


async def strided(member: Member) -> None:
    """Tensors that are not contiguous, and parameters, are changed in place as others are."""
    comm = member.comm
    for rows in (4, 90):
        wide = values(comm.rank, (rows, 6), torch.float32)
        column, before = wide[:, ::2], wide.clone()
        await comm.all_reduce(column)
        check(reference("sum", [values(index, (rows, 6), torch.float32)[:, ::2] for index in range(comm.size)]), column, "column")
        check(before[:, 1::2], wide[:, 1::2], "what lies between")
        turned = values(comm.rank, (rows, 50), torch.float32).t()
        source = 1 % comm.size
        await comm.broadcast(turned, source)
        check(values(source, (rows, 50), torch.float32).t(), turned, "transposed")
        parameter = torch.nn.Parameter(values(comm.rank, (rows, 50), torch.float32))
        await comm.all_reduce(parameter, "mean")
        check(reference("mean", [values(index, (rows, 50), torch.float32) for index in range(comm.size)]), parameter.detach(), "parameter")


async def point_to_point(member: Member) -> None:
    """Round the ring, several at once, into given tensors and new ones; objects too; in order."""
    comm = member.comm
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for shape in ((), (0,), (3,), (300, 300)):
        sent = [comm.send(values(comm.rank, shape, torch.bfloat16, turn), after) for turn in range(3)]
        into = torch.empty(shape, dtype=torch.bfloat16)
        check(values(before, shape, torch.bfloat16, 0), await comm.recv(before, into), shape)
        check(values(before, shape, torch.bfloat16, 0), into, shape)
        for turn in (1, 2):
            check(values(before, shape, torch.bfloat16, turn), await comm.recv(before), shape)
        await asyncio.gather(*sent)
    for turn in range(3):
        comm.send_object({"from": comm.rank, "turn": turn}, after)
    assert [{"from": before, "turn": turn} for turn in range(3)] == [await comm.recv_object(before) for turn in range(3)]


async def coalesced(member: Member) -> None:
    """Several at once: results are those of each."""
    comm = member.comm
    small, large = torch.ones(3), torch.full((2000,), float(comm.rank))
    async with comm.coalesce():
        first = comm.all_reduce(small)
        second = comm.all_reduce(large, "max")
        third = comm.all_gather(torch.tensor([comm.rank]))
        assert not first.done()
    assert small is first.result()
    assert [float(comm.size)] * 3 == small.tolist()
    check(torch.full((2000,), float(comm.size - 1)), second.result(), "coalesced")
    assert list(range(comm.size)) == [int(part) for part in third.result()]


async def at_once(member: Member) -> None:
    """Many under way, of two groups that lie across each other, in another order of the groups at every other member."""
    rows, columns = member.comm["dp"], member.comm["tp"]
    await rows.ready()
    await columns.ready()
    futures = []
    for turn in range(20):
        both = [(rows, turn), (columns, 100 + turn)]
        for comm, number in both if member.rank % 2 else both[::-1]:
            futures.append((comm, number, comm.all_reduce(torch.full((600,), float(number)))))
    for comm, number, future in futures:
        check(torch.full((600,), float(number * comm.size)), await future, number)


def raises(kind: type[BaseException], text: str, call: Callable[[], object]) -> None:
    try:
        call()
    except kind as error:
        told = str(error)
    else:
        told = "nothing was raised"
    assert text in told, told
