"""The receiver's side of the tree: what comes through the agent, and what has to wait for it, or it for.

Rules:

* What its sender has given up as lost, with a session, is dropped if it comes all the same: it would come out of order.
* What is held back is in order for each process that sends; it can be cancelled like anything that is queued.
* When the process that has sent it is gone, what is held is dropped: what it waits for never comes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from monarch_async._core.events import Evidence
from monarch_async._core.framing import CREDIT_FOR, GATE, INTRODUCE, MARK, RELAYED, SKIPPED, pack_message
from monarch_async._core.order import Order
from monarch_async._runtime.connect import address_of
from monarch_async._runtime.context import Message, State
from monarch_async._runtime.link import Link
from monarch_async._runtime.origin import LinkOrigin
from monarch_async._runtime.peer import Peer
from monarch_async._runtime.tree import Handle
from monarch_async.ids import ProcAddress

__all__ = ["Branch", "RelayedOrigin"]

Held = tuple[int, Message]
"""Key of an actor, and a message to it."""


class RelayedOrigin(LinkOrigin):
    """A process behind an agent: answers go to the agent, which knows whose they are; credit is given by name."""

    __slots__ = ("address", "uid")

    def __init__(self, link: Link, uid: str) -> None:
        super().__init__(link)
        self.uid = uid
        self.address: ProcAddress | None = None  # once it has been introduced

    def credit(self, key: int, messages: int, size: int) -> None:
        self.link.send_control(pack_message((CREDIT_FOR, self.uid, key, messages, size)))


class Residence(Protocol):
    """What this needs of its runtime."""

    log: logging.Logger
    peers: dict[str, Peer]
    kinds: dict[int, Handle]
    on_peer_gone: list[Callable[[Peer], None]]
    on_session_over: list[Callable[[Peer, Link], None]]

    def peer(self, address: ProcAddress) -> Peer: ...

    def peer_of(self, link: Link) -> Peer: ...

    def post_local(self, key: int, message: Message) -> None: ...

    def cancel_message(self, message: Message) -> None: ...

    def dead_letter(self, actor: object, endpoint: str, evidence: Evidence) -> None: ...


class Branch:
    """Takes what came through the tree, for one runtime."""

    def __init__(self, runtime: Residence) -> None:
        self._runtime = runtime
        self._orders: dict[str, Order[Held]] = {}  # by the uid of who sends
        self._origins: dict[Link, dict[str, RelayedOrigin]] = {}  # by the link with the agent, and the uid
        runtime.kinds.update(
            {RELAYED: self._relayed, GATE: self._gate, MARK: self._mark, INTRODUCE: self._introduce, SKIPPED: self._skipped}
        )
        runtime.on_peer_gone.append(self._peer_gone)
        runtime.on_session_over.append(self._session_over)

    def hold(self, link: Link, key: int, message: Message) -> None:
        """A message came over a link whose messages have to wait."""
        uid = self._runtime.peer_of(link).address.uid
        self._deliver(uid, self._order(uid).direct((key, message)))

    def _order(self, uid: str) -> Order[Held]:
        order = self._orders.get(uid)
        if order is None:
            order = self._orders[uid] = Order()
        return order

    def _origin(self, link: Link, uid: str) -> RelayedOrigin:
        origins = self._origins.setdefault(link, {})
        origin = origins.get(uid)
        if origin is None:
            origin = origins[uid] = RelayedOrigin(link, uid)
        return origin

    def _relayed(self, link: Link, fields: list[Any], buffers: list[memoryview] | None) -> None:
        _, key, endpoint, request, rank, body, extras, uid, number, after = fields
        message = Message(self._origin(link, uid), endpoint, request, rank, body, buffers, extras)
        if request:
            link.inbound_calls[request] = message
        peer = self._runtime.peers.get(uid)
        if peer is not None and peer.evidence is not None:  # what this waits for never comes
            self._runtime.post_local(key, message)
        elif self._order(uid).is_late(number):
            message.state = State.CANCELLED
            message.origin.refuse(message, asyncio.CancelledError())
        else:
            self._deliver(uid, self._order(uid).tree(number, after, (key, message)))

    def _gate(self, link: Link, fields: list[Any], buffers: list[memoryview] | None) -> None:
        uid = self._runtime.peer_of(link).address.uid
        self._deliver(uid, self._order(uid).gate(fields[1]))

    def _mark(self, link: Link, fields: list[Any], buffers: list[memoryview] | None) -> None:
        uid = self._runtime.peer_of(link).address.uid
        self._deliver(uid, self._order(uid).mark(fields[1]))

    def _introduce(self, link: Link, fields: list[Any], buffers: list[memoryview] | None) -> None:
        """Who it is that the agent will name, and how far what it has sent has come."""
        _, who, number, lost, session = fields
        address = address_of(who)
        if address is None:
            raise ValueError("a process without a proper address was introduced")
        self._origin(link, address.uid).address = address
        peer = self._runtime.peer(address)  # also so that its end can be told
        self._end_session(peer, session)
        order = self._order(address.uid)
        self._deliver(address.uid, order.lost(lost) + order.passed(number))

    def _skipped(self, link: Link, fields: list[Any], buffers: list[memoryview] | None) -> None:
        peer = self._runtime.peer_of(link)
        uid = peer.address.uid
        self._end_session(peer, fields[3])
        order = self._order(uid)
        self._deliver(uid, order.lost(fields[2]) + order.skipped(fields[1]))

    def _end_session(self, peer: Peer, session: str) -> None:
        """The sender has given a session up: what of it may still come would come too late."""
        for link in list(peer.links):
            if link.session == session:
                peer.ended(link, Evidence("the session was given up at the other side"))

    def _deliver(self, uid: str, ready: Sequence[Held]) -> None:
        blocked = self._orders[uid].blocked
        peer = self._runtime.peers.get(uid)
        if peer is not None:
            for link in peer.links:
                link.held = blocked
        for key, message in ready:
            if message.state is not State.QUEUED:
                continue  # it was cancelled while it waited
            try:
                self._runtime.post_local(key, message)
            except (IndexError, TypeError, ValueError, AttributeError, KeyError) as error:
                self._runtime.log.exception("a malformed message from %s was dropped: %s", uid, error)

    def _peer_gone(self, peer: Peer) -> None:
        order = self._orders.pop(peer.address.uid, None)
        if order is None:
            return
        assert peer.evidence is not None
        for key, message in order.held:
            if message.request:
                self._runtime.cancel_message(message)
            else:
                self._runtime.dead_letter(f"actor {key:#x}", message.endpoint, peer.evidence)

    def _session_over(self, peer: Peer, link: Link) -> None:
        self._origins.pop(link, None)
