"""The versions of a state dict that one process publishes, and who may read which.

Each version lies in a block of memory of its own, which is written once, before anybody knows of it, and never again, by readers neither:
its buffer is read-only. So no reader ever sees a torn one, and to publish is to let the next reader have another block.

Rules:

* There are at most `slots` versions: the newest, the one being written, and older ones. An older one goes when its place is wanted; one
  that is on lease only when the lease is over.
* A lease is over when its reader says so, or has not renewed it for `lease` seconds: a reader that has died or is frozen holds the
  publisher up for so long and no longer. One that is slow renews it and is waited for.
* What a reader has *views* of (see `state_pull`) stays as it is for as long as the views live: that is the shared memory's own
  count. It takes no slot, since another block is taken for the next version.
* A version goes in three steps: its *word*, which is its number behind its last byte, is wiped; its buffer is dropped, which ends what is
  still reading from it; its memory is given back. A reader looks at the word after it has read, so it can't take one for the other even if
  one of these steps were wrong.
"""

from __future__ import annotations

import asyncio
import struct
from typing import NamedTuple

import torch

from monarch_async.actor import Actor
from monarch_async.endpoints import concurrent_endpoint
from monarch_async.rdma import RDMABuffer
from monarch_async.tensor.layout import Layout

__all__ = ["WORD", "Keeper", "Opened", "Shelf"]

WORD = struct.Struct("<Q")
DROP_PATIENCE = 1.0
"""Seconds to wait until a buffer is dropped, which takes longer only when a reader is frozen; then its memory is given back later."""


class Opened(NamedTuple):
    """A version on lease."""

    lease: int
    seconds: float
    """Between renewals."""
    version: int
    layout_number: int
    layout: Layout | None
    """Not told to who knows that number."""
    buffer: RDMABuffer
    shared: bool
    """Whether it lies in shared memory, so that it can be viewed."""


class _Version:
    """One that can be read."""

    __slots__ = ("block", "buffer", "layout", "layout_number", "leases", "shared")

    def __init__(self, block: memoryview, shared: bool, buffer: RDMABuffer, layout: Layout, layout_number: int) -> None:
        self.block = block
        self.shared = shared
        self.buffer = buffer
        self.layout = layout
        self.layout_number = layout_number
        self.leases: dict[int, float] = {}  # by number, until when


class Shelf:
    """See the module's docstring. Used on the loop of its process only."""

    def __init__(self, slots: int, lease: float) -> None:
        self.slots = slots
        self.lease = lease
        self.closed = False
        self._versions: dict[int, _Version] = {}  # in ascending order
        self._leased: dict[int, int] = {}  # which version a lease is of
        self._layout_number = 0
        self._changed = asyncio.Event()  # set, and replaced, when there is a new version or a lease is over

    @property
    def versions(self) -> list[int]:
        return list(self._versions)

    async def make_room(self) -> None:
        """Until one more version finds a place."""
        while len(self._versions) >= self.slots:
            now = asyncio.get_running_loop().time()
            old = list(self._versions.items())[:-1]
            free = next((number for number, version in old if all(until <= now for until in version.leases.values())), None)
            if free is not None:
                await self._retire(free)
                continue
            soonest = min(max(version.leases.values()) for _, version in old)
            try:
                async with asyncio.timeout_at(soonest):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def add(self, number: int, layout: Layout, block: memoryview, shared: bool) -> None:
        """From now on this is the newest version."""
        newest = list(self._versions.values())[-1:]
        if not newest or newest[0].layout != layout:
            self._layout_number += 1
        WORD.pack_into(block, layout.size, number)
        self._versions[number] = _Version(block, shared, RDMABuffer(block.toreadonly()), layout, self._layout_number)
        self._change()

    async def _retire(self, number: int) -> None:
        version = self._versions.pop(number)
        for lease in version.leases:
            del self._leased[lease]
        WORD.pack_into(version.block, version.layout.size, 0)
        dropped = version.buffer.drop()
        dropped.add_done_callback(lambda done: done.cancelled() or done.exception())
        del version  # its memory is held until the buffer is dropped, and no longer
        await asyncio.wait([dropped], timeout=DROP_PATIENCE)

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, number: int) -> int:
        """Until there is this version or a newer one; the newest."""
        while not self._versions or max(self._versions) < number:
            await self._changed.wait()
        return max(self._versions)

    async def open(self, number: int | None, known: int, lease: int) -> Opened | None:
        """Lease a version, or the newest; `None` if there is no such version. `known` is the number of the layout that the reader has."""
        if number is None:
            number = await self.wait(0)
        version = self._versions.get(number)
        if version is None:
            return None
        self._leased[lease] = number
        version.leases[lease] = asyncio.get_running_loop().time() + self.lease
        layout = None if known == version.layout_number else version.layout
        return Opened(lease, self.lease / 3, number, version.layout_number, layout, version.buffer, version.shared)

    def renew(self, lease: int) -> None:
        """Go on, if it isn't over."""
        number = self._leased.get(lease)
        if number is not None:
            self._versions[number].leases[lease] = asyncio.get_running_loop().time() + self.lease

    def end(self, lease: int) -> None:
        """The reader has done."""
        number = self._leased.pop(lease, None)
        if number is not None:
            del self._versions[number].leases[lease]
            self._change()

    def view(self, lease: int) -> torch.Tensor | None:
        """All bytes of a version on lease."""
        number = self._leased.get(lease)
        return None if number is None else torch.frombuffer(self._versions[number].block, dtype=torch.uint8)

    def close(self) -> None:
        """Nothing can be read any more; the buffers go with the life of the actor that published."""
        self.closed = True
        for version in self._versions.values():
            WORD.pack_into(version.block, version.layout.size, 0)
        self._versions.clear()
        self._leased.clear()


shelves: dict[str, Shelf] = {}
"""Those of this process, by the `life` of their source, for the keepers that are spawned here."""


class Keeper(Actor):
    """Lets others read from a shelf of its process, also while the actor that publishes is busy."""

    def __init__(self, life: str) -> None:
        self._life = life
        self._shelf = shelves[life]

    def __cleanup__(self, exc: BaseException | None) -> None:
        self._shelf.close()
        shelves.pop(self._life, None)

    @concurrent_endpoint
    async def versions(self) -> list[int]:
        return self._shelf.versions

    @concurrent_endpoint
    async def wait(self, version: int) -> int:
        return await self._shelf.wait(version)

    @concurrent_endpoint
    async def open(self, version: int | None, known: int, lease: int) -> Opened | None:
        return await self._shelf.open(version, known, lease)

    @concurrent_endpoint
    async def renew(self, lease: int) -> None:
        self._shelf.renew(lease)

    @concurrent_endpoint
    async def end(self, lease: int) -> None:
        self._shelf.end(lease)

    @concurrent_endpoint
    async def view(self, lease: int) -> torch.Tensor | None:
        return self._shelf.view(lease)
