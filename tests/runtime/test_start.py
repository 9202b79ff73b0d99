"""Starting processes: what they find, and what each thing that can go wrong is when the mesh is awaited."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from monarch_async import Actor, ActorDied, MeshFailure, Point, SpawnError, UsageError, configure, endpoint, this_host
from monarch_async.ambient import current_runtime
from tests.runtime.agents import wait_gone

SEEN_BY_BOOTSTRAP: list[str] = []


class Probe(Actor):
    """Looks at its process."""

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def look(self) -> dict[str, Any]:
        return {
            "rank": os.environ.get("RANK"),
            "removed": os.environ.get("PROBE_REMOVED"),
            "cpus": sorted(os.sched_getaffinity(0)),
            "cwd": os.getcwd(),
            "bootstrap": list(SEEN_BY_BOOTSTRAP),
            "preloaded": "colorsys" in sys.modules,
        }

    @endpoint
    async def exit(self, code: int) -> None:
        os._exit(code)

    @endpoint
    async def hang(self) -> None:
        await asyncio.sleep(1000)


HEARD: list[str] = []


class Early(Actor):
    """Tells which actors the hook of a bootstrap has heard of."""

    @endpoint
    async def heard(self) -> list[str]:
        return HEARD


def hear_of_spawns() -> None:
    """A bootstrap that installs a hook."""
    current_runtime().on_life.append(lambda cell: HEARD.append(str(cell.identity)))


def note_rank() -> None:
    """A bootstrap: the environment is there already."""
    SEEN_BY_BOOTSTRAP.append(os.environ["RANK"])


async def fail_later() -> None:
    """A bootstrap that fails."""
    raise LookupError("no such thing")


def exit_at_once() -> None:
    """A bootstrap that ends its process."""
    os._exit(5)


def stick() -> None:
    """A bootstrap that never returns."""
    signal.pause()


async def wait_no_procs() -> None:
    """Until none of the processes named `doomed` lives."""
    await wait_gone([process.pid for process in psutil.Process().children(recursive=True) if _name(process).startswith("doomed")])


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.NoSuchProcess:  # it has ended since it was listed
        return ""


class Failures(list[MeshFailure]):
    """What has reached the program's fault hook."""

    def __init__(self) -> None:
        super().__init__()
        self.came = asyncio.Event()

    def hook(self, failure: MeshFailure) -> None:
        self.append(failure)
        self.came.set()


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> Failures:
    told = Failures()
    monkeypatch.setattr("monarch_async.unhandled_fault_hook", told.hook)
    return told


