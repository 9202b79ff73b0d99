"""Groups of a mesh with three dimensions, eight processes: along any of them, of slices, and in each other's callbacks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from monarch_async import Actor, ProcMesh, UsageError, endpoint
from monarch_async.tensor import CollectiveTimeout, Communicator, communicator
from tests.tensor.members import Member

Spawn = Callable[..., tuple[ProcMesh, Any]]
MANY = 20_000


async def total(comm: Communicator, rank: int) -> int:
    """The sum of 2 ** rank: which members took part."""
    tensor = torch.full((MANY,), 2 ** float(rank))
    await comm.all_reduce(tensor)
    assert bool((tensor == tensor[0]).all())
    return int(tensor[0])


def bits(ranks: list[int]) -> int:
    return sum(2**rank for rank in ranks)


EXPECTED: dict[tuple[str, ...], list[list[int]]] = {
    ("pp",): [[0, 4], [1, 5], [2, 6], [3, 7]],
    ("dp",): [[0, 2], [1, 3], [4, 6], [5, 7]],
    ("tp",): [[0, 1], [2, 3], [4, 5], [6, 7]],
    ("pp", "dp"): [[0, 2, 4, 6], [1, 3, 5, 7]],
    ("pp", "tp"): [[0, 1, 4, 5], [2, 3, 6, 7]],
    ("tp", "dp"): [[0, 1, 2, 3], [4, 5, 6, 7]],
    ("pp", "dp", "tp"): [[0, 1, 2, 3, 4, 5, 6, 7]],
}


async def along(member: Member) -> None:
    """Any dimensions, in any order, give the group that they should, and of that again."""
    for dims, groups in EXPECTED.items():
        comm = member.comm[dims]
        mine = next(ranks for ranks in groups if member.rank in ranks)
        assert mine == list(comm.ranks)
        assert [label for label in ("pp", "dp", "tp") if label in dims] == list(comm.extent.labels)
        assert len(mine) == comm.size == comm.extent.nelements
        assert bits(mine) == await total(comm, member.rank)
    assert member.comm["pp", "tp"]["tp"] is member.comm["tp"]
    assert member.comm is member.comm["tp", "pp", "dp"]


async def as_subset(member: Member) -> None:
    """The same ranks, asked for in another way at every other member, are one group, that all call the same."""
    pair = [member.rank - member.rank % 2, member.rank - member.rank % 2 + 1]
    subset = member.comm.subset(pair)
    both = [subset, member.comm["tp"]]
    first = both[member.rank % 2]
    assert bits(pair) == await total(first, member.rank)
    assert {"ranks": 2} == subset.extent
    assert {"tp": 2} == both[1].extent
    assert f"members[tp {pair[0]},{pair[1]}]" == both[0]._group.name == both[1]._group.name


async def named_mesh(member: Member) -> None:
    """A `DeviceMesh` of some of the dimensions has their names, its places those of the default group."""
    comm = member.comm["pp", "tp"]
    mesh = await comm.device_mesh()
    assert ("pp", "tp") == mesh.mesh_dim_names
    assert [list(comm.ranks[:2]), list(comm.ranks[2:])] == mesh.mesh.tolist()
    assert member.comm["tp"].process_group is mesh.get_group("tp")


async def in_callbacks(member: Member) -> int:
    """The end of one group's operation begins one of another, whose end begins one of a third."""
    comm, rank = member.comm, member.rank
    done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    first, second, third = (torch.full((MANY,), 2.0**rank) for _ in range(3))

    def then(_: Any) -> None:
        comm["pp", "tp"].all_reduce(second).add_done_callback(last)

    def last(_: Any) -> None:
        comm.all_reduce(third).add_done_callback(lambda future: done.set_result(int(future.result()[0])))

    comm["dp"].all_reduce(first).add_done_callback(then)
    result = await done
    assert bits(list(comm["dp"].ranks)) == int(first[0])
    assert bits(list(comm["pp", "tp"].ranks)) == int(second[0])
    return result


async def interleaved(member: Member) -> None:
    """Operations of four groups under way at once, begun in another order of the groups at every other member."""
    comms = [member.comm, member.comm["dp"], member.comm["pp", "tp"], member.comm["tp"]]
    under_way = []
    for _ in range(5):
        for comm in comms if member.rank % 2 else comms[::-1]:
            under_way.append((comm, comm.all_reduce(torch.full((MANY,), 2.0**member.rank))))
    for comm, future in under_way:
        assert bits(list(comm.ranks)) == int((await future)[0])


