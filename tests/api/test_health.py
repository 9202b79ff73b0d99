"""The health of processes: states are told apart from outside, whatever the process does; nobody is killed unless asked."""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from monarch_async import (
    Actor,
    ActorDied,
    Health,
    MeshFailure,
    ProcMesh,
    ProcState,
    Restart,
    UsageError,
    configure,
    endpoint,
    this_host,
    this_proc,
)
from monarch_async._runtime import stacks
from monarch_async.options import Options
from tests.api.waiting import until

BUSY, FROZEN, READY, STUCK = ProcState.BUSY, ProcState.FROZEN, ProcState.READY, ProcState.STUCK


class Worker(Actor):
    """Ways to be busy. What blocks the loop does so until a file is there, or for about a second and a half."""

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def spin(self, until: str) -> None:
        while not os.path.exists(until):
            pass  # the spinning line

    @endpoint
    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251  # that is what is wrong with it

    @endpoint
    async def native_sleep(self, seconds: int) -> float:
        start = time.monotonic()
        left = ctypes.PyDLL(None).sleep(seconds)
        assert not left
        return time.monotonic() - start

    @endpoint
    async def backtrack(self) -> None:
        re.match(r"(a+)+$", "a" * 25 + "b")

    @endpoint
    def backtrack_in_thread(self) -> None:
        re.match(r"(a+)+$", "a" * 25 + "b")

    @endpoint
    async def refuse_dumps(self, how: str) -> None:
        """Do what code does that knows nothing of this: close descriptors that it has not opened, or take signals for its own use."""
        if how == "close the file":
            (file,) = (int(fd) for fd in os.listdir("/proc/self/fd") if f"memfd:{stacks.NAME}" in _target(fd))
            os.close(file)
            os.dup2(os.open(os.devnull, os.O_RDWR), file)
        else:
            faulthandler.unregister(stacks.SIGNAL)

    @endpoint
    def block(self, until: str) -> None:
        while not os.path.exists(until):
            time.sleep(0.01)

    @endpoint
    async def wait(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "waited"


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""  # that by which the list was read


class Slow(Actor):
    """Constructed until a file is there."""

    def __init__(self, until: str) -> None:
        while not os.path.exists(until):
            pass

    @endpoint
    async def pid(self) -> int:
        return os.getpid()


@pytest.fixture
async def procs() -> ProcMesh:
    return this_host().spawn_procs(name="procs")


@pytest.fixture
def quick() -> Iterator[None]:
    """In runtimes that are started from now on, warnings come after 0.7 s and kills after 1 s. Ask for it before any process."""
    before = Options()
    configure(stuck_warn=0.7, stuck_kill_after=1.0)
    yield
    configure(stuck_warn=before.stuck_warn, stuck_kill_after=before.stuck_kill_after)


def line_of(function: Any, text: str) -> int:
    """The number of the line of an endpoint that has this text."""
    code = function.function.__code__
    path, first = code.co_filename, code.co_firstlineno
    with open(path, encoding="utf-8") as file:
        return next(number for number, line in enumerate(file, 1) if number >= first and text in line)


async def health_once(procs: ProcMesh, condition: Callable[[Health], object], seconds: float = 5.0) -> Health:
    """The health of the only process as soon as it is as wanted."""
    health = (await procs.health()).item()
    async with asyncio.timeout(seconds):
        while not condition(health):
            await asyncio.sleep(0.005)
            health = (await procs.health()).item()
    return health


def stuck_in(name: str) -> Callable[[Health], object]:
    """The condition that it is stuck in a function, and not in what came before that on a busy machine."""
    return lambda health: health.state is STUCK and f", in {name}" in health.stack


async def test_a_process_is_starting_then_ready_then_stopped(procs: ProcMesh) -> None:
    """From the moment it is asked for to after its end, one record each time."""
    assert ProcState.STARTING is (await procs.health()).item().state
    pid = await procs.spawn("worker", Worker).pid.call_one()
    ready = await health_once(procs, lambda health: health.state is READY)
    assert (pid, "", "", "", "") == (ready.pid, ready.actor, ready.endpoint, ready.stack, ready.why)
    await procs.stop()
    stopped = (await procs.health()).item()
    assert (ProcState.STOPPED, "exited with code 0", pid) == (stopped.state, stopped.why, stopped.pid)


async def test_a_process_that_ends_by_itself_has_failed(procs: ProcMesh, failures: list[MeshFailure]) -> None:
    """With the evidence, as its owner is told it."""
    pid = await procs.spawn("worker", Worker).pid.call_one()
    os.kill(pid, signal.SIGKILL)
    await until(lambda: failures)
    health = (await procs.health()).item()
    assert (ProcState.FAILED, "killed by signal 9 (SIGKILL)") == (health.state, health.why)


async def test_a_handler_that_waits_or_runs_in_a_thread_is_busy(procs: ProcMesh, tmp_path: Any) -> None:
    """The loop answers, so it is not stuck; actor, endpoint and their time are told."""
    worker = procs.spawn("worker", Worker)
    flag = tmp_path / "flag"
    for name, argument in (("block", str(flag)), ("wait", 1.0)):
        call = getattr(worker, name).call_one(argument)
        seen = await health_once(procs, lambda health: health.running > 0.6)
        assert (BUSY, "worker[0]", name, "") == (seen.state, seen.actor, seen.endpoint, seen.stack)
        assert abs(seen.running - seen.since) < 0.5
        flag.touch()
        await call
        await health_once(procs, lambda health: health.state is READY)


@pytest.mark.parametrize(
    ("name", "text", "native"),
    [("sleep", "time.sleep(seconds)", False), ("native_sleep", "ctypes.PyDLL", True), ("backtrack", "re.match", True)],
)
async def test_a_blocked_loop_is_stuck_with_the_line_that_blocks_it(procs: ProcMesh, name: str, text: str, native: bool) -> None:
    """By Python code and by C code that holds the interpreter's lock; afterwards it is ready, and nothing was cut short."""
    worker = procs.spawn("worker", Worker)
    await worker.pid.call_one()
    arguments = () if name == "backtrack" else (2,)
    call = getattr(worker, name).call_one(*arguments)
    stuck = await health_once(procs, stuck_in(name))
    assert ("worker[0]", name) == (stuck.actor, stuck.endpoint)
    where = f'File "{__file__}", line {line_of(getattr(Worker, name), text)}, in {name}'
    assert where in stuck.stack.splitlines()[-2 if name == "backtrack" else -1]
    assert ("code that keeps the interpreter's lock" in stuck.why) is native
    assert stuck.since >= 0.5
    took = await call
    if name == "native_sleep":
        assert took >= 2.0
    well = await health_once(procs, lambda health: health.state is READY)
    assert "" == well.stack


async def test_spinning_python_code_is_stuck_until_it_ends(procs: ProcMesh, tmp_path: Any) -> None:
    """Its age grows, and is that of the handler."""
    worker = procs.spawn("worker", Worker)
    start = time.monotonic()
    call = worker.spin.call_one(str(tmp_path / "flag"))
    first = await health_once(procs, stuck_in("spin"))
    later = await health_once(procs, lambda health: health.since > 1.2)
    assert first.since < later.since <= time.monotonic() - start + 0.2
    assert ("worker[0]", "spin") == (later.actor, later.endpoint)
    assert "in spin" in later.stack.splitlines()[0]
    (tmp_path / "flag").touch()
    await call
    await health_once(procs, lambda health: health.state is READY)


async def test_c_code_in_an_actors_thread_is_found_too(procs: ProcMesh) -> None:
    """The loop only waits for the interpreter's lock then, so the stack is that of the thread."""
    call = procs.spawn("worker", Worker).backtrack_in_thread.call_one()
    stuck = await health_once(procs, stuck_in("backtrack_in_thread"))
    assert ("worker[0]", "backtrack_in_thread") == (stuck.actor, stuck.endpoint)
    assert "in backtrack_in_thread" in stuck.stack.splitlines()[-2]
    await call


@pytest.mark.parametrize("how", ["close the file", "drop the handler"])
async def test_a_process_that_can_not_be_looked_into_is_left_alone(procs: ProcMesh, how: str) -> None:
    """It is stuck all the same, without a stack; the signal for a dump is not sent, which would end it, or write where it should not."""
    worker = procs.spawn("worker", Worker)
    await worker.refuse_dumps.call_one(how)
    call = worker.native_sleep.call_one(2)
    stuck = await health_once(procs, lambda health: health.since > 1.0)
    assert (STUCK, "") == (stuck.state, stuck.stack)
    assert await call >= 2.0


async def test_which_of_two_actors_it_is_stays_open(procs: ProcMesh) -> None:
    """Two of one class share the code, by which alone a stack from outside is known; the endpoint is told."""
    workers = [procs.spawn(name, Worker) for name in ("one", "other")]
    await asyncio.gather(*(worker.pid.call_one() for worker in workers))
    call = workers[0].native_sleep.call_one(2)
    stuck = await health_once(procs, stuck_in("native_sleep"))
    assert ("", "native_sleep") == (stuck.actor, stuck.endpoint)
    await call


async def test_a_constructor_that_blocks_is_stuck_in_init(procs: ProcMesh, tmp_path: Any) -> None:
    """It is told as ``__init__``."""
    slow = procs.spawn("slow", Slow, str(tmp_path / "flag"))
    stuck = await health_once(procs, stuck_in("__init__"))
    assert ("slow[0]", "__init__") == (stuck.actor, stuck.endpoint)
    (tmp_path / "flag").touch()
    await slow


async def test_case_9_busy_is_not_dead(procs: ProcMesh, failures: list[MeshFailure]) -> None:
    """Catastrophic backtracking is reported with endpoint, age and line, and ends by itself. SIGSTOP is frozen; SIGCONT is no restart."""
    worker = procs.spawn("worker", Worker)
    pid = await worker.pid.call_one()
    call = worker.backtrack.call_one()
    stuck = await health_once(procs, lambda health: health.since > 1.0 and ", in backtrack" in health.stack)
    assert (STUCK, "worker[0].backtrack") == (stuck.state, stuck.place)
    assert f"line {line_of(Worker.backtrack, 're.match')}, in backtrack" in stuck.stack
    await call
    await health_once(procs, lambda health: health.state is READY)

    os.kill(pid, signal.SIGSTOP)
    start = time.monotonic()
    await health_once(procs, lambda health: health.state is FROZEN)
    assert time.monotonic() - start < 0.25
    unanswered = worker.pid.call_one()
    frozen = await health_once(procs, lambda health: health.since > 1.0)
    assert FROZEN is frozen.state
    os.kill(pid, signal.SIGCONT)
    thawed = await health_once(procs, lambda health: health.state is not FROZEN)
    assert thawed.state in (READY, BUSY)
    assert pid == await unanswered
    assert [] == failures


async def test_a_freeze_does_not_count_as_being_stuck(procs: ProcMesh) -> None:
    """Frozen in the midst of a handler it is what it was before, and the time for which it was frozen is not added to anything."""
    worker = procs.spawn("worker", Worker)
    pid = await worker.pid.call_one()
    call = worker.wait.call_one(3.0)
    before = await health_once(procs, lambda health: health.state is BUSY)
    os.kill(pid, signal.SIGSTOP)
    await health_once(procs, lambda health: health.state is FROZEN and health.since > 1.0)
    os.kill(pid, signal.SIGCONT)
    after = await health_once(procs, lambda health: health.state is not FROZEN)
    assert BUSY is after.state
    assert after.running - before.running < 0.7
    call.cancel()


async def test_a_stuck_process_that_is_frozen_is_stuck_afterwards(procs: ProcMesh, tmp_path: Any) -> None:
    """Frozen says more while it lasts."""
    worker = procs.spawn("worker", Worker)
    pid = await worker.pid.call_one()
    call = worker.spin.call_one(str(tmp_path / "flag"))
    before = await health_once(procs, stuck_in("spin"))
    os.kill(pid, signal.SIGSTOP)
    frozen = await health_once(procs, lambda health: health.state is FROZEN and health.since > 0.8)
    assert "" == frozen.stack
    os.kill(pid, signal.SIGCONT)
    after = await health_once(procs, stuck_in("spin"))
    assert after.since - before.since < 1.2
    (tmp_path / "flag").touch()
    await call


async def test_many_may_ask_at_once(pair: ProcMesh, tmp_path: Any) -> None:
    """While one process is stuck, each answer has both, in order, and comes soon; a slice has its own only."""
    workers = pair.spawn("workers", Worker)
    pids = list((await workers.pid.call()).values())
    call = workers.slice(gpus=1).spin.call_one(str(tmp_path / "flag"))
    await health_once(pair.slice(gpus=1), lambda health: health.state is STUCK)
    start = time.monotonic()
    answers = await asyncio.gather(*(pair.health() for _ in range(50)))
    assert time.monotonic() - start < 1.0
    assert [[*pids]] * 50 == [[health.pid for health in answer.values()] for answer in answers]
    assert {STUCK} == {list(answer.values())[1].state for answer in answers}
    (tmp_path / "flag").touch()
    await call


async def test_a_process_that_is_killed_while_stuck_has_failed(procs: ProcMesh, failures: list[MeshFailure]) -> None:
    """Its end replaces what was known of it, and its evidence says nothing of a request."""
    worker = procs.spawn("worker", Worker)
    pid = await worker.pid.call_one()
    call = worker.native_sleep.call_one(30)
    await health_once(procs, lambda health: health.state is STUCK)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorDied, match=r"killed by signal 9 \(SIGKILL\) \("):
        await call
    health = (await procs.health()).item()
    assert (ProcState.FAILED, "") == (health.state, health.stack)
    await until(lambda: failures)


