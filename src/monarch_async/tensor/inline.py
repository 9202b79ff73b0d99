"""Operations on small tensors, whose values travel in the announcement itself: done when all have come to it, with no further step.

Agreement costs a message from each member to each other one, and a small message costs the same with a kilobyte in it. So an operation
on little data needs no backend at all, and no second step. Where the backend could start only after the agreement, as gloo, a message of
tens of kilobytes is still done sooner than both.

Rules:

* Only for tensors in host memory of up to `MOST` bytes, or, with such a backend, as many as make `TOLD` with all messages of a member; in
  groups of up to `MEMBERS`: everything goes to everybody.
* The values are those at the call. Every member calculates the same from the same, in the same order, so that all have the same result.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from monarch_async.tensor.backend import Backend, Running
from monarch_async.tensor.operation import Operation
from monarch_async.tensor.reductions import Reduction, combine, wide_for
from monarch_async.tensor.signature import Signature

__all__ = ["is_small", "pack", "small_broadcast", "small_reduction", "unpack"]

MOST = 1 << 11
TOLD = 1 << 16
MEMBERS = 8


def is_small(backend: type[Backend], tensor: torch.Tensor, size: int) -> bool:
    """The same at all members whose tensors have one size."""
    most = MOST if backend.agrees else max(MOST, TOLD // max(1, size - 1))
    return size <= MEMBERS and tensor.device.type == "cpu" and tensor.numel() * tensor.itemsize <= most


def pack(tensor: torch.Tensor) -> bytes:
    """The values, in their order."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.numel() * flat.itemsize)


def unpack(data: bytes, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    if not data:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(tuple(shape))


class _Views:
    """Keeps what the members have said for the result."""

    def __init__(self) -> None:
        self.views: Sequence[Signature] = ()

    def launch(self, backend: Backend, views: Sequence[Signature]) -> Running | None:
        self.views = views
        return None


def small_reduction(signature: Signature, tensor: torch.Tensor, op: Reduction, premul: float | None, into: bool) -> Operation:
    """A reduction into every member's tensor, or where it is `into` this one's."""
    wide = wide_for(tensor.dtype)
    given = tensor.detach()
    if premul is not None:
        given = given.to(wide) * premul
    kept, sent = _Views(), given.dtype

    def finish() -> torch.Tensor:
        if into:
            parts = [unpack(view.own[-1], sent, tensor.shape).to(wide) for view in kept.views]
            result = combine(parts, op)
            if op == "mean":
                result /= len(parts)
            tensor.detach().copy_(result)
        return tensor

    return Operation(signature._replace(own=(*signature.own, pack(given))), launch=kept.launch, finish=finish)


def small_broadcast(signature: Signature, tensor: torch.Tensor, me: int, source: int) -> Operation:
    kept = _Views()

    def finish() -> torch.Tensor:
        if me != source:
            tensor.detach().copy_(unpack(kept.views[source].own[-1], tensor.dtype, tensor.shape))
        return tensor

    own = (pack(tensor),) if me == source else ()
    return Operation(signature._replace(own=own), launch=kept.launch, finish=finish)
