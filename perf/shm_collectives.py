"""Collectives over shared memory against gloo over loopback, in the same processes.

    python perf/shm_collectives.py [--ranks 2 4] [--rounds N] [--only all_reduce] [--lag] [--quick]

Ours is awaited in a coroutine; gloo is waited for in a thread that does nothing else (``work.wait()``), without an event loop. In each
round the two take turns on the same tensors; the time of a round is that of its slowest rank, and the ratio is taken within the round.
Shown are the medians. With ``--lag`` the event loops of the ranks are asked for the time every millisecond while a large all_reduce runs;
the 99th percentile of how late the answer is is shown.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from monarch_async import Actor, endpoint, shutdown, this_host
from monarch_async.ambient import current_runtime
from monarch_async.ids import ProcAddress
from monarch_async.peering import Peering
from monarch_async.tensor.shm.backend import ShmBackend
from monarch_async.tensor.shm.worker import Job

__all__ = ["Row", "main", "measure"]

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB)
WHAT = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
TIMEOUT = 60.0
LAG = 256 * MIB
LAGS = ("with ours", "with gloo", "without")


class Rank(Actor):
    """One member, with both backends."""

    @endpoint
    async def address(self) -> ProcAddress:
        return current_runtime().me

    @endpoint
    async def connect(self, addresses: list[ProcAddress], me: int, path: str, port: int) -> None:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        self.size = len(addresses)
        self.shm = ShmBackend(Peering(current_runtime()), addresses)
        store = dist.FileStore(path, len(addresses))
        await asyncio.to_thread(self.shm.connect, store, me, len(addresses), TIMEOUT)
        url = f"tcp://127.0.0.1:{port}"
        timeout = timedelta(seconds=TIMEOUT)
        await asyncio.to_thread(dist.init_process_group, "gloo", init_method=url, rank=me, world_size=len(addresses), timeout=timeout)

    def _operations(self, what: str, size: int) -> tuple[Callable[[], Job], Callable[[], Any]]:
        whole = torch.ones(size // 4)
        part = torch.ones(size // 4 // self.size)
        if what == "all_reduce":
            return lambda: self.shm.all_reduce(whole, dist.ReduceOp.SUM), lambda: dist.all_reduce(whole)
        if what == "broadcast":
            return lambda: self.shm.broadcast(whole, 0), lambda: dist.broadcast(whole, 0)
        whole = torch.ones(part.numel() * self.size)
        if what == "all_gather":
            return lambda: self.shm.all_gather(whole, part), lambda: dist.all_gather_into_tensor(whole, part)
        return lambda: self.shm.reduce_scatter(part, whole, dist.ReduceOp.SUM), lambda: dist.reduce_scatter_tensor(part, whole)

    @endpoint
    async def time(self, what: str, size: int, rounds: int, times: int) -> list[tuple[float, float, float, float]]:
        """Seconds of one operation, ours and gloo's, and of the processor for each, by round."""
        ours, gloo = self._operations(what, size)
        found = []
        for _ in range(rounds):
            await ended(self.shm.all_reduce(torch.zeros(1), dist.ReduceOp.SUM))
            start, used = time.perf_counter(), time.process_time()
            for _ in range(times):
                await ended(ours())
            mine, mine_used = time.perf_counter() - start, time.process_time() - used
            theirs, theirs_used = await asyncio.to_thread(self._time_gloo, gloo, times)
            found.append((mine / times, theirs / times, mine_used / times, theirs_used / times))
        return found

    def _time_gloo(self, gloo: Callable[[], Any], times: int) -> tuple[float, float]:
        dist.all_reduce(torch.zeros(1))
        start, used = time.perf_counter(), time.process_time()
        for _ in range(times):
            gloo()
        return time.perf_counter() - start, time.process_time() - used

    @endpoint
    async def lag(self, size: int, times: int) -> tuple[float, float, float]:
        """How late the loop is, in seconds, at the 99th percentile, while ours and gloo's all_reduces run, and while none does."""
        whole = torch.ones(size // 4)
        late: list[float] = []

        async def watch() -> None:
            while True:
                start = time.perf_counter()
                await asyncio.sleep(0.001)
                late.append(time.perf_counter() - start - 0.001)

        async def ours() -> None:
            for _ in range(times):
                await ended(self.shm.all_reduce(whole, dist.ReduceOp.SUM))

        def gloo() -> None:
            for _ in range(times):
                dist.all_reduce(whole)

        async def watched(work: Awaitable[None]) -> float:
            late.clear()
            watching = asyncio.create_task(watch())
            await work
            watching.cancel()
            return sorted(late)[len(late) * 99 // 100]

        return await watched(ours()), await watched(asyncio.to_thread(gloo)), await watched(asyncio.sleep(1.0))

    @endpoint
    async def disconnect(self) -> None:
        self.shm.abort()
        await asyncio.to_thread(self.shm.close)
        await asyncio.to_thread(dist.destroy_process_group)


async def ended(job: Job) -> None:
    """Wait for an operation."""
    if job.ended and job.error is None:
        return
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    job.when_done(lambda error: loop.call_soon_threadsafe(future.set_result, error))
    error = await future
    if error is not None:
        raise error


class Row(NamedTuple):
    """Seconds, medians over the rounds. `ratio` is how many times as fast as gloo ours is, `best` the same of the fastest rounds of both.

    `used` is what all ranks together take of the processor.
    """

    ranks: int
    what: str
    size: int
    ours: float
    gloo: float
    ratio: float
    best: float
    used: float
    used_gloo: float

    def __str__(self) -> str:
        took = f"{self.ours * 1e6:8.0f} µs, gloo {self.gloo * 1e6:8.0f} µs: {self.ratio:5.2f} ×, best rounds {self.best:5.2f} ×"
        used = f"processor {self.used * 1e6:8.0f} µs, gloo {self.used_gloo * 1e6:8.0f} µs: {self.used_gloo / self.used:5.2f} ×"
        return f"{self.ranks} {self.what:14} {self.size // KIB:6} KiB {took}; {used}"


async def measure(ranks: int, sizes: Sequence[int], what: Sequence[str], rounds: int, *, lag: bool = False) -> list[Row]:
    rows = []
    procs = this_host().spawn_procs({"ranks": ranks}, name="shm", preload=("torch",))
    mesh = procs.spawn("rank", Rank)
    members = [mesh.slice(ranks=index) for index in range(ranks)]
    addresses = [await member.address.call_one() for member in members]
    with tempfile.TemporaryDirectory() as directory, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        path = f"{directory}/store"
        await asyncio.gather(*(member.connect.call_one(addresses, index, path, port) for index, member in enumerate(members)))
    for name in what:
        for size in sizes:
            times = 200 if size <= 64 * KIB else 20 if size <= MIB else 3
            found = await asyncio.gather(*(member.time.call_one(name, size, rounds, times) for member in members))
            rounds_found = [[*zip(*of_round, strict=True)] for of_round in zip(*found, strict=True)]
            by_round = [(max(ours), max(gloo), sum(used), sum(used_gloo)) for ours, gloo, used, used_gloo in rounds_found]
            ours, gloo, used, used_gloo = (statistics.median(values) for values in zip(*by_round, strict=True))
            best = min(each[1] for each in by_round) / min(each[0] for each in by_round)
            row = Row(ranks, name, size, ours, gloo, statistics.median(each[1] / each[0] for each in by_round), best, used, used_gloo)
            rows.append(row)
            print(row, flush=True)
    if lag:
        lags = await asyncio.gather(*(member.lag.call_one(LAG, 3) for member in members))
        late = ", ".join(f"{max(values) * 1e3:.1f} ms {how}" for values, how in zip(zip(*lags, strict=True), LAGS, strict=True))
        print(f"{ranks} the loop's lag in all_reduces of {LAG // MIB} MiB, 99th percentile: {late}", flush=True)
    await mesh.disconnect.call()
    await procs.stop()
    return rows


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    parser.add_argument("--only", nargs="+", default=WHAT, choices=WHAT)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lag", action="store_true")
    parser.add_argument("--quick", action="store_true", help="does everything run?")
    args = parser.parse_args()
    sizes, rounds = ((4 * KIB, MIB), 1) if args.quick else (args.sizes, args.rounds)
    for ranks in args.ranks:
        await measure(ranks, sizes, args.only, rounds, lag=args.lag)
    await shutdown()


if __name__ == "__main__":
    asyncio.run(main())
