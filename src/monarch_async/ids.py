"""Names of processes and actors that hold across the job.

Rules: an id is chosen by whoever creates the thing, without asking anybody, so that `spawn` can return at once; an id is
never used twice; an address says how to reach a process but is not its identity.
"""

from __future__ import annotations

import itertools
import os
from typing import NamedTuple

__all__ = ["ActorKey", "ProcAddress", "new_actor_key", "new_uid", "row_of", "slot", "successor", "uid_at"]

ActorKey = int
"""64 bits: which actor of a process. All ranks of an actor mesh share one key, since a process holds at most one of them."""


def new_uid() -> str:
    """Twelve hex digits, unique without coordination."""
    return os.urandom(6).hex()


def row_of(uid: str) -> tuple[str, int]:
    """Processes that take each other's place are a row, named after the first: which row, and the place in it, from 0."""
    first, _, place = uid.partition(".")
    return first, int(place or 0)


def uid_at(first: str, place: int) -> str:
    """``"0123456789ab"``, ``"0123456789ab.1"``, ``"0123456789ab.2"``…"""
    return f"{first}.{place}" if place else first


def successor(uid: str) -> str:
    """The uid of the process that comes after one that has ended."""
    first, place = row_of(uid)
    return uid_at(first, place + 1)


class _Keys:
    """Key allocator: 40 random bits for the process, 23 for the count. Restarted in a forked child."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._base = int.from_bytes(os.urandom(5), "little") << 23
        self._count = itertools.count(1)

    def __call__(self) -> ActorKey:
        return self._base + next(self._count)


new_actor_key = _Keys()
os.register_at_fork(after_in_child=new_actor_key.restart)


class ProcAddress(NamedTuple):
    """Where a process can be reached: through the agent of its host, which hands the connection on.

    `uid` is the process (unique for ever), `host` the uid of its host, `unix` the path of the agent's socket (usable only
    on that host), `tcp` the agent's ``host:port`` for everyone else, or ``""`` while it listens on no network. `name` and
    `rank` are for people: the mesh of processes and the rank in it.
    """

    uid: str
    host: str
    unix: str
    tcp: str = ""
    name: str = ""
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.name or self.uid}[{self.rank}]" if self.name else self.uid


def slot(address: ProcAddress) -> str:
    """What a process and its successors have in common: the uid of the first."""
    return row_of(address.uid)[0]
