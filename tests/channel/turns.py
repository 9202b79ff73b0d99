"""Waiting for what has no event of its own: turns of the loop, counted by nobody, until it is so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def turns_until(condition: Callable[[], bool]) -> None:
    """Let the loop run until `condition()` is true."""
    for _ in iter(condition, True):
        await asyncio.sleep(0)
