"""Members killed in the middle of operations, over and over: sums are right after each, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from monarch_async import ActorDied, ProcMesh, Restart
from monarch_async.tensor import PeerLost
from tests.tensor.members import Member

Spawn = Callable[..., tuple[ProcMesh, Any]]


async def forever(member: Member, seconds: float) -> None:
    """Sums until a member is lost, or for so long."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        await member.comm.all_reduce(torch.ones(50_000), timeout=20.0)


async def total(member: Member) -> tuple[float, int]:
    tensor = torch.full((5000,), float(member.rank + 1))
    await member.comm.all_reduce(tensor, timeout=20.0)
    assert [tensor[0].item()] * 5000 == tensor.tolist()
    return tensor[0].item(), member.comm.epoch


async def left(member: Member) -> tuple[int, int]:
    """Threads, and sockets, of this process."""
    sockets = sum(1 for name in os.listdir("/proc/self/fd") if _is_socket(name))
    return len(os.listdir("/proc/self/task")), sockets


def _is_socket(name: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    except OSError:
        return False


async def kills(spawn: Spawn, count: int) -> list[float]:
    """Seconds from each kill to the first right sum of all ranks."""
    dice = random.Random(7)
    _, members = spawn({"gpus": 3}, restart=Restart(max_restarts=10 * count, within=60))
    await members
    assert {(6.0, 0)} == set((await members.run.call(total)).values())
    before = list((await members.run.call(left)).values())
    took, epoch = [], 0
    for _ in range(count):
        pids = list((await members.pid.call()).values())
        calls = members.run.options(return_exceptions=True).call(forever, 30.0)
        await asyncio.sleep(dice.uniform(0.02, 0.3))
        victim = dice.randrange(3)
        began = time.monotonic()
        os.kill(pids[victim], signal.SIGKILL)
        for rank, outcome in enumerate((await calls).values()):
            assert isinstance(outcome, ActorDied if rank == victim else PeerLost), outcome
            if rank != victim:
                assert victim == outcome.rank
        async with asyncio.timeout(20):
            results = set((await members.run.call(total)).values())
        took.append(time.monotonic() - began)
        ((value, later),) = results
        assert 6.0 == value
        assert later > epoch
        epoch = later
    await asyncio.sleep(0.5)  # the threads of the last epoch end by themselves
    after = list((await members.run.call(left)).values())
    for (threads, sockets), (threads_before, sockets_before) in zip(after, before, strict=True):
        assert threads <= threads_before + 4
        assert sockets <= sockets_before + 6
    return took


@pytest.mark.timeout(240)
async def test_twenty_kills(spawn: Spawn) -> None:
    """Any member, at any moment: the others raise PeerLost that names it, and the next sum is right, at a later epoch, within seconds."""
    took = await kills(spawn, 20)
    assert sorted(took)[10] < 5.0


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_two_hundred_kills(spawn: Spawn) -> None:
    """The same, for longer: nothing piles up."""
    await kills(spawn, 200)
