"""Devices that are none, for lending on them without any: their memory is memfds, which other processes open through ``/proc``.

`OnDevice` is what a tensor on a device is otherwise. A process with a `Keeper` can send and receive such values, and so can one that has
called `install`.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import mmap
import os
import pickle
from collections.abc import Callable
from typing import Any

from monarch_async import Actor, Port, endpoint
from monarch_async._channel.arrivals import Arrival
from monarch_async._channel.cuda import Cuda
from monarch_async._channel.devices import DeviceError
from monarch_async._channel.parcels import placeholder, pool
from monarch_async._core import codec
from monarch_async._runtime.current import runtimes

__all__ = ["FakeDevices", "Keeper", "OnDevice", "devices", "install", "statistics_here", "uninstall"]

MEMORY = 64 << 20
UUIDS = (b"device number 0!", b"device number 1!")


class FakeDevices:
    """See the module's text; all its fields are for tests to change."""

    def __init__(self) -> None:
        self.in_use = False
        self.sees = UUIDS
        self.opens = True  # memory of other processes
        self.allocates = True
        self.held = False  # copies out of the memory of others are under way, for as long as this is set
        self.filling = False  # copies into the memory here are
        self.fails = False  # the device, when it is asked
        self.staged = 0  # copies in host memory
        self.memory: dict[int, tuple[int, mmap.mmap]] = {}  # by address: descriptor, mapping
        self.opened: dict[int, mmap.mmap] = {}

    def ready(self) -> bool:
        return self.in_use

    def uuid(self, device: int) -> bytes:
        return self.sees[device]

    def find(self, uuid: bytes) -> int | None:
        return self.sees.index(uuid) if uuid in self.sees else None

    def memory_of(self, device: int) -> int:
        return 8 * MEMORY

    def allocate(self, device: int, size: int) -> int:
        if not self.allocates:
            raise DeviceError("out of memory")
        fd = os.memfd_create("device")
        os.ftruncate(fd, size)
        memory = mmap.mmap(fd, size)
        address = _address(memory)
        self.memory[address] = fd, memory
        return address

    def free(self, device: int, address: int) -> None:
        fd, memory = self.memory.pop(address)
        os.close(fd)
        memory.close()

    def export(self, device: int, address: int) -> bytes:
        return f"/proc/{os.getpid()}/fd/{self.memory[address][0]}".encode()

    def open(self, device: int, handle: bytes) -> int:
        if not self.opens:
            raise DeviceError("invalid device context")
        with open(handle.decode(), "r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        address = _address(memory)
        self.opened[address] = memory
        return address

    def close(self, device: int, address: int) -> None:
        self.opened.pop(address).close()

    def fence(self, device: int) -> object:
        return object()

    def passed(self, device: int, fence: Any) -> bool:
        if self.fails:
            raise DeviceError("illegal address")
        return not self.filling

    def fill(self, device: int, address: int, size: int, source: Any, fence: Any) -> None:
        assert size == len(source)
        ctypes.memmove(address, bytes(source), size)

    def fetch(self, device: int, address: int, size: int, place: str) -> tuple[Any, Callable[[], bool]]:
        return bytearray(ctypes.string_at(address, size)), lambda: not self.held

    def stage(self, device: int, address: int, size: int, fence: Any) -> memoryview:
        self.staged += 1
        return memoryview(ctypes.string_at(address, size))


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class OnDevice:
    """Bytes on a device."""

    def __init__(self, data: bytes | bytearray, device: int = 0) -> None:
        self.data = bytearray(data)
        self.device = device
        self.way = ""  # by which it came

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OnDevice) and self.data == other.data

    __hash__ = None  # type: ignore[assignment]


def _reduce(value: OnDevice) -> tuple[Any, ...]:
    scope = codec.message_scope()
    size = len(value.data)
    memory: Any = None
    if scope.local and size >= codec.OUT_OF_BAND:
        memory = placeholder(size)
        memory.__here__ = bytearray(value.data)
    elif not (scope.local or scope.whole):
        memory = pool.pack(value.device, value.data, size)
    if memory is None:
        memory = _copied(value.data)
        memory.cuda_device = value.device
    return _rebuild, (pickle.PickleBuffer(memory), value.device)


def _copied(data: bytearray) -> Any:
    return (ctypes.c_ubyte * len(data)).from_buffer_copy(data)


def _rebuild(buffer: Any, device: int) -> OnDevice:
    way = "device" if isinstance(buffer, Arrival) else "here" if type(buffer) is bytearray else "host"
    value = OnDevice(buffer.fetch(str(device)) if isinstance(buffer, Arrival) else buffer, device)
    value.way = way
    return value


devices = FakeDevices()


def install() -> None:
    """Have this process send such values, by these devices."""
    codec.register_reducer(OnDevice, _reduce)
    pool.devices = devices


def uninstall() -> None:
    """As if there had been none."""
    pool.forget()
    pool.devices = Cuda()
    del codec._reducers[OnDevice]
    codec._table.pop(OnDevice, None)


def statistics_here() -> dict[str, int]:
    return pool.statistics()


class Keeper(Actor):
    """Keeps what it gets."""

    def __init__(self, in_use: bool = True) -> None:
        install()
        devices.in_use = in_use
        self.kept: list[OnDevice] = []
        self.noted: list[str] = []

    @endpoint
    async def use(self, settings: dict[str, Any]) -> None:
        for name, value in settings.items():
            setattr(devices, name, value)

    @endpoint
    async def echo(self, value: Any) -> Any:
        return value

    @endpoint
    def echo_in_thread(self, value: Any) -> Any:
        return value

    @endpoint
    async def way(self, value: Any) -> str:
        """How it has come."""
        return next((part.way for part in value if isinstance(part, OnDevice)), "") if isinstance(value, list) else str(value.way)

    @endpoint
    async def keep(self, value: OnDevice) -> str:
        self.kept.append(value)
        return value.way

    @endpoint
    async def first(self) -> list[int]:
        """The first byte of each."""
        return [value.data[0] for value in self.kept]

    @endpoint
    async def write(self, byte: int) -> None:
        for value in self.kept:
            value.data[:] = bytes([byte]) * len(value.data)

    @endpoint
    async def waits(self, value: Any) -> None:
        await asyncio.Event().wait()

    @endpoint
    async def through(self, port: Port[Any], value: Any) -> None:
        port.send(value)

    @endpoint
    async def note(self, what: str) -> None:
        self.noted.append(what)

    @endpoint
    async def note_value(self, value: OnDevice) -> None:
        self.noted.append(f"{value.way} {value.data[0]}")

    @endpoint
    async def notes(self) -> list[str]:
        return self.noted

    @endpoint
    async def send_notes(self, other: Any, numbers: int) -> None:
        for number in range(numbers):
            other.note_value.broadcast(OnDevice(bytes([number]) * 100_000))

    @endpoint
    async def send_on(self, other: Any, value: OnDevice) -> str:
        return str(await other.way.call_one(value))

    @endpoint
    def send_from_thread(self, other: Any, value: OnDevice, count: int) -> list[str]:
        return [str(other.way.call_one(value).get()) for _ in range(count)]

    @endpoint
    async def statistics(self) -> dict[str, int]:
        gc.collect()
        (runtime,) = runtimes()
        return {**pool.statistics(), "mapped": len(runtime.lending.borrowing.on_devices.arrivals), "staged": devices.staged}

    @endpoint
    async def pid(self) -> int:
        return os.getpid()
