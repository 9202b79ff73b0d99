"""How soon a job answers those who look into it, and what it pays for that.

    python perf/console.py [--rounds N]

* `ps` of 10,000 actors over 8 processes, from a visitor in this process that has asked once before.
* `stack`, until it has the right line, in each way of being stuck.
* The time of ``monarch-async --help``, start of the interpreter included; and the processor time, which other load does not change.
* Calls with a `top` attached, looking once a second from another process, with metrics on, and with both, against without: for each
  second of the processor time of caller and actor, and for each second on the clock, which says little where others use the machine too.
  In turns, the best of each, since what disturbs only slows down.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from monarch_async import Actor, ProcState, configure, endpoint, shutdown, this_host
from monarch_async.observe.job import attach
from monarch_async.observe.metrics.serving import serve_metrics

ACTORS, PROCS = 10_000, 8
TURN = 1.0
"""Seconds of calls in each turn."""
JOB = f"perf-{os.getpid()}"


class Stuck(Actor):
    """In each way."""

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def spin(self) -> None:
        while True:
            pass

    @endpoint
    async def sleeping(self) -> None:
        time.sleep(1000)  # noqa: ASYNC251  # that is what is wrong with it

    @endpoint
    async def locked(self) -> None:
        ctypes.PyDLL(None).sleep(1000)

    @endpoint
    async def frozen(self) -> None:
        await asyncio.sleep(1000)


class Row(NamedTuple):
    """One figure and what is demanded of it, in the same unit; at most, or, with `least`, at least."""

    title: str
    value: float
    bar: float | None
    unit: str
    least: bool = False

    @property
    def ok(self) -> bool:
        return self.bar is None or (self.value >= self.bar if self.least else self.value <= self.bar)


async def listing(rounds: int) -> Row:
    procs = this_host().spawn_procs({"gpus": PROCS}, name="procs")
    meshes = [procs.spawn(f"mesh{number}", Actor) for number in range(ACTORS // PROCS)]
    for mesh in meshes:
        await mesh
    times = []
    async with attach(JOB) as job:
        assert len(await job.ps()) == ACTORS
        for _ in range(rounds):
            start = time.perf_counter()
            rows = await job.ps()
            times.append(time.perf_counter() - start)
            assert len(rows) == ACTORS
    await procs.stop()
    return Row("ps of 10,000 actors over 8 processes", statistics.median(times), 0.5, "s")


async def stacks(rounds: int) -> list[Row]:
    rows = []
    for name in ("spin", "sleeping", "locked", "frozen"):
        times = []
        for _ in range(rounds):
            procs = this_host().spawn_procs(name="procs")
            actor = procs.spawn("actor", Stuck)
            pid = await actor.pid.call_one()
            call = getattr(actor, name).call_one()
            wanted = ProcState.BUSY if name == "frozen" else ProcState.STUCK
            while (await procs.health()).item().state is not wanted:  # noqa: ASYNC110 - it can only be asked for
                await asyncio.sleep(0.02)
            if name == "frozen":
                os.kill(pid, signal.SIGSTOP)
                while (await procs.health()).item().state is not ProcState.FROZEN:  # noqa: ASYNC110 - the same
                    await asyncio.sleep(0.02)
            async with attach(JOB) as job:
                start = time.perf_counter()
                (stack,) = await job.stack("actor[0]")
                times.append(time.perf_counter() - start)
            assert stack.text.splitlines()[-1].endswith(f"in {name}"), stack
            call.cancel()
            await procs.stop()
        rows.append(Row(f"stack of one that is {name}", max(times), 1.0, "s"))
    return rows


def help_times(rounds: int) -> list[Row]:
    walls, cpus = [], []
    for _ in range(rounds):
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run([sys.executable, "-m", "monarch_async.cli", "--help"], stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        walls.append(time.perf_counter() - start)
        cpus.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return [Row("--help", min(walls), 0.15, "s"), Row("--help, processor time", statistics.median(cpus), None, "s")]


def processor_time(pid: int) -> float:
    """Seconds that a process has used."""
    stat = Path(f"/proc/{pid}/stat").read_bytes()
    fields = stat[stat.rindex(b")") + 2 :].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def throughput(rounds: int) -> list[Row]:
    procs = this_host().spawn_procs(name="procs")
    actor: Any = procs.spawn("actor", Stuck)
    pid = await actor.pid.call_one()

    async def turn() -> tuple[float, float]:
        """Calls per second, and per second of processor time, of the caller's process and the actor's."""
        count, start, used = 0, time.perf_counter(), processor_time(pid) + time.process_time()
        while time.perf_counter() - start < TURN:
            await asyncio.gather(*(actor.pid.call_one() for _ in range(100)))
            count += 100
        return count / (time.perf_counter() - start), count / (processor_time(pid) + time.process_time() - used)

    without, attached, counted, both = [], [], [], []
    await turn()
    for _ in range(rounds):
        without += [await turn(), await turn()]
        async with serve_metrics(token="") as served, aiohttp.ClientSession() as session:
            await (await session.get(served.url)).read()
            counted += [await turn(), await turn()]
        words = [sys.executable, "-m", "monarch_async.cli", "top", "--job", JOB, "--json", "--count", "1000"]
        top = await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE, limit=1 << 20)
        assert top.stdout is not None
        await top.stdout.readline()
        await top.stdout.readline()
        attached += [await turn(), await turn()]
        async with serve_metrics(token="") as served, aiohttp.ClientSession() as session:
            await (await session.get(served.url)).read()
            both += [await turn(), await turn()]
        top.terminate()
        await top.communicate()
        await asyncio.sleep(5.5)  # until nothing counts any more
    await procs.stop()
    rows = []
    for title, turns in (("an attached top", attached), ("metrics", counted), ("metrics and an attached top", both)):
        title = f"calls with {title}, against without"
        best = max(rate for _, rate in turns) / max(rate for _, rate in without)
        rows.append(Row(title, best, 0.95, "× per processor time", least=True))
        rows.append(Row(title, max(rate for rate, _ in turns) / max(rate for rate, _ in without), None, "× per second"))
    return rows


async def measure(rounds: int) -> list[Row]:
    configure(job_name=JOB, stop_timeout=0.5)
    rows = [await listing(rounds), *await stacks(rounds), *await throughput(rounds)]
    await shutdown()
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    rows = [*help_times(10), *asyncio.run(measure(args.rounds))]
    for row in rows:
        bar = f"  (bar {row.bar:g})" if row.bar is not None else ""
        print(f"{'ok  ' if row.ok else 'MISS'}  {row.title:52} {row.value:8.3f} {row.unit}{bar}", flush=True)
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
