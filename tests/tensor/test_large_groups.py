"""Groups of more members than tell each other everything directly: that limit is set to two here."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest
import torch

from monarch_async import MeshFailure, this_host
from monarch_async.tensor import CollectiveMismatch, CollectiveTimeout, PeerLost, announcing
from tests.tensor import work
from tests.tensor.conftest import PRELOAD
from tests.tensor.members import Member, OverGloo

LARGE = 70_000
SIZE = 5


def few() -> None:
    """Bootstrap of the processes."""
    torch.set_num_threads(1)
    announcing.DIRECT = 2


async def total(member: Member) -> float:
    tensor = torch.full((LARGE,), float(member.rank + 1))
    await member.comm.all_reduce(tensor)
    return tensor[0].item()


async def messages(member: Member) -> int:
    """How many this member sends for an operation of all."""
    await member.comm.ready()
    epoch = member.comm._group.epoch
    assert epoch is not None
    post, sent = epoch.post, 0

    def count(what: str, *args: Any, to: int | None = None) -> None:
        nonlocal sent
        sent += 1 if to is not None else member.comm.size - 1
        post(what, *args, to=to)

    epoch.post = count  # type: ignore[method-assign]
    await member.comm.barrier()
    del epoch.post
    return sent


async def differs(member: Member) -> str:
    tensor = torch.ones(LARGE)
    try:
        await member.comm.all_reduce(tensor, "max" if member.rank == 3 else "sum")
    except CollectiveMismatch as error:
        assert bool((tensor == 1).all())
        return str(error)
    return ""


async def late(member: Member) -> Any:
    if member.rank == 1:
        await asyncio.sleep(1.2)
    try:
        await member.comm.barrier(timeout=0.6)
    except CollectiveTimeout as error:
        return error
    return None


async def until_lost(member: Member) -> int | None:
    try:
        while True:
            await member.comm.all_reduce(torch.ones(LARGE))
    except PeerLost as error:
        return error.rank


async def ready(member: Member) -> int:
    return await member.comm.ready()


@pytest.mark.parametrize("kind", [Member, OverGloo])
async def test_a_group_that_announces_in_rounds(kind: type[Member], failures: list[MeshFailure]) -> None:
    """Operations, with log2 n messages of each; who differs, is late or dies is told to all by name, and nobody else is."""
    procs = this_host().spawn_procs({"gpus": SIZE}, bootstrap=few, preload=PRELOAD, name="procs")
    members: Any = procs.spawn("members", kind)
    assert [3] * SIZE == list((await members.run.call(messages)).values())
    assert 1 == len(set((await members.run.call(work.scattered_reductions, "all")).values()))
    for text in (await members.run.call(differs)).values():
        assert "differs between ranks, and nothing was moved: " in text
        assert "rank 3 called all_reduce max" in text
    assert [15.0] * SIZE == list((await members.run.call(total)).values())
    for error in (await members.run.call(late)).values():
        assert isinstance(error, CollectiveTimeout)
        assert (1,) == error.missing
    await members.run.call(ready)
    assert [15.0] * SIZE == list((await members.run.call(total)).values())
    pids = list((await members.pid.call()).values())
    calls = members.run.options(return_exceptions=True).call(until_lost)
    await asyncio.sleep(0.1)
    os.kill(pids[4], signal.SIGKILL)
    assert [4] * 4 == list((await calls).values())[:4]
    assert failures
