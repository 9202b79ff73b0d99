"""Programs that use the runtime, run as processes of their own, so that they can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

import monarch_async
from monarch_async import Actor, endpoint, this_host

ROOT = str(Path(__file__).parents[2])


class Parent(Actor):
    """Has children of every kind."""

    @endpoint
    async def family(self) -> list[int]:
        """Pids: this process, a child of it, a daemon that it started."""
        child = subprocess.Popen(["sleep", "1000"])
        daemon = subprocess.run(["sh", "-c", "setsid sleep 1000 >/dev/null & echo $!"], stdout=subprocess.PIPE, check=True)
        return [os.getpid(), child.pid, int(daemon.stdout)]

    @endpoint
    async def spawn(self) -> list[int]:
        """Spawn processes from here; their pids and those of their families."""
        self.below = this_host().spawn_procs({"inner": 2}).spawn("below", Parent)
        return [pid for _, pids in (await self.below.family.call()).items() for pid in pids]

    @endpoint
    async def hang(self) -> None:
        await asyncio.sleep(1000)

    @endpoint
    async def deaf(self) -> None:
        """Never end when asked to."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        while True:
            time.sleep(1)  # noqa: ASYNC251 - it is to hold the loop


async def main(mode: str) -> None:
    """Start a family, print its pids on a line, then do as `mode` says."""
    monarch_async.configure(stop_timeout=1.0)
    parents = this_host().spawn_procs({"outer": 2}).spawn("parents", Parent)
    pids = [pid for _, family in (await parents.family.call()).items() for pid in family]
    if mode == "nested":
        pids += await parents.slice(outer=0).spawn.call_one()
    print(*pids, flush=True)  # noqa: T201 - for the test that has started it
    if mode == "exit":
        os._exit(7)
    if mode == "deaf":
        parents.slice(outer=1).deaf.broadcast()
        await asyncio.sleep(0.2)
        return
    if mode == "raise":
        raise ValueError("the program fails")
    if mode != "return":
        await parents.hang.call()


@contextlib.contextmanager
def client(mode: str, folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A program, and the pids of the processes it has started, agent and zygotes included. Its temporary files are in `folder`."""
    path = os.pathsep.join([str(Path(monarch_async.__file__).parents[1]), ROOT])
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.runtime.clients", mode],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(folder)},
    )
    with process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        with contextlib.suppress(psutil.NoSuchProcess):
            pids += [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        try:
            yield process, list(dict.fromkeys(pids))
        finally:
            process.kill()


def named(pids: Iterable[int], name: str) -> int:
    """The first process of that name; `agent` is the one that the client itself has started."""
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            forked = process.name().startswith(("monarch-", "procs"))  # those have the agent's command line
            if process.name() == name or (name == "agent" and not forked and "bootstrap" in " ".join(process.cmdline())):
                return pid
    raise LookupError(name)


def wait_all_gone(pids: Iterable[int], timeout: float) -> None:
    """Until none lives; raises `TimeoutError` that says which do."""
    deadline = time.monotonic() + timeout
    while left := [pid for pid in pids if _lives(pid)]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"still there: {[psutil.Process(pid).cmdline() for pid in left if _lives(pid)]}")
        time.sleep(0.005)


def _lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
