"""What becomes of DDP, of a device mesh and of torch's default group when the group that they are of forms anew."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from monarch_async import ProcMesh, Restart
from monarch_async.tensor import CollectiveError, PeerLost
from tests.tensor.members import Member

Spawn = Callable[..., tuple[ProcMesh, Any]]


def _gradient(model: torch.nn.Module, factor: float) -> float:
    """Of a weight, when the input is `factor`."""
    for parameter in model.parameters():
        parameter.grad = None
    model(torch.full((1, 1), factor)).sum().backward()
    gradients = [float(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    return gradients[0]


async def make(member: Member) -> float:
    """A model and a device mesh of this epoch, and its gradient: the mean of the ranks and one."""
    await member.comm.ready()
    model = torch.nn.Linear(1, 1, bias=False)
    member.state["ddp"] = ddp = await asyncio.to_thread(DistributedDataParallel, model, process_group=member.comm.process_group)
    member.state["group"] = member.comm.process_group
    return await asyncio.to_thread(_gradient, ddp, member.rank + 1.0)


async def endless(member: Member) -> float:
    """Steps until one fails; when that was."""

    def steps() -> float:
        try:
            while True:
                _gradient(member.state["ddp"], 1.0)
                member.state["stepped"] = True
        except Exception:  # whatever gloo says
            return time.monotonic()

    return await asyncio.to_thread(steps)


async def stepping(member: Member) -> None:
    while "stepped" not in member.state:  # noqa: ASYNC110  # another thread does it
        await asyncio.sleep(0.01)


async def die(member: Member) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def old_one(member: Member) -> tuple[bool, bool]:
    """Whether the model of the last epoch raises, and does not wait; and whether torch has forgotten its group."""
    try:
        await member.comm.barrier()
    except (PeerLost, CollectiveError):
        await member.comm.ready()
    raised = False
    try:
        async with asyncio.timeout(10):
            await asyncio.to_thread(_gradient, member.state["ddp"], 1.0)
    except TimeoutError:
        raise
    except Exception:  # whatever torch or gloo says of a group that is over
        raised = True
    old = member.state["group"]
    return raised, old not in dist.distributed_c10d._world.pg_map and dist.group.WORLD is not old


async def with_mesh(member: Member) -> list[float]:
    """A device mesh of the new epoch, and torch's own functions."""
    await member.comm.ready()
    mesh = await member.comm.device_mesh()

    def work() -> list[float]:
        whole: Any = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        return [float(whole.sum().full_tensor()), float(tensor)]

    return await asyncio.to_thread(work)


async def test_what_was_made_of_an_epoch_that_is_over(spawn: Spawn) -> None:
    """A model of a group whose member is killed raises, at once, and again whenever it is used; one of the next epoch is right."""
    _, members = spawn({"gpus": 2}, restart=Restart(max_restarts=3, within=60))
    assert [1.5, 1.5] == list((await members.run.call(make)).values())
    first = members.slice(gpus=0)
    steps = members.aside.options(return_exceptions=True).call(endless)
    await members.aside.call(stepping)
    killed = time.monotonic()
    await members.slice(gpus=1).aside.options(return_exceptions=True).call(die)
    ended, _ = (await steps).values()
    assert ended - killed < 2.0
    assert (True, True) == await first.run.call_one(old_one)
    assert [1.5, 1.5] == list((await members.run.call(make)).values())
    assert [[6.0, 2.0]] * 2 == list((await members.run.call(with_mesh)).values())
