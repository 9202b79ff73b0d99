"""What torch makes of our groups: DDP, FSDP, DTensor and DeviceMesh take them, of more than one mesh in a process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from monarch_async import ProcMesh, UsageError, endpoint
from monarch_async.actor import Actor
from monarch_async.tensor import Communicator, TensorActor, communicator
from tests.tensor.members import Member

Spawn = Callable[..., tuple[ProcMesh, Any]]


async def epoch(member: Member) -> int:
    return await member.comm.ready()


def _model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def _data(index: int) -> torch.Tensor:
    return torch.arange(12, dtype=torch.float32).view(2, 6) / 10 + index


async def with_ddp(member: Member) -> bool:
    """Gradients are the mean of what the members' own would be."""
    comm = member.comm
    await comm.ready()
    plain = [_model() for _ in range(comm.size)]
    for index, model in enumerate(plain):
        model(_data(index)).sum().backward()

    def train() -> torch.nn.Module:
        model = DistributedDataParallel(_model(), process_group=comm.process_group)
        model(_data(comm.rank)).sum().backward()
        return model

    model = await asyncio.to_thread(train)
    for place, parameter in enumerate(model.parameters()):
        grads = [list(other.parameters())[place].grad for other in plain]
        expected = torch.stack([grad for grad in grads if grad is not None]).mean(0)
        assert parameter.grad is not None
        assert torch.allclose(expected, parameter.grad, atol=1e-5)
    return True


def full(tensor: Any) -> torch.Tensor:
    gathered: torch.Tensor = tensor.full_tensor()
    return gathered


async def with_dtensor(member: Member) -> bool:
    """A mesh of two dimensions with our names; DTensors over both, and over one."""
    mesh = await member.comm.device_mesh()
    assert ("dp", "tp") == mesh.mesh_dim_names
    assert (2, 2) == tuple(mesh.shape)
    assert [[0, 1], [2, 3]] == mesh.mesh.tolist()
    assert member.rank == mesh.get_rank()
    assert [member.rank // 2, member.rank % 2] == list(mesh.get_coordinate() or ())
    assert member.comm["tp"].process_group is mesh.get_group("tp")

    def work() -> bool:
        whole = torch.arange(32, dtype=torch.float32).view(8, 4)
        both = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
        assert (4, 2) == tuple(both.to_local().shape)
        assert torch.equal(whole, full(both))
        assert whole.sum() == full(both.sum())
        rows = distribute_tensor(whole, mesh["tp"], [Shard(1)])
        product = rows @ DTensor.from_local(torch.eye(4), mesh["tp"], [Replicate()])
        assert torch.equal(whole, full(product))
        return True

    return await asyncio.to_thread(work)


async def with_fsdp(member: Member) -> bool:
    """Parameters are sharded over one of the dimensions, and gradients are right."""
    mesh = (await member.comm.device_mesh())["dp"]

    def work() -> bool:
        plain, sharded = _model(), _model()
        fully_shard(sharded, mesh=mesh)
        for index in range(2):
            plain(_data(index)).sum().backward()
        sharded(_data(mesh.get_local_rank())).sum().backward()
        for expected, actual in zip(plain.parameters(), sharded.parameters(), strict=True):
            assert isinstance(actual.grad, DTensor)
            assert expected.grad is not None
            assert torch.allclose(expected.grad / 2, actual.grad.full_tensor(), atol=1e-5)
        return True

    return await asyncio.to_thread(work)


async def plainly(member: Member) -> list[float]:
    """torch's own functions, with the default group."""
    tensor = torch.ones(2)

    def work() -> None:
        dist.all_reduce(tensor)
        dist.barrier()

    await asyncio.to_thread(work)
    assert dist.get_world_size() == member.comm.size
    return tensor.tolist()


class Other(TensorActor):
    """Of another mesh in the same processes."""

    @endpoint
    async def total(self) -> float:
        tensor = torch.ones(2000)
        await self.comm.all_reduce(tensor)
        return tensor[0].item()

    @endpoint
    def total_in_a_thread(self) -> float:
        tensor = torch.ones(2000)
        return self.comm.all_reduce(tensor).get()[0].item()

    @endpoint
    async def mesh_ranks(self) -> list[int]:
        mesh = await self.comm.device_mesh()
        numbers: list[int] = mesh.mesh.tolist()
        return numbers


class Plain(Actor):
    """No tensor actor."""

    @endpoint
    async def total(self, mesh: Any) -> tuple[int, float]:
        comm: Communicator = await communicator(mesh)
        tensor = torch.ones(2000)
        await comm.all_reduce(tensor)
        return comm.size, tensor[0].item()


async def test_torch_takes_our_groups(spawn: Spawn) -> None:
    """DDP, FSDP, DTensor, torch's own functions; meshes of several classes side by side in the same processes; groups outside a class."""
    procs, members = spawn({"dp": 2, "tp": 2})
    assert {0} == set((await members.run.call(epoch)).values())
    for function in (with_ddp, with_dtensor, with_fsdp):
        assert [True] * 4 == list((await members.run.call(function)).values())
    assert [[4.0, 4.0]] * 4 == list((await members.run.call(plainly)).values())

    half = procs.slice(dp=1)
    others, plain = half.spawn("others", Other), procs.spawn("plain", Plain)
    sums = others.total.call()
    assert [True] * 4 == list((await members.run.call(with_ddp)).values())
    assert [2.0] * 2 == list((await sums).values())
    assert [2.0] * 2 == list((await others.total_in_a_thread.call()).values())
    assert [[2, 3]] * 2 == list((await others.mesh_ranks.call()).values())
    assert [(4, 4.0)] * 4 == list((await plain.total.call(plain)).values())
    column = plain.slice(tp=1)
    assert [(2, 2.0)] * 2 == list((await column.total.call(column)).values())
    try:
        await communicator(plain)
    except UsageError as error:
        assert "only an actor has a communicator" in str(error)  # noqa: PT017
    else:
        raise AssertionError("the program itself is no member")
    await others.stop()
    assert [[4.0, 4.0]] * 4 == list((await members.run.call(plainly)).values())
