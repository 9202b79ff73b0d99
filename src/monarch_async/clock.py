"""The Clock protocol: where runtime code gets its time from, so that tests can give it theirs."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Clock"]


class Clock(Protocol):
    """Monotonic seconds. An asyncio event loop is one."""

    def time(self) -> float: ...
