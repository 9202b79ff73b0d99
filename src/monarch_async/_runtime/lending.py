"""Large messages between processes of one host: their bytes are lent in shared memory, and only a small message travels.

The sender copies body and buffers into a block (`blocks`), whatever the number of receivers on this host, and tells each of them where it
is: LENT, with the message that the bytes belong to. A receiver sees the block through a mapping of its own; its arrays and tensors are
views of that, and the *lease* they all hold goes back to the sender, as RETURNED, when the last of them is collected. What lies in a
block already (`shared_empty`) is not copied at all.

Rules:

* A block is not used again while a process that it is lent to may look at it: until it is returned, or that process is gone. That its
  link has ended, or its actors have, does not matter.
* A segment is introduced to a process, by its inbox (`descriptors`), before the first message that names it, and told to be RETIRED when
  it is gone. Where that went wrong the receiver says so when it misses the segment (UNSEEN), and it is introduced again.
* Where no shared memory can be had, or a segment not be introduced, a message takes the socket, and the first time this is logged.
* A link that was never connected lends nothing: what is sent over it may yet be for another process (`Peer.hand_on`).
* Bytes on devices go by loans of their own, beside those of host memory (`device_lending`).
* The receiver's half is `borrowing`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
from collections.abc import Sequence
from typing import Any

from monarch_async._channel.block import Block
from monarch_async._channel.blocks import SegmentPool
from monarch_async._channel.descriptors import Inbox, inbox_path
from monarch_async._channel.machine import memory_here
from monarch_async._channel.parcels import settled
from monarch_async._core.address import address_of
from monarch_async._core.codec import Buffers
from monarch_async._core.framing import BODY_FIELD, DEVICE_RETURNED, LENT, RETIRED, RETURNED, UNSEEN, bulk_layout, pack_message
from monarch_async._runtime.borrowing import Borrower, Borrowing
from monarch_async._runtime.device_lending import DeviceLending, keep_parcels
from monarch_async._runtime.leases import send_numbers
from monarch_async._runtime.link import INLINE, Link
from monarch_async._runtime.outgoing import MAX_SMALL, Held
from monarch_async._runtime.peer import Peer
from monarch_async._runtime.tenant import Tenant

__all__ = ["THRESHOLD", "Lending"]

THRESHOLD = 1 << 16
"""Messages with fewer bytes of body and buffers take the socket."""
AGE = 5.0
"""Every so many seconds it is looked which unused blocks have not been used for as long."""
PAUSE = 0.005
"""Seconds of the loop's between two slices of memory that are given back to the system."""


