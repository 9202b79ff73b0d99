"""monarch_async under measurement, through its public API only."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import monarch_async
from monarch_async import Actor, ActorDied, MeshFailure, endpoint, this_host, this_proc
from perf.measure import Samples, memory, on_core, rate_of, time_calls, two_cores
from perf.systems.idle import Idle
from perf.systems.interpreters import start_seconds

__all__ = ["System"]

_SIZES = {"1m": 1 << 20, "64m": 1 << 26}


class Echo(Actor):
    """What is called."""

    @endpoint
    async def nop(self) -> None:
        return None

    @endpoint
    async def first(self, array: Any) -> float:
        return float(array[0])

    @endpoint
    async def process(self) -> int:
        return os.getpid()

    @endpoint(concurrent=True)
    async def hang(self) -> None:
        await asyncio.get_running_loop().create_future()

    @endpoint
    async def time_calls_to(self, other: Echo, count: int) -> list[float]:
        return await time_calls(count, other.nop.call_one, warm_up=count // 10)

    @endpoint
    async def imported(self, module: str) -> bool:
        return module in sys.modules


class Blocking(Actor):
    """Its endpoint is a plain function, which runs in the actor's thread."""

    @endpoint
    def nop(self) -> None:
        return None


def _version() -> str:
    try:
        return version("monarch-async")
    except PackageNotFoundError:
        return "from its sources"


def _ignore(failure: MeshFailure) -> None:
    """Processes are killed on purpose here."""


