"""Who publishes what, and under which number: one actor of the job, in the client's process, which outlives the publishers.

A publisher is an actor, whichever life of it, and a name: its `key`. It counts the versions, so that a publisher that was started again
goes on counting where it was, and knows where it is now, for those who knew it before. It is asked once for each version that is published,
while that is being copied, and told of it just before others can have it; so one that is given up meanwhile does not count. Who pulls asks
only when a publisher is not where it was.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from monarch_async.actor import Actor
from monarch_async.controllers import get_or_spawn_controller
from monarch_async.endpoints import endpoint
from monarch_async.future import Future

__all__ = ["Directory", "Source", "directory"]


class Source(NamedTuple):
    """Where the versions of one publisher are."""

    key: str
    who: str
    """The publisher, for people: ``trainers[0]``."""
    life: str
    """Differs from one life of a publisher to the next."""
    keeper: Any
    """The `Keeper` in its process."""


class Directory(Actor):
    """See the module's docstring."""

    def __init__(self) -> None:
        self._sources: dict[str, Source] = {}
        self._versions: dict[str, int] = {}

    @endpoint
    async def enter(self, source: Source) -> None:
        """From now on this is where the versions of its key are."""
        self._sources[source.key] = source

    @endpoint
    async def find(self, key: str) -> Source | None:
        """Where the versions are, or were last."""
        return self._sources.get(key)

    @endpoint
    async def last(self, key: str) -> int:
        """The last version of a key; 0 if there is none."""
        return self._versions.get(key, 0)

    @endpoint
    async def reached(self, key: str, version: int) -> None:
        """This version is there."""
        self._versions[key] = version


def directory() -> Future[Directory]:
    """That of this job."""
    return get_or_spawn_controller("monarch_async state dicts", Directory)
