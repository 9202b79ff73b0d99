"""Both ends of a handshake as a pair, with someone in the middle if wanted: what the handshake tests share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from monarch_async._core.handshake import MAGIC, PROTOCOL_VERSION, Established, Handshake
from monarch_async.errors import HandshakeError

KEY = hashlib.sha256(b"the key of this job").digest()
OTHER_KEY = hashlib.sha256(b"the key of another job").digest()
DIALER = {"proc": "d1a1e5000001", "host": "a0a0a0a0a0a0", "name": "trainers", "rank": 3, "session": "5e5510000001", "wants": "acce9700000f"}
ACCEPTOR = {"proc": "acce9700000f", "host": "b0b0b0b0b0b0", "name": "buffers", "rank": 0}
WELCOME = {"known": True, "received": 12}
NONCE_D = bytes(range(32))
NONCE_A = bytes(range(100, 132))
LIMIT = 4096


def welcome(_: dict[str, Any]) -> dict[str, Any]:
    return WELCOME


def new_dialer(key: bytes = KEY, nonce: bytes = NONCE_D, **bounds: Any) -> Handshake:
    return Handshake.dial(key, DIALER, nonce, 100.0, **bounds)


def new_acceptor(
    key: bytes = KEY, nonce: bytes = NONCE_A, decide: Callable[[dict[str, Any]], dict[str, Any]] = welcome, **bounds: Any
) -> Handshake:
    return Handshake.accept(key, ACCEPTOR, nonce, 100.0, decide, **bounds)


@dataclass
class End:
    """One side with its outcome: `done`, or the `error` it raised, or neither while it waits."""

    handshake: Handshake
    done: Established | None = None
    error: HandshakeError | None = None
    after: bytes = b""

    @property
    def over(self) -> bool:
        return self.done is not None or self.error is not None

    def receive(self, data: bytes) -> bytes:
        """What it sends in reply, its refusal included; bytes after its end are kept in `after`, as a frame reader would get them."""
        if self.over:
            self.after += data
            return b""
        try:
            step = self.handshake.receive(data, 100.0)
        except HandshakeError as error:
            self.error = error
            return self.handshake.refusal
        self.done = step.done
        return step.send


class Talk(NamedTuple):
    """Both ends after all was said, and the flights as they were sent, before anyone changed them."""

    dialer: End
    acceptor: End
    flights: list[bytes]


def whole(data: bytes) -> Iterator[bytes]:
    yield data


def single_bytes(data: bytes) -> Iterator[bytes]:
    for byte in data:
        yield bytes((byte,))


def converse(
    dialer: Handshake,
    acceptor: Handshake,
    *,
    tamper: Callable[[int, bytes], bytes] = lambda _, data: data,
    chunks: Callable[[bytes], Iterator[bytes]] = whole,
) -> Talk:
    """Runs both ends against each other until both are silent, then ends both streams.

    `tamper(flight, data)` stands in the middle; flights count 0, 1, 2, … in alternating directions.
    """
    ends = End(dialer), End(acceptor)
    flights = [dialer.start()]
    assert acceptor.start() == b""
    while flights[-1]:
        receiver = ends[len(flights) % 2]
        delivered = tamper(len(flights) - 1, flights[-1])
        flights.append(b"".join(receiver.receive(chunk) for chunk in chunks(delivered) if chunk))
    for end in ends:
        end.receive(b"")
    return Talk(*ends, flights[:-1])


def instead(flight: int, other: bytes) -> Callable[[int, bytes], bytes]:
    """Someone in the middle who delivers `other` in place of one flight."""
    return lambda number, data: other if number == flight else data


def prefixed(*messages: bytes, version: int = PROTOCOL_VERSION) -> bytes:
    """A stream of raw messages (kind and payload) as one side would begin it."""
    return MAGIC + version.to_bytes(2, "big") + b"".join(len(message).to_bytes(2, "big") + message for message in messages)


def assert_agree(dialer: End, acceptor: End) -> None:
    """Both are through, with the same view of each other."""
    assert dialer.done is not None
    assert acceptor.done is not None
    assert (ACCEPTOR, WELCOME) == (dialer.done.peer, dialer.done.welcome)
    assert (DIALER, WELCOME) == (acceptor.done.peer, acceptor.done.welcome)
    assert dialer.done.send_key == acceptor.done.receive_key
    assert dialer.done.receive_key == acceptor.done.send_key
