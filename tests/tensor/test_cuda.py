"""The same over NCCL, where there are devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from monarch_async import context, this_host
from tests.tensor.members import Member
from tests.tensor.work import check, reference, values

pytestmark = pytest.mark.cuda


class OnDevice(Member):
    """On the device of its rank."""

    comm_backend = "nccl"

    def __init__(self) -> None:
        super().__init__()
        torch.cuda.set_device(context().actor_instance.rank.rank)


async def sums(member: Member) -> int:
    comm = member.comm
    device = torch.device("cuda", torch.cuda.current_device())
    parts = [values(index, (50, 50), torch.float32) for index in range(comm.size)]
    for op in ("sum", "mean", "max"):
        mine = parts[comm.rank].to(device)
        await comm.all_reduce(mine, op)
        check(reference(op, parts), mine.cpu(), op)
    for expected, actual in zip(parts, await comm.all_gather(parts[comm.rank].to(device)), strict=True):
        check(expected, actual.cpu(), "all_gather")
    scattered = await comm.reduce_scatter(torch.ones(comm.size, 3, device=device))
    check(torch.full((1, 3), float(comm.size)), scattered.cpu(), "reduce_scatter")
    return await comm.ready()


@pytest.mark.parametrize("rounds", [2])
async def test_operations_on_devices(rounds: int) -> None:
    """Reductions and gathering on as many devices as there are, two at most, and twice."""
    count = min(2, torch.cuda.device_count())
    procs = this_host().spawn_procs({"gpus": count})
    members: Any = procs.spawn("members", OnDevice)
    for _ in range(rounds):
        assert {0} == set((await members.run.call(sums)).values())
