"""Arguments of every size arrive, whichever of the ways of packing them is taken."""

from __future__ import annotations

import numpy
from monarch_async import Actor, Channel, Port, ProcMesh, endpoint

SIZES = [1000, 16_383, 16_384, 20_000, 32_767, 32_768, 50_000]


class Keeper(Actor):
    def __init__(self) -> None:
        self.kept = 0

    @endpoint
    async def total(self, array: numpy.ndarray[tuple[int], numpy.dtype[numpy.uint8]]) -> int:
        return int(array.sum())

    @endpoint
    async def keep(self, array: numpy.ndarray[tuple[int], numpy.dtype[numpy.uint8]]) -> None:
        self.kept += int(array.sum())

    @endpoint
    async def all_kept(self) -> int:
        return self.kept

    @endpoint
    async def send(self, port: Port[numpy.ndarray[tuple[int], numpy.dtype[numpy.uint8]]], size: int) -> None:
        await port.send(numpy.ones(size, dtype=numpy.uint8))


async def test_arrays_of_all_sizes(pair: ProcMesh) -> None:
    """A buffer that stays out of the body arrives though the message is small: in calls, casts and through ports."""
    await see_all_arrive(pair)


async def test_arrays_of_all_sizes_through_the_tree(six: ProcMesh) -> None:
    """The same where the agent passes them on."""
    await see_all_arrive(six)


async def see_all_arrive(procs: ProcMesh) -> None:
    keepers = procs.spawn("keepers", Keeper)
    for size in SIZES:
        assert {size} == set((await keepers.total.call(numpy.ones(size, dtype=numpy.uint8))).values())
        await keepers.keep.broadcast(numpy.ones(size, dtype=numpy.uint8))
    assert {sum(SIZES)} == set((await keepers.all_kept.call()).values())
    port, receiver = Channel[numpy.ndarray[tuple[int], numpy.dtype[numpy.uint8]]].open()
    for size in SIZES:
        await keepers.slice(gpus=1).send.call_one(port, size)
        assert size == (await receiver.recv()).sum()
