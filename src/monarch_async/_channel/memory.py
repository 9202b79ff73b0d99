"""Where the bytes of a tensor, an array or any other buffer lie: what one-sided transfers copy from and to.

Rules:

* Torch and NumPy are not imported: whoever hands in a tensor has done so.
* What is not one stretch of bytes in C order is refused, as is what lies on another device or holds references to objects.
* `Memory` keeps what it describes alive. That can't hinder a tensor's storage from being resized, so `check` looks again.
"""

from __future__ import annotations

import ctypes
import pickle
import sys
from typing import Any, NamedTuple

from monarch_async._core.address import address_of
from monarch_async.errors import BufferMismatch

__all__ = ["Memory", "memory_of", "view_of"]


class Memory(NamedTuple):
    """`size` bytes at `address`. `dtype` and `shape` are those of a tensor or array; other memory is bytes, and has none."""

    address: int
    size: int
    readonly: bool
    holder: Any
    dtype: str = ""
    shape: tuple[int, ...] = ()

    def check(self) -> str:
        """Why the memory is not what it was; empty if it is."""
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(self.holder, torch.Tensor) or not self.size:
            return ""
        storage = self.holder.untyped_storage()
        end = self.holder.storage_offset() * self.holder.element_size() + self.size
        if self.holder.data_ptr() == self.address and storage.nbytes() >= end:
            return ""
        return f"the storage of its tensor was freed, moved or shrunk to {storage.nbytes()} bytes"


def memory_of(what: object) -> Memory:
    """The memory of a tensor on the CPU, an array, or anything with the buffer protocol. `TypeError` and `BufferMismatch` for others."""
    torch: Any = sys.modules.get("torch")
    tensor = getattr(torch, "Tensor", None)  # missing while torch is being imported
    if tensor is not None and isinstance(what, tensor):
        return _of_tensor(torch, what)
    numpy: Any = sys.modules.get("numpy")
    array = getattr(numpy, "ndarray", None)
    if array is not None and isinstance(what, array):
        return _of_array(what)
    try:
        view = memoryview(what)  # type: ignore[arg-type]
    except TypeError:
        kind = type(what).__qualname__
        raise TypeError(f"a {kind} has no memory to transfer: give a tensor, an array, a memoryview or a bytearray") from None
    if not view.c_contiguous:
        raise BufferMismatch("a memoryview that is not contiguous can't be transferred one-sidedly: give a contiguous one, or a copy")
    return Memory(address_of(view), view.nbytes, view.readonly, view)


def _of_tensor(torch: Any, tensor: Any) -> Memory:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        raise BufferMismatch(f"a tensor of layout {tensor.layout} is not one stretch of memory: give its parts, or .to_dense()")
    if tensor.device.type != "cpu":
        raise BufferMismatch(f"a tensor on {tensor.device} can't be transferred one-sidedly: give .cpu(), or a tensor in host memory")
    if not tensor.is_contiguous():
        raise BufferMismatch(f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} has gaps: give .contiguous()")
    if tensor.is_conj() or tensor.is_neg():
        raise BufferMismatch("a conjugated or negated view does not lie in memory as it reads: give .resolve_conj().resolve_neg()")
    size = tensor.numel() * tensor.element_size()
    if size and tensor.untyped_storage().nbytes() < tensor.storage_offset() * tensor.element_size() + size:
        raise BufferMismatch("the storage of the tensor was freed: gather it (FSDP: unshard) first")
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Memory(tensor.data_ptr(), size, False, tensor.detach(), dtype, tuple(tensor.shape))


def _of_array(array: Any) -> Memory:
    if array.dtype.hasobject:
        raise BufferMismatch(f"an array of dtype {array.dtype} holds references to objects, which mean nothing elsewhere: send it")
    if not array.flags.c_contiguous:
        raise BufferMismatch(f"an array of shape {array.shape} and strides {array.strides} has gaps: give numpy.ascontiguousarray(…)")
    return Memory(array.ctypes.data, array.nbytes, not array.flags.writeable, array, str(array.dtype), array.shape)


def view_of(memory: Memory, offset: int, size: int) -> memoryview:
    """A writable view of a part of it, which holds it."""
    part = (ctypes.c_ubyte * size).from_address(memory.address + offset)
    part.holder = memory.holder  # type: ignore[attr-defined]
    return pickle.PickleBuffer(part).raw()  # of plain bytes, which `cast` makes of no array of ctypes
