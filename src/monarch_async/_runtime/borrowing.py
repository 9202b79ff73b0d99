"""The receiver's half of shared memory: what others have lent to this process; see `lending` for the whole.

A block is seen through a private mapping of its segment. All views of it hold one *lease*; when that is collected, in whatever thread, the
memory is made ready for what comes next, and the loan is given back to its owner.

Rules:

* What arrives may be written to; nobody else sees that. What two messages have brought to one process never is in the same pages: if a
  block comes once more while the last lease of it is not over, what its owner wrote is copied, as far as the message speaks of it.
* Whatever goes wrong fails that one message, with a `DecodeError`. A segment that was never introduced is asked for (UNSEEN).
* While this process is forked, a child may go on looking at what is on lease here, so that is never given back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from monarch_async._channel.descriptors import Inbox, inbox_path
from monarch_async._channel.gifts import Gifts
from monarch_async._channel.pool import allocate
from monarch_async._channel.segment import SUPPORTED, Mapping
from monarch_async._core.codec import Buffers
from monarch_async._core.events import Evidence
from monarch_async._core.framing import BODY_FIELD, LENT, RECALLED, RETIRED, RETURNED, UNSEEN, pack_message
from monarch_async._runtime.device_borrowing import DeviceBorrowing
from monarch_async._runtime.leases import Lease, send_numbers, undecodable
from monarch_async._runtime.link import Link
from monarch_async._runtime.peer import Peer
from monarch_async._runtime.tree import Handle
from monarch_async.errors import ChannelError
from monarch_async.ids import ProcAddress
from monarch_async.options import Options

__all__ = ["Borrower", "Borrowing"]

ALIGNED = 64
"""What lies at a multiple of so many bytes in its block does so in a copy of a part."""
MANY, LATER = 16, 0.002
"""So many leases that have ended are given back together, or those that there are after so many seconds."""


class Borrower(Protocol):
    """What this needs of its runtime."""

    loop: asyncio.AbstractEventLoop
    me: ProcAddress
    key: bytes
    options: Options
    log: logging.Logger
    thread: int
    peers: dict[str, Peer]
    kinds: dict[int, Handle]
    closing: bool
    on_peer_gone: list[Callable[[Peer], None]]
    on_session_over: list[Callable[[Peer, Link], None]]

    def peer_of(self, link: Link) -> Peer: ...

    def deliver(self, link: Link, messages: list[list[Any]], buffers: list[memoryview] | None) -> None:
        """Messages that have come over a link."""


class Borrowing:
    """Borrows for one runtime. Used from its loop."""

    def __init__(self, runtime: Borrower) -> None:
        self._runtime = runtime
        self.inbox: Inbox | None = None  # `None` where no memory is shared
        self.gifts = Gifts()  # what `peering` has others give
        self.on_devices = DeviceBorrowing(runtime)
        self._closed = False
        self._mappings: dict[tuple[str, int], Mapping] = {}  # by owner and number of the segment
        self._leased: dict[tuple[str, int, int], int] = {}  # the loan of each block with a lease, by owner, segment and offset
        self._over: deque[Lease] = deque()  # leases that have ended, and whose memory is not renewed yet
        self._renewing = False  # that is scheduled
        self._ended: list[tuple[str, int]] = []  # owners and numbers of loans that are over and not given back yet
        self._giving_back: asyncio.TimerHandle | None = None  # when that will be
        runtime.kinds.update({LENT: self._lent, RETIRED: self._retired, RECALLED: self._recalled})
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
        """Borrow nothing more. What is on lease here stays readable."""
        if self.inbox is not None and not self._runtime.loop.is_closed():
            self._runtime.loop.remove_reader(self.inbox.fileno())
        self.abandon()
        if self._giving_back is not None:
            self._giving_back.cancel()
        self._mappings.clear()
        self.on_devices.close()

    def abandon(self) -> None:
        """The loop is gone, or about to be."""
        self._closed = True
        self.gifts.close()
        if self.inbox is not None:
            self.inbox.close()
            self.inbox = None

    @property
    def leases(self) -> int:
        """How many blocks are on lease here."""
        return len(self._leased)

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
        _, message, loans, places, whole, *on_devices = fields
        owner = self._runtime.peer_of(link).address.uid
        # Those on devices hold themselves, and are given back if they don't get any farther.
        arrived = [self.on_devices.arrive(owner, loan) for loan in on_devices[0]] if on_devices else []
        wanted: list[list[tuple[int, int]]] = [[] for _ in (*loans, *arrived)]
        for index, start, size in places:
            wanted[index].append((start, size))
        try:
            found: list[Iterator[Any]] = [iter(self._borrow(owner, parts, *loan)) for loan, parts in zip(loans, wanted, strict=False)]
        except (OSError, MemoryError, ChannelError) as error:
            send_numbers(link, RETURNED, [loan[0] for loan in loans])
            unseen = {loan[1] for loan in loans if (owner, loan[1]) not in self._mappings}
            if unseen:
                link.send_control(pack_message((UNSEEN, sorted(unseen))))
            message[BODY_FIELD[message[0]]] = undecodable(f"its bytes are in shared memory that this process could not get at: {error}")
            self._runtime.deliver(link, [message], None)
            return
        found.extend(iter([arrival]) for arrival in arrived)
        views = [next(found[index]) for index, _, _ in places]
        if whole:
            message[BODY_FIELD[message[0]]] = views.pop(0)
        self._runtime.deliver(link, [message], Buffers(views))

    def _borrow(self, owner: str, parts: Sequence[tuple[int, int]], number: int, segment: int, offset: int, size: int) -> list[memoryview]:
        """Views of parts, start and size, of a block that is lent to this process."""
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
        if offset + size > mapping.size or any(start + length > size for start, length in parts):
            raise ChannelError(f"segment {segment} of {owner} has {mapping.size} bytes, {size} from {offset} on are not among them")
        if (owner, segment, offset) in self._leased and self._over:  # perhaps by a lease that has ended
            self._renew()
        if (owner, segment, offset) in self._leased:
            copies = _copies(mapping, offset, parts)
            self._give_back(owner, [number])
            return copies
        self._leased[owner, segment, offset] = number
        view = Lease(self._lease_over, owner, number, segment, offset, size, mapping).view()
        return [view[start : start + length] for start, length in parts]

    def _lease_over(self, lease: Lease) -> None:
        """In any thread, and in the middle of anything."""
        if self._closed:
            return
        self._over.append(lease)
        if not self._renewing:
            self._renewing = True
            runtime = self._runtime
            # From the loop's own thread without a wake-up, which costs as much as all the rest.
            schedule = runtime.loop.call_soon if threading.get_ident() == runtime.thread else runtime.loop.call_soon_threadsafe
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                schedule(self._renew)

    def _renew(self) -> None:
        """Make what was looked at ready for others. It is given back many at once, or a little later: to wake its owner is a small call."""
        self._renewing = False
        while self._over:
            lease = self._over.popleft()
            try:
                lease.mapping.renew(lease.offset, lease.size)
            except OSError as error:  # as of locked memory: it counts as on lease for ever, so what comes there is copied
                self._runtime.log.warning("%s; what comes in its place is copied", error)
            else:
                self._leased.pop((lease.owner, lease.segment, lease.offset), None)
            self._ended.append((lease.owner, lease.number))
        if len(self._ended) >= MANY:
            self._give_back_all()
        elif self._ended and self._giving_back is None:
            self._giving_back = self._runtime.loop.call_later(LATER, self._give_back_all)

    def _give_back_all(self) -> None:
        if self._giving_back is not None:
            self._giving_back.cancel()
            self._giving_back = None
        ended: dict[str, list[int]] = {}
        for owner, number in self._ended:
            ended.setdefault(owner, []).append(number)
        self._ended.clear()
        for owner, numbers in ended.items():
            self._give_back(owner, numbers)

    def _give_back(self, owner: str, numbers: list[int]) -> None:
        peer = self._runtime.peers.get(owner)
        link = peer.connect() if peer is not None else None
        if link is not None:
            send_numbers(link, RETURNED, numbers)

    def _retired(self, link: Link, fields: list[Any], buffers: list[memoryview] | None) -> None:
        owner = self._runtime.peer_of(link).address.uid
        for number in fields[1]:
            self._mappings.pop((owner, number), None)

    def _recalled(self, link: Link, fields: list[Any], buffers: list[memoryview] | None) -> None:
        """A session with an owner was lost: it asks for loans that it does not know to be held. Nothing may come over that any more."""
        _, sessions, numbers = fields
        peer = self._runtime.peer_of(link)
        for other in [other for other in peer.links if other is not link and other.session in sessions]:
            peer.ended(other, Evidence(f"{peer.address} has given up a session"))
        held = {number for (owner, _, _), number in self._leased.items() if owner == peer.address.uid}
        held.update(-number for number in self.on_devices.arrivals.held(peer.address.uid))  # on devices: see `Tenant.loans`
        send_numbers(link, RETURNED, [number for number in numbers if number not in held])

    def _peer_gone(self, peer: Peer) -> None:
        uid = peer.address.uid
        self.gifts.forget(uid)
        for key in [key for key in self._mappings if key[0] == uid]:
            del self._mappings[key]


def _copies(mapping: Mapping, offset: int, parts: Sequence[tuple[int, int]]) -> list[memoryview]:
    """What its owner wrote to parts, start and size, of the block at `offset`. Those that overlap do so here too."""
    starts: list[int] = []
    ends: list[int] = []
    for start, size in sorted(parts):
        if ends and start < ends[-1]:
            ends[-1] = max(ends[-1], start + size)
        else:
            starts.append(start)
            ends.append(start + size)
    firsts = [start - start % ALIGNED for start in starts]
    stretches = [allocate(end - first) for first, end in zip(firsts, ends, strict=True)]
    for first, stretch in zip(firsts, stretches, strict=True):
        mapping.copy_original(offset + first, stretch)
    views = []
    for start, size in parts:
        index = bisect_right(starts, start) - 1
        views.append(stretches[index][start - firsts[index] :][:size])
    return views
