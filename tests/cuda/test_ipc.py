"""Tensors on a device between processes of one host: right by every way, unshared, in order with the caller's work; memory comes back."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from monarch_async import ActorDied, MeshFailure, configure
from monarch_async._channel.parcels import pool
from monarch_async._runtime import device_lending
from monarch_async.options import Options
from monarch_async.testing.plugin import MonarchProcs
from tests.api.waiting import until
from tests.cuda.actors import OnGpu, fetches, same, statistics_here

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(100)]
MIB = 1 << 20
LONG = 1_000_000_000
"""Cycles: about half a second."""
Start = Callable[..., Any]

UNUSUAL = re.compile(r"\.q|x2|x4|bits|int[1-7]$")
"""Quantised ones, and those with several elements in a byte."""
DTYPES = sorted({item for item in vars(torch).values() if isinstance(item, torch.dtype) and not UNUSUAL.search(str(item))}, key=str)


def of_dtype(dtype: torch.dtype) -> torch.Tensor:
    """100,000 bytes and more of it."""
    tensor = torch.randint(0, 2 if dtype is torch.bool else 256, (160_000,), dtype=torch.uint8, device="cuda")
    return tensor.view(dtype)


def layouts() -> dict[str, torch.Tensor]:
    base = torch.arange(200_000.0, device="cuda")
    matrix = base.view(400, 500)
    return {
        "contiguous": base,
        "transposed": matrix.t(),
        "stepped": base[::3],
        "a column": matrix[:, 3],
        "from the middle": base[777:150_777],
        "an odd offset in bytes": torch.arange(200_001, device="cuda").to(torch.uint8)[1:],
        "expanded": torch.arange(50_000, device="cuda").expand(3, 50_000),
        "channels last": base.view(4, 5, 100, 100).to(memory_format=torch.channels_last),
        "a single number": torch.tensor(1.5, device="cuda"),
        "empty": torch.empty(0, 3, device="cuda"),
        "conjugated": torch.arange(50_000, device="cuda").to(torch.complex64).conj(),
        "with a gradient": base.clone().requires_grad_(),
        "parameter": torch.nn.Parameter(base.clone()),
        "fixed parameter": torch.nn.Parameter(base.clone(), requires_grad=False),
        "result of a computation": base.clone().requires_grad_() * 2,
    }


async def all_back() -> None:
    await until(lambda: not statistics_here()["loans"] and not statistics_here()["blocks"], 20.0)


async def warm(actor: Any, count: int) -> None:
    """Have it map so many blocks of 4 MiB, all in use at once: to map one may wait for the device."""
    await actor.keep_busy.call_one(LONG)
    for _ in range(count):
        await actor.keep.call_one(torch.zeros(MIB, device="cuda"))
    await actor.drop.call_one()
    await all_back()


@pytest.fixture
def option(request: pytest.FixtureRequest) -> Iterator[None]:
    """For runtimes that are started from now on. Ask for it before any place."""
    configure(**request.param)
    yield
    configure(**{name: getattr(Options(), name) for name in request.param})


BY_HOST = {"cuda_ipc": "never"}


@pytest.mark.parametrize(("option", "lent"), [({}, True), (BY_HOST, False)], indirect=["option"], ids=["ipc", "host"])
async def test_every_dtype_and_layout(option: None, lent: bool, gpu_actors: Start) -> None:
    """There and back, bit for bit, by IPC and by host memory; alone and all of them in one message."""
    actor = await gpu_actors(ready=lent)
    for dtype in DTYPES:
        sent = of_dtype(dtype)
        before = len(fetches)
        same(sent, await actor.echo.call_one(sent))
        assert int(lent) == len(fetches) - before, dtype
    for name, sent in layouts().items():
        expected = sent.detach() if name == "result of a computation" else sent
        same(expected, await actor.echo.call_one(sent))
        same(expected, await actor.echo_in_thread.call_one(sent))
        if name in ("transposed", "channels last", "expanded"):
            assert sent.stride() == (await actor.echo.call_one(sent)).stride(), name
    tensors = {**{str(dtype): of_dtype(dtype) for dtype in DTYPES}, **layouts(), "on the CPU": torch.arange(100_000)}
    tensors["result of a computation"] = tensors["result of a computation"].detach()
    text, returned = await actor.echo.call_one(("x" * 50_000, tensors))
    assert ("x" * 50_000, list(tensors)) == (text, list(returned))
    for name, sent in tensors.items():
        same(sent, returned[name])
    del returned
    await all_back()


@pytest.mark.parametrize(("option", "ready"), [({}, True), (BY_HOST, False)], indirect=["option"], ids=["ipc", "host"])
async def test_what_shares_memory_does_at_the_receiver(option: None, ready: bool, gpu_actors: Start) -> None:
    """Two views of one storage that overlap; two that don't, and two tensors, are apart."""
    actor = await gpu_actors(ready=ready)
    base = torch.zeros(200_000, device="cuda")
    assert await actor.shares.call_one(base[:150_000], base[50_000:])
    assert not await actor.shares.call_one(base[:100_000], base[100_000:])
    assert not await actor.shares.call_one(base, base.clone())
    assert not base.any()
    same(base, (await actor.echo.call_one([base, base]))[1])