@pytest.mark.parametrize("name", ["sleep", "native_sleep"])
async def test_who_asks_for_it_has_stuck_processes_killed(quick: None, failures: list[MeshFailure], name: str) -> None:
    """The error and the owner's failure say for how long it was stuck, where, and that it was killed on request."""
    procs = this_host().spawn_procs(name="strict", stuck="kill")
    worker = procs.spawn("worker", Worker)
    with pytest.raises(ActorDied) as died:
        await getattr(worker, name).call_one(30)
    place = rf"killed by signal 9 \(SIGKILL\) on request: stuck for 1\.\d s in worker\[0\]\.{name} \(test_health\.py:\d+\)"
    assert re.search(place, str(died.value))
    await until(lambda: failures)
    assert re.search(place, failures[0].reason)
    assert signal.SIGKILL == failures[0].signal
    assert ProcState.FAILED is (await procs.health()).item().state


async def test_a_frozen_process_is_not_killed_for_being_stuck(quick: None, failures: list[MeshFailure]) -> None:
    """Not even one whose owner wants stuck ones killed."""
    procs = this_host().spawn_procs(name="strict", stuck="kill")
    worker = procs.spawn("worker", Worker)
    pid = await worker.pid.call_one()
    os.kill(pid, signal.SIGSTOP)
    await health_once(procs, lambda health: health.state is FROZEN and health.since > 1.5)
    os.kill(pid, signal.SIGCONT)
    assert pid == await worker.pid.call_one()
    assert [] == failures


