"""The publishers of a state dict as a reader sees them: where each one's versions are, and which version all of them have.

Rules:

* Publishers don't agree with each other. A reader takes the newest version that all have; where one is behind, it waits for that.
* A publisher that is not where it was is looked for in the directory. It is `PublisherGone` if it has not published again since.
* What lies where in a version is told once, and again when it has changed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from torch import Tensor

from monarch_async.errors import ActorDied
from monarch_async.future import Future
from monarch_async.tensor.layout import Layout
from monarch_async.tensor.state_directory import Source, directory
from monarch_async.tensor.state_errors import PublisherGone
from monarch_async.tensor.state_shelf import Keeper, Opened

__all__ = ["Group"]

R = TypeVar("R")

LAYOUTS = 4
"""How many are remembered for each publisher."""


class Group:
    """See the module's docstring. Used on the loop of its process only."""

    def __init__(self, name: str, sources: Sequence[Source]) -> None:
        self.name = name
        self.sources = list(sources)
        self._layouts: dict[str, dict[int, Layout]] = {}  # by the life of the source and number, the newest last

    async def ask(self, index: int, call: Callable[[Keeper], Future[R]]) -> R:
        """Ask one publisher's keeper, wherever that is by now. Raises `PublisherGone`."""
        while True:
            source = self.sources[index]
            try:
                return await call(source.keeper)
            except ActorDied as died:
                found = await (await directory()).find.call_one(source.key)
                if found is None or found.life == source.life:
                    raise PublisherGone(
                        f"{source.who}, who published {self.name!r}, is gone: {died.reason or died}; it has not published again since",
                        name=self.name,
                        publisher=source.who,
                    ) from died
                self._layouts.pop(source.life, None)
                self.sources[index] = found

    async def ask_all(self, call: Callable[[Keeper], Future[R]]) -> list[R]:
        """Ask all of them at the same time."""
        return await asyncio.gather(*(self.ask(index, call) for index in range(len(self.sources))))

    async def view(self, index: int, lease: int) -> Tensor | None:
        """All bytes of a version of one publisher of this host, without a copy; `None` if it is on lease no more."""
        return await self.ask(index, lambda keeper: keeper.view.call_one(lease))

    async def wait(self, version: int) -> int:
        """Until each has this version or a newer one; the newest that each has had."""
        return min(await self.ask_all(lambda keeper: keeper.wait.call_one(version)))

    @asynccontextmanager
    async def opened(self, above: int = 0) -> AsyncIterator[tuple[Sequence[Opened], Sequence[Layout]]]:
        """The newest version that all have, and that is newer than `above`, on lease; and what is in it, by publisher."""
        lease = int.from_bytes(os.urandom(7), "little")  # chosen here, so that it can be ended whether or not its answer has come
        timer: asyncio.TimerHandle | None = None

        def renew() -> None:
            for source in self.sources:
                source.keeper.renew.broadcast(lease)
            renew_later()

        def renew_later() -> None:
            nonlocal timer
            timer = asyncio.get_running_loop().call_later(min(each.seconds for each in opened), renew)

        try:
            opened = await self._open(lease, above)
            renew_later()
            yield opened, [self._layout(index, each) for index, each in enumerate(opened)]
        finally:
            if timer is not None:
                timer.cancel()
            self._end(lease)

    def _end(self, lease: int) -> None:
        for source in self.sources:
            source.keeper.end.broadcast(lease)

    async def _open(self, lease: int, above: int) -> list[Opened]:
        version: int | None = None
        while True:
            found = await asyncio.gather(*(self._open_one(index, version, lease) for index in range(len(self.sources))))
            opened = [each for each in found if each is not None]
            if len(opened) == len(found) and len({each.version for each in opened}) == 1 and opened[0].version > above:
                return opened
            self._end(lease)
            version = await self._common(above)

    async def _open_one(self, index: int, version: int | None, lease: int) -> Opened | None:
        def call(keeper: Keeper) -> Future[Opened | None]:
            known = next(reversed(self._layouts.get(self.sources[index].life, {0: None})))
            return keeper.open.call_one(version, known, lease)

        return await self.ask(index, call)

    async def _common(self, above: int) -> int:
        """The newest version that all have, once there is one that is newer than `above`."""
        while True:
            found = await self.ask_all(lambda keeper: keeper.versions.call_one())
            kept = [[version for version in versions if version > above] for versions in found]
            common = set.intersection(*map(set, kept))
            if common:
                return max(common)
            # Somebody is behind: the oldest that others still have is the first that all can have.
            await self.wait(max(min(versions, default=above + 1) for versions in kept))

    def _layout(self, index: int, opened: Opened) -> Layout:
        known = self._layouts.setdefault(self.sources[index].life, {})
        if opened.layout is not None:
            known[opened.layout_number] = opened.layout
            while len(known) > LAYOUTS:
                del known[next(iter(known))]
        return known[opened.layout_number]
