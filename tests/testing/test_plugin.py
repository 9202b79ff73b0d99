"""The plugin for pytest: what comes with the package, in projects that use it and in those that don't."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.testing.pytest_project import PytestProject


@pytest.fixture
def project(tmp_path: Path) -> PytestProject:
    return PytestProject(tmp_path)


def test_a_project_that_uses_nothing_pays_nothing(project: PytestProject) -> None:
    """The plugin is there, and neither torch nor the runtime has been imported when tests run; nothing is printed."""
    done = project.run(
        """
import sys

def test_modules(request):
    assert request.config.pluginmanager.has_plugin("monarch_async")
    loaded = {name for name in sys.modules if name.partition(".")[0] in ("monarch_async", "torch", "uvloop", "msgpack", "cloudpickle")}
    assert {"monarch_async", "monarch_async.testing", "monarch_async.testing.plugin"} == loaded
""",
    )
    assert 0 == done.returncode, done.stdout
    assert "1 passed" in done.stdout
    assert "monarch" not in done.stdout + done.stderr


ACTOR = """
import asyncio, os
import pytest
from monarch_async import Actor, endpoint

class Worker(Actor):
    @endpoint
    async def pid(self) -> int:
        return os.getpid()
"""

EVERY_WAY = (
    ACTOR
    + """
PIDS = []

@pytest.mark.asyncio
async def test_async(monarch_leaks, monarch_procs):
    procs = await monarch_procs(2, name="pair")
    assert {"procs": 2} == dict(procs.extent)
    PIDS.extend((await procs.spawn("workers", Worker).pid.call()).values())

def test_sync(monarch_procs, faults):
    procs = monarch_procs({"hosts": 1, "gpus": 1}).initialized.get()
    workers = procs.spawn("workers", Worker)
    faults.at(step=2, mesh="workers", rank=0).fail(ValueError("second"))
    PIDS.extend(workers.pid.call().get().values())
    with pytest.raises(ValueError, match="second"):
        workers.pid.call().get()

def test_a_loop_of_its_own(monarch_leaks, monarch_procs, faults):
    async def main():
        PIDS.append(await monarch_procs().spawn("worker", Worker).pid.call_one())
    faults.at(step=1, mesh="worker", rank=0).block(0.01)
    asyncio.run(main())
    assert 1 == len(faults.log)

def test_all_are_gone():
    assert 4 == len(PIDS)
    assert [] == [pid for pid in PIDS if os.path.exists(f"/proc/{pid}")]
"""
)


def test_processes_for_every_kind_of_test(project: PytestProject) -> None:
    """Asynchronous tests, synchronous ones and those that run a loop of their own get processes, which are stopped afterwards."""
    done = project.run(EVERY_WAY)
    assert 0 == done.returncode, done.stdout
    assert "4 passed" in done.stdout


def test_a_failing_test_reports_its_faults(project: PytestProject) -> None:
    """The line that replays the plan, with the seed from the command line, and what had happened by then."""
    source = (
        ACTOR
        + """
@pytest.mark.asyncio
async def test_it(monarch_procs, faults):
    worker = (await monarch_procs()).spawn("worker", Worker)
    faults.at(step=1, mesh="worker", rank=0).fail(ValueError("injected here"))
    await worker.pid.call_one()

def test_fine(faults):
    faults.at(step=1, mesh="quiet", rank=0).kill()
"""
    )
    done = project.run(source, "--faults-seed=77")
    assert "1 failed, 1 passed" in done.stdout
    assert 'Faults.replay(\'seed=77; fail worker[0] step=1 type="builtins:ValueError" text="injected here"\')' in done.stdout
    assert 's  fail worker[0] step=1 type="builtins:ValueError"' in done.stdout
    assert "quiet" not in done.stdout


def test_what_is_left_behind_fails_the_test(project: PytestProject) -> None:
    """A process, a descriptor and a thread are named; a test that leaves nothing passes."""
    done = project.run(
        """
import os, subprocess, threading

def test_something(monarch_leaks):
    globals()["child"] = subprocess.Popen(["sleep", "50"])
    os.open("/dev/null", os.O_RDONLY)
    threading.Thread(target=threading.Event().wait, daemon=True, name="left").start()

def test_nothing(monarch_leaks):
    child.kill()
    child.wait()
""",
    )
    assert "2 passed, 1 error" in done.stdout, done.stdout
    assert "3 left behind" in done.stdout
    for left in ("process", "fd", "thread 'left' (daemon)"):
        assert f"  {left}" in done.stdout
