"""The handshake between two well-meaning ends: keys, versions, refusals, pieces of any size, limits and deadlines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_async._core.handshake import Handshake
from monarch_async.errors import AuthenticationError, HandshakeError, InternalError, UsageError, VersionMismatch
from tests.core.handshake_pair import (
    ACCEPTOR,
    DIALER,
    KEY,
    LIMIT,
    NONCE_A,
    NONCE_D,
    OTHER_KEY,
    WELCOME,
    assert_agree,
    converse,
    instead,
    new_acceptor,
    new_dialer,
    prefixed,
    single_bytes,
    welcome,
    whole,
)


@pytest.mark.parametrize("chunks", [whole, single_bytes])
def test_both_ends_establish(chunks: Callable[[bytes], Iterator[bytes]]) -> None:
    """Two holders of the key learn each other's hello, share the welcome, and get one 32-byte key for each direction, in any chunking."""
    dialer, acceptor, flights = converse(new_dialer(), new_acceptor(), chunks=chunks)
    assert_agree(dialer, acceptor)
    assert dialer.done is not None
    assert 4 == len(flights)
    assert {32} == {len(dialer.done.send_key), len(dialer.done.receive_key)}
    assert dialer.done.send_key != dialer.done.receive_key


@given(st.data())
def test_any_chunking_gives_the_same_outcome(data: st.DataObject) -> None:
    """However the stream is cut, both ends establish, and with exactly the keys of the uncut run."""

    def cut(flight: bytes) -> Iterator[bytes]:
        cuts = sorted(data.draw(st.sets(st.integers(0, len(flight)))))
        for start, end in zip([0, *cuts], [*cuts, len(flight)], strict=True):
            yield flight[start:end]

    uncut, _, _ = converse(new_dialer(), new_acceptor())
    dialer, acceptor, _ = converse(new_dialer(), new_acceptor(), chunks=cut)
    assert_agree(dialer, acceptor)
    assert uncut.done == dialer.done


def test_keys_differ_between_connections() -> None:
    """Either side's fresh nonce alone changes both frame keys, so frames of one connection verify in no other."""
    runs = [(NONCE_D, NONCE_A), (b"d" * 32, NONCE_A), (NONCE_D, b"a" * 32)]
    keys = set()
    for nonce_d, nonce_a in runs:
        dialer, _, _ = converse(new_dialer(nonce=nonce_d), new_acceptor(nonce=nonce_a))
        assert dialer.done is not None
        keys |= {dialer.done.send_key, dialer.done.receive_key}
    assert 2 * len(runs) == len(keys)


@pytest.mark.parametrize("chunks", [whole, single_bytes])
def test_first_frames_are_kept_as_rest(chunks: Callable[[bytes], Iterator[bytes]]) -> None:
    """Frames on the heels of the welcome, however large, are not counted against the limit and no byte of them is lost."""
    frames = bytes(range(256)) * 64
    dialer, acceptor, _ = converse(
        new_dialer(), new_acceptor(), tamper=lambda flight, data: data + frames if flight == 3 else data, chunks=chunks
    )
    assert_agree(dialer, acceptor)
    assert dialer.done is not None
    assert frames == dialer.done.rest + dialer.after


def test_acceptor_keeps_rest_too() -> None:
    """The acceptor returns what came behind the proof instead of dropping it."""
    _, acceptor, _ = converse(new_dialer(), new_acceptor(), tamper=lambda flight, data: data + b"early" if flight == 2 else data)
    assert acceptor.done is not None
    assert b"early" == acceptor.done.rest


def test_wrong_key() -> None:
    """Different keys are an AuthenticationError on both ends; the acceptor shows no byte of its hello, and no key is in any text."""
    dialer, acceptor, flights = converse(new_dialer(KEY), new_acceptor(OTHER_KEY))
    for end in (dialer, acceptor):
        assert AuthenticationError is type(end.error)
        assert "different job keys" in str(end.error)
    assert "refused by the other side" in str(dialer.error)
    assert "same key file" in str(acceptor.error)
    sent = b"".join(flights)
    assert str(ACCEPTOR["host"]).encode() not in sent
    for key in (KEY, OTHER_KEY):
        assert key not in sent
        assert key.hex().encode() not in sent


