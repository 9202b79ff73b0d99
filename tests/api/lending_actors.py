"""Actors that get and send large values, and what tells how much shared memory is in use."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import warnings
from typing import Any

from monarch_async import Actor, Port, endpoint, shared_empty
from monarch_async._runtime.current import runtimes
from monarch_async._runtime.lending import Lending

__all__ = ["Holder", "few_descriptors", "lending_here", "loans_here", "mapped_segments"]


def lending_here() -> Lending:
    """That of the only runtime of this process."""
    (runtime,) = runtimes()
    return runtime.lending


def loans_here() -> int:
    """Blocks that this process has lent, counted for each process that has one."""
    return sum(len(tenant.loans) for tenant in lending_here()._tenants.values())


def mapped_segments(pid: int | str = "self") -> int:
    """Mappings of segments in a process: two for each of another, one for each of its own."""
    with open(f"/proc/{pid}/maps") as maps:
        return sum("/memfd:monarch-async" in line for line in maps)


def few_descriptors() -> None:
    """A bootstrap: this process may have 64 open files."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))


class Holder(Actor):
    """Keeps what it gets, and does with it what it is told."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.open_files: list[int] = []
        self.gate = asyncio.Event()
        self.child = 0
        self.pipe = (-1, -1)

    @endpoint
    async def echo(self, value: Any) -> Any:
        return value

    @endpoint
    def echo_in_thread(self, value: Any) -> Any:
        return value

    @endpoint
    async def keep(self, value: Any) -> None:
        self.kept.append(value)

    @endpoint
    async def drop(self) -> None:
        self.kept.clear()

    @endpoint
    async def forget_last(self) -> None:
        self.kept.pop()

    @endpoint
    async def fill(self, value: Any) -> None:
        """Write to all that is kept."""
        for kept in self.kept:
            kept[:] = value

    @endpoint
    async def write_first(self, value: Any) -> list[bytes]:
        """Write to the beginning of the first of the parts that came last; the first eight bytes of each of them then."""
        parts = self.kept[-1]
        parts[0][: len(value)] = value
        return [bytes(part[:8]) for part in parts]

    @endpoint
    async def content(self) -> list[bytes]:
        """The first eight bytes, and the last ones, of all that is kept."""
        return [bytes(memoryview(kept).cast("B")[:8]) + bytes(memoryview(kept).cast("B")[-8:]) for kept in self.kept]

    @endpoint
    async def first(self, value: Any) -> Any:
        return value[0]

    @endpoint
    async def raises(self, value: Any) -> None:
        raise LookupError("for the caller")

    @endpoint
    async def wait(self, value: Any = None) -> None:
        await self.gate.wait()

    @endpoint
    async def through(self, port: Port[Any], value: Any) -> None:
        await port.send(value)

    @endpoint
    async def make(self, size: int, byte: int = 1) -> bytearray:
        return bytearray([byte]) * size

    @endpoint
    async def make_view(self, size: int) -> memoryview:
        return memoryview(bytearray(b"v") * size)

    @endpoint
    async def send_on(self, other: Any, size: int) -> None:
        """To another actor: to keep."""
        await other.keep.call_one(memoryview(bytearray(b"s") * size))

    @endpoint
    def send_from_thread(self, other: Any, size: int) -> Any:
        """The same, and what is sent is changed at once."""
        memory = bytearray(b"t") * size
        sent = other.keep.call_one(memory)
        memory[:] = bytes(size)
        return sent.get()

    @endpoint
    async def numbers(self) -> tuple[int, int, int, int]:
        """Its process, blocks lent, blocks on lease, mappings."""
        lending = lending_here()
        return os.getpid(), loans_here(), lending.borrowing.leases, mapped_segments()

    @endpoint
    async def private_memory(self) -> int:
        """Bytes of memory that its process shares with nobody."""
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

    @endpoint
    async def collect(self) -> None:
        gc.collect()

    @endpoint
    async def lose_segments(self) -> None:
        """As if none had ever been introduced to this process."""
        lending_here().borrowing._mappings.clear()

    @endpoint
    async def exhaust(self) -> int:
        """Open files until there are no more."""
        try:
            while True:
                self.open_files.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            return len(self.open_files)

    @endpoint
    async def release(self) -> None:
        while self.open_files:
            os.close(self.open_files.pop())

    @endpoint
    async def fork(self) -> None:
        """A child that waits, and then says whether what was kept is still what it was."""
        seen = [bytes(memoryview(kept).cast("B")) for kept in self.kept]
        there, here = os.pipe(), os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks of processes with threads
            self.child = os.fork()
        if not self.child:
            os.read(there[0], 1)
            same = seen == [bytes(memoryview(kept).cast("B")) for kept in self.kept]
            os.write(here[1], b"y" if same else b"n")
            os._exit(0)
        os.close(there[0])
        os.close(here[1])
        self.pipe = (here[0], there[1])

    @endpoint
    def ask_child(self) -> str:
        """What it says."""
        read, write = self.pipe
        os.write(write, b"x")
        answer = os.read(read, 1).decode()
        os.close(read)
        os.close(write)
        os.waitpid(self.child, 0)
        return answer

    @endpoint
    def share_in_child(self) -> str:
        """What becomes of `shared_empty` in a forked child."""
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                shared_empty(1 << 20)
                text = "got it"
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
            os.write(write, text.encode())
            os._exit(0)
        os.close(write)
        text = os.read(read, 1000).decode()
        os.close(read)
        os.waitpid(pid, 0)
        return text

    @endpoint
    async def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
