"""What a backend gives for an operation that it has begun."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

__all__ = ["Running", "Told"]

Told = Callable[[BaseException | None], None]


class Running(Protocol):
    """An operation under way."""

    def when_done(self, told: Told) -> None:
        """Call `told` once it has ended, with its error if it failed: at once, or from any thread."""
