"""Reductions: what is done to the members' parts, in their order.

Rules: half types are combined in float32 and rounded once; integers wrap around; a mean is the sum divided by the number of members. What a
premultiplied sum multiplies is rounded to the tensor's type before it is added, as it is where every member multiplies its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

__all__ = ["MOVED", "REDUCED", "Reduction"]

FLOATS = {torch.float32, torch.float64, torch.float16, torch.bfloat16}
INTEGERS = {torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64}
REDUCED = {*FLOATS, *INTEGERS}
MOVED = {*REDUCED, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2}
_HALF = {torch.float16, torch.bfloat16}

Combine = Callable[..., torch.Tensor]

_COMBINE: dict[Any, Combine] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PREMUL_SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
}


class Reduction:
    """One operation on tensors of one type. Raises `TypeError` where there is no such thing.

    `code` stands for it in a signature; `factor` is what each member multiplies its own values by, or `None`.
    """

    __slots__ = ("_combine", "_mean", "code", "dtype", "factor")

    def __init__(self, op: Any, dtype: torch.dtype, size: int) -> None:
        plain, self.factor = _factor_of(op)
        combine = _COMBINE.get(plain)
        if combine is None or dtype not in REDUCED:
            raise TypeError(f"there is no reduction {plain} of {dtype}")
        if dtype not in FLOATS and plain in (ReduceOp.AVG, ReduceOp.PREMUL_SUM):
            raise TypeError(f"{plain} is not for tensors of {dtype}")
        self._combine = combine
        self._mean = size if plain == ReduceOp.AVG else 0
        self.dtype = dtype
        self.code = int(plain.value)

    def combine(self, inputs: Sequence[torch.Tensor], out: torch.Tensor, scratch: torch.Tensor) -> None:
        """Put the inputs, combined in their order, into `out`, which is none of them. `scratch` has room for two inputs, as float32."""
        combine, count = self._combine, out.numel()
        if self.dtype in _HALF:
            total, other = scratch[:count], scratch[count : 2 * count]
            total.copy_(inputs[0])
            for values in inputs[1:]:
                other.copy_(values)
                combine(total, other, out=total)
            if self._mean:
                total.div_(self._mean)
            out.copy_(total)
            return
        if len(inputs) == 1:
            out.copy_(inputs[0])
        else:
            combine(inputs[0], inputs[1], out=out)
            for values in inputs[2:]:
                combine(out, values, out=out)
        if self._mean:
            out.div_(self._mean)


def _factor_of(op: Any) -> tuple[Any, float | None]:
    """The kind, and the factor of a premultiplied sum."""
    if isinstance(op, ReduceOp.RedOpType):  # such a one is taken for an instance of ReduceOp, too
        return op, None
    state: Any = op.__getstate__()
    kind, factor = state
    return kind, None if factor is None else float(factor)
