"""What lending on devices needs of the devices of this process: the seam to CUDA (`cuda`), so that all else can be run without it.

A *fence* is an event: it is recorded behind what fills a piece of memory, and tells whether that has been done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["DeviceError", "Devices"]


class DeviceError(Exception):
    """A device, or its driver, would not."""


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

    def fence(self, device: int) -> Any:
        """A new one, recorded behind nothing."""

    def passed(self, device: int, fence: Any) -> bool:
        """Whether all is done that it was recorded behind."""

    def fill(self, device: int, address: int, size: int, source: Any, fence: Any) -> None:
        """Copy a source of `size` bytes there, in order with the caller's work: behind `fence`, which it then records."""

    def fetch(self, device: int, address: int, size: int, place: str) -> tuple[Any, Callable[[], bool]]:
        """A copy on the device that `place` means here, ready in order with the caller's work; and what tells whether it has been made."""

    def stage(self, device: int, address: int, size: int, fence: Any) -> memoryview:
        """A copy in host memory. Waits for it."""
