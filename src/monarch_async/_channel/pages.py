"""Pages of this process's memory, for those who copy it from elsewhere.

The kernel finds and pins each page of another process before it copies it (`cma`), which takes longer than the copying itself where
pages have 4 KiB. Where 2 MiB of memory lie in one page it does so once for them all.
"""

from __future__ import annotations

import ctypes
import errno
import mmap

__all__ = ["HUGE", "blocks", "join"]

HUGE = 2 << 20
"""Bytes of a large page (x86-64, and 64-bit ARM with small pages of 4 KiB)."""
_COLLAPSE = 25
"""``MADV_COLLAPSE``, Linux 6.1."""
_UNABLE = (errno.EINVAL, errno.ENOSYS, errno.EPERM)

_libc = ctypes.CDLL(None, use_errno=True)
_madvise, _mincore = _libc.madvise, _libc.mincore
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


def blocks(address: int, size: int) -> range:
    """Where the large pages begin that lie wholly in this memory."""
    return range(-(-address // HUGE) * HUGE, (address + size) // HUGE * HUGE, HUGE)


def join(block: int) -> bool:
    """Have these 2 MiB of memory in one page, if there is one to be had; False if the system does that for no memory of this kind.

    Nobody sees a change but in speed: contents and address stay. What was touched in part takes memory as a whole from then on; what never
    was is left as it is. Takes 0.6 ms, and some more while the system has no such page at hand.
    """
    return not _madvise(block, HUGE, _COLLAPSE) or ctypes.get_errno() not in _UNABLE or not _touched(block)


def _touched(block: int) -> bool:
    """Whether any of this memory is there: where none is, nothing can be joined, and the system says the same as where it joins nothing."""
    there = (ctypes.c_ubyte * (HUGE // mmap.PAGESIZE))()
    return not _mincore(block, HUGE, there) and any(there)
