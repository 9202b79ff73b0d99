"""How soon a failure is told, and how soon what has failed answers again.

    python -m perf.restarts             a table with bars: half a minute
    python -m perf.restarts --quick     does everything run? its figures mean nothing

*Exit* is from SIGKILL of a process to its owner's ``__supervise__``. The others are from the failure, an exception in a cast or SIGKILL, to
the first answer of the next life, asked for at once and again until there is one. With torch *preloaded* processes are forks of one that
has it imported. Bars are for a machine that does nothing else.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from monarch_async import Actor, ActorDied, MeshFailure, ProcMesh, Restart, context, endpoint, shutdown, this_host, this_proc
from perf.sampled import Sampled, run_measure, show_sampled

__all__ = ["main"]

ALWAYS = Restart(max_restarts=10**6)


class Member(Actor):
    @endpoint
    async def life(self) -> tuple[int, int]:
        return os.getpid(), context().actor_instance.incarnation

    @endpoint
    async def fail(self) -> None:
        raise RuntimeError("on purpose")


class Owner(Actor):
    """Notes when it is told of a failure."""

    def __init__(self) -> None:
        self.told: asyncio.Future[float] | None = None

    async def __supervise__(self, failure: MeshFailure) -> bool:
        if self.told is not None and not self.told.done():
            self.told.set_result(time.perf_counter())
        return True

    @endpoint
    async def exit(self) -> float:
        """Seconds from the end of a process until this owner of it is told."""
        self.told = asyncio.get_running_loop().create_future()
        async with this_host().spawn_procs() as procs:
            pid, _ = await procs.spawn("member", Member).life.call_one()
            began = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            return await self.told - began


async def _back(member: Any, incarnation: int) -> None:
    while True:
        try:
            _, now = await member.life.call_one()
        except ActorDied:
            continue
        if now >= incarnation:
            return


async def _exits(count: int) -> list[float]:
    owner = this_proc().spawn("owner", Owner)
    return [await owner.exit.call_one() for _ in range(count)]


async def _actors(count: int) -> list[float]:
    async with this_host().spawn_procs() as procs:
        member = await procs.spawn("member", Member, restart=ALWAYS)
        samples = []
        for turn in range(count):
            began = time.perf_counter()
            member.fail.broadcast()
            await _back(member, turn + 1)
            samples.append(time.perf_counter() - began)
        return samples


async def _processes(procs: ProcMesh, count: int) -> list[float]:
    """Kill all processes of a mesh and wait until all answer again."""
    async with procs:
        members = await procs.flatten("ranks").spawn("members", Member)
        samples = []
        for turn in range(count):
            pids = [pid for pid, _ in (await members.life.call()).values()]
            began = time.perf_counter()
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            await asyncio.gather(*(_back(members.slice(ranks=rank), turn + 1) for rank in range(len(pids))))
            samples.append(time.perf_counter() - began)
        return samples


async def measure(quick: bool) -> list[Sampled]:
    """All rows."""
    many, few = (3, 2) if quick else (200, 30)
    host = this_host()
    rows = [
        Sampled("exit of a process → its owner's __supervise__", await _exits(many), 0.02),
        Sampled("restart of an actor in its process", await _actors(many), 0.005),
        Sampled("restart of a process", await _processes(host.spawn_procs(restart=ALWAYS), few), 0.1),
    ]
    if importlib.util.find_spec("torch") is not None:
        rows.append(
            Sampled(
                "restart of a process, torch preloaded", await _processes(host.spawn_procs(preload=("torch",), restart=ALWAYS), few), 0.1
            )
        )
    rows.append(
        Sampled("restart of all 8 processes of a mesh", await _processes(host.spawn_procs({"gpus": 8}, restart=ALWAYS), few // 2), None)
    )
    await shutdown()
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    show_sampled(run_measure(__doc__, measure, arguments))


if __name__ == "__main__":
    main()
