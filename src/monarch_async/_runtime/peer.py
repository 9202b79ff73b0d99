"""Another process, as this one sees it: how to reach it, the link to it, whether it is gone."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import MutableMapping
from typing import Protocol

from monarch_async._core.events import Evidence, died
from monarch_async._core.framing import GATE, MARK, pack_message
from monarch_async._runtime.context import Message, Waiter
from monarch_async._runtime.lane import Lane
from monarch_async._runtime.link import Link
from monarch_async.ids import ProcAddress, row_of, uid_at

__all__ = ["Network", "Peer", "end_predecessors"]

REMEMBERED = 2
"""Of processes that have taken each other's place, so many before the newest are remembered."""
FEW = 256
"""So many accounts are kept without a look at who still uses them."""


class Network(Protocol):
    """What a peer needs of the runtime that it is a peer of."""

    loop: asyncio.AbstractEventLoop
    evidence: Evidence | None

    peers: dict[str, Peer]

    def peer(self, address: ProcAddress) -> Peer: ...

    def dial(self, peer: Peer) -> Link:
        """A new link to it."""

    def cancel_message(self, message: Message) -> None: ...

    def link_ended(self, peer: Peer, link: Link, evidence: Evidence) -> None: ...

    def moved(self, link: Link, peer: Peer) -> None:
        """A link leads to this peer now."""

    def handed_on(self, before: Peer, following: ProcAddress) -> None:
        """All that was ever sent to a process goes to the one in its place."""

    def peer_gone(self, peer: Peer) -> None: ...


