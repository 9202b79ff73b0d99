"""Waiting for what no event tells."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["until"]


async def until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    """Let the loop run until `condition()` is truthy; `TimeoutError` after so many seconds."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  # it is about other processes, and logs, which set no event here
            await asyncio.sleep(0.002)
