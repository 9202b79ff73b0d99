"""The REPL in a terminal, with both prompts: what is shown, Ctrl-C, completion, what is defined there, the end."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pexpect
import psutil
import pytest

from tests.console.terminal import CTRL_C, Terminal, terminal
from tests.hosts.workers import ENVIRONMENT, ROOT, command

SLEEPER = """
class Sleeper(Actor):
    @endpoint
    async def sleep(self):
        print("it be" "gins")
        try:
            await asyncio.sleep(1000)
        finally:
            print("it en" "ds")
    @endpoint
    async def add(self, x, y=1):
        return x + y
    @endpoint
    def fail(self):
        raise KeyError("spoon")
    @endpoint
    async def rank(self):
        return current_rank().rank
"""


@pytest.fixture(params=["full", "plain"])
def repl(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Terminal]:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    words = ["repl", "--plain"] if request.param == "plain" else []
    with terminal(tmp_path, *words) as opened:
        opened.ask("exec(open('sleeper.py').read())")
        yield opened


def processes(repl: Terminal) -> list[psutil.Process]:
    return list(psutil.Process(repl.pid).children(recursive=True))


def test_a_session(repl: Terminal) -> None:
    """Names are at hand, `await` works, results of a mesh are a table, errors are brief, and at the end nothing is left."""
    repl.ask("1 + 1", r"2\r\n")
    repl.ask("_ + 40", r"42\r\n")
    repl.ask("mesh = await this_host().spawn_procs({'gpus': 2}).spawn('m', Sleeper)")
    repl.ask("await mesh.add.call(1)", r"gpus +value\r\n0–1 +2\r\n")
    repl.ask("await mesh.rank.call()", r"0 +0\r\n1 +1\r\n")
    shown = repl.ask("await mesh.fail.call()", r"KeyError: 'spoon' in m(?s:.*)Remote traceback(?s:.*)in fail(?s:.*)>>>", prompt="")
    assert "_runtime" not in shown
    repl.ask("f = mesh.add.call_one(1)", "ValueError: call_one needs a single actor")
    repl.ask("f = mesh.slice(gpus=0).add.call_one(1, y=5)")
    repl.ask("await f", r"6\r\n")
    repl.enter("mesh.sleep.call()")
    repl.expect("pending")
    repl.expect("it begins")
    started = processes(repl)
    assert len(started) >= 4
    assert 0 == repl.end()
    assert [] == psutil.wait_procs(started, timeout=10)[1]


def test_ctrl_c(repl: Terminal) -> None:
    """Ctrl-C cancels the await and the handler behind it, interrupts code that computes, drops what is typed; the session goes on."""
    repl.ask("mesh = await this_host().spawn_procs({'gpus': 1}).spawn('m', Sleeper)")
    repl.enter("await mesh.sleep.call()")
    repl.expect("it begins")
    repl.send(CTRL_C)
    repl.expect("cancelled")
    repl.expect("it ends")
    repl.ask("", "")
    repl.enter("for _ in iter(lambda: print('turn' 'ing') or [].append(range(10000)), 0): pass", "")
    repl.expect("turning")
    repl.send(CTRL_C)
    repl.expect("KeyboardInterrupt")
    repl.expect(">>>")
    repl.send("nonsense")
    repl.expect("nonsense")
    repl.send(CTRL_C)
    repl.expect(">>>")
    repl.ask("await mesh.add.call(1, 2)", r"0 +3\r\n")
    assert 0 == repl.end()


def test_ctrl_c_where_other_code_holds_the_loop(tmp_path: Path) -> None:
    """The first can't be carried out; one after it interrupts whatever executes."""
    with terminal(tmp_path) as repl:
        repl.ask("def hold(): print('hold' 'ing') or [None for _ in iter(int, 1)]", blank=True)
        repl.enter("asyncio.get_running_loop().call_soon(hold) and None; await asyncio.sleep(1000)")
        repl.expect("holding")
        while repl.expect([">>>", pexpect.TIMEOUT], timeout=1):
            repl.send(CTRL_C)
        repl.ask("'still ' + 'here'", "'still here'")
        assert 0 == repl.end()


def test_the_loop_goes_on_while_the_prompt_waits(repl: Terminal) -> None:
    """A task of the session runs, and what it prints is shown, while nothing is typed."""
    repl.enter("task = asyncio.get_running_loop().call_later(0.01, print, 'behind the', 'prompt')")
    repl.expect("behind the prompt\r\n")
    assert 0 == repl.end()


def test_completion(repl: Terminal) -> None:
    """Names, attributes, endpoints and the dimensions of a mesh are completed."""
    repl.ask("mesh = this_proc().spawn('m', Sleeper)")
    repl.ask("procs = this_host().spawn_procs({'gpus': 1, 'lanes': 1})")
    repl.enter("current_act\t()")
    repl.expect("'client'")
    repl.expect(">>>")
    repl.enter("mesh.sle\t")
    repl.expect("<endpoint sleep of m>")
    repl.expect(">>>")
    repl.enter("procs.slice(la\t0).extent")
    repl.expect(r"\{'gpus': 1\}")
    repl.expect(">>>")
    assert 0 == repl.end()


def test_classes_of_the_prompt(repl: Terminal) -> None:
    """A class that is typed runs in processes, with the functions of the session it uses, also after both were defined anew."""
    repl.ask("procs = this_host().spawn_procs({'gpus': 1})")
    for value in ("one", "two"):
        repl.ask(f"def helper(): return {value!r} * 2", blank=True)
        repl.ask("exec('class Typed(Actor):\\n @endpoint\\n async def get(self): return helper()')")
        repl.ask("await procs.spawn('typed', Typed).get.call()", rf"0 +'{value}{value}'\r\n")
    assert 0 == repl.end()


def test_typing_a_class(tmp_path: Path) -> None:
    """In the full prompt lines are indented by themselves, and an empty one ends the class."""
    with terminal(tmp_path) as repl:
        repl.enter("class Typed(Actor):", "@endpoint", "async def get(self):", "return 'in' 'dented'", "")
        repl.expect(">>>")
        repl.ask("await this_host().spawn_procs({'gpus': 1}).spawn('typed', Typed).get.call()", "0 +'indented'")
        assert 0 == repl.end()


def test_exit_and_status(repl: Terminal) -> None:
    """`exit(3)` ends the session with that status; the job ends with it."""
    repl.ask("await this_host().spawn_procs({'gpus': 1})", "ProcMesh")
    started = processes(repl)
    repl.enter("exit(3)")
    assert 3 == repl.wait_ended()
    assert [] == psutil.wait_procs(started, timeout=10)[1]


def test_a_failure_does_not_end_the_session(repl: Terminal) -> None:
    """What ends a program, a failure that nothing handles, is only reported at a prompt."""
    repl.ask("mesh = await this_host().spawn_procs({'gpus': 1}).spawn('m', Sleeper)")
    repl.enter("mesh.fail.broadcast()")
    repl.expect("unhandled failure")
    repl.ask("'still ' + 'here'", "'still here'")
    assert 0 == repl.end()


@pytest.mark.parametrize(
    ("script", "status", "shown"), [("print(await this_proc().dead_letters())", 0, "ValueMesh"), ("1 / 0", 1, "ZeroDivisionError")]
)
def test_what_is_piped_in_is_a_script(script: str, status: int, shown: str) -> None:
    """It runs to its end, with `await`, and an error is the exit status."""
    done = subprocess.run(command(), input=script, capture_output=True, text=True, timeout=60, env=ENVIRONMENT, cwd=ROOT)
    assert (status, True) == (done.returncode, shown in done.stdout + done.stderr)
