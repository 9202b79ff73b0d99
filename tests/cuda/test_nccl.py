"""Collective operations over NCCL: on as many devices as there are, one too, and what the backend does alone."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from monarch_async import MeshFailure, Restart, context, this_host
from monarch_async.tensor.nccl import NcclBackend
from tests.tensor import odd, work
from tests.tensor.members import Member
from tests.tensor.work import check, reference, values

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(100)]


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


def use_device(member: Member) -> None:
    """From now on what members make is on the device: so they do there what they do elsewhere."""
    torch.set_default_device(torch.device("cuda", torch.cuda.current_device()))


def device_in_use(member: Member) -> tuple[int, int]:
    """That which the actor has chosen, and that of the group."""
    epoch = member.comm._group.epoch
    assert epoch is not None
    backend = epoch.backend
    assert isinstance(backend, NcclBackend)
    return torch.cuda.current_device(), backend._device.index


async def in_stream(member: Member) -> float:
    """Called in a stream of its own, which is busy, and which is no longer current when the operation begins: the longest that the loop was
    held up, while values that come late were reduced, also where they are copied before and after."""
    comm = member.comm
    await comm.barrier()
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    lag, ticking = 0.0, True

    async def tick() -> None:
        nonlocal lag
        while ticking:
            before = time.monotonic()
            await asyncio.sleep(0.002)
            lag = max(lag, time.monotonic() - before - 0.002)

    ticker = asyncio.create_task(tick())
    for op, expected in (("sum", 3.0 * comm.size), ("mean", 3.0)):
        flat, turned = torch.zeros(1 << 20), torch.zeros(1 << 10, 1 << 10).t()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(500_000_000)  # type: ignore[no-untyped-call]
            flat.fill_(3)
            turned.fill_(3)
            futures = [comm.all_reduce(tensor, op) for tensor in (flat, turned)]  # type: ignore[arg-type]
            divided = comm.reduce_scatter(turned, op, premul=1.0)  # type: ignore[arg-type]
        assert not any(future.done() for future in futures)
        for future in futures:
            assert bool((await future == expected).all()), op
        await divided
    ticking = False
    await ticker
    return lag


async def test_operations_on_devices() -> None:
    """On as many devices as there are, two at most: every operation for all types and shapes, as elsewhere, and the order in streams."""
    count = min(2, torch.cuda.device_count())
    procs = this_host().spawn_procs({"gpus": count}, preload=("torch",))
    members: Any = procs.spawn("members", OnDevice)
    for _ in range(2):
        assert {0} == set((await members.run.call(sums)).values())
    assert [(rank, rank) for rank in range(count)] == list((await members.run.call(device_in_use)).values())
    await members.run.call(use_device)
    for whole in (work.reductions, work.movements, work.scattered_reductions):
        await members.run.call(whole, "all")
    for function in (
        work.strided,
        odd.strided_everywhere,
        odd.seldom,
        odd.seen_otherwise,
        odd.empty,
        odd.coalesced_wrongly,
        work.coalesced,
    ):
        await members.run.call(function)
    assert max((await members.run.call(in_stream)).values()) < 0.1
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
