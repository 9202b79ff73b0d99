"""What comes and goes leaves nothing behind, however often."""

from __future__ import annotations

import gc
from typing import Any

from monarch_async import Actor, Channel, ProcMesh, endpoint, this_host
from monarch_async._runtime.lane import Lane
from monarch_async._runtime.peer import FEW
from monarch_async.lifetime import Lifetime

TURNS = FEW + 50


def count(kind: type) -> int:
    gc.collect()
    return sum(isinstance(found, kind) for found in gc.get_objects())


class Passer(Actor):
    @endpoint
    async def send(self, port: Any, value: int) -> None:
        port.send(value)

    @endpoint
    async def lanes(self) -> int:
        return count(Lane)


async def test_meshes_that_were_stopped_and_ports_that_were_closed_are_forgotten() -> None:
    """Neither their accounts nor what their owner held of them stays, in either process; those in use do."""
    before = count(Lane)  # that others may have left
    there: ProcMesh = await this_host().spawn_procs(name="there")
    passer = await there.spawn("passer", Passer)
    lifetimes = count(Lifetime)
    for turn in range(TURNS):
        async with there.spawn("short", Passer) as short:
            port, receiver = Channel[int].open()
            short.send.broadcast(port, turn)
            passer.send.broadcast(port, turn)
            assert [turn, turn] == [await receiver.recv(), await receiver.recv()]
            receiver.close()
        del short
    assert lifetimes == count(Lifetime)
    assert count(Lane) - before < FEW
    assert await passer.lanes.call_one() < FEW