async def test_what_is_changed_later_does_not_show(gpu_actors: Start) -> None:
    """The sender's later changes, on the same stream; a receiver's, to others and to the sender; in blocks that are used again."""
    actors = await gpu_actors(2)
    one, other = actors.slice(procs=0), actors.slice(procs=1)
    tensor = torch.ones(MIB, device="cuda")
    calls = actors.keep.call(tensor)
    tensor.fill_(2)
    await calls
    assert [[1.0]] * 2 == list((await actors.firsts.call()).values()) == list((await actors.lasts.call()).values())
    await one.fill.call_one(3)
    assert [1.0] == await other.firsts.call_one()
    assert 2.0 == float(tensor[0])
    for number in range(4, 24):
        tensor.fill_(number)
        sent = actors.keep.call(tensor)
        tensor.fill_(0)
        await sent
    for numbers in ((await actors.firsts.call()), (await actors.lasts.call())):
        assert [float(number) for number in range(4, 24)] == numbers.item(procs=1)[1:]
    await all_back()


async def test_in_order_with_the_streams_of_the_sender(gpu_actors: Start) -> None:
    """What is sent on a busy side stream is what that stream will have made of it; nothing here waits for it but the message."""
    actor = await gpu_actors()
    tensor = torch.zeros(4 * MIB, device="cuda")
    await actor.keep.call_one(tensor)  # now there is a block of the size
    await actor.drop.call_one()
    await all_back()
    torch.cuda.synchronize()
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        torch.cuda._sleep(2 * LONG)  # type: ignore[no-untyped-call]
        tensor.fill_(7)
        started = time.monotonic()
        call = actor.keep.call_one(tensor)
        tensor.fill_(8)
        took = time.monotonic() - started
    assert not side.query(), f"the send took {took:.3f} s, which is as long as the stream is busy"
    longest = 0.0
    while not call.done():
        before = time.monotonic()
        await asyncio.sleep(0.005)
        longest = max(longest, time.monotonic() - before)
    assert side.query(), "it arrived before its bytes"
    assert longest < 0.2, f"the loop stood still for {longest:.3f} s"
    assert [7.0] == await actor.firsts.call_one() == await actor.lasts.call_one()
    await all_back()


async def test_in_order_with_the_stream_of_the_receiver(gpu_actors: Start) -> None:
    """A busy receiver holds its loans, and what it has taken is right when it comes to look at it."""
    actor = await gpu_actors()
    await warm(actor, 5)
    await actor.keep_busy.call_one(2 * LONG)
    for number in range(5):
        await actor.keep.call_one(torch.full((MIB,), float(number), device="cuda"))
    assert 5 == statistics_here()["loans"]
    assert [0.0, 1.0, 2.0, 3.0, 4.0] == await actor.lasts.call_one()
    await all_back()


async def test_a_cast_is_one_copy(gpu_actors: Start) -> None:
    """One block however many receive it, until the last has made its copy."""
    actors = await gpu_actors(3)
    await actors.keep.call(torch.full((MIB,), 3.0, device="cuda"))  # now all of them have mapped a block of the size
    await actors.drop.call()
    await all_back()
    await actors.keep_busy.call(2 * LONG)
    await actors.keep.call(torch.full((MIB,), 3.0, device="cuda"))
    assert (3, 1) == (statistics_here()["loans"], statistics_here()["blocks"])
    assert [[3.0]] * 3 == list((await actors.lasts.call()).values())
    await all_back()


