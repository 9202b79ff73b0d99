"""Collective operations over NCCL: on as many devices as there are, one too, and what the backend does alone."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from monarch_async import MeshFailure, Restart, context, this_host
from monarch_async.tensor.nccl import NcclBackend
from tests.tensor.members import Member
from tests.tensor.work import check, reference, values

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(100)]
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WHOLE = (torch.int8, torch.uint8, torch.int32, torch.int64)


class OnDevice(Member):
    """On the device of its rank."""

    comm_backend = "nccl"

    def __init__(self) -> None:
        super().__init__()
        torch.cuda.set_device(context().actor_instance.rank.rank)


async def sums(member: Member) -> int:
    comm = member.comm
    device = torch.device("cuda", torch.cuda.current_device())
    parts = [values(index, (50, 50), torch.float32) for index in range(comm.size)]
    for op in ("sum", "mean", "max"):
        mine = parts[comm.rank].to(device)
        await comm.all_reduce(mine, op)
        check(reference(op, parts), mine.cpu(), op)
    for expected, actual in zip(parts, await comm.all_gather(parts[comm.rank].to(device)), strict=True):
        check(expected, actual.cpu(), "all_gather")
    scattered = await comm.reduce_scatter(torch.ones(comm.size, 3, device=device))
    check(torch.full((1, 3), float(comm.size)), scattered.cpu(), "reduce_scatter")
    return await comm.ready()


async def every_operation(member: Member) -> int:
    """Each kind of operation, for every dtype that it takes."""
    comm, count = member.comm, 0
    me, size = comm.rank, comm.size
    device = torch.device("cuda", torch.cuda.current_device())
    for dtype in (*FLOATS, *WHOLE):
        parts = [values(index, (40, 33), dtype) for index in range(size)]
        mine = parts[me].to(device)
        ops: list[Any] = ["sum", "min", "max", "product", *(["mean"] if dtype in FLOATS else [])]
        for op in ops:
            check(reference(op, parts), (await comm.all_reduce(mine.clone(), op)).cpu(), (op, dtype))
            count += 1
        for source in range(size):
            check(parts[source], (await comm.broadcast(mine.clone(), source)).cpu(), ("broadcast", dtype))
        for expected, actual in zip(parts, await comm.all_gather(mine), strict=True):
            check(expected, actual.cpu(), ("all_gather", dtype))
        for index, actual in enumerate(await comm.all_to_all([mine + index for index in range(size)])):
            check(parts[index] + me, actual.cpu(), ("all_to_all", dtype))
        count += size + 2
    await comm.barrier()
    return count


async def test_operations_on_devices() -> None:
    """Reductions and gathering on as many devices as there are, two at most, and twice; then all there is."""
    count = min(2, torch.cuda.device_count())
    procs = this_host().spawn_procs({"gpus": count}, preload=("torch",))
    members: Any = procs.spawn("members", OnDevice)
    for _ in range(2):
        assert {0} == set((await members.run.call(sums)).values())
    assert all((await members.run.call(every_operation)).values())
    await procs.stop()


async def test_a_member_that_was_killed_comes_back(failures: list[MeshFailure]) -> None:
    """In a new process, with a group that is formed anew."""
    count = min(2, torch.cuda.device_count())
    procs = this_host().spawn_procs({"gpus": count}, preload=("torch",), restart=Restart())
    members: Any = procs.spawn("members", OnDevice, restart=Restart())
    await members.run.call(sums)
    pids = list((await members.pid.call()).values())
    os.kill(pids[-1], signal.SIGKILL)
    async with asyncio.timeout(60):
        while pids[-1] in list((await members.pid.options(retry=5).call()).values()):
            pass
        await members.run.options(retry=5).call(sums)
    await procs.stop()


@pytest.fixture
def made() -> Iterator[list[Any]]:
    """Backends to be closed."""
    backends: list[Any] = []
    yield backends
    for backend in backends:
        backend.close()


def connected(made: list[Any]) -> Any:
    """A backend of its own, alone in its world."""
    backend = NcclBackend("127.0.0.1")
    made.append(backend)
    backend.connect(HashStore(), 0, 1, 30.0)
    return backend


def ended(running: Any, seconds: float = 30.0) -> BaseException | None:
    """Wait for the end of an operation; its error."""
    told = threading.Event()
    errors: list[BaseException | None] = []

    def tell(error: BaseException | None) -> None:
        errors.append(error)
        told.set()

    running.when_done(tell)
    assert told.wait(seconds), "the operation has not ended"
    return errors[0]


def test_alone(made: list[Any]) -> None:
    """Every operation of the backend in a world of one, in order with the stream that is current, which may be busy."""
    backend = connected(made)
    tensor = torch.zeros(1 << 20, device="cuda")
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]
        tensor.fill_(3)
        running = backend.all_reduce(tensor, dist.ReduceOp.SUM)
        out = torch.empty_like(tensor)
        gathering = backend.all_gather(out, tensor)
    assert not side.query(), "starting an operation does not wait for the stream"
    assert ended(running) is None
    assert ended(gathering) is None
    assert bool((out == 3).all())
    assert ended(backend.broadcast(tensor, 0)) is None
    assert ended(backend.reduce(tensor, 0, dist.ReduceOp.MAX)) is None
    exchanged = torch.empty_like(tensor)
    assert ended(backend.all_to_all(exchanged, tensor, [1 << 20], [1 << 20])) is None
    assert bool((exchanged == 3).all())
    assert 1 == backend.process_group.size()


def test_aborted_and_made_again(made: list[Any]) -> None:
    """What is under way ends, whether with an error or not, and the next one works; three times."""
    for _ in range(3):
        backend = connected(made)
        tensor = torch.ones(1 << 20, device="cuda")
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
        running = backend.all_reduce(tensor, dist.ReduceOp.SUM)
        backend.abort()
        ended(running)
        made.remove(backend)
        backend.close()
    last = connected(made)
    tensor = torch.full((1000,), 2.0, device="cuda")
    assert ended(last.all_reduce(tensor, dist.ReduceOp.SUM)) is None
    assert bool((tensor == 2).all())
