"""Faults of processes and actors: each kind really happens, at its step or time, once, and its caller sees it as what it is."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from pathlib import Path

import pytest

from monarch_async import Actor, ActorDied, MeshFailure, UsageError, concurrent_endpoint, endpoint, this_host
from monarch_async.testing.faults import Faults
from monarch_async.testing.plugin import MonarchProcs
from tests.api.waiting import until


class Worker(Actor):
    """Counts what it is told to."""

    def __init__(self) -> None:
        self.handled: list[int] = []
        self.ticks: list[float] = []

    @endpoint
    async def step(self, number: int) -> int:
        self.handled.append(number)
        return number

    @endpoint
    async def other(self) -> str:
        return "other"

    @endpoint
    def blocking(self, number: int) -> int:
        return number

    @concurrent_endpoint
    async def overlapping(self, number: int) -> int:
        return number

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def watch(self) -> None:
        """Note the time every few milliseconds, in a thread: longer gaps are those in which no thread ran."""
        self.ticks.append(time.monotonic())
        stop = time.monotonic() + 10

        def look() -> None:
            while time.monotonic() < stop and len(self.ticks) < 5000:
                self.ticks.append(time.monotonic())
                time.sleep(0.002)

        threading.Thread(target=look, daemon=True).start()

    @endpoint
    async def longest_gap(self) -> float:
        ticks = [*self.ticks, time.monotonic()]  # the thread may not have had its turn again yet
        return max(after - before for before, after in itertools.pairwise(ticks))

    @endpoint
    async def loop_gap(self, seconds: float) -> float:
        """The longest time for which this loop did not turn, within some seconds."""
        longest, last, end = 0.0, time.monotonic(), time.monotonic() + seconds
        while last < end:
            await asyncio.sleep(0.002)
            now = time.monotonic()
            longest, last = max(longest, now - last), now
        return longest

    @endpoint
    async def allocate(self, size: int) -> int:
        return len(bytearray(size))


class Blocking(Actor):
    """Lives in a thread, its constructor included."""

    @endpoint
    def step(self, number: int) -> int:
        return number


class Custom(Exception):
    """An exception of one's own."""


def log_of(faults: Faults) -> list[str]:
    return [str(done.fault) for done in faults.log]


async def test_kill_at_a_step(monarch_procs: MonarchProcs, faults: Faults, failures: list[MeshFailure]) -> None:
    """The third message never gets to its handler: its caller hears of signal 9, the owner of the rank; the other rank goes on."""
    procs = await monarch_procs(2, name="pair")
    workers = procs.spawn("workers", Worker)
    faults.at(step=3, mesh="workers", rank=1).kill()
    assert 1 == await workers.slice(procs=1).step.call_one(1)
    assert [2, 2] == list((await workers.step.call(2)).values())
    with pytest.raises(ActorDied, match=r"workers\[1\] died: killed by signal 9") as caught:
        await workers.slice(procs=1).step.call_one(3)
    assert (1, 9) == (caught.value.rank, caught.value.signal)
    assert 4 == await workers.slice(procs=0).step.call_one(4)
    assert ["kill workers[1] step=3"] == [str(done.fault) for done in await faults.injected()]
    assert [("workers", (1,), 9)] == [(told.mesh, told.ranks, told.signal) for told in failures]


async def test_exit_at_a_step_of_one_endpoint(monarch_procs: MonarchProcs, faults: Faults, failures: list[MeshFailure]) -> None:
    """Only messages to that endpoint are counted; the caller hears of the exit code."""
    procs = await monarch_procs(1, name="one")
    worker = procs.spawn("worker", Worker)
    faults.at(step=2, mesh="worker", rank=0, endpoint="step").exit(7)
    for _ in range(3):
        await worker.other.call()
    await worker.step.call(1)
    with pytest.raises(ActorDied) as caught:
        await worker.step.call(2)
    assert 7 == caught.value.exit_code
    await faults.injected(1)


