"""``breakpoint()`` in worker processes: what stops, what goes on, and how a stopped handler is spoken with."""

from __future__ import annotations

import asyncio
import builtins
import sqlite3
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from monarch_async import Actor, ActorError, CallTimeout, ProcMesh, UsageError, concurrent_endpoint, configure, context, endpoint, this_host
from monarch_async.observe.debugging import Said, Stopped
from monarch_async.observe.errors import UnknownName
from monarch_async.observe.job import Job
from tests.api.waiting import until


class Stops(Actor):
    """Stops in each of its endpoints but one."""

    def __init__(self) -> None:
        self.total = 0
        self.cancelled = False

    @endpoint
    async def add(self, amount: int) -> int:
        self.total += amount
        breakpoint()
        doubled = self.total * 2
        await asyncio.sleep(0)
        return doubled + 1

    @endpoint
    def add_blocking(self, amount: int) -> int:
        breakpoint()
        return amount + context().actor_instance.rank.rank

    @endpoint
    async def add_by_helper(self, amount: int) -> int:
        return self._helper(amount)

    def _helper(self, amount: int) -> int:
        breakpoint()
        return amount

    @endpoint
    async def wait_after(self) -> None:
        breakpoint()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    @concurrent_endpoint
    async def overlap(self) -> str:
        breakpoint()
        return "overlapped"

    @endpoint
    async def spawn_child(self) -> tuple[int, str]:
        breakpoint()
        assert asyncio.current_task() is not None
        await asyncio.sleep(0)
        child = await context().actor_instance.proc.spawn("child", Beside)
        return await child.answer.call_one(), threading.current_thread().name

    @endpoint
    async def in_a_task(self) -> str:
        await asyncio.create_task(_stop_outside())
        return "passed"

    @endpoint
    async def was_cancelled(self) -> bool:
        return self.cancelled


async def _stop_outside() -> None:
    hidden = getattr(builtins, "break" + "point")
    hidden()


class Beside(Actor):
    """Another actor of the same process."""

    @endpoint
    async def answer(self) -> int:
        return 42

    @concurrent_endpoint
    async def overlap(self) -> str:
        await asyncio.sleep(0)
        return threading.current_thread().name


@pytest.fixture
def debug() -> Iterator[None]:
    """Runtimes that are started from now on are for debugging."""
    configure(debug=True)
    yield
    configure(debug=False)


@pytest.fixture
async def plain() -> AsyncIterator[ProcMesh]:
    """Processes of a job that is not for debugging."""
    async with this_host().spawn_procs({"ranks": 1}, name="here") as mesh:
        yield mesh


@pytest.fixture
async def procs(debug: None) -> AsyncIterator[ProcMesh]:
    async with this_host().spawn_procs({"ranks": 1}, name="here") as mesh:
        yield mesh


async def command(handler: Stopped, line: str) -> Said:
    return await Job.here().pdb(handler, line)


async def waiting(count: int = 1) -> list[Stopped]:
    """Those that wait for a command, once they are so many."""
    found: list[Stopped] = []

    async def enough() -> bool:
        nonlocal found
        found = [one for one in await Job.here().stopped() if one.waits]
        return len(found) >= count

    async with asyncio.timeout(20):
        while not await enough():
            pass
    return found


@pytest.mark.parametrize(("name", "result"), [("add", 9), ("add_blocking", 4), ("add_by_helper", 4), ("overlap", "overlapped")])
async def test_the_handler_stops_and_nothing_else(procs: ProcMesh, name: str, result: Any) -> None:
    """Whatever kind the endpoint is, its process's loop and its other actors go on; `c` lets it end with its result."""
    mesh, beside = await procs.spawn("stops", Stops), await procs.spawn("beside", Beside)
    call = getattr(mesh, name).call_one(*([4] if name != "overlap" else []))
    (one,) = await waiting()
    assert ("stops[0]", name) == (one.actor, one.endpoint)
    assert 42 == await beside.answer.call_one()
    assert not call.done()
    said = await command(one, "p 6 * 7")
    assert ("42\n", "waits", "(Pdb) ") == said
    assert 42 == await beside.answer.call_one()
    assert ("", "over") == (await command(one, "c"))[:2]
    assert result == await call
    assert [] == await Job.here().stopped()


