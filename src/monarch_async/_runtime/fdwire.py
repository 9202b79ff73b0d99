"""Messages with descriptors over a unix stream socket, for the few processes of one host that fork each other.

Each message is a u32 length (big endian) and a msgpack map, whose key `"fds"` says how many descriptors travel with it.
The kernel delivers descriptors with the first byte they were sent with and in order, so counting them off is enough.

Rules: never blocks; descriptors given to `send` belong to the wire, which closes its copies once they are sent; descriptors that
arrive are close-on-exec. There is no trust boundary here: both ends are one program.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack

__all__ = ["FdWire", "Received"]

_LENGTH = struct.Struct(">I")
_READ = 256 * 1024
_MAX_FDS = 64


class Received(NamedTuple):
    """A message and the descriptors that came with it, which now belong to whoever takes this."""

    message: dict[str, Any]
    fds: list[int]


class FdWire:
    """One end of a connection between an agent and a zygote."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._incoming = bytearray()
        self._incoming_fds: deque[int] = deque()
        self._outgoing: deque[tuple[memoryview, Sequence[int]]] = deque()

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def pending(self) -> bool:
        """Whether something waits for the socket to become writable."""
        return bool(self._outgoing)

    def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Queue a message and write what the socket takes. Raises `OSError` when the peer is gone."""
        body: bytes = msgpack.packb({**message, "fds": len(fds)})
        self._outgoing.append((memoryview(_LENGTH.pack(len(body)) + body), fds))
        self.flush()

    def flush(self) -> None:
        """Write until everything is out or the socket is full. Raises `OSError` when the peer is gone."""
        while self._outgoing:
            data, fds = self._outgoing[0]
            try:
                sent = socket.send_fds(self._sock, [data], list(fds)) if fds else self._sock.send(data)
            except BlockingIOError:
                return
            _close_all(fds)
            if sent == len(data):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = (data[sent:], ())

    def receive(self) -> list[Received]:
        """Whatever complete messages have arrived. Raises `EOFError` when the peer is gone and all of its messages were taken."""
        while True:
            try:
                data, fds, flags, _ = socket.recv_fds(self._sock, _READ, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                break
            except ConnectionResetError:  # the peer ended without reading everything: to this side, an end
                data, fds, flags = b"", [], 0
            self._incoming_fds.extend(fds)
            if flags & socket.MSG_CTRUNC:
                raise OSError(errno.EMFILE, "descriptors were lost on the way: the limit on open files (ulimit -n) is reached")
            if not data:
                if not self._complete():
                    raise EOFError
                break
            self._incoming += data
        return self._split()

    def _complete(self) -> bool:
        return len(self._incoming) >= _LENGTH.size and len(self._incoming) >= _LENGTH.size + _LENGTH.unpack_from(self._incoming)[0]

    def _split(self) -> list[Received]:
        received = []
        while self._complete():
            end = _LENGTH.size + _LENGTH.unpack_from(self._incoming)[0]
            message: dict[str, Any] = msgpack.unpackb(self._incoming[_LENGTH.size : end])
            del self._incoming[:end]
            received.append(Received(message, [self._incoming_fds.popleft() for _ in range(message["fds"])]))
        return received

    def close(self) -> None:
        """Close the socket and every descriptor that is still queued in either direction."""
        for _, fds in self._outgoing:
            _close_all(fds)
        self._outgoing.clear()
        _close_all(self._incoming_fds)
        self._incoming_fds.clear()
        self._sock.close()


def _close_all(fds: Sequence[int] | deque[int]) -> None:
    for fd in fds:
        os.close(fd)
