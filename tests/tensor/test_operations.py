"""Every operation for every dtype, among four, three and two members, against a reference in double precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from monarch_async import ProcMesh
from tests.tensor import odd, work
from tests.tensor.members import Member, OverGloo

Spawn = Callable[..., tuple[ProcMesh, Any]]


@pytest.mark.parametrize("kind", [Member, OverGloo])
async def test_every_operation(spawn: Spawn, kind: type[Member]) -> None:
    """Reductions, movements, even and uneven, empty, single numbers, strided; of the whole mesh, along its dimensions and of a subset."""
    _, members = spawn({"dp": 2, "tp": 2}, kind=kind)
    assert {0} == set((await members.run.call(epoch)).values())
    assert 1 == len(set((await members.run.call(work.reductions, "all")).values()))
    assert 1 == len(set((await members.run.call(work.movements, "all")).values()))
    assert 1 == len(set((await members.run.call(work.scattered_reductions, "all")).values()))
    for which in ("dp", "tp"):
        await members.run.call(work.movements, which)
    three = members.flatten("rank").slice(rank=slice(1, 4))
    await three.run.call(work.reductions, [1, 2, 3])
    await three.run.call(work.scattered_reductions, [1, 2, 3])
    for function in (work.strided, work.point_to_point, work.coalesced, work.at_once):
        await members.run.call(function)
    assert [[0, 2], [1, 3], [0, 2], [1, 3]] == list((await members.run.call(ranks, "dp")).values())
    assert [[0, 1], [0, 1], [2, 3], [2, 3]] == list((await members.run.call(ranks, "tp")).values())
    for function in (odd.strided_everywhere, odd.seldom, odd.seen_otherwise, odd.empty, odd.not_to_be_written, odd.coalesced_wrongly):
        await members.run.call(function)
    assert [["odd.py"] * 5] * 4 == list((await members.run.call(odd.lines)).values())
    await members.run.call(refused)
    assert {0} == set((await members.run.call(epoch)).values())


ALONE = (
    *(odd.strided_everywhere, odd.seldom, odd.seen_otherwise, odd.empty, odd.not_to_be_written, odd.coalesced_wrongly),
    *(work.strided, work.coalesced),
)


async def test_alone(spawn: Spawn) -> None:
    """A group of one does all that the others do."""
    _, members = spawn({"gpus": 1})
    for whole in (work.reductions, work.movements, work.scattered_reductions):
        await members.run.call(whole, "all")
    for function in ALONE:
        await members.run.call(function)


async def epoch(member: Member) -> int:
    return await member.comm.ready()


async def ranks(member: Member, which: str) -> list[int]:
    assert member.comm[which] is member.comm[which]
    assert member.comm is member.comm["dp", "tp"]
    assert [which] == list(member.comm[which].extent.labels)
    return list(member.comm[which].ranks)


async def refused(member: Member) -> None:
    """Wrong arguments raise at the call, and the group does not hear of them."""
    comm = member.comm
    whole = torch.ones(3, dtype=torch.int64)
    work.raises(TypeError, "a mean of torch.int64 would be no whole number", lambda: comm.all_reduce(whole, "mean"))
    work.raises(TypeError, "a sum of bool means nothing", lambda: comm.all_reduce(whole > 0, "sum"))
    work.raises(TypeError, "a dense tensor is wanted", lambda: comm.all_reduce(whole.to_sparse()))
    work.raises(TypeError, "moves tensors on 'cpu', and this one is on meta", lambda: comm.all_reduce(whole.to("meta")))
    work.raises(ValueError, "", lambda: int("x"))
    work.raises(Exception, "'avg' is no reduction: use 'sum'", lambda: comm.all_reduce(whole, "avg"))  # type: ignore[arg-type]
    work.raises(Exception, "the members 0 to 3, and no 4", lambda: comm.broadcast(whole, 4))
    work.raises(Exception, "that is this member itself", lambda: comm.send(whole, comm.rank))
    work.raises(Exception, "takes a tensor for each of the 4 members", lambda: comm.all_to_all([whole]))
    work.raises(Exception, "3 rows can't be split evenly among 4", lambda: comm.reduce_scatter(whole))
    work.raises(Exception, "do not split 3 rows", lambda: comm.reduce_scatter(whole, sizes=[1, 1, 1, 1]))
    work.raises(KeyError, "and no 'pp'", lambda: comm["pp"])
    work.raises(Exception, "with rank", lambda: comm.subset([5]))
