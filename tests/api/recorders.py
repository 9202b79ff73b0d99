"""Actors that keep what they get, and in which order, for tests of delivery.

Apart from those, since every process that has one imports this module, and torch takes two seconds to import: only a tensor that is sent
there brings it along.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from monarch_async import Actor, context, endpoint, this_proc

__all__ = ["Parent", "Recorder", "Threaded", "scribble_on"]


def scribble_on(value: Any) -> None:
    """Change a dict, an array, a tensor or a bytearray."""
    if isinstance(value, dict):
        value["list"].append("scribbled")
    elif hasattr(value, "fill_"):
        value.fill_(-1)
    elif hasattr(value, "fill"):
        value.fill(-1)
    else:
        value[0] = 255


class Recorder(Actor):
    def __init__(self) -> None:
        self.seen: list[int] = []
        self.kept: Any = None
        self.threads: set[str] = set()

    @endpoint
    async def take(self, number: int, filler: bytes = b"") -> int:
        self.seen.append(number)
        return number

    @endpoint
    async def pause(self, number: int) -> int:
        self.seen.append(number)
        await asyncio.sleep(0)
        return number

    @endpoint
    def in_thread(self, number: int) -> int:
        self.seen.append(number)
        self.threads.add(threading.current_thread().name)
        return number

    @endpoint
    async def all(self) -> list[int]:
        seen, self.seen = self.seen, []
        return seen

    @endpoint
    async def keep(self, value: Any) -> Any:
        self.kept = value
        return value

    @endpoint
    async def scribble(self) -> None:
        scribble_on(self.kept)

    @endpoint
    async def show(self) -> Any:
        return self.kept

    @endpoint
    async def thread_names(self) -> set[str]:
        return self.threads

    @endpoint
    async def drive(self, other: Any, count: int) -> list[int]:
        """Send from one actor to another; what came, in order."""
        for number in range(count):
            other.take.broadcast(number, bytes(100_000 if number % 50 == 0 else 0))
        seen: list[int] = await other.all.call_one()
        return seen


class Threaded(Actor):
    """All endpoints are def: the constructor and the cleanup run in the actor's thread too."""

    def __init__(self) -> None:
        self.born = threading.current_thread().name
        self.me = context().actor_instance.name

    @endpoint
    def names(self) -> tuple[str, str, str]:
        return self.born, threading.current_thread().name, self.me

    @endpoint
    def ask(self, other: Any, count: int) -> list[int]:
        return [other.take.call_one(number).get() for number in range(count)]


class Parent(Actor):
    def __init__(self) -> None:
        self.mine = this_proc().spawn("child", Recorder)

    @endpoint
    async def child(self) -> Any:
        return self.mine
