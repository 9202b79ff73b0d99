"""Shared memory between processes of one host: segments, which their owner fills and others map.

A *segment* is a memfd: it has no name, is passed on as a descriptor, and is gone with the last process that has it open or mapped. Its
owner maps it shared and writable. To others it goes as a read-only descriptor, of which they make two mappings: one that is private and
writable, so that a view of it may be changed without anybody else seeing that (the kernel copies the page), and one that is
read-only and always shows what the owner wrote.

Rules:

* Nobody but the owner can write to a segment, and nobody can make it shorter: no access to one ever ends in SIGBUS, for its pages exist
  before they are used (`Segment.commit`).
* Pages stay where they are when a range is used again. They cost as much to get for the first time as several copies of them.
* A range of a private mapping that was written to shows the old bytes for ever, so it is renewed before the owner puts others there.
* Descriptors are not kept by those who map: a mapping needs none.

Linux only; `SUPPORTED` tells.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any

from monarch_async._core.address import address_of

__all__ = ["PAGE", "SUPPORTED", "Mapping", "Segment", "Window"]

SUPPORTED = sys.platform == "linux" and hasattr(os, "memfd_create")
PAGE = mmap.PAGESIZE
TWO_FROM = 16 << 20
"""Copies of so many bytes are shared by two threads."""

_READ, _WRITE = 1, 2  # PROT_*
_SHARED, _PRIVATE, _NORESERVE = 1, 2, 0x4000  # MAP_*
_DONTNEED, _HUGEPAGE = 4, 14  # MADV_*
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # FALLOC_FL_*
_ADD_SEALS = 1033  # fcntl
_SEALS = 0x1 | 0x2 | 0x4  # no further seals, no shrinking, no growing
_FAILED = ctypes.c_void_p(-1).value
# Of an entry of /proc/self/pagemap, eight bytes for a page, the last one: present or swapped, and no page of the file: written to.
_UNWRITTEN = bytes(top for top in range(256) if not top & 0xC0 or top & 0x20)

# An ioctl of /proc/self/pagemap: the first range of pages that are present or swapped, and no page of the file.
_PAGEMAP_SCAN = 0xC0606610
_SCAN = struct.Struct("12Q")
_FILE, _PRESENT, _SWAPPED = 4, 8, 16

_libc = ctypes.CDLL(None, use_errno=True)
_mmap, _munmap, _madvise = _libc.mmap, _libc.munmap, _libc.madvise
_fallocate: Any = getattr(_libc, "fallocate", None)  # of Linux
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
if _fallocate is not None:
    _fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


def _error(what: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{what}: {os.strerror(code)}")


def _map(fd: int, size: int, protection: int, flags: int) -> int:
    address: int | None = _mmap(None, size, protection, flags, fd, 0)
    if address is None or address == _FAILED:
        raise _error(f"{size} bytes of shared memory can't be mapped")
    return address


class Segment:
    """Memory of this process that others can map: `size` bytes at `address`. Raises `OSError`."""

    __slots__ = ("__weakref__", "_fd", "address", "number", "size")

    def __init__(self, number: int, size: int) -> None:
        self.address, self._fd = 0, -1
        self.number = number  # its name among the segments of this process
        self.size = size
        self._fd = os.memfd_create("monarch-async", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, size)
        self.address = _map(self._fd, size, _READ | _WRITE, _SHARED)
        _madvise(self.address, size, _HUGEPAGE)  # where the system doesn't offer them for shared memory, ordinary pages do
        os.fchmod(self._fd, 0o400)
        fcntl.fcntl(self._fd, _ADD_SEALS, _SEALS)

    def commit(self, offset: int, size: int) -> None:
        """See to it that a range has its memory. Raises `OSError` when the system has none left."""
        if size:
            os.posix_fallocate(self._fd, offset, size)

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Copy `data` into the segment; other threads run meanwhile."""
        target, source = self.address + offset, address_of(data)
        _in_parts(len(data), lambda start, end: ctypes.memmove(target + start, source + start, end - start))

    def write_fresh(self, offset: int, data: bytes | memoryview) -> None:
        """Copy `data` to where no memory is yet: twice as fast as to get that first. Raises `OSError` when the system has none left."""
        view = memoryview(data)

        def put(start: int, end: int) -> None:
            while start < end:
                start += os.pwrite(self._fd, view[start:end], offset + start)

        _in_parts(len(view), put)

    def discard(self, offset: int, size: int) -> None:
        """Give the memory of a range back to the system, whoever has it mapped, or locked. Raises `OSError`."""
        if _fallocate(self._fd, _PUNCH_HOLE | _KEEP_SIZE, offset, size):
            raise _error("shared memory can't be given back")

    def open_reader(self) -> int:
        """A new read-only descriptor. Raises `OSError`."""
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self.address:
            _munmap(self.address, self.size)
        if self._fd >= 0:
            os.close(self._fd)