async def test_each_rank_has_its_own_environment_cpus_and_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`env` by point, set before the bootstrap runs; a variable can be removed; `proc_bind`, `cwd`, `preload` hold."""
    monkeypatch.setenv("PROBE_REMOVED", "still here")
    cpu = min(os.sched_getaffinity(0))

    def env(point: Point) -> dict[str, str | None]:
        return {"RANK": str(point.rank), "PROBE_REMOVED": None}

    procs = this_host().spawn_procs(
        {"gpus": 2}, env=env, bootstrap=note_rank, proc_bind=lambda point: [cpu], cwd=str(tmp_path), preload=("colorsys",)
    )
    seen = [value for _, value in (await procs.spawn("probe", Probe).look.call()).items()]
    assert [
        {"rank": rank, "removed": None, "cpus": [cpu], "cwd": str(tmp_path), "bootstrap": [rank], "preloaded": True} for rank in ("0", "1")
    ] == seen


async def test_a_bootstrap_runs_before_what_is_spawned_at_once() -> None:
    """Nobody has waited for the processes to be up: still, what it installs is there for the first actor."""
    procs = this_host().spawn_procs({"gpus": 2}, bootstrap=hear_of_spawns, name="at once")
    assert [["early[0]"], ["early[1]"]] == list((await procs.spawn("early", Early).heard.call()).values())


async def test_a_start_that_fails_is_told_to_who_awaits_it(failures: Failures) -> None:
    """The typed error, with the remote traceback where there is one; no process is left, and the fault hook hears nothing."""
    doomed: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"preload": ("no_such_module",)}, SpawnError, "No module named 'no_such_module'"),
        ({"cwd": "/nowhere"}, SpawnError, "no directory on this host"),
        ({"proc_bind": [[4095], [0]]}, SpawnError, "not all usable"),
        ({"bootstrap": fail_later}, LookupError, "no such thing"),
        ({"bootstrap": exit_at_once}, ActorDied, "exited with code 5"),
    ]
    for settings, error, text in doomed:
        mesh = this_host().spawn_procs({"gpus": 2}, name="doomed", **settings)
        with pytest.raises(error, match=text) as caught:
            await mesh
        if "preload" in settings or settings.get("bootstrap") is fail_later:
            assert "Traceback (most recent call last)" in str(caught.value)
        with pytest.raises(error):
            await mesh
        await wait_no_procs()
        assert [] == failures
        assert 0 < await this_host().spawn_procs().spawn("after", Probe).pid.call_one()


async def test_actors_on_processes_that_could_not_be_started(failures: Failures) -> None:
    """Who awaits only the mesh of actors is told the same, and the fault hook hears nothing."""
    actors = this_host().spawn_procs(name="doomed", preload=("no_such_module",)).spawn("probe", Probe)
    with pytest.raises(ActorDied, match="No module named 'no_such_module'"):
        await actors
    assert [] == failures


async def test_a_start_that_nobody_awaits_is_told_to_the_owner(failures: Failures) -> None:
    """Once, with the story."""
    mesh = this_host().spawn_procs({"gpus": 2}, name="doomed", preload=("no_such_module",))
    async with asyncio.timeout(10):
        await failures.came.wait()
    assert 0 < await this_host().spawn_procs().spawn("after", Probe).pid.call_one()
    assert ["doomed"] == [failure.mesh for failure in failures]
    assert "no_such_module" in failures[0].reason
    assert 2 == mesh.size()


async def test_a_start_that_takes_too_long(failures: Failures) -> None:
    """Named with the option that bounds it, and what was started is gone."""
    before = configure()
    configure(start_timeout=1.0)
    try:
        mesh = this_host().spawn_procs(name="doomed", bootstrap=stick)
        with pytest.raises(SpawnError, match="start_timeout"):
            await mesh
        await wait_no_procs()
        assert [] == failures
    finally:
        configure(start_timeout=before.start_timeout)


async def test_bad_arguments_are_refused_at_the_call() -> None:
    """Before anything is started."""
    bad: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"env": {"A=": "x"}}, UsageError),
        ({"env": {"A": 1}}, TypeError),
        ({"env": lambda point: {"RANK": point.rank}}, TypeError),
        ({"env": {"A": "x\0"}}, UsageError),
        ({"preload": "torch"}, TypeError),
        ({"bootstrap": 3}, TypeError),
        ({"proc_bind": [[0]]}, UsageError),
        ({"per_host": {"gpus": 0}}, Exception),
    ]
    for settings, error in bad:
        with pytest.raises(error):
            this_host().spawn_procs(**{"per_host": {"gpus": 2}, **settings})


async def test_exit_evidence_reaches_every_pending_call(failures: Failures) -> None:
    """Signal or exit code, in each call's error and in the failure; siblings go on."""
    actors = this_host().spawn_procs({"gpus": 3}).spawn("probe", Probe)
    pids = [pid for _, pid in (await actors.pid.call()).items()]
    calls = [actors.slice(gpus=0).hang.call_one() for _ in range(5)]
    await actors.slice(gpus=2).pid.call_one()
    os.kill(pids[0], signal.SIGTERM)
    for call in calls:
        with pytest.raises(ActorDied) as caught:
            await call
        assert (signal.SIGTERM, None) == (caught.value.signal, caught.value.exit_code)
    with pytest.raises(ActorDied) as caught:
        await actors.slice(gpus=1).exit.call_one(3)
    assert (None, 3) == (caught.value.signal, caught.value.exit_code)
    assert pids[2] == await actors.slice(gpus=2).pid.call_one()
    assert [(0, signal.SIGTERM, None), (1, None, 3)] == [(failure.ranks[0], failure.signal, failure.exit_code) for failure in failures]


async def test_time_from_a_kill_to_the_error_of_the_pending_call(failures: Failures) -> None:
    """The median over 12 kills is under 50 ms even on a busy machine: nothing polls."""
    took = []
    for _ in range(3):
        procs = this_host().spawn_procs({"gpus": 4})
        actors = procs.spawn("probe", Probe)
        for rank, pid in enumerate([pid for _, pid in (await actors.pid.call()).items()]):
            call = actors.slice(gpus=rank).hang.call_one()
            start = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(ActorDied):
                await call
            took.append(time.perf_counter() - start)
        await procs.stop()
    assert sorted(took)[len(took) // 2] < 0.05
