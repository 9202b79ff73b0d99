"""Descriptors from process to process on one host: every process has an inbox, a datagram socket in the job's private directory.

A datagram brings one read-only descriptor of a segment and says what it is: whose, which, how large. Or it brings a *gift*: a few
descriptors under a name, for a library that knows what to do with them. It is sealed with the host's key, so only a process of this job can
put one there. What was sent before a frame of a link is here when that frame is.

Rules:

* Never waits: an inbox that is full, or not there, refuses, and the sender takes another way.
* One descriptor is kept in reserve, so that a process at its limit of open files can still take one, map it and close it. That does not
  hold for gifts: one that lost a descriptor on the way is as if it had not come.
"""

from __future__ import annotations

import array
import contextlib
import hmac
import os
import socket
from collections.abc import Callable, Sequence
from hashlib import blake2b, sha256
from typing import Any

import msgpack

from monarch_async._channel.segment import Mapping
from monarch_async.ids import ProcAddress

__all__ = ["Inbox", "inbox_path"]

_SEAL = 16
_LONGEST = 512
_MOST = 4  # descriptors in a gift
_SPACE = socket.CMSG_SPACE(4 * _MOST)


def inbox_path(address: ProcAddress, uid: str) -> str:
    """Where the inbox of process `uid` is, on the host of `address`."""
    return os.path.join(os.path.dirname(address.unix), f"inbox-{uid}")


class Inbox:
    """The inbox of this process, bound to `path`; `found` is told of each segment: its owner's uid, its number, its mapping.

    `given` is told of each gift, whose descriptors are then its own: the giver's uid, the name, the descriptors.
    Raises `OSError` when it can't be made.
    """

    def __init__(
        self, path: str, key: bytes, found: Callable[[str, int, Mapping], None], given: Callable[[str, str, list[int]], None]
    ) -> None:
        self._path = path
        self._key = sha256(b"descriptors" + key).digest()
        self._found = found
        self._given = given
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            self._sock.bind(path)
            self._reserve = _open_reserve()
        except OSError:
            self._sock.close()
            raise

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, path: str, owner: str, number: int, size: int, fd: int) -> None:
        """Put a descriptor into another process's inbox. Raises `OSError` when that is full or gone."""
        self._send(path, (owner, number, size), [fd])

    def give(self, path: str, giver: str, name: str, fds: Sequence[int]) -> None:
        """Put a gift of up to four descriptors into another process's inbox. From any thread. Raises `OSError` as `send` does."""
        self._send(path, (giver, name, len(fds)), fds)

    def _send(self, path: str, fields: tuple[Any, ...], fds: Sequence[int]) -> None:
        body: bytes = msgpack.packb(fields)
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        self._sock.sendmsg([self._seal(body) + body], control, 0, path)

    def receive(self) -> None:
        """Take in whatever has come. Raises `OSError`, at the end, for what could not be taken in, which is lost then."""
        lost = None
        while True:
            self._release_reserve()
            try:
                data, control, _, _ = self._sock.recvmsg(_LONGEST, _SPACE, socket.MSG_CMSG_CLOEXEC)
                try:
                    self._take(data, control)
                except OSError as error:
                    lost = error
            except BlockingIOError:
                break
            finally:
                with contextlib.suppress(OSError):  # at the limit of open files: tried again at the next time
                    self._reserve = _open_reserve()
        if lost is not None:
            raise lost

    def _take(self, data: bytes, control: list[tuple[int, int, bytes]]) -> None:
        fds = array.array("i")
        for _, _, content in control:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
        try:
            seal, body = data[:_SEAL], data[_SEAL:]
            if not hmac.compare_digest(seal, self._seal(body)):
                return  # of no process of this job
            fields: Any = msgpack.unpackb(body)
            match fields:
                case [str(owner), int(number), int(size)] if size > 0:
                    if not fds:
                        raise OSError("a descriptor of shared memory was lost: the limit on open files (ulimit -n) is reached")
                    self._found(owner, number, Mapping(fds.pop(), size))
                case [str(giver), str(name), int(count)]:
                    if len(fds) < count:
                        raise OSError("a gift of descriptors was lost: the limit on open files (ulimit -n) is reached")
                    given, fds = fds.tolist(), array.array("i")
                    self._given(giver, name, given)
                case _:
                    pass  # of a later version
        finally:
            for fd in fds:
                os.close(fd)

    def _seal(self, body: bytes) -> bytes:
        return blake2b(body, digest_size=_SEAL, key=self._key, person=b"descriptor").digest()

    def _release_reserve(self) -> None:
        if self._reserve >= 0:
            os.close(self._reserve)
            self._reserve = -1

    def close(self) -> None:
        self._release_reserve()
        self._sock.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)


def _open_reserve() -> int:
    return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
