"""The accessor's half of one-sided buffers: how bytes get from a process's registered memory to here, and back.

A `Job` is one copy. Those of a batch are grouped by owner and backend; each group is *opened*, which finds whatever is wrong with any of it
before a byte is written, and then run, all of them at the same time.

=========  =========================  ==========================================================================================
backend    between                    how
=========  =========================  ==========================================================================================
local      one process                a copy in threads
cma        processes of one host      ``process_vm_readv``, ``process_vm_writev`` in threads; the owner is asked once (`direct`)
segment    the same                   messages whose bytes travel in shared memory, if there is some; what is there is read there
ucx        any, if asked for          UCX moves the bytes between two processes that both have it (`ucx`)
tcp        any                        much of it over a connection of its own (`data`); else messages, a few at a time
=========  =========================  ==========================================================================================

Rules:

* With ``auto`` the first that can is used; but to read much of memory that is shared (`shared_empty`), ``segment``, since the kernel's
  copies cost more than plain ones. A backend that can't be used between two processes is not tried there again. One that is asked
  for by name is used or fails.
* When one group fails, the others are stopped, and have come to rest when the error is raised.
* What comes of a copy that was cancelled or has failed halfway is a part of it. What is written elsewhere may still get there: a
  `WINDOW` of bytes that messages carry, or what a data connection holds. Here nothing more is written.
"""

from __future__ import annotations

import asyncio
import pickle
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from monarch_async._channel.cma import MAX_PIECES, Piece, move
from monarch_async._channel.memory import Memory, memory_of, view_of
from monarch_async._runtime.asking import ask
from monarch_async._runtime.buffers import Buffers
from monarch_async._runtime.copying import INLINE_COPY, SLICE, Copier, run_all, slices
from monarch_async._runtime.data import Copy, DataConnections, Lost
from monarch_async._runtime.direct import Leases, Unusable, check_leases
from monarch_async._runtime.runtime import Runtime
from monarch_async._runtime.ucx import Ucx
from monarch_async.errors import ActorDied, ActorError, BufferGone, RDMAError
from monarch_async.ids import ProcAddress

__all__ = ["Job", "Ref", "Transfers"]

FEW = 64
"""So many jobs are looked at at once."""
PIECE = {"segment": 1 << 20, "tcp": 1 << 19}
"""Bytes in one message."""
DATA_FROM = 1 << 20
"""From so many bytes on they go over a connection of their own."""
WINDOW = {"segment": 8 << 20, "tcp": 2 << 20}
"""Bytes of one batch that are under way to or from one process: what a call that is made meanwhile may have to wait for."""


class Ref(NamedTuple):
    """A buffer as others know it: whose it is, which one, and what its owner said of it when it was made."""

    owner: ProcAddress
    key: int
    size: int
    readonly: bool
    dtype: str
    shape: tuple[int, ...]
    backend: str
    shared: bool  # others of its host can see it as it lies

    def __str__(self) -> str:
        return f"buffer {self.key:016x} of {self.owner} ({self.size} bytes)"


class Job(NamedTuple):
    """Copy `size` bytes between `offset` in a buffer and the beginning of memory here."""

    ref: Ref
    write: bool
    memory: Memory
    offset: int
    size: int

    def __str__(self) -> str:
        name = "write_from" if self.write else "read_into"
        return f"{name} of {self.size} bytes at {self.offset} of {self.ref}"


Run = Callable[[], Coroutine[Any, Any, None]]
"""Does what has been opened."""


class Backend(Protocol):
    """One way to copy."""

    async def open(self, owner: ProcAddress, jobs: Sequence[Job], alone: bool) -> Run:
        """Make sure that the jobs can be done; what is returned does them. `alone` if there are no others.

        Raises `Unusable` where another backend has to, and `BufferGone` and `BufferMismatch`.
        """


