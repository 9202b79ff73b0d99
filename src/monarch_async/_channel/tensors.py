"""How tensors travel: reducers for the codec, the only place below the libraries that touches torch, and only once it is imported.

A dense tensor becomes (block, dtype, offset, sizes, strides). A *block* is a stretch of one storage's memory, sent once per message
however many tensors of the message lie in it; at the receiver its tensors share memory again. A block of 16 KiB or more is a
view of the tensor's own memory that the link writes from, and at the receiver the tensor lies in the bytes as they arrived: no
copy on either side.

Rules:

* A tensor sends the stretch it spans, not its storage. A view that uses less than half of its stretch (a column) is packed first, unless
  another tensor of the message overlaps it. Overlap may show only late in a message: then the message is pickled a second time, with
  the stretches that the first pass found joined. Tensors that overlap nowhere don't share memory at the receiver.
* Values, dtype, sizes, strides (unless packed), `requires_grad` of leaves, Python attributes, and `nn.Parameter` are kept.
  `grad` and hooks are not sent. The result of a computation arrives detached: autograd does not cross processes.
* CUDA tensors go by a copy on their device where the receiver can open that (`parcels`), else in host memory, and return to the device
  of the same index, to the current one where there is no such index, or stay on the CPU where the receiver has no CUDA. Within this
  process they are copied on the device.
* Sparse, quantised, nested and meta tensors, other devices, and subclasses go by torch's own `__reduce_ex__`; the storages in
  those are ours again, so that `torch.save` is never called.
* What arrives is writable, unless the receiver's buffer is not: then, and where it is badly aligned, the block is copied.
"""

from __future__ import annotations

import math
import pickle
import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from monarch_async._channel.arrivals import Arrival
from monarch_async._channel.cuda import bytes_of, host_memory, local_device, refuse_capture
from monarch_async._channel.parcels import placeholder, pool
from monarch_async._core import codec

if TYPE_CHECKING:
    import torch
    from torch import Tensor as Tensor
    from torch import dtype as dtype

__all__ = ["ensure_reducers", "tensor_over"]

_ALIGNMENT = 16  # bytes: the largest element, complex128, and what blocks and arriving buffers are aligned to
_installed = False
_dtype_names: dict[Any, str] = {}


def ensure_reducers() -> bool:
    """Register the reducers if torch is imported far enough; return whether they are in place."""
    global _installed
    if not _installed:
        torch: Any = sys.modules.get("torch")
        # While torch is being imported, perhaps by another thread, parts of it are missing.
        try:
            reducers: dict[type, Any] = {
                torch.Tensor: _reduce_tensor,
                torch.nn.Parameter: _reduce_tensor,
                torch.UntypedStorage: _reduce_untyped,
                torch.TypedStorage: _reduce_typed,
                _Block: _reduce_block,
            }
        except AttributeError:
            return False
        for kind, reducer in reducers.items():
            codec.register_reducer(kind, reducer)
        _installed = True
    return True


def tensor_over(buffer: Callable[[int], memoryview], shape: Sequence[Any], dtype: torch.dtype | None) -> torch.Tensor:
    """A tensor in memory that `buffer` gives for a number of bytes.

    Raises what that does, and `TypeError` and `ValueError` as torch does.
    """
    import torch

    meta = torch.empty(shape, dtype=dtype, device="meta")  # checks the shape
    size = meta.numel() * meta.element_size()
    if not size:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer(size), dtype=torch.uint8).view(meta.dtype).view(meta.shape)


class _Block:
    """Bytes `[start, end)` of a storage. One object per stretch and message: pickle's memo does the sharing."""

    __slots__ = ("end", "packed", "reduced", "start", "storage")

    def __init__(self, storage: torch.UntypedStorage, start: int, end: int, packed: bool = False) -> None:
        self.storage = storage  # held, so that its address names it for the length of the message
        self.start = start
        self.end = end
        self.packed = packed  # the one tensor here is sent as a packed copy, not as it lies
        self.reduced: tuple[Any, ...] | None = None

    @property
    def base(self) -> int:
        """Where what is sent begins: aligned, so that elements of every size are."""
        return self.start - self.start % _ALIGNMENT


class _Stretches:
    """What the tensors of one message span in one storage: blocks, sorted and disjoint."""

    __slots__ = ("blocks", "starts")

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.blocks: list[_Block] = []

    def place(self, storage: torch.UntypedStorage, start: int, end: int, pack: bool, scope: codec.Scope) -> _Block:
        """The block that bytes `[start, end)` belong to; asks for another pass where that changes a block already sent."""
        low = high = bisect_right(self.starts, start)
        if low and self.blocks[low - 1].end > start:
            low -= 1
        while high < len(self.blocks) and self.starts[high] < end:
            high += 1
        if low == high:
            block = _Block(storage, start, end, pack)
        else:
            first, final = self.blocks[low], self.blocks[high - 1]
            covered = first is final and first.start <= start and end <= first.end
            if covered and (scope.last or not first.packed):
                return first
            if scope.last:  # it wasn't there in the first pass, so nothing is known to share it
                return _Block(storage, start, end)
            scope.again = True
            block = _Block(storage, min(start, first.start), max(end, final.end))
        self.starts[low:high] = [block.start]
        self.blocks[low:high] = [block]
        return block


