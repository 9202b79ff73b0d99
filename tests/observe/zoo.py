"""A job in which something is wrong in every way: one actor idle, one busy, one in an endless loop, one asleep in its event loop, one in a
process that is frozen, one that keeps the interpreter's lock, one that has crashed and was started again.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import time
from typing import Any

from monarch_async import ActorDied, ProcMesh, Restart, endpoint, this_host
from monarch_async.actor import Actor
from monarch_async.health import ProcState

__all__ = ["BUSY", "CRASHED", "FROZEN", "IDLE", "LOCKED", "SLEEPING", "SPINNING", "Animal", "Zoo", "line_of"]

IDLE, BUSY, SPINNING, SLEEPING, FROZEN, LOCKED, CRASHED = range(7)
LONG = 1000


class Animal(Actor):
    """Gets stuck on demand."""

    def __init__(self) -> None:
        self.meals = 3
        self.password = "x" * 5000

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def eat(self, meals: int = 1) -> int:
        self.meals += meals
        return self.meals

    @endpoint
    async def fail(self) -> None:
        raise ValueError("on purpose")

    @endpoint
    async def wait(self) -> None:
        await asyncio.sleep(LONG)

    @endpoint
    async def wait_for(self, other: Any) -> None:
        await other.spin.call_one()

    @endpoint
    async def spin(self) -> None:
        while True:
            pass

    @endpoint
    async def sleep(self) -> None:
        time.sleep(LONG)  # noqa: ASYNC251  # that is what is wrong with it

    @endpoint
    async def lock(self) -> None:
        ctypes.PyDLL(None).sleep(LONG)

    @endpoint
    async def crash(self) -> None:
        print("the last words", flush=True)  # noqa: T201
        os._exit(3)

    @endpoint
    async def say(self, text: str) -> None:
        print(text, flush=True)  # noqa: T201


def line_of(name: str, text: str) -> int:
    """The number of the line of an endpoint that has this text."""
    code = getattr(Animal, name).function.__code__
    with open(code.co_filename, encoding="utf-8") as file:
        return next(number for number, line in enumerate(file, 1) if number >= code.co_firstlineno and text in line)


class Zoo:
    """The job. `cages` are its processes, `animals` the actors in them."""

    def __init__(self) -> None:
        self.cages: ProcMesh = this_host().spawn_procs({"gpus": 7}, name="cages", restart=Restart())
        self.animals: Any = self.cages.spawn("animals", Animal)
        self.calls: list[Any] = []

    def one(self, index: int) -> Any:
        return self.animals.slice(gpus=index)

    async def start(self, *kinds: int) -> None:
        """Bring these into their states, or all, and wait until their host knows it."""
        kinds = kinds or (BUSY, SPINNING, SLEEPING, FROZEN, LOCKED, CRASHED)
        pids = list((await self.animals.pid.call()).values())
        names = {BUSY: "wait", SPINNING: "spin", SLEEPING: "sleep", FROZEN: "wait", LOCKED: "lock"}
        for kind in kinds:
            if kind in names:
                self.calls.append(getattr(self.one(kind), names[kind]).call_one())
        wanted = {SPINNING: ProcState.STUCK, SLEEPING: ProcState.STUCK, LOCKED: ProcState.STUCK, BUSY: ProcState.BUSY}
        if FROZEN in kinds:
            await self.until(FROZEN, ProcState.BUSY)
            os.kill(pids[FROZEN], signal.SIGSTOP)
            wanted[FROZEN] = ProcState.FROZEN
        if CRASHED in kinds:
            try:
                await self.one(CRASHED).crash.call_one()
            except ActorDied:
                await self.one(CRASHED).pid.options(retry=5).call_one()
        for kind in kinds:
            if kind in wanted:
                await self.until(kind, wanted[kind])

    async def until(self, kind: int, state: ProcState) -> None:
        """Wait until a process is known to be in this state."""
        cage = self.cages.slice(gpus=kind)
        async with asyncio.timeout(20):
            while (await cage.health()).item().state is not state:
                await asyncio.sleep(0.02)

    def close(self) -> None:
        """Nobody wants the answers any more."""
        for call in self.calls:
            call.cancel()
