"""Unix and TCP connections: the handshake on them, then bytes both ways.

`open_stream` wraps a connected socket in the loop's transport, runs TLS over it if wanted and returns a `Stream`; `authenticate` runs the
handshake on it. Bound to a receiver it then gives that everything. The transport reads straight into the receiver's buffer.

Rules:

* After `close` or `abort` nothing is written and nothing more comes in; the receiver is still told, once, that the connection is lost.
* What came before the connection was lost is delivered first, even if it was lost before `bind`.
* A closing connection whose peer does not read is cut after `LINGER` seconds.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from typing import cast

from monarch_async._channel.base import Receiver
from monarch_async._core.handshake import Established, Handshake
from monarch_async.errors import HandshakeError

__all__ = ["HIGH_WATER", "LINGER", "Stream", "authenticate", "open_stream"]

HIGH_WATER = 1 << 20
LINGER = 1.0
_CHUNK = 4096
_EARLY = 4 * _CHUNK


class Stream(asyncio.BufferedProtocol):
    """One connection. Until `bind` it collects what comes for `read`, afterwards the receiver gets everything."""

    full = False

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None  # None: not made yet, or lost
        self._writer: asyncio.Transport | None = None  # the same, as long as it may be written to
        self._receiver: Receiver | None = None
        self._closed = False  # by this side: what comes in is dropped
        self._early = bytearray()
        self._waiter: asyncio.Future[None] | None = None
        self._room = memoryview(bytearray(_CHUNK))
        self._lost = False
        self._error: Exception | None = None

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = self._writer = cast("asyncio.Transport", transport)  # uvloop's is one in all but name
        self._transport.set_write_buffer_limits(high=HIGH_WATER)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._room if self._receiver is None or self._closed else self._receiver.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        if self._closed:
            return
        if self._receiver is not None:
            self._receiver.received(nbytes)
            return
        self._early += self._room[:nbytes]
        if len(self._early) >= _EARLY and self._transport is not None and self._transport.is_reading():
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self.full = True

    def resume_writing(self) -> None:
        self.full = False
        if self._receiver is not None and not self._closed:
            self._receiver.writable()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost, self._error = True, exc
        self._transport = self._writer = None
        self._wake()
        if self._receiver is not None:
            self._receiver.lost(self, exc)

    # What links call.

    def bind(self, receiver: Receiver, early: bytes) -> None:
        """From now on everything goes to `receiver`, first the bytes that came behind the handshake."""
        pending = memoryview(early + self._early)
        self._early.clear()
        self._receiver = receiver
        while pending and not self._closed:
            room = receiver.get_buffer()
            size = min(len(room), len(pending))
            room[:size] = pending[:size]
            pending = pending[size:]
            receiver.received(size)
        if self._lost:
            receiver.lost(self, self._error)
        else:
            self._resume_reading()

    async def read(self) -> bytes:
        """The next bytes before `bind`; ``b""`` once the other side has closed."""
        if not self._early and not self._lost:
            self._resume_reading()
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        data = bytes(self._early)
        self._early.clear()
        return data

    def write(self, data: bytes | memoryview) -> None:
        writer = self._writer
        if writer is not None and not writer.is_closing():
            writer.write(data)

    async def detach(self) -> socket.socket:
        """Take an unbound connection from the loop: its socket, which blocks from now on. Raises `ConnectionError` if it is lost.

        What was written is sent first. What has come and was not read is lost: only for where nothing can have come.
        """
        transport = self._transport
        if transport is not None and transport.is_reading():
            transport.pause_reading()
        while self._transport is not None and self._transport.get_write_buffer_size():  # noqa: ASYNC110
            await asyncio.sleep(0)  # the loop writes at the end of its turn, and a socket that is new takes it all
        if self._transport is None:
            raise ConnectionResetError("the connection was lost")
        sock = self._transport.get_extra_info("socket")
        own = socket.socket(sock.family, sock.type, sock.proto, os.dup(sock.fileno()))
        self.abort()
        own.setblocking(True)
        return own

    def close(self) -> None:
        if self._transport is not None and not self._closed:
            self._closed, self._writer = True, None
            self._transport.close()
            asyncio.get_running_loop().call_later(LINGER, self.abort)

    def abort(self) -> None:
        self._closed, self._writer = True, None
        if self._transport is not None:
            self._transport.abort()

    def _resume_reading(self) -> None:
        if self._transport is not None and not self._closed and not self._transport.is_closing() and not self._transport.is_reading():
            self._transport.resume_reading()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


async def open_stream(
    sock: socket.socket,
    *,
    server: bool,
    patience: float,
    tls: ssl.SSLContext | None = None,
    host: str = "",
    tls_timeout: float = 5.0,
) -> Stream:
    """A stream over a connected, non-blocking socket, which it owns from now on; with `tls`, encrypted within `tls_timeout` seconds.

    A TCP connection whose bytes the other host does not acknowledge for `patience` seconds counts as lost. Raises `HandshakeError` when
    TLS fails, `OSError` when the connection does.
    """
    loop = asyncio.get_running_loop()
    stream = Stream()  # not taken from what the loop returns: with TLS, uvloop returns a protocol of its own
    timeout = tls_timeout if tls is not None else None
    try:
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(patience * 1000)))
        if server:
            await loop.connect_accepted_socket(lambda: stream, sock, ssl=tls, ssl_handshake_timeout=timeout)
        else:
            name = host.strip("[]") if tls is not None else None
            await loop.create_connection(lambda: stream, sock=sock, ssl=tls, server_hostname=name, ssl_handshake_timeout=timeout)
    except BaseException as error:
        sock.close()
        if tls is None or not isinstance(error, (OSError, TimeoutError)):
            raise
        who = "the connecting process" if server else host or "the other host"
        story = f"no TLS with {who}: {str(error) or type(error).__name__}"
        raise HandshakeError(f"{story}; give every host of the job a certificate that the others' TLS contexts accept") from error
    return stream


async def authenticate(stream: Stream, handshake: Handshake) -> Established:
    """Run the handshake to its end. Raises `HandshakeError` and closes the stream when it fails or takes too long."""
    loop = asyncio.get_running_loop()
    try:
        stream.write(handshake.start())
        while True:
            try:
                async with asyncio.timeout_at(handshake.deadline):
                    data = await stream.read()
            except TimeoutError:
                handshake.expire(loop.time())
            step = handshake.receive(data, loop.time())
            if step.send:
                stream.write(step.send)
            if step.done is not None:
                return step.done
    except BaseException:
        stream.write(handshake.refusal)
        stream.close()
        raise