def _place(storage: torch.UntypedStorage, start: int, end: int, pack: bool) -> _Block:
    if end > storage.nbytes():
        raise RuntimeError(
            f"the tensor's storage was freed or shrunk to {storage.nbytes()} bytes of {end}: gather it (FSDP: unshard) before sending"
        )
    scope = codec.message_scope()
    storages: dict[int, _Stretches] = scope.notes.setdefault(__name__, {})
    stretches = storages.get(storage.data_ptr())
    if stretches is None:
        stretches = storages[storage.data_ptr()] = _Stretches()
    return stretches.place(storage, start, end, pack, scope)


def _reduce_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    import torch

    if not (tensor.is_cpu or tensor.is_cuda) or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        reduced: tuple[Any, ...] = tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
        return reduced if tensor.layout is torch.strided else (_rebuild_sparse, reduced[:2], *reduced[2:])
    grad = tensor.requires_grad
    data = tensor.detach() if grad else tensor
    if data.is_conj() or data.is_neg():
        data = data.resolve_conj().resolve_neg()
    block, offset = None, 0
    dense = data.is_contiguous()
    if count := data.numel():
        size = data.element_size()
        start = int(data.storage_offset()) * size
        # Strides are never negative, so the last element is the farthest.
        span = count if dense else 1 + sum((n - 1) * stride for n, stride in zip(data.shape, data.stride(), strict=True))
        block = _place(data.untyped_storage(), start, start + span * size, pack=2 * count <= span)
        if block.packed:
            data, dense = _pack(data), True
            block, start = _Block(data.untyped_storage(), 0, count * size), 0
        offset = (start - block.base) // size
    parts: tuple[Any, ...] = (block, _dtype_names.get(data.dtype) or _name(data.dtype), offset, tuple(data.shape))
    parameter = type(tensor) is torch.nn.Parameter
    device = str(data.device) if block is None and data.is_cuda else ""
    if grad or parameter or device or not dense:  # most are neither, and every part costs
        parts += (None if dense else data.stride(), grad and tensor.is_leaf, parameter, device)
    attributes = tensor.__dict__
    # As state with its own setter: an attribute may refer back to the tensor.
    return (_rebuild_tensor, parts, attributes, None, None, _set_attributes) if attributes else (_rebuild_tensor, parts)


def _name(dtype: torch.dtype) -> str:
    """To look up a name takes a tenth of pickling and finding a dtype."""
    name = _dtype_names[dtype] = str(dtype).removeprefix("torch.")
    return name


def _pack(data: torch.Tensor) -> torch.Tensor:
    import torch

    # Not every dtype can be copied; a plain one of the same size can.
    plain = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[data.element_size()]
    return data.view(plain).contiguous().view(data.dtype)


def _reduce_block(block: _Block) -> tuple[Any, ...]:
    if block.reduced is None:
        storage, start = block.storage, block.base
        size = block.end - start
        if storage.device.type == "cuda":
            buffer = pickle.PickleBuffer(_off_device(storage, start, size))
            block.reduced = (_rebuild_block, (buffer, str(storage.device)))
        else:
            block.reduced = (_rebuild_block, (pickle.PickleBuffer(host_memory(storage, start, size)),))
    return block.reduced


def _off_device(storage: torch.UntypedStorage, start: int, size: int) -> Any:
    """An object with the buffer protocol for bytes on a device, which may change from now on."""
    import torch

    scope = codec.message_scope()
    index = storage.device.index
    with torch.cuda.device(index):
        refuse_capture()
    if scope.local and size >= codec.OUT_OF_BAND:
        memory = placeholder(size)
        memory.__here__ = bytes_of(storage, start, size).clone().untyped_storage()
        return memory
    if not (scope.local or scope.whole):
        memory = pool.pack(index, (storage, start), size)
        if memory is not None:
            return memory
    staged = torch.empty(size, dtype=torch.uint8, pin_memory=True)  # from pinned memory, which is kept and used again
    memory = host_memory(staged.copy_(bytes_of(storage, start, size)).untyped_storage(), 0, size)
    memory.cuda_device = index
    return memory


