"""What lending on devices needs of the devices of this process: the seam to CUDA (`cuda`), so that all else can be run without it.

A *fence* is an event: it is recorded behind what fills a piece of memory, and whoever reads that has its own work wait for it, on
the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["DeviceError", "Devices", "Fence"]


class DeviceError(Exception):
    """A device, or its driver, would not."""


class Fence(Protocol):
    """An event of this process. `handle` is how another one opens it; empty until it was recorded for the first time."""

    @property
    def handle(self) -> bytes: ...


class Devices(Protocol):
    """Devices by their index in this process. All of it raises `DeviceError`, and may be called in any thread."""

    def ready(self) -> bool:
        """Whether devices are in use in this process already. Nothing else is called before."""

    def uuid(self, device: int) -> bytes:
        """What names the device, 16 bytes, the same in every process."""

    def find(self, uuid: bytes) -> int | None:
        """The device of that name, if this process sees it."""

    def memory_of(self, device: int) -> int:
        """Bytes of memory that it has."""

    def allocate(self, device: int, size: int) -> int:
        """The address of new memory that can be exported. `DeviceError` where there is none."""

    def free(self, device: int, address: int) -> None:
        """May wait for what the device is doing."""

    def export(self, device: int, address: int) -> bytes:
        """How another process opens memory that was allocated here."""

    def open(self, device: int, handle: bytes) -> int:
        """The address, in this process, of memory that another one has exported."""

    def close(self, device: int, address: int) -> None:
        """Unmap what was opened. May wait for what the device is doing."""

    def fence(self, device: int) -> Fence:
        """A new one."""

    def open_fence(self, device: int, handle: bytes) -> Any:
        """One of another process."""

    def fill(self, device: int, address: int, size: int, source: Any, fence: Fence) -> None:
        """Copy a source of `size` bytes there (`None`: nothing), in order with the caller's work: behind `fence`, which it then records."""

    def fetch(self, device: int, address: int, size: int, fence: Any, place: str) -> tuple[Any, Callable[[], bool]]:
        """A copy on the device that `place` means here, ready in order with the caller's work; and what tells whether it has been made."""

    def stage(self, device: int, address: int, size: int, fence: Fence) -> memoryview:
        """A copy in host memory. Waits for it."""
