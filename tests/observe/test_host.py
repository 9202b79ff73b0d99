"""What an agent does to the processes of its host, and what it leaves."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import psutil
import pytest

from monarch_async import ProcState, UsageError
from monarch_async.observe.doctor import PY_SPY, find_py_spy
from monarch_async.observe.inside import spying
from monarch_async.observe.job import Job
from tests.api.waiting import until
from tests.observe.zoo import BUSY, FROZEN, SLEEPING, Zoo


async def test_two_stacks_at_once_of_a_frozen_process(zoo: Zoo) -> None:
    """One moment serves both; afterwards it is still known when the process goes on."""
    await zoo.start(FROZEN)
    job = Job.here()
    (first,), (second,) = await asyncio.gather(job.stack(f"cages[{FROZEN}]"), job.stack(f"animals[{FROZEN}]"))
    assert first.text == second.text
    assert "in wait" in first.text
    await job.thaw(f"cages[{FROZEN}]")
    await zoo.until(FROZEN, ProcState.BUSY)


async def test_a_stack_that_is_given_up(zoo: Zoo) -> None:
    """Whenever that is: the process is halted again, counts as frozen all along, and its stack can be had afterwards."""
    await zoo.start(FROZEN)
    job = Job.here()
    (cage,) = [proc for proc in await job._survey.procs() if proc.name == f"cages[{FROZEN}]"]
    before = (await zoo.cages.slice(gpus=FROZEN).health()).item()
    for pause in (0.0, 0.3, 0.31, 0.32, 0.35):  # it waits for its watchdog to be due, and has its moment then
        asked = asyncio.ensure_future(job.stack(cage.name))
        await asyncio.sleep(pause)
        asked.cancel()
        await asyncio.wait([asked])
    await asyncio.sleep(0.2)
    assert "T" == Path(f"/proc/{cage.pid}/stat").read_text().rpartition(")")[2].split()[0]
    after = (await zoo.cages.slice(gpus=FROZEN).health()).item()
    assert ProcState.FROZEN is after.state
    assert after.since > before.since + 1.0
    assert "in wait" in (await job.stack(cage.name))[0].text


async def test_a_process_that_is_thawed_while_its_stack_is_taken_goes_on(zoo: Zoo) -> None:
    """Whether that comes before it is let go on for the stack or within that moment, it is not halted again."""
    await zoo.start(BUSY)
    survey = Job.here()._survey
    (cage,) = [proc for proc in await survey.procs() if proc.name == f"cages[{BUSY}]"]
    for _ in range(2):
        await survey.alter(cage.agent, "freeze", cage.name, "", cage.uid)
        await zoo.until(BUSY, ProcState.FROZEN)
        stack = asyncio.ensure_future(survey.inspect(cage.agent, "stack", cage.uid, limit=5.0))
        await asyncio.sleep(0)  # the question leaves before what follows, and its answer takes longer
        await survey.alter(cage.agent, "thaw", cage.name, "", cage.uid)
        await stack
        assert "T" != Path(f"/proc/{cage.pid}/stat").read_text().rpartition(")")[2].split()[0]
        await zoo.until(BUSY, ProcState.BUSY)


@pytest.fixture
def slow_py_spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `py-spy` that never answers; it writes its pid where the path says."""
    told = tmp_path / "pid"
    program = tmp_path / PY_SPY
    program.write_text(f"#!/bin/sh\necho $$ > {told}.new\nmv {told}.new {told}\nexec sleep 1000\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return told


async def test_py_spy_ends_with_who_asks(slow_py_spy: Path) -> None:
    """One that is cancelled, and one that has waited long enough."""
    asked = asyncio.ensure_future(spying.spy("dump"))
    await until(slow_py_spy.exists)
    pid = int(slow_py_spy.read_text())
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await until(lambda: not psutil.pid_exists(pid))
    with pytest.raises(UsageError, match="did not answer within"):
        await spying.spy("dump", limit=0.1)


async def test_py_spy_ends_with_a_question_that_is_given_up(slow_py_spy: Path, zoo: Zoo) -> None:
    """As Ctrl-C at a command does it: the agent ends what it has started for it."""
    asked = asyncio.ensure_future(Job.here().profile("cages[0]", 600))
    await until(slow_py_spy.exists)
    spying_one = psutil.Process(int(slow_py_spy.read_text()))
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await asyncio.to_thread(psutil.wait_procs, [spying_one], 10)
    assert not spying_one.is_running()


async def test_without_py_spy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The error says how to get it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    with pytest.raises(UsageError, match="pip install py-spy"):
        await spying.spy("dump")


needs_py_spy = pytest.mark.skipif(not find_py_spy(), reason="py-spy is not installed")


@needs_py_spy
async def test_what_py_spy_can_not_look_into_is_a_plain_error() -> None:
    """One line, and what to do."""
    process = await asyncio.create_subprocess_exec("sleep", "1000")
    with pytest.raises(UsageError, match=r"py-spy can't look into that process \(Error: .*see `monarch-async doctor`") as raised:
        await spying.spy("dump", "--pid", str(process.pid))
    assert "\n" not in str(raised.value)
    process.kill()
    await process.wait()


@needs_py_spy
async def test_a_native_stack(zoo: Zoo) -> None:
    """Has the Python line, and the frames of C code below it; a frozen process can't be had, and stays frozen."""
    await zoo.start(SLEEPING, FROZEN)
    job = Job.here()
    (row,) = await job.stack(f"animals[{SLEEPING}]", native=True)
    assert "py-spy" == row.source
    assert "sleep (" in row.text
    assert "(libc" in row.text
    with pytest.raises(UsageError, match="without --native"):
        await job.stack(f"cages[{FROZEN}]", native=True)
    assert ["frozen"] == [row.state for row in await job.ps(f"animals[{FROZEN}]")]


async def test_a_profile_is_bounded(zoo: Zoo) -> None:
    """One that would take no time, or for ever, is refused."""
    for seconds in (0.0, -1.0, float("nan"), float("inf"), 1e9):
        with pytest.raises(UsageError, match="at most 600 s"):
            await Job.here().profile("cages[0]", seconds)
