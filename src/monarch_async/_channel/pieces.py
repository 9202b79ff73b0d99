"""Memory of one process to memory of another over a connection that carries nothing else: blocking, for threads, and sealed.

Both sides know what is to come, since they have agreed on it elsewhere: so many bytes, from and to whatever lists of places. They travel in
pieces of `PIECE`, each followed by its seal, and nothing else.

Rules:

* A piece is gathered into a buffer of this connection, sealed and sent from there: whoever writes to the memory meanwhile can't make the
  seal wrong. The other side receives it into such a buffer, and writes to memory only what it has found genuine. The two copies cost
  little: a buffer stays in the processor's cache, so that digest and socket read it, and the socket fills it, faster than memory.
* One thread sends or receives at a time. `shut` may be called in any: whoever sends or receives then gets an `OSError`.
* Any error is the end of the connection.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
from collections.abc import Callable, Iterator, Sequence

from monarch_async._core.seal import SEAL_SIZE, Seal

__all__ = ["PIECE", "DataSocket", "Place"]

PIECE = 1 << 18
"""Bytes in one piece: with all that is done to it, it fits in the cache of one core."""
_READY = b"ready"
_memmove = ctypes.memmove

Place = tuple[int, int]
"""Address and size of memory, which whoever gives it keeps alive."""


def cut(places: Sequence[Place], size: int) -> Iterator[tuple[int, list[Place]]]:
    """What goes into each piece: how many bytes, and which places they are of."""
    piece: list[Place] = []
    room = size
    for address, left in places:
        while left:
            taken = min(left, room)
            piece.append((address, taken))
            address, left, room = address + taken, left - taken, room - taken
            if not room:
                yield size, piece
                piece, room = [], size
    if piece:
        yield size - room, piece


class DataSocket:
    """One end of such a connection. Owns the socket, which blocks; `seals` are for sending and for receiving."""

    def __init__(self, sock: socket.socket, seals: tuple[Seal, Seal]) -> None:
        self._socket = sock
        self._send_seal, self._receive_seal = seals
        self._view = memoryview(bytearray(PIECE + SEAL_SIZE))
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._view))

    def greet(self) -> None:
        """Tell the other side that this one is ready. The accepting side, once, before anything else."""
        self._socket.sendall(self._send_seal.sign(_READY))

    def check_greeting(self, seal: bytes) -> None:
        """`ProtocolError` unless these are the bytes of `greet`. The dialing side, once, before anything else."""
        self._receive_seal.check(seal, _READY)

    def send(self, places: Sequence[Place], may: Callable[[], None]) -> None:
        """Send what is there; `may` is called before each piece, and may raise. Raises `OSError`."""
        view, address, seal = self._view, self._address, self._send_seal
        for size, piece in cut(places, PIECE):
            may()
            end = address
            for place, length in piece:
                _memmove(end, place, length)
                end += length
            view[size : size + SEAL_SIZE] = seal.sign_bulk(size.to_bytes(8, "little"), view[:size])
            self._socket.sendall(view[: size + SEAL_SIZE])

    def receive(self, places: Sequence[Place], may: Callable[[], None]) -> None:
        """Write what comes there; `may` is called before a piece is written, and may raise. Raises `OSError` and `ProtocolError`."""
        view, address, seal = self._view, self._address, self._receive_seal
        for size, piece in cut(places, PIECE):
            self._fill(size + SEAL_SIZE)
            digest = seal.begin_bulk()
            digest.update(view[:size])
            seal.check(bytes(view[size : size + SEAL_SIZE]), size.to_bytes(8, "little"), digest.digest())
            may()
            start = address
            for place, length in piece:
                _memmove(place, start, length)
                start += length

    def _fill(self, size: int) -> None:
        got = 0
        while got < size:
            more = self._socket.recv_into(self._view[got:], size - got, socket.MSG_WAITALL)
            if not more:
                raise ConnectionResetError("the other side has closed the connection")
            got += more

    def shut(self) -> None:
        """Nothing passes any more; in any thread."""
        with contextlib.suppress(OSError):  # it has broken
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the socket, when nobody sends or receives."""
        self._socket.close()
