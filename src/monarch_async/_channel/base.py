"""What links need of a connection, whatever carries it.

A `Connection` writes bytes without blocking and tells when it has taken too many; what comes in it gives to its `Receiver`.
Real ones are in `stream`; tests may bring their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

__all__ = ["Connection", "Middle", "Receiver"]


class Connection(Protocol):
    """An open connection, already authenticated."""

    full: bool
    """More than the high-water mark is waiting to be sent."""

    def write(self, data: bytes | memoryview) -> None: ...

    def close(self) -> None:
        """Send what was written, then close."""

    def abort(self) -> None:
        """Close at once."""


class Receiver(Protocol):
    """The user of a connection. Called from the loop, never re-entrantly."""

    @property
    def get_buffer(self) -> Callable[[], memoryview]:
        """Call it: where the next bytes shall be put; never empty."""

    def received(self, size: int) -> None:
        """So many bytes have been put there."""

    def writable(self) -> None:
        """The connection takes bytes again after it said it was full."""

    def lost(self, connection: Connection, error: Exception | None) -> None:
        """Called once, last: the connection is gone."""


class Middle(Connection, Receiver, Protocol):
    """Stands between a connection and its receiver: to each of them it is the other."""
