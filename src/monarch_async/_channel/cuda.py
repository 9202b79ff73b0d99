"""Devices of CUDA, by torch and its driver; see `devices`. Torch is not imported here: who has a tensor on a device has done so.

Rules:

* Nothing waits on the host but `stage`. A copy is queued on the stream that is current for the device in the calling thread, where the
  caller's own work is.
* A stream that is being captured is left alone: a copy for another process can't be part of a graph. Whoever calls `fill` has seen to that.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monarch_async._channel.cuda_driver import driver

if TYPE_CHECKING:
    import torch

__all__ = ["Cuda", "bytes_of", "host_memory", "local_device", "refuse_capture"]


class Cuda:
    """See `Devices`."""

    def __init__(self) -> None:
        self._sides: dict[int, Any] = {}  # a stream for each device, for copies to the host

    def ready(self) -> bool:
        torch: Any = sys.modules.get("torch")
        cuda = getattr(torch, "cuda", None)  # missing, as other parts are, while torch is being imported
        initialized = getattr(cuda, "is_initialized", None)
        return initialized is not None and bool(initialized()) and torch.version.hip is None

    def uuid(self, device: int) -> bytes:
        return driver().uuid(device)

    def find(self, uuid: bytes) -> int | None:
        import torch

        # Torch and the driver count the devices in CUDA_VISIBLE_DEVICES in the same way.
        return next((index for index in range(torch.cuda.device_count()) if driver().uuid(index) == uuid), None)

    def memory_of(self, device: int) -> int:
        return driver().memory_of(device)

    def allocate(self, device: int, size: int) -> int:
        return driver().allocate(device, size)

    def free(self, device: int, address: int) -> None:
        driver().free(device, address)

    def export(self, device: int, address: int) -> bytes:
        return driver().export(device, address)

    def open(self, device: int, handle: bytes) -> int:
        return driver().open(device, handle)

    def close(self, device: int, address: int) -> None:
        driver().close(device, address)

    def fence(self, device: int) -> Any:
        import torch

        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def passed(self, device: int, fence: Any) -> bool:
        return driver().finished(device, fence.cuda_event)

    def fill(self, device: int, address: int, size: int, source: Any, fence: Any) -> None:
        import torch

        storage, start = source
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream()
            fence.wait(stream)  # what was there before may still be on its way into the memory
            driver().copy(device, address, storage.data_ptr() + start, size, stream.cuda_stream)
            bytes_of(storage, start, size).record_stream(stream)  # it may be another stream's, and let go of before the copy is made
            fence.record(stream)

    def fetch(self, device: int, address: int, size: int, place: str) -> tuple[Any, Callable[[], bool]]:
        import torch

        with torch.cuda.device(device):
            refuse_capture()
            stream = torch.cuda.current_stream()
            copy = torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", device))
            driver().copy(device, copy.data_ptr(), address, size, stream.cuda_stream)
            made: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            made.record(stream)
            # To another device by torch, which has the streams of both wait for each other, and goes by the host where it must.
            storage = copy.to(local_device(place), non_blocking=True).untyped_storage()
        return storage, lambda: driver().finished(device, made.cuda_event)

    def stage(self, device: int, address: int, size: int, fence: Any) -> memoryview:
        import torch

        with torch.cuda.device(device):
            side = self._sides.get(device)
            if side is None:
                side = self._sides[device] = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            staged = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            fence.wait(side)
            driver().copy(device, staged.data_ptr(), address, size, side.cuda_stream)
            side.synchronize()
        return memoryview(host_memory(staged.untyped_storage(), 0, size)).cast("B")


def refuse_capture() -> None:
    """`RuntimeError` while the current stream is being captured."""
    import torch

    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a CUDA graph is being captured on this stream, and a message can't be part of it: send before or after it")


def bytes_of(storage: torch.UntypedStorage, start: int, size: int) -> torch.Tensor:
    """A part of a storage as a tensor of bytes."""
    import torch

    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (size,), (1,))


def host_memory(storage: torch.UntypedStorage, start: int, size: int) -> Any:
    """Bytes of a storage in host memory, as an object with the buffer protocol that holds the storage."""
    memory = (ctypes.c_ubyte * size).from_address(storage.data_ptr() + start)
    memory.storage = storage  # type: ignore[attr-defined]
    return memory


def local_device(name: str) -> torch.device:
    """Where a tensor of another process's device belongs here: to the device of the same index, the current one, or the CPU."""
    import torch

    device = torch.device(name)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return device if (device.index or 0) < torch.cuda.device_count() else torch.device("cuda", torch.cuda.current_device())
