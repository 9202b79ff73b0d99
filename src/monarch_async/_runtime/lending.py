"""Large messages between processes of one host: their bytes are lent in shared memory, and only a small message travels.

The sender copies body and buffers into a block (`blocks`), whatever the number of receivers on this host, and tells each of them where it
is: LENT, with the message that the bytes belong to. A receiver sees the block through a mapping of its own; its arrays and tensors are
views of that, and the *lease* they all hold goes back to the sender, as RETURNED, when the last of them is collected. What lies in a
block already (`shared_empty`) is not copied at all.

Rules:

* A block is not used again while a process that it is lent to may look at it: until it is returned, or that process is gone. That its
  link has ended, or its actors have, does not matter.
* A segment is introduced to a process, by its inbox (`descriptors`), before the first message that names it, and told to be RETIRED when
  it is gone.
* What arrives may be written to; nobody else sees that. Two views in one process never are of the same pages: if a block comes once more
  while the last lease of it is not over, what its owner wrote is copied.
* Where no shared memory can be had, or a segment not be introduced, a message takes the socket, and the first time this is logged.
  Whatever goes wrong at the receiver fails that one message, with a `DecodeError`.
* A link that was never connected lends nothing: what is sent over it may yet be for another process (`Peer.hand_on`).
* While this process is forked, a child may go on looking at what is on lease here, so that is never returned.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import logging
import os
import pickle
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from monarch_async._channel.blocks import Block, SegmentPool, forks, physical_memory
from monarch_async._channel.descriptors import Inbox, inbox_path
from monarch_async._channel.gifts import Gifts
from monarch_async._channel.pool import allocate
from monarch_async._channel.segment import SUPPORTED, Mapping, address_of
from monarch_async._core.codec import Buffers
from monarch_async._core.framing import BODY_FIELD, LENT, MAX_ITEMS, RETIRED, RETURNED, bulk_layout, pack_message
from monarch_async._runtime.link import INLINE, Link
from monarch_async._runtime.outgoing import MAX_SMALL
from monarch_async._runtime.peer import Peer
from monarch_async._runtime.tree import Handle
from monarch_async.errors import ChannelError
from monarch_async.ids import ProcAddress
from monarch_async.options import Options

__all__ = ["THRESHOLD", "Lending"]

THRESHOLD = 1 << 16
"""Messages with fewer bytes of body and buffers take the socket."""
AGE = 5.0
"""Every so many seconds it is looked which unused blocks have not been used for as long."""


class Borrower(Protocol):
    """What this needs of its runtime."""

    loop: asyncio.AbstractEventLoop
    me: ProcAddress
    key: bytes
    options: Options
    log: logging.Logger
    peers: dict[str, Peer]
    kinds: dict[int, Handle]
    closing: bool
    on_peer_gone: list[Callable[[Peer], None]]

    def peer_of(self, link: Link) -> Peer: ...

    def deliver(self, link: Link, messages: list[list[Any]], buffers: list[memoryview] | None) -> None:
        """Messages that have come over a link."""


class _Tenant:
    """Another process, as one that is lent to."""

    __slots__ = ("introduced", "loans")

    def __init__(self) -> None:
        self.introduced: set[int] = set()  # numbers of segments
        self.loans: dict[int, Block] = {}  # by the number of the loan


class _Lease:
    """A block of another process, for as long as something here is a view of it."""

    __slots__ = ("born", "mapping", "number", "offset", "over", "owner", "segment", "size")

    def __init__(
        self, over: Callable[[_Lease], None], owner: str, number: int, segment: int, offset: int, size: int, mapping: Mapping
    ) -> None:
        self.over = over
        self.owner = owner
        self.number = number  # of the loan
        self.segment = segment
        self.offset = offset
        self.size = size
        self.mapping = mapping
        self.born = forks()

    def view(self) -> memoryview:
        memory = (ctypes.c_ubyte * self.size).from_address(self.mapping.address + self.offset)
        memory.lease = self  # type: ignore[attr-defined]
        return memoryview(memory).cast("B")

    def __del__(self) -> None:
        if self.born == forks():
            self.over(self)


class Lending:
    """Lends and borrows for one runtime. Used from its loop, but for `place`."""

    def __init__(self, runtime: Borrower) -> None:
        self._runtime = runtime
        self.pool = SegmentPool(min(runtime.options.segment_bytes, physical_memory() // 2))
        self._tenants: dict[str, _Tenant] = {}  # by uid
        self._numbers = itertools.count(1)
        self._mappings: dict[tuple[str, int], Mapping] = {}  # by owner and number of the segment
        self._leased: set[tuple[str, int, int]] = set()  # owner, segment and offset of the blocks with a lease
        self._over: deque[_Lease] = deque()  # leases that have ended and are not returned yet
        self._giving_back = False  # it is scheduled
        self._aging: asyncio.TimerHandle | None = None
        self._warned = False
        self.inbox: Inbox | None = None
        self.gifts = Gifts()
        runtime.kinds.update({LENT: self._lent, RETURNED: self._returned, RETIRED: self._retired})
        runtime.on_peer_gone.append(self._peer_gone)
        if SUPPORTED and runtime.me.unix:
            self._open_inbox()

    def _open_inbox(self) -> None:
        runtime = self._runtime
        try:
            self.inbox = Inbox(inbox_path(runtime.me, runtime.me.uid), runtime.key, self._introduced, self.gifts.add)
        except OSError as error:
            runtime.log.warning("this process shares no memory with others, all it gets comes by sockets: %s", error)
            return
        runtime.loop.add_reader(self.inbox.fileno(), self._receive)

    def close(self) -> None:
        """Lend and borrow nothing more. What is on lease here stays readable."""
        if self.inbox is not None:
            self._runtime.loop.remove_reader(self.inbox.fileno())
            self.inbox.close()
            self.inbox = None
        if self._aging is not None:
            self._aging.cancel()
        self._tenants.clear()
        self._mappings.clear()
        self.gifts.close()
        self.pool.close()

    # Lending.

    def offer(self, peer: Peer, link: Link) -> None:
        """From now on what is sent over `link` to a process of this host may be lent."""
        if self.inbox is not None and peer.address.host == self._runtime.me.host:
            link.lend = lambda message, body, buffers: self._lend(link, message, body, buffers)

    def place(self, body: bytes, buffers: Buffers) -> bool:
        """Put body and buffers where they can be lent from; `buffers` then are views of that, and of nothing of the caller's.

        In any thread.
        """
        if self.inbox is None or not _rides(body, buffers):
            return False
        placed = self._placed(body, buffers)
        if isinstance(placed, str):
            return False
        for index, (block, offset, size) in enumerate(placed[1:] if _whole(body) else placed):
            buffers[index] = block.view()[offset : offset + size]
        return True

    def _lend(self, link: Link, message: list[Any], body: bytes, buffers: Sequence[memoryview]) -> bytes | None:
        inbox = self.inbox
        if inbox is None or not link.connections or not _rides(body, buffers):
            return None
        placed = self._placed(body, buffers)
        if isinstance(placed, str):
            self._warn(placed)
            return None
        peer = self._runtime.peer_of(link)
        tenant = self._tenants.setdefault(peer.address.uid, _Tenant())
        loans: dict[Block, int] = {}
        places = [(loans.setdefault(block, len(loans)), offset, size) for block, offset, size in placed]
        try:
            for block in loans:
                self._introduce(inbox, peer, tenant, block)
        except OSError as error:
            self._warn(f"{peer.address} can't be given a descriptor now: {error.strerror or error}")
            return None
        numbered = {next(self._numbers): block for block in loans}
        whole = _whole(body)
        if not whole:
            message[BODY_FIELD[message[0]]] = body
        told = [(number, block.segment.number, block.offset, block.size) for number, block in numbered.items()]
        packed: bytes = pack_message((LENT, message, told, places, whole))
        if len(packed) > MAX_SMALL:
            message[BODY_FIELD[message[0]]] = b""
            return None
        tenant.loans.update(numbered)
        if self._aging is None:
            self._aging = self._runtime.loop.call_later(AGE, self._age)
        return packed

    def _placed(self, body: bytes, buffers: Sequence[memoryview]) -> list[tuple[Block, int, int]] | str:
        """Where the parts are, first the body if it is large: block, offset in it, size. Or why they can't be put anywhere."""
        if isinstance(buffers, Buffers) and buffers.placed is not None:
            placed: list[tuple[Block, int, int]] = buffers.placed
            return placed
        pool = self.pool
        parts: list[bytes | memoryview] = [body, *buffers] if _whole(body) else [*buffers]
        found: list[tuple[Block, int, int] | None] = [None] * len(parts)
        if pool.shares:
            for index, part in enumerate(parts):
                address = address_of(part) if isinstance(part, memoryview) else 0
                block = pool.find(address, len(part)) if address else None
                if block is not None:
                    found[index] = (block, address - block.address, len(part))
        missing = [index for index, place in enumerate(found) if place is None]
        if missing:
            offsets, total = bulk_layout(0, [len(parts[index]) for index in missing])
            taken = pool.take(total)
            if isinstance(taken, str):
                return taken
            try:
                taken.fill((offset, parts[index]) for index, offset in zip(missing, offsets, strict=True))
            except OSError as error:
                return f"the system gives no memory for {total} bytes: {error.strerror}"
            for index, offset in zip(missing, offsets, strict=True):
                found[index] = (taken, offset, len(parts[index]))
        placed = [place for place in found if place is not None]
        if isinstance(buffers, Buffers):
            buffers.placed = placed
        return placed

    def _introduce(self, inbox: Inbox, peer: Peer, tenant: _Tenant, block: Block) -> None:
        segment = block.segment
        if segment.number in tenant.introduced:
            return
        fd = segment.open_reader()
        try:
            me = self._runtime.me
            inbox.send(inbox_path(me, peer.address.uid), me.uid, segment.number, segment.size, fd)
        finally:
            os.close(fd)
        tenant.introduced.add(segment.number)

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            self._runtime.log.warning("a large message takes the socket, which is slower, and so may others after it: %s", why)

    def _returned(self, link: Link, fields: list[Any], buffers: list[memoryview] | None) -> None:
        tenant = self._tenants.get(self._runtime.peer_of(link).address.uid)
        if tenant is not None:
            for number in fields[1]:
                tenant.loans.pop(number, None)

    def _age(self) -> None:
        self._aging = None
        pool = self.pool
        pool.age()
        retired, pool.retired = pool.retired, []
        if retired:
            for uid, tenant in self._tenants.items():
                known = tenant.introduced.intersection(retired)
                tenant.introduced -= known
                peer = self._runtime.peers.get(uid)
                if known and peer is not None and peer.link is not None:
                    peer.link.send_control(pack_message((RETIRED, sorted(known))))
        if pool.allocated and not self._runtime.closing:
            self._aging = self._runtime.loop.call_later(AGE, self._age)

    # Borrowing.

    def _receive(self) -> None:
        assert self.inbox is not None
        try:
            self.inbox.receive()
        except OSError as error:
            self._runtime.log.warning("shared memory of another process can't be used: %s", error)

    def _introduced(self, owner: str, number: int, mapping: Mapping) -> None:
        self._mappings[owner, number] = mapping

    def _lent(self, link: Link, fields: list[Any], buffers: list[memoryview] | None) -> None:
        """A message has come whose bytes are in shared memory."""
        _, message, loans, places, whole = fields
        owner = self._runtime.peer_of(link).address.uid
        try:
            blocks = [self._borrow(owner, *loan) for loan in loans]
        except (OSError, MemoryError, ChannelError) as error:
            self._return(link, [loan[0] for loan in loans])
            message[BODY_FIELD[message[0]]] = _undecodable(f"its bytes are in shared memory that this process could not get at: {error}")
            self._runtime.deliver(link, [message], None)
            return
        views = [blocks[index][start : start + size] for index, start, size in places]
        if whole:
            message[BODY_FIELD[message[0]]] = views.pop(0)
        self._runtime.deliver(link, [message], Buffers(views))

    def _borrow(self, owner: str, number: int, segment: int, offset: int, size: int) -> memoryview:
        """A view of a block that is lent to this process."""
        mapping = self._mappings.get((owner, segment))
        if mapping is None:
            why = "it was never introduced"
            try:
                if self.inbox is not None:
                    self.inbox.receive()
            except OSError as error:
                why = str(error)
            mapping = self._mappings.get((owner, segment))
            if mapping is None:
                raise ChannelError(f"segment {segment} of {owner} is not known: {why}")
        if offset + size > mapping.size:
            raise ChannelError(f"segment {segment} of {owner} has {mapping.size} bytes, {size} from {offset} on are not among them")
        if (owner, segment, offset) in self._leased:
            copy = allocate(size)
            mapping.copy_original(offset, copy)
            self._give_back(owner, [number])
            return copy
        self._leased.add((owner, segment, offset))
        return _Lease(self._lease_over, owner, number, segment, offset, size, mapping).view()

    def _lease_over(self, lease: _Lease) -> None:
        """In any thread, and in the middle of anything."""
        self._over.append(lease)
        if not self._giving_back:
            self._giving_back = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                self._runtime.loop.call_soon_threadsafe(self._give_back_all)

    def _give_back_all(self) -> None:
        self._giving_back = False
        ended: dict[str, list[int]] = {}
        while self._over:
            lease = self._over.popleft()
            self._leased.discard((lease.owner, lease.segment, lease.offset))
            lease.mapping.renew(lease.offset, lease.size)
            ended.setdefault(lease.owner, []).append(lease.number)
        for owner, numbers in ended.items():
            self._give_back(owner, numbers)

    def _give_back(self, owner: str, numbers: list[int]) -> None:
        peer = self._runtime.peers.get(owner)
        link = peer.connect() if peer is not None else None
        if link is not None:
            self._return(link, numbers)

    def _return(self, link: Link, numbers: list[int]) -> None:
        for start in range(0, len(numbers), MAX_ITEMS):
            link.send_control(pack_message((RETURNED, numbers[start : start + MAX_ITEMS])))

    def _retired(self, link: Link, fields: list[Any], buffers: list[memoryview] | None) -> None:
        owner = self._runtime.peer_of(link).address.uid
        for number in fields[1]:
            self._mappings.pop((owner, number), None)

    def _peer_gone(self, peer: Peer) -> None:
        uid = peer.address.uid
        self._tenants.pop(uid, None)
        for key in [key for key in self._mappings if key[0] == uid]:
            del self._mappings[key]
        self.gifts.forget(uid)


def _whole(body: bytes) -> bool:
    """Whether a body is large enough to be lent too, and not to stand in the message."""
    return len(body) > INLINE


def _rides(body: bytes, buffers: Sequence[memoryview]) -> bool:
    size = sum(view.nbytes for view in buffers)
    return (size + len(body) if _whole(body) else size) >= THRESHOLD


class _Missing:
    """Takes the place of a body that could not be had."""

    def __init__(self, why: str) -> None:
        self.why = why

    def __reduce__(self) -> tuple[Any, ...]:
        return _raise_missing, (self.why,)


def _raise_missing(why: str) -> None:
    raise ChannelError(why)


def _undecodable(why: str) -> bytes:
    """A body that whoever reads it gets a `DecodeError` from."""
    return pickle.dumps(_Missing(why), 5)
