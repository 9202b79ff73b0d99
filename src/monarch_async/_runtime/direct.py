"""Buffers of other processes of this host that this one may access by itself: the backend ``cma``.

The owner is asked once where the memory lies (`buffers`); from then on every copy is one system call, and it hears of none. A lease
ends when the owner revokes it, which waits for the copies under way here, or ends.

Rules:

* The cookie beside the memory is read before anything is written, and again behind what was read: a process that has come to the pid of
  another, or memory that is another's by now, is no source and no target.
* Before large copies the owner is asked again, which costs nothing then: it may know that its memory has been freed under it.
* Where the system does not let one process access the other it is warned of once, and another backend has to do.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from functools import cache
from typing import Any

from monarch_async._channel.cma import MAX_PIECES, Piece, read, write
from monarch_async._runtime.asking import ask
from monarch_async._runtime.buffers import COOKIE_SIZE, Grant, Users
from monarch_async._runtime.context import Message
from monarch_async._runtime.copying import SLICE, Copier, slices
from monarch_async._runtime.peer import Peer
from monarch_async._runtime.runtime import Runtime
from monarch_async.errors import BufferGone
from monarch_async.ids import ProcAddress

__all__ = ["Lease", "Leases", "Stale", "Unusable", "check_leases"]

LARGE = 4 << 20
_FORBIDDEN = (errno.EPERM, errno.EACCES, errno.ENOSYS)
_ABSENT = (errno.ESRCH, errno.EFAULT)


class Unusable(Exception):
    """A backend can't be used between these processes; the text says why."""


class Lease(Users):
    """What is known of one buffer."""

    __slots__ = ("grant",)

    def __init__(self, grant: Grant) -> None:
        super().__init__()
        self.grant = grant


class Leases:
    """Those that this process has. `refused` says for which processes, by uid, the system does not allow any."""

    def __init__(self, runtime: Runtime, copier: Copier) -> None:
        self.refused: dict[str, str] = {}
        self._runtime = runtime
        self._copier = copier
        self._leases: dict[tuple[str, int], Lease] = {}
        self._warned = False
        runtime.on_peer_gone.append(self._peer_gone)

    async def open(self, owner: ProcAddress, jobs: Sequence[Any], alone: bool) -> Callable[[], Coroutine[Any, Any, None]]:
        """See `transfers.Backend`."""
        keys = [job.ref.key for job in jobs]
        leases = [self._leases.get((owner.uid, key)) for key in keys]
        usable = all(lease is not None and not lease.revoked for lease in leases) and sum(job.size for job in jobs) < LARGE
        if not usable or not self._verify(owner, [lease for lease in leases if lease is not None]):
            leases = [*await self._borrow(owner, keys)]
        found = [lease for lease in leases if lease is not None]
        return lambda: self._run(owner, jobs, found)

    async def have(self, owner: ProcAddress, keys: Sequence[int]) -> list[Lease]:
        """Leases of buffers whose memory is got at in another way, so that dropping one waits for that as well."""
        leases = [self._leases.get((owner.uid, key)) for key in keys]
        found = [lease for lease in leases if lease is not None and not lease.revoked]
        return found if len(found) == len(keys) else await self._ask_for(owner, keys)

    @contextlib.asynccontextmanager
    async def using(self, owner: ProcAddress, jobs: Sequence[Any], leases: Sequence[Lease]) -> AsyncIterator[list[Lease]]:
        """While memory is accessed. Who finds there that a lease is over raises `Stale`, and the reason is raised in its place."""
        users = list(dict.fromkeys(leases))
        for lease in users:
            lease.enter()
        try:
            yield users
        except Stale:
            # The owner knows why; or the system, if it has ended.
            await ask(self._runtime, owner, "buffer_open", [job.ref.key for job in jobs], False)
            raise BufferGone("its memory was freed meanwhile") from None
        finally:
            for lease in users:
                lease.leave()

    def copy_now(self, owner: ProcAddress, jobs: Sequence[Any]) -> bool:
        """Copy a little here and now; False if there is more to it, and then nothing has been written."""
        leases = [self._leases.get((owner.uid, job.ref.key)) for job in jobs]
        found = [lease for lease in leases if lease is not None and not lease.revoked]
        if len(found) < len(jobs):
            return False
        try:
            if not cookies_match(found):
                return False
            for writes, pieces in _pieces(jobs, found):
                for part in slices(pieces, SLICE, MAX_PIECES - len(found)):
                    _copy(found, writes)(part)
        except (OSError, Stale):
            return False
        return True

    async def _ask_for(self, owner: ProcAddress, keys: Sequence[int]) -> list[Lease]:
        grants: list[Grant] = await ask(self._runtime, owner, "buffer_open", keys, True)
        leases = []
        for key, grant in zip(keys, grants, strict=True):
            lease = self._leases.get((owner.uid, key))
            if lease is None or lease.revoked or lease.grant != grant:
                lease = self._leases[owner.uid, key] = Lease(grant)
            leases.append(lease)
        return leases

    async def _borrow(self, owner: ProcAddress, keys: Sequence[int]) -> list[Lease]:
        """Ask the owner. It is there, so what fails now is what the system does not allow."""
        leases = await self._ask_for(owner, keys)
        if not self._verify(owner, leases):
            # It may have been dropped since it answered; if it has not, its pid means another process here.
            await ask(self._runtime, owner, "buffer_open", keys, True)
            self._refuse(owner, "its process can't be found by its number here: is it in another container?")
        return leases

    def _verify(self, owner: ProcAddress, leases: Sequence[Lease]) -> bool:
        """Whether the memory is there still. Raises `Unusable`."""
        try:
            return cookies_match(leases)
        except OSError as error:
            if error.errno in _FORBIDDEN:
                self._refuse(owner, f"{error.strerror}: the system lets no process access another's memory here (ptrace_scope, container)")
            return False

    def _refuse(self, owner: ProcAddress, why: str) -> None:
        self.refused[owner.uid] = why
        if not self._warned:
            self._warned = True
            self._runtime.log.warning("buffers of %s are copied by messages, which is slower: process_vm_readv: %s", owner, why)
        raise Unusable(why)

    async def _run(self, owner: ProcAddress, jobs: Sequence[Any], leases: Sequence[Lease]) -> None:
        async with self.using(owner, jobs, leases) as users:
            for writes, pieces in _pieces(jobs, leases):
                await self._copier.run(_copy(users, writes), list(slices(pieces, SLICE, MAX_PIECES - len(users))), 2)

    async def revoke(self, message: Message, owner: str, key: int) -> None:
        """A buffer is dropped: the answer comes when nothing here accesses it any more."""
        lease = self._leases.pop((owner, key), None)
        if lease is not None:
            await lease.revoke()

    def _peer_gone(self, peer: Peer) -> None:
        uid = peer.address.uid
        self.refused.pop(uid, None)
        for key in [key for key in self._leases if key[0] == uid]:
            self._leases.pop(key).revoked = True


