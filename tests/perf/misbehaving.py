"""A system that does what workers have to survive."""

from __future__ import annotations

import asyncio
import os

__all__ = ["System"]


class System:
    """Run by the workers of `test_session`; see `perf.worker`."""

    def __init__(self, procs: int) -> None:
        self.versions = {"procs": str(procs)}

    async def close(self) -> None:
        pass

    async def prints(self, count: int) -> dict[str, list[float]]:
        print("not an answer")  # noqa: T201 - what must not reach the protocol
        return {"prints": [float(count)]}

    async def raises(self, count: int) -> dict[str, list[float]]:
        raise ValueError("on purpose")

    async def ends(self, count: int) -> dict[str, list[float]]:
        os._exit(3)

    async def hangs(self, count: int) -> dict[str, list[float]]:
        await asyncio.get_running_loop().create_future()
        return {}
