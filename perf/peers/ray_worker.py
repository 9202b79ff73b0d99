"""Ray under measurement. An actor is a process, so a call on a mesh is a call to each actor; nothing runs inside the client."""

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

import numpy as np
import ray

from perf.measure import Samples, rate_of, time_calls

__all__ = ["System"]

_SIZES = {"1m": 1 << 20, "64m": 1 << 26}


class Echo:
    async def nop(self) -> None:
        return None

    async def first(self, array: Any) -> float:
        return float(array[0])

    async def process(self) -> int:
        return os.getpid()

    async def hang(self) -> None:
        await asyncio.get_running_loop().create_future()

    async def time_calls_to(self, other: Any, count: int) -> list[float]:
        return await time_calls(count, lambda: other.nop.remote(), warm_up=count // 10)


class Blocking:
    def nop(self) -> None:
        return None


async def _wait(reference: Awaitable[Any]) -> Any:
    return await reference


class System:
    """See `perf.worker`."""

    def __init__(self, procs: int) -> None:
        self.versions = {"ray": version("ray")}
        self._count = procs
        self._mesh: list[Any] = []

    def _spawn(self, cls: type, count: int) -> list[Any]:
        if not ray.is_initialized():
            ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", object_store_memory=4 << 30)
        return [ray.remote(num_cpus=0)(cls).remote() for _ in range(count)]

    async def _echoes(self) -> list[Any]:
        if not self._mesh:
            self._mesh = self._spawn(Echo, self._count)
            await self._all(self._mesh)
        return self._mesh

    async def _all(self, actors: list[Any]) -> None:
        await asyncio.gather(*[_wait(actor.nop.remote()) for actor in actors])

    async def close(self) -> None:
        ray.shutdown()

    async def call(self, count: int) -> Samples:
        echo = (await self._echoes())[0]
        return {"call": await time_calls(count, lambda: echo.nop.remote(), warm_up=count // 10)}

    async def actor_to_actor(self, count: int) -> Samples:
        mesh = await self._echoes()
        return {"actor_to_actor": await mesh[1].time_calls_to.remote(mesh[0], count)}

    async def call_def(self, count: int) -> Samples:
        (blocking,) = self._spawn(Blocking, 1)
        return {"call_def": await time_calls(count, lambda: blocking.nop.remote(), warm_up=count // 10)}

    async def pipelined(self, count: int) -> Samples:
        """At most 5,000, more than which it advises against."""
        echo = (await self._echoes())[0]
        number = min(count, 5000)
        return {"pipelined": await rate_of(number, lambda: self._all([echo] * number))}

    async def mesh(self, count: int) -> Samples:
        mesh = await self._echoes()
        return {"mesh": await time_calls(count, lambda: self._all(mesh), warm_up=count // 10)}

    async def payload(self, count: int) -> Samples:
        return await self._send("array", {name: np.ones(size, np.uint8) for name, size in _SIZES.items()}, count)

    async def tensors(self, count: int) -> Samples:
        import torch  # only here: the client of other workloads shall not carry it

        return await self._send("tensor", {name: torch.ones(size // 4) for name, size in _SIZES.items()}, count)

    async def _send(self, kind: str, values: dict[str, Any], count: int) -> Samples:
        echo = (await self._echoes())[0]
        samples: Samples = {}
        for name, value in values.items():
            took = await time_calls(count, lambda value=value: echo.first.remote(value), warm_up=2)  # type: ignore[misc]
            samples[f"{kind}_{name}"] = [_SIZES[name] / seconds for seconds in took]
        return samples

    async def start(self, count: int) -> Samples:
        took = []
        for _ in range(2):
            begin = time.perf_counter()
            await self._all(self._spawn(Echo, self._count))
            took.append(time.perf_counter() - begin)
        return {"start_cold": took[:1], "start_more": took[1:]}

    async def kill(self, count: int) -> Samples:
        samples = []
        for _ in range(min(count, self._count)):
            (victim,) = self._spawn(Echo, 1)
            process = await victim.process.remote()
            pending = victim.hang.remote()
            await victim.nop.remote()
            start = time.perf_counter()
            os.kill(process, signal.SIGKILL)
            try:
                await asyncio.wait_for(pending, 60)
            except Exception:  # whichever error it is that this system has for it
                samples.append(time.perf_counter() - start)
        return {"kill": samples}
