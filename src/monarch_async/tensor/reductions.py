"""Reductions: their names, what they mean for each dtype, and in which dtype a backend does them."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from monarch_async.errors import UsageError
from monarch_async.tensor.backend import Backend

__all__ = ["HEAVY", "Reduction", "carrier_to_move", "carrier_to_reduce", "check_reduction", "combine", "torch_op", "wide_for"]

Reduction = Literal["sum", "mean", "min", "max", "product"]
_NAMES = get_args(Reduction)
HEAVY = 1 << 16
"""Elements, above which what copies a tensor is done in a thread: so many take the loop some 20 µs."""

_OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
_FINER = {torch.bool: torch.uint8, torch.int16: torch.int32, torch.float16: torch.float32, torch.bfloat16: torch.float32}
_AS_BYTES = {1: torch.uint8, 2: torch.uint8, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def torch_op(op: Reduction, backend: Backend | type[Backend]) -> Any:
    """What the backend is asked for. Where it does no means, one is a sum that is divided afterwards."""
    if op == "mean" and backend.averages:
        return dist.ReduceOp.AVG
    return _OPS.get(op, dist.ReduceOp.PRODUCT)


def check_reduction(op: str, dtype: torch.dtype, premul: float | None) -> None:
    """Raises `UsageError` for an unknown reduction and `TypeError` for one that means nothing for this dtype."""
    if op not in _NAMES:
        raise UsageError(f"{op!r} is no reduction: use {', '.join(map(repr, _NAMES))}")
    whole = not dtype.is_floating_point and not dtype.is_complex
    if whole and (op == "mean" or premul is not None):
        raise TypeError(f"{'a mean' if op == 'mean' else 'a factor'} of {dtype} would be no whole number: convert the tensor first")
    if dtype is torch.bool and op in ("sum", "product"):
        raise TypeError(f"a {op} of bool means nothing here: use 'max' for any, 'min' for all")
    if dtype.is_complex and op not in ("sum", "mean"):
        raise TypeError(f"complex numbers have a sum and a mean, and no {op} here")


def carrier_to_reduce(backend: type[Backend], dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a tensor of `dtype` is reduced: its own where the backend can, else one that holds its values."""
    if backend.reduces(dtype) or dtype.is_complex:
        return dtype
    if dtype in _FINER:
        return _FINER[dtype]
    if dtype.is_floating_point:
        return torch.float32
    raise TypeError(f"{dtype} can't be reduced: convert the tensor first")


def wide_for(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are combined by this process: one that has more digits, where these are few."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def carrier_to_move(backend: type[Backend], dtype: torch.dtype) -> torch.dtype:
    """The dtype as which the bytes of a tensor of `dtype` are moved."""
    return dtype if backend.moves(dtype) else _AS_BYTES[dtype.itemsize]


def combine(parts: list[torch.Tensor], op: Reduction) -> torch.Tensor:
    """Reduce tensors of this process, into the first."""
    first, *rest = parts
    for part in rest:
        if op in ("sum", "mean"):
            first += part
        elif op == "product":
            first *= part
        elif op == "min":
            torch.minimum(first, part, out=first)
        else:
            torch.maximum(first, part, out=first)
    return first
