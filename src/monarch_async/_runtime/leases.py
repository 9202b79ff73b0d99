"""Leases: what a receiver of lent memory holds, what it gets in place of memory that could not be had, and how that is given back.

See `lending` for the whole.
"""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Callable, Sequence
from typing import Any

from monarch_async._channel.block import forks
from monarch_async._channel.segment import Mapping
from monarch_async._core.framing import MAX_ITEMS, pack_message
from monarch_async._runtime.link import Link
from monarch_async.errors import ChannelError

__all__ = ["Lease", "send_numbers", "undecodable"]


class Lease:
    """A block of another process, for as long as something here is a view of it; then `over` is told, in any thread.

    While this process is forked a child may go on looking at it, so then nobody is told.
    """

    __slots__ = ("_born", "_over", "mapping", "number", "offset", "owner", "segment", "size")

    def __init__(
        self, over: Callable[[Lease], None], owner: str, number: int, segment: int, offset: int, size: int, mapping: Mapping
    ) -> None:
        self.owner = owner
        self.number = number  # of the loan
        self.segment = segment
        self.offset = offset
        self.size = size
        self.mapping = mapping
        self._over = over
        self._born = forks()

    def view(self) -> memoryview:
        memory = (ctypes.c_ubyte * self.size).from_address(self.mapping.address + self.offset)
        memory.lease = self  # type: ignore[attr-defined]
        return memoryview(memory).cast("B")

    def __del__(self) -> None:
        if self._born == forks():
            self._over(self)


class _Missing:
    """Takes the place of a body that could not be had."""

    def __init__(self, why: str) -> None:
        self.why = why

    def __reduce__(self) -> tuple[Any, ...]:
        return _raise_missing, (self.why,)


def _raise_missing(why: str) -> None:
    raise ChannelError(why)


def undecodable(why: str) -> bytes:
    """A body that whoever reads it gets a `DecodeError` from."""
    return pickle.dumps(_Missing(why), 5)


def send_numbers(link: Link, kind: int, numbers: Sequence[int]) -> None:
    """Numbers of loans or of segments, as many as a message may have in each; before large messages that wait."""
    for start in range(0, len(numbers), MAX_ITEMS):
        link.send_control(pack_message((kind, numbers[start : start + MAX_ITEMS])))
