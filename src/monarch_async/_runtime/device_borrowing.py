"""The receiver's half of lending on devices: answers whether it can open the memory of others, takes their loans, and gives them back.

See `device_lending` for the whole, `_channel/arrivals` for the memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol

from monarch_async._channel.arrivals import Arrival, Arrivals
from monarch_async._channel.devices import DeviceError
from monarch_async._channel.parcels import pool
from monarch_async._core.framing import (
    DEVICE_ANSWER,
    DEVICE_ASK,
    DEVICE_DROP,
    DEVICE_DROPPED,
    DEVICE_RETURNED,
    pack_message,
)
from monarch_async._runtime.leases import send_numbers
from monarch_async._runtime.link import Link
from monarch_async._runtime.peer import Peer
from monarch_async._runtime.tree import Handle
from monarch_async.options import Options

__all__ = ["NO", "NOT_YET", "YES", "DeviceBorrower", "DeviceBorrowing"]

NO, YES, NOT_YET = 0, 1, 2
"""What is answered to DEVICE_ASK. NOT_YET: this process uses no device so far, and is not made to by a question."""


class DeviceBorrower(Protocol):
    """What this needs of its runtime."""

    loop: asyncio.AbstractEventLoop
    options: Options
    log: logging.Logger
    thread: int
    peers: dict[str, Peer]
    kinds: dict[int, Handle]
    on_peer_gone: list[Callable[[Peer], None]]

    def peer_of(self, link: Link) -> Peer: ...


class DeviceBorrowing:
    """Borrows on devices for one runtime. Used from its loop."""

    def __init__(self, runtime: DeviceBorrower) -> None:
        self._runtime = runtime
        self.arrivals = Arrivals(runtime.loop, lambda: runtime.thread, self._give_back, self._tell_dropped)
        runtime.kinds.update({DEVICE_ASK: self._asked, DEVICE_DROP: self._drop})
        runtime.on_peer_gone.append(self._peer_gone)

    def arrive(self, owner: str, loan: list[Any]) -> Arrival:
        """What stands among the buffers of a message for bytes that are lent to this process."""
        return self.arrivals.arrive(owner, loan)

    def close(self) -> None:
        self.arrivals.close()

    def _asked(self, link: Link, fields: list[Any], buffers: list[memoryview] | None) -> None:
        """Another process wants to know whether its memory can be opened here."""
        loan: list[Any] = fields[1]
        verdict, why = NO, ""
        if self._runtime.options.cuda_ipc == "never":
            why = "the option cuda_ipc='never' forbids it there"
        elif not pool.devices.ready():
            verdict = NOT_YET
        else:
            try:
                self.arrivals.attempt(self._runtime.peer_of(link).address.uid, loan)
            except DeviceError as error:
                why = str(error)
            else:
                verdict = YES
        link.send_control(pack_message((DEVICE_ANSWER, loan[5], verdict, why[:1000])))

    def _give_back(self, owner: str, numbers: list[int]) -> None:
        self._tell(owner, DEVICE_RETURNED, numbers)

    def _drop(self, link: Link, fields: list[Any], buffers: list[memoryview] | None) -> None:
        """Segments are not lent any more."""
        owner = self._runtime.peer_of(link).address.uid
        for number in fields[1]:
            self.arrivals.drop(owner, number)

    def _tell_dropped(self, owner: str, segments: list[int]) -> None:
        self._tell(owner, DEVICE_DROPPED, segments)

    def _tell(self, owner: str, kind: int, numbers: list[int]) -> None:
        peer = self._runtime.peers.get(owner)
        link = peer.connect() if peer is not None else None
        if link is not None:
            send_numbers(link, kind, numbers)

    def _peer_gone(self, peer: Peer) -> None:
        self.arrivals.owner_gone(peer.address.uid)
