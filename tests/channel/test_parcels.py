"""The pool of device memory, on devices that are none: used by threads at once, in a forked child, and when the device fails."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from monarch_async._channel.devices import DeviceError
from monarch_async._channel.parcels import ParcelPool, parcel_of, placeholder, pool, settled
from monarch_async._core.codec import Buffers
from tests.api.device_actors import FakeDevices

MIB = 1 << 20


@pytest.fixture
def devices() -> FakeDevices:
    return FakeDevices()


@pytest.fixture
def own(devices: FakeDevices) -> Iterator[ParcelPool]:
    """A pool with a process that takes what is in it; it frees all in the end."""
    own = ParcelPool(devices)
    own.limit = 64 * MIB
    own.taker("peer", 0)
    yield own
    own.close({"peer"})
    join_freeing()
    assert not devices.memory


def join_freeing() -> None:
    for thread in [thread for thread in threading.enumerate() if "freeing" in thread.name]:
        thread.join()


def test_parcels_end_in_any_thread(own: ParcelPool) -> None:
    """Threads that use it at once each get a block of their own, and it has all of them back."""
    wrong: list[int] = []

    def work(byte: int) -> None:
        for _ in range(50):
            memory = own.pack(0, bytes([byte]) * 100_000, 100_000)
            if memory is None or bytes([byte]) * 100_000 != bytes(memory.parcel.bytes()):
                wrong.append(byte)

    threads = [threading.Thread(target=work, args=(byte,)) for byte in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [] == wrong
    assert 0 == own.statistics()["blocks"]


def test_a_forked_child_begins_anew() -> None:
    """Nothing of its parent's is used there, not even while its lock is held."""
    pool.taker("peer", 0)
    read, write = os.pipe()
    with pool._lock:
        child = os.fork()
        if not child:
            os.write(write, repr((pool._takers, pool.statistics(), pool.pack(0, b"", 1 << 20))).encode())
            os._exit(0)
    os.waitpid(child, 0)
    assert repr(({}, {"bytes": 0, "blocks": 0, "loans": 0}, None)).encode() == os.read(read, 1000)
    os.close(read)
    os.close(write)
    pool.forget()


def test_a_copy_that_fails_gives_its_block_back(own: ParcelPool, devices: FakeDevices, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sends hears of it, and nothing stays in use."""

    def fill(*args: object) -> None:
        raise DeviceError("illegal address")

    monkeypatch.setattr(devices, "fill", fill)
    with pytest.raises(DeviceError, match="illegal address"):
        own.pack(0, bytes(MIB), MIB)
    assert 0 == own.statistics()["blocks"]


def test_what_can_not_be_exported_is_freed(own: ParcelPool, devices: FakeDevices, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on devices that can't share memory at all; the reason is known, and it is not tried again."""
    tried: list[int] = []

    def export(device: int, address: int) -> bytes:
        tried.append(address)
        raise DeviceError("not supported")

    monkeypatch.setattr(devices, "export", export)
    for _ in range(2):
        assert own.pack(0, bytes(MIB), MIB) is None
        assert "memory of device 0 can't be shared with other processes: not supported" == own.why_not == own.sample(0)
    assert 1 == len(tried)
    assert not devices.memory


def test_settled_buffers_are_made_once(own: ParcelPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those in host memory stay, parcels become their bytes, for all who ask; without parcels nothing is made."""
    monkeypatch.setattr(pool, "active", True)
    plain = Buffers([memoryview(b"abc")])
    assert settled(plain) is plain
    mixed = Buffers([memoryview(b"abc"), memoryview(own.pack(0, b"d" * MIB, MIB)).cast("B")])
    assert parcel_of(mixed[1]) is not None
    assert [b"abc", b"d" * MIB] == [bytes(view) for view in settled(mixed)]
    assert settled(mixed) is settled(mixed)


def test_a_placeholder_costs_nothing() -> None:
    """A terabyte of it has no memory."""
    assert 1 << 40 == memoryview(placeholder(1 << 40)).nbytes
