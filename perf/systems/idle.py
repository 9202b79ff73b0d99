"""An actor in a module of its own, so that a process that holds it holds no more than the library."""

from __future__ import annotations

import os
import sys

from monarch_async import Actor, endpoint

__all__ = ["Idle"]


class Idle(Actor):
    """Answers and waits."""

    @endpoint
    async def process(self) -> int:
        return os.getpid()

    @endpoint
    async def imported(self, module: str) -> bool:
        return module in sys.modules
