"""What awaiting a collective costs, how soon a lost member is told, how soon the group works again, and whether loops go on meanwhile.

    python -m perf.collectives             a table with bars: a minute
    python -m perf.collectives --quick     does everything run? its figures mean nothing

*Overhead* is an awaited all_reduce between two processes, less the same one of gloo called plainly, which blocks its thread; both take
turns in the same processes. Of few bytes the awaited one does not use gloo at all. *Lost* is from SIGKILL of one of three members in the
middle of an operation until the awaits of the others raise `PeerLost`; *again* is until all three have the right sum, with torch preloaded.
*Lag* is by how much a timer of 1 ms comes late while 256 MiB are summed. Bars are for a machine that does nothing else, with a core for
each process.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from monarch_async import Restart, endpoint, shutdown, this_host
from monarch_async.tensor import PeerLost, TensorActor
from perf.sampled import Sampled, run_measure, show_sampled

__all__ = ["main"]

PRELOAD = ("torch", "torch.distributed", "perf.collectives")
ALWAYS = Restart(max_restarts=10**6)
SIZES = ((4, "4 bytes"), (65536, "64 KiB"), (1 << 20, "1 MiB"))


def one_thread() -> None:
    torch.set_num_threads(1)


class Member(TensorActor):
    @endpoint
    async def pid(self) -> int:
        await self.comm.ready()
        return os.getpid()

    @endpoint
    async def overhead(self, size: int, rounds: int, turns: int) -> tuple[list[float], list[float]]:
        """Seconds of one operation, the median of each round: awaited, and plainly."""
        comm = self.comm
        group, tensor = comm.process_group, torch.zeros(size // 4)
        awaited, plain = [], []
        for _ in range(rounds):
            await comm.barrier()
            samples = []
            for _ in range(turns):
                began = time.perf_counter()
                await comm.all_reduce(tensor)
                samples.append(time.perf_counter() - began)
            awaited.append(statistics.median(samples))
            await comm.barrier()
            samples = []
            for _ in range(turns):
                began = time.perf_counter()
                dist.all_reduce(tensor, group=group)
                samples.append(time.perf_counter() - began)
            plain.append(statistics.median(samples))
        return awaited, plain

    @endpoint
    async def sum_until_lost(self) -> float:
        """When it was told of the loss, by the clock of all processes."""
        try:
            while True:
                await self.comm.all_reduce(torch.ones(50_000))
        except PeerLost:
            return time.monotonic()

    @endpoint
    async def total(self) -> float:
        tensor = torch.ones(5000)
        await self.comm.all_reduce(tensor)
        return tensor[0].item()

    @endpoint
    async def lag(self, size: int) -> list[float]:
        """How late a timer of 1 ms comes while so many bytes are summed."""
        tensor = torch.zeros(size // 4)
        tensor.fill_(1.0)
        await self.comm.barrier()
        late: list[float] = []

        async def tick() -> None:
            while True:
                before = time.perf_counter()
                await asyncio.sleep(0.001)
                late.append(max(0.0, time.perf_counter() - before - 0.001))

        ticker = asyncio.create_task(tick())
        await self.comm.all_reduce(tensor)
        ticker.cancel()
        return late


class OverGloo(Member):
    """Awaits the very operation that it is compared with."""

    comm_backend = "gloo"


async def _overheads(quick: bool) -> list[Sampled]:
    procs = this_host().spawn_procs({"gpus": 2}, bootstrap=one_thread, preload=PRELOAD)
    members, over_gloo = procs.spawn("members", Member), procs.spawn("over_gloo", OverGloo)
    await members.pid.call()
    await over_gloo.pid.call()
    rows = []
    for size, text in SIZES:
        (awaited, plain), _ = (await over_gloo.overhead.call(size, 3 if quick else 15, 10 if quick else 60)).values()
        difference = [one - other for one, other in zip(awaited, plain, strict=True)]
        rows += [
            Sampled(f"all_reduce of {text}, awaited", awaited, None),
            Sampled(f"all_reduce of {text}, gloo plainly", plain, None),
            Sampled(f"all_reduce of {text}, overhead", difference, 100e-6, 0.5),
        ]
    lags = list(itertools.chain.from_iterable((await members.lag.call((8 if quick else 256) << 20)).values()))
    await procs.stop()
    return [*rows, Sampled("lag of the loop while 256 MiB are summed", lags, 0.005)]


async def _losses(quick: bool) -> list[Sampled]:
    procs = this_host().spawn_procs({"gpus": 3}, bootstrap=one_thread, preload=PRELOAD)
    members: Any = procs.spawn("members", Member, restart=ALWAYS)
    lost, again = [], []
    for turn in range(3 if quick else 30):
        pids = list((await members.pid.call()).values())
        calls = members.sum_until_lost.options(return_exceptions=True).call()
        await asyncio.sleep(0.1)
        began = time.monotonic()
        os.kill(pids[turn % 3], signal.SIGKILL)
        told = list((await calls).values())
        lost.append(max(told[rank] for rank in range(3) if rank != turn % 3) - began)
        sums = set((await members.total.call()).values())
        again.append(time.monotonic() - began)
        if sums != {3.0}:
            raise RuntimeError(f"wrong sums: {sums}")
    await procs.stop()
    return [
        Sampled("lost: SIGKILL → PeerLost at the others", lost, 0.5, 0.99),
        Sampled("again: SIGKILL → right sums of all", again, 1.5, 0.99),
    ]


async def measure(quick: bool) -> list[Sampled]:
    """All rows."""
    rows = [*await _overheads(quick), *await _losses(quick)]
    await shutdown()
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    show_sampled(run_measure(__doc__, measure, arguments))


if __name__ == "__main__":
    main()
