"""The runtime in other people's prompts: a real Jupyter kernel, IPython in a terminal, ``python -m asyncio``."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.console.terminal import PATIENCE, terminal
from tests.hosts.workers import ENVIRONMENT

SLEEPER = """
class Sleeper(Actor):
    @endpoint
    async def say(self, text):
        print("said", text)
        return text
    @endpoint
    async def sleep(self):
        print("it begins")
        try:
            await asyncio.sleep(1000)
        finally:
            print("it ends")
    @endpoint
    def fail(self):
        raise KeyError("spoon")
"""


class Notebook:
    """A kernel, and what its cells show."""

    def __init__(self, folder: Path) -> None:
        manager = pytest.importorskip("jupyter_client.manager")
        pytest.importorskip("ipykernel")
        self.manager = manager.KernelManager(kernel_name="python3", transport="ipc", ip=str(folder / "kernel"))
        self.manager.kernel_spec.argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        self.manager.start_kernel(cwd=str(folder), env={**ENVIRONMENT, "IPYTHONDIR": str(folder), "XDG_STATE_HOME": str(folder)})
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE)

    def begin(self, code: str) -> str:
        """Start a cell; returns its id."""
        cell: str = self.client.execute(code)
        return cell

    def next(self, cell: str) -> tuple[str, str]:
        """The next that a cell shows: its kind, as in ``stream``, and the text; ``("idle", "")`` at its end."""
        while True:
            message: dict[str, Any] = self.client.get_iopub_msg(timeout=PATIENCE)
            if message["parent_header"].get("msg_id") != cell:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                return kind, content["text"]
            if kind == "execute_result":
                return kind, content["data"]["text/plain"]
            if kind == "error":
                return kind, "\n".join(content["traceback"])
            if kind == "status" and content["execution_state"] == "idle":
                return "idle", ""

    def run(self, code: str) -> dict[str, str]:
        """Run a cell to its end; what it has shown, by kind."""
        cell = self.begin(code)
        shown: dict[str, str] = {}
        while (one := self.next(cell))[0] != "idle":
            shown[one[0]] = shown.get(one[0], "") + one[1]
        return shown

    def processes(self) -> list[psutil.Process]:
        return list(psutil.Process(self.manager.provisioner.pid).children(recursive=True))

    def close(self) -> None:
        self.client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()
        # The loop in which these do their work stays for the process otherwise.
        pytest.importorskip("jupyter_core.utils").ensure_event_loop().close()
        asyncio.set_event_loop(None)


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Notebook]:
    opened = Notebook(tmp_path)
    yield opened
    opened.close()


def test_a_notebook(notebook: Notebook) -> None:
    """Cells await; classes can be defined anew; processes print into the cell that runs; interrupting it cancels the handler."""
    assert {} == notebook.run("import asyncio\nfrom monarch_async import *\nprocs = this_host().spawn_procs({'gpus': 2})")
    assert {} == notebook.run(SLEEPER + "mesh = await procs.spawn('m', Sleeper)")
    for text in ("one", "two"):
        cell = notebook.begin(f"await mesh.say.call({text!r})\nawait asyncio.get_running_loop().create_future()")
        assert ("stream", f"[procs1 0–1] said {text}\n") == notebook.next(cell)
        notebook.manager.interrupt_kernel()
        assert "CancelledError" in notebook.next(cell)[1]
        assert "idle" == notebook.next(cell)[0]
    cell = notebook.begin("await mesh.sleep.call()")
    assert "it begins" in notebook.next(cell)[1]
    notebook.manager.interrupt_kernel()
    shown, idle = "", False
    while not ("it ends" in shown and idle):  # which may come in either order
        kind, text = notebook.next(cell)
        shown, idle = shown + text, idle or kind == "idle"
    again = SLEEPER.replace("return text", "return 2 * text")
    assert "'newnew'" in notebook.run(again + "mesh = await procs.spawn('m', Sleeper)\nawait mesh.say.call('new')")["execute_result"]
    assert "Remote traceback" in notebook.run("await mesh.fail.call()")["error"]
    started = notebook.processes()
    assert len(started) >= 4
    notebook.manager.shutdown_kernel()
    assert [] == psutil.wait_procs(started, timeout=15)[1]


def test_the_extension(notebook: Notebook) -> None:
    """With the extension names are at hand, results are tables, errors brief, and the commands are functions."""
    assert {} == notebook.run("%load_ext monarch_async.console.notebook")
    notebook.run(SLEEPER + "mesh = await this_host().spawn_procs({'gpus': 2}).spawn('m', Sleeper)")
    assert "gpus  value\n0–1   'hello'" == notebook.run("await mesh.say.call('hello')")["execute_result"]
    error = notebook.run("await mesh.fail.call()")["error"]
    assert error.startswith("KeyError: 'spoon' in m[")
    assert "Cell" not in error
    assert "['m[0]', 'm[1]']" == notebook.run("[row.actor for row in await ps()]")["execute_result"]


def test_ipython_in_a_terminal(tmp_path: Path) -> None:
    """Autoawait works, tasks go on while the prompt waits, a class is defined, and at the end nothing is left."""
    pytest.importorskip("IPython")
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    words = ["-m", "IPython", "--no-banner", "--no-confirm-exit", f"--ipython-dir={tmp_path}", "--colors=nocolor"]
    with terminal(tmp_path, command=words, prompt=r"In \[1\]:") as shell:
        shell.enter("%load_ext monarch_async.console.notebook")
        shell.expect(r"In \[2\]:")
        shell.enter("%run -i sleeper.py")
        shell.expect(r"In \[3\]:")
        shell.enter("mesh = await this_host().spawn_procs({'gpus': 1}).spawn('m', Sleeper)")
        shell.expect(r"In \[4\]:")
        shell.enter("await mesh.say.call('hel' 'lo')")
        shell.expect("0 +'hello'")
        shell.expect(r"In \[5\]:")
        shell.enter("call = mesh.sleep.call()")
        shell.expect("it begins")
        shell.enter("'at the ' 'prompt'")
        shell.expect("'at the prompt'")
        shell.expect(r"In \[7\]:")
        started = list(psutil.Process(shell.pid).children(recursive=True))
        assert 0 == shell.leave()
        assert [] == psutil.wait_procs(started, timeout=15)[1]


def test_the_prompt_of_asyncio(tmp_path: Path) -> None:
    """``python -m asyncio`` does too: names have to be imported there, and its classes work in processes."""
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    with terminal(tmp_path, command=["-m", "asyncio"]) as repl:
        repl.ask("from monarch_async import *")
        repl.ask("exec(open('sleeper.py').read())")
        repl.ask("mesh = await this_host().spawn_procs({'gpus': 1}).spawn('m', Sleeper)")
        repl.ask("await mesh.say.call('hel' 'lo')", "'hello'")
        repl.ask("await mesh.fail.call()", "KeyError")
        started = list(psutil.Process(repl.pid).children(recursive=True))
        assert len(started) >= 3
        assert 0 == repl.end()
        assert [] == psutil.wait_procs(started, timeout=15)[1]
