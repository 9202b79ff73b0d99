"""One-sided copies: against memcpy within a host, against a plain socket between hosts, and what calls beside them have to wait.

    python perf/rdma.py [--rounds N] [--size MiB] [--ucx]

Each figure is the median of rounds in which the copy and what it is compared with take turns, between warm memories: those of one host are
copied so often before that they have large pages, as memory has that is read again and again. The other host is a worker on loopback, so
what passes has the MAC of links between hosts; the plain socket is between two blocking processes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import monarch_async
from monarch_async import Actor, RDMAAction, RDMABuffer, attach_to_workers, endpoint, shutdown, this_host
from perf.measure import memcpy_rates
from perf.stats import quantile

__all__ = ["Row", "main", "measure"]

MiB = 1 << 20
BESIDE = 1024 * MiB
PINGS = 1500
WARM = 6
WARM_UP = 2.0
"""Seconds: so long it takes at the most to make 256 MiB of them."""


class Owner(Actor):
    """Owns the memory."""

    @endpoint
    async def make(self, size: int, backend: str | None) -> RDMABuffer:
        self.memory = bytearray(b"o") * size
        return RDMABuffer(self.memory, backend=backend)

    @endpoint
    async def ping(self) -> None:
        pass


class Row(NamedTuple):
    """One figure, what it is compared with, and the ratio that is demanded."""

    title: str
    value: float
    reference: float
    bar: float | None
    unit: str
    more_is_better: bool = True

    @property
    def ratio(self) -> float:
        return self.value / self.reference if self.reference else 0.0

    @property
    def ok(self) -> bool:
        if self.bar is None:
            return True
        return self.ratio >= self.bar if self.more_is_better else self.ratio <= self.bar


async def rate(buffer: RDMABuffer, memory: Any, write: bool) -> float:
    """Bytes a second of one copy."""
    start = time.perf_counter()
    await (buffer.write_from(memory) if write else buffer.read_into(memory))
    return buffer.size / (time.perf_counter() - start)


async def warm_up(buffer: RDMABuffer, memory: Any) -> None:
    """Copy it often enough for large pages, and wait until they are there."""
    for _ in range(WARM):
        await buffer.read_into(memory)
    await asyncio.sleep(WARM_UP)


async def against_memcpy(owner: Any, size: int, rounds: int, backend: str) -> list[Row]:
    """Within this host."""
    buffer = await owner.make.call_one(size, backend)
    memory = bytearray(b"m") * size
    rows = []
    await warm_up(buffer, memory)
    for write in (False, True):
        ours, copied = [], []
        await rate(buffer, memory, write)
        for _ in range(rounds):
            copied.append(statistics.median(memcpy_rates(size, 3)))
            ours.append(await rate(buffer, memory, write))
        name = "write_from" if write else "read_into"
        bar = 0.8 if backend == "cma" and not write else None
        rows.append(Row(f"{name}, {backend}, {size // MiB} MiB / memcpy", statistics.median(ours), statistics.median(copied), bar, "B/s"))
    await buffer.drop()
    return rows


def plain_socket(size: int, rounds: int) -> list[float]:
    """Bytes a second that a process reads from another over TCP on loopback, both blocking."""
    rates = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        pid = os.fork()
        if not pid:
            with server.accept()[0] as sock:
                memory = b"s" * size
                while sock.recv(1):
                    sock.sendall(memory)
            os._exit(0)
        with socket.create_connection(server.getsockname()) as sock:
            room = memoryview(bytearray(size))
            for _ in range(rounds + 1):
                start = time.perf_counter()
                sock.sendall(b"g")
                got = 0
                while got < size:
                    got += sock.recv_into(room[got:])
                rates.append(size / (time.perf_counter() - start))
    os.waitpid(pid, 0)
    return rates[1:]


async def against_socket(owner: Any, size: int, rounds: int, backend: str, what: str, bar: float | None) -> list[Row]:
    """Between hosts, or by the same messages."""
    buffer = await owner.make.call_one(size, backend)
    memory = bytearray(b"m") * size
    plain = statistics.median(plain_socket(size, rounds))
    rows = []
    for write in (False, True):
        await rate(buffer, memory, write)
        ours = statistics.median([await rate(buffer, memory, write) for _ in range(rounds)])
        name = "write_from" if write else "read_into"
        rows.append(Row(f"{name}, {what}, {size // MiB} MiB / plain socket", ours, plain, None if write else bar, "B/s"))
    await buffer.drop()
    return rows


async def pings(owner: Any, until: asyncio.Future[Any] | None) -> list[float]:
    """How long calls take: so many, or as many as there can be until something is done."""
    samples = []
    while len(samples) < PINGS if until is None else not until.done():
        start = time.perf_counter()
        await owner.ping.call_one()
        samples.append(time.perf_counter() - start)
    return samples


async def beside(owner: Any, backend: str | None, what: str) -> Row:
    """The 99th percentile of calls from the process that reads, while it reads."""
    buffer = await owner.make.call_one(BESIDE // 4, backend)
    memory = bytearray(b"m") * (BESIDE // 4)
    await warm_up(buffer, memory)
    await pings(owner, None)
    idle = quantile(await pings(owner, None), 0.99)
    samples: list[float] = []
    while len(samples) < PINGS:
        action = RDMAAction()
        for _ in range(4):
            action.read_into(buffer, memory)
        samples += await pings(owner, action.submit())
    await buffer.drop()
    return Row(f"ping p99 beside read_into of 1 GiB, {what} / idle", quantile(samples, 0.99), idle, 5.0, "s", False)


async def small(owner: Any) -> Row:
    """A copy of 4 KiB, against a call."""
    buffer = await owner.make.call_one(4096, None)
    memory = bytearray(4096)
    took, called = [], []
    for _ in range(2000):
        start = time.perf_counter()
        await buffer.read_into(memory)
        middle = time.perf_counter()
        await owner.ping.call_one()
        took.append(middle - start)
        called.append(time.perf_counter() - middle)
    return Row("read_into of 4 KiB, cma / a call", statistics.median(took), statistics.median(called), None, "s", False)


@contextlib.contextmanager
def worker(key: str) -> Iterator[str]:
    """A worker on loopback."""
    root = Path(__file__).resolve().parent.parent
    path = os.pathsep.join([str(Path(monarch_async.__file__).parents[1]), str(root)])
    command = [sys.executable, "-m", "monarch_async", "worker", "--listen", "tcp://127.0.0.1:0", "--key-file", key]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}, cwd=root)
    assert process.stdout is not None
    with process.stdout:
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(15)


@contextlib.asynccontextmanager
async def owner_elsewhere() -> AsyncIterator[Any]:
    """An owner on another host."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(os.urandom(32))
        file.flush()
        with worker(file.name) as url:
            yield attach_to_workers([url], key=file.name).spawn_procs().slice(hosts=0).spawn("owner", Owner)
            await shutdown()


