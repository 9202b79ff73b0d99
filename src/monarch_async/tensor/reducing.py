"""Operations that combine tensors: each made of what it says of itself and of what it asks a backend for. See `moving` for the rules.

`reduce_scatter` is made of an all-to-all exchange, and combines what came itself: gloo has none that is uneven.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from monarch_async.errors import UsageError
from monarch_async.tensor.backend import Backend, Running, ScatteringBackend
from monarch_async.tensor.inline import is_small, small_reduction
from monarch_async.tensor.operation import Operation
from monarch_async.tensor.reductions import Reduction, carrier_to_reduce, check_reduction, combine, torch_op, wide_for
from monarch_async.tensor.signature import Signature
from monarch_async.tensor.staged import Exchange, Kind, Staged, check_target, check_tensors, is_heavy, kind_of

__all__ = ["make_all_reduce", "make_reduce", "make_reduce_scatter"]


def make_all_reduce(backend: Kind, size: int, tensor: torch.Tensor, op: Reduction, premul: float | None) -> Operation:
    check_tensors(backend, tensor)
    check_reduction(op, tensor.dtype, premul)
    check_target(tensor)
    carrier = carrier_to_reduce(backend, tensor.dtype)
    signature = Signature("all_reduce", (op, *kind_of(tensor), tuple(tensor.shape)))
    if is_small(backend, tensor, size):
        return small_reduction(signature, tensor, op, premul, True)
    staged = Staged(tensor, carrier, bits=False, factor=premul)

    def launch(backend: Backend, views: Sequence[Signature]) -> Running | None:
        return backend.all_reduce(staged.flat, torch_op(op, backend)) if tensor.numel() else None

    def finish() -> torch.Tensor:
        if op == "mean" and not backend.averages:
            staged.flat.div_(size)
        staged.put_back()
        return tensor

    prepare = staged.make if staged.copies else None
    return Operation(signature, launch=launch, prepare=prepare, finish=finish, heavy=is_heavy(tensor), free=tensor.numel() > 0)


def make_reduce(backend: Kind, size: int, me: int, tensor: torch.Tensor, to: int, op: Reduction, premul: float | None) -> Operation:
    check_tensors(backend, tensor)
    check_reduction(op, tensor.dtype, premul)
    if me == to:
        check_target(tensor)
    carrier = carrier_to_reduce(backend, tensor.dtype)
    signature = Signature("reduce", (op, f"to {to}", *kind_of(tensor), tuple(tensor.shape)))
    if is_small(backend, tensor, size):
        return small_reduction(signature, tensor, op, premul, me == to)
    # Where the result does not go, the backend may use the tensor to calculate in.
    staged = Staged(tensor, carrier, bits=False, factor=premul, copy=me != to)

    def launch(backend: Backend, views: Sequence[Signature]) -> Running | None:
        return backend.reduce(staged.flat, to, torch_op(op, backend)) if tensor.numel() else None

    def finish() -> torch.Tensor:
        if me == to:
            if op == "mean" and not backend.averages:
                staged.flat.div_(size)
            staged.put_back()
        return tensor

    prepare = staged.make if staged.copies else None
    return Operation(signature, launch=launch, prepare=prepare, finish=finish, heavy=is_heavy(tensor), free=tensor.numel() > 0)


def make_reduce_scatter(
    backend: Kind, size: int, me: int, tensor: torch.Tensor, op: Reduction, premul: float | None, sizes: Sequence[int] | None
) -> Operation:
    check_tensors(backend, tensor)
    check_reduction(op, tensor.dtype, premul)
    carrier_to_reduce(backend, tensor.dtype)  # or it can't be
    if not tensor.dim():
        raise UsageError("reduce_scatter splits a tensor along its first dimension, and a single number has none")
    if sizes is None:
        if tensor.shape[0] % size:
            raise UsageError(f"{tensor.shape[0]} rows can't be split evenly among {size} members: say how, sizes=[…]")
        sizes = [tensor.shape[0] // size] * size
    if len(sizes) != size or sum(sizes) != tensor.shape[0]:
        raise UsageError(f"sizes={list(sizes)} do not split {tensor.shape[0]} rows among {size} members")
    if backend.scatters and len(set(sizes)) == 1 and backend.reduces(tensor.dtype) and tensor.numel():
        return _scatter_directly(tensor, op, premul, size)
    given = tensor.detach() if premul is None else (tensor.detach().to(wide_for(tensor.dtype)) * premul).to(tensor.dtype)
    parts = torch.split(given, list(sizes))
    exchange = Exchange(backend, me, parts, kind_of(tensor))

    def launch(backend: Backend, views: Sequence[Signature]) -> Running | None:
        return exchange.start(backend, [tuple(parts[me].shape)] * size, tensor.numel() > 0)

    def finish() -> torch.Tensor:
        got = [part for part in exchange.results() if part is not None]
        result = combine([part.to(wide_for(tensor.dtype)) for part in got], op)
        if op == "mean":
            result /= size
        return result.to(tensor.dtype)

    signature = Signature("reduce_scatter", (op, *kind_of(tensor), tuple(tensor.shape), f"sizes {list(sizes)}"))
    return Operation(signature, launch=launch, prepare=exchange.make, finish=finish, heavy=exchange.heavy)


def _scatter_directly(tensor: torch.Tensor, op: Reduction, premul: float | None, size: int) -> Operation:
    """By a backend that has it as one operation, for parts of one size."""
    staged = Staged(tensor, tensor.dtype, bits=False, factor=premul)
    result = torch.empty((tensor.shape[0] // size, *tensor.shape[1:]), dtype=tensor.dtype)

    def launch(backend: Backend, views: Sequence[Signature]) -> Running | None:
        return cast("ScatteringBackend", backend).reduce_scatter(result.view(-1), staged.flat, torch_op(op, backend))

    signature = Signature("reduce_scatter", (op, *kind_of(tensor), tuple(tensor.shape), f"into {size}"))
    prepare = staged.make if staged.copies else None
    return Operation(signature, launch=launch, prepare=prepare, finish=lambda: result, heavy=is_heavy(tensor), free=True)
