"""How soon it is known what is wrong with a process, and what it costs to look.

    python perf/health.py [--rounds N] [--idle SECONDS]

Each figure is the time until `ProcMesh.health`, asked every few milliseconds, tells the state; for a stuck process with a stack whose last
line of the user's code is the right one. The worst of the rounds counts. Rounds begin at different times between two looks of the watchdog.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from monarch_async import Actor, Health, ProcMesh, ProcState, endpoint, shutdown, this_host
from perf.systems.idle import Idle

__all__ = ["Row", "main", "measure"]

POLL = 0.002
BLOCKED = 1.5
"""Seconds for which a loop is blocked, about."""
IDLE_PROCS = 8


class Blocking(Actor):
    """Blocks its event loop."""

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def python(self) -> None:
        end = time.monotonic() + BLOCKED
        while time.monotonic() < end:
            pass

    @endpoint
    async def sleeping(self) -> None:
        time.sleep(BLOCKED)  # noqa: ASYNC251  # that is what is wrong with it

    @endpoint
    async def native(self) -> None:
        ctypes.PyDLL(None).usleep(int(BLOCKED * 1e6))

    @endpoint
    async def regex(self) -> None:
        re.match(r"(a+)+$", "a" * 25 + "b")


class Row(NamedTuple):
    """One figure and what is demanded of it, in the same unit."""

    title: str
    value: float
    bar: float | None
    unit: str

    @property
    def ok(self) -> bool:
        return self.bar is None or self.value <= self.bar


async def seconds_until(procs: ProcMesh, condition: Callable[[Health], object]) -> float:
    start = time.monotonic()
    while not condition((await procs.health()).item()):
        if time.monotonic() - start > BLOCKED + 3.0:
            raise TimeoutError(f"not seen; it is {(await procs.health()).item()}")
        await asyncio.sleep(POLL)
    return time.monotonic() - start


async def frozen(rounds: int) -> list[Row]:
    """From SIGSTOP to `frozen`, and from SIGCONT to something else."""
    procs = this_host().spawn_procs()
    pid = await procs.spawn("blocking", Blocking).pid.call_one()
    freezes, thaws = [], []
    for number in range(rounds):
        await asyncio.sleep(0.1 + 0.03 * number)
        os.kill(pid, signal.SIGSTOP)
        freezes.append(await seconds_until(procs, lambda health: health.state is ProcState.FROZEN))
        os.kill(pid, signal.SIGCONT)
        thaws.append(await seconds_until(procs, lambda health: health.state is not ProcState.FROZEN))
    await procs.stop()
    return [Row("SIGSTOP → frozen", max(freezes), 0.25, "s"), Row("SIGCONT → what it was", max(thaws), 0.25, "s")]


async def stuck(name: str, rounds: int) -> Row:
    """From the call that blocks the loop to `stuck`, with the right line."""
    procs = this_host().spawn_procs()
    blocking = procs.spawn("blocking", Blocking)
    await blocking.pid.call_one()
    took = []
    for number in range(rounds):
        await asyncio.sleep(0.3 + 0.07 * number)
        call = getattr(blocking, name).call_one()
        took.append(await seconds_until(procs, lambda health: health.state is ProcState.STUCK and f", in {name}" in health.stack))
        await call
    await procs.stop()
    return Row(f"blocked ({name}) → stuck, with its line", max(took), 1.0, "s")


async def idle(seconds: float) -> list[Row]:
    """What watching costs processes that do nothing, and their agent."""
    procs = this_host().spawn_procs({"procs": IDLE_PROCS})
    pids = list((await procs.spawn("idle", Idle).process.call()).values())
    agent = _parent(_parent(_parent(pids[0])))
    await asyncio.sleep(0.5)
    before = {pid: _ran(pid) for pid in (*pids, agent)}
    switches = sum(_switches(pid) for pid in pids)
    await asyncio.sleep(seconds)
    ran = {pid: (_ran(pid) - before[pid]) / seconds * 100 for pid in before}
    woken = (sum(_switches(pid) for pid in pids) - switches) / seconds / IDLE_PROCS
    start = time.monotonic()
    for _ in range(100):
        await procs.health()
    asking = (time.monotonic() - start) / 100
    pss = sum(_pss(pid) for pid in pids) / IDLE_PROCS
    await procs.stop()
    return [
        Row("CPU of an idle process", max(ran[pid] for pid in pids), 0.1, "%"),
        Row("times an idle process is woken, a second", woken, None, ""),
        Row(f"CPU of the agent of {IDLE_PROCS} idle processes", ran[agent], None, "%"),
        Row("PSS of an idle process", pss, 10.0, "MB"),
        Row(f"asking for the health of {IDLE_PROCS} processes", asking, None, "s"),
    ]


def _parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[1])


def _ran(pid: int) -> float:
    """Seconds for which all threads have run."""
    total = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/schedstat", "rb") as file:
            total += int(file.read().split()[0])
    return total / 1e9


def _switches(pid: int) -> int:
    """How often its threads have gone to sleep."""
    total = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/status", "rb") as file:
            total += sum(int(line.split()[1]) for line in file if line.startswith(b"voluntary"))
    return total


def _pss(pid: int) -> float:
    with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(b"Pss:")) / 1000


async def measure(rounds: int, seconds: float) -> list[Row]:
    """All figures, in a client of their own."""
    try:
        blocked = [await stuck(name, rounds) for name in ("python", "sleeping", "native", "regex")]
        return [*await frozen(rounds), *blocked, *await idle(seconds)]
    finally:
        await shutdown()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description="How soon it is known what is wrong with a process.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--idle", type=float, default=10.0, metavar="SECONDS", help="how long idle processes are watched")
    given = parser.parse_args(arguments)
    rows = asyncio.run(measure(given.rounds, given.idle))
    print(f"{'':<50}{'measured':>12}{'bar':>12}")
    for row in rows:
        bar = f"≤ {row.bar:g} {row.unit}" if row.bar is not None else ""
        print(f"{row.title:<50}{f'{row.value:.3g} {row.unit}':>12}{bar:>12}{'' if row.ok else '   MISSED'}")
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