async def measure(size: int, rounds: int, ucx: bool) -> list[Row]:
    """All figures, in clients of their own."""
    rows = []
    try:
        owner = this_host().spawn_procs().spawn("owner", Owner)
        rows += await against_memcpy(owner, size, rounds, "cma")
        rows += await against_memcpy(owner, size, rounds, "segment")
        if ucx:
            rows += await against_memcpy(owner, size, rounds, "ucx")
        rows += [await small(owner), await beside(owner, None, "cma")]
        await shutdown()
        async with owner_elsewhere() as owner:
            rows += await against_socket(owner, size, rounds, "tcp", "tcp with MAC", 0.8)
            rows += [await beside(owner, "tcp", "tcp")]
            if ucx:
                rows += await against_socket(owner, size, rounds, "ucx", "ucx", None)
    finally:
        await shutdown()
    return rows


def scaled(value: float, unit: str) -> str:
    return f"{value / 1e9:.2f} GB/s" if unit == "B/s" else f"{value * 1e6:.0f} µs"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description="One-sided copies against memcpy and a plain socket.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--size", type=int, default=256, metavar="MiB")
    parser.add_argument("--ucx", action="store_true", help="measure the backend ucx too; needs the extra of that name")
    given = parser.parse_args(arguments)
    rows = asyncio.run(measure(given.size * MiB, given.rounds, given.ucx))
    print(f"{'':<58}{'measured':>12}{'reference':>12}{'ratio':>8}{'bar':>8}")
    for row in rows:
        bar = "" if row.bar is None else f"{'≥' if row.more_is_better else '≤'} {row.bar:g}"
        figures = f"{scaled(row.value, row.unit):>12}{scaled(row.reference, row.unit):>12}{row.ratio:>8.2f}{bar:>8}"
        print(f"{row.title:<58}{figures}{'' if row.ok else '   MISSED'}")
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