async def test_kill_at_a_time(monarch_procs: MonarchProcs, faults: Faults, failures: list[MeshFailure]) -> None:
    """A process of a mesh of processes is killed from outside, at its time and no earlier, though its loop never turns."""
    faults.at(time=0.2, mesh="one", rank=0).kill()
    procs = await monarch_procs(1, name="one")
    worker = procs.spawn("worker", Worker)
    faults.at(step=1, mesh="worker", rank=0).block(20.0)
    with pytest.raises(ActorDied, match="signal 9"):
        await worker.step.call_one(1)
    kill = next(done for done in faults.log if done.fault.kind == "kill")
    assert 0.2 <= kill.at < 5


async def test_freeze_and_thaw(monarch_procs: MonarchProcs, faults: Faults) -> None:
    """A frozen process is stopped, as the kernel says; it goes on when its time is over, or when it is thawed."""
    procs = await monarch_procs(1, name="one")
    worker = procs.spawn("worker", Worker)
    pid = await worker.pid.call_one()
    faults.at(step=1, mesh="worker", rank=0).freeze(0.2)
    answer = asyncio.ensure_future(worker.step.call_one(1))
    await faults.injected(1)
    await until(lambda: state_of(pid) == "T")
    assert 1 == await answer
    faults.at(time=0.0, mesh="worker", rank=0).freeze()
    await faults.injected(2)
    await until(lambda: state_of(pid) == "T")
    answer = asyncio.ensure_future(worker.step.call_one(2))
    faults.at(time=0.0, mesh="worker", rank=0).thaw()
    assert 2 == await answer
    assert ["freeze worker[0] step=1 seconds=0.2", "freeze worker[0] time=0.0", "thaw worker[0] time=0.0"] == log_of(faults)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


async def test_what_is_frozen_at_the_end_is_thawed(faults: Faults) -> None:
    """`calm` lets a frozen process go on, so that it can be stopped as ever."""
    procs = await this_host().spawn_procs(bootstrap=faults.bootstrap, name="one")
    worker = procs.spawn("worker", Worker)
    pid = await worker.pid.call_one()
    faults.at(time=0.0, mesh="one", rank=0).freeze()
    await faults.injected()
    await until(lambda: state_of(pid) == "T")
    faults.calm()
    assert pid == await worker.pid.call_one()


async def test_a_child_is_left_behind_and_swept(monarch_procs: MonarchProcs, faults: Faults) -> None:
    """The log names its pid; it lives in a session of its own, and is gone once its parent was stopped."""
    procs = await monarch_procs(1, name="one")
    worker = procs.spawn("worker", Worker)
    faults.at(step=1, mesh="worker", rank=0).leave_child(500.0)
    await worker.step.call_one(1)
    (left,) = await faults.injected(1)
    child = int(left.note.removeprefix("pid "))
    assert child == os.getsid(child) != os.getsid(0)
    await procs.stop()
    await until(lambda: not Path(f"/proc/{child}").exists())


async def test_memory_is_exhausted(monarch_procs: MonarchProcs, faults: Faults) -> None:
    """The handler gets a `MemoryError`; without a duration the next one has all memory again, with one it lacks it for so long."""
    procs = await monarch_procs(1, name="one")
    worker = procs.spawn("worker", Worker)
    size = 32 << 20
    faults.at(step=1, mesh="worker", rank=0).exhaust_memory(8 << 20)
    with pytest.raises(MemoryError, match="no more than 8388608 bytes"):
        await worker.step.call_one(1)
    assert size == await worker.allocate.call_one(size)
    faults.at(time=0.0, mesh="worker", rank=0).exhaust_memory(8 << 20, seconds=0.3)
    await faults.injected(2)
    # The fault's message left before this one, so it has come by then.
    with pytest.raises(MemoryError):
        await worker.allocate.call_one(size)
    while True:
        try:
            assert size == await worker.allocate.call_one(size)
        except MemoryError:
            continue
        break


@pytest.mark.parametrize("name", ["step", "blocking", "overlapping"])
async def test_an_endpoint_fails_at_its_third_step(monarch_procs: MonarchProcs, faults: Faults, name: str) -> None:
    """Whatever kind of endpoint it is: the third message raises, its code does not run, the fourth is answered."""
    procs = await monarch_procs(2, name="pair")
    workers = procs.spawn("workers", Worker)
    faults.at(step=3, mesh="workers", rank=1).fail(ValueError("bad batch"))
    worker = getattr(workers.slice(procs=1), name)
    assert [1, 2] == [await worker.call_one(number) for number in (1, 2)]
    with pytest.raises(ValueError, match="bad batch"):
        await worker.call_one(3)
    assert 4 == await worker.call_one(4)
    assert list(range(5)) == [await getattr(workers.slice(procs=0), name).call_one(number) for number in range(5)]