class Transfers:
    """The copies that this process makes. Used on its loop only; `table` is what owners ask of it."""

    def __init__(self, runtime: Runtime, buffers: Buffers, copier: Copier) -> None:
        self._runtime = runtime
        self._leases = Leases(runtime, copier)
        self._ucx = Ucx(runtime, buffers)
        self._data = DataConnections(runtime, buffers)
        self._backends: dict[str, Backend] = {
            "local": _Local(buffers, copier),
            "cma": self._leases,
            "segment": _Shared(runtime, copier, self._leases),
            "ucx": self._ucx,
            "tcp": _Far(runtime, self._data),
        }
        self._copier = copier
        runtime.tasks.start(self._close_at_end(), name="copying")

    @property
    def table(self) -> Mapping[str, Callable[..., Any]]:
        return {"buffer_revoke": self._leases.revoke, **self._ucx.table, **self._data.table}

    def backend_of(self, ref: Ref) -> str:
        """What all of it would be read by, as far as is known."""
        return next(self._candidates(ref, looks=ref.size > INLINE_COPY))

    def _candidates(self, ref: Ref, *, looks: bool) -> Iterator[str]:
        """In the order in which they are to be tried. It `looks` if so much is read that to see the memory itself is best."""
        me = self._runtime.me
        wanted = ref.backend if ref.backend != "auto" else self._runtime.options.rdma_backend
        if wanted != "auto":
            yield wanted
        elif ref.owner.uid == me.uid:
            yield "local"
        elif ref.owner.host == me.host:
            if looks and ref.shared:
                yield "segment"
            if ref.owner.uid not in self._leases.refused:
                yield "cma"
            yield "segment"
        else:
            yield "tcp"

    def run_now(self, jobs: Sequence[Job]) -> bool:
        """Copy a little at once, if nobody has to be asked; False if nothing was copied."""
        if not 0 < len(jobs) <= FEW or sum(job.size for job in jobs) > INLINE_COPY:
            return False
        owner = jobs[0].ref.owner
        if any(job.ref.owner.uid != owner.uid or next(self._candidates(job.ref, looks=False)) != "cma" for job in jobs):
            return False
        return self._leases.copy_now(owner, jobs)

    async def run(self, jobs: Sequence[Job]) -> None:
        """Do all of them, or raise what went wrong with the first that failed."""
        groups: dict[tuple[str, str], list[Job]] = {}
        for job in jobs:
            name = next(self._candidates(job.ref, looks=_looks(job)))
            groups.setdefault((job.ref.owner.uid, name), []).append(job)
        opened = [await self._open(group, len(groups) == 1) for group in groups.values()]
        if len(opened) == 1:
            await opened[0]()
        elif opened:
            await run_all([run() for run in opened])

    async def _open(self, jobs: Sequence[Job], alone: bool) -> Run:
        ref = jobs[0].ref
        named = any(name != "auto" for name in (ref.backend, self._runtime.options.rdma_backend))
        for name in self._candidates(ref, looks=_looks(jobs[0])):
            try:
                check_reach(name, ref.owner, self._runtime.me)
                run = await _explained(name, jobs, self._backends[name].open(ref.owner, jobs, alone))
            except Unusable as error:
                if named:
                    raise RDMAError(f"{jobs[0]} by {name} failed: {error}", backend=name) from error
                continue
            return partial(_run, name, jobs, run)
        raise AssertionError("the last backend can be used always")

    async def _close_at_end(self) -> None:
        try:
            await self._runtime.loop.create_future()
        finally:
            self._copier.close()
            self._ucx.close()
            self._data.close()


def _looks(job: Job) -> bool:
    return not job.write and job.size > INLINE_COPY


def check_reach(name: str, owner: ProcAddress, me: ProcAddress) -> None:
    """Raise `Unusable` if a backend can't reach the owner."""
    if name == "local" and owner.uid != me.uid:
        raise Unusable(f"{owner} is another process")
    if name in ("cma", "segment") and owner.host != me.host:
        raise Unusable(f"{owner} is on another host")


async def _explained(name: str, jobs: Sequence[Job], doing: Coroutine[Any, Any, Any]) -> Any:
    """What went wrong, with what was to be done, and by what."""
    what = f"{jobs[0]}{f' and {len(jobs) - 1} more' if len(jobs) > 1 else ''} by {name} failed"
    try:
        return await doing
    except Unusable:
        raise
    except RDMAError as error:
        raise type(error)(f"{what}: {error}", backend=name) from error
    except ActorDied as error:
        raise BufferGone(f"{what}: its process is gone: {error.reason or error}", backend=name) from error
    except ActorError as error:
        if "AttributeError" in error.type_name:  # no such service: no buffer was ever made in that process
            raise BufferGone(f"{what}: its process has been started again since", backend=name) from error
        raise RDMAError(f"{what}: {error}", backend=name) from error
    except OSError as error:
        raise RDMAError(f"{what}: {error}", backend=name) from error


async def _run(name: str, jobs: Sequence[Job], run: Run) -> None:
    await _explained(name, jobs, run())


class _Local:
    """Both memories are this process's."""

    def __init__(self, buffers: Buffers, copier: Copier) -> None:
        self._buffers = buffers
        self._copier = copier

    async def open(self, owner: ProcAddress, jobs: Sequence[Job], alone: bool) -> Run:
        found = [(job, self._buffers.find(job.ref.key, write=job.write, end=job.offset + job.size)) for job in jobs]

        async def run() -> None:
            users = {registration for _, registration in found}
            for user in users:
                user.enter()
            try:
                pieces: list[Piece] = []
                for job, registration in found:
                    there = registration.memory.address + job.offset
                    pieces.append((there, job.memory.address, job.size) if job.write else (job.memory.address, there, job.size))
                overlap = any(here < there + size and there < here + size for here, there, size in pieces)
                # What overlaps itself has to be moved as a whole.
                parts = [pieces] if overlap else list(slices(pieces, SLICE, MAX_PIECES))

                def copy(part: list[Piece]) -> None:
                    if any(user.revoked for user in users):
                        raise BufferGone("it was dropped meanwhile")
                    move(part)

                await self._copier.run(copy, parts, 2)
            finally:
                for user in users:
                    user.leave()

        return run


