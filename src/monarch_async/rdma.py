"""One-sided buffers: memory that other processes read and write by themselves.

``buffer = RDMABuffer(tensor)`` registers the memory of a tensor, an array, a memoryview or a bytearray in the process that it is made in.
The buffer itself is a small reference, which travels in messages; whoever gets it copies from the memory, `read_into`, or to it,
`write_from`, without the owner's code taking part: an actor that is busy is read all the same, as long as its process's event loop turns.
That is asked, by a small message, before copies of 4 MiB or more and for all that does not go by ``cma``, else once for each buffer.

Rules:

* One-sided means that nobody waits for anybody. Who reads while another writes, the owner in its own memory included, may get some of the
  old bytes and some of the new. Agree by messages on who may do what when.
* A buffer holds its memory until it is dropped, or the life of the actor that made it is over; made outside of an actor, until its process
  ends or is shut down. That nobody has the buffer any more does not drop it.
* What does not fit is refused before a byte is written.
* Both ends are bytes. Tensors and arrays of different dtypes are refused all the same.
* Nothing is recorded for autograd: a tensor that is written to changes under the graph that it is part of.
* A tensor whose storage is resized while it is registered (FSDP resharding) is a buffer whose memory is gone. What a copy gets that
  meets this halfway, or a small one just after it, is undefined: drop the buffer first.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any, Self
from weakref import WeakKeyDictionary

from monarch_async._channel.memory import memory_of
from monarch_async._runtime.asking import ask
from monarch_async._runtime.buffers import Buffers
from monarch_async._runtime.cell import Cell
from monarch_async._runtime.context import current_cell, current_message
from monarch_async._runtime.copying import Copier
from monarch_async._runtime.runtime import Runtime
from monarch_async._runtime.transfers import Job, Ref, Transfers
from monarch_async.ambient import current_runtime, on_loop
from monarch_async.errors import ActorError, BufferMismatch, CallTimeout
from monarch_async.future import Future, as_future
from monarch_async.ids import ProcAddress
from monarch_async.options import RDMA_BACKENDS

__all__ = ["RDMAAction", "RDMABuffer"]

_halves: WeakKeyDictionary[Runtime, tuple[Buffers, Transfers]] = WeakKeyDictionary()


class RDMABuffer:
    """Memory of the process that made it, to be read and written from others. Picklable, immutable, and small.

    Args:
        memory: a tensor on the CPU, an array, a memoryview, a bytearray, or anything else with the buffer protocol. Contiguous.
        backend: how to copy, of ``local``, ``cma``, ``segment``, ``ucx`` and ``tcp``; by default the option `rdma_backend` where the copy
            is made, and that by default the first that can be used there.

    Raises `BufferMismatch` for memory with gaps (``.contiguous()`` makes a tensor without), or not of this host; `TypeError` for what has
    no memory; `UsageError` in code of an actor's life that is over.
    """

    __slots__ = ("_ref",)

    def __init__(self, memory: Any, *, backend: str | None = None) -> None:
        if backend is not None and backend not in RDMA_BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(RDMA_BACKENDS)}, not {backend!r}")
        found = memory_of(memory)
        runtime = current_runtime()
        message = current_message.get()
        cell: Cell | None = message.cell if message is not None else current_cell.get()
        key = on_loop(runtime, lambda: _halves_of(runtime)[0].register(found, cell))
        shared = bool(found.size) and runtime.lending.pool.find(found.address, found.size) is not None
        self._ref = Ref(runtime.me, key, found.size, found.readonly, found.dtype, found.shape, backend or "auto", shared)

    @property
    def size(self) -> int:
        """Bytes."""
        return self._ref.size

    @property
    def owner(self) -> ProcAddress:
        """The process whose memory it is."""
        return self._ref.owner

    @property
    def dtype(self) -> str:
        """The name of the dtype of the tensor or array, as ``"float32"``; empty for other memory."""
        return self._ref.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor or array; ``()`` for other memory."""
        return self._ref.shape

    @property
    def backend(self) -> str:
        """What `read_into` here would copy all of it by, as far as is known before that is done."""
        runtime = current_runtime()
        return on_loop(runtime, lambda: _halves_of(runtime)[1].backend_of(self._ref))

    def read_into(self, dst: Any, offset: int | None = None, size: int | None = None, timeout: float | None = None) -> Future[None]:
        """Copy from the buffer into `dst`, memory of this process; done when the bytes are there.

        Args:
            dst: where they go, from its beginning: a tensor, an array, a memoryview or a bytearray.
            offset: the byte of the buffer to begin with, by default the first.
            size: how many bytes, by default as many as `dst` has. With neither of the two, buffer and `dst` must be of one size.
            timeout: seconds.

        Raises at once `BufferMismatch` for what does not fit. Errors of the future: `BufferGone`, `CallTimeout`, `RDMAError`.
        Cancelled, it stops within a few milliseconds, and is done when no more is written to `dst`.
        """
        return _start([_job(self._ref, False, dst, offset, size)], timeout)

    def write_from(self, src: Any, offset: int | None = None, size: int | None = None, timeout: float | None = None) -> Future[None]:
        """Copy from `src`, memory of this process, into the buffer; done when the bytes are there. `src` must not change meanwhile.

        Arguments and errors are those of `read_into`; a buffer of read-only memory is a `BufferMismatch` too. Once cancelled no more is
        sent, though a few megabytes that are on their way between hosts may still arrive.
        """
        return _start([_job(self._ref, True, src, offset, size)], timeout)

    def drop(self) -> Future[None]:
        """Let the memory go, from any process; done when nobody is copying from or to it any more. What is under way fails.

        Dropping what is dropped, or whose process has ended, does nothing.
        """
        runtime = current_runtime()
        ref = self._ref

        async def drop() -> None:
            if ref.owner.uid == runtime.me.uid:
                await _halves_of(runtime)[0].drop(ref.key)
                return
            try:
                await ask(runtime, ref.owner, "buffer_drop", ref.key)
            except ActorError:
                return  # its process is gone, or is another by now: so is the memory

        return as_future(runtime, drop())

    def __reduce__(self) -> tuple[Any, ...]:
        return _buffer, (self._ref,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RDMABuffer) and self._ref.key == other._ref.key

    def __hash__(self) -> int:
        return hash(self._ref.key)

    def __repr__(self) -> str:
        what = f"{self.dtype} {list(self.shape)}, " if self.dtype else ""
        return f"<RDMABuffer {self._ref.key:016x} of {self.owner}, {what}{self.size} bytes>"


