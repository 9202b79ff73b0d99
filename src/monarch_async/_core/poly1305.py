"""Poly1305, the one-time MAC of RFC 8439, four times as fast as SHA-256 where processors have instructions for that.

It is calculated by the libcrypto that the interpreter's own `_hashlib` is linked to: the dynamic linker resolves its symbols through that
module, so that no library is searched for or guessed. Where `_hashlib` is built in or missing, or has an OpenSSL before 3.0 or another
library, there is no Poly1305, and `available` says so.

Rules:

* A key is for one message. Two different ones under the same key give the key away to whoever sees both tags.
* An object is used by one thread at a time; different ones by as many as like. The interpreter's lock is released while bytes go in.
* The context in C is freed when the tag is taken, or with the object.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from typing import Any, NamedTuple

from monarch_async._core.address import address_of
from monarch_async.errors import InternalError, UsageError

__all__ = ["KEY_SIZE", "TAG_SIZE", "Poly1305", "available"]

KEY_SIZE = 32
TAG_SIZE = 16
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "EVP_MAC_fetch": (ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)),
    "EVP_MAC_CTX_new": (ctypes.c_void_p, (ctypes.c_void_p,)),
    "EVP_MAC_CTX_free": (None, (ctypes.c_void_p,)),
    "EVP_MAC_init": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p)),
    "EVP_MAC_update": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)),
    "EVP_MAC_final": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)),
}


class _Library(NamedTuple):
    """The functions, and the algorithm that they are used with."""

    new: Any
    free: Any
    init: Any
    update: Any
    final: Any
    algorithm: int


@functools.cache
def _library() -> _Library | None:
    spec = importlib.util.find_spec("_hashlib")
    if spec is None or not spec.has_location or spec.origin is None:
        return None
    try:
        library = ctypes.CDLL(spec.origin)
        functions = [getattr(library, name) for name in _SIGNATURES]
    except (OSError, AttributeError):
        return None
    for function, (result, arguments) in zip(functions, _SIGNATURES.values(), strict=True):
        function.restype, function.argtypes = result, arguments
    fetch, new, free, init, update, final = functions
    algorithm = fetch(None, b"POLY1305", None)
    return _Library(new, free, init, update, final, algorithm) if algorithm else None  # kept for as long as the process lives


def available() -> bool:
    """Whether this process can calculate it."""
    return _library() is not None


class Poly1305:
    """The MAC of one message: `update` with its bytes in any pieces, then `digest`."""

    __slots__ = ("_context", "_free", "_library")

    def __init__(self, key: bytes) -> None:
        """`key`: 32 bytes, which no other message has. Raises `InternalError` where there is no Poly1305."""
        self._context: int | None = None
        if len(key) != KEY_SIZE:
            raise UsageError(f"a key of Poly1305 has {KEY_SIZE} bytes, this one has {len(key)}")
        library = _library()
        if library is None:
            raise InternalError("there is no Poly1305 in this process: ask `available` first")
        self._library = library
        self._free = library.free  # at the interpreter's end modules are gone before the last objects
        self._context = library.new(library.algorithm)
        if not self._context:
            raise MemoryError("no memory for a MAC")
        if library.init(self._context, key, KEY_SIZE, None) != 1:
            raise InternalError("libcrypto refuses a key of Poly1305")

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """The next bytes of the message. A view has to be contiguous."""
        context = self._context
        if context is None:
            raise InternalError("this MAC's tag was taken already")
        view = memoryview(data)  # which a bytearray can't be resized under
        if view.nbytes and self._library.update(context, address_of(view), view.nbytes) != 1:
            raise InternalError("libcrypto refuses bytes for Poly1305")

    def digest(self) -> bytes:
        """The tag, 16 bytes; once."""
        context, self._context = self._context, None
        if context is None:
            raise InternalError("this MAC's tag was taken already")
        tag, size = ctypes.create_string_buffer(TAG_SIZE), ctypes.c_size_t()
        try:
            if self._library.final(context, tag, ctypes.byref(size), TAG_SIZE) != 1 or size.value != TAG_SIZE:
                raise InternalError("libcrypto gives no tag of Poly1305")
        finally:
            self._free(context)
        return tag.raw

    def __del__(self) -> None:
        if self._context is not None:
            self._free(self._context)
