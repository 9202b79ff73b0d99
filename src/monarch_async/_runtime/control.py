"""The control socket between an agent and a process of its host, or between a worker and the agents it has started.

Each message is one packet: a letter, what belongs to it, and for a connection its descriptor. End of file means that the other side is
gone.

* `c`: a connection for this process itself;
* `r` and a route: a connection for some process of this agent's host (from a worker to an agent);
* `n` and a packed `Network`: what links with other hosts are secured by (from an agent to a process). It comes before any connection that
  needs it, since both come over this socket;
* `s`: stop;
* `e` and a text: why the other side, an agent, is about to end.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable

from monarch_async._channel.dial import Route
from monarch_async._runtime.config import Network
from monarch_async._runtime.connect import accept, join_network
from monarch_async._runtime.runtime import Runtime

__all__ = ["CONNECTION", "ENDING", "NETWORK", "ROUTE", "STOP", "Control", "ControlWriter", "pack_route"]

CONNECTION, ROUTE, NETWORK, STOP, ENDING = b"c", b"r", b"n", b"s", b"e"
MAX_PACKET = 16_384
"""Bytes of a packet: a key and three paths at most."""
_ASKS, _WANTS = b"?", b"!"
QUEUED = 256
"""Packets that wait for a process that reads none; past that connections are closed, and who made them tries again."""


def pack_route(route: Route) -> bytes:
    """What stands in a packet of the letter `r`."""
    return (_ASKS if route.query else _WANTS) + route.target.encode("ascii")


class Control:
    """Reads a control socket, which it owns, until `close`. `on_route` gets the connections that are for others, with what they ask for."""

    def __init__(
        self,
        runtime: Runtime,
        sock: socket.socket,
        *,
        on_stop: Callable[[], None],
        on_end: Callable[[], None],
        on_route: Callable[[socket.socket, Route], None] | None = None,
    ) -> None:
        self._runtime = runtime
        self._sock = sock
        self._on_stop = on_stop
        self._on_end = on_end
        self._on_route = on_route
        self.reason = ""  # why the other side ends, if it has said so
        sock.setblocking(False)
        runtime.loop.add_reader(sock.fileno(), self._read)

    def close(self) -> None:
        """Read no more."""
        if self._sock.fileno() >= 0:
            if not self._runtime.loop.is_closed():
                self._runtime.loop.remove_reader(self._sock.fileno())
            self._sock.close()

    def _read(self) -> None:
        while self._sock.fileno() >= 0:
            try:
                data, fds, _, _ = socket.recv_fds(self._sock, MAX_PACKET, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:
                self.close()
                self._on_end()
                return
            self._take(data[:1], data[1:], fds)

    def _take(self, letter: bytes, rest: bytes, fds: list[int]) -> None:
        socks = [socket.socket(fileno=fd) for fd in fds]
        for sock in socks:
            sock.setblocking(False)
        if letter == STOP:
            self._on_stop()
        elif letter == ENDING:
            self.reason = rest.decode()
        elif letter == NETWORK:
            join_network(self._runtime, Network.unpack(rest))
        elif letter == CONNECTION and socks:
            self._runtime.tasks.start(accept(self._runtime, socks[0]), name="accepting a connection")
        elif letter == ROUTE and socks and self._on_route is not None:
            self._on_route(socks[0], Route(rest[1:].decode("ascii"), rest[:1] == _ASKS))


class ControlWriter:
    """Sends packets on a control socket, which stays its owner's, in order and without ever blocking.

    Packets for a process that is gone are dropped.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        self._loop = loop
        self._sock = sock
        self._queue: deque[tuple[bytes, int]] = deque()  # with a descriptor that belongs to the entry, or -1

    def send(self, packet: bytes, sock: socket.socket | None = None) -> None:
        """Queue a packet; a socket that goes with it is duplicated, and stays the caller's."""
        if sock is not None and len(self._queue) >= QUEUED:
            return
        self._queue.append((packet, -1 if sock is None else os.dup(sock.fileno())))
        if len(self._queue) == 1:
            self._write()

    def has_ended(self) -> bool:
        """Whether the other end is closed, as it is when its process dies."""
        if self._sock.fileno() < 0:
            return True
        try:
            return self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Drop what is queued. Call before the socket is closed."""
        if self._queue:
            self._loop.remove_writer(self._sock.fileno())
        for _, fd in self._queue:
            if fd >= 0:
                os.close(fd)
        self._queue.clear()

    def _write(self) -> None:
        while self._queue:
            packet, fd = self._queue[0]
            try:
                if fd >= 0:
                    socket.send_fds(self._sock, [packet], [fd])
                else:
                    self._sock.send(packet)
            except BlockingIOError:
                self._loop.add_writer(self._sock.fileno(), self._write)
                return
            except OSError:  # it is gone, of which others tell
                pass
            self._queue.popleft()
            if fd >= 0:
                os.close(fd)
        self._loop.remove_writer(self._sock.fileno())
