"""Memory over a socket: it arrives whole, from and to any list of views; what is not genuine is never written; who waits can be stopped."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_async._channel import pieces
from monarch_async._channel.pieces import DataSocket, cut
from monarch_async._core.seal import POLY1305, SEAL_SIZE, SHA256, Seal
from monarch_async.errors import ProtocolError

KEYS = (b"a" * 32, b"b" * 32)
SMALL = 1000
Rewrite = Callable[[bytes], bytes]


def may() -> None: ...


def views(sizes: list[int], fill: int | None = None) -> list[memoryview]:
    """Memories of these sizes; no two bytes near each other are alike unless all are `fill`."""
    return [
        memoryview(bytearray((fill if fill is not None else (7 * index + 31 * byte) % 251) for byte in range(size)))
        for index, size in enumerate(sizes)
    ]


class Pair:
    """Two ends, and threads to use them in. What the first sends goes through `rewrite` if that is given, as one stretch of bytes."""

    def __init__(self, digest: str = POLY1305, rewrite: Rewrite | None = None) -> None:
        self.threads = ThreadPoolExecutor(3)
        self._socks = list(socket.socketpair())
        one, other = self._socks
        if rewrite is not None:
            self._socks += socket.socketpair()
            other = self._socks[3]
            self.threads.submit(self._pass_on, rewrite, self._socks[1], self._socks[2])
        self.one = DataSocket(one, (Seal(KEYS[0], digest), Seal(KEYS[1], digest)))
        self.other = DataSocket(other, (Seal(KEYS[1], digest), Seal(KEYS[0], digest)))

    @staticmethod
    def _pass_on(rewrite: Rewrite, source: socket.socket, target: socket.socket) -> None:
        data = b""
        while more := source.recv(1 << 16):
            data += more
        target.sendall(rewrite(data))
        target.shutdown(socket.SHUT_WR)

    def send(self, source: list[memoryview]) -> Future[None]:
        return self.threads.submit(self.one.send, source, may)

    def receive(self, target: list[memoryview]) -> Future[None]:
        return self.threads.submit(self.other.receive, target, may)

    def close(self) -> None:
        for end in (self.one, self.other):
            end.shut()
        self.threads.shutdown()
        for end in (self.one, self.other):
            end.close()
        for sock in self._socks:
            sock.close()


@pytest.fixture(params=[SHA256, POLY1305])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Two ends."""
    pair = Pair(request.param)
    yield pair
    pair.close()


def small_pieces(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pieces, "PIECE", SMALL)


@given(st.lists(st.integers(0, 60), max_size=12), st.integers(1, 40))
def test_cut(sizes: list[int], size: int) -> None:
    """Pieces are full but for the last, say how long they are, and are all of the bytes in order."""
    source = views(sizes)
    found = list(cut(source, size))
    assert b"".join(source) == b"".join(part for _, piece in found for part in piece)
    assert [length for length, _ in found] == [sum(map(len, piece)) for _, piece in found]
    assert all(length == size for length, _ in found[:-1])
    assert all(0 < length <= size for length, _ in found)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 3 * SMALL), max_size=8), st.integers(0, 8), st.sampled_from([SHA256, POLY1305]))
def test_whatever_the_places(sizes: list[int], split: int, digest: str) -> None:
    """What is cut in one way on one side and in another on the other side arrives, and the next thing after it."""
    source = views(sizes)
    whole = b"".join(source)
    at = len(whole) * split // 8
    with pytest.MonkeyPatch.context() as patch:
        small_pieces(patch)
        pair = Pair(digest)
        try:
            for _ in range(2):
                target = views([at, len(whole) - at], 0)
                receiving = pair.receive(target)
                pair.send(source).result(10)
                receiving.result(10)
                assert whole == b"".join(target)
        finally:
            pair.close()