class Plain(Actor):
    """No tensor actor: its groups are made of meshes."""

    @endpoint
    async def sliced(self, mesh: Any, rank: int) -> tuple[dict[str, int], list[int], int, int]:
        """Of a slice: its dimensions, its ranks, who took part in a sum of all, and of one along its last dimension."""
        comm: Communicator = await mesh.communicator(timeout=30.0)
        assert comm is await communicator(mesh)
        last = comm[comm.extent.labels[-1]]
        return dict(comm.extent), list(comm.ranks), await total(comm, rank), await total(last, rank)

    @endpoint
    async def meshed_alone(self, mesh: Any) -> str:
        """What a `DeviceMesh` of a slice is refused with where the others have no communicator."""
        comm = await mesh.communicator(timeout=0.3)
        try:
            await comm.device_mesh()
        except CollectiveTimeout as error:
            return str(error)
        return ""

    @endpoint
    async def over_nccl(self, mesh: Any) -> Any:
        return await mesh.communicator(backend="nccl")


async def of_slices(procs: ProcMesh) -> None:
    plain: Any = procs.spawn("plain", Plain)
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="this process has none: use 'auto'"):
            await plain.slice(pp=0, dp=0, tp=0).over_nccl.call_one(plain)
    ranks = list(range(8))
    for mesh, extent, members in (
        (plain, {"pp": 2, "dp": 2, "tp": 2}, ranks),
        (plain.slice(pp=1), {"dp": 2, "tp": 2}, ranks[4:]),
        (plain.slice(dp=0).rename(tp="columns"), {"pp": 2, "columns": 2}, [0, 1, 4, 5]),
        (plain.slice(tp=slice(None, None, -1), pp=0), {"dp": 2, "tp": 2}, [1, 0, 3, 2]),
        (plain.flatten("all").split(all=("a", "b"), b=4), {"a": 2, "b": 4}, ranks),
    ):
        width = list(extent.values())[-1]
        rows = [members[start : start + width] for start in range(0, len(members), width)]
        expected = [(extent, members, bits(members), bits(row)) for row in rows for _ in row]
        calls = [mesh.slice(**point).sliced.call_one(mesh, rank) for point, rank in zip(_points(extent), members, strict=True)]
        assert expected == await asyncio.gather(*calls)
    with pytest.raises(UsageError, match="only an actor has a communicator"):
        await plain.communicator()
    await plain.stop()


def _points(extent: dict[str, int]) -> list[dict[str, int]]:
    points: list[dict[str, int]] = [{}]
    for name, size in extent.items():
        points = [{**point, name: index} for point in points for index in range(size)]
    return points


@pytest.mark.timeout(120)
async def test_groups_of_eight(spawn: Spawn) -> None:
    """Along dimensions, as subsets, as device meshes, in callbacks, interleaved, and of slices of a mesh, outside of a class."""
    procs, members = spawn({"pp": 2, "dp": 2, "tp": 2})
    for function in (along, as_subset, named_mesh, interleaved):
        await members.run.call(function)
    assert [255] * 8 == list((await members.run.call(in_callbacks)).values())
    await of_slices(procs)


async def narrow(member: Member) -> None:
    """A dimension of one member is one all the same, with a name of its own."""
    comm = member.comm
    assert {"dp": 1} == comm["dp"].extent
    assert {"one": 1} == comm["one"].extent
    assert {"tp": 2} == comm["tp"].extent
    assert 2**member.rank == await total(comm["dp"], member.rank)
    assert 3 == await total(comm["tp"], member.rank)
    assert ("tp",) == (await comm["tp"].device_mesh()).mesh_dim_names
    mesh = await comm.device_mesh()
    assert ("dp", "tp", "one") == mesh.mesh_dim_names
    assert (1, 2, 1) == tuple(mesh.shape)


async def test_dimensions_of_one(spawn: Spawn) -> None:
    """They are kept apart, though they have the same members; and a member alone waits no longer than it may for a group of all."""
    procs, members = spawn({"dp": 1, "tp": 2, "one": 1})
    await members.run.call(narrow)
    plain: Any = procs.spawn("plain", Plain).slice(tp=0)
    told = await plain.meshed_alone.call_one(plain)
    assert "a DeviceMesh takes plain, not formed within 0.3 s: have all members ask for it" == told