async def test_an_exception_at_a_time_is_raised_by_the_next_message(monarch_procs: MonarchProcs, faults: Faults) -> None:
    """It has happened when it was raised, not before; type and text are those asked for."""
    procs = await monarch_procs(1, name="one")
    worker = procs.spawn("worker", Worker)
    faults.at(time=0.0, mesh="worker", rank=0).fail(Custom, "of one's own")
    await worker.other.call_one()  # the timer of the fault comes before the answer
    with pytest.raises(Custom, match="of one's own"):
        await worker.step.call_one(1)
    assert 1 == len(await faults.injected())
    assert 2 == await worker.step.call_one(2)


@pytest.mark.parametrize("cls", [Worker, Blocking])
async def test_the_second_construction_fails(monarch_procs: MonarchProcs, faults: Faults, cls: type[Worker]) -> None:
    """The first and the third succeed, whether constructors run on the loop or in a thread."""
    procs = await monarch_procs(2, name="pair")
    faults.at(step=2, mesh="workers", rank=1).fail_constructor(ValueError("no GPU"))
    for attempt in range(3):
        workers = procs.spawn("workers", cls)
        if attempt == 1:
            with pytest.raises(ValueError, match="no GPU"):
                await workers
            assert 1 == await workers.slice(procs=0).step.call_one(1)
        else:
            await workers
            assert [1, 1] == list((await workers.step.call(1)).values())
        await workers.stop()
    assert 1 == len(await faults.injected())


async def test_a_blocked_loop(monarch_procs: MonarchProcs, faults: Faults) -> None:
    """The loop of the process stands still for so long; other threads of it don't."""
    procs = await monarch_procs(1, name="one")
    worker = procs.spawn("worker", Worker)
    other = procs.spawn("other", Worker)
    await worker.watch.call_one()
    gap = other.loop_gap.call_one(0.6)
    faults.at(time=0.0, mesh="worker", rank=0).block(0.3)
    assert 0.29 <= await gap
    assert await worker.longest_gap.call_one() < 0.29


async def test_the_gil_is_held(monarch_procs: MonarchProcs, faults: Faults) -> None:
    """No thread of the process runs for so long."""
    procs = await monarch_procs(1, name="one")
    worker = procs.spawn("worker", Worker)
    await worker.watch.call_one()
    faults.at(step=1, mesh="worker", rank=0, endpoint="step").hold_gil(0.3)
    assert 1 == await worker.step.call_one(1)
    assert 0.29 <= await worker.longest_gap.call_one()


async def test_several_faults_at_one_step(monarch_procs: MonarchProcs, faults: Faults) -> None:
    """All happen, in the order in which they were asked for, and the exception last."""
    procs = await monarch_procs(1, name="one")
    worker = procs.spawn("worker", Worker)
    faults.at(step=1, mesh="worker", rank=0).fail()
    faults.at(step=1, mesh="worker", rank=0).block(0.01)
    with pytest.raises(RuntimeError, match="injected"):
        await worker.step.call_one(1)
    assert ["fail worker[0] step=1", "block worker[0] step=1 seconds=0.01"] == log_of(faults)


async def test_a_fault_waits_for_its_member(monarch_procs: MonarchProcs, faults: Faults, failures: list[MeshFailure]) -> None:
    """Its time has come long before the actor was spawned: it happens then."""
    faults.at(time=0.0, mesh="late", rank=0).exit(4)
    procs = await monarch_procs(1, name="one")
    assert [] == faults.log
    late = procs.spawn("late", Worker)
    with pytest.raises(ActorDied) as caught:
        await late.loop_gap.call_one(30.0)
    assert 4 == caught.value.exit_code


