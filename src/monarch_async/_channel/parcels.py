"""The sender's half of messages on devices: a copy of a tensor's bytes in device memory that other processes can open, with its message.

Whoever pickles a tensor on a device puts its bytes into a block of the process's `pool` (a copy on the device, not waited for) and
hands out a *placeholder*: out-of-band memory of the right size, without content, that holds the `Parcel`. Whoever sends the message
either lends the block (`_runtime/device_lending`), or asks for the bytes (`settled`), which are then copied to host memory.

Rules:

* A placeholder's own bytes are never looked at. All that takes the buffers of a message apart goes through `settled` or `parcel_of`.
* A parcel's block is held for as long as any view of the placeholder is; the loans of it are the pool's own account (`Ledger`).
* Nothing is put into the pool before some process has said that it can open memory of that device: until then, and where there is no room,
  tensors go by host memory from the start.
* Memory is allocated, and freed, without the lock; freed in a thread of its own, since that may wait for the device.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from monarch_async._channel.cuda import Cuda
from monarch_async._channel.devices import DeviceError, Devices
from monarch_async._core.codec import Buffers
from monarch_async._core.device_ledger import DeviceBlock, DeviceSegment, Ledger, Wanted

__all__ = ["LEAST", "Parcel", "ParcelPool", "device_of", "parcel_of", "placeholder", "pool", "settled"]

LEAST = 1 << 16
"""Fewer bytes go by host memory: a copy there and back costs no more than a loan."""
PROBE = 1 << 16
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def placeholder(size: int) -> Any:
    """Memory of that size which costs none, to be filled by nobody."""
    # Of its own, so that it is never mistaken for other memory; nothing is committed as long as it is not touched.
    return (ctypes.c_ubyte * size).from_buffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE))


class Parcel:
    """`size` bytes in a block, for one message."""

    __slots__ = ("__weakref__", "_pool", "_staged", "block", "size")

    def __init__(self, pool: ParcelPool, block: DeviceBlock, size: int) -> None:
        self.block = block
        self.size = size
        self._pool = pool
        self._staged: memoryview | None = None

    def bytes(self) -> memoryview:
        """A copy in host memory; made once, and waited for. Raises `DeviceError`."""
        if self._staged is None:
            self._staged = self._pool.stage(self)
        return self._staged

    def __del__(self) -> None:
        self._pool.unheld(self.block)


class ParcelPool:
    """Device memory of this process for messages to others of its host. Used from any thread.

    `limit` is what it may have on each device, in bytes.
    """

    def __init__(self, devices: Devices) -> None:
        self.devices = devices
        self.forget()

    def forget(self) -> None:
        """Begin anew: in a forked child all this is the parent's."""
        self.limit = 0
        self.refuse = False  # there is an error where there is no room: going by host memory is forbidden
        self.grown: list[Callable[[], None]] = []  # told, in any thread, when there is a new segment
        self.active = False  # there have been tensors on devices
        self.why_not = ""  # the last reason for which there was no room
        self._ledger = Ledger()
        self._lock = threading.Lock()
        self._takers: dict[int, set[str]] = {}  # by device: processes that can open its memory
        self._unable: dict[int, str] = {}  # devices whose memory can't be exported, and why
        self._addresses: dict[int, int] = {}  # of segments
        self._handles: dict[int, bytes] = {}
        self._unheld: deque[DeviceBlock] = deque()  # parcels end in any thread, while garbage is collected too: to let go is one append

    def pack(self, device: int, source: Any, size: int) -> Any:
        """A placeholder with a copy of a source's bytes; `None` where they have to go by host memory.

        Raises `MemoryError` in place of that where it is forbidden, and `DeviceError` if the copy can't be made.
        """
        self.active = True
        if not self._takers.get(device) or size < LEAST:
            return None
        parcel = self._parcel(device, size)
        if isinstance(parcel, str):
            if self.refuse:
                raise MemoryError(f"{parcel}; the option cuda_ipc='always' forbids to go by host memory")
            self.why_not = parcel
            return None
        block = parcel.block
        self.devices.fill(device, self._address(block), size, source, block.fence)
        memory = placeholder(size)
        memory.parcel = parcel
        return memory

    def sample(self, device: int) -> Parcel | str:
        """Something to try to open, or why there is nothing. Nothing was written to it."""
        try:
            return self._parcel(device, PROBE)
        except DeviceError as error:
            return str(error)

    def describe(self, parcel: Parcel) -> list[Any]:
        """All that is needed to open it: segment, offset, size, bytes of the segment, UUID of the device, the segment's handle."""
        block = parcel.block
        segment = block.segment
        return [segment.number, block.offset, parcel.size, segment.size, self.devices.uuid(segment.device), self._handles[segment.number]]

    def filled(self, parcel: Parcel) -> bool:
        """Whether its bytes are there. Raises `DeviceError` if they never will be."""
        block = parcel.block
        return self.devices.passed(block.segment.device, block.fence)

    def stage(self, parcel: Parcel) -> memoryview:
        """Its bytes in host memory."""
        block = parcel.block
        return self.devices.stage(block.segment.device, self._address(block), parcel.size, block.fence)

    def unheld(self, block: DeviceBlock) -> None:
        """A parcel is gone."""
        self._unheld.append(block)

    # Who takes what.

    def taker(self, peer: str, device: int) -> None:
        """A process has said that it can open memory of this device."""
        with self._lock:
            self._takers.setdefault(device, set()).add(peer)

    def takes(self, peer: str, device: int) -> bool:
        return peer in self._takers.get(device, ())

    def shown(self, parcel: Parcel, peer: str) -> None:
        with self._lock:
            self._ledger.shown(parcel.block, peer)

    def lend(self, parcel: Parcel, peer: str) -> int:
        """The number of a loan."""
        with self._lock:
            return self._ledger.lend(parcel.block, peer)

    def returned(self, peer: str, numbers: Sequence[int]) -> None:
        with self._lock:
            for number in numbers:
                self._ledger.returned(peer, number)

    def peer_gone(self, peer: str) -> None:
        with self._lock:
            for takers in self._takers.values():
                takers.discard(peer)
            self._ledger.peer_gone(peer)
        self._free()

    def drops(self, peer: str) -> list[int]:
        """Segments that a process is to unmap."""
        with self._lock:
            return self._ledger.drops(peer)

    def dropped(self, peer: str, numbers: Sequence[int]) -> None:
        with self._lock:
            for number in numbers:
                self._ledger.dropped(peer, number)
        self._free()

    def age(self) -> bool:
        """Give up what was not used since the call before the last one; whether there is any memory left."""
        with self._lock:
            self._collect()
            self._ledger.age()
        self._free()
        return bool(self._ledger.segments)

    def close(self, peers: set[str]) -> None:
        """These processes are heard of no more."""
        with self._lock:
            self._collect()
            for takers in self._takers.values():
                takers -= peers
            self._ledger.close(peers)
            self._ledger.age()
            self._ledger.age()
        self._free()

    def statistics(self) -> dict[str, int]:
        """Bytes that are set aside, blocks in use, and loans."""
        with self._lock:
            self._collect()
            segments = self._ledger.segments.values()
            blocks = [block for segment in segments for block in segment.used]
            return {
                "bytes": sum(segment.size for segment in segments),
                "blocks": len(blocks),
                "loans": sum(len(block.loans) for block in blocks),
            }

    def _address(self, block: DeviceBlock) -> int:
        return self._addresses[block.segment.number] + block.offset

    def _parcel(self, device: int, size: int) -> Parcel | str:
        if device in self._unable:
            return self._unable[device]
        bound = min(self.limit, self.devices.memory_of(device) // 8)
        with self._lock:
            self._collect()
            found = self._ledger.take(device, size, bound)
        self._free()
        if isinstance(found, Wanted):
            found = self._allocate(found)
        if isinstance(found, str):
            return found
        parcel = Parcel(self, found, size)
        if found.fence is None:
            found.fence = self.devices.fence(device)
        return parcel

    def _allocate(self, wanted: Wanted) -> DeviceBlock | str:
        number, device, size = wanted
        try:
            address = self.devices.allocate(device, size)
        except DeviceError as error:
            with self._lock:
                self._ledger.failed(number)
            return f"device {device} gives no {size} bytes: {error}"
        try:
            handle = self.devices.export(device, address)
        except DeviceError as error:
            self.devices.free(device, address)
            with self._lock:
                self._ledger.failed(number)
            self._unable[device] = why = f"memory of device {device} can't be shared with other processes: {error}"
            return why
        with self._lock:
            self._addresses[number], self._handles[number] = address, handle
            block = self._ledger.allocated(number)
        for tell in self.grown:
            tell()
        return block

    def _collect(self) -> None:
        while self._unheld:
            self._ledger.let_go(self._unheld.popleft())

    def _free(self) -> None:
        with self._lock:
            frees = [segment for segment in self._ledger.frees() if segment.number in self._addresses]
            addresses = [self._addresses.pop(segment.number) for segment in frees]
            for segment in frees:
                del self._handles[segment.number]
        if frees:
            self._freeing(frees, addresses)

    def _freeing(self, frees: list[DeviceSegment], addresses: list[int]) -> None:
        def free() -> None:
            for segment, address in zip(frees, addresses, strict=True):
                try:
                    self.devices.free(segment.device, address)
                except DeviceError:
                    continue  # it goes on counting, as it is still there
                with self._lock:
                    self._ledger.freed(segment.number)

        threading.Thread(target=free, name="monarch_async freeing device memory", daemon=True).start()


def parcel_of(view: memoryview) -> Parcel | None:
    """The parcel that a buffer of a message stands for."""
    exporter = view.obj
    parcel: Parcel | None = getattr(exporter, "parcel", None) if isinstance(exporter, ctypes.Array) else None
    return parcel


def device_of(view: memoryview) -> int | None:
    """The device from which a buffer of a message was copied, if it was from one."""
    exporter = view.obj
    if not isinstance(exporter, ctypes.Array):
        return None
    parcel: Parcel | None = getattr(exporter, "parcel", None)
    device: int | None = getattr(exporter, "cuda_device", None) if parcel is None else parcel.block.segment.device
    return device


def settled(buffers: Sequence[memoryview]) -> Sequence[memoryview]:
    """The buffers of a message with the bytes of all parcels in host memory; themselves if there are none. Raises `DeviceError`."""
    if not pool.active:
        return buffers
    parcels = [parcel_of(view) for view in buffers]
    if not any(parcels):
        return buffers
    known = getattr(buffers, "settled", None)
    if known is None:
        known = Buffers(view if parcel is None else parcel.bytes() for view, parcel in zip(buffers, parcels, strict=True))
        if isinstance(buffers, Buffers):
            buffers.settled = known  # so that the copies of it which are shared by receivers are made once
    found: Sequence[memoryview] = known
    return found


pool = ParcelPool(Cuda())
"""Of this process."""

os.register_at_fork(after_in_child=pool.forget)
