"""Two paths from one process to another, put back into one order, whatever comes first and whatever is lost.

The sender is the real one (`Peer`); wires are lists. The tree has two of them, from the sender to the agent and from there on.
"""

from __future__ import annotations

from typing import Any, cast

import msgpack
from hypothesis import example, given, settings
from hypothesis import strategies as st

from monarch_async._core.events import Evidence
from monarch_async._core.framing import GATE, MARK
from monarch_async._core.order import Order
from monarch_async._runtime.peer import Network, Peer
from monarch_async.ids import ProcAddress


class Wire:
    """As much of a link as `Peer` uses: keeps what is sent."""

    def __init__(self) -> None:
        self.connection = object()
        self.session = "session"
        self.inbound_calls: dict[int, Any] = {}
        self.pending: dict[int, Any] = {}
        self.sent: list[Any] = []

    def send(self, packed: bytes) -> None:
        self.sent.append(msgpack.unpackb(packed))

    def end(self) -> None:
        self.sent.clear()


class Sender:
    """A process with a direct path to one other, and one through an agent."""

    evidence = None

    def __init__(self) -> None:
        self.peer = Peer(cast("Network", self), ProcAddress("receiver", "host", "", ""))
        self.number = 0
        self.to_agent: list[tuple[int, int, int | None]] = []  # number in the tree, mark, item; for what has passed: no item
        self.from_agent: list[tuple[int, int, int | None]] = []
        self.agent_passed = [0, 0]
        self.lost: set[int] = set()
        self.late_to_agent: list[tuple[int, int, int]] = []  # of lost sessions, but on its way all the same
        self.late_from_agent: list[tuple[int, int, int]] = []
        self.seen: list[int] = []
        self.order: Order[int] = Order()

    # What `Peer` needs.

    def dial(self, peer: Peer) -> Any:
        wire = Wire()
        peer.links.add(cast("Any", wire))
        return wire

    def link_ended(self, peer: Peer, link: Any, evidence: Evidence) -> None:
        if peer.trees:
            self.to_agent.append((peer.trees, peer.lost_marks, None))

    # What can happen.

    def send_directly(self) -> None:
        self.number += 1
        cast("Any", self.peer.connect()).sent.append(self.number)

    def send_through_tree(self) -> None:
        self.number += 1
        self.to_agent.append((*self.peer.turn_to_tree(), self.number))

    def arrive_directly(self) -> None:
        wire = cast("Any", self.peer.usual)
        if wire is not None and wire.sent:
            match wire.sent.pop(0):
                case int(item):
                    self.seen += self.order.direct(item)
                case [kind, number] if kind == GATE:
                    self.seen += self.order.gate(number)
                case other:
                    assert other[0] == MARK
                    self.seen += self.order.mark(other[1])

    def reach_agent(self) -> None:
        if self.to_agent:
            number, other, item = self.to_agent.pop(0)
            if item is None:
                self.agent_passed = [max(self.agent_passed[0], number), max(self.agent_passed[1], other)]
                number, other = self.agent_passed
            else:
                self.agent_passed[0] = max(self.agent_passed[0], number)
            self.from_agent.append((number, other, item))

    def arrive_from_agent(self) -> None:
        if self.from_agent:
            number, other, item = self.from_agent.pop(0)
            if item is not None:
                self.take(number, other, item)
            else:
                self.seen += self.order.lost(other)
                self.seen += self.order.passed(number)

    def lose_direct(self) -> None:
        wire = cast("Any", self.peer.usual)
        if wire is not None:
            self.lost.update(item for item in wire.sent if isinstance(item, int))
            self.peer.ended(wire, Evidence("cut"))

    def lose_agent(self) -> None:
        self.lost.update(item for _, _, item in self.to_agent if item is not None)
        self.late_to_agent += [(number, mark, item) for number, mark, item in self.to_agent if item is not None]
        self.to_agent = [(self.peer.trees, self.peer.lost_marks, None)] if self.peer.trees else []

    def lose_rest(self) -> None:
        self.lost.update(item for _, _, item in self.from_agent if item is not None)
        self.late_from_agent += [(number, mark, item) for number, mark, item in self.from_agent if item is not None]
        self.from_agent = [(*self.agent_passed, None)]  # type: ignore[list-item]

    def take(self, number: int, mark: int, item: int) -> None:
        if not self.order.is_late(number):
            self.seen += self.order.tree(number, mark, item)

    def arrive_late(self) -> None:
        if self.late_from_agent:
            self.take(*self.late_from_agent.pop(0))

    def reach_agent_late(self) -> None:
        if self.late_to_agent:
            number, mark, item = self.late_to_agent.pop(0)
            self.agent_passed[0] = max(self.agent_passed[0], number)
            self.from_agent.append((number, mark, item))

    def never_reach_agent(self) -> None:
        """The session with the agent ends before it had a connection, so that the agent has got nothing of it."""
        if self.to_agent and self.peer.trees and not self.from_agent and self.agent_passed == [0, 0]:
            self.lost.update(item for _, _, item in self.to_agent if item is not None)
            self.to_agent.clear()
            self.seen += self.order.lost(self.peer.lost_marks)
            self.seen += self.order.skipped(self.peer.trees)


SENDING = ["send_directly", "send_through_tree"]
ARRIVING = ["arrive_directly", "reach_agent", "arrive_from_agent"]
LOSING = ["lose_direct", "lose_agent", "lose_rest", "never_reach_agent", "arrive_late", "reach_agent_late"]


def settle(sender: Sender) -> None:
    """Let everything arrive, and check what has."""
    while sender.to_agent or sender.from_agent or (sender.peer.usual is not None and cast("Any", sender.peer.usual).sent):
        for step in ARRIVING:
            getattr(sender, step)()
            sender.order.validate()
    assert [item for item in range(1, sender.number + 1) if item not in sender.lost] == [
        item for item in sender.seen if item not in sender.lost
    ]
    assert sender.seen == sorted(set(sender.seen))
    assert [] == sender.order.held
    assert not sender.order.blocked


@given(st.lists(st.sampled_from([*SENDING, *SENDING, *ARRIVING])))
@settings(max_examples=500)
def test_two_paths_keep_one_order(steps: list[str]) -> None:
    """Whatever is sent over either path arrives once, in the order in which it was sent."""
    sender = Sender()
    for step in steps:
        getattr(sender, step)()
        sender.order.validate()
        assert sender.seen == list(range(1, len(sender.seen) + 1))
    settle(sender)


# What comes late waits for a mark behind a gate for what was lost before it.
@example(
    ["send_through_tree", "lose_agent", "send_directly", "send_through_tree", "reach_agent", "reach_agent", "lose_rest", "arrive_late"]
)
@given(st.lists(st.sampled_from([*SENDING, *SENDING, *ARRIVING, *ARRIVING, *LOSING])))
@settings(max_examples=1500)
def test_sessions_are_lost(steps: list[str]) -> None:
    """What a lost session takes with it holds up nothing: the rest arrives once, in order, and nothing waits for ever."""
    sender = Sender()
    for step in steps:
        getattr(sender, step)()
        sender.order.validate()
        assert sender.seen == sorted(set(sender.seen))
    settle(sender)


def test_a_path_that_is_never_left_says_nothing() -> None:
    """Neither path costs a message of its own while it is the only one used."""
    sender = Sender()
    for _ in range(5):
        sender.send_directly()
    assert [1, 2, 3, 4, 5] == cast("Any", sender.peer.usual).sent
    other = Sender()
    for _ in range(5):
        other.send_through_tree()
    assert [(number, 0, number) for number in range(1, 6)] == other.to_agent
    assert other.peer.usual is None