class System:
    """See `perf.worker`."""

    def __init__(self, procs: int) -> None:
        self.versions = {"monarch_async": _version()}
        self._count = procs
        self._procs: Any = None
        self._mesh: Any = None
        self._pair_procs: Any = None
        self._pair: Any = None
        monarch_async.unhandled_fault_hook = _ignore

    async def _echoes(self) -> Any:
        """One actor in each process of the mesh that most workloads use."""
        if self._mesh is None:
            self._procs = this_host().spawn_procs(per_host={"procs": self._count})
            self._mesh = await self._procs.spawn("echo", Echo)
        return self._mesh

    async def _two(self) -> Any:
        """Two processes, the first on another core than this one, the second on the same."""
        if self._pair is None:
            cores = two_cores()
            bind = None if cores is None else [{cores[1]}, {cores[0]}]
            self._pair_procs = this_host().spawn_procs(per_host={"procs": 2}, proc_bind=bind)
            self._pair = await self._pair_procs.spawn("echo", Echo)
        return self._pair

    async def _echo(self) -> Echo:
        one: Echo = (await self._two()).slice(procs=0)
        return one

    def _apart(self) -> contextlib.AbstractContextManager[None]:
        cores = two_cores()
        return on_core(cores[0] if cores is not None else None)

    async def close(self) -> None:
        await monarch_async.shutdown()

    async def call(self, count: int) -> Samples:
        echo = await self._echo()
        with self._apart():
            return {"call": await time_calls(count, echo.nop.call_one, warm_up=count // 10)}

    async def actor_to_actor(self, count: int) -> Samples:
        mesh = await self._two()
        caller, called = mesh.slice(procs=1), mesh.slice(procs=0)
        return {"actor_to_actor": await caller.time_calls_to.call_one(called, count)}

    async def call_def(self, count: int) -> Samples:
        await self._two()
        blocking = await self._pair_procs.slice(procs=0).spawn("blocking", Blocking)
        try:
            with self._apart():
                return {"call_def": await time_calls(count, blocking.nop.call_one, warm_up=count // 10)}
        finally:
            await blocking.stop()

    async def local(self, count: int) -> Samples:
        async with this_proc().spawn("local", Echo) as echo:
            return {"local": await time_calls(count, echo.nop.call_one, warm_up=count // 10)}

    async def pipelined(self, count: int) -> Samples:
        echo = await self._echo()
        with self._apart():
            return {"pipelined": await rate_of(count, lambda: asyncio.gather(*[echo.nop.call_one() for _ in range(count)]))}

    async def broadcast(self, count: int) -> Samples:
        """Messages nobody awaits, up to the bound on what may be under way; and as many that are each awaited."""
        echo = await self._echo()

        async def unawaited() -> None:
            for _ in range(count):
                echo.nop.broadcast()
            await echo.nop.call_one()

        async def awaited() -> None:
            for _ in range(count):
                await echo.nop.broadcast()
            await echo.nop.call_one()

        with self._apart():
            return {"broadcast": await rate_of(count, unawaited), "broadcast_awaited": await rate_of(count, awaited)}

    async def mesh(self, count: int) -> Samples:
        mesh = await self._echoes()
        return {"mesh": await time_calls(count, mesh.nop.call, warm_up=count // 10)}

    async def payload(self, count: int) -> Samples:
        """NumPy arrays."""
        import numpy as np  # only here: other workloads' processes shall not carry it

        echo = await self._echo()
        samples: Samples = {}
        for name, size in _SIZES.items():
            array = np.ones(size, np.uint8)
            took = await time_calls(count, lambda array=array: echo.first.call_one(array), warm_up=2)  # type: ignore[misc]
            samples[f"array_{name}"] = [size / seconds for seconds in took]
        return samples

    async def tensors(self, count: int) -> Samples:
        import torch  # only here: the client of other workloads shall not carry it

        echo = await self._echo()
        samples: Samples = {}
        for name, size in _SIZES.items():
            tensor = torch.ones(size // 4)
            took = await time_calls(count, lambda tensor=tensor: echo.first.call_one(tensor), warm_up=2)  # type: ignore[misc]
            samples[f"tensor_{name}"] = [size / seconds for seconds in took]
        return samples

    async def start(self, count: int) -> Samples:
        """Processes from the first word with the library to all of them answering; then as many more. For a fresh worker."""
        took = []
        for _ in range(2):
            begin = time.perf_counter()
            procs = this_host().spawn_procs(per_host={"procs": self._count})
            await procs.spawn("idle", Idle).process.call()
            took.append(time.perf_counter() - begin)
        return {"start_cold": took[:1], "start_more": took[1:]}

    async def start_torch(self, count: int) -> Samples:
        """The same with torch imported in all of them. For a fresh worker."""
        begin = time.perf_counter()
        procs = this_host().spawn_procs(per_host={"procs": self._count}, preload=("torch",))
        there = await procs.spawn("idle", Idle).imported.call("torch")
        took = time.perf_counter() - begin
        assert all(there.values()), "preload=('torch',) has not imported torch"
        return {"start_torch": [took]}

    async def many(self, count: int) -> Samples:
        """`count` actors in one process, spawned one by one and each answering; bytes are what that process grew by. For a fresh worker."""
        procs = await this_host().spawn_procs()
        probe = procs.spawn("probe", Echo)
        process = await probe.process.call_one()
        before = memory(process)
        begin = time.perf_counter()
        actors = [procs.spawn(f"actor{number}", Echo) for number in range(count)]
        await asyncio.gather(*[actor.nop.call_one() for actor in actors])
        took = time.perf_counter() - begin
        after = memory(process)
        grown = {kind: (after[kind] - before[kind]) / count for kind in after}
        return {"many_seconds": [took], "many_bytes": [grown["uss"]], "many_rss": [grown["rss"]]}

    async def idle(self, count: int) -> Samples:
        """Processes with one actor each that has answered once. For a fresh worker: no torch, nothing done before."""
        procs = this_host().spawn_procs(per_host={"procs": self._count})
        actors = procs.spawn("idle", Idle)
        processes = (await actors.process.call()).values()
        assert not any((await actors.imported.call("torch")).values())
        sizes = [memory(process) for process in processes]
        return {"idle_pss": [size["pss"] for size in sizes], "idle_uss": [size["uss"] for size in sizes]}

    async def kill(self, count: int) -> Samples:
        """From SIGKILL of a process to the error of the call that it was handling."""
        samples = []
        for _ in range(count):
            procs = this_host().spawn_procs()
            echo = procs.spawn("victim", Echo)
            process = await echo.process.call_one()
            pending = echo.hang.call_one()
            await echo.nop.call_one()  # by now the one before has begun
            start = time.perf_counter()
            os.kill(process, signal.SIGKILL)
            try:
                await pending
            except ActorDied:
                samples.append(time.perf_counter() - start)
            await procs.stop()
        return {"kill": samples}

    async def import_library(self, count: int) -> Samples:
        """Interpreters that import the library and end: the package, and what a first program needs; fails if torch comes with it."""
        package = "import sys, monarch_async; sys.exit('torch' in sys.modules)"
        names = "import sys; from monarch_async import Actor, endpoint, this_host; sys.exit('torch' in sys.modules)"
        return {"import_library": start_seconds(package, count), "import_names": start_seconds(names, count)}
