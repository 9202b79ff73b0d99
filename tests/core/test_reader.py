"""The reading end of a connection: any cut of the bytes gives the same; what is no frame is told, and nothing after it is taken."""

from __future__ import annotations

import itertools
import random
import tracemalloc

import pytest

from monarch_async._core.framing import ACK, CHUNK, DATA, LARGE, MAX_HEADER, PRELUDE, join_messages, pack_large, pack_message
from monarch_async._core.session import Inbound
from monarch_async.errors import ProtocolError
from tests.core.mutate import mutant_count, mutants
from tests.core.wire import (
    FAST,
    KEY,
    LIMIT,
    Key,
    Writer,
    call,
    conversation,
    new_reader,
    plain,
    random_pieces,
    read_in,
    single_bytes,
    whole,
)

KEYS = pytest.mark.parametrize("key", [None, KEY, FAST], ids=["bare", "sha256", "poly1305"])


def frame(
    kind: int, flags: int = 0, header: bytes = b"", bulk: int = 0, sequence: int = 0, acknowledged: int = 0, reserved: int = 0
) -> bytes:
    return PRELUDE.pack(kind, flags, reserved, len(header), bulk, sequence, acknowledged) + header


@KEYS
@pytest.mark.parametrize("seed", range(-2, 20))
def test_any_cut_gives_the_same(key: Key | None, seed: int) -> None:
    """Whole (-2), byte by byte (-1) and cut at random, through `feed`: the same messages, acknowledgements and signs of life."""
    writer = conversation(key)
    data = writer.bytes
    pieces = whole(data) if seed == -2 else single_bytes(data) if seed == -1 else random_pieces(data, seed)
    inbound = Inbound()
    reader = new_reader(key, inbound)
    batches = []
    for piece in pieces:
        batches += reader.feed(piece)
        inbound.validate()
    assert writer.sent == plain(batches)
    assert (None, 9, 1, 1, True) == (reader.error, reader.acknowledged, reader.pings, reader.pongs, reader.closed)
    assert writer.outbound.sequence == inbound.received


@KEYS
@pytest.mark.parametrize("seed", range(20))
def test_reading_into_the_buffer_is_the_same(key: Key | None, seed: int) -> None:
    """A transport that fills `get_buffer` piece by piece gets the same as `feed`."""
    writer = conversation(key)
    rng = random.Random(seed)
    sizes = (rng.choice((1, 31, 32, 33, 500, 100_000)) for _ in itertools.count())
    assert writer.sent == plain(read_in(new_reader(key), writer.bytes, sizes))


@KEYS
def test_a_chunk_takes_one_read(key: Key | None) -> None:
    """Behind a chunk is room for its seal and the next prelude, where the message goes on; a message in between does no harm."""
    writer = Writer(key)
    writer.large(call(1), 5, bytes(range(256)) * 1000, [], 100_000, [call(2)])
    first, between, second, last = writer.frames
    tail = len(first) - PRELUDE.size - len(pack_large(call(1), 256_000, [])) - 100_000
    reader = new_reader(key)
    batches = reader.feed(first + between)
    batches += reader.feed(second[: PRELUDE.size])
    assert 100_000 + tail + PRELUDE.size == len(reader.get_buffer())
    room = reader.get_buffer()
    following = second[PRELUDE.size :] + last[: PRELUDE.size]
    room[:] = following
    batches += reader.received(len(following))
    assert 56_000 == len(reader.get_buffer())
    batches += reader.feed(last[PRELUDE.size :])
    assert None is reader.error
    assert writer.sent == plain(batches)


@KEYS
def test_cut_anywhere_and_resumed(key: Key | None) -> None:
    """A connection cut at any byte, resumed on a new reader with what the sender has left: everything once, in order and intact."""
    first = conversation(key, chunk=300)
    data = first.bytes
    for cut in range(len(data) + 1):
        inbound = Inbound()
        batches = new_reader(key, inbound).feed(data[:cut])
        inbound.validate()
        resumed = Writer(key)
        again = [pending for pending in first.outbound.pending if pending[0] > inbound.received]
        for sequence, kind, flags, header, bulk in again:
            resumed.write(kind, flags, header, bytes(bulk), sequence)
        batches += new_reader(key, inbound).feed(resumed.bytes)
        inbound.validate()
        assert first.sent == plain(batches), f"cut at {cut} of {len(data)}"


