"""The control socket between an agent and a process of its host: connections arrive over it, and the wish that the process stop.

Each message is one packet: a letter, and for a connection its descriptor. End of file means that the other side is gone.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from monarch_async._runtime.connect import accept
from monarch_async._runtime.runtime import Runtime

__all__ = ["STOP", "Control"]

CONNECTION, STOP = b"c", b"s"


class Control:
    """Reads a control socket, which it owns, until `close`."""

    def __init__(self, runtime: Runtime, sock: socket.socket, *, on_stop: Callable[[], None], on_end: Callable[[], None]) -> None:
        self._runtime = runtime
        self._sock = sock
        self._on_stop = on_stop
        self._on_end = on_end
        sock.setblocking(False)
        runtime.loop.add_reader(sock.fileno(), self._read)

    def close(self) -> None:
        """Read no more."""
        if self._sock.fileno() >= 0:
            if not self._runtime.loop.is_closed():
                self._runtime.loop.remove_reader(self._sock.fileno())
            self._sock.close()

    def _read(self) -> None:
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:
                self.close()
                self._on_end()
                return
            if data == STOP:
                self._on_stop()
            for fd in fds:
                sock = socket.socket(fileno=fd)
                sock.setblocking(False)
                self._runtime.tasks.start(accept(self._runtime, sock), name="accepting a connection")