def _pieces(jobs: Sequence[Any], leases: Sequence[Lease]) -> Iterator[tuple[bool, list[Piece]]]:
    """What is to be read, and what to be written."""
    for writes in (False, True):
        pairs = [(job, lease) for job, lease in zip(jobs, leases, strict=True) if job.write == writes]
        if pairs:
            yield writes, [(job.memory.address, lease.grant.address + job.offset, job.size) for job, lease in pairs]


class Stale(Exception):
    """What was copied from, or should be copied to, is not there any more."""


def cookies_match(leases: Sequence[Lease]) -> bool:
    """Whether the processes and the memories are those that were lent. Raises `OSError` where one may not look."""
    found, pieces = _cookie_pieces(leases)
    try:
        read(leases[0].grant.pid, pieces)
    except OSError as error:
        if error.errno in _ABSENT:
            return False
        raise
    return bytes(found) == b"".join(lease.grant.cookie for lease in leases)


def _cookie_pieces(leases: Sequence[Lease]) -> tuple[Any, list[Piece]]:
    found = _cookies(len(leases))()
    base = ctypes.addressof(found)
    return found, [(base + COOKIE_SIZE * index, lease.grant.cookie_address, COOKIE_SIZE) for index, lease in enumerate(leases)]


@cache
def _cookies(count: int) -> type[ctypes.Array[ctypes.c_ubyte]]:
    return ctypes.c_ubyte * (COOKIE_SIZE * count)


def check_leases(leases: Sequence[Lease]) -> None:
    """Raise `Stale` if one of them is over."""
    for lease in leases:
        if lease.revoked:
            raise Stale


def _copy(leases: Sequence[Lease], writes: bool) -> Callable[[list[Piece]], None]:
    """What copies one part, in a thread. Raises `Stale`, and `OSError`."""
    pid = leases[0].grant.pid
    expected = b"".join(lease.grant.cookie for lease in leases)

    def copy(part: list[Piece]) -> None:
        check_leases(leases)
        try:
            if writes:
                if not cookies_match(leases):
                    raise Stale
                write(pid, part)
            else:
                found, cookies = _cookie_pieces(leases)
                read(pid, [*part, *cookies])
                if bytes(found) != expected:
                    raise Stale
        except OSError as error:
            if error.errno in _ABSENT:
                raise Stale from error
            raise OSError(error.errno, os.strerror(error.errno or 0)) from error

    return copy
