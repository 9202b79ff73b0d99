"""Tensors on CUDA devices between processes of one host: their bytes are lent in device memory, and only a small message travels.

Theory. Pickling copies the tensor, on its device and in order with the caller's work, into a block of memory that was allocated to be
exported (`_channel/parcels`). The message is held in its place on the link until the copy has been made, which the loop looks at now and
then. The receiver opens the memory and copies from it into a tensor of its own, in order with its own work (`_channel/arrivals`). When that
has been done it says so (DEVICE_RETURNED), and the block is used again. Neither side waits on the host; what arrives belongs to the
receiver alone.

Why the message waits, and not the receiver's stream, for an event that both processes know: a sender that is killed before its device came
to make the copy would leave that stream waiting for ever. And CUDA keeps such events in named shared memory.

Whether a process can open memory of a device is found out by trying, once for each device: the first message with a tensor of it goes
by host memory, and with it the question goes out (DEVICE_ASK), with something to open. Who uses no device yet answers NOT_YET, and is
asked again with a later message. Before any process has said yes no tensor is put into device memory for others.

Rules:

* A block is not used again while a process that it is lent to has not returned it and is not gone.
* A segment is not freed while a process that may have opened it has not said that it is unmapped (DEVICE_DROP, DEVICE_DROPPED) and is
  not gone.
* Messages to an agent, to other hosts, and over links that were never connected take host memory; so does what finds no room. The first
  time a process does so for a reason that can be mended, it logs that. The option ``cuda_ipc="always"`` makes it an error.
* A message that was lent and can't be opened after all fails with a `DecodeError`, as one in shared memory does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from monarch_async._channel.devices import DeviceError
from monarch_async._channel.parcels import LEAST, Parcel, device_of, parcel_of, pool
from monarch_async._core.codec import Buffers
from monarch_async._core.framing import (
    BODY_FIELD,
    CALL,
    DEVICE_ANSWER,
    DEVICE_ASK,
    DEVICE_DROP,
    DEVICE_DROPPED,
    DEVICE_RETURNED,
    LENT,
    PORT,
    REPLY,
    pack_message,
)
from monarch_async._runtime.device_borrowing import NOT_YET, YES, DeviceBorrower
from monarch_async._runtime.leases import send_numbers, undecodable
from monarch_async._runtime.link import Link
from monarch_async._runtime.outgoing import Held
from monarch_async._runtime.peer import Peer
from monarch_async.errors import ChannelError

__all__ = ["DeviceLending", "Split", "keep_parcels"]

AGE = 5.0
"""Every so many seconds it is looked which device memory has not been used for as long."""
AGAIN = 10.0
"""After so many seconds without an answer a process is asked again."""
LATER = 0.1
"""After so many seconds a process that used no device is asked again."""
QUICKLY, SELDOM = 0.0005, 0.002
"""Whether copies have been made is looked at in every iteration of the loop for so many seconds, and then every so many."""
_LENT = frozenset((CALL, REPLY, PORT))


class Split(NamedTuple):
    """The buffers of a message told apart: those in host memory, and for each buffer the parcel it stands for."""

    rest: Buffers
    parcels: list[Parcel | None]

    def merge(self, places: Sequence[tuple[int, int, int]], whole: bool, loans: int) -> list[tuple[int, int, int]]:
        """The places of all parts. Those in host memory are known, first the body if it is one; the loans of parcels come last."""
        known = iter(places)
        merged = [next(known)] if whole else []
        for parcel in self.parcels:
            if parcel is None:
                merged.append(next(known))
            else:
                merged.append((loans, 0, parcel.size))
                loans += 1
        return merged


class _Waiting(NamedTuple):
    """A message that is held until the bytes that it lends are there."""

    held: Held
    link: Link
    uid: str
    message: list[Any]
    parcels: list[Parcel]
    lent: list[list[Any]]
    told: list[Any]  # loans of host memory that go with it


class DeviceLending:
    """Lends on devices for one runtime. Used from its loop."""

    def __init__(self, runtime: DeviceBorrower) -> None:
        self._runtime = runtime
        self._mode = runtime.options.cuda_ipc
        self._asked: dict[tuple[str, int], float] = {}  # processes and devices without an answer yet, and until when it is waited for
        self._refusals: dict[tuple[str, int], str] = {}  # why one can't open the memory of a device
        self._known: set[str] = set()  # processes that were shown any
        self._waiting: list[_Waiting] = []
        self._looking: asyncio.Handle | None = None  # at those, soon
        self._looked_since = 0.0
        self._aging: asyncio.TimerHandle | None = None
        self._warned = False
        self._closed = False
        if self._mode != "never":
            pool.limit = runtime.options.cuda_ipc_bytes
            pool.refuse = self._mode == "always"
            pool.grown.append(self._grown)
        runtime.kinds.update({DEVICE_ANSWER: self._answered, DEVICE_DROPPED: self._dropped})
        runtime.on_peer_gone.append(self._peer_gone)

    def split(self, peer: Peer, link: Link, message: list[Any], buffers: Sequence[memoryview]) -> Split | None:
        """What of a message can be lent on devices; `None` if nothing can, or is there. Asks the peer where it has not said yet.

        Raises `ChannelError` where going by host memory is forbidden.
        """
        if not pool.active or self._mode == "never" or message[0] not in _LENT:
            return None
        devices: frozenset[int] | None = getattr(buffers, "devices", None)
        if devices is None:
            devices = _devices(buffers)
        refused = [device for device in devices if not pool.takes(peer.address.uid, device)]
        for device in refused:
            self._ask(peer, link, device)
        if refused or not devices:
            return None
        split: Split | None = getattr(buffers, "split", None)
        if split is None:
            parcels = [parcel_of(view) for view in buffers]
            staged = [view for view, parcel in zip(buffers, parcels, strict=True) if parcel is None and device_of(view) is not None]
            if pool.why_not and any(view.nbytes >= LEAST for view in staged):
                self._warn(pool.why_not)
            if not any(parcels):
                return None
            split = Split(Buffers(view for view, parcel in zip(buffers, parcels, strict=True) if parcel is None), parcels)
            if isinstance(buffers, Buffers):
                buffers.split = split
        return split

    def lend(self, peer: Peer, split: Split) -> list[list[Any]]:
        """Loans of all parcels, as they are told."""
        uid = peer.address.uid
        return [[pool.lend(parcel, uid), *pool.describe(parcel)] for parcel in split.parcels if parcel is not None]

    def take_back(self, uid: str, lent: Sequence[list[Any]]) -> None:
        """Loans that the process is not told of after all."""
        pool.returned(uid, [loan[0] for loan in lent])

    def hold(self, link: Link, message: list[Any], packed: bytes, split: Split, lent: list[list[Any]], told: list[Any]) -> bytes | Held:
        """The message that lends, as it is if the bytes are there already; else it is held until they are."""
        waiting = _Waiting(
            Held(packed),
            link,
            self._runtime.peer_of(link).address.uid,
            message,
            [parcel for parcel in split.parcels if parcel is not None],
            lent,
            told,
        )
        if self._is_ready(waiting):
            return waiting.held.packed
        if not self._waiting:
            self._looked_since = self._runtime.loop.time()
        self._waiting.append(waiting)
        if self._looking is None:
            self._looking = self._runtime.loop.call_soon(self._look)
        return waiting.held

    def close(self) -> None:
        """Lend nothing more. What is on loan stays as it is."""
        if self._aging is not None:
            self._aging.cancel()
        if self._looking is not None:
            self._looking.cancel()
        self.abandon()

    def abandon(self) -> None:
        """The loop is gone, or about to be."""
        self._closed = True
        self._waiting.clear()
        if self._grown in pool.grown:
            pool.grown.remove(self._grown)
        pool.close(self._known)

    def _is_ready(self, waiting: _Waiting) -> bool:
        try:
            waiting.held.ready = all(pool.filled(parcel) for parcel in waiting.parcels)
        except DeviceError as error:
            message = waiting.message
            message[BODY_FIELD[message[0]]] = undecodable(f"its bytes were on a device of the sender, which has failed: {error}")
            given_back = [DEVICE_RETURNED, [loan[0] for loan in waiting.lent]]
            self._runtime.kinds[DEVICE_RETURNED](waiting.link, given_back, None)  # as if by the process, which never hears of them
            # With the loans of host memory, which so come back.
            waiting.held.packed = pack_message((LENT, message, waiting.told, [], False))
            waiting.held.ready = True
        return waiting.held.ready

    def _look(self) -> None:
        self._looking = None
        waiting, self._waiting = self._waiting, []
        links: dict[Link, None] = {}
        blocked: set[Link] = set()  # those behind the first one wait for it anyway
        for one in waiting:
            if one.link.ended:  # nobody has been told, nor will be
                self.take_back(one.uid, one.lent)
            elif one.link not in blocked and self._is_ready(one):
                links[one.link] = None
            else:
                blocked.add(one.link)
                self._waiting.append(one)
        for link in links:
            link.go_on()
        if self._waiting and not self._closed:
            loop = self._runtime.loop
            if links:
                self._looked_since = loop.time()
            soon = loop.time() - self._looked_since < QUICKLY
            self._looking = loop.call_soon(self._look) if soon else loop.call_later(SELDOM, self._look)

    def _ask(self, peer: Peer, link: Link, device: int) -> None:
        key = (peer.address.uid, device)
        why = self._refusals.get(key)
        if why is not None:
            self._refuse(peer, why)
            return
        now = self._runtime.loop.time()
        if self._asked.get(key, 0.0) > now:
            return
        sample = pool.sample(device)
        if isinstance(sample, str):
            self._refuse(peer, sample)
            return
        self._asked[key] = now + AGAIN
        pool.shown(sample, key[0])
        self._known.add(key[0])
        link.send_control(pack_message((DEVICE_ASK, [0, *pool.describe(sample)])))

    def _answered(self, link: Link, fields: list[Any], buffers: list[memoryview] | None) -> None:
        _, uuid, verdict, why = fields
        peer = self._runtime.peer_of(link)
        uid = peer.address.uid
        device = pool.devices.find(uuid)
        if device is None or self._asked.pop((uid, device), None) is None:
            return
        if verdict == NOT_YET:
            self._asked[uid, device] = self._runtime.loop.time() + LATER
            return
        if verdict == YES:
            pool.taker(uid, device)
            return
        self._refusals[uid, device] = why
        if self._mode == "auto":
            self._warn(f"{peer.address} can't open memory of device {device}: {why}")

    def _refuse(self, peer: Peer, why: str) -> None:
        text = f"{peer.address} can't be lent memory of a CUDA device: {why}"
        if self._mode == "always":
            raise ChannelError(f"{text}; the option cuda_ipc='always' forbids to go by host memory")
        self._warn(text)

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            self._runtime.log.warning("a tensor on a CUDA device goes by host memory, which is slower, and so may others after it: %s", why)

    def returned(self, link: Link, fields: list[Any], buffers: list[memoryview] | None) -> None:
        pool.returned(self._runtime.peer_of(link).address.uid, fields[1])

    def _dropped(self, link: Link, fields: list[Any], buffers: list[memoryview] | None) -> None:
        pool.dropped(self._runtime.peer_of(link).address.uid, fields[1])

    def _peer_gone(self, peer: Peer) -> None:
        uid = peer.address.uid
        if uid in self._known:
            self._known.discard(uid)
            for accounts in (self._asked, self._refusals):
                for key in [key for key in accounts if key[0] == uid]:
                    del accounts[key]
            pool.peer_gone(uid)

    def _grown(self) -> None:
        """The pool has new memory. In any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._runtime.loop.call_soon_threadsafe(self._start_aging)

    def _start_aging(self) -> None:
        if self._aging is None and not self._closed:
            self._aging = self._runtime.loop.call_later(AGE, self._age)

    def _age(self) -> None:
        self._aging = None
        left = pool.age()
        for uid in self._known:
            peer = self._runtime.peers.get(uid)
            numbers = pool.drops(uid)
            if numbers and peer is not None and peer.link is not None:
                send_numbers(peer.link, DEVICE_DROP, numbers)
        if left:
            self._start_aging()


def keep_parcels(buffers: Buffers) -> bool:
    """If parcels are among the buffers, which nobody changes, copy the others, which somebody may; whether it is so."""
    if not pool.active:
        return False
    buffers.devices = _devices(buffers)  # not to be seen in the copies
    if not any(parcel_of(view) is not None for view in buffers):
        return False
    for index, view in enumerate(buffers):
        if parcel_of(view) is None:
            buffers[index] = memoryview(bytes(view))
    return True


def _devices(buffers: Sequence[memoryview]) -> frozenset[int]:
    """Those of buffers that could be lent."""
    found = {device_of(view) for view in buffers if view.nbytes >= LEAST}
    return frozenset(device for device in found if device is not None)
