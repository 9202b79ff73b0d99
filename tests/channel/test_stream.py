"""Connections over real sockets: the handshake with peers of every kind, TLS, and how a connection begins and ends."""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from monarch_async._channel import stream as stream_module
from monarch_async._channel.stream import HIGH_WATER, Stream, authenticate, open_stream
from monarch_async._core.handshake import Handshake
from monarch_async.errors import AuthenticationError, HandshakeError
from tests.channel.turns import turns_until
from tests.core.handshake_pair import ACCEPTOR, DIALER, KEY, OTHER_KEY, WELCOME


def dialer(key: bytes = KEY, timeout: float = 5.0) -> Handshake:
    return Handshake.dial(key, DIALER, os.urandom(32), asyncio.get_running_loop().time(), timeout=timeout)


def acceptor(key: bytes = KEY, timeout: float = 5.0) -> Handshake:
    now = asyncio.get_running_loop().time()
    return Handshake.accept(key, ACCEPTOR, os.urandom(32), now, lambda hello: WELCOME, timeout=timeout)


class Sink:
    """A receiver that keeps everything it is told."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.room = memoryview(bytearray(5000))
        self.lost_with: list[Exception | None] = []
        self.changed = asyncio.Event()
        self.writables = 0

    def get_buffer(self) -> memoryview:
        return self.room

    def received(self, size: int) -> None:
        self.data += self.room[:size]
        self.changed.set()

    def writable(self) -> None:
        self.writables += 1
        self.changed.set()

    def lost(self, connection: object, error: Exception | None) -> None:
        self.lost_with.append(error)
        self.changed.set()

    async def change(self) -> None:
        self.changed.clear()
        await self.changed.wait()


def unix_pair() -> tuple[socket.socket, socket.socket]:
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    return ends


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    for end in (one, other):
        end.setblocking(False)
    return one, other


async def streams(
    socks: tuple[socket.socket, socket.socket], server: ssl.SSLContext | None = None, client: ssl.SSLContext | None = None
) -> tuple[Stream, Stream]:
    """Both ends as streams, the dialer first; over TLS where there are contexts."""
    one, other = await asyncio.gather(
        open_stream(socks[0], server=False, patience=3, tls=client, host="node1"),
        open_stream(socks[1], server=True, patience=3, tls=server),
    )
    return one, other


def lost(stream: Stream) -> bool:
    return stream._lost


async def closed(*ends: Stream) -> None:
    """Abort, and wait until the transports have let go of their sockets."""
    for end in ends:
        end.abort()
    for end in ends:
        await turns_until(functools.partial(lost, end))
    await asyncio.sleep(0)


@pytest.mark.parametrize("make", [unix_pair, tcp_pair])
async def test_both_sides_get_through(make: type) -> None:
    """Over a unix and a TCP socket both ends prove themselves and hold matching keys; what comes behind reaches the receiver."""
    one, other = await streams(make())
    found = asyncio.ensure_future(authenticate(other, acceptor()))
    mine = await authenticate(one, dialer())
    theirs = await found
    assert (ACCEPTOR, WELCOME, DIALER) == (mine.peer, mine.welcome, theirs.peer)
    assert mine.send_key == theirs.receive_key
    sink = Sink()
    one.write(b"frames " * 10_000)
    other.bind(sink, theirs.rest)
    while len(sink.data) < 70_000:
        await sink.change()
    assert b"frames " * 10_000 == sink.data
    await closed(one, other)


async def test_another_key() -> None:
    """With different keys the acceptor refuses, the dialer learns why, and both connections close."""
    one, other = await streams(unix_pair())
    outcomes = await asyncio.gather(authenticate(one, dialer(OTHER_KEY)), authenticate(other, acceptor()), return_exceptions=True)
    assert [AuthenticationError, AuthenticationError] == [type(outcome) for outcome in outcomes]
    await closed(one, other)


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n\r\n", bytes(5000), b"\x80\x04cos\nsystem\n", os.urandom(100_000)],
    ids=["http", "zeros", "pickle", "noise"],
)
async def test_garbage(data: bytes) -> None:
    """Whatever a stranger sends, however much, is a typed error, and his connection is closed."""
    sock, accepted = unix_pair()
    stream = await open_stream(accepted, server=True, patience=3)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    sending = asyncio.ensure_future(loop.sock_sendall(sock, data))
    with pytest.raises(HandshakeError):
        await authenticate(stream, acceptor())
    await asyncio.wait([sending])
    assert sending.exception() is None or isinstance(sending.exception(), OSError)
    try:
        while await loop.sock_recv(sock, 4096):
            pass
    except ConnectionError:
        pass  # closed with bytes unread
    sock.close()
    await closed(stream)


@pytest.mark.parametrize("said", [b"", b"M", "opening"])
@pytest.mark.parametrize("how", ["close", "half-close", "silence"])
async def test_peers_that_stop(said: bytes | str, how: str) -> None:
    """A peer that closes, half-closes or falls silent within the handshake is told from a good one, in time."""
    sock, accepted = unix_pair()
    stream = await open_stream(accepted, server=True, patience=3)
    if said:
        sock.send(dialer().start() if isinstance(said, str) else said)
    if how == "close":
        sock.close()
    elif how == "half-close":
        sock.shutdown(socket.SHUT_WR)
    match = "no handshake within 0.05 s" if how == "silence" else "closed the connection"
    with pytest.raises(HandshakeError, match=match):
        await authenticate(stream, acceptor(timeout=0.05))
    sock.close()
    await closed(stream)


async def test_a_slow_peer_gets_through() -> None:
    """A handshake that comes byte by byte is as good as any."""
    one, other = unix_pair()
    middle = unix_pair()
    loop = asyncio.get_running_loop()

    async def trickle(source: socket.socket, sink: socket.socket) -> None:
        while data := await loop.sock_recv(source, 1):
            await loop.sock_sendall(sink, data)

    first = await open_stream(one, server=False, patience=3)
    second = await open_stream(middle[1], server=True, patience=3)
    carrying = [asyncio.ensure_future(trickle(other, middle[0])), asyncio.ensure_future(trickle(middle[0], other))]
    mine, theirs = await asyncio.gather(authenticate(first, dialer()), authenticate(second, acceptor()))
    assert mine.send_key == theirs.receive_key
    for task in carrying:
        task.cancel()
    await asyncio.wait(carrying)
    await closed(first, second)
    other.close()
    middle[0].close()


async def test_what_came_before_the_end_is_delivered() -> None:
    """Bytes that arrived before the connection was lost reach a receiver that is bound afterwards, and then it is told of the end."""
    sock, accepted = unix_pair()
    stream = await open_stream(accepted, server=True, patience=3)
    sock.send(b"last words")
    sock.close()
    await turns_until(lambda: lost(stream))
    sink = Sink()
    stream.bind(sink, b"behind the handshake, ")
    assert (b"behind the handshake, last words", [None]) == (bytes(sink.data), sink.lost_with)


async def test_reading_pauses_and_goes_on() -> None:
    """Before `bind` only a few KiB are taken from the socket; `read` and `bind` go on with the rest, all of it in order."""
    sock, accepted = unix_pair()
    stream = await open_stream(accepted, server=True, patience=3)
    data = os.urandom(150_000)
    sock.send(data)
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(stream._early) < 40_000
    first = await stream.read()
    second = await stream.read()
    sink = Sink()
    stream.bind(sink, b"")
    while len(sink.data) + len(first) + len(second) < len(data):
        await sink.change()
    assert data == first + second + sink.data
    sock.close()
    await closed(stream)


async def test_full_and_writable() -> None:
    """Past the high-water mark the stream is full, and says so when it takes bytes again; nothing is lost."""
    one, other = await streams(unix_pair())
    sink, source = Sink(), Sink()
    one.bind(source, b"")
    one.write(bytes(HIGH_WATER))
    assert not one.full
    one.write(bytes(HIGH_WATER))
    assert one.full
    other.bind(sink, b"")
    while len(sink.data) < 2 * HIGH_WATER:
        await sink.change()
    while not source.writables:
        await source.change()
    assert not one.full
    await closed(one, other)


async def test_close_sends_what_was_written() -> None:
    """`close` lets the peer have everything; `abort` behind it does no harm; each side is told once; later writes vanish."""
    one, other = await streams(unix_pair())
    sink, mine = Sink(), Sink()
    other.bind(sink, b"")
    one.bind(mine, b"")
    one.write(bytes(500_000))
    one.close()
    one.write(b"too late")
    while not sink.lost_with:
        await sink.change()
    assert 500_000 == len(sink.data)
    await closed(one, other)
    assert ([None], [None]) == (mine.lost_with, sink.lost_with)
    one.abort()
    one.close()
    one.write(b"")


async def test_closing_on_a_peer_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection whose peer takes nothing is cut a while after `close`."""
    monkeypatch.setattr(stream_module, "LINGER", 0.02)
    sock, accepted = unix_pair()
    stream = await open_stream(accepted, server=True, patience=3)
    sink = Sink()
    stream.bind(sink, b"")
    stream.write(bytes(4 * HIGH_WATER))
    stream.close()
    while not sink.lost_with:
        await sink.change()
    sock.close()


