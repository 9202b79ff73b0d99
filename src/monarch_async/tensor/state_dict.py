"""Weights on their way from those who train to those who use them: `StateDict`.

    published = await StateDict.publish(model, name="policy")    # in the trainer; the handle is small, and travels in messages
    await published.update(model)                                # after some steps
    version = await handle.pull_into(other)                      # in a generator: in place

A publisher copies its tensors once into shared memory and goes on; readers copy from there by themselves, or look at it where they are on
the same host. What happens there is in `state_shelf`, and what a pull reads in `state_pull`.

Rules:

* A pull gives exactly one version, never parts of two. One that meets the end of its version begins again with the newest.
* A version of several publishers (`gather`) is one that all of them have.
* A handle stands for actors, whichever life of them: after a restart it finds what the next life publishes under the same name, with a
  higher version. Until then it raises `PublisherGone`. The same actor is that of the same rank in the same mesh.
* `update` must be awaited before the tensors change; `pull_into` before they are used. Both leave the event loop free.
* A pull that ends in the middle leaves a mixture in its target: one that is cancelled, times out, or comes from another host whose
  publisher has gone meanwhile. Pull again before using it.
* Nothing is recorded for autograd.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from monarch_async.ambient import current_runtime
from monarch_async.errors import BufferGone, CallTimeout, UsageError
from monarch_async.future import Future, as_future
from monarch_async.info import context
from monarch_async.procs import this_proc
from monarch_async.shared import shared_buffer
from monarch_async.tensor.layout import Layout
from monarch_async.tensor.state_directory import Directory, Source, directory
from monarch_async.tensor.state_group import Group
from monarch_async.tensor.state_parts import Only, Part, State, chooser, pack, parts_of
from monarch_async.tensor.state_pull import (
    Pulled,
    Sources,
    Torn,
    check,
    check_word,
    in_thread,
    is_whole,
    new_parts,
    put_all,
    read_block,
    read_parts,
    sources_of,
    tensors_in,
)
from monarch_async.tensor.state_shelf import WORD, Keeper, Opened, Shelf, shelves

__all__ = ["Published", "StateDict"]

R = TypeVar("R")

_log = logging.getLogger("monarch_async")

ATTEMPTS = 10
"""How often a pull begins again whose version was given up meanwhile."""


class StateDict:
    """A state dict that others publish: a handle, small and picklable. Made by `publish`, and by `gather` of several.

    Errors of all futures: `PublisherGone` when a publisher has ended, `CallTimeout` after `timeout` seconds.
    """

    def __init__(self, name: str, sources: Sequence[Source]) -> None:
        self.name = name
        self._group = Group(name, sources)

    @staticmethod
    def publish(
        state: State, *, name: str = "weights", version: int | None = None, slots: int = 3, lease: float = 10.0
    ) -> Future[Published]:
        """Publish the tensors of a module or dictionary as they are now. Done when they are copied, and readers can have them.

        Called again in the same actor with the same name it is `Published.update`.

        Args:
            state: a module, or tensors, DTensors and `TensorSlice` by key. Of sharded ones each rank publishes what it has.
            name: of this state dict, in this actor.
            version: its number, higher than the last; by default the last and one.
            slots: how many versions may take memory at a time, at least 2: the newest, the one that is being copied, and older ones.
            lease: seconds for which a reader that gives no sign of life can hold an older one.

        Raises at once `TypeError` and `ValueError` for what can't be published, `UsageError` for settings that can't be.
        """
        if slots < 2 or not lease > 0:
            raise UsageError(f"a state dict needs at least 2 slots and a lease of some seconds, not slots={slots} and lease={lease}")
        me = context().actor_instance
        actor = me.actor_id.rpartition("/")[2]
        key = f"{name}/{actor}/{me.rank.rank}"
        runtime = current_runtime()
        published = _published.get(key)
        if published is None or published.over:
            for ended in [ended for ended, other in _published.items() if other.over]:
                del _published[ended]
            published = _published[key] = Published(name, key, f"{me.name}[{me.rank.rank}]", Shelf(slots, lease))
        return as_future(runtime, published._publish(pack(parts_of(state)), version))

    @staticmethod
    def gather(handles: Sequence[StateDict]) -> StateDict:
        """One handle of what several ranks publish under one name. Raises `UsageError` if there are none, or names differ."""
        names = {handle.name for handle in handles}
        if len(names) != 1:
            raise UsageError(f"gather takes the handles of one state dict, and these are of {sorted(names) or 'none'}")
        return StateDict(names.pop(), [source for handle in handles for source in handle._group.sources])

    def version(self) -> Future[int]:
        """The newest version that all publishers have."""
        return self._future(self._group.wait(0), None)

    def wait_for(self, version: int, *, timeout: float | None = None) -> Future[int]:
        """Wait until all publishers have this version or a newer one; the newest that all have."""
        return self._future(self._group.wait(version), timeout)

    def pull_into(self, target: State, *, only: Only = None, newer_than: int | None = None, timeout: float | None = None) -> Future[int]:
        """Overwrite the tensors of a module or dictionary with the newest version; returns that.

        Args:
            target: whose keys, shapes and dtypes are those that are published. What is a DTensor or a `TensorSlice` takes its slice, of
                however many publishers' slices that is put together.
            only: keys that begin so, or for which this is true; others are left alone on both sides.
            newer_than: wait for a version newer than this.

        Raises `TypeError` and `ValueError` at once for what can't be a target. The future has a `StateMismatch` for what doesn't fit.
        """
        wanted = chooser(only)
        parts = {key: part for key, part in parts_of(target).items() if wanted(key)}

        async def take(opened: Sequence[Opened], layouts: Sequence[Layout]) -> int:
            await self._read(sources_of(layouts, wanted), parts, opened, layouts)
            return opened[0].version

        return self._future(self._pull(take, newer_than), timeout)

    def pull(self, *, only: Only = None, newer_than: int | None = None, timeout: float | None = None) -> Future[Pulled]:
        """The newest version as new tensors. Arguments as those of `pull_into`.

        On the publisher's host, and if one publisher has all of every tensor, they are views of what it has published, without a copy; what
        is written to them nobody else sees. They hold that version's memory for as long as they live. Where this process has views of that
        version already these are copies, made on the event loop.
        """
        wanted = chooser(only)

        async def take(opened: Sequence[Opened], layouts: Sequence[Layout]) -> Pulled:
            sources, version = sources_of(layouts, wanted), opened[0].version
            if len(opened) == 1 and is_whole(sources):
                block = (await self._views([0], opened, layouts)).get(0)
                if block is None:
                    block = await read_block(sources, layouts[0], opened[0].buffer)
                    await check_word(layouts[0], opened[0].buffer, version)
                return Pulled(tensors_in(block, sources), version)
            parts = new_parts(sources)
            await self._read(sources, parts, opened, layouts)
            return Pulled({key: part.tensor for key, part in parts.items()}, version)

        return self._future(self._pull(take, newer_than), timeout)

    def __reduce__(self) -> tuple[Any, ...]:
        return StateDict, (self.name, tuple(self._group.sources))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} of {', '.join(source.who for source in self._group.sources)}>"

    # What follows runs on the loop.

    def _future(self, doing: Coroutine[Any, Any, R], timeout: float | None) -> Future[R]:
        async def run() -> R:
            try:
                async with asyncio.timeout(timeout):
                    return await doing
            except TimeoutError as error:
                if timeout is None or isinstance(error, CallTimeout):
                    raise
                raise CallTimeout(f"the state dict {self.name!r}: not done within {timeout:g} s") from error

        return as_future(current_runtime(), run())

    async def _pull(self, take: Callable[[Sequence[Opened], Sequence[Layout]], Coroutine[Any, Any, R]], newer_than: int | None) -> R:
        above = newer_than or 0
        await self._group.wait(above + 1)
        left = ATTEMPTS
        while True:
            async with self._group.opened(above) as (opened, layouts):
                try:
                    return await take(opened, layouts)
                except (BufferGone, Torn):
                    left -= 1
                    if not left:
                        raise

    async def _read(self, sources: Sources, parts: Mapping[str, Part], opened: Sequence[Opened], layouts: Sequence[Layout]) -> None:
        """Write to the parts what is published."""
        reads = check(self.name, sources, parts)
        from_whom = sorted({read.source for read in reads})
        views = await self._views(from_whom, opened, layouts)
        puts = await read_parts(reads, [each.buffer for each in opened], views)
        others = [index for index in from_whom if index not in views]
        await asyncio.gather(*(check_word(layouts[index], opened[index].buffer, opened[index].version) for index in others))
        await put_all(puts)

    async def _views(self, from_whom: Sequence[int], opened: Sequence[Opened], layouts: Sequence[Layout]) -> dict[int, Tensor]:
        """Views of what publishers on this host have published, by publisher. Raises `Torn`."""
        here = [index for index in from_whom if opened[index].shared and opened[index].buffer.backend in ("cma", "segment")]
        blocks = await asyncio.gather(*(self._group.view(index, opened[index].lease) for index in here))
        for index, block in zip(here, blocks, strict=True):
            version = opened[index].version
            if block is None or WORD.unpack(bytes(block[layouts[index].size :].tolist())) != (version,):
                raise Torn(f"version {version} was given up before it could be had")
        return {index: block for index, block in zip(here, blocks, strict=True) if block is not None}


class Published(StateDict):
    """What its publisher has of it. Sent to others it is a `StateDict`."""

    def __init__(self, name: str, key: str, who: str, shelf: Shelf) -> None:
        super().__init__(name, [])
        self._key = key
        self._who = who
        self._shelf = shelf
        self._lock = asyncio.Lock()
        self._directory: Directory | None = None

    @property
    def over(self) -> bool:
        """Whether the life of the actor that published has ended: no more can be published by this."""
        return self._shelf.closed

    def update(self, state: State, *, version: int | None = None) -> Future[Self]:
        """Publish the tensors as they are now, as the next version. Updates happen one after the other, in the order of the calls.

        It waits where all `slots` are on lease, no longer than `lease` seconds after the last sign of life of a reader.

        Raises what `StateDict.publish` does; the future has a `UsageError` for a version that is not higher than the last, or
        when the life of the actor is over.
        """
        return as_future(current_runtime(), self._publish(pack(parts_of(state)), version))

    async def _publish(self, packed: tuple[Layout, list[tuple[int, Tensor]]], version: int | None) -> Self:
        if version is not None and version < 1:
            raise UsageError(f"versions are counted from 1, not {version}")
        layout, copies = packed
        async with self._lock:
            if self.over:
                raise UsageError(f"{self._who} can't publish {self.name!r} by this any more: that life of it is over")
            known = self._directory or await self._enter()
            asked = known.last.call_one(self._key)
            try:
                await self._shelf.make_room()
                block, shared = await in_thread(lambda given_up: _fill(layout, copies, given_up))
                last = await asked
            finally:
                asked.cancel()
            number = last + 1 if version is None else version
            if number <= last:
                raise UsageError(f"version {version} of {self.name!r} is not higher than the last, {last}")
            if self.over:
                raise UsageError(f"{self._who} has ended before {self.name!r} was published")
            # Nothing is awaited from here on: it counts, and others can have it, or neither. It leaves before any answer that has it.
            known.reached.call_one(self._key, number).add_done_callback(_seen)
            self._shelf.add(number, layout, block, shared)
        return self

    async def _enter(self) -> Directory:
        """Spawn who answers for this, and have it known."""
        life = os.urandom(8).hex()
        shelves[life] = self._shelf
        keeper = this_proc().spawn(f"{self.name} of {self._who}", Keeper, life)
        await keeper
        source = Source(self._key, self._who, life, keeper)
        found = await directory()
        await found.enter.call_one(source)
        self._group.sources = [source]
        self._directory = found
        return found


_published: dict[str, Published] = {}
"""What the actors of this process publish, by key."""


def _memory(size: int) -> tuple[memoryview, bool]:
    """Shared memory, and whether it is that; other memory, from which no pull is without a copy, where there is none left."""
    try:
        return shared_buffer(size), True
    except MemoryError as error:
        _log.warning("a version of a state dict is in memory that is not shared, so that pulls of it are slower: %s", error)
        return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)), False


def _seen(done: asyncio.Future[None]) -> None:
    """Where that fails the directory is gone, which the next version finds out."""
    if not done.cancelled():
        done.exception()


def _fill(layout: Layout, copies: Sequence[tuple[int, Tensor]], given_up: threading.Event) -> tuple[memoryview, bool]:
    """A block with the tensors, and whether it is shared memory; its word is wiped."""
    memory, shared = _memory(layout.size + WORD.size)
    WORD.pack_into(memory, layout.size, 0)
    block = torch.frombuffer(memory, dtype=torch.uint8)
    with torch.no_grad():
        for offset, tensor in copies:
            if given_up.is_set():
                break
            view = block[offset : offset + tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
            view.copy_(tensor)
    return memory, shared
