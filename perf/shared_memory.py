"""How fast large values go between processes of one host, and what that takes of memory.

    python -m perf.shared_memory             a table with bars: a minute, and 4 GiB of memory
    python -m perf.shared_memory --quick     does everything run? its figures mean nothing

Each value is sent to an actor in another process, which looks at one element and answers with that. What counts is the ratio to a copy of
as many bytes within this process, made between two sends: how fast a machine copies changes from one minute to the next. *Shared*
is memory of `shared_empty`, compared with a call without arguments. Growth is that of the proportional set size. Bars are for a
machine that does nothing else.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from monarch_async import Actor, endpoint, shared_empty, shutdown, this_host
from perf.sampled import run_measure
from perf.stats import quantile
from perf.units import scaled

__all__ = ["main"]

MIB = 1 << 20
MESSAGE = 64 * MIB


class Row(NamedTuple):
    """One line of the table: what was measured, as text; the figure that is judged, and its bar."""

    name: str
    measured: str
    figure: float
    sense: str
    bar: float
    unit: str = "×"

    @property
    def met(self) -> bool:
        return self.figure >= self.bar if self.sense == "≥" else self.figure <= self.bar


def pss() -> int:
    """Proportional memory of this process, in bytes."""
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))


class Looker(Actor):
    @endpoint
    async def look(self, tensor: Any) -> float:
        return float(tensor[0])

    @endpoint
    async def nothing(self) -> None:
        pass

    @endpoint
    async def pss(self) -> int:
        return pss()


class Pinger(Actor):
    @endpoint
    async def ping(self, other: Any, seconds: float) -> list[float]:
        return await _pings(other, seconds)


async def _seconds(looker: Any, tensor: Any, count: int) -> list[float]:
    samples = []
    for _ in range(count):
        began = time.perf_counter()
        await looker.look.call_one(tensor)
        samples.append(time.perf_counter() - began)
    return samples


def _copies(size: int, count: int) -> list[float]:
    source, target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    samples = []
    for _ in range(count):
        began = time.perf_counter()
        target.copy_(source)
        samples.append(time.perf_counter() - began)
    return samples


async def _rates(looker: Any, size: int, rounds: int, count: int) -> tuple[float, float]:
    """Bytes a second of sends, and how that stands to copies: medians of the rounds."""
    tensor = torch.ones(size, dtype=torch.uint8)
    await _seconds(looker, tensor, 3)  # warms segments and mappings
    rates, ratios = [], []
    for _ in range(rounds):
        copy = statistics.median(_copies(size, count))
        send = statistics.median(await _seconds(looker, tensor, count))
        rates.append(size / send)
        ratios.append(copy / send)
    return statistics.median(rates), statistics.median(ratios)


async def _small(looker: Any, count: int) -> float:
    samples = []
    for _ in range(count):
        began = time.perf_counter()
        await looker.nothing.call_one()
        samples.append(time.perf_counter() - began)
    return statistics.median(samples)


async def _shared(looker: Any, size: int, count: int) -> Row:
    tensor = shared_empty(size, dtype=torch.uint8).fill_(1)
    await _seconds(looker, tensor, 3)
    ratios, seconds = [], []
    for _ in range(5):
        small = await _small(looker, count)
        seconds.append(statistics.median(await _seconds(looker, tensor, count)))
        ratios.append(seconds[-1] / small)
    ratio = statistics.median(ratios)
    return Row(f"{size // MIB} MiB of shared_empty, to a small call", scaled(statistics.median(seconds), "s"), ratio, "≤", 2.0)


async def _cast(size: int, count: int) -> Row:
    async with this_host().spawn_procs({"procs": 8}, preload=("torch",)) as procs:
        lookers = procs.spawn("lookers", Looker)
        tensor = torch.ones(size, dtype=torch.uint8)
        for _ in range(8):  # until the pages of the blocks that take turns are mapped
            await lookers.look.call(tensor)
        ratios, rates = [], []
        for _ in range(count):
            copy = statistics.median(_copies(size, 3))
            began = time.perf_counter()
            await lookers.look.call(tensor)
            took = time.perf_counter() - began
            rates.append(8 * size / took)
            ratios.append(8 * copy / took)
    return Row(
        f"{size // MIB} MiB to 8 processes, total, to a copy", scaled(statistics.median(rates), "B/s"), statistics.median(ratios), "≥", 4.0
    )


async def _memory(looker: Any, size: int, count: int) -> list[Row]:
    tensor = torch.ones(size, dtype=torch.uint8)
    gc.collect()
    here, there = pss(), await looker.pss.call_one()
    most_here = most_there = 0
    for _ in range(count):
        await looker.look.call_one(tensor)
        most_here, most_there = max(most_here, pss() - here), max(most_there, await looker.pss.call_one() - there)
    what = f"growth of the {{}} while {count * size / 2**30:.0f} GiB pass"
    return [
        Row(what.format("sender"), scaled(most_here, "B"), most_here / size, "≤", 4.0, "messages"),
        Row(what.format("receiver"), scaled(most_there, "B"), most_there / size, "≤", 4.0, "messages"),
    ]


async def _pings(other: Any, seconds: float) -> list[float]:
    """Small calls for so long, each awaited before the next."""
    samples = []
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        await other.nothing.call_one()
        samples.append(time.perf_counter() - began)
    return samples


async def _beside(looker: Any, size: int) -> list[Row]:
    """From a third process while the loop of this one sends; and from this one while a thread of it sends."""
    tensor = torch.ones(size, dtype=torch.uint8)
    await looker.look.call_one(tensor)

    async def send() -> None:
        end = time.perf_counter() + 3.5
        while time.perf_counter() < end:
            await looker.look.call_one(tensor)

    def send_in_thread() -> None:
        end = time.perf_counter() + 3.5
        while time.perf_counter() < end:
            looker.look.call_one(tensor).get()

    async with this_host().spawn_procs() as procs:
        pinger = await procs.spawn("pinger", Pinger)
        await pinger.ping.call_one(looker, 0.5)
        idle = await pinger.ping.call_one(looker, 4.0)
        pinging = pinger.ping.call_one(looker, 4.0)
        await send()
        busy = await pinging
    rows = [_ping_row(idle, busy, f"ping p99 beside {size // MIB} MiB, a third process's, to idle")]
    idle = await _pings(looker, 4.0)
    sending = asyncio.create_task(asyncio.to_thread(send_in_thread))
    busy = await _pings(looker, 4.0)
    await sending
    return [*rows, _ping_row(idle, busy, f"ping p99 beside {size // MIB} MiB, the sender's, to idle")]


def _ping_row(idle: Sequence[float], busy: Sequence[float], name: str) -> Row:
    worst = quantile(busy, 0.99)
    return Row(name, scaled(worst, "s"), worst / quantile(idle, 0.99), "≤", 5.0)


async def measure(quick: bool) -> list[Row]:
    """All rows."""
    torch.set_num_threads(1)
    rounds, message, huge = (1, 4 * MIB, 8 * MIB) if quick else (5, MESSAGE, 1024 * MIB)
    rows = []
    async with this_host().spawn_procs(preload=("torch",)) as procs:
        looker = await procs.spawn("looker", Looker)
        rows += await _memory(looker, message, 10 if quick else 160)  # first, while there is no segment yet
        rate, _ = await _rates(looker, MIB, rounds, 100)
        rows.append(Row("1 MiB tensor", scaled(rate, "B/s"), rate / 1e9, "≥", 2.0, "GB/s"))
        for size in (message, 4 * message):
            rate, ratio = await _rates(looker, size, rounds, 5)
            rows.append(Row(f"{size // MIB} MiB tensor, to a copy", scaled(rate, "B/s"), ratio, "≥", 0.6))
        rows += [await _shared(looker, size, 100) for size in (MIB, message, 4 * message)]
        rows += await _beside(looker, huge)
    rows.append(await _cast(message, 3 if quick else 7))
    await shutdown()
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    rows = run_measure(__doc__, measure, arguments)
    print(f"{'':52}{'measured':>14}{'figure':>16}{'bar':>16}")
    for row in rows:
        figure, bar = f"{row.figure:.2f} {row.unit}", f"{row.sense} {row.bar:g} {row.unit}"
        print(f"{row.name:52}{row.measured:>14}{figure:>16}{bar:>16} {'met' if row.met else 'MISSED'}")


if __name__ == "__main__":
    main()
