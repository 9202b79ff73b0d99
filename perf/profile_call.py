"""Where the microseconds of one awaited call go.

    python -m perf.profile_call               stages of real calls, and what their ingredients cost alone
    python -m perf.profile_call --cprofile    the functions that the client's side of calls spends its time in

*Stages* are read off real calls: the moments at which a call passes certain functions, in both processes, which share one monotonic
clock. A stage ends where the next begins, so that together they are the whole call. What lies between one process's write and the
other's read is two system calls and the kernel waking the other process.

*Ingredients* are the functions of those stages in tight loops on the data of a real call: what would be won at most if one of them cost
nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

import monarch_async
from monarch_async import Actor, endpoint, this_host
from monarch_async._channel.stream import Stream
from monarch_async._core.binding import compile_binder
from monarch_async._core.codec import dumps, loads
from monarch_async._core.framing import CALL, DATA, PRELUDE, join_messages, pack_message, unpack_messages
from monarch_async._core.reader import FrameReader
from monarch_async._core.session import Inbound, Outbound
from monarch_async._runtime.cell import Cell
from monarch_async._runtime.link import Link
from monarch_async._runtime.origin import LinkOrigin
from monarch_async.future import Future

__all__ = ["ingredients", "main", "stages"]

ARGUMENTS: tuple[tuple[Any, ...], dict[str, Any]] = ((1, "two", 3.0), {})
_clock = time.perf_counter
_near: list[float] = []  # when the call under way passed here, in the client
_far: list[float] = []  # the same in the process that is called


class Echo(Actor):
    """What is called; its process notes when."""

    @endpoint
    async def echo(self, number: int, text: str, fraction: float = 0.0) -> int:
        _far.append(_clock())
        return number

    @endpoint
    async def nop(self) -> None:
        return None

    @endpoint
    async def watch(self) -> None:
        """Note from now on when messages pass in this process."""
        for owner, name in ((Link, "received"), (Cell, "post"), (LinkOrigin, "answer"), (Stream, "write")):
            _note(owner, name, _far)

    @endpoint
    async def passed(self) -> list[float]:
        """When, since the last time."""
        found = _far[:]
        _far.clear()
        return found


STAGES = (
    "bind, pickle, book, pack and frame the call",
    "write, the kernel wakes the other process, read",
    "unpack the frame, find the actor",
    "mailbox, the actor's task wakes, unpickle, set the context",
    "the handler",
    "pickle, pack and frame the answer",
    "write, the kernel wakes this process, read",
    "unpack the answer, find the future, unpickle",
    "the awaiting task wakes",
)


def _note(owner: Any, name: str, stamps: list[float]) -> None:
    """Have a method note when it is entered."""
    function = getattr(owner, name)

    def noting(*args: Any, **kwargs: Any) -> Any:
        stamps.append(_clock())
        return function(*args, **kwargs)

    setattr(owner, name, noting)


async def stages(count: int) -> list[list[float]]:
    """The seconds of each stage of `STAGES`, for each of `count` calls."""
    for owner, name in ((Stream, "write"), (Link, "received"), (Future, "settle")):
        _note(owner, name, _near)
    found: list[list[float]] = []
    async with this_host().spawn_procs() as procs:
        echo = await procs.spawn("echo", Echo)
        await echo.watch.call_one()
        while len(found) < count:
            await echo.passed.call_one()
            _near.clear()
            begin = _clock()
            await echo.echo.call_one(1, "two", 3.0)
            end = _clock()
            near = _near[:]
            # After its own last answer and before its next call, `passed` finds the five moments of this call.
            far = await echo.passed.call_one()
            if len(near) == 3 and len(far) == 9:  # otherwise an acknowledgement or a heartbeat came between
                moments = [begin, near[0], *far[2:7], near[1], near[2], end]
                found.append([after - before for before, after in pairwise(moments)])
    return found


def ingredients() -> Iterator[tuple[str, float]]:
    """What each of the functions costs alone, in seconds, by name."""

    def endpoint_like(self: Any, number: int, text: str, fraction: float = 0.0) -> None: ...

    bind = compile_binder(endpoint_like, 1)
    body, _ = dumps(ARGUMENTS)
    call = (CALL, 1 << 60, "echo", 12345, -1, body)
    packed = pack_message(call)
    header = join_messages([packed])
    outbound, inbound = Outbound(), Inbound()
    reader = FrameReader(inbound, max_frame=1 << 30)
    near, far = socket.socketpair()

    def number() -> None:
        outbound.number(DATA, 0, header)
        outbound.acknowledge(outbound.sequence)

    def read() -> None:
        reader.feed(PRELUDE.pack(DATA, 0, 0, len(header), 0, inbound.received + 1, 0) + header)

    def through() -> None:
        near.send(header)
        far.recv(4096)

    yield "bind the arguments", _cost(lambda: bind(1, "two", 3.0))
    yield "pickle them", _cost(lambda: dumps(ARGUMENTS))
    yield "pack the message", _cost(lambda: pack_message(call))
    yield "number and keep the frame", _cost(number)
    yield "pack the frame's prelude", _cost(lambda: PRELUDE.pack(DATA, 0, 0, len(header), 0, 1, 0))
    yield "write and read a socket, nobody to wake", _cost(through)
    yield "take the frame off the buffer, unpack included", _cost(read)
    yield "unpack its messages", _cost(lambda: unpack_messages(header))
    yield "unpickle the arguments", _cost(lambda: loads(body))
    near.close()
    far.close()


def _cost(function: Callable[[], Any], count: int = 5000) -> float:
    def once() -> float:
        start = _clock()
        for _ in range(count):
            function()
        return (_clock() - start) / count

    return min(once() for _ in range(3))


def _table(rows: Sequence[tuple[str, float]], total: str = "") -> None:
    for label, seconds in rows:
        print(f"{label:68s} {seconds * 1e6:8.2f} µs")
    if total:
        print(f"{total:68s} {sum(seconds for _, seconds in rows) * 1e6:8.2f} µs")


async def _profile(count: int) -> None:
    """Calls one after the other, then many at once, under cProfile."""
    async with this_host().spawn_procs() as procs:
        echo = await procs.spawn("echo", Echo)
        for title, together in (("one after the other", 1), ("many at once", 1000)):
            profile = cProfile.Profile()
            profile.enable()
            for _ in range(count // together):
                await asyncio.gather(*[echo.nop.call_one() for _ in range(together)])
            profile.disable()
            print(f"\n{count} calls, {title}:")
            pstats.Stats(profile).sort_stats("tottime").print_stats(20)


async def _run(count: int, profiled: bool) -> None:
    if profiled:
        await _profile(count)
    else:
        columns = list(zip(*await stages(count), strict=True))
        print(f"Stages of {count} awaited calls, medians:")
        _table([(label, statistics.median(column)) for label, column in zip(STAGES, columns, strict=True)], "together")
        print("\nIngredients, alone, at best:")
        _table(list(ingredients()))
    await monarch_async.shutdown()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="perf.profile_call", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=2000, help="how many calls (2000)")
    parser.add_argument("--cprofile", action="store_true", help="print where the client spends its time, by function")
    given = parser.parse_args(arguments)
    uvloop.run(_run(given.count, given.cprofile))


if __name__ == "__main__":
    main()
