"""Actors that own memory, and what tests of one-sided buffers ask of them.

Every process that has one imports this module, and torch takes two seconds to import: only a tensor that is sent there brings it along.
"""

from __future__ import annotations

import ctypes
import logging
import os
from typing import TYPE_CHECKING, Any

import numpy

from monarch_async import Actor, RDMAAction, RDMABuffer, RDMAError, current_rank, endpoint, shared_buffer
from monarch_async._runtime.buffers import Buffers
from monarch_async._runtime.transfers import Transfers
from monarch_async.ambient import current_runtime
from monarch_async.rdma import _halves_of

if TYPE_CHECKING:
    import torch

__all__ = ["Owner", "Powerless", "Shy", "halves", "pattern"]


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
        return bytes(memory.numpy()) if hasattr(memory, "numpy") else bytes(memory)

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
    async def serving(self) -> int:
        """Of how many copies by UCX something is remembered here."""
        return len(halves()[1]._ucx._serving)

    @endpoint
    async def forget_fabric(self, uid: str) -> None:
        """Close the way to a process by UCX in the middle of what is under way, as a broken network would."""
        ucx = halves()[1]._ucx
        assert ucx._fabric is not None
        ucx._fabric.forget(ucx._peers[uid])

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


class Shy(Owner):
    """An owner that lets no other process see its memory."""

    def __init__(self) -> None:
        super().__init__()
        libc = ctypes.CDLL(None)
        assert libc.prctl(4, 0, 0, 0, 0) == 0  # PR_SET_DUMPABLE


class Powerless(Owner):
    """A process that may not trace any other, root or not."""

    def __init__(self) -> None:
        super().__init__()
        libc = ctypes.CDLL(None, use_errno=True)
        header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        assert libc.capget(header, sets) == 0
        sets[0] &= ~(1 << 19)  # CAP_SYS_PTRACE
        assert libc.capset(header, sets) == 0
        self.warnings: list[str] = []

    @endpoint
    async def refused(self, buffers: list[RDMABuffer]) -> tuple[list[str], list[bytes], list[str]]:
        """Backends before, contents, and what was logged."""
        records: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("monarch_async").addHandler(handler)
        before = [buffer.backend for buffer in buffers]
        contents = []
        for buffer in buffers:
            target = bytearray(buffer.size)
            await buffer.read_into(target)
            contents.append(bytes(target))
        await RDMAAction().write_from(buffers[0], contents[0][::-1]).submit()
        return before + [buffer.backend for buffer in buffers], contents, records

    @endpoint
    async def forced(self, buffer: RDMABuffer) -> str:
        try:
            await buffer.read_into(bytearray(buffer.size))
        except RDMAError as error:
            return str(error)
        return ""
