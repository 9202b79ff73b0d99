"""What processes print reaches the program's own output: prefixed, folded, each stream to its own, the last words of a crash too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from monarch_async import Actor, ActorDied, MeshFailure, configure, endpoint, shutdown, this_host
from tests.hosts.workers import ENVIRONMENT, ROOT

FLOOD = 3000


class Printer(Actor):
    """Prints."""

    @endpoint
    async def say(self, text: str) -> None:
        print(text)  # noqa: T201 - this is what is tested

    @endpoint
    async def complain(self, text: str) -> None:
        print(text, file=sys.stderr)  # noqa: T201 - this is what is tested

    @endpoint
    async def whisper(self, text: str) -> None:
        """By the descriptor, as C code prints."""
        os.write(1, text.encode())

    @endpoint
    async def last_words(self) -> None:
        print("these are the last words", flush=True)  # noqa: T201 - this is what is tested
        os.kill(os.getpid(), signal.SIGKILL)

    @endpoint
    def flood(self) -> None:
        for number in range(FLOOD):
            print(f"line {number} " + "x" * 100)  # noqa: T201 - this is what is tested

    @endpoint
    async def ping(self) -> None:
        """Answer."""


async def test_lines_are_prefixed_folded_and_sorted_by_stream(capfd: pytest.CaptureFixture[str]) -> None:
    """Equal lines of several ranks are one line; others carry their rank; standard error goes to standard error."""
    before = configure()
    configure(fold_window=2.0)  # so that a busy machine folds the same
    printers = this_host().spawn_procs({"gpus": 3}, name="printers").spawn("printer", Printer)
    configure(fold_window=before.fold_window)
    await printers.say.call("all the same")
    await printers.slice(gpus=1).say.call_one("only one")
    await printers.complain.call("trouble")
    await printers.slice(gpus=2).whisper.call_one("no newline")
    await shutdown()
    out, err = capfd.readouterr()
    assert ["[printers 0–2] all the same", "[printers 1] only one", "[printers 2] no newline"] == sorted(out.splitlines())
    assert "[printers 0–2] trouble" == err.strip()


async def test_the_last_words_of_a_process_that_is_killed(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What was in the pipe is shown, and kept for `logs()`, also of a process that is gone."""
    told: list[MeshFailure] = []
    monkeypatch.setattr("monarch_async.unhandled_fault_hook", told.append)
    procs = this_host().spawn_procs({"gpus": 2}, name="doomed")
    printers = procs.spawn("printer", Printer)
    await printers.slice(gpus=0).say.call_one("I live")
    with pytest.raises(ActorDied):
        await printers.slice(gpus=1).last_words.call_one()
    logs = [text for _, text in (await procs.logs()).items()]
    assert ["I live\n", "these are the last words\n"] == logs
    await shutdown()
    assert "these are the last words" in capfd.readouterr().out


async def test_a_flood_of_output_does_not_hold_up_calls(capfd: pytest.CaptureFixture[str]) -> None:
    """While one process prints without end, calls to it and to another are answered; every line arrives, in order."""
    printers = this_host().spawn_procs({"gpus": 2}, name="flood").spawn("printer", Printer)
    await printers
    flood = printers.slice(gpus=0).flood.call_one()
    waits = []
    while not flood.done():
        start = time.monotonic()
        await printers.slice(gpus=1).ping.call_one()
        waits.append(time.monotonic() - start)
    await flood
    await shutdown()
    assert sorted(waits)[int(len(waits) * 0.9)] < 0.25
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("[flood 0] line")]
    assert [f"line {number}" for number in range(FLOOD)] == [" ".join(line.split()[2:4]) for line in lines]


def test_the_last_words_are_shown_before_the_program_ends_of_the_failure() -> None:
    """With the default hook a crash ends the program; what the process printed before is on its output all the same."""
    code = (
        "import asyncio, sys\nfrom monarch_async import this_host\nfrom tests.runtime.test_shown_output import Printer\n"
        "async def main():\n    await this_host().spawn_procs(name='doomed').spawn('printer', Printer).last_words.call_one()\n"
        "asyncio.run(main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, cwd=ROOT, timeout=30)
    assert "[doomed 0] these are the last words\n" == done.stdout
    assert 1 == done.returncode
