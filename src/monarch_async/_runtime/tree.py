"""The sender's side of the tree: one message to the agent of a host, which `fanout` sends on to many of its processes.

Rules:

* What is under way through the tree is booked on the lanes of the members like everything else, and noted here beside that: when a
  session ends, the direct one or that with the agent, just what it carried is taken off.
* Requests wait on the link with the agent, over which their answers come. When a member is gone, whoever tells it, they fail as they
  would on its own link.
* A session that is lost may have carried what others wait for (see `_core/order.py`): over what is left, the members are told how far
  it had come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from monarch_async._core.events import Evidence, died
from monarch_async._core.framing import CANCEL, CREDIT_FOR, LOST, MAX_ITEMS, PASSED, REPLIES, SKIPPED, TREE, bulk_layout, pack_message
from monarch_async._runtime.context import Waiter
from monarch_async._runtime.lane import Lane
from monarch_async._runtime.link import INLINE, Link
from monarch_async._runtime.peer import Network, Peer
from monarch_async.ids import ProcAddress
from monarch_async.options import Options

__all__ = ["Handle", "Member", "Tree"]

Handle = Callable[[Link, list[Any], "list[memoryview] | None"], None]
"""Takes the messages of one kind: the link they came over, their fields, their buffers."""


class Member(NamedTuple):
    """One of those addressed: its account, its position on the wire, and for a call the request and who waits for it."""

    lane: Lane
    rank: Any
    request: int
    waiter: Waiter | None


class Trunk(Network, Protocol):
    """What this needs of its runtime."""

    me: ProcAddress
    options: Options
    peers: dict[str, Peer]
    kinds: dict[int, Handle]
    on_peer_gone: list[Callable[[Peer], None]]
    on_session_over: list[Callable[[Peer, Link], None]]

    def peer(self, address: ProcAddress) -> Peer: ...

    def settle(self, link: Link, request: int, body: bytes, buffers: list[memoryview] | None) -> None: ...


class Booking:
    """What is under way to one actor through the tree. It is part of what its lane has booked."""

    __slots__ = ("bytes", "key", "lane", "mesh", "messages", "rank")

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.key = lane.key
        self.mesh = lane.mesh
        self.rank = lane.rank
        self.messages = 0
        self.bytes = 0

    def book(self, size: int) -> None:
        self.messages += 1
        self.bytes += size
        self.lane.messages += 1
        self.lane.bytes += size

    def credit(self, messages: int, size: int) -> None:
        """So many have left the mailbox; fewer if it was thought meanwhile that they were lost."""
        messages, size = min(messages, self.messages), min(size, self.bytes)
        self.messages -= messages
        self.bytes -= size
        self.lane.credit(messages, size)

    def reset(self) -> None:
        """Nothing is under way through the tree any more."""
        self.credit(self.messages, self.bytes)

    def restore(self) -> None:
        """The lane was reset, for its direct session is over; this is still under way."""
        self.lane.messages = max(self.lane.messages, self.messages)
        self.lane.bytes = max(self.lane.bytes, self.bytes)


class Tree:
    """Sends through agents for one runtime."""

    def __init__(self, runtime: Trunk) -> None:
        self._runtime = runtime
        self._bookings: dict[Lane, Booking] = {}
        runtime.kinds.update({REPLIES: self._replies, CREDIT_FOR: self._credit, LOST: self._lost})
        runtime.on_peer_gone.append(self._peer_gone)
        runtime.on_session_over.append(self._session_over)

    def agent_of(self, lane: Lane) -> Peer:
        """The agent through which the process of a lane is reached."""
        address = lane.peer.address
        return self._runtime.peer(address._replace(uid=address.host, name="agent", rank=0))

    def send(
        self,
        agent: Peer,
        endpoint: str,
        members: Sequence[Member],
        body: bytes,
        buffers: Sequence[memoryview],
        extras: dict[str, Any] | None,
    ) -> bool:
        """Send one message for all members, actors with one key in processes of one host; False, and nothing is sent, if it can't be.

        None of the members may be known to be gone, and all have room.
        """
        sizes = [view.nbytes for view in buffers]
        size = len(body) + sum(sizes)
        if bulk_layout(len(body), sizes)[1] > self._runtime.options.max_frame or len(sizes) > MAX_ITEMS:
            return False
        link = agent.connect()
        if link is None:
            return False
        told = []
        for lane, rank, request, _ in members:
            peer = lane.peer
            told.append((peer.address.uid, rank, request, *peer.turn_to_tree()))
        key = members[0].lane.key
        if size > INLINE or buffers:
            link.send_large([TREE, key, endpoint, told, b"", extras], body, buffers)
        else:
            link.send(pack_message((TREE, key, endpoint, told, body, extras)))
        for lane, _, request, waiter in members:
            booking = self._bookings.get(lane)
            if booking is None:
                booking = self._bookings[lane] = Booking(lane)
            booking.book(size)
            if waiter is not None:
                link.pending[request] = (waiter, booking, size)
        return True

    def cancel(self, request: int, lane: Lane, reason: str) -> None:
        """Cancel a request if it was sent through the tree."""
        if lane in self._bookings:
            for link in self.agent_of(lane).links:
                if request in link.pending:
                    link.send_control(pack_message((CANCEL, request, reason)))

    # What agents tell.

    def _replies(self, link: Link, fields: list[Any], buffers: list[memoryview] | None) -> None:
        _, requests, body = fields
        for request in requests:
            self._runtime.settle(link, request, body, None)

    def _credit(self, link: Link, fields: list[Any], buffers: list[memoryview] | None) -> None:
        _, uid, key, messages, size = fields
        peer = self._runtime.peers.get(uid)
        lane = peer.lanes.get(key) if peer is not None else None
        if lane is not None and lane in self._bookings:
            self._bookings[lane].credit(messages, size)

    def _lost(self, link: Link, fields: list[Any], buffers: list[memoryview] | None) -> None:
        """A process is gone, or the agent's session with it."""
        _, uid, evidence, gone = fields
        peer = self._runtime.peers.get(uid)
        if peer is not None:
            if gone:
                peer.gone(Evidence.from_map(evidence))
            else:
                self._fail(peer, Evidence.from_map(evidence))

    # What ends.

    def _fail(self, peer: Peer, evidence: Evidence) -> None:
        """Nothing that is under way to a process through the tree will arrive."""
        agent = self._runtime.peers.get(peer.address.host)
        for link in agent.links if agent is not None else ():
            for request, (waiter, account, _) in list(link.pending.items()):
                if isinstance(account, Booking) and account.lane.peer is peer:
                    del link.pending[request]
                    started = True if request in link.started else None
                    link.started.discard(request)
                    incarnation = peer.lives.get(account.key, 0)
                    error = died(evidence, account.mesh, account.rank, started=started, incarnation=incarnation)
                    self._runtime.loop.call_soon(waiter.fail, request, error)
        for lane in peer.lanes.values():
            if lane in self._bookings:
                self._bookings[lane].reset()

    def _peer_gone(self, peer: Peer) -> None:
        if peer.trees:
            assert peer.evidence is not None
            for lane in peer.lanes.values():
                if self._bookings.pop(lane, None) is not None:
                    lane.reset()
            self._fail(peer, peer.evidence)

    def _session_over(self, peer: Peer, link: Link) -> None:
        if peer.trees and peer.evidence is None:
            for lane in peer.lanes.values():
                if lane in self._bookings:
                    self._bookings[lane].restore()
            agent = self._runtime.peers.get(peer.address.host)
            if agent is not None and agent.usual is not None:
                agent.usual.send(pack_message((PASSED, peer.address.uid, peer.trees, peer.lost_marks, peer.lost_session)))
        if peer.address.uid == peer.address.host and peer.usual is None:
            self._agent_lost(peer, link)

    def _agent_lost(self, agent: Peer, link: Link) -> None:
        """The session with an agent is over, and what it carried may have been lost."""
        members = [peer for peer in self._runtime.peers.values() if peer.trees and peer.address.host == agent.address.uid]
        for peer in members:
            for lane in peer.lanes.values():
                if lane in self._bookings:
                    self._bookings[lane].reset()
        if not members or agent.why_gone is not None:
            return
        if link.connections:
            again = agent.connect()
            assert again is not None
            for peer in members:
                again.send(pack_message((PASSED, peer.address.uid, peer.trees, peer.lost_marks, peer.lost_session)))
            return
        for peer in members:
            direct = peer.connect()
            if direct is not None:
                direct.send(pack_message((SKIPPED, peer.trees, peer.lost_marks, peer.lost_session)))