async def test_a_process_in_the_place_of_another_goes_on_counting(
    monarch_procs: MonarchProcs, faults: Faults, failures: list[MeshFailure]
) -> None:
    """The kill of the second step is not repeated in the next process of that name; that of the fifth step comes at the fifth in all."""
    faults.at(step=2, mesh="worker", rank=0).kill()
    faults.at(step=5, mesh="worker", rank=0).fail(KeyError("fifth"))
    first = (await monarch_procs(1, name="place")).spawn("worker", Worker)
    assert 1 == await first.step.call_one(1)
    with pytest.raises(ActorDied):
        await first.step.call_one(2)
    second = monarch_procs(1, name="place").spawn("worker", Worker)
    assert [3, 4] == [await second.step.call_one(number) for number in (3, 4)]
    with pytest.raises(KeyError, match="fifth"):
        await second.step.call_one(5)
    assert 6 == await second.step.call_one(6)
    assert 2 == len(await faults.injected())


async def test_ones_own_bootstrap_runs_too(monarch_procs: MonarchProcs, faults: Faults) -> None:
    """Before the faults are installed, whether it is a coroutine function or not."""
    for name, function in (("plain", set_mark), ("async", set_mark_later)):
        procs = await monarch_procs(1, name=name, bootstrap=function)
        assert "set" == await procs.spawn(f"reader {name}", Reader).mark.call_one()


def set_mark() -> None:
    os.environ["FAULTS_MARK"] = "set"


async def set_mark_later() -> None:
    await asyncio.sleep(0)
    set_mark()


class Reader(Actor):
    @endpoint
    async def mark(self) -> str:
        return os.environ["FAULTS_MARK"]


async def test_ranks_that_a_mesh_lacks_are_refused(monarch_procs: MonarchProcs, faults: Faults) -> None:
    """At once where the mesh is known, else when it is spawned; and the other end of a link counts too."""
    faults.at(step=1, mesh="workers", rank=2).kill()
    procs = await monarch_procs(2, name="pair")
    with pytest.raises(UsageError, match=r"planned for workers\[2\], but workers has 2 members, ranks 0 to 1: kill workers\[2\] step=1"):
        await procs.spawn("workers", Worker)
    others = await procs.spawn("others", Worker)
    assert [1, 1] == list((await others.step.call(1)).values())
    with pytest.raises(UsageError, match=r"others has 2 members"):
        faults.at(step=1, mesh="others", rank=2).kill()
    with pytest.raises(UsageError, match=r"pair\[7\]"):
        faults.at(time=0, mesh="others", rank=1).link(("pair", 7)).reset()
    with pytest.raises(UsageError, match=r"pair\[2\]"):
        faults.at(time=0, mesh="pair", rank=2).kill()
    assert 1 == len(faults.plan.faults)


async def test_what_never_happens_is_explained(monarch_procs: MonarchProcs, faults: Faults) -> None:
    """Waiting for it ends after the timeout, and tells of each fault what it waits for."""
    faults.at(time=0.0, mesh="wrokers", rank=0).kill()
    faults.at(step=3, mesh="workers", rank=0).kill()
    faults.at(time=600.0, mesh="workers", rank=0).kill()
    procs = await monarch_procs(1, name="one")
    await procs.spawn("workers", Worker).step.call(1)
    with pytest.raises(TimeoutError) as caught:
        await faults.injected(timeout=0.1)
    assert [
        "0 faults after 0.1 s; what is still to come:",
        "  kill wrokers[0] time=0.0: there is no wrokers[0], only one[0], workers[0]",
        "  kill workers[0] step=3: 1 counted so far",
        "  kill workers[0] time=600.0: its moment has not come",
    ] == str(caught.value).splitlines()


async def test_a_link_to_nobody_is_told(monarch_procs: MonarchProcs, faults: Faults) -> None:
    """At a step, the other end must be there; if it isn't, who waits for faults is told, and the handler goes on."""
    procs = await monarch_procs(1, name="one")
    worker = procs.spawn("worker", Worker)
    faults.at(step=1, mesh="worker", rank=0).link(("nobody", 0)).reset()
    assert 1 == await worker.step.call_one(1)
    with pytest.raises(UsageError, match=r"could not be injected: there is no nobody\[0\]"):
        await faults.injected()


async def test_one_object_at_a_time(faults: Faults) -> None:
    """A second one is refused as long as the first is in use."""
    assert callable(faults.bootstrap)
    second = Faults()
    with pytest.raises(UsageError, match="another Faults object is in use"):
        second.start()
    faults.close()
    faults.close()
    with second:
        second.start()
