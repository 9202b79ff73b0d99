"""The few calls of the CUDA driver that torch has no name for: allocations that can be exported, opened and closed, copies of such memory,
and asking an event without disturbing anybody.

The driver's own library is used, not the runtime's (``libcudart``): there is exactly one of it in a process, however torch was linked, and
its context of each device is the one that torch works in.

Rules:

* Every call is made inside the device's primary context, whatever is current in the calling thread, and leaves that as it was.
* Every call is made in the relaxed capture mode: while another thread captures a graph, allocating or asking an event from this one would
  otherwise spoil its capture.
* ctypes lets go of the interpreter's lock for the length of a call.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from monarch_async._channel.devices import DeviceError

__all__ = ["Driver", "driver"]

_HANDLE_SIZE = 64
_UUID_SIZE = 16
_NOT_READY = 600
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_LAZY_PEER_ACCESS = 1  # the only flag that cuIpcOpenMemHandle takes, and it wants it


class _Handle(ctypes.Structure):
    """CUipcMemHandle: passed by value."""

    _fields_ = (("data", ctypes.c_ubyte * _HANDLE_SIZE),)


class _Uuid(ctypes.Structure):
    """CUuuid."""

    _fields_ = (("data", ctypes.c_ubyte * _UUID_SIZE),)


_int, _uint, _size, _pointer, _address = ctypes.c_int, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_uint64
_out = ctypes.POINTER
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (_uint,),
    "cuDeviceGet": (_out(_int), _int),
    "cuDeviceTotalMem_v2": (_out(_size), _int),
    "cuDevicePrimaryCtxRetain": (_out(_pointer), _int),
    "cuCtxPushCurrent_v2": (_pointer,),
    "cuCtxPopCurrent_v2": (_out(_pointer),),
    "cuMemAlloc_v2": (_out(_address), _size),
    "cuMemFree_v2": (_address,),
    "cuMemcpyAsync": (_address, _address, _size, _pointer),
    "cuIpcGetMemHandle": (_out(_Handle), _address),
    "cuIpcOpenMemHandle_v2": (_out(_address), _Handle, _uint),
    "cuIpcCloseMemHandle": (_address,),
    "cuEventQuery": (_pointer,),
    "cuThreadExchangeStreamCaptureMode": (_out(_int),),
    "cuGetErrorName": (_int, _out(ctypes.c_char_p)),
    "cuGetErrorString": (_int, _out(ctypes.c_char_p)),
}


class Driver:
    """See the module's text. Everything raises `DeviceError`."""

    def __init__(self, name: str = "libcuda.so.1") -> None:
        try:
            self.library = library = ctypes.CDLL(name)
            self._calls: dict[str, Any] = {name: getattr(library, name) for name in _SIGNATURES}
            # The second version names parts of a device (MIG) apart; drivers from before it know no such parts by UUID.
            self._uuid_of = getattr(library, "cuDeviceGetUuid_v2", None) or library.cuDeviceGetUuid
        except (OSError, AttributeError) as error:
            raise DeviceError(f"the CUDA driver can't be called: {error}") from error
        for name, parameters in _SIGNATURES.items():
            self._calls[name].argtypes = parameters
            self._calls[name].restype = _int
        self._uuid_of.argtypes, self._uuid_of.restype = (_out(_Uuid), _int), _int
        self._contexts: dict[int, Any] = {}  # primary contexts by device; torch keeps them for the life of the process, so this may too
        self._known: dict[int, tuple[bytes, int]] = {}  # UUID and memory of each device
        self._lock = threading.Lock()
        self._call("cuInit", 0)

    def uuid(self, device: int) -> bytes:
        return self._facts(device)[0]

    def memory_of(self, device: int) -> int:
        return self._facts(device)[1]

    def allocate(self, device: int, size: int) -> int:
        found = _address()
        with self._inside(device):
            self._call("cuMemAlloc_v2", ctypes.byref(found), size)
        return found.value

    def free(self, device: int, address: int) -> None:
        with self._inside(device):
            self._call("cuMemFree_v2", address)

    def export(self, device: int, address: int) -> bytes:
        handle = _Handle()
        with self._inside(device):
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle.data)

    def open(self, device: int, handle: bytes) -> int:
        if len(handle) != _HANDLE_SIZE:
            raise DeviceError(f"a handle of device memory has {_HANDLE_SIZE} bytes, not {len(handle)}")
        found = _address()
        with self._inside(device):
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(found), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
        return found.value

    def close(self, device: int, address: int) -> None:
        with self._inside(device):
            self._call("cuIpcCloseMemHandle", address)

    def copy(self, device: int, target: int, source: int, size: int, stream: int) -> None:
        """Queue a copy on a stream of the device. Addresses say by themselves where they are: on a device, or in pinned host memory."""
        with self._inside(device):
            self._call("cuMemcpyAsync", target, source, size, stream)

    def finished(self, device: int, event: int) -> bool:
        """Whether all is done that an event was recorded behind."""
        with self._inside(device):
            code = self._calls["cuEventQuery"](event)
            if code == _NOT_READY:
                return False
            self._check("cuEventQuery", code)
        return True

    def _facts(self, device: int) -> tuple[bytes, int]:
        known = self._known.get(device)
        if known is None:
            uuid, size, ordinal = _Uuid(), _size(), self._ordinal(device)
            self._check("cuDeviceGetUuid", self._uuid_of(ctypes.byref(uuid), ordinal))
            self._call("cuDeviceTotalMem_v2", ctypes.byref(size), ordinal)
            known = self._known[device] = bytes(uuid.data), size.value
        return known

    def _ordinal(self, device: int) -> int:
        found = _int()
        self._call("cuDeviceGet", ctypes.byref(found), device)
        return found.value

    @contextmanager
    def _inside(self, device: int) -> Iterator[None]:
        with self._lock:
            context = self._contexts.get(device)
            if context is None:
                context = _pointer()
                self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._ordinal(device))
                self._contexts[device] = context
        self._call("cuCtxPushCurrent_v2", context)
        try:
            mode = _int(_RELAXED)
            self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))  # now holds the mode from before
            try:
                yield
            finally:
                self._calls["cuThreadExchangeStreamCaptureMode"](ctypes.byref(mode))
        finally:
            self._calls["cuCtxPopCurrent_v2"](ctypes.byref(_pointer()))

    def _call(self, name: str, *arguments: Any) -> None:
        self._check(name, self._calls[name](*arguments))

    def _check(self, name: str, code: int) -> None:
        if code:
            raise DeviceError(f"{name}: {self._text('cuGetErrorName', code)} ({self._text('cuGetErrorString', code)})")

    def _text(self, name: str, code: int) -> str:
        found = ctypes.c_char_p()
        self._calls[name](code, ctypes.byref(found))
        return (found.value or b"error %d" % code).decode(errors="replace")


@functools.cache
def driver() -> Driver:
    """The driver, for this process."""
    return Driver()
