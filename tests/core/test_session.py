"""Numbering, acknowledgement and resending: whatever happens to connections, nothing is lost, doubled or reordered."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from monarch_async._core.framing import ACK, CHUNK, DATA, LARGE, pack_large
from monarch_async._core.reader import FrameReader
from monarch_async._core.session import ACK_BYTES, ACK_FRAMES, Inbound, Outbound
from monarch_async.errors import ProtocolError
from tests.core.wire import FAST, KEY, Key, Plain, Writer, call, new_reader, plain


class _Side:
    """One end of a session, as a link drives it: a writer on the current connection, a reader for what comes."""

    def __init__(self) -> None:
        self.outbound = Outbound()
        self.inbound = Inbound()
        self.writer = Writer()
        self.reader: FrameReader
        self.taken = 0  # frames of the writer that are on the wire
        self.sent: list[Plain] = []
        self.got: list[Plain] = []

    def connect(self, received: int, key: Key | None) -> None:
        again = self.outbound.resume(received)
        self.writer = Writer(key, self.outbound)
        self.taken = 0
        self.reader = new_reader(key, self.inbound)
        for sequence, kind, flags, header, bulk in again:
            self.writer.acknowledged = self.inbound.ack()
            self.writer.write(kind, flags, header, bytes(bulk), sequence)

    def take_wire(self) -> bytes:
        data = b"".join(self.writer.frames[self.taken :])
        self.taken = len(self.writer.frames)
        return data

    def receive(self, data: bytes) -> None:
        self.got += plain(self.reader.feed(data))
        assert self.reader.error is None
        self.outbound.acknowledge(self.reader.acknowledged)
        if self.inbound.ack_due:
            self.writer.acknowledged = self.inbound.ack()
            self.writer.bare(ACK)


class SessionMachine(RuleBasedStateMachine):
    """Two sides, the bytes under way between them, and connections that are lost at any byte."""

    chunks = Bundle("chunks")

    def __init__(self) -> None:
        super().__init__()
        self.sides = (_Side(), _Side())
        self.wire = [bytearray(), bytearray()]  # to side 0, to side 1
        self.number = 0
        self.under_way: list[list[tuple[int, int, bytes, bytes]]] = [[], []]  # chunks of a large message, still to be written
        self.reconnect(KEY)

    def _put(self, side: int) -> None:
        self.wire[1 - side] += self.sides[side].take_wire()

    @rule(side=st.integers(0, 1), size=st.sampled_from([0, 1, 50, 5000]), count=st.integers(1, 3))
    def send(self, side: int, size: int, count: int) -> None:
        """A frame of small messages, as a control frame may pass between chunks."""
        end = self.sides[side]
        messages = []
        for _ in range(count):
            self.number += 1
            messages.append(call(self.number, bytes(size)))
        end.writer.acknowledged = end.inbound.ack()
        end.writer.small(*messages)
        end.sent += [(message, []) for message in messages]
        self._put(side)

    @rule(side=st.integers(0, 1), size=st.sampled_from([1, 63, 64, 65, 1000]), pieces=st.integers(1, 5))
    def begin_large(self, side: int, size: int, pieces: int) -> None:
        """A large message; its chunks are written one by one, whenever `chunk` is drawn."""
        if self.under_way[side]:
            return
        self.number += 1
        body = bytes([self.number % 256]) * (size * pieces)
        message = call(self.number)
        self.under_way[side] = [(CHUNK, 0, b"", body[start : start + size]) for start in range(0, len(body), size)]
        self.under_way[side][0] = (DATA, LARGE, pack_large(message, len(body), []), body[:size])
        self._chunk(side)
        self._whole = call(self.number, body)
        if not self.under_way[side]:
            self.sides[side].sent.append((self._whole, []))
        else:
            self.under_way[side].append((0, self.number, b"", body))

    @rule(side=st.integers(0, 1))
    def chunk(self, side: int) -> None:
        if self.under_way[side]:
            self._chunk(side)
            if len(self.under_way[side]) == 1:
                _, number, _, body = self.under_way[side].pop()
                self.sides[side].sent.append((call(number, body), []))

    def _chunk(self, side: int) -> None:
        kind, flags, header, bulk = self.under_way[side].pop(0)
        end = self.sides[side]
        end.writer.acknowledged = end.inbound.ack()
        end.writer.numbered(kind, flags, header, bulk)
        self._put(side)

    @rule(side=st.integers(0, 1), size=st.integers(1, 3000))
    def carry(self, side: int, size: int) -> None:
        """Some bytes arrive."""
        data = bytes(self.wire[side][:size])
        del self.wire[side][:size]
        if data:
            self.sides[side].receive(data)
            self._put(side)

    @rule(key=st.sampled_from([None, KEY, FAST]))
    def reconnect(self, key: Key | None) -> None:
        """The connection is lost with all that is on the wire, and a new one is made."""
        received = [side.inbound.received for side in self.sides]
        for index, side in enumerate(self.sides):
            side.connect(received[1 - index], key)
            self.wire[1 - index] = bytearray(side.take_wire())

    @invariant()
    def delivered_is_a_prefix(self) -> None:
        """What has come is what was sent, so far, in order of completion."""
        for side, other in (self.sides, self.sides[::-1]):
            assert other.sent[: len(side.got)] == side.got

    @invariant()
    def halves_are_sound(self) -> None:
        for side, other in (self.sides, self.sides[::-1]):
            side.outbound.validate()
            side.inbound.validate()
            assert side.outbound.acknowledged <= other.inbound.received <= side.outbound.sequence

    @invariant()
    def acknowledged_memory_is_bounded(self) -> None:
        """With nothing on the wire, what is kept of what has arrived is under the figures of the docstring."""
        for side, other in (self.sides, self.sides[::-1]):
            if not any(self.wire):
                arrived = [f for f in side.outbound.pending if f[0] <= other.inbound.received]
                assert len(arrived) < ACK_FRAMES
                assert sum(len(header) + len(bulk) for *_, header, bulk in arrived) < ACK_BYTES

    def teardown(self) -> None:
        """In the end everything arrives."""
        for side in (0, 1):
            while self.under_way[side]:
                self.chunk(side)
        self.reconnect(KEY)
        while any(self.wire):
            for side in (0, 1):
                self.carry(side, 1 << 20)
        for end, peer in (self.sides, self.sides[::-1]):
            assert peer.sent == end.got


TestSession = SessionMachine.TestCase
TestSession.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_acknowledging_what_was_not_sent() -> None:
    """An acknowledgement from the future is the peer's fault and changes nothing; one from the past means nothing."""
    outbound = Outbound()
    outbound.number(DATA, 0, b"abc")
    outbound.number(DATA, 0, b"de")
    with pytest.raises(ProtocolError, match="of which only 2"):
        outbound.acknowledge(3)
    assert (0, 5) == (outbound.acknowledged, outbound.pending_bytes)
    outbound.acknowledge(1)
    outbound.acknowledge(0)
    outbound.validate()
    assert (1, 2) == (outbound.acknowledged, outbound.pending_bytes)


