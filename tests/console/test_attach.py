"""``monarch-async attach``: the prompt on a job of another process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.console.terminal import terminal
from tests.hosts.workers import ENVIRONMENT

JOB = """
import asyncio
from monarch_async import Actor, endpoint, this_host

class Counter(Actor):
    def __init__(self):
        self.value = 7

    @endpoint
    async def get(self):
        return self.value

    @endpoint
    async def stop_here(self):
        breakpoint()
        return self.value

async def main():
    procs = this_host().spawn_procs({"gpus": 2}, name="gpus")
    counters = await procs.spawn("counters", Counter)
    call = counters.slice(gpus=1).stop_here.call_one()
    print("up", flush=True)
    await asyncio.to_thread(input)
    call.cancel()

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A job that ends when it is told to, and must end well."""
    (tmp_path / "counting.py").write_text(JOB)
    running = subprocess.Popen(
        [sys.executable, "counting.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**ENVIRONMENT, "XDG_STATE_HOME": str(tmp_path), "MONARCH_ASYNC_DEBUG": "1"},
    )
    assert running.stdout is not None
    assert running.stdin is not None
    with running.stdin, running.stdout:
        assert "up\n" == running.stdout.readline()
        yield running
        running.stdin.write("\n")
        running.stdin.flush()
        assert 0 == running.wait(30)


def test_looking(job: subprocess.Popen[str], tmp_path: Path) -> None:
    """Read-only: meshes are there by name, commands and functions answer, and what would change the job is refused."""
    with terminal(tmp_path, "attach", "counting") as repl:
        repl.ask("counters", r"<ActorMesh 'counters' of Counter \{'gpus': 2\}>")
        repl.ask("counters.slice(gpus=0)", "ActorMesh")
        repl.ask("del counters")
        repl.ask("meshes ", "counters")
        repl.ask("job.name", "'counting'")
        shown = repl.ask("ps ", r"ACTOR(?s:.*)>>>", prompt="")
        assert "counters[0]" in shown
        repl.ask("tree ", "counters")
        repl.ask("stack 0", r"gpus\[0\] \(pid")
        repl.ask("[row.rank for row in await ps('counters')]", r"\[0, 1\]")
        repl.ask("ps nobody", "there is no actor nobody")
        repl.ask("ps --nothing", "unrecognized arguments: --nothing")
        repl.ask("await counters.get.call()", "read-only")
        repl.ask("kill 0", "read-only")
        repl.ask("pdb ", "stop_here")
        repl.ask("await counters.slice(gpus=0).get.call_one()", "read-only")
        assert 0 == repl.end()


def test_writing(job: subprocess.Popen[str], tmp_path: Path) -> None:
    """With --write its actors are called, evaluated in, and spoken with at their breakpoints; the job goes on afterwards."""
    with terminal(tmp_path, "attach", "--write") as repl:
        repl.ask("await counters.slice(gpus=0).get.call_one()", r"7\r\n")
        repl.ask("eval counters[0] self.value + 1", r"8\b")
        repl.enter("pdb counters")
        repl.expect(r"\(Pdb\) counters\[1\]>")
        repl.enter("p self.value * 6")
        repl.expect(r"42\r\n")
        repl.enter("c")
        repl.expect("goes on")
        repl.expect(">>>")
        repl.ask("await counters.get.call()", r"0–1 +7\r\n")
        assert 0 == repl.end()


def test_no_job(tmp_path: Path) -> None:
    """Where there is none, one line says so, and the status is 1."""
    done = subprocess.run(
        [sys.executable, "-m", "monarch_async", "attach", "nothing"],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**ENVIRONMENT, "XDG_STATE_HOME": str(tmp_path)},
        timeout=60,
    )
    assert 1 == done.returncode, done
    assert 1 == done.stderr.count("\n")
