"""Members killed in the middle of operations, over and over: sums are right after each, and nothing is left.

``KILLS_SEED=…`` draws other ranks and times; the seed is told with the figures. Figures are shown with ``pytest -s``.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import psutil
import pytest
import torch

from monarch_async import ActorDied, ProcMesh, Restart
from monarch_async.tensor import PeerLost
from tests.tensor.members import Member, OverGloo

Spawn = Callable[..., tuple[ProcMesh, Any]]
KINDS = [Member, OverGloo]
SIZE = 4
RIGHT = float(sum(range(1, SIZE + 1)))
LARGE = 200_000
"""Elements, so that an operation takes some of the time in which a member is killed."""


async def until_lost(member: Member) -> tuple[int | None, float]:
    """Sums until a member is lost: which one, and when that was known, by the clock of all processes."""
    try:
        while True:
            await member.comm.all_reduce(torch.ones(LARGE), timeout=20.0)
    except PeerLost as error:
        return error.rank, time.monotonic()


async def ready(member: Member) -> int:
    return await member.comm.ready()


async def total(member: Member) -> tuple[float, int]:
    """Of all ranks, each plus one; it must be the same everywhere in the tensor."""
    tensor = torch.full((LARGE,), float(member.rank + 1))
    await member.comm.all_reduce(tensor, timeout=20.0)
    assert bool((tensor == tensor[0]).all())
    return tensor[0].item(), member.comm.epoch


class Left(NamedTuple):
    """What a process has."""

    threads: int
    descriptors: int
    segments: int
    tasks: int

    def more_than(self, before: Left) -> tuple[int, ...]:
        return tuple(now - then for now, then in zip(self, before, strict=True))


SPARE = Left(4, 8, 0, 1)
"""What a process may have more than before: gloo's devices are kept, each a thread and three descriptors; two are in use at most."""


async def left(member: Member) -> Left:
    names = []
    for name in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # the folder itself
            pass
    segments = sum("memfd:" in name for name in names)
    return Left(len(os.listdir("/proc/self/task")), len(names), segments, len(asyncio.all_tasks()))


async def settled(members: Any, before: Sequence[Left], allowed: Left) -> None:
    """Until no member has more than it had, but for that; what the last epoch had is let go of by threads, in the background."""
    deadline = time.monotonic() + 10
    while True:
        after = list((await members.run.call(left)).values())
        more = [now.more_than(then) for now, then in zip(after, before, strict=True)]
        if all(count <= most for counts in more for count, most in zip(counts, allowed, strict=True)):
            return
        assert time.monotonic() < deadline, more
        await asyncio.sleep(0.1)


def seed() -> int:
    return int(os.environ.get("KILLS_SEED", "7"))


def tell(what: str, seconds: Sequence[float]) -> None:
    ordered = sorted(1e3 * value for value in seconds)
    late = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    sys.stderr.write(f"\n{what}, {len(ordered)}: median {statistics.median(ordered):.0f} ms, p99 {late:.0f} ms, max {ordered[-1]:.0f} ms")


async def formed_again(members: Any) -> int:
    """The epoch in which all are."""
    numbers = set((await members.run.call(ready)).values())
    assert 1 == len(numbers)
    return int(numbers.pop())


