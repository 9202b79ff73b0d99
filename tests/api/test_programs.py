"""Whole programs, as people start them: how they end, what they print, what they leave behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

HEAD = """
import asyncio, os, signal, sys, threading, time
import monarch_async
from monarch_async import Actor, endpoint, this_host, this_proc, shutdown_context

class Counter(Actor):
    def __init__(self, fail=False):
        self.value = 0
        if fail:
            raise ValueError("bad")

    @endpoint
    async def add(self, number=1):
        self.value += number
        return self.value

    @endpoint
    def add_in_thread(self, number=1):
        self.value += number
        return self.value

    @endpoint
    async def pid(self):
        return os.getpid()

    @endpoint
    async def blow_up(self):
        raise RuntimeError("blew up")

def note(*pids):
    print("pids", *pids, flush=True)
"""


def run(tmp_path: Path, body: str, *arguments: str, stdin: bool = False) -> subprocess.CompletedProcess[str]:
    """Run it as a script (or from standard input), and see that every process it named is gone soon after it."""
    source = textwrap.dedent(HEAD) + textwrap.dedent(body)
    script = tmp_path / "program.py"
    script.write_text(source)
    command = [sys.executable, *arguments] if stdin else [sys.executable, str(script)]
    done = subprocess.run(command, input=source if stdin else "", capture_output=True, text=True, timeout=30)
    pids = [int(word) for line in done.stdout.splitlines() if line.startswith("pids") for word in line.split()[1:]]
    deadline = time.monotonic() + 2
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < deadline, f"left behind by a program that ended {done.returncode}: {done.stderr}"
        time.sleep(0.01)
    return done


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stdout.splitlines() if not line.startswith("pids")]


def test_case_2_a_healthy_program_ends_with_0_and_says_nothing(tmp_path: Path) -> None:
    """With what it stopped and what it did not."""
    done = run(
        tmp_path,
        """
        async def main():
            procs = this_host().spawn_procs({"gpus": 2})
            counters = procs.spawn("counters", Counter)
            note(*(await counters.pid.call()).values())
            await counters.stop()
            other = procs.spawn("other", Counter)
            print(list((await other.add.call()).values()))
        asyncio.run(main())
        """,
    )
    assert (0, ["[1, 1]"], "") == (done.returncode, lines(done), done.stderr)


def test_the_default_hook_reports_in_full_and_exits_with_1(tmp_path: Path) -> None:
    """A broadcast that raises, nothing awaited."""
    done = run(
        tmp_path,
        """
        async def main():
            counter = this_host().spawn_procs().spawn("counter", Counter)
            note(await counter.pid.call_one())
            counter.blow_up.broadcast()
            await asyncio.sleep(20)
        asyncio.run(main())
        """,
    )
    assert 1 == done.returncode
    assert "monarch_async: unhandled failure\nCounter counter[0] failed: RuntimeError in blow_up: blew up" in done.stderr
    assert 'raise RuntimeError("blew up")' in done.stderr


def test_a_constructor_that_nobody_awaited_is_reported_when_the_program_ends_first(tmp_path: Path) -> None:
    """The error is not lost, and the program ends as it would."""
    done = run(
        tmp_path,
        """
        async def main():
            counter = this_host().spawn_procs().spawn("counter", Counter, True)
            try:
                await counter.add.call_one()
            except monarch_async.ActorDied as error:
                print(error)
        asyncio.run(main())
        """,
    )
    assert (0, ["counter[0] died: ValueError in __init__: bad (its handler had not started)"]) == (done.returncode, lines(done))
    assert "the program ended before anybody awaited counter, whose constructor failed: ValueError: bad" in done.stderr


@pytest.mark.parametrize(
    "end",
    ["", "shutdown_context().get()", "procs.stop().get(); shutdown_context().get()", "sys.exit(5)", "raise LookupError('main')"],
)
def test_a_synchronous_program(tmp_path: Path, end: str) -> None:
    """Everything by get(), from several threads at once; it may shut down, or just end, in whatever way."""
    done = run(
        tmp_path,
        f"""
        procs = this_host().spawn_procs({{"gpus": 2}})
        counters = procs.spawn("counters", Counter)
        counters.initialized.get()
        note(*counters.pid.call().get().values())
        threads = [threading.Thread(target=lambda: [counters.add.call().get(10) for _ in range(50)]) for _ in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(list(counters.add_in_thread.call(0).get().values()))
        {end}
        """,
    )
    assert ["[200, 200]"] == lines(done), done.stderr
    assert {"sys.exit(5)": 5, "raise LookupError('main')": 1}.get(end, 0) == done.returncode
    assert ("" == done.stderr) != end.startswith("raise"), done.stderr


def test_asyncio_run_twice_and_a_main_that_raises(tmp_path: Path) -> None:
    """Each run has a runtime of its own, which ends with it, also when main raises."""
    done = run(
        tmp_path,
        """
        async def main(fail):
            counter = this_host().spawn_procs().spawn("counter", Counter)
            pid = await counter.pid.call_one()
            note(pid)
            if fail:
                raise LookupError("main")
            return pid
        pid = asyncio.run(main(False))
        print(os.path.exists(f"/proc/{pid}"))
        try:
            asyncio.run(main(True))
        except LookupError as error:
            print(repr(error))
        print(isinstance(asyncio.run(main(False)), int), threading.active_count())
        """,
    )
    assert (0, ["False", "LookupError('main')", "True 1"], "") == (done.returncode, lines(done), done.stderr)


def test_keyboard_interrupt_ends_everything(tmp_path: Path) -> None:
    """As from Ctrl-C: main is cancelled, its actors are stopped, the program ends by the signal's rules."""
    done = run(
        tmp_path,
        """
        async def main():
            counter = this_host().spawn_procs().spawn("counter", Counter)
            note(await counter.pid.call_one())
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(20)
        asyncio.run(main())
        """,
    )
    assert done.returncode in (130, -signal.SIGINT)
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")


CASE_20 = """
async def main():
    global Greeter, helper
    procs = this_host().spawn_procs()

    def helper(): return "first"
    class Greeter(Actor):
        @endpoint
        async def hello(self, function=None): return [type(self).__name__, "one", function() if function else helper()]
    one = procs.spawn("one", Greeter)
    print(await one.hello.call_one())

    def helper(): return "second"
    class Greeter(Actor):
        @endpoint
        async def hello(self, function=None): return [type(self).__name__, "two", function() if function else helper()]
    two = procs.spawn("two", Greeter)
    print(await two.hello.call_one(), await one.hello.call_one(lambda: "sent"))
    print(await (await procs.spawn("counter", Counter)).add.call_one(3), await this_proc().spawn("here", Counter).add.call_one(4))

asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["script", "stdin"])
def test_case_20_classes_defined_in_main_and_again(tmp_path: Path, how: str) -> None:
    """From a script's __main__ and from code without a file; after it is redefined, new actors have the new class and old ones the old."""
    done = run(tmp_path, CASE_20, "-", stdin=how == "stdin")
    assert (0, ["['Greeter', 'one', 'first']", "['Greeter', 'two', 'second'] ['Greeter', 'one', 'sent']", "3 4"], "") == (
        done.returncode,
        lines(done),
        done.stderr,
    )


def test_case_20_the_asyncio_repl(tmp_path: Path) -> None:
    """python -m asyncio: top-level await, classes and functions typed in, then redefined."""
    source = """
import monarch_async, os
from monarch_async import Actor, endpoint, this_host
class Greeter(Actor):
    @endpoint
    async def hello(self): return "one"

procs = this_host().spawn_procs()
print("got", await procs.spawn("a", Greeter).hello.call_one())
class Greeter(Actor):
    @endpoint
    async def hello(self): return "two"

print("got", await procs.spawn("b", Greeter).hello.call_one())
await monarch_async.shutdown()
exit()
"""
    done = subprocess.run([sys.executable, "-m", "asyncio"], input=source, capture_output=True, text=True, timeout=30, cwd=tmp_path)
    assert ["one", "two"] == [line.rpartition("got ")[2] for line in done.stdout.splitlines() if "got " in line], done.stderr


@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit(0)"])
@pytest.mark.parametrize("where", ["async", "sync"])
def test_a_forked_child_leaves_its_parents_actors_alone(tmp_path: Path, where: str, end: str) -> None:
    """It is told that it can't use them, sends nothing over its parent's sockets, and its end ends nothing of the parent's."""
    body = f"""
        def fork(counter):
            child = os.fork()
            if not child:
                for send in (counter.add.call_one, counter.add.call, counter.add.broadcast):
                    try:
                        send()
                    except monarch_async.errors.UsageError as error:
                        print(error, flush=True)
                {end}
            assert 0 == os.waitpid(child, 0)[1]
        """
    if where == "sync":
        body += """
        counter = this_host().spawn_procs().spawn("counter", Counter)
        counter.initialized.get()
        note(counter.pid.call_one().get())
        fork(counter)
        print(counter.add.call_one().get(10), this_host().spawn_procs().spawn("other", Counter).add.call_one().get(10))
        """
    else:
        body += """
        async def main():
            counter = await this_host().spawn_procs().spawn("counter", Counter)
            note(await counter.pid.call_one())
            fork(counter)
            print(await counter.add.call_one(), await this_host().spawn_procs().spawn("other", Counter).add.call_one())

        asyncio.run(main())
        """
    done = run(tmp_path, body)
    refused = "this process was forked from one that holds actors, and can't use them: use them in the parent, or start it with 'spawn'"
    assert (0, [refused] * 3 + ["1 1"], "") == (done.returncode, lines(done), done.stderr)
