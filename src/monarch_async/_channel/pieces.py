"""Memory of one process to memory of another over a connection that carries nothing else: blocking, for threads, and sealed.

Both sides know what is to come, since they have agreed on it elsewhere: so many bytes, from and to whatever list of views. They travel in
pieces of `PIECE`, each followed by its seal, and nothing else.

Rules:

* Nothing is written to memory that was not found genuine: a piece is received into a buffer of the connection first, which is warm, so
  that the second copy costs little.
* A piece is sent from where it lies. If somebody writes to it between its sealing and its sending the seal is wrong, which is the end of
  the connection. Who has to expect that has the pieces copied first.
* One thread sends or receives at a time. `shut` may be called in any: whoever sends or receives then gets an `OSError`.
* Any error is the end of the connection.
* Others that wait for the processor go first, between what takes some tenths of a millisecond.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
from collections.abc import Callable, Iterator, Sequence

from monarch_async._channel.processors import give_way
from monarch_async._core.address import address_of
from monarch_async._core.seal import SEAL_SIZE, Seal

__all__ = ["PIECE", "DataSocket", "cut"]

PIECE = 2 << 20
"""Bytes in one piece. Of 1 MiB they take 8 % more of the processors' time, of 4 MiB as much."""
_READY = b"ready"


def cut(views: Sequence[memoryview], size: int) -> Iterator[tuple[int, list[memoryview]]]:
    """What goes into each piece: how many bytes, and where they lie."""
    piece: list[memoryview] = []
    room = size
    for view in views:
        start = 0
        while start < len(view):
            part = view[start : start + room]
            piece.append(part)
            start, room = start + len(part), room - len(part)
            if not room:
                yield size, piece
                piece, room = [], size
    if piece:
        yield size - room, piece


class DataSocket:
    """One end of such a connection. Owns the socket, which blocks; `seals` are for sending and for receiving.

    Views are writable and of bytes, those that are sent too; `may` is called before each piece is sent or written, and may raise.
    """

    def __init__(self, sock: socket.socket, seals: tuple[Seal, Seal]) -> None:
        self._socket = sock
        self._send_seal, self._receive_seal = seals
        self._buffer = memoryview(bytearray(PIECE + SEAL_SIZE))

    def greet(self) -> None:
        """Tell the other side that this one is ready. The accepting side, once, before anything else."""
        self._socket.sendall(self._send_seal.sign(_READY))

    def check_greeting(self, seal: bytes) -> None:
        """`ProtocolError` unless these are the bytes of `greet`. The dialing side, once, before anything else."""
        self._receive_seal.check(seal, _READY)

    def send(self, views: Sequence[memoryview], may: Callable[[], None], copied: bool = False) -> None:
        """Send what is there; `copied` if it may change meanwhile. Raises `OSError`."""
        for size, piece in cut(views, PIECE):
            may()
            data = piece[0]
            if copied or len(piece) > 1:
                data = self._buffer[:size]
                start = 0
                for part in piece:
                    _copy(data[start:], part)
                    start += len(part)
            tail = self._send_seal.sign_bulk(_head(size), data)
            give_way()
            sent = self._socket.sendmsg((data, tail))
            if sent < size + SEAL_SIZE:  # a signal came
                self._socket.sendall(data[sent:])
                self._socket.sendall(tail[max(0, sent - size) :])
            give_way()

    def receive(self, views: Sequence[memoryview], may: Callable[[], None]) -> None:
        """Write what comes there. Raises `OSError` and `ProtocolError`."""
        seal = self._receive_seal
        for size, piece in cut(views, PIECE):
            self._fill(size + SEAL_SIZE)
            data = self._buffer[:size]
            digest = seal.begin_bulk()
            digest.update(data)
            give_way()
            seal.check(bytes(self._buffer[size : size + SEAL_SIZE]), _head(size), digest.digest())
            may()
            start = 0
            for part in piece:
                _copy(part, data[start:])
                start += len(part)
            give_way()

    def _fill(self, size: int) -> None:
        got = 0
        while got < size:
            more = self._socket.recv_into(self._buffer[got:], size - got, socket.MSG_WAITALL)
            if not more:
                raise ConnectionResetError("the other side has closed the connection")
            got += more

    @property
    def over(self) -> bool:
        """Whether the other side has closed it. Only while nothing is under way over it."""
        try:
            return not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def shut(self) -> None:
        """Nothing passes any more; in any thread."""
        with contextlib.suppress(OSError):  # it has broken
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the socket, when nobody sends or receives."""
        self._socket.close()


def _head(size: int) -> bytes:
    return size.to_bytes(8, "little")


def _copy(target: memoryview, source: memoryview) -> None:
    """To the beginning of `target`; other threads of Python go on meanwhile."""
    ctypes.memmove(address_of(target), address_of(source), min(len(source), len(target)))
