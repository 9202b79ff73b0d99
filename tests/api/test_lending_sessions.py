"""A session is lost while both processes live: what is looked at stays lent, and what nothing looks at comes back."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import numpy as np
import pytest

from monarch_async import Actor, ActorDied, endpoint
from monarch_async._channel.segment import SUPPORTED
from monarch_async._core.events import Evidence
from monarch_async._runtime.peer import Peer
from monarch_async.ambient import current_runtime
from monarch_async.ids import ProcAddress
from monarch_async.testing.plugin import MonarchProcs
from tests.api.lending_actors import Holder, lending_here, loans_here
from tests.api.waiting import until

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="needs memfd")
SIZE = 100_000


class Where(Actor):
    @endpoint
    async def address(self) -> ProcAddress:
        return current_runtime().me

    @endpoint
    async def cut(self, other: ProcAddress) -> None:
        cut(current_runtime().peer(other))


def cut(peer: Peer) -> None:
    """Give up all sessions with a process, as after connections that break again and again."""
    for link in list(peer.links):
        peer.ended(link, Evidence("cut"))


async def holder_and_peer(monarch_procs: MonarchProcs) -> tuple[Any, Any, Peer]:
    procs = monarch_procs(1)
    holder, where = procs.spawn("holder", Holder), procs.spawn("where", Where)
    await holder.echo.call_one(None)
    return holder, where, current_runtime().peer(await where.address.call_one())


def array(byte: int) -> Any:
    return np.full(SIZE, byte, "u1")


async def answered(holder: Any) -> None:
    """Over a new session; calls that the end of the old one has overtaken fail."""
    async with asyncio.timeout(10):
        while True:
            try:
                await holder.echo.call_one(None)
            except ActorDied:
                continue
            return


@pytest.mark.parametrize("side", ["sender", "receiver"])
async def test_what_is_held_stays_lent(monarch_procs: MonarchProcs, side: str) -> None:
    """It is not overwritten by what is sent later; when it is let go it comes back over the new session."""
    holder, where, peer = await holder_and_peer(monarch_procs)
    for byte in (1, 2):
        await holder.keep.call_one(array(byte))
    for _ in range(3):
        if side == "sender":
            cut(peer)
        else:
            with pytest.raises(ActorDied):
                await where.cut.call_one(current_runtime().me)
        await answered(holder)
        for byte in range(3, 9):
            await holder.echo.call_one(array(byte))
        assert [bytes([byte]) * 16 for byte in (1, 2)] == await holder.content.call_one()
        await until(lambda: 2 == loans_here())
    await holder.drop.call_one()
    await until(lambda: not loans_here())


async def test_what_never_came_comes_back(monarch_procs: MonarchProcs) -> None:
    """Messages that were on their way, or waited to leave, when the session ended."""
    holder, _, peer = await holder_and_peer(monarch_procs)
    for number in range(5):
        calls = [holder.wait.call_one(array(number)) for _ in range(4)]
        for _ in range(number):
            await asyncio.sleep(0)
        assert 4 == len(calls) <= loans_here()
        cut(peer)
        await asyncio.gather(*calls, return_exceptions=True)
        del calls
        await answered(holder)
        gc.collect()
        await holder.collect.call_one()
        await until(lambda: not loans_here())


async def test_what_was_given_back_in_vain_comes_back(monarch_procs: MonarchProcs) -> None:
    """RETURNED was on its way, or about to be sent, when the session ended."""
    holder, _, peer = await holder_and_peer(monarch_procs)
    in_vain = 0
    for _ in range(10):
        for byte in (1, 2, 3):
            await holder.keep.call_one(array(byte))
        await holder.drop.call_one()
        cut(peer)
        in_vain += loans_here()
        await answered(holder)
        await until(lambda: not loans_here())
    assert in_vain


async def test_both_ways(monarch_procs: MonarchProcs) -> None:
    """Answers are lent too: their views stay right, and their loans end when they are let go of."""
    holder, _, peer = await holder_and_peer(monarch_procs)
    view = await holder.make_view.call_one(SIZE)
    assert 1 == (await holder.numbers.call_one())[1]
    cut(peer)
    await answered(holder)
    for _ in range(5):
        await holder.make.call_one(SIZE, 7)
    assert b"v" * SIZE == view.tobytes()
    await until(lambda: 1 == lending_here().borrowing.leases)
    del view
    async with asyncio.timeout(5):
        while (await holder.numbers.call_one())[1]:
            pass