def test_wrong_key_never_reaches_decide() -> None:
    """`decide` sees only hellos whose proof has verified: it is called once for a right proof and not at all for a wrong one."""
    seen: list[dict[str, Any]] = []

    def decide(hello: dict[str, Any]) -> dict[str, Any]:
        seen.append(hello)
        return WELCOME

    converse(new_dialer(OTHER_KEY), new_acceptor(KEY, decide=decide))
    assert [] == seen
    converse(new_dialer(KEY), new_acceptor(KEY, decide=decide))
    assert [DIALER] == seen


@pytest.mark.parametrize(("dials", "accepts"), [(1, 2), (2, 1), (7, 65535)])
def test_wrong_version(dials: int, accepts: int) -> None:
    """Different versions are a VersionMismatch on both ends, each of which names both versions and says what to install."""
    dialer, acceptor, _ = converse(new_dialer(version=dials), new_acceptor(version=accepts))
    for end, own, other in ((dialer, dials, accepts), (acceptor, accepts, dials)):
        assert VersionMismatch is type(end.error)
        assert f"speaks protocol version {other}, this side version {own}" in str(end.error)
        assert "same release" in str(end.error)


def test_decide_refuses() -> None:
    """A HandshakeError from `decide` ends both sides, and the dialer reads its text, no control characters, as the acceptor's words."""

    def decide(hello: dict[str, Any]) -> dict[str, Any]:
        raise HandshakeError(f"process {hello['wants']} has stopped\x1b[31m\nroot# with exit code 1")

    dialer, acceptor, _ = converse(new_dialer(), new_acceptor(decide=decide))
    assert HandshakeError is type(acceptor.error)
    assert HandshakeError is type(dialer.error)
    assert "refused by the other side, which says: “process acce9700000f has stopped [31m root# with exit code 1”" == str(dialer.error)


def test_long_refusal_is_cut() -> None:
    """A reason of any length and with any characters reaches the dialer, cut to fit the limit."""

    def decide(_: dict[str, Any]) -> dict[str, Any]:
        raise HandshakeError("ab\udcff" + "é" * 10_000)

    dialer, _, flights = converse(new_dialer(), new_acceptor(decide=decide))
    assert str(dialer.error).startswith("refused by the other side, which says: “ab?éé")
    assert len(flights[-1]) < 600


def test_bug_in_decide_is_not_hidden() -> None:
    """Another exception of `decide` comes out of `receive` as it is; the dialer is told of a refusal, but no text of the exception."""

    def decide(hello: dict[str, Any]) -> dict[str, Any]:
        return {"received": hello["no such secret"]}

    dialer, acceptor = new_dialer(), new_acceptor(decide=decide)
    proof = dialer.receive(acceptor.receive(dialer.start(), 100.0).send, 100.0).send
    with pytest.raises(KeyError, match="no such secret"):
        acceptor.receive(proof, 100.0)
    assert b"secret" not in acceptor.refusal
    with pytest.raises(HandshakeError, match=r"refused by the other side.*its own"):
        dialer.receive(acceptor.refusal, 100.0)


@pytest.mark.parametrize("flight", [0, 1, 2, 3])
def test_truncated(flight: int) -> None:
    """A stream that ends anywhere inside a message is a HandshakeError that says what was still missing and how much had come."""
    missing = ["its first message", "its challenge", "its proof of the job key", "its proof of the job key and its welcome"][flight]
    flights = converse(new_dialer(), new_acceptor()).flights
    earlier = len(flights[flight - 2]) if flight >= 2 else 0
    for size in range(len(flights[flight])):
        talk = converse(new_dialer(), new_acceptor(), tamper=instead(flight, flights[flight][:size]))
        receiver = talk.dialer if flight % 2 else talk.acceptor
        assert HandshakeError is type(receiver.error)
        expected = f"the other side closed the connection before {missing} ({earlier + size} bytes received in all)"
        assert expected == str(receiver.error)


def test_oversize_is_refused_at_its_announcement() -> None:
    """A message that would go past the limit is refused when its length is read, with the figures and the option, before it is held."""
    acceptor = new_acceptor()
    with pytest.raises(HandshakeError, match=r"a message of 4091 bytes after 6 goes past the 4096 bytes \(option handshake_bytes\)"):
        acceptor.receive(prefixed() + (4089).to_bytes(2, "big"), 100.0)