async def kills(spawn: Spawn, kind: type[Member], count: int) -> None:
    """The first half of the kills spares rank 0, in which something could pile up."""
    dice = random.Random(seed())
    sys.stderr.write(f"\nseed {seed()}")
    _, members = spawn({"gpus": SIZE}, restart=Restart(max_restarts=10 * count, within=60), kind=kind)
    await members
    assert {(RIGHT, 0)} == set((await members.run.call(total)).values())
    before = list((await members.run.call(left)).values())
    processes = len(psutil.Process().children(recursive=True))
    lost_after, right_after, epoch = [], [], 0
    for turn in range(count):
        pids = list((await members.pid.call()).values())
        calls = members.run.options(return_exceptions=True).call(until_lost)
        await asyncio.sleep(dice.uniform(0.02, 0.3))
        victim = dice.randrange(1 if turn < count // 2 else 0, SIZE)
        began = time.monotonic()
        os.kill(pids[victim], signal.SIGKILL)
        async with asyncio.timeout(20):
            for rank, outcome in enumerate((await calls).values()):
                if rank == victim:
                    assert isinstance(outcome, ActorDied)
                    continue
                told, when = outcome
                assert victim == told
                lost_after.append(when - began)
            later = await formed_again(members)
            assert later > epoch
            assert {(RIGHT, later)} == set((await members.run.call(total)).values())
        right_after.append(time.monotonic() - began)
        epoch = later
        if turn == count // 2:
            await settled(members.slice(gpus=slice(0, 1)), before[:1], SPARE)
    await settled(members, before, SPARE)
    assert processes == len(psutil.Process().children(recursive=True))
    tell("from a kill to PeerLost at a rank", lost_after)
    tell("from a kill to right sums at all ranks", right_after)
    assert sorted(lost_after)[len(lost_after) // 2] < 2.0


@pytest.mark.parametrize("kind", KINDS)
async def test_ten_kills(spawn: Spawn, kind: type[Member]) -> None:
    """Any member, at any moment: the others raise PeerLost that names it, and the next sum is right, at a later epoch, within seconds."""
    await kills(spawn, kind, 10)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
async def test_two_hundred_kills(spawn: Spawn, kind: type[Member]) -> None:
    """The same, for longer: nothing piles up."""
    await kills(spawn, kind, 200)


async def trains(member: Member) -> int:
    """Steps on weights that every member keeps, until a given one; after an error all agree on where to go on. How many errors."""
    comm, state = member.comm, member.state
    kept: dict[int, torch.Tensor] = state.setdefault("kept", {})
    state.setdefault("errors", 0)
    agreed, step = False, 0
    while step < state.get("end", 1 << 30):
        try:
            if not agreed:
                await comm.ready()
                steps = [int(known) for known in await comm.all_gather(torch.tensor([max(kept, default=-1)]))]
                step = min((known for known in steps if known >= 0), default=0)
                weights = kept[step].clone() if step in kept else torch.zeros(LARGE)
                await comm.broadcast(weights, steps.index(step) if step in steps else 0)
                kept.clear()
                kept[step] = weights
                agreed = True
            gradient = torch.full((LARGE,), float(member.rank + 1) * (step % 5 + 1))
            await comm.all_reduce(gradient)
            kept[step + 1] = kept[step] + gradient
            kept.pop(step - 1, None)
            step += 1
        except PeerLost:
            state["errors"] += 1
            agreed = False
    assert bool((kept[step] == RIGHT * sum(turn % 5 + 1 for turn in range(step))).all())
    return int(state["errors"])


async def trains_and_dies(spawn: Spawn, kind: type[Member], count: int) -> None:
    """Members that train without anybody who drives them; whoever is killed is only called again."""
    dice = random.Random(seed())
    sys.stderr.write(f"\nseed {seed()}")
    _, members = spawn({"gpus": SIZE}, restart=Restart(max_restarts=10 * count, within=60), kind=kind)
    await members
    calls = {rank: members.slice(gpus=rank).aside.call_one(trains) for rank in range(SIZE)}
    victim = 0
    for _ in range(count):
        await asyncio.sleep(dice.uniform(0.02, 0.3))
        victim = dice.choice([rank for rank in range(SIZE) if rank != victim])
        pid = await members.slice(gpus=victim).aside.call_one(own_pid)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ActorDied):
            await calls[victim]
        calls[victim] = members.slice(gpus=victim).aside.call_one(trains)
        if dice.random() < 0.8:  # else the next one may be killed before all are together again
            await members.slice(gpus=victim).aside.call_one(reached)
    async with asyncio.timeout(30):
        steps = list((await members.aside.call(reached)).values())
        end = max(steps) + 200
        await members.aside.call(ends, end)
        errors = await asyncio.gather(*calls.values())
    assert 0 < max(errors) <= 3 * count
    assert [end] * SIZE == list((await members.run.call(reached)).values())


def own_pid(member: Member) -> int:
    return os.getpid()


async def reached(member: Member) -> int:
    """The step, once there is one."""
    while not member.state.get("kept"):  # noqa: ASYNC110  # no event tells
        await asyncio.sleep(0.005)
    return int(max(member.state["kept"]))


def ends(member: Member, step: int) -> None:
    member.state["end"] = step


@pytest.mark.parametrize("kind", KINDS)
async def test_survivors_keep_what_they_have(spawn: Spawn, kind: type[Member]) -> None:
    """One after another is killed; weights are handed on by the survivors, and in the end what they would be with nobody killed."""
    await trains_and_dies(spawn, kind, 8)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
async def test_survivors_keep_what_they_have_for_longer(spawn: Spawn, kind: type[Member]) -> None:
    """The same, for longer."""
    await trains_and_dies(spawn, kind, 100)
