"""torchmonarch under measurement: the same programming model as ours, on a Rust core."""

# mypy: disable-error-code="import-not-found"
# A peer is installed in its own environment only.

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable
from importlib.metadata import version
from typing import Any

import monarch.actor
import torch
from monarch.actor import Actor, endpoint, this_host, this_proc

from perf.measure import Samples, memory, rate_of, time_calls

__all__ = ["System"]

_SIZES = {"1m": 1 << 20, "64m": 1 << 26}
_MOST_ACTORS = 300
"""More would take minutes: each costs milliseconds."""


class Echo(Actor):  # type: ignore[misc]
    def __init__(self) -> None:
        pass

    @endpoint  # type: ignore[untyped-decorator]
    async def nop(self) -> None:
        return None

    @endpoint  # type: ignore[untyped-decorator]
    async def first(self, array: Any) -> float:
        return float(array[0])

    @endpoint  # type: ignore[untyped-decorator]
    async def process(self) -> int:
        return os.getpid()

    @endpoint  # type: ignore[untyped-decorator]
    async def hang(self) -> None:
        await asyncio.sleep(300)

    @endpoint  # type: ignore[untyped-decorator]
    async def time_calls_to(self, other: Any, count: int) -> list[float]:
        return await time_calls(count, other.nop.call_one, warm_up=count // 10)


class Blocking(Actor):  # type: ignore[misc]
    @endpoint  # type: ignore[untyped-decorator]
    def nop(self) -> None:
        return None


async def _wait(future: Awaitable[Any]) -> Any:
    return await future


class System:
    """See `perf.worker`."""

    def __init__(self, procs: int) -> None:
        self.versions = {"torchmonarch": version("torchmonarch")}
        self._count = procs
        self._procs: Any = None
        self._mesh: Any = None
        monarch.actor.unhandled_fault_hook = lambda failure: None

    async def _echoes(self) -> Any:
        if self._mesh is None:
            self._procs = this_host().spawn_procs(per_host={"procs": self._count})
            self._mesh = self._procs.spawn("echo", Echo)
            await self._mesh.nop.call()
        return self._mesh

    async def close(self) -> None:
        os._exit(0)  # its processes end with it; an orderly shutdown takes seconds

    async def call(self, count: int) -> Samples:
        echo = (await self._echoes()).slice(procs=0)
        return {"call": await time_calls(count, echo.nop.call_one, warm_up=count // 10)}

    async def actor_to_actor(self, count: int) -> Samples:
        mesh = await self._echoes()
        return {"actor_to_actor": await mesh.slice(procs=1).time_calls_to.call_one(mesh.slice(procs=0), count)}

    async def call_def(self, count: int) -> Samples:
        await self._echoes()
        blocking = self._procs.slice(procs=0).spawn(f"blocking{time.monotonic_ns()}", Blocking)
        return {"call_def": await time_calls(count, blocking.nop.call_one, warm_up=count // 10)}

    async def local(self, count: int) -> Samples:
        echo = this_proc().spawn(f"local{time.monotonic_ns()}", Echo)
        return {"local": await time_calls(count, echo.nop.call_one, warm_up=count // 10)}

    async def pipelined(self, count: int) -> Samples:
        echo = (await self._echoes()).slice(procs=0)

        async def run() -> None:
            for future in [echo.nop.call_one() for _ in range(count)]:
                await future

        return {"pipelined": await rate_of(count, run)}

    async def broadcast(self, count: int) -> Samples:
        echo = (await self._echoes()).slice(procs=0)

        async def run() -> None:
            for _ in range(count):
                echo.nop.broadcast()
            await echo.nop.call_one()

        return {"broadcast": await rate_of(count, run)}

    async def mesh(self, count: int) -> Samples:
        mesh = await self._echoes()
        return {"mesh": await time_calls(count, mesh.nop.call, warm_up=count // 10)}

    async def tensors(self, count: int) -> Samples:
        echo = (await self._echoes()).slice(procs=0)
        samples: Samples = {}
        for name, size in _SIZES.items():
            tensor = torch.ones(size // 4)
            took = await time_calls(count, lambda tensor=tensor: echo.first.call_one(tensor), warm_up=2)  # type: ignore[misc]
            samples[f"tensor_{name}"] = [size / seconds for seconds in took]
        return samples

    async def start(self, count: int) -> Samples:
        took = []
        for _ in range(2):
            begin = time.perf_counter()
            procs = this_host().spawn_procs(per_host={"procs": self._count})
            await procs.spawn("echo", Echo).nop.call()
            took.append(time.perf_counter() - begin)
        return {"start_cold": took[:1], "start_more": took[1:]}

    async def many(self, count: int) -> Samples:
        """At most 300; the seconds are scaled to `count`, as if further ones cost no more."""
        procs = this_host().spawn_procs()
        process = await procs.spawn("probe", Echo).process.call_one()
        before = memory(process)
        number = min(count, _MOST_ACTORS)
        begin = time.perf_counter()
        actors = [procs.spawn(f"actor{index}", Echo) for index in range(number)]
        await asyncio.gather(*[_wait(actor.nop.call_one()) for actor in actors])
        took = time.perf_counter() - begin
        after = memory(process)
        grown = {kind: (after[kind] - before[kind]) / number for kind in after}
        return {"many_seconds": [took * count / number], "many_bytes": [grown["uss"]], "many_rss": [grown["rss"]]}

    async def idle(self, count: int) -> Samples:
        procs = this_host().spawn_procs(per_host={"procs": self._count})
        processes = (await procs.spawn("echo", Echo).process.call()).values()
        sizes = [memory(process) for process in processes]
        return {"idle_pss": [size["pss"] for size in sizes], "idle_uss": [size["uss"] for size in sizes]}

    async def kill(self, count: int) -> Samples:
        """Three kills only: each takes seconds to be noticed."""
        samples = []
        for _ in range(min(count, 3)):
            victim = this_host().spawn_procs().spawn("victim", Echo)
            process = await victim.process.call_one()
            pending = victim.hang.call_one()
            await asyncio.sleep(0.5)  # the actor lets nothing overlap, so there is nothing to ask whether it has begun
            start = time.perf_counter()
            os.kill(process, signal.SIGKILL)
            try:
                await asyncio.wait_for(_wait(pending), 60)
            except Exception:  # whichever error it is that this system has for it
                samples.append(time.perf_counter() - start)
        return {"kill": samples}
