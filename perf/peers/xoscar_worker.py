"""xoscar under measurement. Its actors have no plain-function endpoints of their own kind and no broadcast, so those are missing."""

# mypy: disable-error-code="import-not-found"
# A peer is installed in its own environment only.

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from importlib.metadata import version
from typing import Any

import numpy as np
import xoscar as xo

from perf.measure import Samples, rate_of, time_calls

__all__ = ["System"]

_SIZES = {"1m": 1 << 20, "64m": 1 << 26}


class Echo(xo.Actor):  # type: ignore[misc]
    async def nop(self) -> None:
        return None

    async def first(self, array: Any) -> float:
        return float(array[0])

    async def process(self) -> int:
        return os.getpid()

    async def hang(self) -> None:
        await asyncio.get_running_loop().create_future()

    async def time_calls_to(self, other: Any, count: int) -> list[float]:
        return await time_calls(count, other.nop, warm_up=count // 10)


class System:
    """See `perf.worker`."""

    def __init__(self, procs: int) -> None:
        self.versions = {"xoscar": version("xoscar")}
        self._count = procs
        self._pools: list[Any] = []
        self._mesh: list[Any] = []

    async def _pool(self, procs: int) -> tuple[str, list[Any]]:
        """A new pool of processes: its own address, and an actor in each process."""
        with socket.create_server(("127.0.0.1", 0)) as probe:  # port 0 is not for xoscar: actors know it by its address
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        pool = await xo.create_actor_pool(address, n_process=procs)
        self._pools.append(pool)
        actors = [await xo.create_actor(Echo, address=sub, uid=f"echo{rank}") for rank, sub in enumerate(pool.sub_processes)]
        return address, actors

    async def _echoes(self) -> list[Any]:
        if not self._mesh:
            self._address, self._mesh = await self._pool(self._count)
        return self._mesh

    async def close(self) -> None:
        for pool in self._pools:
            await pool.stop()

    async def call(self, count: int) -> Samples:
        echo = (await self._echoes())[0]
        return {"call": await time_calls(count, echo.nop, warm_up=count // 10)}

    async def actor_to_actor(self, count: int) -> Samples:
        mesh = await self._echoes()
        return {"actor_to_actor": await mesh[1].time_calls_to(mesh[0], count)}

    async def local(self, count: int) -> Samples:
        await self._echoes()
        echo = await xo.create_actor(Echo, address=self._address, uid=f"local{time.monotonic_ns()}")
        return {"local": await time_calls(count, echo.nop, warm_up=count // 10)}

    async def pipelined(self, count: int) -> Samples:
        echo = (await self._echoes())[0]
        return {"pipelined": await rate_of(count, lambda: asyncio.gather(*[echo.nop() for _ in range(count)]))}

    async def mesh(self, count: int) -> Samples:
        mesh = await self._echoes()
        return {"mesh": await time_calls(count, lambda: asyncio.gather(*[echo.nop() for echo in mesh]), warm_up=count // 10)}

    async def payload(self, count: int) -> Samples:
        echo = (await self._echoes())[0]
        samples: Samples = {}
        for name, size in _SIZES.items():
            array = np.ones(size, np.uint8)
            took = await time_calls(count, lambda array=array: echo.first(array), warm_up=2)  # type: ignore[misc]
            samples[f"array_{name}"] = [size / seconds for seconds in took]
        return samples

    async def start(self, count: int) -> Samples:
        took = []
        for _ in range(2):
            begin = time.perf_counter()
            _, actors = await self._pool(self._count)
            await asyncio.gather(*[actor.nop() for actor in actors])
            took.append(time.perf_counter() - begin)
        return {"start_cold": took[:1], "start_more": took[1:]}

    async def kill(self, count: int) -> Samples:
        """A few kills only: a process takes seconds to start. The mesh is not usable afterwards, so it is another one."""
        samples = []
        _, victims = await self._pool(min(count, self._count))
        for victim in victims:
            process = await victim.process()
            pending = asyncio.ensure_future(victim.hang())
            await asyncio.sleep(0.1)  # the actor lets nothing overlap, so there is nothing to ask whether it has begun
            start = time.perf_counter()
            os.kill(process, signal.SIGKILL)
            try:
                await asyncio.wait_for(pending, 60)
            except Exception:  # whichever error it is that this system has for it
                samples.append(time.perf_counter() - start)
        return {"kill": samples}