async def test_stepping(procs: ProcMesh) -> None:
    """pdb steps line by line, over an `await` too, shows and changes what the handler has, and ends with the handler."""
    mesh = await procs.spawn("stops", Stops)
    call = mesh.add.call_one(4)
    (one,) = await waiting()
    assert "doubled = self.total * 2" in one.text
    assert "await asyncio.sleep(0)" in (await command(one, "n")).text
    assert "return doubled + 1" in (await command(one, "n")).text
    assert "8\n" == (await command(one, "p doubled")).text
    text = (await command(one, "w")).text
    assert "add()" in text
    assert "_runtime" not in text
    assert "" == (await command(one, "!doubled = 100")).text
    assert "over" == (await command(one, "n")).state
    assert 101 == await call


async def test_breakpoints_of_pdb(procs: ProcMesh) -> None:
    """A breakpoint that is set in pdb holds for the rest of the handler: `c` waits for it."""
    mesh = await procs.spawn("stops", Stops)
    call = mesh.add.call_one(1)
    (one,) = await waiting()
    line = one.line + 2
    assert f":{line}" in (await command(one, f"b {line}")).text
    assert "return doubled + 1" in (await command(one, "c")).text
    assert "waits" == (await command(one, "cl 1")).state
    assert "over" == (await command(one, "c")).state
    assert 3 == await call


@pytest.mark.parametrize("name", ["add", "add_blocking"])
async def test_quit(procs: ProcMesh, name: str) -> None:
    """`q` ends the handler with an error that its caller gets; the actor lives."""
    mesh = await procs.spawn("stops", Stops)
    call = getattr(mesh, name).call_one(1)
    (one,) = await waiting()
    assert "over" == (await command(one, "q")).state
    with pytest.raises(ActorError) as raised:
        await call
    assert "bdb.BdbQuit" == raised.value.type_name
    assert not await mesh.was_cancelled.call_one()


async def test_a_caller_that_gives_up_ends_the_session(procs: ProcMesh) -> None:
    """A timeout, and a cancellation, let the stopped handler go on: it gets the cancellation at its next await, and the actor serves on."""
    mesh = await procs.spawn("stops", Stops)
    with pytest.raises(CallTimeout):
        await mesh.wait_after.options(timeout=0.2).call_one()
    assert await mesh.was_cancelled.call_one()
    call = mesh.add_blocking.call_one(1)
    (one,) = await waiting()
    call.cancel()
    assert await mesh.was_cancelled.call_one()
    assert [] == await Job.here().stopped()
    with pytest.raises(UsageError, match="over"):
        await command(one, "n")


async def test_a_handler_in_steps_is_like_any_other(procs: ProcMesh) -> None:
    """It may spawn, call, and ask for its task and loop, as the others on the loop do."""
    mesh = await procs.spawn("stops", Stops)
    call = mesh.spawn_child.call_one()
    (one,) = await waiting()
    await command(one, "c")
    answer, thread = await call
    assert 42 == answer
    assert thread.startswith("steps of")


class Keeper(Actor):
    """Keeps what only its thread may use."""

    def __init__(self) -> None:
        self.thread = threading.current_thread().name
        self.base = sqlite3.connect(":memory:")
        self.breakpoint = str

    @endpoint
    async def where(self, *, stops: bool = False) -> tuple[str, int]:
        self.base.execute("select 1")
        self.breakpoint(1)
        if stops:
            breakpoint()
        await asyncio.sleep(0)
        self.base.execute("select 1")
        return threading.current_thread().name, threading.get_ident()

    @concurrent_endpoint
    async def overlap(self) -> tuple[str, int]:
        await asyncio.sleep(0)
        self.base.execute("select 1")
        return threading.current_thread().name, threading.get_ident()

    def __cleanup__(self, error: BaseException | None) -> None:
        self.base.close()
        print("closed in", threading.current_thread().name, flush=True)  # noqa: T201


MAIN = "MainThread"


async def test_code_with_a_breakpoint_is_like_any_other(plain: ProcMesh, capfd: pytest.CaptureFixture[str]) -> None:
    """It runs on the loop's own thread, and a breakpoint there is passed with a note; `pdb next` stops one handler, and no other."""
    mesh = await plain.spawn("keeper", Keeper)
    assert MAIN == (await mesh.where.call_one())[0]
    assert MAIN == (await mesh.where.call_one(stops=True))[0]
    await until(lambda: "`pdb next keeper` in the console" in capfd.readouterr().err)
    other = await plain.spawn("stops", Stops)
    await Job.here().stop_next("stops")
    call = other.add.call_one(4)
    for _ in range(2):  # at its first line, and at its breakpoint
        (one,) = await waiting()
        await command(one, "c")
    assert 9 == await call
    assert 17 == await other.add.call_one(4)
    assert MAIN == (await mesh.overlap.call_one())[0]


