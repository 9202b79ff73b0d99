"""The operations of a communicator, each made of what it says of itself and of what it asks a backend for.

Rules:

* Nothing here waits, and nothing touches a tensor before all members have agreed, but for copies that are needed anyhow (not contiguous, a
  dtype that the backend does not have, a factor): those are made meanwhile.
* Tensors travel flat. Sizes that a member can't know come from what the others have said of theirs.
* Those for which gloo has no uneven form, or none at all, are made of the all-to-all exchange, which has one: every part crosses the
  network once.
* An operation whose tensors are all empty moves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from monarch_async.errors import CollectiveMismatch, UsageError
from monarch_async.tensor.backend import Backend, Running, Together
from monarch_async.tensor.inline import is_small, pack, small_broadcast, small_reduction, unpack
from monarch_async.tensor.operation import Operation
from monarch_async.tensor.reductions import (
    HEAVY,
    Reduction,
    carrier_to_move,
    carrier_to_reduce,
    check_reduction,
    combine,
    torch_op,
)
from monarch_async.tensor.signature import Signature

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
    "transfer",
]

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


def dtype_named(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


class Staged:
    """A tensor as the backend takes it: flat, contiguous, of a dtype it has. Its own memory where that will do."""

    def __init__(self, tensor: torch.Tensor, carrier: torch.dtype, *, bits: bool, copy: bool = False, factor: float | None = None) -> None:
        self._tensor = tensor.detach()
        self._carrier = carrier
        self._bits = bits  # move the bytes as they are, do not convert
        self._factor = factor
        same = carrier == tensor.dtype or bits or tensor.dtype.is_complex
        self.copies = copy or factor is not None or not tensor.is_contiguous() or not same
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


def _heavy(*tensors: torch.Tensor) -> bool:
    return sum(tensor.numel() for tensor in tensors) > HEAVY


def all_reduce(backend: Kind, size: int, tensor: torch.Tensor, op: Reduction, premul: float | None) -> Operation:
    check_tensors(backend, tensor)
    check_reduction(op, tensor.dtype, premul)
    signature = Signature("all_reduce", (op, *kind_of(tensor), tuple(tensor.shape)))
    if is_small(tensor, size):
        return small_reduction(signature, tensor, op, premul, True)
    staged = Staged(tensor, carrier_to_reduce(backend, tensor.dtype), bits=False, factor=premul)

    def launch(backend: Backend, views: Sequence[Signature]) -> Running | None:
        return backend.all_reduce(staged.flat, torch_op(op)) if tensor.numel() else None

    def finish() -> torch.Tensor:
        if op == "mean":
            staged.flat.div_(size)
        staged.put_back()
        return tensor

    prepare = staged.make if staged.copies else None
    return Operation(signature, launch=launch, prepare=prepare, finish=finish, heavy=_heavy(tensor))


def reduce(backend: Kind, size: int, me: int, tensor: torch.Tensor, to: int, op: Reduction, premul: float | None) -> Operation:
    check_tensors(backend, tensor)
    check_reduction(op, tensor.dtype, premul)
    signature = Signature("reduce", (op, f"to {to}", *kind_of(tensor), tuple(tensor.shape)))
    if is_small(tensor, size):
        return small_reduction(signature, tensor, op, premul, me == to)
    # Where the result does not go, the backend may use the tensor to calculate in.
    staged = Staged(tensor, carrier_to_reduce(backend, tensor.dtype), bits=False, factor=premul, copy=me != to)

    def launch(backend: Backend, views: Sequence[Signature]) -> Running | None:
        return backend.reduce(staged.flat, to, torch_op(op)) if tensor.numel() else None

    def finish() -> torch.Tensor:
        if me == to:
            if op == "mean":
                staged.flat.div_(size)
            staged.put_back()
        return tensor

    prepare = staged.make if staged.copies else None
    return Operation(signature, launch=launch, prepare=prepare, finish=finish, heavy=_heavy(tensor))


def broadcast(backend: Kind, size: int, me: int, tensor: torch.Tensor, source: int) -> Operation:
    check_tensors(backend, tensor)
    signature = Signature("broadcast", (f"from {source}", *kind_of(tensor), tuple(tensor.shape)))
    if is_small(tensor, size):
        return small_broadcast(signature, tensor, me, source)
    staged = Staged(tensor, carrier_to_move(backend, tensor.dtype), bits=True)

    def launch(backend: Backend, views: Sequence[Signature]) -> Running | None:
        return backend.broadcast(staged.flat, source) if tensor.numel() else None

    def finish() -> torch.Tensor:
        staged.put_back()
        return tensor

    prepare = staged.make if staged.copies else None
    return Operation(signature, launch=launch, prepare=prepare, finish=finish, heavy=_heavy(tensor))


def all_gather(backend: Kind, size: int, me: int, tensor: torch.Tensor) -> Operation:
    check_tensors(backend, tensor)
    carrier = carrier_to_move(backend, tensor.dtype)
    scale = tensor.dtype.itemsize // carrier.itemsize
    own: tuple[Any, ...] = (tuple(tensor.shape),)
    if is_small(tensor, size):  # each for itself: some may be small and others not
        own = (*own, pack(tensor))
    staged = Staged(tensor, carrier, bits=True)
    shapes: list[Size] = []
    outs: list[torch.Tensor] = []
    inline: list[bytes] = []
    own_part_is_missing = False

    def launch(backend: Backend, views: Sequence[Signature]) -> Running | None:
        nonlocal own_part_is_missing
        shapes.extend(view.own[0] for view in views)
        if all(len(view.own) == 2 for view in views):
            inline.extend(view.own[1] for view in views)
            return None
        sizes = [math.prod(shape) * scale for shape in shapes]
        whole = torch.empty(sum(sizes), dtype=carrier, device=tensor.device)
        outs.extend(torch.split(whole, sizes))
        if len(set(sizes)) == 1:
            return backend.all_gather(whole, staged.flat) if whole.numel() else None
        own_part_is_missing = True
        parts = [staged.flat if index == me else out for index, out in enumerate(outs)]
        return Together([backend.broadcast(part, index) for index, part in enumerate(parts) if part.numel()])

    def finish() -> list[torch.Tensor]:
        if inline:
            return [unpack(data, tensor.dtype, shape) for data, shape in zip(inline, shapes, strict=True)]
        if own_part_is_missing:
            outs[me].copy_(staged.flat)
        return [out.view(tensor.dtype).view(shape) for out, shape in zip(outs, shapes, strict=True)]

    signature = Signature("all_gather", (*kind_of(tensor), tuple(tensor.shape[1:]), f"{tensor.dim()}-d"), own)
    prepare = staged.make if staged.copies else None
    return Operation(signature, launch=launch, prepare=prepare, finish=finish, heavy=_heavy(tensor))


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
        self.heavy = _heavy(*only)

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


def all_to_all(backend: Kind, size: int, me: int, tensors: Sequence[torch.Tensor]) -> Operation:
    if len(tensors) != size:
        raise UsageError(f"all_to_all takes a tensor for each of the {size} members, and not {len(tensors)}")
    check_tensors(backend, *tensors)
    if len({kind_of(tensor) for tensor in tensors}) != 1:
        raise UsageError("the tensors of one all_to_all must be of one dtype and on one kind of device")
    exchange = Exchange(backend, me, tensors, kind_of(tensors[0]))

    def launch(backend: Backend, views: Sequence[Signature]) -> Running | None:
        anything = any(math.prod(shape) for view in views for shape in view.own)
        return exchange.start(backend, [view.own[me] for view in views], anything)

    signature = Signature("all_to_all", kind_of(tensors[0]), tuple(tuple(tensor.shape) for tensor in tensors))
    return Operation(signature, launch=launch, prepare=exchange.make, finish=exchange.results, heavy=exchange.heavy)


def gather(backend: Kind, size: int, me: int, tensor: torch.Tensor, to: int) -> Operation:
    check_tensors(backend, tensor)
    exchange = Exchange(backend, me, [tensor if index == to else None for index in range(size)], kind_of(tensor))

    def launch(backend: Backend, views: Sequence[Signature]) -> Running | None:
        anything = any(math.prod(view.own[0]) for view in views)
        return exchange.start(backend, [view.own[0] if me == to else None for view in views], anything)

    def finish() -> list[torch.Tensor | None] | None:
        return exchange.results() if me == to else None

    signature = Signature("gather", (f"to {to}", *kind_of(tensor)), (tuple(tensor.shape),))
    return Operation(signature, launch=launch, prepare=exchange.make, finish=finish, heavy=exchange.heavy)


def scatter(backend: Kind, size: int, me: int, tensors: Sequence[torch.Tensor] | None, source: int) -> Operation:
    check_tensors(backend, *(tensors or ()))
    if (me == source) != (tensors is not None):
        raise UsageError(f"scatter from {source} takes the tensors there, one for each member, and None elsewhere")
    if tensors is not None and (len(tensors) != size or len({kind_of(tensor) for tensor in tensors}) != 1):
        raise UsageError(f"scatter takes a tensor for each of the {size} members, all of one dtype and on one kind of device")
    made: list[Exchange] = []

    def launch(backend: Backend, views: Sequence[Signature]) -> Running | None:
        like, *shapes = views[source].own
        if tensors is None:
            made.append(Exchange(type(backend), me, [None] * size, like))
            made[0].make(backend)
        return made[0].start(backend, [shapes[me] if index == source else None for index in range(size)], any(map(math.prod, shapes)))

    def prepare(backend: Backend) -> None:
        assert tensors is not None
        made.append(Exchange(type(backend), me, tensors, kind_of(tensors[0])))
        made[0].make(backend)

    def finish() -> torch.Tensor | None:
        return made[0].results()[source]

    own: tuple[Any, ...] = ()
    if tensors is not None:
        own = kind_of(tensors[0]), *(tuple(tensor.shape) for tensor in tensors)
    heavy = tensors is not None and _heavy(*tensors)
    signature = Signature("scatter", (f"from {source}",), own)
    return Operation(signature, launch=launch, prepare=prepare if tensors is not None else None, finish=finish, heavy=heavy)


def reduce_scatter(
    backend: Kind, size: int, me: int, tensor: torch.Tensor, op: Reduction, premul: float | None, sizes: Sequence[int] | None
) -> Operation:
    check_tensors(backend, tensor)
    check_reduction(op, tensor.dtype, premul)
    if not tensor.dim():
        raise UsageError("reduce_scatter splits a tensor along its first dimension, and a single number has none")
    if sizes is None:
        if tensor.shape[0] % size:
            raise UsageError(f"{tensor.shape[0]} rows can't be split evenly among {size} members: say how, sizes=[…]")
        sizes = [tensor.shape[0] // size] * size
    if len(sizes) != size or sum(sizes) != tensor.shape[0]:
        raise UsageError(f"sizes={list(sizes)} do not split {tensor.shape[0]} rows among {size} members")
    parts = torch.split(tensor.detach(), list(sizes))
    exchange = Exchange(backend, me, parts, kind_of(tensor))

    def launch(backend: Backend, views: Sequence[Signature]) -> Running | None:
        return exchange.start(backend, [tuple(parts[me].shape)] * size, tensor.numel() > 0)

    def finish() -> torch.Tensor:
        got = [part for part in exchange.results() if part is not None]
        wide = {torch.float16: torch.float32, torch.bfloat16: torch.float32}.get(tensor.dtype, tensor.dtype)
        result = combine([part.to(wide) for part in got], op)
        if premul is not None:
            result *= premul
        if op == "mean":
            result /= size
        return result.to(tensor.dtype)

    signature = Signature("reduce_scatter", (op, *kind_of(tensor), tuple(tensor.shape), f"sizes {list(sizes)}"))
    return Operation(signature, launch=launch, prepare=exchange.make, finish=finish, heavy=exchange.heavy)


def barrier() -> Operation:
    """All that it needs is that all have come to it."""
    return Operation(Signature("barrier"))


def transfer(backend: Kind, me: int, source: int, to: int, tensor: torch.Tensor | None) -> Operation:
    """Point to point: the sender's half, or the receiver's, which may leave the tensor to be made."""
    check_tensors(backend, *([tensor] if tensor is not None else []))
    staged = Staged(tensor, carrier_to_move(backend, tensor.dtype), bits=True) if tensor is not None else None
    received: list[torch.Tensor] = []
    other = to if me == source else source

    def launch(backend: Backend, views: Sequence[Signature]) -> Running | None:
        theirs = views[-1].own
        if own and theirs and (own[0], own[2]) != (theirs[0], theirs[2]):
            sends, wants = (own, theirs) if me == source else (theirs, own)
            raise CollectiveMismatch(f"rank {source} sends {sends[0]} {sends[2]}, and rank {to} wants {wants[0]} {wants[2]}")
        if me == source:
            assert staged is not None
            return backend.send(staged.flat, to) if staged.flat.numel() else None
        if tensor is None:
            target = torch.empty(theirs[2], dtype=dtype_named(theirs[0]), device=theirs[1])
            into = Staged(target, carrier_to_move(type(backend), target.dtype), bits=True)
        else:
            assert staged is not None
            target, into = tensor, staged
        received.append(target)
        return backend.recv(into.flat, source) if target.numel() else None

    def finish() -> torch.Tensor | None:
        if me == source:
            return None
        if staged is not None:
            staged.put_back()
        return received[0]

    own: tuple[Any, ...] = (*kind_of(tensor), tuple(tensor.shape)) if tensor is not None else ()
    prepare = staged.make if staged is not None and staged.copies else None
    heavy = tensor is not None and _heavy(tensor)
    signature = Signature("send/recv", (f"from {source} to {to}",), own)
    return Operation(signature, launch=launch, prepare=prepare, finish=finish, heavy=heavy, channel=f"{source}>{to}", partner=other)
