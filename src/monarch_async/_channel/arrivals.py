"""The receiver's half of messages on devices: copies out of memory that another process has lent.

An `Arrival` stands among the buffers of a message for bytes on a device. Whoever unpickles the message takes a copy of them (`fetch`), on
the device and without waiting for it; the loan is over when that copy has been made, or when nobody is left who could take one.

Rules:

* A segment is opened once, when something in it arrives, so that it does not matter what becomes of its owner until that is taken. It stays
  open until its owner wants it back or is gone, and nothing is taken from it.
* Whether copies have been made is looked at from the loop, more and more seldom; only while there are any.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from monarch_async._channel.devices import DeviceError
from monarch_async._channel.parcels import pool
from monarch_async._core.device_ledger import Key, Mappings

__all__ = ["Arrival", "Arrivals"]

SOON, SELDOM = 0.0002, 0.005
"""How long until copies are looked at again, in seconds: at first and at most."""

Given = Callable[[str, list[int]], None]
"""Told, in the loop, that loans of an owner are over, or segments of it unmapped."""


class Arrival:
    """`size` bytes that were lent to this process, until they are taken. Has a length, as other buffers have."""

    __slots__ = ("_arrivals", "_taken", "handle", "number", "offset", "owner", "pid", "segment", "size", "uuid")

    def __init__(self, arrivals: Arrivals, owner: str, loan: list[Any]) -> None:
        self.number, self.segment, self.offset, self.size, _, self.uuid, self.handle = loan
        self.owner = owner
        self.pid = os.getpid()
        self._arrivals = arrivals
        self._taken = False

    def __len__(self) -> int:
        return int(self.size)

    @property
    def nbytes(self) -> int:
        return int(self.size)

    @property
    def key(self) -> Key:
        return self.owner, self.segment

    def fetch(self, place: str) -> Any:
        """The storage of a copy, on the device that `place` means here. Once. Raises `DeviceError`."""
        if self._taken:
            raise DeviceError("these bytes on a device have been taken before, and given back")
        device, address = self._arrivals.find(self)
        storage, made = pool.devices.fetch(device, address + self.offset, self.size, place)
        self._taken = True
        self._arrivals.over(self, made)
        return storage

    def __del__(self) -> None:
        if not self._taken and self.pid == os.getpid():  # a forked child looks at nothing on a device
            self._arrivals.over(self, None)


class _Opened(NamedTuple):
    """A segment of another process, as it is here."""

    device: int
    address: int


class Arrivals:
    """For one runtime. Used from its loop, but for `find` and `over`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, thread: Callable[[], int], returned: Given, unmapped: Given) -> None:
        self._loop = loop
        self._thread = thread  # the loop's
        self._returned = returned
        self._unmapped = unmapped
        self._mappings = Mappings()
        self._opened: dict[Key, _Opened] = {}
        self._opening = threading.Lock()
        self._over: deque[tuple[str, int, int, Callable[[], bool] | None]] = deque()  # owner, segment, loan, whether the copy has been made
        self._looking = False  # at those, soon
        self._timer: asyncio.TimerHandle | None = None
        self._pause = SOON
        self._held: dict[str, set[int]] = {}  # numbers of loans that are not over, by owner
        self._closed = False

    def __len__(self) -> int:
        """How many segments may be open."""
        return len(self._mappings)

    def arrive(self, owner: str, loan: list[Any]) -> Arrival:
        """A loan has come: number, segment, and the rest of what `ParcelPool.describe` says."""
        arrival = Arrival(self, owner, loan)
        self._mappings.use(arrival.key)
        self._held.setdefault(owner, set()).add(arrival.number)
        if arrival.key not in self._opened:
            with contextlib.suppress(DeviceError):  # whoever takes it tries again, and is told
                self.find(arrival)
        return arrival

    def attempt(self, owner: str, loan: list[Any]) -> None:
        """See whether what is lent like this can be opened here. Raises `DeviceError`."""
        arrival = Arrival(self, owner, loan)
        arrival._taken = True  # it is no loan
        self._mappings.look(arrival.key)
        try:
            self.find(arrival)
        except BaseException:
            self.drop(owner, arrival.segment, tell=False)
            raise

    def held(self, owner: str) -> Iterable[int]:
        """Numbers of the loans of an owner that are not over."""
        return self._held.get(owner, ())

    def find(self, arrival: Arrival) -> tuple[int, int]:
        """The device and address of the segment of what has arrived. Raises `DeviceError`."""
        devices = pool.devices
        key = arrival.key
        with self._opening:
            opened = self._opened.get(key)
            if opened is None:
                device = devices.find(arrival.uuid)
                if device is None:
                    raise DeviceError(f"this process does not see the device {_readable(arrival.uuid)} (CUDA_VISIBLE_DEVICES)")
                opened = self._opened[key] = _Opened(device, devices.open(device, arrival.handle))
        return opened

    def over(self, arrival: Arrival, made: Callable[[], bool] | None) -> None:
        """It was taken, by a copy that may still be under way, or is wanted by nobody. In any thread, in the middle of anything."""
        if self._closed:
            return
        self._over.append((arrival.owner, arrival.segment, arrival.number, made))
        if not self._looking:
            self._looking = True
            schedule = self._loop.call_soon if threading.get_ident() == self._thread() else self._loop.call_soon_threadsafe
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                schedule(self._look)

    def drop(self, owner: str, segment: int, tell: bool = True) -> None:
        """The owner wants a segment back."""
        if self._mappings.drop((owner, segment)):
            self._unmap([(owner, segment)], tell)

    def owner_gone(self, owner: str) -> None:
        """Unmap all that was its, now or when no copy is under way from it."""
        self._held.pop(owner, None)
        self._unmap(self._mappings.owner_gone(owner), tell=False)

    def close(self) -> None:
        """Give nothing back any more. What has arrived and is not taken can still be, and stays mapped for that."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        unused = [key for key in self._opened if self._mappings.drop(key)]
        self._unmap(unused, tell=False)

    def _look(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._looking = False
        waiting = []
        ended: dict[str, list[int]] = {}
        unmap: list[Key] = []
        while self._over:
            owner, segment, number, made = entry = self._over.popleft()
            if made is not None and not _has_been(made):
                waiting.append(entry)
                continue
            ended.setdefault(owner, []).append(number)
            self._held.get(owner, set()).discard(number)
            if self._mappings.done((owner, segment)):
                unmap.append((owner, segment))
        self._over.extend(waiting)
        for owner, numbers in ended.items():
            self._returned(owner, numbers)
        self._unmap(unmap, tell=True)
        if not self._over:
            self._pause = SOON
        elif not self._closed:
            self._looking = True
            self._timer = self._loop.call_later(self._pause, self._look)
            self._pause = SOON if ended else min(2 * self._pause, SELDOM)

    def _unmap(self, keys: list[Key], tell: bool) -> None:
        if not keys:
            return
        with self._opening:
            opened = [self._opened.pop(key, None) for key in keys]

        def unmap() -> None:
            for found in opened:
                if found is not None:
                    with contextlib.suppress(DeviceError):  # the device has failed, and with it the mapping is gone
                        pool.devices.close(found.device, found.address)
            if tell:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._tell, keys)

        if not any(opened):
            if tell:
                self._tell(keys)
            return
        # It may wait for what the device is doing.
        threading.Thread(target=unmap, name="monarch_async unmapping device memory", daemon=True).start()

    def _tell(self, keys: list[Key]) -> None:
        unmapped: dict[str, list[int]] = {}
        for owner, segment in keys:
            unmapped.setdefault(owner, []).append(segment)
        for owner, segments in unmapped.items():
            self._unmapped(owner, segments)


def _has_been(made: Callable[[], bool]) -> bool:
    try:
        return made()
    except DeviceError:  # the device has failed: nothing reads from it any more
        return True


def _readable(uuid: bytes) -> str:
    text = uuid.hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