async def test_the_client_warns_once_of_a_process_that_stays_stuck(quick: None, caplog: pytest.LogCaptureFixture, tmp_path: Any) -> None:
    """With endpoint, age and stack; again the next time, and not at all before."""
    procs = this_host().spawn_procs(name="procs")
    worker = procs.spawn("worker", Worker)

    def warnings() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]

    for count in (1, 2):
        flag = tmp_path / str(count)
        call = worker.spin.call_one(str(flag))
        await health_once(procs, lambda health: health.state is STUCK)
        assert count - 1 == len(warnings())
        await health_once(procs, lambda health: health.since > 1.3)
        assert count == len(warnings())
        assert re.match(r"procs\[0\] \(pid \d+\) has been stuck for 0\.[789] s in worker\[0\]\.spin: Python code", warnings()[-1])
        assert "in spin" in warnings()[-1].splitlines()[1]
        flag.touch()
        await call
        await health_once(procs, lambda health: health.state is READY)


async def test_a_host_whose_agent_does_not_answer_is_unreachable(procs: ProcMesh) -> None:
    """Nobody else knows, and that is said in bounded time; when the agent answers again, so is the state."""
    configured = Options().health_timeout
    pid = await procs.spawn("worker", Worker).pid.call_one()
    agent = psutil.Process(pid).parents()[2]
    agent.suspend()
    try:
        start = time.monotonic()
        health = (await procs.health()).item()
        assert (ProcState.UNREACHABLE, "the agent of its host does not answer within 2 s") == (health.state, health.why)
        assert configured <= time.monotonic() - start < configured + 0.5
    finally:
        agent.resume()
    await health_once(procs, lambda health: health.state is READY)


