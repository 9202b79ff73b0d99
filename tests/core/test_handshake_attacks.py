"""The handshake against replay, mirrors, changes in the middle, garbage, and pickles."""

from __future__ import annotations

import hashlib
import hmac
import subprocess
import sys
import textwrap
from pathlib import Path

import msgpack
import pytest

from monarch_async._core.handshake import MAGIC, Established
from monarch_async.errors import AuthenticationError, HandshakeError
from tests.core.handshake_pair import (
    ACCEPTOR,
    DIALER,
    KEY,
    NONCE_A,
    WELCOME,
    End,
    converse,
    instead,
    new_acceptor,
    new_dialer,
    prefixed,
    single_bytes,
)
from tests.core.mutate import mutant_count, mutants


def test_version_rewritten_in_the_middle() -> None:
    """Two versions made to believe in one common version by someone in the middle still don't authenticate: the version is in the MAC."""

    def rewrite(flight: int, data: bytes) -> bytes:
        return MAGIC + (2 if flight == 0 else 1).to_bytes(2, "big") + data[6:] if flight < 2 else data

    dialer, acceptor, _ = converse(new_dialer(version=1), new_acceptor(version=2), tamper=rewrite)
    assert (None, None) == (dialer.done, acceptor.done)
    assert AuthenticationError is type(acceptor.error)


def test_replay_against_a_new_acceptor() -> None:
    """Everything a dialer once sent, sent again by someone without the key, fails at an acceptor with a fresh nonce."""
    flights = converse(new_dialer(), new_acceptor()).flights
    acceptor = new_acceptor(nonce=b"n" * 32)
    acceptor.receive(flights[0], 100.0)
    with pytest.raises(AuthenticationError):
        acceptor.receive(flights[2], 100.0)


def test_replay_against_a_new_dialer() -> None:
    """Everything an acceptor once sent fails at a dialer with a fresh nonce, who tells whoever that is nothing more."""
    flights = converse(new_dialer(), new_acceptor()).flights
    dialer = new_dialer(nonce=b"n" * 32)
    dialer.receive(flights[1], 100.0)
    with pytest.raises(AuthenticationError):
        dialer.receive(flights[3], 100.0)
    assert b"" == dialer.refusal


def test_replay_in_one_piece() -> None:
    """The whole recorded stream at once, before the challenge could have been read, fails; the reason follows the challenge in order."""
    flights = converse(new_dialer(), new_acceptor()).flights
    acceptor = new_acceptor(nonce=b"n" * 32)
    with pytest.raises(AuthenticationError):
        acceptor.receive(flights[0] + flights[2], 100.0)
    assert acceptor.refusal.startswith(prefixed(b"\x02" + b"n" * 32))


@pytest.mark.parametrize("kind", [b"", b"\x02"], ids=["as it is", "as a challenge"])
def test_mirror_of_the_first_message(kind: bytes) -> None:
    """A peer that sends the dialer's own bytes back, even relabelled, is refused before the dialer proves anything."""
    dialer = new_dialer()
    opening = dialer.start()
    mirrored = opening if not kind else opening[:8] + kind + opening[9:]
    with pytest.raises(HandshakeError, match="mirror" if kind else "in place of its challenge"):
        dialer.receive(mirrored, 100.0)


def test_mirror_of_the_proof() -> None:
    """The dialer's own MAC, sent back in a welcome, is no proof of the acceptor: the roles differ even where the bytes are alike."""
    dialer = new_dialer()
    dialer.start()
    proof = dialer.receive(prefixed(b"\x02" + NONCE_A), 100.0).send
    content = b"\x92" + 2 * msgpack.packb(WELCOME)
    head = (1 + len(content) + 32).to_bytes(2, "big") + b"\x04"
    with pytest.raises(AuthenticationError):
        dialer.receive(head + content + proof[-32:], 100.0)


