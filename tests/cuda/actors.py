"""Actors that get and send tensors on a device."""

from __future__ import annotations

import asyncio
import gc
import os
import warnings
from typing import Any

import torch

from monarch_async import Actor, endpoint
from monarch_async._channel.arrivals import Arrival
from monarch_async._channel.parcels import pool
from monarch_async._runtime.current import runtimes

__all__ = ["OnGpu", "count_fetches", "fetches", "same", "statistics_here"]

fetches: list[str] = []
"""One for each copy that this process has taken out of another's memory."""
_plain_fetch = Arrival.fetch


def count_fetches() -> None:
    """From now on, in this process."""

    def fetch(self: Arrival, place: str) -> Any:
        fetches.append(place)
        return _plain_fetch(self, place)

    Arrival.fetch = fetch  # type: ignore[method-assign]


def statistics_here() -> dict[str, int]:
    gc.collect()
    return pool.statistics()


def bits(tensor: torch.Tensor) -> bytes:
    """The elements' bytes in order, for dtypes that can't be compared."""
    if not tensor.numel():
        return b""
    data = tensor.detach().resolve_conj().resolve_neg()
    size = data.element_size()
    plain = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[size]
    return bytes(data.view(plain).contiguous().cpu().view(-1).view(torch.uint8).numpy().data)


def same(left: torch.Tensor, right: torch.Tensor) -> None:
    """Alike in all that is promised to arrive."""
    assert type(left) is type(right)
    assert (left.dtype, left.shape, left.device, left.requires_grad) == (right.dtype, right.shape, right.device, right.requires_grad)
    assert bits(left) == bits(right)


class OnGpu(Actor):
    """Keeps what it gets, and does with it what it is told."""

    def __init__(self) -> None:
        count_fetches()
        self.kept: list[torch.Tensor] = []

    @endpoint
    async def use(self) -> str:
        """Use the device; its name."""
        if torch.cuda.is_available():
            torch.ones(1, device="cuda").add_(1)
            torch.cuda.synchronize()
            return torch.cuda.get_device_name()
        return "none"

    @endpoint
    async def echo(self, value: Any) -> Any:
        return value

    @endpoint
    def echo_in_thread(self, value: Any) -> Any:
        return value

    @endpoint
    async def fetched(self, value: Any) -> int:
        """How many copies this process has taken so far, that of the value among them."""
        return len(fetches)

    @endpoint
    async def keep(self, value: torch.Tensor) -> None:
        self.kept.append(value)

    @endpoint
    async def firsts(self) -> list[float]:
        return [float(value.view(-1)[0]) for value in self.kept]

    @endpoint
    async def lasts(self) -> list[float]:
        return [float(value.view(-1)[-1]) for value in self.kept]

    @endpoint
    async def fill(self, number: float) -> None:
        for value in self.kept:
            value.fill_(number)

    @endpoint
    async def drop(self) -> None:
        self.kept.clear()

    @endpoint
    async def keep_busy(self, cycles: int) -> None:
        """From now on the device has something else to do first, on the stream on which messages are taken."""
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]

    @endpoint
    async def take(self, value: torch.Tensor) -> None:
        """Wait until its copy is made."""
        torch.cuda.current_stream().synchronize()

    @endpoint
    async def where(self, value: torch.Tensor) -> str:
        return str(value.device)

    @endpoint
    async def shares(self, first: torch.Tensor, second: torch.Tensor) -> bool:
        """Whether what is written to one shows in the other."""
        first.fill_(5)
        return bool((second == 5).any())

    @endpoint
    async def send_on(self, other: Any, size: int, number: float) -> None:
        """Send a tensor that is made here to another actor."""
        await other.keep.call_one(torch.full((size,), number, device="cuda"))

    @endpoint
    def send_from_thread(self, other: Any, size: int, count: int) -> None:
        for number in range(count):
            other.keep.call_one(torch.full((size,), float(number), device="cuda")).get()

    @endpoint
    async def fork(self) -> int:
        """A child that does nothing with the device, as one of a DataLoader; its exit status."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there are threads
            child = os.fork()
        if not child:
            os._exit(7)
        return os.waitstatus_to_exitcode((await asyncio.to_thread(os.waitpid, child, 0))[1])

    @endpoint
    async def works(self) -> float:
        """Whether the device still does."""
        torch.cuda.synchronize()
        return float(torch.ones(1000, device="cuda").sum())

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def lends(self) -> bool:
        """Whether it has set memory aside for tensors of 4 MiB, which it does when some process can open it."""
        return any(segment.block_size == 4 << 20 for segment in pool._ledger.segments.values())

    @endpoint
    async def statistics(self) -> dict[str, int]:
        (runtime,) = runtimes()
        return {**statistics_here(), "mapped": len(runtime.lending.borrowing.on_devices.arrivals)}
