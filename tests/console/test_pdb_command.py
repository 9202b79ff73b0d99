"""``pdb`` at the prompt: handlers that have stopped in several ranks are listed, entered, stepped together, and left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.console.terminal import CTRL_C, CTRL_D, terminal

STOPPER = """
class Stopper(Actor):
    @endpoint
    async def step(self, x):
        rank = current_rank().rank
        breakpoint()
        y = x + rank
        return y

    @endpoint
    async def hello(self):
        return "hel" "lo"
"""


@pytest.mark.parametrize("words", [[], ["repl", "--plain"]], ids=["full", "plain"])
def test_handlers_of_two_ranks(words: list[str], tmp_path: Path) -> None:
    """They stop, the prompt and their processes go on; `pdb` lists them, goes to both or one, and `c` lets them end."""
    (tmp_path / "stopper.py").write_text(STOPPER)
    with terminal(tmp_path, *words) as repl:
        repl.ask("exec(compile(open('stopper.py').read(), 'stopper.py', 'exec'))")
        repl.ask("mesh = await this_host().spawn_procs({'gpus': 2}).spawn('m', Stopper)")
        repl.ask("call = mesh.step.call(10)")
        repl.expect("breakpoint at stopper.py:6 in m.step")
        repl.ask("call", "pending")
        while "m[1]" not in repl.ask("pdb ", r"ACTOR(?s:.*?)>>>", prompt=""):
            pass
        repl.enter("pdb m")
        repl.expect(r"y = x \+ rank")
        repl.expect(r"\(Pdb\) m\[0–1\]>")
        repl.enter("p x")
        repl.expect(r"10\r\n")
        repl.enter("p rank")
        repl.expect(r"m\[0\]:\r\n0\r\n")
        repl.expect(r"m\[1\]:\r\n1\r\n")
        repl.expect(r"\(Pdb\) m\[0–1\]>")
        repl.send(CTRL_D)
        repl.expect(r"m\[0–1\] still wait")
        repl.expect(">>>")
        repl.enter("pdb m[1]")
        repl.expect(r"\(Pdb\) m\[1\]>")
        repl.enter("!x = 50")
        repl.expect(r"\(Pdb\) m\[1\]>")
        repl.enter("c")
        repl.expect(r"m\[1\] goes on")
        repl.enter("pdb m")
        repl.expect(r"\(Pdb\) m\[0\]>")
        repl.enter("c")
        repl.expect(r"m\[0\] goes on")
        repl.ask("await call", r"0 +10\r\n1 +51\r\n")
        repl.ask("pdb ", "no handler waits")
        assert 0 == repl.end()


def test_stop_at_the_next_message(tmp_path: Path) -> None:
    """`pdb next` stops a handler without a breakpoint; Ctrl-C at the call lets it go on; a wrong name is refused briefly."""
    (tmp_path / "stopper.py").write_text(STOPPER)
    with terminal(tmp_path) as repl:
        repl.ask("exec(compile(open('stopper.py').read(), 'stopper.py', 'exec'))")
        repl.ask("mesh = await this_host().spawn_procs({'gpus': 1}).spawn('m', Stopper)")
        repl.ask("pdb next nobody", "there is no actor nobody")
        repl.ask("pdb m", "m waits at no breakpoint")
        repl.ask("pdb next m", r"m\[0\]")
        repl.enter("await mesh.hello.call()")
        repl.expect("stopped in m.hello")
        repl.send(CTRL_C)
        repl.expect("cancelled")
        repl.expect(">>>")
        repl.ask("await mesh.hello.call()", "0 +'hello'")
        assert 0 == repl.end()