async def test_unused_memory_goes_back_to_the_device(gpu_actors: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unmapped at the receiver, freed here."""
    monkeypatch.setattr(device_lending, "AGE", 0.1)
    actor = await gpu_actors()
    tensor = torch.ones(64 * MIB, device="cuda")
    torch.cuda.synchronize()
    await actor.keep.call_one(tensor)
    assert statistics_here()["bytes"] >= 256 * MIB
    with_block, _ = torch.cuda.mem_get_info()
    await actor.drop.call_one()
    await until(lambda: not statistics_here()["bytes"], 20.0)
    without, _ = torch.cuda.mem_get_info()
    assert without - with_block >= 200 * MIB
    assert 0 == (await actor.statistics.call_one())["mapped"]
    same(tensor, await actor.echo.call_one(tensor))


@pytest.mark.parametrize("option", [{"cuda_ipc_bytes": 32 * MIB}], indirect=True)
async def test_no_room(option: None, gpu_actors: Start, caplog: pytest.LogCaptureFixture) -> None:
    """Host memory, right all the same, with one warning."""
    actor = await gpu_actors()
    tensor = torch.arange(16 * MIB, device="cuda")
    for _ in range(3):
        same(tensor, await actor.echo.call_one(tensor))
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "would pass the bound" in record.getMessage()
    assert statistics_here()["bytes"] <= 32 * MIB


async def test_a_dead_receiver(failures: list[MeshFailure], gpu_actors: Start) -> None:
    """Killed with copies under way: what it was lent is over, and others are served from the same memory."""
    actors = await gpu_actors(2)
    lost, other = actors.slice(procs=0), actors.slice(procs=1)
    await warm(lost, 3)
    pid = await lost.pid.call_one()
    await lost.keep_busy.call_one(10 * LONG)
    for _ in range(3):
        await lost.keep.call_one(torch.ones(MIB, device="cuda"))
    assert 3 == statistics_here()["loans"]
    os.kill(pid, signal.SIGKILL)
    await all_back()
    tensor = torch.arange(MIB, device="cuda")
    for _ in range(5):
        same(tensor, await other.echo.call_one(tensor))


async def test_a_dead_sender(failures: list[MeshFailure], gpu_actors: Start) -> None:
    """Killed while the receiver's copies are under way: the receiver lives on, its device works, and it unmaps what was the sender's."""
    actors = await gpu_actors(2)
    sender, keeper = actors.slice(procs=0), actors.slice(procs=1)
    pid = await sender.pid.call_one()
    async with asyncio.timeout(20):
        while not await sender.lends.call_one():
            await sender.send_on.call_one(keeper, MIB, 0.0)
    for cycles in (LONG, 2 * LONG):  # the first time it is mapped, which may wait for the device
        await keeper.drop.call_one()
        await keeper.keep_busy.call_one(cycles)
        for number in range(1, 4):
            await sender.send_on.call_one(keeper, MIB, float(number))
    os.kill(pid, signal.SIGKILL)
    await until(lambda: failures, 20.0)
    assert 1000.0 == await keeper.works.call_one()
    assert [1.0, 2.0, 3.0] == await keeper.lasts.call_one()
    mine = len(pool._ledger.segments)
    async with asyncio.timeout(20):
        while (await keeper.statistics.call_one())["mapped"] > mine:
            pass
    tensor = torch.arange(MIB, device="cuda")
    same(tensor, await keeper.echo.call_one(tensor))


async def test_a_sender_that_dies_before_its_bytes_are_there(failures: list[MeshFailure], gpu_actors: Start) -> None:
    """Killed while its own device is still busy with what comes first: the receiver hears nothing of the message, and waits for nothing."""
    actors = await gpu_actors(2)
    sender, keeper = actors.slice(procs=0), actors.slice(procs=1)
    async with asyncio.timeout(20):
        while not await sender.lends.call_one():
            await sender.send_on.call_one(keeper, MIB, 0.0)
    await keeper.drop.call_one()
    pid = await sender.pid.call_one()
    await sender.keep_busy.call_one(10 * LONG)
    call = sender.send_on.call_one(keeper, MIB, 1.0)
    await asyncio.sleep(0.3)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorDied):
        await call
    assert 1000.0 == await keeper.works.call_one()
    assert [] == await keeper.firsts.call_one()
    tensor = torch.arange(MIB, device="cuda")
    same(tensor, await keeper.echo.call_one(tensor))


async def test_nothing_with_a_name_is_left(failures: list[MeshFailure], monarch_procs: MonarchProcs) -> None:
    """In /dev/shm, by processes that were stopped and one that was killed. What this process has there it has had since it first lent."""

    async def use(kill: bool) -> set[str]:
        procs = monarch_procs(2, preload=("torch",))
        actors = procs.spawn("actors", OnGpu)
        await actors.use.call()
        for _ in range(4):
            await actors.echo.call(torch.ones(MIB, device="cuda"))
        used = names()
        if kill:
            os.kill(await actors.slice(procs=0).pid.call_one(), signal.SIGKILL)
            await until(lambda: failures, 20.0)
        await procs.stop()
        return used

    def names() -> set[str]:
        return {path.name for path in Path("/dev/shm").iterdir()}

    await use(kill=False)
    before = names()
    used = await use(kill=True)
    left = names() - before
    assert not left, f"{left} are left of {used}"


async def test_capturing_a_graph(gpu_actors: Start) -> None:
    """A message can't be part of a graph: refused plainly, and the capture goes on. Messages don't disturb a capture in another thread."""
    actor = await gpu_actors()
    tensor = torch.ones(MIB, device="cuda")
    for _ in range(3):
        same(tensor, await actor.echo.call_one(tensor))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor.add_(1)
        with pytest.raises(TypeError, match="a CUDA graph is being captured on this stream"):
            actor.keep.call_one(tensor)
    graph.replay()
    same(torch.full_like(tensor, 2.0), await actor.echo.call_one(tensor))
    other = torch.full_like(tensor, 5.0)
    torch.cuda.synchronize()
    begun, may_end = threading.Event(), threading.Event()
    elsewhere = torch.cuda.CUDAGraph()
    errors: list[BaseException] = []

    def capture() -> None:
        try:
            with torch.cuda.graph(elsewhere):
                tensor.add_(1)
                begun.set()
                may_end.wait(30)
        except BaseException as error:  # for the test to see
            errors.append(error)
        finally:
            begun.set()

    thread = threading.Thread(target=capture)
    thread.start()
    await asyncio.to_thread(begun.wait)
    try:
        returned = [await actor.echo.call_one(other) for _ in range(3)]
        await asyncio.sleep(0.1)  # in which it is looked whether the copies have been made
    finally:
        may_end.set()
        await asyncio.to_thread(thread.join)
    assert [] == errors
    for back in returned:
        same(other, back)
    elsewhere.replay()
    assert 3.0 == float(tensor[0])


async def test_processes_with_other_settings(gpu_actors: Start, monarch_procs: MonarchProcs, caplog: pytest.LogCaptureFixture) -> None:
    """One that launches everything synchronously; one that sees no device, where tensors arrive on the CPU."""
    blocking = await gpu_actors(env={"CUDA_LAUNCH_BLOCKING": "1"})
    tensor = torch.arange(MIB, device="cuda")
    before = len(fetches)
    same(tensor, await blocking.echo.call_one(tensor))
    assert before < len(fetches)
    blind = monarch_procs(1, preload=("torch",), env={"CUDA_VISIBLE_DEVICES": ""}).spawn("blind", OnGpu)
    for _ in range(3):  # out of the memory that is set aside for the other one
        assert "cpu" == await blind.where.call_one(tensor)
        assert torch.equal(tensor.cpu(), await blind.echo.call_one(tensor))
    assert [] == [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_forks_and_threads(gpu_actors: Start) -> None:
    """A receiver that forks goes on, and so does a sender; `def` endpoints and other threads lend too."""
    actors = await gpu_actors(2)
    one, other = actors.slice(procs=0), actors.slice(procs=1)
    tensor = torch.arange(MIB, device="cuda")
    await one.keep.call_one(tensor)
    assert 7 == await one.fork.call_one()
    same(tensor, await one.echo.call_one(tensor))
    await one.send_from_thread.call_one(other, MIB, 10)
    assert [float(number) for number in range(10)] == await other.lasts.call_one()
    assert await other.fetched.call_one(tensor) >= 5
    called = await asyncio.to_thread(lambda: one.echo.call_one(tensor))
    same(tensor, await called)
    await all_back()


async def test_within_a_process(monarch_procs: MonarchProcs) -> None:
    """A copy on the device: nothing is lent, and nothing goes by host memory."""
    procs = monarch_procs(1, preload=("torch",))
    one, other = procs.spawn("one", OnGpu), procs.spawn("other", OnGpu)
    await one.use.call_one()
    await one.send_on.call_one(other, MIB, 4.0)
    assert [4.0] == await other.lasts.call_one()
    assert {"bytes": 0, "blocks": 0, "loans": 0, "mapped": 0} == await one.statistics.call_one()


@pytest.mark.parametrize("option", [{"cuda_ipc": "always"}], indirect=True)
async def test_forced(option: None, gpu_actors: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, and out of room is an error."""
    actor = await gpu_actors()
    tensor = torch.arange(MIB, device="cuda")
    same(tensor, await actor.echo.call_one(tensor))
    monkeypatch.setattr(pool, "limit", MIB)
    with pytest.raises(MemoryError, match="forbids to go by host memory"):
        await actor.echo.call_one(torch.zeros(4 * MIB, device="cuda"))
    monkeypatch.undo()
    same(tensor, await actor.echo.call_one(tensor))


async def test_two_devices(monarch_procs: MonarchProcs) -> None:
    """Counted in another order at the receiver: to the device of the same index, whichever that is, by a copy between the two."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one device")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    turned = ",".join([visible[1], visible[0]])
    actor = monarch_procs(1, preload=("torch",), env={"CUDA_VISIBLE_DEVICES": turned}).spawn("actor", OnGpu)
    await actor.use.call_one()
    for index in (0, 1):
        tensor = torch.arange(MIB, device=f"cuda:{index}")
        for _ in range(4):
            assert f"cuda:{index}" == await actor.where.call_one(tensor)
            same(tensor, await actor.echo.call_one(tensor))