class Mapping:
    """Another process's segment, mapped here. Takes a descriptor, which it closes. Raises `OSError`."""

    __slots__ = ("_original", "address", "size")

    def __init__(self, fd: int, size: int) -> None:
        self.address = self._original = 0
        self.size = size
        try:
            if os.fstat(fd).st_size < size:
                raise OSError(errno.EINVAL, "a segment is smaller than it was announced to be")
            self.address = _map(fd, size, _READ | _WRITE, _PRIVATE | _NORESERVE)
            self._original = _map(fd, size, _READ, _SHARED)
        finally:
            os.close(fd)

    def copy_original(self, offset: int, target: memoryview) -> None:
        """Copy what the owner wrote to `target`, whatever was written to the private mapping here."""
        to, source = address_of(target), self._original + offset
        _in_parts(target.nbytes, lambda start, end: ctypes.memmove(to + start, source + start, end - start))

    def renew(self, offset: int, size: int) -> None:
        """Forget what was written here to a range of whole pages. Raises `OSError`."""
        address = self.address + offset
        if _was_written(address, size) and _madvise(address, size, _DONTNEED):
            raise _error("shared memory can't be renewed")

    def __del__(self) -> None:
        for address in (self.address, self._original):
            if address:
                _munmap(address, self.size)


class Window:
    """Another process's segment, as it always is: read-only. Takes a descriptor, which it closes. Raises `OSError`."""

    __slots__ = ("address", "size")

    def __init__(self, fd: int) -> None:
        self.address = self.size = 0
        try:
            size = os.fstat(fd).st_size
            self.address = _map(fd, size, _READ, _SHARED)
            self.size = size
        finally:
            os.close(fd)

    def __del__(self) -> None:
        if self.address:
            _munmap(self.address, self.size)


def _in_parts(size: int, copy: Callable[[int, int], object]) -> None:
    """Call `copy(start, end)` for all of `size` bytes: for much of it in two threads, since one can't have all that the memory gives.

    Raises what the copies raise, once both have ended.
    """
    if size < TWO_FROM or (os.cpu_count() or 1) < 2:
        copy(0, size)
        return
    middle = size // 2 // PAGE * PAGE
    failed: list[BaseException] = []

    def second() -> None:
        try:
            copy(middle, size)
        except BaseException as error:  # raised below
            failed.append(error)

    thread = threading.Thread(target=second, name="monarch_async copy")
    try:
        thread.start()
    except RuntimeError:  # this process may have no more threads
        copy(0, size)
        return
    try:
        copy(0, middle)
    finally:
        thread.join()
    if failed:
        raise failed[0]


def _was_written(address: int, size: int) -> bool:
    """Whether a page of a private mapping was written to; true where that can't be found out. To drop all costs more than to look."""
    try:
        fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        found = (ctypes.c_uint64 * 3)()
        wanted = _FILE, _FILE, _PRESENT | _SWAPPED, _PRESENT  # inverted, all of, any of, told
        asked = _SCAN.pack(_SCAN.size, 0, address, address + size, 0, ctypes.addressof(found), 1, 1, *wanted)
        try:
            return bool(fcntl.ioctl(fd, _PAGEMAP_SCAN, bytearray(asked)))
        except OSError:  # a kernel before 6.7: slower, as it tells of every page
            pages = os.pread(fd, size // PAGE * 8, address // PAGE * 8)
    finally:
        os.close(fd)
    return len(pages) < size // PAGE * 8 or bool(pages[7::8].translate(None, _UNWRITTEN))
