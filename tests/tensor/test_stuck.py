"""The ledger, and what a mesh that does not get on says of itself."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from monarch_async import ProcMesh, UsageError
from monarch_async.health import Health, ProcState
from monarch_async.tensor import why_stuck
from monarch_async.tensor.ledger import GroupReport, LedgerEntry
from monarch_async.tensor.stuck import RankReport, _conclude
from tests.tensor.members import Member

Spawn = Callable[..., tuple[ProcMesh, Any]]


async def several(member: Member) -> list[Any]:
    comm = member.comm
    await comm.all_reduce(torch.ones(3, 4))
    await comm["gpus"].barrier()
    return comm.ledger()


async def joins(member: Member, who: int, go: str) -> None:
    if member.rank == who:
        await dawdle(go)
    await member.comm.all_reduce(torch.ones(5000))  # more than travels in an announcement


async def dawdle(go: str) -> None:
    while not os.path.exists(go):  # noqa: ASYNC110  # another process makes it
        await asyncio.sleep(0.01)


async def in_pairs(member: Member, go: str) -> None:
    """Rank 0 waits for rank 1 in two groups; rank 2 has nothing to do with it."""
    comm = member.comm
    if member.rank == 0:
        waiting = comm.recv(1), comm.recv_object(1), comm.subset([0, 1]).barrier()
        await asyncio.gather(*waiting)
    elif member.rank == 1:
        await dawdle(go)
        await comm.send(torch.ones(5000), 0)
        await comm.send_object("late", 0)
        await comm.subset([0, 1]).barrier()


async def blocks(member: Member, who: int) -> None:
    if member.rank == who:
        time.sleep(3.0)  # noqa: ASYNC251  # what is to be seen
    await member.comm.all_reduce(torch.ones(5))


async def test_who_did_not_come_to_which_operation(spawn: Spawn, tmp_path: Path) -> None:
    """The ledger tells operation, shape, line, times; why_stuck names the late rank, what it last finished, and the line where it is."""
    go = tmp_path / "go"
    _, members = spawn({"gpus": 3})
    for entries in (await members.run.call(several)).values():
        assert [("all_reduce", 1, "done", 0), ("barrier", 2, "done", 0)] == [
            (entry.operation, entry.number, entry.state, entry.epoch) for entry in entries
        ]
        assert "sum float32 cpu (3, 4)" == entries[0].shapes
        assert all(entry.line.startswith("test_stuck.py:") for entry in entries)
        assert all(0 < entry.called <= entry.started <= entry.ended for entry in entries)
    assert "no operation waits for anybody" == str(await why_stuck(members))

    call = members.run.call(joins, 1, str(go))
    async with asyncio.timeout(10):
        while True:
            report = await why_stuck(members)
            text = str(report)
            if text.count(" is at operation 3 (all_reduce sum float32 cpu (5000,) at test_stuck.py:") == 2 and "is busy" in text:
                break
            await asyncio.sleep(0.05)
    assert "members: rank 0 is at operation 3" in text
    assert "members: rank 2 is at operation 3" in text
    assert "members: rank 1 did not reach it; its last finished is operation 2, barrier; its process is busy" in text
    assert 2 == text.count(" waiting for ")
    assert "in dawdle" in report.ranks[1].stack
    assert "in dawdle" in text
    go.touch()
    await call

    go.unlink()
    call = members.run.call(in_pairs, str(go))
    async with asyncio.timeout(10):
        while True:
            report = await why_stuck(members)
            text = str(report)
            if text.count(" is at ") == 2:
                break
            await asyncio.sleep(0.05)
    assert "members: rank 0 is at operation 1 (send/recv from 1 to 0 at test_stuck.py:" in text
    assert "recv_object" not in text, "the first of a pair is enough"
    assert "members: rank 1 did not reach it; its last finished is operation 3, all_reduce; its process is" in text
    assert "members: rank 2 did not" not in text, "nobody waits for it"
    assert "members[0,1]: rank 0 is at operation 0 (barrier at test_stuck.py:" in text
    assert "members[0,1]: rank 1 did not reach it; it has not asked for this group; its process is" in text
    go.touch()
    await call

    call = members.run.call(blocks, 2)
    async with asyncio.timeout(10):
        while True:
            report = await why_stuck(members)
            if "rank 2 did not reach it; it does not answer; its process is stuck" in str(report):
                break
            await asyncio.sleep(0.05)
    assert "in blocks" in report.ranks[2].stack
    await call
    with pytest.raises(UsageError, match="why_stuck takes a mesh of actors"):
        await why_stuck(3)


def waiting(number: int, operation: str, partner: int | None = None) -> LedgerEntry:
    return LedgerEntry(0, number, operation, "", "train.py:1", "waiting", 0.0, 0.0, 0.0, "", partner)


def test_who_is_waited_for_is_told_once_and_where_it_is() -> None:
    """Two wait for rank 1, which waits for all: its own operation is told, and itself once."""
    entries = {0: waiting(1, "recv", 1), 1: waiting(4, "barrier"), 2: waiting(1, "recv", 1)}
    groups = {rank: {"trainers": GroupReport((0, 1, 2), 0, True, [entry], "")} for rank, entry in entries.items()}
    lines = _conclude({rank: RankReport(rank, told, [], Health(ProcState.BUSY)) for rank, told in groups.items()})
    starts = [" ".join(line.split()[:4]) for line in lines]
    assert [f"trainers: rank {rank} is" for rank in (1, 0, 2)] + [f"trainers: rank {rank} did" for rank in (0, 2, 1)] == starts
    assert "barrier" in lines[0]
