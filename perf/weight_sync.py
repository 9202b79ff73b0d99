"""What it costs to publish and to pull weights, beside a copy of as many bytes in the same run.

    python perf/weight_sync.py [--mib N] [--rounds N]

A publisher and a puller, on this host and then with the puller behind a worker on loopback, which is another host to it: there weights go
by TCP. Figures are medians of the rounds; within a round each is divided by the copy that was made just before it, by `torch.Tensor.copy_`
in one thread, between memories that are warm.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from monarch_async import Actor, attach_to_workers, endpoint, shutdown, this_host
from monarch_async.tensor import Published, StateDict

__all__ = ["main"]

TENSORS = 64


def seconds_to_copy(source: dict[str, torch.Tensor], target: dict[str, torch.Tensor]) -> float:
    """The least that it can take."""
    began = time.perf_counter()
    for key, tensor in source.items():
        target[key].copy_(tensor)
    return time.perf_counter() - began


def tensors(mib: int) -> dict[str, torch.Tensor]:
    return {f"w{number}": torch.ones(mib * (1 << 18) // TENSORS) for number in range(TENSORS)}


class Publisher(Actor):
    """Publishes so many MiB."""

    published: Published

    def __init__(self, mib: int) -> None:
        torch.set_num_threads(1)
        self.weights = tensors(mib)
        self.copy = tensors(mib)

    @endpoint
    async def handle(self) -> StateDict:
        self.published = await StateDict.publish(self.weights)
        return self.published

    @endpoint
    async def publish(self) -> tuple[float, float]:
        """Seconds for a copy, and to publish."""
        copied = seconds_to_copy(self.weights, self.copy)
        began = time.perf_counter()
        await self.published.update(self.weights)
        return copied, time.perf_counter() - began


class Puller(Actor):
    """Pulls it."""

    def __init__(self, mib: int) -> None:
        torch.set_num_threads(1)
        self.weights = tensors(mib)
        self.copy = tensors(mib)

    @endpoint
    async def pull_into(self, handle: StateDict) -> tuple[float, float]:
        """Seconds for a copy, and to pull in place."""
        copied = seconds_to_copy(self.weights, self.copy)
        began = time.perf_counter()
        await handle.pull_into(self.weights)
        return copied, time.perf_counter() - began

    @endpoint
    async def pull(self, handle: StateDict) -> float:
        """Seconds to have views, or new tensors."""
        began = time.perf_counter()
        await handle.pull()
        return time.perf_counter() - began


def show(title: str, seconds: list[float], copies: list[float], mib: int) -> None:
    took = statistics.median(seconds)
    times = statistics.median(one / copy for one, copy in zip(seconds, copies, strict=True))
    print(f"{title:34} {1e3 * took:9.2f} ms  {mib / 1024 / took:8.2f} GiB/s  {times:6.2f} × a copy")


async def measure(publisher: Publisher, puller: Puller, where: str, mib: int, rounds: int) -> None:
    handle = await publisher.handle.call_one()
    published, pulled, views = [], [], []
    for _ in range(rounds + 4):
        published.append(await publisher.publish.call_one())
        pulled.append(await puller.pull_into.call_one(handle))
        views.append(await puller.pull.call_one(handle))
    published, pulled, views = published[4:], pulled[4:], views[4:]  # until every slot has been used once, its pages are new
    copies = [copy for copy, _ in pulled]
    show(f"publish, {where}", [took for _, took in published], [copy for copy, _ in published], mib)
    show(f"pull_into, {where}", [took for _, took in pulled], copies, mib)
    show(f"pull, {where}", views, copies, mib)
    print(f"{'a copy':34} {1e3 * statistics.median(copies):9.2f} ms")


async def run(mib: int, rounds: int, url: str, key: str) -> None:
    print(f"{mib} MiB in {TENSORS} tensors, {rounds} rounds")
    here = this_host().spawn_procs({"procs": 2}, name="here", preload=["torch"])
    publisher = here.slice(procs=0).spawn("publisher", Publisher, mib)
    await measure(publisher, here.slice(procs=1).spawn("puller", Puller, mib), "same host", mib, rounds)
    there = attach_to_workers([url], key=key).spawn_procs(name="there", preload=["torch"])
    await measure(publisher, there.spawn("puller", Puller, mib), "over TCP", mib, rounds)
    await shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description="What it costs to publish and to pull weights.")
    parser.add_argument("--mib", type=int, default=256, help="size of the weights (default: 256)")
    parser.add_argument("--rounds", type=int, default=9, help="how often (default: 9)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder, "key")
        key.touch(0o600)
        key.write_bytes(os.urandom(32))
        command = [sys.executable, "-m", "monarch_async", "worker", "--listen", "tcp://127.0.0.1:0", "--key-file", str(key)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
            assert worker.stdout is not None
            try:
                asyncio.run(run(options.mib, options.rounds, worker.stdout.readline().split()[-1], str(key)))
            finally:
                worker.terminate()


if __name__ == "__main__":
    main()