async def test_this_process_can_be_asked_about() -> None:
    """Whoever asks is not stuck, and needs no agent."""
    health = (await this_proc().health()).item()
    assert (READY, os.getpid()) == (health.state, health.pid)


async def test_what_to_do_with_stuck_processes_is_checked() -> None:
    """A word that is none of the two is refused with both."""
    with pytest.raises(UsageError, match=r'stuck must be "report" or "kill", not \'restart\''):
        this_host().spawn_procs(stuck="restart")  # type: ignore[arg-type]


def test_nothing_of_the_watchdog_runs_in_the_client() -> None:
    """Only processes that an agent has started are watched."""
    assert "watchdog" not in [thread.name for thread in threading.enumerate()]


async def test_a_process_that_is_started_again_is_restarting_until_it_is_up(failures: list[MeshFailure]) -> None:
    """Under the mesh that it always was in; and failed once nobody starts it again."""
    procs = this_host().spawn_procs(name="again", restart=Restart(max_restarts=1, within=60.0, backoff=0.5))
    worker = procs.spawn("worker", Worker)
    first = await worker.pid.call_one()
    os.kill(first, signal.SIGKILL)
    restarting = await health_once(procs, lambda health: health.state is ProcState.RESTARTING)
    assert ("killed by signal 9 (SIGKILL)", 0) == (restarting.why, restarting.pid)
    ready = await health_once(procs, lambda health: health.state is READY)
    assert ready.pid not in (0, first)
    os.kill(ready.pid, signal.SIGKILL)
    failed = await health_once(procs, lambda health: health.state is ProcState.FAILED)
    assert ready.pid == failed.pid
    await until(lambda: failures)