@pytest.mark.parametrize("role", [b"dialer", b"acceptor"])
def test_role_in_the_mac(role: bytes) -> None:
    """A welcome MACed with the right key over the right transcript passes in the acceptor's role only, not in the dialer's.

    This computes MAC and frame keys from their definitions, so it also pins the format of version 7, were it the same.
    """
    dialer = new_dialer(version=7)
    challenge = prefixed(b"\x02" + NONCE_A, version=7)
    stream = dialer.start() + challenge + dialer.receive(challenge, 100.0).send
    content = b"\x92" + msgpack.packb(ACCEPTOR) + msgpack.packb(WELCOME)
    content = (1 + len(content) + 32).to_bytes(2, "big") + b"\x04" + content
    message = b"monarch_async proof of " + role + b"\0" + b"\0\x07" + hashlib.sha256(stream + content).digest()
    last = content + hmac.digest(KEY, message, "sha256")
    if role == b"dialer":
        with pytest.raises(AuthenticationError):
            dialer.receive(last, 100.0)
    else:
        secret = hmac.digest(KEY, b"monarch_async session\0" + b"\0\x07" + hashlib.sha256(stream + last).digest(), "sha256")
        send_key = hmac.digest(secret, b"frames of dialer\0", "sha256")
        receive_key = hmac.digest(secret, b"frames of acceptor\0", "sha256")
        assert Established(ACCEPTOR, WELCOME, send_key, receive_key, b"") == dialer.receive(last, 100.0).done


def assert_safe(what: str, dialer: End, acceptor: End) -> None:
    """Whatever was done in the middle: each end is over, and who is through has the true view of the other."""
    assert dialer.over, what
    assert acceptor.over, what
    if acceptor.done is not None:
        assert DIALER == acceptor.done.peer, what
        assert WELCOME == acceptor.done.welcome, what
    if dialer.done is not None:
        assert acceptor.done is not None, what
        assert acceptor.done._replace(peer=ACCEPTOR, rest=b"") == Established(
            dialer.done.peer, dialer.done.welcome, dialer.done.receive_key, dialer.done.send_key, b""
        ), what


@pytest.mark.parametrize("flight", [0, 1, 2, 3])
def test_every_bit_flipped_in_the_middle(flight: int) -> None:
    """Each single bit of each message, flipped on its way, stops whoever receives it or its consequences: never are both through."""
    flights = converse(new_dialer(), new_acceptor()).flights
    for index in range(len(flights[flight])):
        for bit in range(8):
            flipped = bytearray(flights[flight])
            flipped[index] ^= 1 << bit
            dialer, acceptor, _ = converse(new_dialer(), new_acceptor(), tamper=instead(flight, bytes(flipped)))
            what = f"flight {flight}, byte {index}, bit {bit}"
            assert_safe(what, dialer, acceptor)
            assert dialer.done is None, what
            assert flight == 3 or acceptor.done is None, what


@pytest.mark.parametrize("flight", [0, 1, 2, 3])
def test_mutants_in_the_middle(flight: int) -> None:
    """Mutated messages give a HandshakeError or the true view, never another exception, an end that hangs, or two views that differ."""
    flights = converse(new_dialer(), new_acceptor()).flights
    foreign = converse(new_dialer(nonce=b"d" * 32), new_acceptor(nonce=b"a" * 32)).flights
    lengths = [(6, 2)] if flight < 2 else [(0, 2)]
    tried = 0
    for what, mutant in mutants(flights[flight], mutant_count(0.5 / 4), seed=flight, others=flights + foreign, lengths=lengths):
        dialer, acceptor, _ = converse(new_dialer(), new_acceptor(), tamper=instead(flight, mutant))
        assert_safe(f"flight {flight}, {what}: {mutant.hex()}", dialer, acceptor)
        tried += 1
    assert mutant_count(0.5 / 4) == tried


def test_mutants_of_the_length_limits() -> None:
    """Mutated streams read byte by byte by one end alone never make it hold or accept more than the limit, nor authenticate."""
    stream = prefixed(b"\x01" + b"d" * 32, b"\x03" + msgpack.packb(DIALER) + b"m" * 32)
    for what, mutant in mutants(stream, mutant_count(0.01), seed=9, lengths=[(6, 2), (41, 2)]):
        end = End(new_acceptor(limit=200))
        taken = 0
        for byte in single_bytes(mutant):
            end.receive(byte)
            taken += not end.over
        end.receive(b"")
        assert end.error is not None, what
        assert taken < 200, what


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 40, b"\xff" * 40, b"SSH-2.0-OpenSSH_9.6\r\n", b"MARX", b"\x16\x03\x01\x02\0\x01"],
    ids=repr,
)
def test_stranger(garbage: bytes) -> None:
    """A peer of another protocol is told apart by its first bytes, which the error shows."""
    with pytest.raises(HandshakeError, match="no monarch_async process") as caught:
        new_acceptor().receive(garbage, 100.0)
    assert repr(garbage[:16]) in str(caught.value)