def test_pieces_of_full_size(pair: Pair) -> None:
    """A few megabytes and a rest, both ways on one connection, straight and gathered."""
    for sizes in ([3 * pieces.PIECE + 77], [1, pieces.PIECE, 2 * pieces.PIECE + 5]):
        source = [memoryview(bytearray(range(256)) * (size // 256 + 1))[:size] for size in sizes]
        total = sum(sizes)
        for send, receive in ((pair.one.send, pair.other.receive), (pair.other.send, pair.one.receive)):
            target = memoryview(bytearray(total))
            receiving = pair.threads.submit(receive, [target], may)
            pair.threads.submit(send, source, may).result(10)
            receiving.result(10)
            assert b"".join(source) == target


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes((data[at] ^ 1,)) + data[at + 1 :]


STEP = SMALL + SEAL_SIZE
TAMPERED: dict[str, tuple[Rewrite, int]] = {
    "a bit in the second piece": (lambda data: flipped(data, STEP + 10), 1),
    "a bit in a seal": (lambda data: flipped(data, STEP - 1), 0),
    "two pieces in each other's place": (lambda data: data[STEP : 2 * STEP] + data[:STEP] + data[2 * STEP :], 0),
    "a piece again": (lambda data: data[:STEP] + data[:STEP] + data[2 * STEP :], 1),
    "a piece left out": (lambda data: data[:STEP] + data[2 * STEP :], 1),
}


@pytest.mark.parametrize("digest", [SHA256, POLY1305])
@pytest.mark.parametrize("what", TAMPERED)
def test_what_is_not_genuine_is_not_written(what: str, digest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is done to the bytes on the way, the memory has only pieces that were sent, each at its place, and none after a bad one."""
    small_pieces(monkeypatch)
    rewrite, good = TAMPERED[what]
    pair = Pair(digest, rewrite)
    source, target = views([4 * SMALL]), views([4 * SMALL], 0)
    receiving = pair.receive(target)
    pair.send(source).result(10)
    pair.one.shut()
    with pytest.raises(ProtocolError, match="seal"):
        receiving.result(10)
    assert bytes(source[0][: good * SMALL]) + bytes((4 - good) * SMALL) == bytes(target[0])
    pair.close()


def test_memory_that_changes_while_it_is_sent(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its sealing and its sending: the other side finds the seal wrong, and writes nothing of it."""
    small_pieces(monkeypatch)
    source, target = views([SMALL]), views([SMALL], 0)
    sign = pair.one._send_seal.sign_bulk

    def sign_and_change(head: bytes, bulk: bytes | memoryview) -> bytes:
        seal = sign(head, bulk)
        source[0][500] ^= 1
        return seal

    monkeypatch.setattr(pair.one._send_seal, "sign_bulk", sign_and_change)
    receiving = pair.receive(target)
    pair.send(source).result(10)
    with pytest.raises(ProtocolError, match="seal"):
        receiving.result(10)
    assert bytes(SMALL) == target[0]


def test_memory_that_is_copied_before_it_is_sent(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written to it between sealing and sending does no harm."""
    small_pieces(monkeypatch)
    source, target = views([3 * SMALL]), views([3 * SMALL], 0)
    before = bytes(source[0])
    sign = pair.one._send_seal.sign_bulk

    def sign_and_change(head: bytes, bulk: bytes | memoryview) -> bytes:
        seal = sign(head, bulk)
        source[0][: len(bulk)] = bytes(len(bulk))
        return seal

    monkeypatch.setattr(pair.one._send_seal, "sign_bulk", sign_and_change)
    receiving = pair.receive(target)
    pair.threads.submit(pair.one.send, source, may, True).result(10)
    receiving.result(10)
    assert before == target[0]


def test_greeting(pair: Pair) -> None:
    """The greeting of one side is right once, and only from that side."""
    raw = pair._socks[1]
    pair.one.greet()
    greeting = raw.recv(SEAL_SIZE)
    pair.other.check_greeting(greeting)
    with pytest.raises(ProtocolError):
        pair.other.check_greeting(greeting)
    with pytest.raises(ProtocolError):
        pair.one.check_greeting(greeting)


def test_who_waits_is_stopped(pair: Pair) -> None:
    """`shut` ends a thread that waits for bytes, and one whose bytes nobody takes, with an `OSError`."""
    begun = threading.Event()

    def begin() -> None:
        begun.set()

    receiving = pair.receive(views([10], 0))
    sending = pair.threads.submit(pair.other.send, [memoryview(bytearray(16 << 20))], begin)
    begun.wait(10)
    pair.other.shut()
    for waiting in (receiving, sending):
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            waiting.result(10)


def test_the_other_side_goes_away(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a piece: an error for who receives, and what came whole before is there."""
    small_pieces(monkeypatch)
    target = views([3 * SMALL], 0)
    receiving = pair.receive(target)
    source = views([SMALL])
    pair.send(source).result(10)
    pair._socks[0].sendall(b"half a piece")
    pair.one.shut()
    with pytest.raises(ConnectionResetError):
        receiving.result(10)
    assert bytes(source[0]) + bytes(2 * SMALL) == target[0]


def test_who_may_no_longer(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `may` raises ends both directions before the next piece is sent, or written."""
    small_pieces(monkeypatch)
    left = iter([True, True, False])

    def two_pieces() -> None:
        if not next(left):
            raise LookupError("it was dropped")

    source, target = views([4 * SMALL]), views([4 * SMALL], 0)
    receiving = pair.threads.submit(pair.other.receive, target, two_pieces)
    pair.send(source).result(10)
    with pytest.raises(LookupError, match="dropped"):
        receiving.result(10)
    assert bytes(source[0][: 2 * SMALL]) + bytes(2 * SMALL) == target[0]
    left = iter([False])
    with pytest.raises(LookupError, match="dropped"):
        pair.one.send(source, two_pieces)