async def test_nothing_comes_after_abort() -> None:
    """After `abort` the receiver hears nothing but that the connection is lost."""
    one, other = await streams(unix_pair())
    sink = Sink()
    other.bind(sink, b"")
    one.write(b"on its way")
    other.abort()
    other.buffer_updated(5)
    assert len(other.get_buffer(100)) > 0
    while not sink.lost_with:
        await sink.change()
    assert b"" == sink.data
    await closed(one, other)


async def test_tcp_settings() -> None:
    """A TCP connection sends small frames at once, and gives an unresponsive host as long as it was told."""
    socks = tcp_pair()
    one, other = await streams(socks)
    for sock in socks:
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            assert 3000 == sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    await closed(one, other)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A certificate for ``node1`` and its key, signed by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("no `openssl` here to make a certificate")
    folder: Path = tmp_path_factory.mktemp("tls")
    cert, key = str(folder / "cert"), str(folder / "key")
    subject = ("-subj", "/CN=node1", "-addext", "subjectAltName=DNS:node1")
    out = ("-keyout", key, "-out", cert)
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2", *subject, *out],
        check=True,
        capture_output=True,
    )
    return cert, key


def contexts(certificate: tuple[str, str]) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(*certificate)
    return server, ssl.create_default_context(cafile=certificate[0])