class Peer:
    """What this process sends to a peer goes over one link, so that it stays in order; the peer may send over another.

    Some of it may go through the peer's agent instead (`tree`). Every change of path is told to the peer (see `_core/order.py`): `link` is
    not set while the tree was used last, so that the next message that goes directly asks for it, and nothing has to look otherwise.

    A peer is one process, and gone for good once that has ended. Accounts with actors, which may come back in the process that takes its
    place, then move on to that (`Evidence.next`); those with ports and with the process itself end. Of a process and its successors only
    the last known one can be there: to hear of a successor is to hear of the end of those before it (the runtime's `peer`).
    """

    __slots__ = (
        "_enough",
        "address",
        "evidence",
        "lanes",
        "link",
        "links",
        "lives",
        "lost_marks",
        "lost_session",
        "marks",
        "runtime",
        "trees",
        "usual",
    )

    def __init__(self, runtime: Network, address: ProcAddress) -> None:
        self.runtime = runtime
        self.address = address
        self.link: Link | None = None  # where messages to it go; one of `links`
        self.usual: Link | None = None  # the same, also while the tree was used last
        self.trees = 0  # messages sent to it through the tree
        self.marks = 0  # how often the tree was used after `link`
        self.lost_marks = 0  # those of links that have ended
        self.lost_session = ""  # of the last of these links
        self.links: set[Link] = set()  # all that have not ended, whoever made them
        self.lanes: dict[int, Lane] = {}
        self.lives: dict[int, int] = {}  # the incarnations of its actors that have lived before
        self._enough = FEW  # accounts, at which those without use are forgotten
        self.evidence: Evidence | None = None  # set once it is known to be gone

    def lane(self, key: int, mesh: str, rank: int, limit: int, byte_limit: int, *, moves: bool = False) -> Lane:
        """The account with one of its ports, or itself; or with one of its actors, which `moves` to where that comes back."""
        lane = self.lanes.get(key)
        if lane is None:
            if len(self.lanes) >= self._enough:
                self._forget_unused()
            lane = self.lanes[key] = Lane(self, key, mesh, rank, limit, byte_limit)
            lane.moves = moves
        return lane

    def latest(self) -> Peer:
        """The process that is in its place now, as far as is known here; itself while it lives."""
        peer = self
        while peer.evidence is not None and peer.evidence.next:
            peer = peer.runtime.peer(peer.address._replace(uid=peer.evidence.next))
        return peer

    def _forget_unused(self) -> None:
        """Let go of the accounts that nobody holds and nothing is booked on, as of actors and ports that have ended."""
        idle = weakref.WeakValueDictionary({key: lane for key, lane in self.lanes.items() if not lane.messages})
        self.lanes = {key: lane for key, lane in self.lanes.items() if lane.messages}
        self.lanes.update(idle)
        self._enough = max(FEW, 2 * len(self.lanes))

    @property
    def why_gone(self) -> Evidence | None:
        """Why nothing can be sent to it: it is gone, or this process is ending."""
        return self.evidence or self.runtime.evidence

    def open(self, waiter: Waiter | None, request: int, lane: Lane) -> Link | None:
        """The link to send over, which may not be connected yet; `None`, after telling the waiter, if the process is gone."""
        evidence = self.why_gone
        if evidence is not None:
            if waiter is not None:
                error = died(evidence, lane.mesh, lane.rank, started=False, incarnation=self.lives.get(lane.key, 0))
                self.runtime.loop.call_soon(waiter.fail, request, error)
            return None
        return self._turn_to_link()

    def connect(self) -> Link | None:
        """The same, where nobody waits."""
        if self.link is not None:
            return self.link
        return self._turn_to_link() if self.why_gone is None else None

    def _turn_to_link(self) -> Link:
        link = self.usual or next((link for link in self.links if link.connection is not None), None) or self.runtime.dial(self)
        self.link = self.usual = link
        if self.trees:
            link.send(pack_message((GATE, self.trees)))
        return link

    def turn_to_tree(self) -> tuple[int, int]:
        """The next message goes through the tree: its number there, and the mark on the direct path that it comes after."""
        if self.link is not None:
            self.marks += 1
            self.link.send(pack_message((MARK, self.marks)))
            self.link = None
        self.trees += 1
        return self.trees, self.marks

    def ended(self, link: Link, evidence: Evidence) -> None:
        """A link is over: whatever waits on it fails."""
        self.links.discard(link)
        sent_over = self.usual is link
        if sent_over:
            self.link = self.usual = None
            self.lost_marks, self.lost_session = self.marks, link.session
        link.end()
        runtime = self.runtime
        for message in list(link.inbound_calls.values()):
            runtime.cancel_message(message)
        link.inbound_calls.clear()
        lanes = set()
        for request, (waiter, lane, _) in link.pending.items():
            lanes.add(lane)
            started = True if request in link.started else None
            incarnation = self.lives.get(lane.key, 0)
            error = died(evidence, lane.mesh, lane.rank, started=started, incarnation=incarnation)
            runtime.loop.call_soon(waiter.fail, request, error)
        link.pending.clear()
        for lane in list(self.lanes.values()) if sent_over or self.evidence is not None else lanes:
            lane.reset()
        runtime.link_ended(self, link, evidence)

    def gone(self, evidence: Evidence) -> None:
        """The process does not exist any more."""
        if self.evidence is not None:
            return
        self.evidence = evidence
        for link in list(self.links):
            self.ended(link, evidence)
        self.runtime.peer_gone(self)
        if self.evidence.next:  # that is still so, now that its owner has heard of it
            following = self.runtime.peer(self.address._replace(uid=self.evidence.next))
            for key, lane in self.lanes.items():
                if lane.moves and lane.peer is self:
                    lane.peer = following
                    following.lanes.setdefault(key, lane)

    def hand_on(self, link: Link, evidence: Evidence) -> Peer:
        """The process had ended before `link` was ever connected, so what was sent over it is for the one that took its place.

        So is what this process has spawned there: none of it was there before. Not for who starts the processes (`connect`): what that has
        asked of one is not for another.
        """
        self.runtime.handed_on(self, self.address._replace(uid=evidence.next))
        self.links.discard(link)
        used = self.usual is link
        if used:
            self.link = self.usual = None
        self.gone(evidence)
        following = self.latest()
        following.links.add(link)
        if used and following.usual is None:
            following.link = following.usual = link
        self.runtime.moved(link, following)
        return following


def end_predecessors(peers: MutableMapping[str, Peer], newest: dict[str, int], uid: str) -> None:
    """A process is known now. If it is one of a row that have taken each other's place, those before the newest have ended.

    `newest` is the last one known of each row, by the uid of the first. Only the last few are remembered: who asks for one from before is
    told here of the newest.
    """
    first, place = row_of(uid)
    if not place and first not in newest:
        return
    known = newest.get(first, 0)
    last = newest[first] = max(place, known)
    for before in sorted({place, *range(max(0, known - REMEMBERED), last)} - {last}):
        peer = peers.get(uid_at(first, before))
        if peer is not None:
            peer.gone(Evidence("has ended, and another process has taken its place", next=uid_at(first, last)))
    for forgotten in range(max(0, known - 2 * REMEMBERED), last - REMEMBERED):
        peers.pop(uid_at(first, forgotten), None)