class Lending:
    """Lends and borrows for one runtime. Used from its loop, but for `place`."""

    def __init__(self, runtime: Borrower) -> None:
        self._runtime = runtime
        self.borrowing = Borrowing(runtime)
        self.pool = SegmentPool(min(runtime.options.segment_bytes, memory_here() // 2))
        self.on_devices = DeviceLending(runtime)
        self._tenants: dict[str, Tenant] = {}  # by uid
        self._numbers = itertools.count(1)
        self._aging: asyncio.TimerHandle | None = None  # set while the pool has memory
        self._releasing: asyncio.TimerHandle | None = None  # set while some of it is given back
        self._warned = False
        self._closed = False
        runtime.kinds.update({RETURNED: self._returned, UNSEEN: self._unseen, DEVICE_RETURNED: self._returned_on_devices})
        runtime.on_peer_gone.append(self._peer_gone)
        runtime.on_session_over.append(self._session_over)

    def close(self) -> None:
        """Lend and borrow nothing more. What is on lease here stays readable, and what is on lease elsewhere too."""
        self._closed = True
        self.borrowing.close()
        for timer in (self._aging, self._releasing):
            if timer is not None:
                timer.cancel()
        self.pool.close()  # first, so that it does not take what is lent for unused
        self._tenants.clear()
        self.on_devices.close()

    def abandon(self) -> None:
        """The loop is gone, or about to be."""
        self._closed = True
        self.borrowing.abandon()
        self.on_devices.abandon()

    def offer(self, peer: Peer, link: Link) -> None:
        """From now on what is sent over `link` to a process of this host may be lent."""
        if self.borrowing.inbox is not None and peer.address.host == self._runtime.me.host:
            link.lend = lambda message, body, buffers: self._lend(link, message, body, buffers)
        tenant = self._tenants.get(peer.address.uid)
        if tenant is not None and tenant.lost:
            tenant.recall([link])

    def place(self, body: bytes, buffers: Buffers) -> bool:
        """Put body and buffers where they can be lent from; `buffers` then are views of that, and of nothing of the caller's.

        In any thread.
        """
        if keep_parcels(buffers):
            return True
        if self.borrowing.inbox is None or not _rides(body, buffers):
            return False
        placed = self._placed(body, buffers)
        if isinstance(placed, str):
            return False
        for index, (block, offset, size) in enumerate(placed[1:] if len(body) > INLINE else placed):
            buffers[index] = block.view()[offset : offset + size]
        return True

    def _lend(self, link: Link, message: list[Any], body: bytes, buffers: Sequence[memoryview]) -> bytes | Held | None:
        inbox = self.borrowing.inbox
        if inbox is None or not link.connections or not _rides(body, buffers):
            return None
        peer = self._runtime.peer_of(link)
        split = self.on_devices.split(peer, link, message, buffers)
        placed = self._placed(body, settled(buffers) if split is None else split.rest)
        if isinstance(placed, str):
            self._warn(placed)
            return None
        tenant = self._tenants.get(peer.address.uid)
        if tenant is None:
            tenant = self._tenants[peer.address.uid] = Tenant()
        loans: dict[Block, int] = {}
        places = [(loans.setdefault(block, len(loans)), offset, size) for block, offset, size in placed]
        try:
            for block in loans:
                self._introduce(inbox, peer, tenant, block)
        except BlockingIOError:  # so many have been introduced that its inbox is full
            return None
        except OSError as error:
            if isinstance(error, FileNotFoundError | ConnectionRefusedError):  # it has no inbox, nor will it have one
                link.lend = None
            self._warn(f"{peer.address} can't be given a descriptor now: {error.strerror or error}")
            return None
        numbered = {next(self._numbers): block for block in loans}
        whole = len(body) > INLINE
        if not whole:
            message[BODY_FIELD[message[0]]] = body
        told = [(number, block.segment.number, block.offset, block.size) for number, block in numbered.items()]
        fields: tuple[Any, ...] = (LENT, message, told, places, whole)
        lent = None
        if split is not None:
            lent = self.on_devices.lend(peer, split)
            fields = (LENT, message, told, split.merge(places, whole, len(told)), whole, lent)
        packed: bytes = pack_message(fields)
        if len(packed) > MAX_SMALL:
            if lent is not None:
                self.on_devices.take_back(peer.address.uid, lent)
            message[BODY_FIELD[message[0]]] = b""
            return None
        tenant.loans.update({number: (block, link) for number, block in numbered.items()})
        tenant.loans.update({-loan[0]: (None, link) for loan in lent or ()})
        return packed if split is None or lent is None else self.on_devices.hold(link, message, packed, split, lent, told)

    def _placed(self, body: bytes, buffers: Sequence[memoryview]) -> list[tuple[Block, int, int]] | str:
        """Where the parts are, first the body if it is large: block, offset in it, size. Or why they can't be put anywhere."""
        if isinstance(buffers, Buffers) and buffers.placed is not None:
            placed: list[tuple[Block, int, int]] = buffers.placed
            return placed
        pool = self.pool
        parts: list[bytes | memoryview] = [body, *buffers] if len(body) > INLINE else [*buffers]
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
            taken = self._take(total)
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

    def _introduce(self, inbox: Inbox, peer: Peer, tenant: Tenant, block: Block) -> None:
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
        on_devices = [-number for number in fields[1] if number < 0]
        if on_devices:
            self.on_devices.returned(link, [DEVICE_RETURNED, on_devices], None)

    def _returned_on_devices(self, link: Link, fields: list[Any], buffers: list[memoryview] | None) -> None:
        tenant = self._tenants.get(self._runtime.peer_of(link).address.uid)
        if tenant is not None:
            for number in fields[1]:
                tenant.loans.pop(-number, None)
        self.on_devices.returned(link, fields, buffers)

    def share(self, size: int) -> Block | str:
        """Memory for `shared_empty`, or why there is none. In any thread."""
        return self._take(size, shared=True)

    def _take(self, size: int, *, shared: bool = False) -> Block | str:
        """Take from the pool, and see to it that what it has goes back to the system again. In any thread."""
        taken = self.pool.take(size, shared=shared)
        if self._aging is None or (self._releasing is None and self.pool.doomed):
            if threading.get_ident() == self._runtime.thread:
                self._tend()
            else:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self._runtime.loop.call_soon_threadsafe(self._tend)
        return taken

    def _tend(self) -> None:
        if self._closed:
            return
        if self._aging is None:
            self._aging = self._runtime.loop.call_later(AGE, self._age)
        if self._releasing is None and self.pool.doomed:
            self._releasing = self._runtime.loop.call_later(PAUSE, self._release)

    def _unseen(self, link: Link, fields: list[Any], buffers: list[memoryview] | None) -> None:
        tenant = self._tenants.get(self._runtime.peer_of(link).address.uid)
        if tenant is not None:
            tenant.introduced.difference_update(fields[1])

    def _age(self) -> None:
        self.pool.age()
        self._aging = None
        if self._releasing is None:
            self._release()
        if self.pool.allocated:
            self._tend()

    def _release(self) -> None:
        """Give back a slice of what is not used, and go on later: all at once would hold up the loop."""
        self._releasing = None
        if self.pool.release():
            self._tend()
        else:
            self._retire()

    def _retire(self) -> None:
        """Tell others which segments are gone."""
        retired = self.pool.take_retired()
        for uid, tenant in list(self._tenants.items()) if retired else ():
            known = tenant.introduced.intersection(retired)
            tenant.introduced -= known
            peer = self._runtime.peers.get(uid) if known else None
            link = peer.connect() if peer is not None else None
            if link is not None:
                send_numbers(link, RETIRED, sorted(known))

    def _session_over(self, peer: Peer, link: Link) -> None:
        """What was under way over it may be lost, though the process lives."""
        tenant = self._tenants.get(peer.address.uid)
        if tenant is not None and peer.why_gone is None:
            tenant.lost.append(link.session)
            tenant.recall(sorted(peer.links, key=lambda other: other.connection is None))

    def _peer_gone(self, peer: Peer) -> None:
        self._tenants.pop(peer.address.uid, None)


def _rides(body: bytes, buffers: Sequence[memoryview]) -> bool:
    size = sum(view.nbytes for view in buffers)
    return (size + len(body) if len(body) > INLINE else size) >= THRESHOLD