async def test_tls(certificate: tuple[str, str]) -> None:
    """Over TLS the handshake gets through, and megabytes arrive in both directions, past what the buffers hold."""
    one, other = await streams(tcp_pair(), *contexts(certificate))
    mine, theirs = await asyncio.gather(authenticate(one, dialer()), authenticate(other, acceptor()))
    sinks = Sink(), Sink()
    one.bind(sinks[0], mine.rest)
    other.bind(sinks[1], theirs.rest)
    data = os.urandom(1 << 20)
    for _ in range(4):
        one.write(data)
        other.write(data)
    for sink in sinks:
        while len(sink.data) < 4 * len(data):
            await sink.change()
        assert data * 4 == sink.data
    await closed(one, other)


async def test_tls_that_is_not_trusted(certificate: tuple[str, str]) -> None:
    """A certificate that the dialer does not know fails at both ends, with what to do, and leaves nothing open."""
    server, _ = contexts(certificate)
    socks = tcp_pair()
    outcomes = await asyncio.gather(
        open_stream(socks[0], server=False, patience=3, tls=ssl.create_default_context(), host="node1"),
        open_stream(socks[1], server=True, patience=3, tls=server),
        return_exceptions=True,
    )
    assert [HandshakeError, HandshakeError] == [type(outcome) for outcome in outcomes]
    assert "give every host of the job a certificate" in str(outcomes[0])


async def test_tls_with_who_speaks_none(certificate: tuple[str, str]) -> None:
    """Someone who sends plain bytes, or nothing at all, to a TLS port is turned away in time."""
    server, _ = contexts(certificate)
    for said in (b"MAR1 no TLS at all", b""):
        sock, accepted = tcp_pair()
        if said:
            sock.send(said)
        with pytest.raises(HandshakeError, match="no TLS"):
            await open_stream(accepted, server=True, patience=3, tls=server, tls_timeout=0.1)
        sock.close()


@pytest.mark.parametrize("pair", [unix_pair, tcp_pair])
async def test_a_connection_is_taken_from_the_loop(pair: Callable[[], tuple[socket.socket, socket.socket]]) -> None:
    """What was written leaves first; then the socket, which blocks, is the caller's, and the loop has let go of it."""
    mine, other = pair()
    stream = await open_stream(mine, server=False, patience=5)
    stream.write(b"first")
    with await stream.detach() as sock, other:
        await turns_until(lambda: stream._transport is None)
        other.setblocking(True)
        assert b"first" == other.recv(5, socket.MSG_WAITALL)
        other.sendall(b"second")
        assert (True, b"second") == (sock.getblocking(), sock.recv(6, socket.MSG_WAITALL))
        sock.sendall(b"third")
        assert b"third" == other.recv(5, socket.MSG_WAITALL)


async def test_a_lost_connection_can_not_be_taken() -> None:
    """`ConnectionError`, and no socket is left."""
    mine, other = unix_pair()
    stream = await open_stream(mine, server=False, patience=5)
    other.close()
    assert b"" == await stream.read()
    await turns_until(lambda: stream._transport is None)
    with pytest.raises(ConnectionError):
        await stream.detach()
