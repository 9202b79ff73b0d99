"""The REPL in a terminal: both prompts, Ctrl-C, completion, classes that are defined there, the end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.console.terminal import CTRL_C, Terminal, terminal
from tests.hosts.workers import ENVIRONMENT, ROOT

SLEEPER = """class Sleeper(Actor):
    @endpoint
    async def sleep(self, path):
        open(path + '.begun', 'x').close()
        try:
            await asyncio.sleep(1000)
        finally:
            open(path, 'x').close()
    @endpoint
    async def add(self, x, y=1):
        return x + y
    @endpoint
    def fail(self):
        raise KeyError('spoon')
"""


@pytest.fixture(params=["full", "plain"])
def repl(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Terminal]:
    with terminal(tmp_path, *(["repl", "--plain"] if request.param == "plain" else [])) as opened:
        yield opened


def define(repl: Terminal, source: str) -> None:
    """Define a class, by a paste: its own layout stays as it is."""
    (Path(repl.cwd) / "source.py").write_text(source)
    repl.ask("exec(compile(open('source.py').read(), '<typed>', 'exec'), globals())", "")


def test_session(repl: Terminal) -> None:
    """Names are at hand, expressions are shown, `await` works, results of a mesh are a table with equal values folded, `_` is the last."""
    repl.ask("1 + 1", r"\n2\r\n")
    repl.ask("_ + 40", r"\n42\r\n")
    define(repl, SLEEPER)
    repl.ask("procs = this_host().spawn_procs({'gpus': 2})", "")
    repl.ask("mesh = await procs.spawn('adders', Sleeper)", "")
    repl.ask("await mesh.add.call(1)", r"gpus +value\r\n0–1 +2\r\n")
    repl.ask("await mesh.add.slice(gpus=0)", "AttributeError")
    pids = processes(repl)
    assert 0 == repl.end()
    assert [] == [pid for pid in pids if psutil.pid_exists(pid)]


def test_ctrl_c(repl: Terminal, tmp_path: Path) -> None:
    """Ctrl-C cancels the running await and the handler behind it, and interrupts code that computes; what is typed is dropped; all goes on."""
    define(repl, SLEEPER)
    repl.ask("mesh = await this_proc().spawn('sleeper', Sleeper)", "")
    repl.ask("far = await this_host().spawn_procs({'gpus': 1}).spawn('far', Sleeper)", "")
    repl.enter(f"await far.sleep.call_one({str(tmp_path / 'ended')!r})")
    wait_for(tmp_path / "ended.begun")
    repl.send(CTRL_C)
    repl.expect("cancelled")
    repl.expect(">>>")
    wait_for(tmp_path / "ended")
    repl.enter("while True: print('turning') or open('turning', 'w').close()", "")
    wait_for(tmp_path / "turning")
    repl.send(CTRL_C)
    repl.expect("KeyboardInterrupt")
    repl.expect(">>>")
    repl.send("nonsense" + CTRL_C)
    repl.expect(">>>")
    repl.ask("await far.add.call_one(1, 2)", r"\n3\r\n")
    assert 0 == repl.end()


def wait_for(path: Path) -> None:
    """Until another process has made a file."""
    while not path.exists():
        os.sched_yield()


def processes(repl: Terminal) -> list[int]:
    return [child.pid for child in psutil.Process(repl.pid).children(recursive=True)]
