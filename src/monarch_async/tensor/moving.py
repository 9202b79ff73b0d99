"""Operations that move tensors as they are, each made of what it says of itself and of what it asks a backend for.

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
from monarch_async.tensor.inline import is_small, pack, small_broadcast, unpack
from monarch_async.tensor.operation import Operation
from monarch_async.tensor.reductions import carrier_to_move
from monarch_async.tensor.signature import Signature
from monarch_async.tensor.staged import Exchange, Kind, Size, Staged, check_target, check_tensors, dtype_named, is_heavy, kind_of

__all__ = [
    "make_all_gather",
    "make_all_to_all",
    "make_barrier",
    "make_broadcast",
    "make_gather",
    "make_scatter",
    "make_transfer",
]


def make_broadcast(backend: Kind, size: int, me: int, tensor: torch.Tensor, source: int) -> Operation:
    check_tensors(backend, tensor)
    if me != source:
        check_target(tensor)
    signature = Signature("broadcast", (f"from {source}", *kind_of(tensor), tuple(tensor.shape)))
    if is_small(backend, tensor, size):
        return small_broadcast(signature, tensor, me, source)
    staged = Staged(tensor, carrier_to_move(backend, tensor.dtype), bits=True)

    def launch(backend: Backend, views: Sequence[Signature]) -> Running | None:
        return backend.broadcast(staged.flat, source) if tensor.numel() else None

    def finish() -> torch.Tensor:
        staged.put_back()
        return tensor

    prepare = staged.make if staged.copies else None
    return Operation(signature, launch=launch, prepare=prepare, finish=finish, heavy=is_heavy(tensor), free=tensor.numel() > 0)


def make_all_gather(backend: Kind, size: int, me: int, tensor: torch.Tensor) -> Operation:
    check_tensors(backend, tensor)
    carrier = carrier_to_move(backend, tensor.dtype)
    scale = tensor.dtype.itemsize // carrier.itemsize
    own: tuple[Any, ...] = (tuple(tensor.shape),)
    if is_small(backend, tensor, size):  # each for itself: some may be small and others not
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
    return Operation(signature, launch=launch, prepare=prepare, finish=finish, heavy=is_heavy(tensor))


def make_all_to_all(backend: Kind, size: int, me: int, tensors: Sequence[torch.Tensor]) -> Operation:
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


def make_gather(backend: Kind, size: int, me: int, tensor: torch.Tensor, to: int) -> Operation:
    check_tensors(backend, tensor)
    exchange = Exchange(backend, me, [tensor if index == to else None for index in range(size)], kind_of(tensor))

    def launch(backend: Backend, views: Sequence[Signature]) -> Running | None:
        anything = any(math.prod(view.own[0]) for view in views)
        return exchange.start(backend, [view.own[0] if me == to else None for view in views], anything)

    def finish() -> list[torch.Tensor | None] | None:
        return exchange.results() if me == to else None

    signature = Signature("gather", (f"to {to}", *kind_of(tensor)), (tuple(tensor.shape),))
    return Operation(signature, launch=launch, prepare=exchange.make, finish=finish, heavy=exchange.heavy)


def make_scatter(backend: Kind, size: int, me: int, tensors: Sequence[torch.Tensor] | None, source: int) -> Operation:
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
    heavy = tensors is not None and is_heavy(*tensors)
    signature = Signature("scatter", (f"from {source}",), own)
    return Operation(signature, launch=launch, prepare=prepare if tensors is not None else None, finish=finish, heavy=heavy)


def make_barrier() -> Operation:
    """All that it needs is that all have come to it."""
    return Operation(Signature("barrier"))


def make_transfer(backend: Kind, me: int, source: int, to: int, tensor: torch.Tensor | None) -> Operation:
    """Point to point: the sender's half, or the receiver's, which may leave the tensor to be made."""
    check_tensors(backend, *([tensor] if tensor is not None else []))
    if tensor is not None and me == to:
        check_target(tensor)
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
    heavy = tensor is not None and is_heavy(tensor)
    signature = Signature("send/recv", (f"from {source} to {to}",), own)
    return Operation(signature, launch=launch, prepare=prepare, finish=finish, heavy=heavy, channel=f"{source}>{to}", partner=other)