class RDMAAction:
    """Several copies, made at the same time: ``await RDMAAction().read_into(one, a).read_into(two, b).submit()``.

    In which order is not said. Those of one owner go together, which for many small ones takes one system call where possible.
    """

    def __init__(self) -> None:
        self._jobs: list[Job] = []

    def read_into(self, buffer: RDMABuffer, dst: Any, offset: int | None = None, size: int | None = None) -> Self:
        """Add `RDMABuffer.read_into`. Raises what that raises at once, and then nothing is added."""
        self._jobs.append(_job(buffer._ref, False, dst, offset, size))
        return self

    def write_from(self, buffer: RDMABuffer, src: Any, offset: int | None = None, size: int | None = None) -> Self:
        """Add `RDMABuffer.write_from`, in the same way."""
        self._jobs.append(_job(buffer._ref, True, src, offset, size))
        return self

    def submit(self, timeout: float | None = None) -> Future[None]:
        """Make the copies, within `timeout` seconds; may be called again.

        A buffer that is gone is found out before anything is written. The first error stops the others and is raised when they have
        stopped; its text names what failed.
        """
        return _start(list(self._jobs), timeout)


class _Transfer(Future[None]):
    """Done only when no byte is being copied any more, also when it is cancelled."""

    _task: asyncio.Task[None] | None = None
    _given_up = False

    def cancel(self, msg: Any | None = None) -> bool:
        if threading.get_ident() != self.runtime.thread:
            self.runtime.loop.call_soon_threadsafe(self.cancel, msg)
            return not self.done()
        if self.done() or self._task is None:
            return False
        self._given_up = True
        self._task.cancel()
        return True

    def ended(self, task: asyncio.Task[None]) -> None:
        if self._given_up or task.cancelled():
            asyncio.Future.cancel(self)
        elif (error := task.exception()) is not None:
            self.fail(0, error)
        else:
            self.settle(0, None)


def _start(jobs: Sequence[Job], timeout: float | None) -> Future[None]:
    runtime = current_runtime()
    future = _Transfer(loop=runtime.loop)
    future.runtime = runtime

    async def run() -> None:
        try:
            async with asyncio.timeout(timeout):
                await _halves_of(runtime)[1].run(jobs)
        except TimeoutError as error:
            what = str(jobs[0]) if len(jobs) == 1 else f"{len(jobs)} copies"
            raise CallTimeout(f"{what}: not done within {timeout:g} s") from error

    def begin() -> None:
        if _halves_of(runtime)[1].run_now(jobs):
            runtime.loop.call_soon(future.settle, 0, None)  # and not at once: who polls by this shall let others run
            return
        future._task = task = runtime.loop.create_task(run(), name="one-sided copy")
        task.add_done_callback(future.ended)

    on_loop(runtime, begin)
    return future


def _job(ref: Ref, write: bool, what: Any, first: int | None, size: int | None) -> Job:
    """Raises `BufferMismatch` for all that is wrong as seen from here."""
    memory = memory_of(what)
    name, mine = ("write_from", "src") if write else ("read_into", "dst")
    what_failed = f"{name} of {ref}"
    if write and ref.readonly:
        raise BufferMismatch(f"{what_failed}: its memory is read-only")
    if not write and memory.readonly:
        raise BufferMismatch(f"{what_failed}: {mine} is read-only")
    if ref.dtype and memory.dtype and ref.dtype != memory.dtype:
        raise BufferMismatch(f"{what_failed}: it is {ref.dtype}, {mine} is {memory.dtype}; view one of them as the other's dtype")
    offset = first or 0
    if offset < 0 or offset > ref.size or (size is not None and size < 0):
        raise BufferMismatch(f"{what_failed}: offset {offset} and size {size} are no range in it")
    if size is None:
        size = memory.size
        if first is None and size != ref.size:
            raise BufferMismatch(f"{what_failed}: {mine} has {size} bytes; give offset=… or size=… to copy a part")
    if size > memory.size:
        raise BufferMismatch(f"{what_failed}: {mine} has {memory.size} bytes, which is less than size={size}")
    if offset + size > ref.size:
        raise BufferMismatch(f"{what_failed}: bytes {offset} to {offset + size} are not all in it")
    return Job(ref, write, memory, offset, size)


def _halves_of(runtime: Runtime) -> tuple[Buffers, Transfers]:
    """What holds and what copies memory in this process, made when the first buffer is made or used here."""
    halves = _halves.get(runtime)
    if halves is None:
        copier = Copier()
        buffers = Buffers(runtime, copier)
        transfers = Transfers(runtime, buffers, copier)
        runtime.service = {**runtime.service, **buffers.table, **transfers.table}
        halves = _halves[runtime] = buffers, transfers
    return halves


def _buffer(ref: Ref) -> RDMABuffer:
    buffer = RDMABuffer.__new__(RDMABuffer)
    buffer._ref = ref
    return buffer
