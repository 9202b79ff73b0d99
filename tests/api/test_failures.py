"""What fails is told once, to the right one, with evidence; everything else goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import pytest

from monarch_async import (
    Actor,
    ActorDied,
    ActorError,
    MeshFailure,
    ProcMesh,
    UsageError,
    concurrent_endpoint,
    endpoint,
    this_host,
    this_proc,
)
from tests.api.waiting import until


class Worker(Actor):
    def __init__(self, fail: bool = False, threaded: bool = False) -> None:
        self.cleaned: Any = None
        if fail:
            raise ValueError("bad")

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @concurrent_endpoint
    async def sleep(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "slept"

    @endpoint
    async def blow_up(self) -> None:
        raise RuntimeError("blew up")

    @endpoint
    async def leave(self, code: int) -> None:
        os._exit(code)

    @endpoint
    def block(self, seconds: float) -> str:
        time.sleep(seconds)
        return "unblocked"

    async def __cleanup__(self, error: BaseException | None) -> None:
        self.cleaned = error


async def test_case_1_a_constructor_that_fails_is_told_to_who_awaits_the_mesh(pair: ProcMesh, failures: list[MeshFailure]) -> None:
    """Type, text and remote traceback, any number of times; calls are refused with the reason; the hook does not fire too."""
    workers = pair.spawn("workers", Worker, True)

    async with asyncio.timeout(5):
        with pytest.raises(ValueError, match="bad"):
            await workers
        with pytest.raises(ValueError, match="bad") as caught:
            await workers
    assert isinstance(caught.value, ActorError)
    assert "in __init__" in caught.value.remote_traceback
    with pytest.raises(ActorDied, match=r"ValueError in __init__: bad \(its handler had not started\)"):
        await workers.pid.call()
    await asyncio.sleep(1.2)
    assert [] == failures


async def test_an_error_of_a_constructor_that_nobody_awaits_is_a_failure(pair: ProcMesh, failures: list[MeshFailure]) -> None:
    """It is told to the owner, once, with all ranks that failed of it and the traceback."""
    pair.spawn("workers", Worker, True)
    await until(lambda: failures)
    assert [("workers", "Worker", (0, 1), "ValueError in __init__: bad", "__init__")] == [
        (told.mesh, told.class_name, told.ranks, told.reason, told.endpoint) for told in failures
    ]
    assert "in __init__" in failures[0].report()


async def test_case_2_a_broadcast_whose_handler_raises(place: ProcMesh, failures: list[MeshFailure]) -> None:
    """The hook fires once, naming mesh, class, rank and endpoint; the actor is gone with that reason; its cleanup knew it."""
    worker = place.spawn("worker", Worker)
    worker.blow_up.broadcast()

    await until(lambda: failures)
    assert [("worker", "Worker", (0,), "blow_up", "RuntimeError in blow_up: blew up")] == [
        (told.mesh, told.class_name, told.ranks, told.endpoint, told.reason) for told in failures
    ]
    with pytest.raises(ActorDied, match="RuntimeError in blow_up: blew up"):
        await worker.pid.call_one()
    await worker.stop()
    with pytest.raises(ActorDied, match="RuntimeError in blow_up: blew up"):
        await worker.pid.call_one()
    assert 1 == len(failures)


async def test_stopping_what_is_healthy_is_no_failure(failures: list[MeshFailure]) -> None:
    """Actors, their processes, what they own in other processes: all stopped, twice, and nobody is told of anything."""
    procs = this_host().spawn_procs({"gpus": 2})
    owner = procs.slice(gpus=0).spawn("owner", Owner, True)
    await owner.spawn_on.call_one(procs.slice(gpus=1))
    workers = procs.spawn("workers", Worker)
    await workers
    await workers.stop()
    await workers.stop("again")
    with pytest.raises(ActorDied, match="stopped"):
        await workers.pid.call()
    await procs.stop()
    await procs.stop()
    await asyncio.sleep(0.1)
    assert [] == failures


async def test_case_3_one_dead_rank_of_four(failures: list[MeshFailure]) -> None:
    """Its call fails within 2 s naming signal 9; the other three return; a slice without it goes on; the hook fires once."""
    procs = this_host().spawn_procs({"gpus": 4}, name="four")
    workers = procs.spawn("workers", Worker)
    pids = list((await workers.pid.call()).values())

    calls = [workers.slice(gpus=rank).sleep.call_one(1.5) for rank in range(4)]
    together = workers.sleep.options(return_exceptions=True).call(1.5)
    await asyncio.sleep(0.3)
    began = time.monotonic()
    os.kill(pids[2], signal.SIGKILL)
    with pytest.raises(ActorDied, match=r"workers\[2\] died: killed by signal 9 \(SIGKILL\) \(its handler had started\)") as caught:
        await calls[2]
    assert time.monotonic() - began < 2
    error = caught.value
    assert ("workers", 2, 9, None, True) == (error.mesh, error.rank, error.signal, error.exit_code, error.started)
    assert ["slept"] * 3 == [await calls[rank] for rank in (0, 1, 3)]
    values: list[Any] = list((await together).values())
    assert ["slept", "slept", "slept"] == [values[rank] for rank in (0, 1, 3)]
    assert (2, 9) == (values[2].rank, values[2].signal)
    rest = workers.slice(gpus=slice(0, 2))
    assert pids[:2] == list((await rest.pid.call()).values())
    assert [("workers", (2,), 9, ("four", "workers"))] == [(told.mesh, told.ranks, told.signal, told.meshes) for told in failures]
    with pytest.raises(ActorDied, match="signal 9") as late:
        await workers.slice(gpus=2).pid.call_one()
    assert late.value.started is False


async def test_an_exit_code_is_told(pair: ProcMesh, failures: list[MeshFailure]) -> None:
    """os._exit(3) in a handler: the caller and the owner learn the code."""
    workers = pair.spawn("workers", Worker)
    with pytest.raises(ActorDied, match="exited with code 3") as caught:
        await workers.slice(gpus=1).leave.call_one(3)
    assert 3 == caught.value.exit_code
    await until(lambda: failures)
    assert [3] == [told.exit_code for told in failures]


async def test_calls_under_way_when_an_actor_is_stopped(place: ProcMesh) -> None:
    """A running handler is cancelled and its caller told that the actor died; what is queued is told that it had not started."""
    worker = place.spawn("worker", Worker)
    await worker
    running = worker.sleep.call_one(30)
    blocking = worker.block.call_one(0.3)
    queued = worker.pid.call_one()
    await asyncio.sleep(0.1)

    await worker.stop("for a test")
    for future, started in ((running, True), (queued, False)):
        with pytest.raises(ActorDied, match="stopped: for a test") as caught:
            await future
        assert started is caught.value.started
    assert "unblocked" == await blocking


async def test_a_mesh_that_is_stopped_before_it_was_constructed(place: ProcMesh) -> None:
    """Whoever awaits it is told, instead of waiting for ever."""
    await place
    worker = place.spawn("worker", SlowToStart)
    stopping = worker.stop()
    with pytest.raises(ActorDied, match="stopped"):
        async with asyncio.timeout(5):
            await worker
    await stopping


class SlowToStart(Actor):
    def __init__(self) -> None:
        time.sleep(0.2)

    @endpoint
    def nothing(self) -> None: ...


async def test_only_the_owner_stops_and_only_the_whole(pair: ProcMesh) -> None:
    """Slices and references refuse at the call."""
    workers = pair.spawn("workers", Worker)
    with pytest.raises(UsageError, match="only by its owner, and only as a whole"):
        workers.slice(gpus=0).stop()
    with pytest.raises(UsageError, match="only by its owner, and only as a whole"):
        pair.slice(gpus=0).stop()


class Owner(Actor):
    """Has actors of its own."""

    def __init__(self, handles: Any, notes: Any = None) -> None:
        self.handles = handles
        self.told: list[str] = []
        self.mine: Any = None
        self.notes = notes

    async def __supervise__(self, failure: MeshFailure) -> bool:
        self.told.append(str(failure))
        if self.handles == "raise":
            raise LookupError("while supervising")
        return bool(self.handles)

    @endpoint
    async def spawn_here(self, fail: bool = False) -> None:
        self.mine = this_proc().spawn("mine", Worker, fail)

    @endpoint
    async def spawn_on(self, procs: Any) -> None:
        self.mine = procs.spawn("mine", Worker)
        await self.mine

    @endpoint
    async def spawn_procs(self) -> int:
        self.mine = this_host().spawn_procs(name="inner").spawn("mine", Worker)
        return int(await self.mine.pid.call_one())

    @endpoint
    async def break_mine(self) -> None:
        self.mine.blow_up.broadcast()

    @concurrent_endpoint
    async def heard(self, count: int = 1) -> list[str]:
        await until(lambda: len(self.told) >= count)
        return self.told

    @endpoint
    async def reference(self) -> Any:
        return self.mine


class SyncOwner(Owner):
    def __supervise__(self, failure: MeshFailure) -> bool:  # type: ignore[override]
        self.told.append(str(failure))
        return True


@pytest.mark.parametrize("cls", [Owner, SyncOwner])
async def test_an_owner_that_deals_with_a_failure(place: ProcMesh, failures: list[MeshFailure], cls: type[Owner]) -> None:
    """Truthy, by def or async def: nobody else hears of it, and the owner goes on. A constructor nobody awaits counts too."""
    owner = place.spawn("owner", cls, True)
    await owner.spawn_here.call_one()
    await owner.break_mine.call_one()
    assert ["Worker mine[0] failed: RuntimeError in blow_up: blew up"] == await owner.heard.call_one()
    await owner.spawn_here.call_one(True)
    assert "Worker mine[0] failed: ValueError in __init__: bad" == (await owner.heard.call_one(2))[1]
    assert [] == failures


@pytest.mark.parametrize(
    ("handles", "reason"), [(False, "RuntimeError in blow_up"), ("raise", "LookupError in __supervise__: while supervising")]
)
async def test_a_failure_that_is_not_dealt_with_climbs(place: ProcMesh, failures: list[MeshFailure], handles: Any, reason: str) -> None:
    """Through two owners up to the program: each fails, what they owned is stopped, and the report tells the whole story."""
    top = place.spawn("top", Top, handles)
    await top.start.call_one()
    middle = await top.reference.call_one()
    mine = await middle.reference.call_one()
    await middle.break_mine.call_one()

    await until(lambda: failures)
    assert [("top", "Top", "__supervise__")] == [(told.mesh, told.class_name, told.endpoint) for told in failures]
    assert reason in failures[0].report()
    assert "blew up" in failures[0].report()
    for mesh in (top, middle, mine):
        anything: Any = mesh.pid if mesh is mine else mesh.reference
        with pytest.raises(ActorDied):
            await anything.call_one()


class Top(Owner):
    @endpoint
    async def start(self) -> None:
        self.mine = this_proc().spawn("middle", Owner, self.handles)
        await self.mine.spawn_here.call_one()

    async def __supervise__(self, failure: MeshFailure) -> bool:
        return False


async def test_what_an_actor_owns_ends_with_it(pair: ProcMesh, failures: list[MeshFailure]) -> None:
    """Processes and actors it has spawned, on a stop, and when its process is killed."""
    first, second = pair.slice(gpus=0), pair.slice(gpus=1)
    owner = first.spawn("owner", Owner, True)
    inner = await owner.spawn_procs.call_one()
    await owner.stop()
    await until(lambda: not os.path.exists(f"/proc/{inner}"))

    owner, pid = first.spawn("owner", Owner, True), await first.spawn("worker", Worker).pid.call_one()
    await owner.spawn_on.call_one(second)
    mine = await owner.reference.call_one()
    assert 0 < await mine.pid.call_one()
    os.kill(pid, signal.SIGKILL)
    await until(lambda: failures)
    async with asyncio.timeout(5):
        calls = await asyncio.gather(*(mine.sleep.call_one(30) for _ in range(3)), return_exceptions=True)
    assert ["stopped: the process of its owner killed by signal 9 (SIGKILL)"] * 3 == [getattr(call, "reason", call) for call in calls]


class Cleaning(Actor):
    def __init__(self, how: str, notes: Any) -> None:
        self.how, self.notes = how, notes

    @endpoint
    async def fail(self) -> None:
        raise RuntimeError("failed")

    async def __cleanup__(self, error: BaseException | None) -> None:
        await self.notes.note.call_one(f"{type(error).__name__} of {self.how}")
        if self.how == "hang":
            await asyncio.sleep(60)
        if self.how == "raise":
            raise LookupError("in cleanup")


class SyncCleaning(Actor):
    def __init__(self, notes: Any) -> None:
        self.notes = notes

    @endpoint
    def nothing(self) -> None: ...

    def __cleanup__(self, error: BaseException | None) -> None:
        self.notes.note.call_one("sync").get()


class Notes(Actor):
    def __init__(self) -> None:
        self.notes: list[str] = []

    @endpoint
    async def note(self, text: str) -> None:
        self.notes.append(text)

    @endpoint
    async def all(self) -> list[str]:
        return self.notes


async def test_cleanup_on_stop_and_on_error(place: ProcMesh, failures: list[MeshFailure]) -> None:
    """It is told what the actor failed of, may make calls, and raising in it or being synchronous stops nothing."""
    notes = this_proc().spawn("notes", Notes)
    await place.spawn("stopped", Cleaning, "stop", notes).stop()
    stopped = place.spawn("stopped", Cleaning, "stop", notes)
    await stopped
    await stopped.stop()
    await (raising := place.spawn("raising", Cleaning, "raise", notes))
    await raising.stop()
    await (sync := place.spawn("sync", SyncCleaning, notes))
    await sync.stop()
    failing = place.spawn("failing", Cleaning, "error", notes)
    failing.fail.broadcast()
    await failing.stop()
    found = await notes.all.call_one()
    assert ["NoneType of stop", "NoneType of raise", "sync", "RuntimeError of error"] == found[-4:]
