"""Unix and TCP connections: the handshake on them, then bytes both ways.

`open_stream` wraps a connected socket in the loop's transport, runs the handshake over it and returns a `Stream`, which then
gives its bytes to the receiver it is bound to. The transport reads straight into the receiver's buffer.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import cast

from monarch_async._channel.base import Receiver
from monarch_async._core.handshake import Established, Handshake

__all__ = ["HIGH_WATER", "Stream", "authenticate", "open_stream"]

HIGH_WATER = 1 << 20
_CHUNK = 4096


class Stream(asyncio.BufferedProtocol):
    """One connection. Until `bind` it collects what comes for `read`, afterwards the receiver gets everything."""

    full = False

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._receiver: Receiver | None = None
        self._early = bytearray()
        self._waiter: asyncio.Future[None] | None = None
        self._room = memoryview(bytearray(_CHUNK))
        self._lost = False
        self._error: Exception | None = None

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but name
        self._transport.set_write_buffer_limits(high=HIGH_WATER)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._room if self._receiver is None else self._receiver.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        if self._receiver is not None:
            self._receiver.received(nbytes)
            return
        self._early += self._room[:nbytes]
        if len(self._early) > 4 * _CHUNK and self._transport is not None:
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self.full = True

    def resume_writing(self) -> None:
        self.full = False
        if self._receiver is not None:
            self._receiver.writable()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost, self._error = True, exc
        self._transport = None
        self._wake()
        if self._receiver is not None:
            self._receiver.lost(self, exc)

    # What links call.

    def bind(self, receiver: Receiver, early: bytes) -> None:
        """From now on everything goes to `receiver`, first the bytes that came behind the handshake."""
        pending = early + bytes(self._early)
        self._early.clear()
        self._receiver = receiver
        while pending and not self._lost:
            room = receiver.get_buffer()
            size = min(len(room), len(pending))
            room[:size] = pending[:size]
            pending = pending[size:]
            receiver.received(size)
        if self._lost:
            receiver.lost(self, self._error)
        elif self._transport is not None and not self._transport.is_reading():
            self._transport.resume_reading()

    async def read(self) -> bytes:
        """The next bytes before `bind`; ``b""`` once the other side has closed."""
        if not self._early and not self._lost:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        data = bytes(self._early)
        self._early.clear()
        return data

    def write(self, data: bytes | memoryview) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


async def open_stream(sock: socket.socket, *, server: bool, patience: float, tls: ssl.SSLContext | None = None, host: str = "") -> Stream:
    """A stream over a connected, non-blocking socket, which it owns from now on; with `tls`, encrypted.

    A TCP connection whose bytes the other host does not acknowledge for `patience` seconds counts as lost.
    """
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(patience * 1000))
    loop = asyncio.get_running_loop()
    factory: Callable[[], Stream] = Stream
    try:
        if server:
            _, stream = await loop.connect_accepted_socket(factory, sock, ssl=tls)
        else:
            name = host if tls is not None else None
            _, stream = await loop.create_connection(factory, sock=sock, ssl=tls, server_hostname=name)
    except BaseException:
        sock.close()
        raise
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
