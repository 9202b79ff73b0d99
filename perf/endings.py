"""What supervision costs when nothing happens, and how soon nothing is left of a client that was killed.

    python perf/endings.py [--tries N] [--actors N] [--idle SECONDS]

Each try starts a program with two processes, each of which has a child of its own, and kills it with SIGKILL; the time runs until no
process of it is left: not the agent, not a zygote, not the children. The worst try counts. Then one program spawns actors with a restart
policy in one process and leaves them alone; what it, its agent and that process use of a core meanwhile is the cost.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil

from monarch_async import Actor, Restart, endpoint, shutdown, this_host

__all__ = ["main"]

LONGEST = 10.0
"""Seconds after which a try has failed."""


class Parent(Actor):
    """Has a child."""

    @endpoint
    def bear(self) -> int:
        return subprocess.Popen(["sleep", "1000"]).pid

    @endpoint
    async def pid(self) -> int:
        return os.getpid()


async def _family() -> None:
    """The program that is killed: it says when it is up."""
    parents = this_host().spawn_procs({"procs": 2}).spawn("parents", Parent)
    await parents.bear.call()
    print("up", flush=True)
    await asyncio.Event().wait()


def kill_once() -> float:
    """Seconds from the SIGKILL of a client to nothing left of it."""
    with subprocess.Popen([sys.executable, __file__, "--family"], stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        if client.stdout.readline() != b"up\n":
            raise RuntimeError("the client did not come up")
        left = psutil.Process(client.pid).children(recursive=True)
        killed = time.monotonic()
        client.kill()
        client.wait()
        while left := [process for process in left if _is_there(process)]:
            if time.monotonic() - killed > LONGEST:
                raise TimeoutError(f"still there: {left}")
            time.sleep(0.002)
        return time.monotonic() - killed


def _is_there(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def idle(actors: int, seconds: float) -> float:
    """Percent of a core that supervised actors without work use: in the client, the agent and their process together."""
    procs = this_host().spawn_procs()
    policy = Restart(max_restarts=3, within=5.0)
    meshes = [procs.spawn(f"actor{number}", Parent, restart=policy) for number in range(actors)]
    await asyncio.gather(*[mesh.pid.call_one() for mesh in meshes])
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    await asyncio.sleep(1.0)

    def used() -> float:
        return sum(times.user + times.system for times in (process.cpu_times() for process in processes))

    before = used()
    await asyncio.sleep(seconds)
    after = used()
    await shutdown()
    return (after - before) / seconds * 100


def main(arguments: Sequence[str] | None = None) -> int:
    """Print both figures with their bars; 1 if one is missed."""
    parser = argparse.ArgumentParser(description="How a killed client ends, and what idle supervision costs.")
    parser.add_argument("--tries", type=int, default=100)
    parser.add_argument("--actors", type=int, default=10_000)
    parser.add_argument("--idle", type=float, default=10.0, metavar="SECONDS")
    parser.add_argument("--family", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.family:
        asyncio.run(_family())
        return 0
    took = sorted(kill_once() for _ in range(given.tries))
    cost = asyncio.run(idle(given.actors, given.idle))
    median, worst = took[len(took) // 2], took[-1]
    print(f"SIGKILL of the client to nothing left, {given.tries} tries: median {median:.3f} s, worst {worst:.3f} s (≤ 1 s)")
    print(f"supervision of {given.actors} idle actors: {cost:.2f} % of a core (< 1 %)")
    return 0 if took[-1] <= 1.0 and cost < 1.0 else 1


if __name__ == "__main__":
    sys.exit(main())
