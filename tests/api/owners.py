"""Actors that own memory, and what tests of one-sided buffers ask of them."""

from __future__ import annotations

import os
from typing import Any

import numpy
import torch

from monarch_async import Actor, RDMABuffer, current_rank, endpoint, shared_buffer
from monarch_async._runtime.buffers import Buffers
from monarch_async._runtime.transfers import Transfers
from monarch_async.ambient import current_runtime
from monarch_async.rdma import _halves_of

__all__ = ["Owner", "halves", "pattern"]


def pattern(size: int) -> bytes:
    """Bytes of which no part is like another."""
    return numpy.arange(size // 4 + 1, dtype=numpy.uint32).tobytes()[:size]


def halves() -> tuple[Buffers, Transfers]:
    """What this process holds, and what it borrows."""
    return _halves_of(current_runtime())


class Owner(Actor):
    """Holds memory, and hands out buffers of it."""

    def __init__(self) -> None:
        self.memory: dict[RDMABuffer, Any] = {}

    @endpoint
    async def make(self, content: bytes, backend: str | None = None, shared: bool = False) -> RDMABuffer:
        """A buffer of a bytearray, or of shared memory."""
        memory = shared_buffer(len(content)) if shared else bytearray(content)
        memory[:] = content
        return self._keep(memory, backend)

    @endpoint
    async def make_zeros(self, size: int, backend: str | None = None) -> RDMABuffer:
        """The same, of a size in bytes."""
        return self._keep(bytearray(size), backend)

    @endpoint
    async def make_tensor(self, tensor: torch.Tensor, backend: str | None = None) -> RDMABuffer:
        """A buffer of a copy."""
        return self._keep(tensor.clone(), backend)

    @endpoint
    async def make_readonly(self, content: bytes, backend: str | None = None) -> RDMABuffer:
        return self._keep(content, backend)

    @endpoint
    def make_in_thread(self, content: bytes) -> RDMABuffer:
        """The same from a thread."""
        return self._keep(bytearray(content), None)

    def _keep(self, memory: Any, backend: str | None) -> RDMABuffer:
        buffer = RDMABuffer(memory, backend=backend)
        self.memory[buffer] = memory
        return buffer

    @endpoint
    async def content(self, buffer: RDMABuffer) -> bytes:
        memory = self.memory[buffer]
        return bytes(memory.numpy()) if isinstance(memory, torch.Tensor) else bytes(memory)

    @endpoint
    async def free(self, buffer: RDMABuffer) -> None:
        """Take a tensor its memory."""
        self.memory[buffer].untyped_storage().resize_(0)

    @endpoint
    async def drop(self, buffer: RDMABuffer) -> None:
        await buffer.drop()

    @endpoint
    async def held(self) -> int:
        """How many buffers this process holds."""
        return len(halves()[0]._registered)

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def rank(self) -> int:
        return current_rank().rank

    @endpoint
    async def boom(self) -> None:
        raise ValueError("boom")

    @endpoint
    async def read(self, buffer: RDMABuffer) -> bytes:
        """What is in another's buffer."""
        target = bytearray(buffer.size)
        await buffer.read_into(target)
        return bytes(target)

    @endpoint
    def read_in_thread(self, buffer: RDMABuffer) -> bytes:
        """The same, blocking."""
        target = bytearray(buffer.size)
        buffer.read_into(target).get()
        return bytes(target)
