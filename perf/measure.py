"""What every system's worker measures with: loops that time, and the memory of processes. Standard library only.

Times are seconds, memory is bytes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

__all__ = ["memcpy_rates", "memory", "rate_of", "time_calls"]

Samples = dict[str, list[float]]


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
