"""Mutual authentication of a connection by a shared job key: bytes in, bytes out, no socket, no clock, no randomness.

Four messages, two each way. Every message is ``u16 length, u8 kind, payload``; the first one of each side has ``MAGIC, u16 version``
before it, the six bytes that stay the same in every version, so that strangers and other versions are told apart at once.

    OPENING    dialer →    nonce
    CHALLENGE  acceptor →  nonce
    PROOF      dialer →    msgpack(hello), MAC
    WELCOME    acceptor →  msgpack([hello, welcome]), MAC
    REFUSAL    either →    msgpack([code, reason]), in place of the message that is due; then the connection closes

A MAC is HMAC-SHA256 with the job key over the sender's role, the protocol version and the SHA-256 of *every raw byte* that has passed in
either direction, its own message up to the MAC included. So no byte can be changed, left out or re-encoded, a recorded transcript is worth
nothing against a fresh nonce, and a message sent back to its sender proves nothing (other role; its own nonce is refused too).

*The dialer proves itself first.* The acceptor is the side that strangers can reach at will: before a proof has verified it gives away its
version and a random nonce, and decodes no msgpack but a refusal. The dialer shows its hello and one MAC to whoever answers at an address
that it chose itself, which takes an attacker inside the network path; a MAC under 256 random bits is no use to him. The price is that the
acceptor is through one message before the dialer: if the WELCOME is lost or changed, it sees a connection that ends without a frame.

Rules:

* One key per job: whoever holds it is the job. Which of its processes a peer is, its hello says, and is believed.
* Nonces come from the caller, fresh for each connection: a nonce used twice makes a replay possible.
* A refusal is not authenticated (there may be no common key): who can write on the connection can end it, with a text that is shown
  as the other side's words, printable characters only. Reasons hold figures and versions, nothing derived from the key.
* What the sides agree on by what both hellos say, as how bulks are digested (`seal`), nobody in between can change.
* `Established` has one key per direction, for the MACs of frames. Nothing is encrypted and there is no forward secrecy: that is TLS's work.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable, Mapping
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple, NoReturn

import msgpack

from monarch_async.errors import AuthenticationError, HandshakeError, InternalError, UsageError, VersionMismatch

__all__ = ["KEY_BYTES", "MAGIC", "NONCE_BYTES", "PROTOCOL_VERSION", "Established", "Handshake", "Step"]

MAGIC = b"MARH"
PROTOCOL_VERSION: int = 1
KEY_BYTES = 32
"""The least length of a job key."""
NONCE_BYTES = 32

Map = Mapping[str, Any]
Decide = Callable[[dict[str, Any]], Map]

_PREFIX = struct.Struct(">4sH")
_HEAD = struct.Struct(">HB")
_LENGTH_BYTES = 2
_MAC_BYTES = hashlib.sha256().digest_size
_REASON_BYTES = 500
# Small enough that nested headers announcing full-size arrays, 3 bytes each, reserve less than 1 MiB.
_LIMITS = {"max_str_len": 4096, "max_bin_len": 4096, "max_array_len": 64, "max_map_len": 64, "max_ext_len": 0}


class _Kind(IntEnum):
    OPENING = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REFUSAL = 5


_WAITING = {
    _Kind.OPENING: "its first message",
    _Kind.CHALLENGE: "its challenge",
    _Kind.PROOF: "its proof of the job key",
    _Kind.WELCOME: "its proof of the job key and its welcome",
}
_CODES: dict[str, type[HandshakeError]] = {"key": AuthenticationError, "version": VersionMismatch, "refused": HandshakeError}


class Established(NamedTuple):
    """Both sides hold the key. `peer` is the other side's hello; `welcome` is what the acceptor decided, the same on both sides.

    `send_key` and `receive_key` (32 bytes) are for the MACs of frames: one side's `send_key` is the other's `receive_key`.
    `rest` are the first bytes of frames that arrived behind the handshake.
    """

    peer: dict[str, Any]
    welcome: dict[str, Any]
    send_key: bytes
    receive_key: bytes
    rest: bytes


class Step(NamedTuple):
    """What follows from bytes received: `send` to the other side (may be empty); `done` once authenticated."""

    send: bytes
    done: Established | None = None


class Handshake:
    """One side of one handshake; made by `dial` or `accept`, used once.

    The driver writes `start()`, then gives what it reads to `receive` and writes each `Step.send`, until `Step.done`; it calls `expire`
    when its timer for `deadline` fires. When any of them raises, it writes `refusal` (as far as the socket takes it) and closes.
    """

    def __init__(
        self, key: bytes, hello: Map, nonce: bytes, now: float, decide: Decide | None, timeout: float, limit: int, version: int
    ) -> None:
        if len(key) < KEY_BYTES:
            raise UsageError(f"a job key has at least {KEY_BYTES} bytes, this one has {len(key)}: make one of {KEY_BYTES} random bytes")
        if len(nonce) != NONCE_BYTES:
            raise UsageError(f"a nonce has {NONCE_BYTES} random bytes, this one has {len(nonce)}")
        self.deadline = now + timeout
        self.refusal = b""  # what to write before closing, once a method has raised; never anything secret
        self._started_at = now
        self._timeout = timeout
        self._limit = limit
        self._version = version
        self._key = key
        self._nonce = nonce
        self._hello = _encode(hello, "the hello")
        self._check_size(_PREFIX.size + 2 * _HEAD.size + NONCE_BYTES + len(self._hello) + _MAC_BYTES, "the hello")
        self._roles = (b"dialer", b"acceptor") if decide is None else (b"acceptor", b"dialer")  # own, other
        self._awaits: _Kind | None = _Kind.CHALLENGE if decide is None else _Kind.OPENING  # None: over, well or badly
        self._handlers: dict[_Kind, Callable[[bytes], Established | None]]
        if decide is None:
            self._handlers = {_Kind.CHALLENGE: self._on_challenge, _Kind.WELCOME: self._on_welcome}
        else:
            self._handlers = {_Kind.OPENING: self._on_opening, _Kind.PROOF: partial(self._on_proof, decide)}
        self._transcript = hashlib.sha256()  # every byte of both directions, in the order in which they had to pass
        self._unread = bytearray()
        self._accepted = 0  # bytes of the peer that were taken from `_unread`; at most `_limit`
        self._unsent = bytearray()  # written by handlers, not yet given to the driver
        self._sent = 0
        if decide is None:
            self._send(_Kind.OPENING, nonce)

    @classmethod
    def dial(
        cls, key: bytes, hello: Map, nonce: bytes, now: float, *, timeout: float = 5.0, limit: int = 4096, version: int = PROTOCOL_VERSION
    ) -> Handshake:
        """The side that connected. `nonce` is 32 fresh random bytes; `now` and `timeout` in seconds; `limit` in bytes from the peer.

        Raises `UsageError` for a short key or nonce, and for a `hello` that msgpack can't carry or that doesn't fit in `limit`.
        """
        return cls(key, hello, nonce, now, None, timeout, limit, version)

    @classmethod
    def accept(
        cls,
        key: bytes,
        hello: Map,
        nonce: bytes,
        now: float,
        decide: Decide,
        *,
        timeout: float = 5.0,
        limit: int = 4096,
        version: int = PROTOCOL_VERSION,
    ) -> Handshake:
        """The side that was connected to; arguments and errors as for `dial`.

        `decide(peer hello)` is called once, after the dialer's proof has verified, and returns the welcome. It may raise `HandshakeError`:
        `receive` raises that, and the dialer is told its text.
        """
        return cls(key, hello, nonce, now, decide, timeout, limit, version)

    def start(self) -> bytes:
        """The first bytes to send; empty for the acceptor, who waits to be spoken to."""
        return self._take_unsent()

    def receive(self, data: bytes, now: float) -> Step:
        """Takes what was read, any number of bytes; ``b""`` is the end of the stream.

        Raises:
            AuthenticationError: the other side holds another key, or bytes were changed on the way.
            VersionMismatch: it speaks another version.
            HandshakeError: it is no peer of ours, said too much, was too slow, went away, or refused; or `decide` refused it.
            UsageError: the welcome doesn't fit in `limit`.
        """
        self._awaited()
        if now >= self.deadline:
            self.expire(now)
        if not data:
            self._fail(HandshakeError(f"the other side closed the connection before {self._progress()}"))
        self._unread += data
        while (message := self._next_message()) is not None:
            done = self._handlers[self._awaited()](message)
            if done is not None:
                self._awaits = None
                return Step(self._take_unsent(), done)
        return Step(self._take_unsent())

    def expire(self, now: float) -> NoReturn:
        """Raises the `HandshakeError` that says what was missing when time was up. For the driver's timer, once `deadline` has come."""
        took = now - self._started_at
        self._fail(HandshakeError(f"no handshake within {self._timeout:g} s: after {took:.1f} s still without {self._progress()}"))

    def _next_message(self) -> bytes | None:
        """Takes the message that is due from the unread bytes, raw, or `None` while it is incomplete."""
        if self._accepted == 0:
            if not MAGIC.startswith(self._unread[: len(MAGIC)]):
                self._fail(HandshakeError(f"no monarch_async process: the first bytes received are {bytes(self._unread[:16])!r}"))
            if len(self._unread) < _PREFIX.size:
                return None
            version = _PREFIX.unpack_from(self._unread)[1]
            if version != self._version:
                text = f"the other side speaks protocol version {version}, this side version {self._version}"
                self._fail(VersionMismatch(f"{text}: install the same release of monarch_async on all hosts of the job"))
            self._transcript.update(self._take_unread(_PREFIX.size))
        if len(self._unread) < _LENGTH_BYTES:
            return None
        size = _LENGTH_BYTES + int.from_bytes(self._unread[:_LENGTH_BYTES], "big")
        if self._accepted + size > self._limit:
            text = f"a message of {size} bytes after {self._accepted} goes past the {self._limit} bytes (option handshake_bytes)"
            self._fail(HandshakeError(f"{text} that a side may send before it is authenticated"))
        if len(self._unread) < size:
            return None
        message = self._take_unread(size)
        kind = message[_LENGTH_BYTES] if size > _LENGTH_BYTES else None
        if kind == _Kind.REFUSAL:
            self._on_refusal(message)
        if kind != self._awaits:
            self._malformed(f"kind {kind}")
        return message

    def _on_opening(self, message: bytes) -> None:
        self._take_nonce(message)
        self._send(_Kind.CHALLENGE, self._nonce)
        self._awaits = _Kind.PROOF

    def _on_challenge(self, message: bytes) -> None:
        self._take_nonce(message)
        self._send_proof(_Kind.PROOF, self._hello)
        self._awaits = _Kind.WELCOME

    def _on_proof(self, decide: Decide, message: bytes) -> Established:
        peer = self._decode(self._verify(message))
        if not isinstance(peer, dict):
            self._malformed("no map as hello")
        try:
            welcome = _encode(decide(peer), "the welcome")
            payload = b"\x92" + self._hello + welcome
            self._check_size(self._sent + _HEAD.size + len(payload) + _MAC_BYTES, "hello and welcome")
        except HandshakeError as error:
            self._fail(error)
        except Exception:
            self._refuse("refused", "an error of its own, see its output")
            raise
        self._send_proof(_Kind.WELCOME, payload)
        return self._established(peer, _unpack(welcome))

    def _on_welcome(self, message: bytes) -> Established:
        # Nothing is told to the other side from here on: if it is genuine it takes what we send for frames.
        answer = self._decode(self._verify(message))
        if not (isinstance(answer, list) and len(answer) == 2 and all(isinstance(part, dict) for part in answer)):
            self._malformed("no pair of maps as hello and welcome")
        return self._established(*answer)

    def _on_refusal(self, message: bytes) -> NoReturn:
        content = self._decode(message[_HEAD.size :])
        if not (isinstance(content, list) and len(content) == 2 and all(isinstance(part, str) for part in content)):
            self._malformed("a refusal without a reason")
        self._awaits = None
        text = "".join(char if char.isprintable() else " " for char in content[1][:_REASON_BYTES])
        raise _CODES.get(content[0], HandshakeError)(f"refused by the other side, which says: “{text}”")

    def _take_nonce(self, message: bytes) -> None:
        nonce = message[_HEAD.size :]
        if len(nonce) != NONCE_BYTES:
            self._malformed(f"a nonce of {len(nonce)} bytes")
        if nonce == self._nonce:
            self._fail(AuthenticationError("the other side sends back what we sent: it is a mirror, not a process of this job"))
        self._transcript.update(message)

    def _verify(self, message: bytes) -> bytes:
        """The payload of a message that ends in the other role's MAC; raises `AuthenticationError` where that is wrong."""
        if len(message) < _HEAD.size + _MAC_BYTES:
            self._malformed(f"a proof of {len(message)} bytes")
        content, mac = message[:-_MAC_BYTES], message[-_MAC_BYTES:]
        self._transcript.update(content)
        if not hmac.compare_digest(mac, self._mac(self._roles[1])):
            text = "wrong proof: this side and the other hold different job keys, or bytes were changed between them"
            self._fail(AuthenticationError(f"{text}; start both with the same key file"))
        self._transcript.update(mac)
        return content[_HEAD.size :]

    def _mac(self, role: bytes) -> bytes:
        return _hmac(self._key, b"monarch_async proof of " + role, self._version.to_bytes(2, "big"), self._transcript.digest())

    def _established(self, peer: dict[str, Any], welcome: dict[str, Any]) -> Established:
        secret = _hmac(self._key, b"monarch_async session", self._version.to_bytes(2, "big"), self._transcript.digest())
        send_key, receive_key = (_hmac(secret, b"frames of " + role) for role in self._roles)
        return Established(peer, welcome, send_key, receive_key, bytes(self._unread))

    def _send(self, kind: _Kind, payload: bytes) -> None:
        self._write(_HEAD.pack(1 + len(payload), kind) + payload)

    def _send_proof(self, kind: _Kind, payload: bytes) -> None:
        self._write(_HEAD.pack(1 + len(payload) + _MAC_BYTES, kind) + payload)
        self._write(self._mac(self._roles[0]))

    def _write(self, data: bytes) -> None:
        data = data if self._sent else _PREFIX.pack(MAGIC, self._version) + data
        self._transcript.update(data)
        self._unsent += data
        self._sent += len(data)

    def _take_unsent(self) -> bytes:
        data = bytes(self._unsent)
        self._unsent.clear()
        return data

    def _take_unread(self, size: int) -> bytes:
        data = bytes(self._unread[:size])
        del self._unread[:size]
        self._accepted += size
        return data

    def _check_size(self, size: int, what: str) -> None:
        if size > self._limit:
            raise UsageError(f"{what} would make this side's handshake {size} bytes long, {self._limit} may be (option handshake_bytes)")

    def _decode(self, data: bytes) -> Any:
        try:
            return _unpack(data)
        except (ValueError, msgpack.UnpackException) as error:
            self._malformed(f"bytes that are no msgpack ({error or type(error).__name__})")

    def _awaited(self) -> _Kind:
        if self._awaits is None:
            raise InternalError("the handshake is over: what is received now belongs to whoever holds its result")
        return self._awaits

    def _progress(self) -> str:
        return f"{_WAITING[self._awaited()]} ({self._accepted + len(self._unread)} bytes received in all)"

    def _malformed(self, found: str) -> NoReturn:
        self._fail(HandshakeError(f"garbage in the handshake: {found} in place of {self._progress()}"))

    def _fail(self, error: HandshakeError) -> NoReturn:
        code = next(code for code, kind in _CODES.items() if isinstance(error, kind))
        self._refuse(code, str(error))
        raise error

    def _refuse(self, code: str, reason: str) -> None:
        """Ends this side. The other side is told unless it may be through already and would take the reason for a frame."""
        if self._awaits is not _Kind.WELCOME:
            text = reason.encode("utf-8", "replace")[:_REASON_BYTES].decode("utf-8", "ignore")
            self._send(_Kind.REFUSAL, msgpack.packb([code, text]))
            self.refusal = self._take_unsent()
        self._awaits = None


def _hmac(key: bytes, label: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 of a label, a zero byte, and parts of fixed length: no two uses of one key share an input."""
    return hmac.digest(key, label + b"\0" + b"".join(parts), "sha256")


def _unpack(data: bytes) -> Any:
    return msgpack.unpackb(data, raw=False, strict_map_key=True, **_LIMITS)


def _encode(value: Map, what: str) -> bytes:
    """Packs a map; raises `UsageError` unless the other side can unpack it within the limits."""
    try:
        data: bytes = msgpack.packb(dict(value))
        _unpack(data)
    except (TypeError, ValueError, OverflowError, msgpack.UnpackException) as error:
        raise UsageError(f"{what} must be a small map of strings to plain values: {error or type(error).__name__}") from error
    return data
