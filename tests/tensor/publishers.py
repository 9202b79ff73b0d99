"""Actors that publish and pull state dicts, for tests."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch

from monarch_async import Actor, concurrent_endpoint, context, endpoint
from monarch_async.tensor import Published, StateDict, TensorSlice

__all__ = ["Puller", "Sharded", "Trainer", "constant", "global_tensor", "mapped", "only_value"]


def constant(value: int, elements: int) -> dict[str, torch.Tensor]:
    """Tensors of several sizes and dtypes with one value everywhere."""
    return {
        "large": torch.full((elements,), float(value)),
        "whole": torch.full((33, 7), value),
        "half": torch.full((elements // 8, 2), float(value), dtype=torch.bfloat16),
        "one": torch.tensor(value),
    }


def only_value(tensors: dict[str, torch.Tensor]) -> int:
    """The value that is everywhere in them; -1 if there are several, which bfloat16 tells apart up to 256."""
    found = {float(end) for tensor in tensors.values() for end in (tensor.min(), tensor.max())}
    return int(found.pop()) if len(found) == 1 else -1


def mapped(tensor: torch.Tensor) -> bool:
    """Whether it lies in shared memory of another process."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, end = (int(number, 16) for number in line.split()[0].split("-"))
        if first <= address < end:
            return "memfd:" in line
    return False


class Trainer(Actor):
    """Publishes constants."""

    def __init__(self, name: str = "weights", **settings: Any) -> None:
        self.name = name
        self.settings = settings
        self.published: Published | None = None

    @endpoint
    async def publish(self, value: int, elements: int = 5000, version: int | None = None) -> StateDict:
        self.published = await StateDict.publish(constant(value, elements), name=self.name, version=version, **self.settings)
        return self.published

    @endpoint
    async def publish_these(self, tensors: dict[str, Any]) -> StateDict:
        return await StateDict.publish(tensors, name=self.name, **self.settings)

    @endpoint
    def publish_in_thread(self, value: int, elements: int) -> StateDict:
        published = StateDict.publish(constant(value, elements), name=self.name, **self.settings).get()
        return published.update(constant(value + 1, elements)).get()

    @concurrent_endpoint
    async def go_on(self, first: int, last: int, elements: int) -> int:
        """One version after the other, as fast as it goes."""
        assert self.published is not None
        for value in range(first, last):
            await self.published.update(constant(value, elements))
        return last - 1

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def boom(self) -> None:
        raise ValueError("boom")


class Puller(Actor):
    """Pulls constants, and holds leases."""

    def __init__(self) -> None:
        self.stack = AsyncExitStack()
        self.kept: Any = None

    @endpoint
    async def follow(self, handle: StateDict, last: int, elements: int, views: bool) -> list[tuple[int, int]]:
        """Pull until the last version; each version that came, and the value that was everywhere in it."""
        target = constant(0, elements)
        seen = []
        version = 0
        while version < last:
            if views:
                pulled = await handle.pull(newer_than=version)
                version, target = pulled.version, pulled
            else:
                version = await handle.pull_into(target, newer_than=version)
            seen.append((version, only_value(target)))
        return seen

    @endpoint
    async def pull(self, handle: StateDict) -> tuple[int, dict[str, torch.Tensor], bool]:
        """Version, tensors, and whether they are views."""
        pulled = await handle.pull()
        return pulled.version, dict(pulled), any(map(mapped, pulled.values()))

    @endpoint
    def pull_in_thread(self, handle: StateDict, target: dict[str, Any]) -> int:
        handle.pull_into(target).get()
        return only_value(target)

    @endpoint
    async def keep(self, handle: StateDict) -> int:
        """Have views of a version."""
        self.kept = await handle.pull()
        return int(self.kept.version)

    @endpoint
    async def kept_value(self, write: int | None = None) -> int:
        value = only_value(self.kept)
        if write is not None:
            for tensor in self.kept.values():
                tensor.fill_(write)
        return value

    @endpoint
    async def lease(self, handle: StateDict) -> int:
        """Hold the newest version until `let_go`, as a pull that is under way, and reads the buffer."""
        opened, _ = await self.stack.enter_async_context(handle._group.opened())
        await opened[0].buffer.read_into(bytearray(opened[0].buffer.size))
        return opened[0].version

    @endpoint
    async def let_go(self) -> None:
        await self.stack.aclose()

    @endpoint
    async def pid(self) -> int:
        return os.getpid()


def global_tensor(rows: int, columns: int) -> torch.Tensor:
    """A matrix without two equal elements."""
    return torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)


class Sharded(Actor):
    """A rank of a group that has a matrix in slices."""

    def place(self) -> tuple[int, int]:
        """Which rank this is, and of how many, whatever slice was called."""
        point = context().actor_instance.rank
        return point.rank, point.extent.nelements

    @endpoint
    async def publish_rows(self, rows: int, columns: int, add: float = 0.0, slots: int = 3, version: int | None = None) -> StateDict:
        """This rank's share of the rows."""
        rank, ranks = self.place()
        first, end = (rows * edge // ranks for edge in (rank, rank + 1))
        mine = global_tensor(rows, columns)[first:end] + add
        state: dict[str, Any] = {"w": TensorSlice(mine, (rows, columns), (first, 0)), "same": torch.full((3,), add)}
        return await StateDict.publish(state, name="rows", slots=slots, version=version)