class _Messages:
    """The owner reads and writes, as it is told piece by piece."""

    def __init__(self, runtime: Runtime, name: str) -> None:
        self._runtime = runtime
        self._piece, self._window = PIECE[name], WINDOW[name]

    async def open(self, owner: ProcAddress, jobs: Sequence[Job], alone: bool) -> Run:
        if not alone or len(jobs) > 1 or not jobs[0].size:  # else its first piece finds out
            await ask(self._runtime, owner, "buffer_open", [job.ref.key for job in jobs], False)
        return lambda: self._run(owner, jobs)

    async def _run(self, owner: ProcAddress, jobs: Sequence[Job]) -> None:
        under_way: deque[tuple[asyncio.Future[Any], list[memoryview]]] = deque()
        try:
            for write in (False, True):
                for pieces in _messages([job for job in jobs if job.write == write], self._piece):
                    if len(under_way) * self._piece >= self._window:
                        await _arrive(*under_way.popleft())
                    under_way.append(self._ask(owner, write, pieces))
            while under_way:
                await _arrive(*under_way.popleft())
        finally:
            for future, _ in under_way:
                future.cancel()

    def _ask(self, owner: ProcAddress, write: bool, pieces: Sequence[_Piece]) -> tuple[asyncio.Future[Any], list[memoryview]]:
        parts = [(job.ref.key, job.offset + start, size) for job, start, size in pieces]
        views = [view_of(job.memory, start, size) for job, start, size in pieces]
        if write:
            return ask(self._runtime, owner, "buffer_write", parts, [pickle.PickleBuffer(view) for view in views]), []
        return ask(self._runtime, owner, "buffer_read", parts), views


class _Far(_Messages):
    """Over a connection that is only for data, if there is much to copy and one can be had."""

    def __init__(self, runtime: Runtime, data: DataConnections) -> None:
        super().__init__(runtime, "tcp")
        self._data = data

    async def _run(self, owner: ProcAddress, jobs: Sequence[Job]) -> None:
        if sum(job.size for job in jobs) < DATA_FROM or not self._data.reaches(owner):
            await super()._run(owner, jobs)
            return
        try:
            for write in (False, True):
                copies = [Copy(job.ref.key, job.offset, job.size, job.memory) for job in jobs if job.write == write]
                await self._data.copy(owner, write, copies)
        except Lost:
            await super()._run(owner, jobs)


class _Shared(_Messages):
    """The same through shared memory. What lies there already is not copied by the owner: it is seen, and copied, here.

    To see it is to have a lease of the buffer, too, so that dropping it ends the copy and waits for that.
    """

    def __init__(self, runtime: Runtime, copier: Copier, leases: Leases) -> None:
        super().__init__(runtime, "segment")
        self._copier = copier
        self._leases = leases

    async def open(self, owner: ProcAddress, jobs: Sequence[Job], alone: bool) -> Run:
        if owner.uid == self._runtime.me.uid or not all(job.ref.shared and _looks(job) for job in jobs):
            return await super().open(owner, jobs, alone)
        # In this order: what is dropped before it is looked at can't be, and what is dropped later revokes the lease.
        leases = await self._leases.have(owner, [job.ref.key for job in jobs])
        parts = [(job.ref.key, job.offset, job.size) for job in jobs]
        asked = list(dict.fromkeys(parts))
        views = await ask(self._runtime, owner, "buffer_read", asked)
        # What could not be lent has come by the socket, as bytes of its own.
        found = dict(zip(asked, map(memory_of, views), strict=True))

        async def run() -> None:
            try:
                async with self._leases.using(owner, jobs, leases) as users:

                    def copy(part: list[Piece]) -> None:
                        check_leases(users)
                        move(part)

                    pieces = [(job.memory.address, found[part].address, job.size) for job, part in zip(jobs, parts, strict=True)]
                    await self._copier.run(copy, list(slices(pieces, SLICE, MAX_PIECES)), 2)
                    check_leases(users)
            finally:
                found.clear()

        return run


_Piece = tuple[Job, int, int]
"""Of a job: from which of its bytes on, and how many."""


def _messages(jobs: Sequence[Job], limit: int) -> Iterator[list[_Piece]]:
    """What goes into one message: a piece of a large copy, or several small ones."""
    pieces: list[_Piece] = []
    room = limit
    for job in jobs:
        start = 0
        while start < job.size:
            size = min(room, job.size - start)
            pieces.append((job, start, size))
            start, room = start + size, room - size
            if not room or len(pieces) == MAX_PIECES:
                yield pieces
                pieces, room = [], limit
    if pieces:
        yield pieces


async def _arrive(future: asyncio.Future[Any], targets: Sequence[memoryview]) -> None:
    """Pieces have been written there, or have come, and are put where they belong."""
    answer = await future
    for target, data in zip(targets, answer or (), strict=True):
        target[:] = data
