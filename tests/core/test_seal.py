"""Seals hold, by either digest of bulks; which one, both sides agree on; no key of Poly1305 is used twice."""

from __future__ import annotations

from typing import Any

import pytest

from monarch_async._core import seal as seals
from monarch_async._core.handshake import Handshake
from monarch_async._core.poly1305 import Poly1305
from monarch_async._core.seal import POLY1305, SHA256, Seal, agreed, offer
from monarch_async.errors import AuthenticationError, ProtocolError
from tests.core.handshake_pair import KEY, NONCE_A, NONCE_D, converse, new_acceptor, new_dialer, welcome

DIGESTS = pytest.mark.parametrize("digest", [SHA256, POLY1305])


def digest_of(seal: Seal, bulk: bytes) -> bytes:
    taken = seal.begin_bulk()
    taken.update(bulk)
    return taken.digest()


@DIGESTS
def test_seals(digest: str) -> None:
    """A seal is right for its frame, with its bulk, at its place, under its key, and for nothing else."""

    def fresh(skip: int, other: bytes = KEY) -> Seal:
        seal = Seal(other, digest)
        for _ in range(skip):
            seal.sign(b"")
        return seal

    made = Seal(KEY, digest)
    first, second, third = made.sign(b"head"), made.sign(b"head"), made.sign_bulk(b"head", b"bulk")
    fresh(0).check(first, b"head")
    fresh(2).check(third, b"head", digest_of(fresh(2), b"bulk"))
    assert len({first, second, third}) == 3
    for seal, skip, head, other in [
        (first, 1, b"head", KEY),
        (second, 0, b"head", KEY),
        (first, 0, b"heat", KEY),
        (first, 0, b"hea", KEY),
        (first, 0, b"head", b"K" * 32),
        (first[:-1], 0, b"head", KEY),
        (third, 2, b"head", KEY),
    ]:
        with pytest.raises(ProtocolError, match="seal"):
            fresh(skip, other).check(seal, head)
    for bulk in (b"bull", b"bul", b"bulk\0", b""):
        with pytest.raises(ProtocolError, match="seal"):
            fresh(2).check(third, b"head", digest_of(fresh(2), bulk))
    with pytest.raises(ProtocolError, match="seal"):
        fresh(2).check(third, b"head", digest_of(fresh(1), b"bulk") if digest == POLY1305 else b"")


def test_the_digests_differ() -> None:
    """A seal by one digest is none by the other: sides that did not agree would notice."""
    assert Seal(KEY, SHA256).sign_bulk(b"head", b"bulk") != Seal(KEY, POLY1305).sign_bulk(b"head", b"bulk")
    assert Seal(KEY, SHA256).sign(b"head") == Seal(KEY, POLY1305).sign(b"head")


def test_no_one_time_key_is_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every bulk of both directions of a connection, and of the one after it which sends the same again, has a key of its own."""
    keys: list[bytes] = []

    class Noting(Poly1305):
        def __init__(self, key: bytes) -> None:
            keys.append(key)
            super().__init__(key)

    monkeypatch.setattr(seals, "Poly1305", Noting)
    for nonce in (NONCE_A, NONCE_A[::-1]):
        done = converse(new_dialer(), new_acceptor(nonce=nonce)).dialer.done
        assert done is not None
        for key in (done.send_key, done.receive_key):
            seal = Seal(key, POLY1305)
            for _ in range(3):
                seal.sign_bulk(b"head", b"the same again")
                seal.sign(b"a frame without a bulk")
    assert 2 * 2 * 3 == len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("hello", "expected"),
    [
        ({"digests": [POLY1305, SHA256]}, POLY1305),
        ({"digests": [SHA256]}, SHA256),
        ({"digests": ["of a later release", SHA256]}, SHA256),
        ({"digests": POLY1305}, SHA256),
        ({}, SHA256),
    ],
)
def test_agreement(hello: dict[str, Any], expected: str) -> None:
    """Poly1305 only if the peer says it has it, in the form in which that is said."""
    assert expected == agreed(hello)


def test_agreement_without_poly1305(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does not have it does not offer it, and so both sides come to SHA-256."""
    able = offer()
    monkeypatch.setattr(seals, "available", lambda: False)
    unable = offer()
    assert {"digests": [SHA256]} == unable
    assert SHA256 == agreed(able)
    monkeypatch.undo()
    assert (SHA256, POLY1305) == (agreed(unable), agreed(able))


@pytest.mark.parametrize("flight", [None, 2, 3], ids=["nobody", "from the dialer", "from the acceptor"])
def test_nobody_talks_the_sides_down(flight: int | None) -> None:
    """The offers stand in the hellos: who spoils Poly1305 in either one breaks the proof."""

    def tamper(number: int, data: bytes) -> bytes:
        spoiled = data.replace(b"poly1305", b"poly1306")
        if number != flight:
            return data
        assert spoiled != data
        return spoiled

    hello = {"name": "trainers"} | offer()
    dialer = Handshake.dial(KEY, hello, NONCE_D, 100.0)
    talk = converse(dialer, Handshake.accept(KEY, hello, NONCE_A, 100.0, welcome), tamper=tamper)
    if flight is None:
        assert [POLY1305, POLY1305] == [agreed(end.done.peer) for end in (talk.dialer, talk.acceptor) if end.done is not None]
    else:
        assert isinstance((talk.acceptor if flight == 2 else talk.dialer).error, AuthenticationError)
