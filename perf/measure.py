"""What every system's worker measures with: loops that time, and the memory of processes. Standard library only.

Times are seconds, memory is bytes.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["memcpy_rates", "memory", "on_core", "rate_of", "time_calls", "two_cores"]

Samples = dict[str, list[float]]


def two_cores() -> tuple[int, int] | None:
    """A core for the caller and one for the called process; `None` where there is only one.

    Left to itself the kernel puts two processes that talk to each other on one core or on two, as it likes from one second to the next,
    and a call takes three times as long on two. To compare two systems it has to be the same for both.
    """
    cores = sorted(os.sched_getaffinity(0))
    return (cores[0], cores[1]) if len(cores) > 1 else None


@contextlib.contextmanager
def on_core(core: int | None) -> Iterator[None]:
    """Keep this thread on one core meanwhile; `None`: wherever."""
    before = os.sched_getaffinity(0)
    if core is not None:
        os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


async def time_calls(count: int, call: Callable[[], Awaitable[Any]], *, warm_up: int = 0) -> list[float]:
    """How long each of `count` awaited calls took."""
    for _ in range(warm_up):
        await call()
    clock = time.perf_counter
    samples = []
    for _ in range(count):
        start = clock()
        await call()
        samples.append(clock() - start)
    return samples


async def rate_of(count: int, run: Callable[[], Awaitable[Any]]) -> list[float]:
    """How many a second, as one sample, when `run` does `count` of them."""
    start = time.perf_counter()
    await run()
    return [count / (time.perf_counter() - start)]


def memory(pid: int | str = "self") -> dict[str, int]:
    """``pss``, ``rss`` and ``uss`` (its private pages) of a process, in bytes."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    sizes = {name: int(size) * 1024 for name, size in re.findall(r"^(\w+): +(\d+) kB$", text, re.MULTILINE)}
    return {"pss": sizes["Pss"], "rss": sizes["Rss"], "uss": sizes["Private_Clean"] + sizes["Private_Dirty"]}


def memcpy_rates(size: int, count: int) -> list[float]:
    """Bytes a second that this machine copies between two warm buffers of `size` bytes."""
    source, target = bytearray(b"x") * size, memoryview(bytearray(size))
    target[:] = source
    rates = []
    for _ in range(count):
        start = time.perf_counter()
        target[:] = source
        rates.append(size / (time.perf_counter() - start))
    return rates
