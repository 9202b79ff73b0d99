"""Collective operations between members of two hosts, two on each: workers on loopback are hosts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from monarch_async import MeshFailure, Restart, attach_to_workers, shutdown
from monarch_async.tensor import CollectiveMismatch, CollectiveTimeout, PeerLost
from tests.hosts.workers import make_key, worker
from tests.tensor import work
from tests.tensor.members import Member, cancels, one_thread

PRELOAD = ["torch", "torch.distributed", "tests.tensor.members", "tests.tensor.work"]
LARGE = 3_000_000
"""Elements; some pieces of those that cross between hosts."""


@contextlib.asynccontextmanager
async def two_by_two(folder: Path, restart: Restart | None = None) -> AsyncIterator[Any]:
    """Members on two hosts, the extent ``{"dp": 2, "tp": 2}``, hosts along ``dp``."""
    key = make_key(folder)
    with worker("--key-file", key) as (one, _), worker("--key-file", key) as (other, _):
        hosts = attach_to_workers([one, other], key=key).rename(hosts="dp")
        procs = hosts.spawn_procs({"tp": 2}, bootstrap=one_thread, preload=PRELOAD, name="procs")
        try:
            yield procs.spawn("members", Member, restart=restart)
        finally:
            await shutdown()


async def kinds(member: Member) -> list[str]:
    """What moves the tensors of the whole group, and of those along its dimensions and of a subset."""
    comm = member.comm
    across = sorted({member.rank, 0, 3})
    return [comm._kind.name, comm["dp"]._kind.name, comm["tp"]._kind.name, comm.subset(across)._kind.name]


async def bits(member: Member) -> bytes:
    """Of sums that depend on their order."""
    generator = torch.Generator().manual_seed(member.rank)
    told = b""
    for count in (1000, 30_000, LARGE):
        tensor = torch.randn(count, generator=generator)
        await member.comm.all_reduce(tensor)
        told += bytes(tensor[:: max(1, count // 1000)].contiguous().numpy().data)
    return told


async def total(member: Member, count: int = LARGE) -> float:
    tensor = torch.full((count,), float(member.rank + 1))
    await member.comm.all_reduce(tensor, timeout=30.0)
    assert bool((tensor == tensor[0]).all())
    return tensor[0].item()


async def test_every_operation_between_hosts(tmp_path: Path) -> None:
    """The backend that is chosen, all operations and types by it, and the same bits everywhere and every time."""
    async with two_by_two(tmp_path) as members:
        assert [["hierarchical", "gloo", "shm"]] * 4 == [found[:3] for found in (await members.run.call(kinds)).values()]
        for function in (work.reductions, work.scattered_reductions, work.movements):
            assert 1 == len(set((await members.run.call(function, "all")).values()))
        for simple in (work.strided, work.point_to_point, work.coalesced, work.at_once):
            await members.run.call(simple)
        runs = [(await members.run.call(bits)).values() for _ in range(2)]
        assert 1 == len({told for run in runs for told in run})


async def until_lost(member: Member) -> tuple[int, float]:
    """Sums until a member is lost: which one, and when that was told."""
    try:
        while True:
            await member.comm.all_reduce(torch.ones(LARGE))
    except PeerLost as error:
        return error.rank if error.rank is not None else -1, time.monotonic()


async def differs(member: Member) -> str:
    tensor = torch.ones(LARGE + (member.rank == 3))
    try:
        await member.comm.all_reduce(tensor)
    except CollectiveMismatch as error:
        assert bool((tensor == 1).all())
        return str(error)
    return ""


async def late(member: Member) -> Any:
    if member.rank == 1:
        await asyncio.sleep(0.8)
    try:
        await member.comm.broadcast(torch.ones(LARGE), 1, timeout=0.5)
    except CollectiveTimeout as error:
        return error
    return None


def last(member: Member) -> tuple[str, str]:
    entry = member.comm.ledger()[-1]
    return entry.operation, entry.state


@pytest.mark.timeout(120)
async def test_what_goes_wrong_between_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is killed amid an operation, members that differ, are late or cancel: told everywhere, and the group forms again."""
    failures: list[MeshFailure] = []
    monkeypatch.setattr("monarch_async.unhandled_fault_hook", failures.append)
    async with two_by_two(tmp_path, Restart(max_restarts=50, within=60)) as members:
        assert [10.0] * 4 == list((await members.run.call(total)).values())
        assert [("all_reduce", "done")] * 4 == list((await members.run.call(last)).values())
        for victim in (3, 0):  # one that is led, and one that leads
            pids = list((await members.pid.call()).values())
            calls = members.run.options(return_exceptions=True).call(until_lost)
            await asyncio.sleep(0.3)
            killed = time.monotonic()
            os.kill(pids[victim], signal.SIGKILL)
            outcomes = [told for rank, told in enumerate((await calls).values()) if rank != victim]
            assert [victim] * 3 == [rank for rank, _ in outcomes]
            assert max(when for _, when in outcomes) - killed < 2.0
            assert [10.0] * 4 == list((await members.run.call(total)).values())
        for text in (await members.run.call(differs)).values():
            assert f"rank 3 called all_reduce sum float32 cpu ({LARGE + 1},)" in text
        for error in (await members.run.call(late)).values():
            assert isinstance(error, CollectiveTimeout)
            assert (1,) == error.missing
        await members.run.call(ready)
        assert [10.0] * 4 == list((await members.run.call(total)).values())
        texts = list((await members.run.call(cancels, 2, LARGE)).values())
        assert "cancelled" == texts[2]
        assert ["rank 2 of members has cancelled"] * 3 == [text[:31] for rank, text in enumerate(texts) if rank != 2]
        await members.run.call(ready)
        assert [10.0] * 4 == list((await members.run.call(total)).values())
        assert failures == []


@pytest.mark.timeout(150)
async def test_kills_between_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any member, at any moment of large sums: the others raise PeerLost that names it, and the group forms again, every time."""
    monkeypatch.setattr("monarch_async.unhandled_fault_hook", lambda failure: None)
    dice = random.Random(5)
    async with two_by_two(tmp_path, Restart(max_restarts=500, within=60)) as members:
        assert [10.0] * 4 == list((await members.run.call(total)).values())
        for _ in range(12):
            pids = list((await members.pid.call()).values())
            calls = members.run.options(return_exceptions=True).call(until_lost)
            await asyncio.sleep(dice.uniform(0.0, 0.2))
            victim = dice.randrange(4)
            os.kill(pids[victim], signal.SIGKILL)
            assert [victim] * 3 == [told[0] for rank, told in enumerate((await calls).values()) if rank != victim]
            async with asyncio.timeout(20):
                assert [10.0] * 4 == list((await members.run.call(total)).values())


async def ready(member: Member) -> int:
    return await member.comm.ready()