async def test_an_actor_that_is_debugged_has_one_thread(procs: ProcMesh, capfd: pytest.CaptureFixture[str]) -> None:
    """Constructor, handlers, overlapping ones, and cleanup; so what it keeps there works."""
    mesh = await procs.spawn("keeper", Keeper)
    found = [await mesh.where.call_one(), *await asyncio.gather(*(mesh.overlap.call_one() for _ in range(3)))]
    call = mesh.where.call_one(stops=True)
    (one,) = await waiting()
    await command(one, "c")
    found += [await call, await mesh.where.call_one()]
    assert 1 == len(set(found)), found
    assert "steps of keeper[0]" == found[0][0]
    await mesh.stop()
    await until(lambda: "closed in steps of keeper[0]" in capfd.readouterr().out)


async def test_a_coroutine_beside_one_that_has_stopped(procs: ProcMesh) -> None:
    """Has another thread as long as that one's is taken; afterwards there is one again."""
    mesh = await procs.spawn("both", Beside)
    await Job.here().stop_next("both")
    stopped = mesh.overlap.call_one()
    (one,) = await waiting()
    assert "beside" in await mesh.overlap.call_one()
    await command(one, "c")
    assert "beside" not in await stopped
    assert await stopped == await mesh.overlap.call_one()


def own_hook() -> None:
    """A bootstrap that has breakpoints do something else."""
    sys.breakpointhook = lambda *args, **kwargs: print("the own", "hook", flush=True)  # noqa: T201


async def test_a_hook_of_the_users_own(debug: None, capfd: pytest.CaptureFixture[str]) -> None:
    """Is what a breakpoint calls, whether a bootstrap has set it or an import before the process began; then nothing is run in steps."""
    for options in ({"bootstrap": own_hook}, {"preload": ("tests.observe.hooked",)}):
        async with this_host().spawn_procs(**options) as procs:
            keeper, stops = await procs.spawn("keeper", Keeper), await procs.spawn("stops", Stops)
            assert MAIN == (await keeper.where.call_one(stops=True))[0]
            await until(lambda: "the own hook" in capfd.readouterr().out)
            assert 1 == await stops.add_blocking.call_one(1)


async def test_in_the_debug_mode_of_asyncio(debug: None) -> None:
    """Where a loop is for one thread only, nothing is run in another."""
    async with this_host().spawn_procs(env={"PYTHONASYNCIODEBUG": "1"}) as procs:
        mesh = await procs.spawn("keeper", Keeper)
        assert MAIN == (await mesh.where.call_one())[0]


async def test_on_the_loop_itself_it_is_passed(procs: ProcMesh, capfd: pytest.CaptureFixture[str]) -> None:
    """Where only the loop could wait the breakpoint is passed, with a note that says so."""
    mesh = await procs.spawn("stops", Stops)
    assert "passed" == await mesh.in_a_task.call_one()
    shown = ""

    def noted() -> bool:
        nonlocal shown
        shown += capfd.readouterr().err
        return "was passed" in shown

    await until(noted)


async def test_stop_next(procs: ProcMesh) -> None:
    """A handler without a breakpoint stops at its first line where a debugger has asked for that; the one after it does not."""
    mesh = await procs.spawn("beside", Beside)
    assert ["beside[0]"] == await Job.here().stop_next("beside")
    call = mesh.answer.call_one()
    (one,) = await waiting()
    assert "return 42" in one.text
    with pytest.raises(UnknownName):
        await Job.here().stop_next("nobody")
    await command(one, "c")
    assert 42 == await call
    assert 42 == await mesh.answer.call_one()


async def test_breakpoints_turned_off(debug: None) -> None:
    """The environment variable that Python has for that works in processes too."""
    async with this_host().spawn_procs({"ranks": 1}, env={"PYTHONBREAKPOINT": "0"}) as procs:
        mesh = await procs.spawn("stops", Stops)
        assert 9 == await mesh.add.call_one(4)
        assert 4 == await mesh.add_blocking.call_one(4)
        assert MAIN == (await (await procs.spawn("keeper", Keeper)).where.call_one())[0]


async def test_an_actor_that_is_stopped_meanwhile(procs: ProcMesh) -> None:
    """Stopping the mesh ends handlers that wait at a breakpoint, in either kind of endpoint."""
    mesh, other = await procs.spawn("stops", Stops), await procs.spawn("more", Stops)
    calls = [mesh.add.call_one(1), other.add_blocking.call_one(1)]
    await waiting(2)
    await asyncio.gather(mesh.stop(), other.stop())
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(outcome, ActorError | asyncio.CancelledError | int) for outcome in outcomes), outcomes
    assert [] == await Job.here().stopped()