def test_a_peer_that_forgot() -> None:
    """A peer that claims less than it has acknowledged, or more than was sent, can't be resumed."""
    outbound = Outbound()
    for _ in range(3):
        outbound.number(DATA, 0, b"x")
    outbound.acknowledge(2)
    with pytest.raises(ProtocolError, match="went back"):
        outbound.resume(1)
    with pytest.raises(ProtocolError, match="only 3"):
        outbound.resume(4)
    assert [3] == [frame[0] for frame in outbound.resume(2)]
    assert [] == outbound.resume(3)


def test_when_an_acknowledgement_is_due() -> None:
    """After so many frames, so many bytes, or a whole large message; and each time only once."""
    inbound = Inbound()
    for _ in range(ACK_FRAMES - 1):
        inbound.take(1)
        assert not inbound.ack_due
    inbound.take(1)
    assert inbound.ack_due
    assert ACK_FRAMES == inbound.ack()
    assert not inbound.ack_due
    inbound.take(ACK_BYTES)
    assert inbound.ack_due
    inbound.ack()
    inbound.begin(call(1), 10, [])
    inbound.space(10)
    assert not inbound.ack_due
    inbound.take(10)
    assert inbound.fill(10) is not None
    assert inbound.ack_due
    inbound.ack()
    assert not inbound.ack_due


def test_numbers() -> None:
    """The next number is new, an old one is not, a gap and no number at all are faults."""
    inbound = Inbound()
    inbound.take(0)
    assert inbound.is_new(2)
    assert not inbound.is_new(1)
    for sequence in (0, 3, 2**64 - 1):
        with pytest.raises(ProtocolError, match="follows frame 1"):
            inbound.is_new(sequence)


def test_a_first_frame_that_was_cut_is_announced_again() -> None:
    """The announcement may come again until its frame was taken, with the same memory; afterwards another is a fault."""
    asked = []

    def allocate(size: int) -> memoryview:
        asked.append(size)
        return memoryview(bytearray(size))

    inbound = Inbound(allocate)
    inbound.begin(call(1), 10, [])
    inbound.space(6)[:3] = b"abc"  # and then the connection was cut
    inbound.begin(call(1), 10, [])
    inbound.space(6)[:] = b"abcdef"
    assert inbound.fill(6) is None
    with pytest.raises(ProtocolError, match="began before"):
        inbound.begin(call(2), 10, [])
    with pytest.raises(ProtocolError, match="where 4 were missing"):
        inbound.space(5)
    inbound.space(4)[:] = b"ghij"
    whole = inbound.fill(4)
    assert whole is not None
    assert ([10], b"abcdefghij") == (asked, bytes(whole[0][5]))
    inbound.begin(call(3), 10, [])
    inbound.begin(call(3), 20, [])  # what the wire made of the first announcement was another length
    assert ([10, 10, 20], 20) == (asked, inbound.missing)
    inbound.validate()
