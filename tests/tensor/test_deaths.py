"""Deaths at awkward moments: amid forming anew, amid a cancellation, with several groups, in a group's own callback."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

from monarch_async import ActorDied, ProcMesh, Restart
from monarch_async.tensor import CollectiveError, PeerLost
from tests.tensor.members import Member, OverGloo

Spawn = Callable[..., tuple[ProcMesh, Any]]
AGAIN = Restart(max_restarts=100, within=60)
KINDS = [Member, OverGloo]
LARGE = 200_000


async def total(member: Member) -> float:
    tensor = torch.full((LARGE,), float(member.rank + 1))
    await member.comm.all_reduce(tensor, timeout=20.0)
    assert bool((tensor == tensor[0]).all())
    return tensor[0].item()


async def ready(member: Member) -> int:
    return await member.comm.ready()


async def until_lost(member: Member) -> int | None:
    """Sums until a member is lost; which one."""
    try:
        while True:
            await member.comm.all_reduce(torch.ones(LARGE), timeout=20.0)
    except PeerLost as error:
        return error.rank


async def formed_again(members: Any, after: int) -> int:
    """The epoch that all are in, which is a later one."""
    async with asyncio.timeout(20):
        numbers = (await members.run.call(ready)).values()
    (number,) = set(numbers)
    assert number > after
    return int(number)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_second_death_amid_forming_anew(spawn: Spawn, kind: type[Member]) -> None:
    """Rank 2 dies, and once that is known another one, the first as well, while the group forms: it forms all the same, and sums right."""
    _, members = spawn({"gpus": 3}, restart=AGAIN, kind=kind)
    number = await formed_again(members, -1)
    for second in (0, 1):
        pids = list((await members.pid.call()).values())
        calls = [members.slice(gpus=rank).aside.call_one(until_lost) for rank in range(3)]
        lives = members.slice(gpus=second).aside.call_one(stays)
        await asyncio.sleep(0.05)
        os.kill(pids[2], signal.SIGKILL)
        assert 2 == await calls[1 - second]
        os.kill(pids[second], signal.SIGKILL)
        outcomes = await asyncio.gather(calls[2], lives, calls[second], return_exceptions=True)
        assert [ActorDied, ActorDied] == [type(outcome) for outcome in outcomes[:2]]
        assert outcomes[2] == 2 or isinstance(outcomes[2], ActorDied)
        number = await formed_again(members, number)
        assert [6.0] * 3 == list((await members.run.call(total)).values())


async def stays(member: Member) -> None:
    await asyncio.Event().wait()


async def gives_up(member: Member) -> str:
    """A sum that never comes about, given up when told."""
    asked = member.state["asked"] = asyncio.Event()
    future = member.comm.all_reduce(torch.ones(LARGE))
    giving_up = asyncio.ensure_future(asked.wait())
    waits: list[asyncio.Future[Any]] = [future, giving_up]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    giving_up.cancel()
    future.cancel()
    try:
        await future
    except asyncio.CancelledError:
        return "cancelled"
    except (PeerLost, CollectiveError) as error:
        return str(error)
    return "done"


async def give_up(member: Member) -> None:
    if "asked" in member.state:
        member.state["asked"].set()


@pytest.mark.parametrize("kind", KINDS)
async def test_one_gives_up_as_another_dies(spawn: Spawn, kind: type[Member]) -> None:
    """Rank 0 cancels what it awaits as rank 2 is killed: ranks 0 and 1 are told of one of the two, and the next sum is right."""
    _, members = spawn({"gpus": 3}, restart=AGAIN, kind=kind)
    number = await formed_again(members, -1)
    for turn in range(4):
        pid = await members.slice(gpus=2).pid.call_one()
        calls = [members.slice(gpus=rank).aside.call_one(gives_up) for rank in range(2)]
        lives = members.slice(gpus=2).aside.call_one(stays)
        await asyncio.sleep(0.05)
        if turn % 2:
            os.kill(pid, signal.SIGKILL)
        cancelling = members.slice(gpus=0).aside.call_one(give_up)
        if not turn % 2:
            os.kill(pid, signal.SIGKILL)
        first, second = await asyncio.gather(*calls)
        with pytest.raises(ActorDied):
            await lives
        assert first == "cancelled" or "members[2] is gone" in first
        assert "rank 0 of members has cancelled" in second or "members[2] is gone" in second
        await cancelling
        number = await formed_again(members, number)
        assert [6.0] * 3 == list((await members.run.call(total)).values())


async def rows_until_told(member: Member) -> int:
    """Sums along a row, which loses nobody, until told to end; how many."""
    comm, count = member.comm["tp"], 0
    while True:
        tensor = torch.tensor([float(member.rank), float(member.state.get("over", False))])
        await comm.all_reduce(tensor.repeat(LARGE // 2))
        flags = torch.tensor([float("over" in member.state)])
        await comm.all_reduce(flags, "max")
        count += 1
        if flags.item():
            return count


async def end_rows(member: Member) -> None:
    member.state["over"] = True


async def columns_until_lost(member: Member) -> int | None:
    comm = member.comm["dp"]
    try:
        while True:
            await comm.all_reduce(torch.ones(LARGE), timeout=20.0)
    except PeerLost as error:
        await comm.ready()
        return error.rank


async def column_total(member: Member) -> float:
    tensor = torch.full((LARGE,), float(member.rank + 1))
    await member.comm["dp"].all_reduce(tensor, timeout=20.0)
    return tensor[0].item()


async def row_epoch(member: Member) -> int:
    return await member.comm["tp"].ready()


@pytest.mark.parametrize("kind", KINDS)
async def test_groups_that_lie_across_one_that_loses_a_member(spawn: Spawn, kind: type[Member]) -> None:
    """Rank 3 dies: its column is told and forms anew, while the row of ranks 0 and 1, one of which is in that column, goes on untouched."""
    _, members = spawn({"dp": 2, "tp": 2}, restart=AGAIN, kind=kind)
    row = members.slice(dp=0)
    assert [0, 0] == list((await row.run.call(row_epoch)).values())
    rows = row.aside.call(rows_until_told)
    columns = [members.slice(dp=dp, tp=1).aside.call_one(columns_until_lost) for dp in range(2)]
    pid = await members.slice(dp=1, tp=1).aside.call_one(own_pid)
    await asyncio.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorDied):
        await columns[1]
    again = members.slice(dp=1, tp=1).aside.call_one(column_total)
    assert 3 == await columns[0]
    assert 6.0 == await members.slice(dp=0, tp=1).aside.call_one(column_total)
    assert 6.0 == await again
    await row.aside.call(end_rows)
    (count,) = set((await rows).values())
    assert count > 1
    assert [0, 0] == list((await row.run.call(row_epoch)).values())


def own_pid(member: Member) -> int:
    return os.getpid()


async def makes_a_group_when_done(member: Member) -> list[Any]:
    """A sum of all whose callback begins a sum of two, in a group that it makes: both outcomes."""
    made: list[Any] = []
    future = member.comm.all_reduce(torch.ones(LARGE))
    future.add_done_callback(lambda _: made.append(member.comm.subset([0, 1]).all_reduce(torch.ones(LARGE))))
    outcomes: list[Any] = list(await asyncio.gather(future, return_exceptions=True))
    await asyncio.sleep(0)
    outcomes += await asyncio.gather(*made, return_exceptions=True)
    return [outcome if isinstance(outcome, Exception) else outcome[0].item() for outcome in outcomes]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_group_that_is_made_as_a_member_dies(spawn: Spawn, kind: type[Member]) -> None:
    """What is awaited raises `PeerLost`, and its callback makes a group of the others, which forms and sums right at once."""
    _, members = spawn({"gpus": 3}, restart=AGAIN, kind=kind)
    number = await formed_again(members, -1)
    pid = await members.slice(gpus=2).pid.call_one()
    lives = members.slice(gpus=2).aside.call_one(stays)
    calls = members.slice(gpus=slice(0, 2)).run.call(makes_a_group_when_done)
    await asyncio.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    for lost, made in (await calls).values():
        assert isinstance(lost, PeerLost)
        assert 2.0 == made
    with pytest.raises(ActorDied):
        await lives
    await formed_again(members, number)
    assert [6.0] * 3 == list((await members.run.call(total)).values())