@pytest.mark.parametrize(
    ("messages", "found"),
    [
        ([b""], "kind None"),
        ([b"\x09" + b"n" * 32], "kind 9"),
        ([b"\x03" + b"n" * 64], "kind 3"),
        ([b"\x01" + b"n" * 31], "a nonce of 31 bytes"),
        ([b"\x01"], "a nonce of 0 bytes"),
        ([b"\x01" + b"n" * 32, b"\x01" + b"n" * 32], "kind 1"),
        ([b"\x01" + b"n" * 32, b"\x03" + b"m" * 31], "a proof of 34 bytes"),
        ([b"\x05" + b"\x91" * 2000], "no msgpack"),
        ([b"\x05\xdd\xff\xff\xff\xff"], "no msgpack"),
        ([b"\x05\xc7\x04\x05abcd"], "no msgpack"),
        ([b"\x05\x92\xa1x\xc0"], "a refusal without a reason"),
        ([b"\x05\x01"], "a refusal without a reason"),
    ],
)
def test_garbage(messages: list[bytes], found: str) -> None:
    """Bytes of our protocol's shape without its sense end the handshake with an error that names what was found and what was due."""
    acceptor = new_acceptor()
    with pytest.raises(HandshakeError, match=r"garbage in the handshake: .* in place of its .* bytes received in all") as caught:
        acceptor.receive(prefixed(*messages), 100.0)
    assert found in str(caught.value)
    assert acceptor.refusal


def test_forged_refusal() -> None:
    """A refusal of an unknown code and kind of text still ends as a plain HandshakeError without control characters."""
    with pytest.raises(HandshakeError) as caught:
        new_dialer().receive(prefixed(b"\x05" + msgpack.packb(["new code", "\x1b]0;owned\x07 bye"])), 100.0)
    assert HandshakeError is type(caught.value)
    assert str(caught.value).isprintable()


UNPICKLE_PROBE = """
    import os, pickle, sys
    import msgpack
    from monarch_async._core.handshake import MAGIC, Handshake
    from monarch_async.errors import HandshakeError

    found = []
    sys.addaudithook(lambda event, args: found.append(args) if event == "pickle.find_class" else None)
    target = sys.argv[1]

    class Bomb:
        def __reduce__(self):
            return (open, (target, "w"))

    bomb = pickle.dumps(Bomb())
    key = b"k" * 32
    decide = lambda hello: {"bomb": bomb}
    opening = MAGIC + b"\\0\\1" + b"\\0\\x21\\1" + b"d" * 32

    def message(kind, payload):
        return (1 + len(payload)).to_bytes(2, "big") + bytes((kind,)) + payload

    streams = [bomb, MAGIC + bomb, MAGIC + b"\\0\\1" + bomb]
    streams += [MAGIC + b"\\0\\1" + message(kind, bomb) for kind in range(7)]
    streams += [opening + message(3, payload + b"m" * 32) for payload in (bomb, msgpack.packb({"bomb": bomb}))]
    streams += [MAGIC + b"\\0\\1" + message(5, msgpack.packb(msgpack.ExtType(code, bomb))) for code in range(128)]
    refused = 0
    for stream in streams:
        acceptor = Handshake.accept(key, {}, b"a" * 32, 0.0, decide)
        try:
            acceptor.receive(stream, 0.0)
            acceptor.receive(b"", 0.0)
        except HandshakeError:
            refused += 1
    assert refused == len(streams)

    dialer = Handshake.dial(key, {"bomb": bomb}, b"d" * 32, 0.0)
    acceptor = Handshake.accept(key, {"bomb": bomb}, b"a" * 32, 0.0, decide)
    proof = dialer.receive(acceptor.receive(dialer.start(), 0.0).send, 0.0).send
    step = acceptor.receive(proof, 0.0)
    done = dialer.receive(step.send, 0.0).done
    assert step.done.peer == done.peer == done.welcome == {"bomb": bomb}

    assert found == [], found
    assert not os.path.exists(target)
    pickle.loads(bomb)
    assert len(found) == 1 and os.path.exists(target), "the probe itself is blind"
    print("unpickled nothing of", len(streams), "streams")
"""


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    """A pickle that would create a file, sent as or inside any message, by a stranger or a holder of the key, is never loaded.

    The interpreter's own audit events say so, in a process of its own; at the end the probe loads the pickle itself, to show that it
    would have seen it.
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(UNPICKLE_PROBE), str(tmp_path / "created")], capture_output=True, text=True, timeout=60
    )
    assert (0, "") == (run.returncode, run.stderr)
    assert "unpickled nothing of 140 streams" == run.stdout.strip()
