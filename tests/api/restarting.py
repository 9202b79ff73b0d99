"""Actors that end in every way, and what tells what became of them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

from monarch_async import Actor, ActorDied, concurrent_endpoint, context, endpoint

__all__ = ["ENDS", "Diary", "Member", "SyncMember", "alive", "answers", "back", "end", "gone"]

ENDS = ("raise", "exit0", "exit3", "kill", "leave")
"""How a member can be told to end."""


class Diary:
    """Lines in a file, which processes add to and a test reads."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def note(self, line: str) -> None:
        with open(self.path, "a") as file:
            file.write(f"{line}\n")

    def lines(self, start: str = "") -> list[str]:
        if not os.path.exists(self.path):
            return []
        with open(self.path) as file:
            return [line for line in file.read().splitlines() if line.startswith(start)]


class Member(Actor):
    """Fails in its constructor as long as the diary's folder has a file ``fail``."""

    def __init__(self, diary: Diary | None = None, name: str = "") -> None:
        self.diary = diary
        self.name = name or context().actor_instance.name
        self.count = 0
        me = context().actor_instance
        self.note(f"start {self.name} {me.rank.rank} {me.incarnation}")
        if diary is not None and os.path.exists(f"{diary.path}.fail"):
            raise ValueError("bad")

    def note(self, line: str) -> None:
        if self.diary is not None:
            self.diary.note(line)

    @endpoint
    async def add(self, number: int = 1) -> int:
        self.count += number
        return self.count

    @endpoint
    async def life(self) -> tuple[int, int]:
        """Process and incarnation."""
        return os.getpid(), context().actor_instance.incarnation

    @endpoint
    async def end(self, how: str) -> None:
        end(how)

    @endpoint
    async def raises(self) -> None:
        raise LookupError("for the caller")

    @endpoint
    async def wait(self, seconds: float, line: str = "") -> str:
        if line:
            self.note(line)
        await asyncio.sleep(seconds)
        return "waited"

    @concurrent_endpoint
    async def overlap(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "overlapped"

    @endpoint
    async def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    @endpoint
    async def ask(self, other: Any, number: int) -> int:
        return int(await other.add.call_one(number))

    async def __cleanup__(self, error: BaseException | None) -> None:
        me = context().actor_instance
        self.note(f"clean {self.name} {me.rank.rank} {me.incarnation}")


class SyncMember(Actor):
    """All in a thread."""

    def __init__(self) -> None:
        self.count = 0

    @endpoint
    def add(self, number: int = 1) -> int:
        self.count += number
        return self.count

    @endpoint
    def life(self) -> tuple[int, int]:
        return os.getpid(), context().actor_instance.incarnation

    @endpoint
    def end(self, how: str) -> None:
        end(how)

    @endpoint
    def block(self, seconds: float) -> str:
        time.sleep(seconds)
        return "blocked"


def end(how: str) -> None:
    if how == "raise":
        raise RuntimeError("blew up")
    if how == "leave":
        context().actor_instance.stop("enough")
    elif how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        os._exit(int(how.removeprefix("exit")))


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def answers(call: Any) -> Any:
    """What a call says, or `ActorDied`."""
    async with asyncio.timeout(10):
        try:
            return await call
        except ActorDied as died:
            return died


async def back(member: Any, incarnation: int) -> int:
    """Until a member is in that life, or a later one; returns its process."""
    async with asyncio.timeout(10):
        while True:
            life = await answers(member.life.call_one())
            if not isinstance(life, ActorDied) and life[1] >= incarnation:
                assert incarnation == life[1]
                return int(life[0])
            await asyncio.sleep(0.005)


async def gone(member: Any) -> ActorDied:
    """Until calls to a member are refused."""
    async with asyncio.timeout(10):
        while True:
            life = await answers(member.life.call_one())
            if isinstance(life, ActorDied) and life.started is False:
                return life
            await asyncio.sleep(0.005)