def _reduce_untyped(storage: torch.UntypedStorage) -> tuple[Any, ...]:
    if storage.device.type not in ("cpu", "cuda"):
        return storage.__reduce__()  # type: ignore[no-any-return, no-untyped-call]
    size = storage.nbytes()
    return _rebuild_untyped, (_place(storage, 0, size, pack=False) if size else None,)


def _reduce_typed(storage: torch.TypedStorage) -> tuple[Any, ...]:
    return _rebuild_typed, (storage._untyped_storage, storage.dtype)


class _Arrived:
    """A block at the receiver: its bytes, and the storage over them, once there is one."""

    __slots__ = ("_buffer", "storage")

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer
        self.storage: torch.UntypedStorage | None = None

    def whole(self, dtype: torch.dtype, sizes: tuple[int, ...]) -> torch.Tensor | None:
        """All of it as one tensor, if it is that and the first; most are, and this takes a third of the calls that any tensor takes."""
        import torch

        buffer = self._buffer
        if self.storage is not None or memoryview(buffer).nbytes != math.prod(sizes) * dtype.itemsize or dtype is torch.complex32:
            return None
        tensor = torch.frombuffer(buffer, dtype=dtype)
        if tensor.data_ptr() % _ALIGNMENT:
            return None
        self.storage, self._buffer = tensor.untyped_storage(), None
        return tensor if len(sizes) == 1 else tensor.resize_(sizes)

    def take(self) -> torch.UntypedStorage:
        import torch

        if self.storage is None:
            flat = torch.frombuffer(self._buffer, dtype=torch.uint8)
            if flat.data_ptr() % _ALIGNMENT:
                flat = flat.clone()
            self.storage, self._buffer = flat.untyped_storage(), None
        return self.storage


def _rebuild_block(buffer: Any, device: str = "") -> _Arrived:
    if not device:
        return _Arrived(bytearray(buffer) if memoryview(buffer).readonly else buffer)
    arrived = _Arrived(None)
    arrived.storage = _on_device(buffer, device)
    return arrived


def _on_device(buffer: Any, device: str) -> torch.UntypedStorage:
    import torch

    if isinstance(buffer, torch.UntypedStorage):  # a copy within this process
        return buffer
    if isinstance(buffer, Arrival):
        return buffer.fetch(device)  # type: ignore[no-any-return]
    if memoryview(buffer).readonly:
        buffer = bytearray(buffer)
    flat = torch.frombuffer(buffer, dtype=torch.uint8).to(local_device(device))
    if flat.data_ptr() % _ALIGNMENT:
        flat = flat.clone()
    return flat.untyped_storage()


def _rebuild_tensor(
    block: _Arrived | None,
    dtype_name: str,
    offset: int,
    sizes: tuple[int, ...],
    strides: tuple[int, ...] | None = None,
    grad: bool = False,
    parameter: bool = False,
    device: str = "",
) -> torch.Tensor:
    """Without `strides` it is contiguous."""
    import torch

    dtype: torch.dtype = getattr(torch, dtype_name)
    whole = block.whole(dtype, sizes) if block is not None and strides is None else None
    if whole is not None:
        return _as_it_was(whole, grad, parameter)
    storage = None if block is None else block.take()
    place: Any = "cpu"
    if device or (storage is not None and storage.is_cuda):
        place = local_device(device) if storage is None else storage.device
    if dtype is torch.complex32:  # making one warns that it is experimental; a view doesn't
        tensor = torch.empty(0, dtype=torch.uint8, device=place).view(dtype)
    else:
        tensor = torch.empty(0, dtype=dtype, device=place)
    if storage is None:
        tensor = tensor.view(sizes) if strides is None else tensor.as_strided(sizes, strides)
    elif strides is None:
        tensor = tensor.set_(storage, offset, sizes)  # type: ignore[call-overload]
    else:
        tensor = tensor.set_(storage, offset, sizes, strides)
    return _as_it_was(tensor, grad, parameter)


def _as_it_was(tensor: torch.Tensor, grad: bool, parameter: bool) -> torch.Tensor:
    import torch

    if parameter:
        return torch.nn.Parameter(tensor, grad)
    return tensor.requires_grad_() if grad else tensor


def _rebuild_sparse(rebuild: Callable[..., Any], parts: tuple[Any, ...]) -> Any:
    import torch

    tensor = rebuild(*parts)
    torch._utils._validate_loaded_sparse_tensors()  # type: ignore[no-untyped-call]  # until then torch keeps what it rebuilds in a list
    return tensor


def _rebuild_untyped(block: _Arrived | None) -> torch.UntypedStorage:
    import torch

    return torch.UntypedStorage(0) if block is None else block.take()  # type: ignore[no-untyped-call]


def _rebuild_typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    import torch

    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def _set_attributes(tensor: torch.Tensor, attributes: dict[str, Any]) -> None:
    tensor.__dict__.update(attributes)
