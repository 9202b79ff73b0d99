"""Of two processes that lend to each other either one is killed, again and again: nothing of it is left at the other."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from typing import Any, NamedTuple

import pytest

from monarch_async import ActorDied, MeshFailure, Restart, endpoint, this_host
from monarch_async._channel.segment import SUPPORTED
from tests.api.lending_actors import Holder, lending_here, loans_here, mapped_segments

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="needs memfd")
MIB = 1 << 20
SIZES = [66_000, 100_000, 300_000]
LARGE = 5 * MIB
IN_FLIGHT = 4
SPARE = 10
"""Descriptors that a process may have more than at first: of links that are being made."""


class Left(NamedTuple):
    """What a process has of others, and others of it."""

    loans: int
    leases: int
    foreign: int  # segments of others that are mapped
    unknown: int  # mappings of segments beyond those, which have two each, and its own, which have one each


class Party(Holder):
    """Sends to another one, and gets from it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.view = memoryview(b"")

    @endpoint
    async def exchange(self, other: Any, count: int) -> None:
        """So many messages there, every tenth of them answered by one that is looked at until the next."""
        await other.keep.options(retry=10).call_one(memoryview(bytearray(b"s") * SIZES[0]))
        for number in range(1, count):
            size = LARGE if number % 100 == 0 else SIZES[number % len(SIZES)]
            await other.keep.call_one(memoryview(bytearray(b"s") * size))
            if number % 10 == 0:
                await other.drop_older.call_one()
                self.view = await other.make_view.call_one(70_000)
        await other.keep.call_one(memoryview(bytearray(b"s") * SIZES[0]))

    @endpoint
    async def drop_older(self) -> None:
        """All but what came last, so that there is something whenever the other one is killed."""
        del self.kept[:-1]

    @endpoint
    async def leave_some(self, other: Any) -> None:
        """Some that are not answered, and some that nobody waits for."""
        self.calls = [other.wait.call_one(memoryview(bytearray(200_000))) for _ in range(IN_FLIGHT)]
        for _ in range(IN_FLIGHT):
            other.keep.broadcast(memoryview(bytearray(300_000)))

    @endpoint
    async def settle(self) -> tuple[list[str], bytes]:
        """How the calls have ended, and what the view shows."""
        await asyncio.wait(self.calls)
        ends = [type(call.exception()).__name__ for call in self.calls]
        self.calls = []
        return ends, self.view.tobytes()

    @endpoint
    async def let_go(self) -> None:
        self.kept.clear()
        self.view = memoryview(b"")
        gc.collect()

    @endpoint
    async def left(self) -> Left:
        lending = lending_here()
        foreign = len(lending.borrowing._mappings)
        return Left(loans_here(), lending.borrowing.leases, foreign, mapped_segments() - 2 * foreign - len(lending.pool._segments))

    @endpoint
    async def descriptors(self) -> int:
        return len(os.listdir("/proc/self/fd"))


async def nothing_left(party: Any) -> None:
    async with asyncio.timeout(10):
        while Left(0, 0, 0, 0) != await party.left.call_one():
            await party.let_go.call_one()


async def kill_either(kills: int, messages: int) -> None:
    """The one that has sent, and the one that has received, in turn."""
    restart = Restart(max_restarts=10_000, within=1.0)
    meshes = [this_host().spawn_procs(name=name, restart=restart) for name in ("sender", "receiver")]
    sender, receiver = (procs.spawn("party", Party, restart=restart) for procs in meshes)
    most = max([await party.descriptors.call_one() for party in (sender, receiver)]) + SPARE
    for turn in range(kills):
        await sender.exchange.options(retry=10).call_one(receiver, messages // kills)
        victim, survivor = (receiver, sender) if turn % 2 else (sender, receiver)
        pid, *_ = await victim.numbers.call_one()
        sending = None
        if victim is receiver:
            await sender.leave_some.call_one(receiver)
        else:
            # Its messages are on their way, and nobody knows how far they get.
            sending = sender.exchange.call_one(receiver, messages)
            await receiver.echo.call_one(None)
        os.kill(pid, signal.SIGKILL)
        if sending is None:
            ends, view = await sender.settle.call_one()
            assert [ActorDied.__name__] * IN_FLIGHT == ends
            assert b"v" * 70_000 == view
        else:
            with pytest.raises(ActorDied):
                await sending
            contents = await receiver.content.call_one()
            assert contents
            assert {b"s" * 16} == set(contents)
        await survivor.let_go.call_one()
        await nothing_left(survivor)
        assert await survivor.descriptors.call_one() <= most
        assert pid != (await victim.numbers.options(retry=10).call_one())[0]
    for procs in meshes:
        await procs.stop()


async def test_either_side_is_killed_and_nothing_is_left_at_the_other(failures: list[MeshFailure]) -> None:
    """2,400 messages, and six kills, of the sender and of the receiver in turn."""
    await kill_either(6, 2400)


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_either_side_is_killed_200_times(failures: list[MeshFailure]) -> None:
    """100,000 messages; the sender is killed a hundred times, and so is the receiver."""
    await kill_either(200, 100_000)