@KEYS
def test_what_was_seen_is_dropped(key: Key | None) -> None:
    """A sender that resends everything delivers nothing twice, and a large frame that was seen takes no memory again."""
    writer = conversation(key)
    inbound = Inbound()
    assert writer.sent == plain(new_reader(key, inbound).feed(writer.bytes))
    again = conversation(key)
    again.small(call(99, b"new"))
    for chunked in (whole, single_bytes):
        reader = new_reader(key, inbound)
        batches = [batch for piece in chunked(again.bytes) for batch in reader.feed(piece)]
        assert (None, [(call(99, b"new"), [])] if chunked is whole else []) == (reader.error, plain(batches))


BAD = {
    "an unknown kind": frame(9),
    "kind 0": frame(0),
    "reserved bits": frame(DATA, header=b"\x91\x90", sequence=1, reserved=1),
    "an unknown flag": frame(DATA, 2, b"\x91\x90", sequence=1),
    "a flag on a chunk": frame(CHUNK, LARGE, b"", 10, 1),
    "a chunk with a header": frame(CHUNK, 0, b"x", 10, 1),
    "a chunk without bytes": frame(CHUNK, 0, b"", 0, 1),
    "a chunk of nothing": frame(CHUNK, 0, b"", 10, 1),
    "a bulk on a small frame": frame(DATA, 0, join_messages([pack_message(call(1))]), 10, 1),
    "an ACK with a number": frame(ACK, sequence=1),
    "an ACK with a header": frame(ACK, header=b"x"),
    "a header past the limit": PRELUDE.pack(DATA, 0, 0, MAX_HEADER + 1, 0, 1, 0),
    "a bulk past the limit": frame(DATA, LARGE, pack_large(call(1), 10, []), LIMIT + 1, 1),
    "more than the message has": frame(DATA, LARGE, pack_large(call(1), 10, []), 11, 1),
    "an announcement past the limit": frame(DATA, LARGE, pack_large(call(1), 10, [LIMIT]), 5, 1),
    "padding past the limit": frame(DATA, LARGE, pack_large(call(1), 10, [1] * (LIMIT // 64 + 1)), 5, 1),
    "an announcement without bytes": frame(DATA, LARGE, pack_large(call(1), 10, []), 0, 1),
    "a gap": frame(DATA, 0, join_messages([pack_message(call(1))]), 0, 2),
    "no number": frame(DATA, 0, join_messages([pack_message(call(1))]), 0, 0),
    "an empty frame": frame(DATA, 0, b"\x90", 0, 1),
    "no msgpack": frame(DATA, 0, b"\xc1", 0, 1),
    "a message that is none": frame(DATA, 0, b"\x91\x07", 0, 1),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_no_frame(what: str) -> None:
    """Each kind of bad frame is the peer's fault; what came before it is delivered, it is not counted, and nothing after it is taken."""
    inbound = Inbound()
    reader = new_reader(None, inbound)
    batches = reader.feed(BAD[what] + bytes(64))
    assert isinstance(reader.error, ProtocolError)
    assert ([], 0) == (batches, inbound.received)
    assert [] == reader.feed(frame(DATA, 0, join_messages([pack_message(call(1))]), 0, 1))


@KEYS
def test_good_frames_before_a_bad_one_are_delivered(key: Key | None) -> None:
    """What is acknowledged is delivered: frames that came whole in the same read as garbage are not lost with it."""
    writer = Writer(key)
    writer.small(call(1, b"good"))
    reader = new_reader(key)
    assert writer.sent == plain(reader.feed(writer.bytes + b"\xff" * 100))
    assert isinstance(reader.error, ProtocolError)


def test_a_message_that_began_twice() -> None:
    """A second large message can't begin before the first has ended."""
    writer = Writer()
    writer.numbered(DATA, LARGE, pack_large(call(1), 100, []), b"x" * 50)
    writer.numbered(DATA, LARGE, pack_large(call(2), 100, []), b"y" * 50)
    reader = new_reader()
    assert [] == reader.feed(writer.bytes)
    assert "began before" in str(reader.error)


def test_announced_sizes_allocate_nothing() -> None:
    """Preludes that announce the longest header or a bulk that was seen already cost no memory until their bytes come."""
    inbound = Inbound()
    inbound.received = 5
    tracemalloc.start()
    try:
        for data in (PRELUDE.pack(DATA, 0, 0, MAX_HEADER, 0, 6, 0), PRELUDE.pack(CHUNK, 0, 0, 0, 8 << 30, 3, 0)):
            reader = new_reader(None, inbound, max_frame=16 << 30)
            assert [] == reader.feed(data + bytes(100))
            assert reader.error is None
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


def test_a_long_header_gives_its_memory_back() -> None:
    """The buffer grows for a header of megabytes and shrinks behind it; the message is whole."""
    writer = Writer()
    writer.small(call(1, b"m" * (3 << 20)))
    writer.small(call(2))
    reader = new_reader()
    batches = read_in(reader, writer.bytes, itertools.repeat(50_000))
    assert writer.sent == plain(batches)
    assert len(reader.get_buffer()) <= 1 << 18


def test_a_forged_acknowledgement_is_not_believed() -> None:
    """With a seal the acknowledgement in a large frame counts only once its seal has been checked."""
    writer = conversation(KEY)
    data = bytearray(writer.bytes)
    at = data.index(PRELUDE.pack(DATA, LARGE, 0, 0, 0, 0, 0)[:4], 100)
    data[at + 24 : at + 32] = (1000).to_bytes(8, "little")
    reader = new_reader(KEY)
    reader.feed(bytes(data))
    assert "seal" in str(reader.error)
    assert reader.acknowledged < 1000


@KEYS
@pytest.mark.parametrize("seed", range(4))
def test_mutants(key: Key | None, seed: int) -> None:
    """No mutant of a stream raises, hangs or delivers what is no message; with a seal what is delivered is a prefix of what was sent."""
    writer = conversation(key, chunk=(64, 700)[seed % 2])
    lengths = []
    at = 0
    for part in writer.frames:
        lengths += [(at + 4, 4), (at + 8, 8), (at + 16, 8), (at + 24, 8)]
        at += len(part)
    other = conversation(key, chunk=100).bytes
    for what, mutant in mutants(writer.bytes, mutant_count(0.4 / 8), seed, others=[other], lengths=lengths):
        inbound = Inbound()
        reader = new_reader(key, inbound)
        got = plain(reader.feed(mutant))
        inbound.validate()
        if key is not None:
            assert writer.sent[: len(got)] == got, what
        else:
            assert all(type(fields) is list and type(fields[0]) is int for fields, _ in got), what


@pytest.mark.parametrize("seed", range(2))
def test_mutants_after_a_resume(seed: int) -> None:
    """With a seal, damage on any of three connections in turn loses, doubles and changes nothing that is delivered."""
    for number, (what, mutant) in enumerate(mutants(conversation(KEY).bytes, mutant_count(0.04 / 2), seed)):
        writer = conversation(KEY)
        inbound = Inbound()
        got = plain(new_reader(KEY, inbound).feed(mutant))
        for connection in range(2):
            resumed = Writer(KEY)
            for sequence, kind, flags, header, bulk in writer.outbound.resume(inbound.received):
                resumed.write(kind, flags, header, bytes(bulk), sequence)
            data = resumed.bytes
            if not connection and data:
                _, data = next(mutants(data, 1, number))
            got += plain(new_reader(KEY, inbound).feed(data))
            inbound.validate()
        assert writer.sent == got, what
