"""Copying between the memories of two processes of one host: ``process_vm_readv`` and ``process_vm_writev``.

The kernel copies from one address space to the other; the other process does nothing and is not asked. Allowed to whoever may trace that
process: the same user, unless a container or ``ptrace_scope`` forbids it.

A piece is (address here, address there, bytes). Functions return when all bytes are copied, and raise `OSError`: ``ESRCH`` if the process
is gone, ``EPERM`` if it may not be accessed, ``EFAULT`` if its memory is gone, ``ENOSYS`` where there is no such call. What precedes the
address that failed has been copied then. The interpreter's lock is released meanwhile.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from functools import cache
from typing import Any

__all__ = ["MAX_PIECES", "Piece", "move", "read", "read_word", "write"]

Piece = tuple[int, int, int]

MAX_PIECES = 1024
"""As many pieces go into one call (``IOV_MAX``)."""

_libc = ctypes.CDLL(None, use_errno=True)


def _function(name: str) -> Any:
    function = getattr(_libc, name, None)
    if function is not None:
        pair = (ctypes.c_void_p, ctypes.c_ulong)
        function.argtypes = (ctypes.c_int, *pair, *pair, ctypes.c_ulong)
        function.restype = ctypes.c_ssize_t
    return function


_readv, _writev = _function("process_vm_readv"), _function("process_vm_writev")
_memmove = ctypes.memmove


def read(pid: int, pieces: Sequence[Piece]) -> None:
    """Copy from process `pid` into this one."""
    _transfer(_readv, pid, pieces)


def write(pid: int, pieces: Sequence[Piece]) -> None:
    """Copy from this process into process `pid`."""
    _transfer(_writev, pid, pieces)


def read_word(pid: int, address: int, size: int) -> bytes:
    """A few bytes of another process."""
    word = (ctypes.c_ubyte * size)()
    read(pid, [(ctypes.addressof(word), address, size)])
    return bytes(word)


def move(pieces: Sequence[Piece]) -> None:
    """The same within this process: from the second address of each piece to the first."""
    for here, there, size in pieces:
        _memmove(here, there, size)


def _transfer(function: Any, pid: int, pieces: Sequence[Piece]) -> None:
    if function is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    for first in range(0, len(pieces), MAX_PIECES):
        _call(function, pid, pieces[first : first + MAX_PIECES])


def _call(function: Any, pid: int, pieces: Sequence[Piece]) -> None:
    """One call, and others for what it has left: the kernel may stop at any page, and at 2 GiB."""
    total = sum([size for _, _, size in pieces])
    done = 0
    while done < total:
        vector = _vectors(len(pieces))
        here = vector(*[number for mine, _, size in pieces for number in (mine, size)])
        there = vector(*[number for _, theirs, size in pieces for number in (theirs, size)])
        copied = function(pid, here, len(pieces), there, len(pieces), 0)
        if copied < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        if not copied:
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
        done += copied
        if done < total:
            pieces = _rest(pieces, copied)


@cache
def _vectors(count: int) -> type[ctypes.Array[ctypes.c_size_t]]:
    """The type of so many ``struct iovec``, kept since it takes longer to make than to fill."""
    return ctypes.c_size_t * (2 * count)


def _rest(pieces: Sequence[Piece], copied: int) -> list[Piece]:
    rest = []
    for here, there, size in pieces:
        skip = min(size, copied)
        copied -= skip
        if size > skip:
            rest.append((here + skip, there + skip, size - skip))
    return rest
