"""Breaking the connections of one gloo device from outside, so that what its threads wait for fails at once.

Gloo has no call that ends an operation under way: its works wait until a connection breaks or their timeout passes. A device has a
listening socket of its own; the connections of its pairs either have that as their own end, or a device of another member as the far
one. So they can be told from all other sockets of the process by their addresses.

A device is used again, by the next epoch or by another group, as soon as its own member has let go of it, whatever the others have done by
then. So what leads to a device of another member belongs to whom that one has taken it for last: members tell each other when that was.

Rules:

* The listening socket itself is never touched, since gloo ends the process if it breaks.
* Who breaks connections off late, because its epoch has only now come to its end here, breaks none of a later one.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Collection, Iterator

__all__ = ["Connections", "Endpoint", "break_connections", "listening_sockets"]

Endpoint = tuple[str, int]
"""Address and port."""


class Connections:
    """Those of the device that listens at `mine` while one backend has it. Its methods may be called from any thread."""

    def __init__(self, mine: Endpoint) -> None:
        self._mine = mine
        self._others: dict[Endpoint, int] = {}

    def may_lead_to(self, other: Endpoint, taken: int) -> None:
        """There will be some to a device of another member; `taken` is the time there when it was taken for this."""
        with _lock:
            self._others[other] = taken
            _last_taken[other] = max(taken, _last_taken.get(other, taken))

    def break_off(self) -> None:
        """Break all there are."""
        with _lock:
            break_connections(self._mine, [other for other, taken in self._others.items() if taken >= _last_taken.get(other, taken)])

    def let_go(self) -> None:
        """There will be no more."""
        with _lock:
            for other, taken in self._others.items():
                if _last_taken.get(other) == taken:
                    del _last_taken[other]


_lock = threading.Lock()
_last_taken: dict[Endpoint, int] = {}
"""When a device of another member was taken for what it leads to from here, by its member's clock."""


def listening_sockets() -> set[Endpoint]:
    """Where this process listens on TCP."""
    return {local for sock, local, remote in _sockets() if remote is None and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)}


def break_connections(mine: Endpoint, others: Collection[Endpoint]) -> int:
    """Break every connection between the device that listens at `mine` and those at `others`; returns how many there were."""
    broken = 0
    for sock, local, remote in _sockets():
        if remote is not None and (local == mine or remote in others):
            try:
                sock.shutdown(socket.SHUT_RDWR)
                broken += 1
            except OSError:  # it has broken by itself
                pass
    return broken


def _sockets() -> Iterator[tuple[socket.socket, Endpoint, Endpoint | None]]:
    """The TCP sockets of this process, each as a duplicate that is closed when the next is asked for."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            sock = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed meanwhile
            continue
        with sock:
            if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
                continue
            try:
                local: Endpoint = sock.getsockname()[:2]
            except OSError:
                continue
            try:
                remote: Endpoint | None = sock.getpeername()[:2]
            except OSError:
                remote = None
            yield sock, local, remote