def test_limit_is_over_all_messages() -> None:
    """The limit holds for all that one side sends: what fits alone is refused behind what came before, and exactly the limit passes."""
    flights = converse(new_dialer(), new_acceptor()).flights
    exact = len(flights[0]) + len(flights[2])
    dialer, acceptor, _ = converse(new_dialer(), new_acceptor(limit=exact))
    assert_agree(dialer, acceptor)
    _, acceptor, _ = converse(new_dialer(), new_acceptor(limit=exact - 1))
    assert f"goes past the {exact - 1} bytes" in str(acceptor.error)


def test_slow_peer() -> None:
    """A peer that keeps sending single bytes is cut off at the deadline, with the figures; the bytes that came late count for nothing."""
    acceptor = new_acceptor()
    assert 105.0 == acceptor.deadline
    opening = new_dialer().start()
    for index in range(5):
        acceptor.receive(opening[index : index + 1], 100.0 + 0.9 * index)
    with pytest.raises(
        HandshakeError, match=r"no handshake within 5 s: after 5\.2 s still without its first message \(5 bytes received in all\)"
    ):
        acceptor.receive(opening[5:], 105.2)


def test_expire_tells_the_other_side() -> None:
    """When time is up for the acceptor, the dialer that was waiting reads why, with the figures."""
    dialer, acceptor = new_dialer(), new_acceptor(timeout=0.5)
    challenge = acceptor.receive(dialer.start(), 100.0).send
    with pytest.raises(HandshakeError, match=r"no handshake within 0\.5 s"):
        acceptor.expire(100.5)
    with pytest.raises(
        HandshakeError, match=r"refused by the other side.*no handshake within 0\.5 s: after 0\.5 s still without its proof"
    ):
        dialer.receive(challenge + acceptor.refusal, 100.4)


def test_over_is_over() -> None:
    """Neither an end that is through nor one that has failed takes more bytes or expires: that is the driver's error, and it is told so."""
    dialer, acceptor, _ = converse(new_dialer(), new_acceptor())
    failed, _, _ = converse(new_dialer(), new_acceptor(OTHER_KEY))
    for end in (dialer, acceptor, failed):
        with pytest.raises(InternalError, match="over"):
            end.handshake.receive(b"frames", 100.0)
        with pytest.raises(InternalError, match="over"):
            end.handshake.expire(200.0)


@pytest.mark.parametrize(
    ("hello", "text"),
    [
        ({"name": "x" * 4030}, r"would make this side's handshake 41\d\d bytes long, 4096 may be \(option handshake_bytes\)"),
        ({"name": object()}, "plain values"),
        ({"ranks": list(range(65))}, "exceeds max_array_len"),
        ({"at": msgpack.Timestamp(1)}, "max_ext_len"),
        ({1: "one"}, "strict_map_key"),
    ],
)
def test_hello_that_can_not_be_sent(hello: dict[str, Any], text: str) -> None:
    """A hello that the other side would refuse to read is the caller's UsageError at once, on both sides, not the peer's puzzle later."""
    with pytest.raises(UsageError, match=text):
        Handshake.dial(KEY, hello, NONCE_D, 0.0)
    with pytest.raises(UsageError, match=text):
        Handshake.accept(KEY, hello, NONCE_A, 0.0, welcome)


def test_welcome_that_does_not_fit() -> None:
    """A welcome past the limit is the acceptor's own UsageError; the dialer is refused instead of being sent what it may not read."""
    dialer, acceptor = new_dialer(), new_acceptor(decide=lambda _: {"text": "x" * LIMIT})
    proof = dialer.receive(acceptor.receive(dialer.start(), 100.0).send, 100.0).send
    with pytest.raises(UsageError, match="handshake_bytes"):
        acceptor.receive(proof, 100.0)
    with pytest.raises(HandshakeError, match="refused"):
        dialer.receive(acceptor.refusal, 100.0)


def test_short_secrets() -> None:
    """A key under 32 bytes or a nonce of another length never gets as far as a connection."""
    with pytest.raises(UsageError, match="at least 32 bytes, this one has 31"):
        new_dialer(key=b"k" * 31)
    with pytest.raises(UsageError, match="32 random bytes, this one has 16"):
        new_acceptor(nonce=b"n" * 16)
