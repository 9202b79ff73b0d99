"""Tensors on their way to a backend and back: flat, contiguous, of a dtype that it has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from monarch_async.errors import UsageError
from monarch_async.tensor.backend import Backend, Running
from monarch_async.tensor.reductions import HEAVY, carrier_to_move

__all__ = ["Exchange", "Kind", "Size", "Staged", "check_target", "check_tensors", "dtype_named", "is_heavy", "kind_of"]

Kind = type[Backend]
Size = tuple[int, ...]


def kind_of(tensor: torch.Tensor) -> tuple[str, str]:
    return str(tensor.dtype).removeprefix("torch."), tensor.device.type


def check_tensors(backend: Kind, *tensors: Any) -> None:
    """Raises `TypeError` for what the backend can't take."""
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            raise TypeError(f"a dense tensor is wanted, not {tensor!r}")
        if tensor.device.type != backend.device_type:
            raise TypeError(f"the backend {backend.name!r} moves tensors on {backend.device_type!r}, and this one is on {tensor.device}")


def check_target(tensor: torch.Tensor) -> None:
    """Raises `UsageError` for one that can't be written to, since several of its elements are one number in memory."""
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise UsageError(f"several elements of this tensor are one number in memory (strides {tensor.stride()}): clone() it first")


def dtype_named(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def is_heavy(*tensors: torch.Tensor) -> bool:
    return sum(tensor.numel() for tensor in tensors) > HEAVY


class Staged:
    """A tensor as the backend takes it: flat, contiguous, of a dtype it has. Its own memory where that will do."""

    def __init__(self, tensor: torch.Tensor, carrier: torch.dtype, *, bits: bool, copy: bool = False, factor: float | None = None) -> None:
        self._tensor = tensor.detach()
        self._carrier = carrier
        self._bits = bits  # move the bytes as they are, do not convert
        self._factor = factor
        same = carrier == tensor.dtype or bits or tensor.dtype.is_complex
        # What is to be conjugated or negated when it is read is not in memory as it is.
        as_it_is = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        self.copies = copy or factor is not None or not as_it_is or not same
        self.flat: torch.Tensor
        if not self.copies:
            self.flat = self._view(self._tensor.view(-1))

    def _view(self, flat: torch.Tensor) -> torch.Tensor:
        if flat.is_complex() and not self._bits:
            return torch.view_as_real(flat).view(-1)
        return flat.view(self._carrier) if self._bits and flat.dtype != self._carrier else flat

    def make(self, backend: Backend) -> None:
        """Copy it, if that is needed."""
        if self.copies:
            flat = torch.empty(self._tensor.shape, dtype=self._tensor.dtype, device=self._tensor.device)
            flat.copy_(self._tensor)
            flat = self._view(flat.view(-1))
            if not self._bits and not flat.is_complex() and flat.dtype != self._carrier and not self._tensor.dtype.is_complex:
                flat = flat.to(self._carrier)
            if self._factor is not None:
                flat *= self._factor
            self.flat = flat

    def put_back(self) -> None:
        """What came is the tensor's, if it is not already."""
        if self.copies:
            target = self._tensor
            if self._bits:
                target.copy_(self.flat.view(target.dtype).view(target.shape))
            elif target.is_complex():
                target.copy_(torch.view_as_complex(self.flat.view(*target.shape, 2)))
            else:
                target.copy_(self.flat.view(target.shape))


class Exchange:
    """An all-to-all exchange: from each member to each other one tensor, which may be nothing."""

    def __init__(self, backend: Kind, me: int, tensors: Sequence[torch.Tensor | None], like: tuple[str, str]) -> None:
        self.dtype = dtype_named(like[0])
        self.carrier = carrier_to_move(backend, self.dtype)
        self._scale = self.dtype.itemsize // self.carrier.itemsize
        self._device = like[1]
        self._me = me
        self._tensors = tensors
        self._flat: torch.Tensor | None = None
        self.shapes: list[Size | None] = []  # of what comes from each
        self._outs: list[torch.Tensor] = []
        only = [tensor for tensor in tensors if tensor is not None]
        self.heavy = is_heavy(*only)

    def make(self, backend: Backend) -> None:
        parts = [tensor.detach().contiguous().view(-1) for tensor in self._tensors if tensor is not None]
        flat = torch.cat(parts) if parts else torch.empty(0, dtype=self.dtype, device=self._device)
        self._flat = flat.view(self.carrier) if self.carrier != self.dtype else flat

    def start(self, backend: Backend, coming: Sequence[Size | None], anything: bool) -> Running | None:
        """`coming` are the shapes of what comes from each; `anything`: whether any member has anything for any."""
        assert self._flat is not None
        self.shapes = list(coming)
        sizes = [self._elements(shape) for shape in coming]
        going = [self._elements(tuple(tensor.shape) if tensor is not None else None) for tensor in self._tensors]
        whole = torch.empty(sum(sizes), dtype=self.carrier, device=self._device)
        self._outs = list(torch.split(whole, sizes))
        return backend.all_to_all(whole, self._flat, sizes, going) if anything else None

    def _elements(self, shape: Size | None) -> int:
        return math.prod(shape) * self._scale if shape is not None else 0

    def results(self) -> list[torch.Tensor | None]:
        return [out.view(self.dtype).view(shape) if shape is not None else None for out, shape in zip(self._outs, self.shapes, strict=True)]
