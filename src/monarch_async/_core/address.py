"""Where the bytes of a buffer lie."""

from __future__ import annotations

import ctypes
from typing import Any

__all__ = ["address_of"]


def address_of(view: memoryview[Any] | bytes) -> int:
    """The address of contiguous bytes, which may be read-only; 0 if there are none."""
    if isinstance(view, memoryview):
        if not view.nbytes:
            return 0
        if not view.readonly:
            return ctypes.addressof(ctypes.c_char.from_buffer(view if view.ndim == 1 and view.format == "B" else view.cast("B")))
    elif not view:
        return 0
    # The buffer protocol itself, since ctypes takes only writable memory.
    buffer = _PyBuffer()
    _get_buffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    address = int(buffer.address)
    _release_buffer(ctypes.byref(buffer))
    return address


class _PyBuffer(ctypes.Structure):
    """`Py_buffer`, of which only the first field is looked at."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("owner", ctypes.c_void_p),
        ("length", ctypes.c_ssize_t),
        ("item_size", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("dimensions", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.c_void_p, ctypes.c_int)
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.c_void_p,)
