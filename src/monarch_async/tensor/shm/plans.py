"""The collectives: what each fills, reduces and drains with each block. See `schedule`.

Rules:

* A plan touches the tensors only in its steps. What it writes to them it copies there, byte by byte: no type or mode of torch's matters.
* `total` may depend on what all have said (`agree`); everything else is known from the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from monarch_async.tensor.shm.arithmetic import Reduction
from monarch_async.tensor.shm.pages import Layout, Own, move
from monarch_async.tensor.shm.schedule import GRAIN, Phase, count_blocks, cuts

__all__ = ["AllGather", "AllReduce", "AllToAll", "Broadcast", "OneShot", "Place", "Plan", "ReduceScatter"]


class Place:
    """What a plan works with: the segments of the group, and scratch memory of its own."""

    def __init__(self, own: Own, layout: Layout) -> None:
        self.own = own
        self.layout = layout
        self.size = layout.size
        self.me = own.me
        self.address = own.mine.address
        self.peers = [(index, member) for index, member in enumerate(own.members) if index != own.me]
        self.shares = layout.block // layout.size // GRAIN * GRAIN  # bytes for each member in a block that is divided
        self.one_shot = min(ONE_SHOT, self.shares)
        self.scratch = torch.empty(layout.block // layout.size + 4096)  # twice a part of a block in half types, as float32


ONE_SHOT = 1 << 15
"""Bytes; so much is reduced by every member on its own, which takes one meeting instead of two."""


class Plan:
    """See the module's text. `signature`: kind, type, count, reduction, root, tag; `sizes`: elements for and from each member."""

    phases: tuple[Phase, ...] = (Phase.FILL, Phase.DRAIN)
    source = Phase.FILL
    total = 1
    extent = 0
    sizes: tuple[int, ...] = ()
    signature: tuple[int, ...] = ()

    def __init__(self, place: Place) -> None:
        self.place = place
        self.sources = place.own.others  # whom `drain` reads from

    def agree(self, extents: Sequence[int]) -> None:
        """All have said how large their largest part is."""

    def fill(self, block: int, slot: int) -> None:
        """`slot` is where the block's slot begins in every member's segment."""

    def reduce(self, block: int, slot: int) -> None: ...
    def drain(self, block: int, slot: int) -> None: ...


class AllReduce(Plan):
    """In place; with `to`, only that member's tensor is written to."""

    phases = (Phase.FILL, Phase.REDUCE, Phase.DRAIN)
    source = Phase.REDUCE

    def __init__(self, place: Place, tensor: torch.Tensor, reduction: Reduction, to: int | None = None) -> None:
        super().__init__(place)
        self._tensor = tensor
        self._reduction = reduction
        self._writes = to is None or to == place.me
        if not self._writes:
            self.sources = []
        self._item = tensor.itemsize
        self._count = tensor.numel()
        self._per_block = place.layout.block // self._item
        self._cuts = cuts(min(self._per_block, self._count), place.size, self._item)
        self.total = count_blocks(self._count * self._item, place.layout.block)

    def _parts(self, block: int) -> list[int]:
        rest = self._count - block * self._per_block
        return self._cuts if rest >= self._cuts[-1] else cuts(rest, self.place.size, self._item)

    def fill(self, block: int, slot: int) -> None:
        place, item, parts = self.place, self._item, self._parts(block)
        low, high, stop = parts[place.me], parts[place.me + 1], parts[-1]
        factor = self._reduction.factor
        if factor is not None:
            begin = block * self._per_block
            torch.mul(self._tensor[begin : begin + stop], factor, out=place.own.mine.view(self._reduction.dtype, slot, stop))
            return
        source, target = self._tensor.data_ptr() + block * place.layout.block, place.address + slot
        if low:
            move(target, source, low * item)
        if high < stop:
            move(target + high * item, source + high * item, (stop - high) * item)

    def reduce(self, block: int, slot: int) -> None:
        place, parts, reduction = self.place, self._parts(block), self._reduction
        low, high = parts[place.me], parts[place.me + 1]
        if low == high:
            return
        offset, count, dtype = slot + low * self._item, high - low, reduction.dtype
        inputs = [member.view(dtype, offset, count) for member in place.own.members]
        if reduction.factor is None:
            begin = block * self._per_block
            inputs[place.me] = self._tensor[begin + low : begin + high]
        result = slot + place.layout.result
        reduction.combine(inputs, place.own.mine.view(dtype, result, count), place.scratch)
        if self._writes:
            start = self._tensor.data_ptr() + block * place.layout.block + low * self._item
            move(start, place.address + result, count * self._item)

    def drain(self, block: int, slot: int) -> None:
        if not self._writes:
            return
        place, item, parts = self.place, self._item, self._parts(block)
        target = self._tensor.data_ptr() + block * place.layout.block
        result = slot + place.layout.result
        for index, member in place.peers:
            low, high = parts[index], parts[index + 1]
            if low < high:
                move(target + low * item, member.address + result, (high - low) * item)


class OneShot(Plan):
    """An all_reduce, or reduce, of little: every member that wants the result reduces everything."""

    def __init__(self, place: Place, tensor: torch.Tensor, reduction: Reduction, to: int | None = None) -> None:
        super().__init__(place)
        self._tensor = tensor
        self._reduction = reduction
        self._writes = to is None or to == place.me
        if not self._writes:
            self.sources = []

    def fill(self, block: int, slot: int) -> None:
        place, tensor, factor = self.place, self._tensor, self._reduction.factor
        if factor is None:
            move(place.address + slot, tensor.data_ptr(), tensor.nbytes)
        else:
            torch.mul(tensor, factor, out=place.own.mine.view(self._reduction.dtype, slot, tensor.numel()))

    def drain(self, block: int, slot: int) -> None:
        place, tensor = self.place, self._tensor
        count, dtype = tensor.numel(), tensor.dtype
        if not self._writes or not count:
            return
        result = slot + place.layout.result
        inputs = [member.view(dtype, slot, count) for member in place.own.members]
        self._reduction.combine(inputs, place.own.mine.view(dtype, result, count), place.scratch)
        move(tensor.data_ptr(), place.address + result, tensor.nbytes)


class Broadcast(Plan):
    """From member `source`."""

    def __init__(self, place: Place, tensor: torch.Tensor, source: int) -> None:
        super().__init__(place)
        self._tensor = tensor
        self._block = place.layout.block
        self._address = 0
        self.total = count_blocks(tensor.nbytes, self._block)
        if source == place.me:
            self.phases = (Phase.FILL,)
        else:
            self.phases = (Phase.DRAIN,)
            self.sources = [place.own.members[source]]
            self._address = self.sources[0].address

    def fill(self, block: int, slot: int) -> None:
        begin = block * self._block
        move(self.place.address + slot, self._tensor.data_ptr() + begin, min(self._block, self._tensor.nbytes - begin))

    def drain(self, block: int, slot: int) -> None:
        begin = block * self._block
        move(self._tensor.data_ptr() + begin, self._address + slot, min(self._block, self._tensor.nbytes - begin))


class AllGather(Plan):
    """`out` has the members' tensors one after the other; the own one may be there already."""

    def __init__(self, place: Place, out: torch.Tensor, tensor: torch.Tensor) -> None:
        super().__init__(place)
        self._out = out
        self._tensor = tensor
        self._block = place.layout.block
        self._bytes = tensor.nbytes
        self.total = count_blocks(self._bytes, self._block)

    def fill(self, block: int, slot: int) -> None:
        begin = block * self._block
        move(self.place.address + slot, self._tensor.data_ptr() + begin, min(self._block, self._bytes - begin))

    def drain(self, block: int, slot: int) -> None:
        begin = block * self._block
        size, target = min(self._block, self._bytes - begin), self._out.data_ptr() + begin
        source, mine = self._tensor.data_ptr() + begin, target + self.place.me * self._bytes
        if source != mine:
            move(mine, source, size)
        for index, member in self.place.peers:
            move(target + index * self._bytes, member.address + slot, size)


class ReduceScatter(Plan):
    """`tensor` has a part for each member, `out` gets what is this one's, reduced."""

    def __init__(self, place: Place, out: torch.Tensor, tensor: torch.Tensor, reduction: Reduction) -> None:
        super().__init__(place)
        self._out = out
        self._tensor = tensor
        self._reduction = reduction
        self._share = place.shares
        self._bytes = out.nbytes
        self.total = count_blocks(self._bytes, self._share)

    def fill(self, block: int, slot: int) -> None:
        place, begin, share = self.place, block * self._share, self._share
        size = min(share, self._bytes - begin)
        factor = self._reduction.factor
        if factor is not None:
            count, item, dtype = size // self._out.itemsize, self._out.itemsize, self._reduction.dtype
            for index in range(place.size):
                first = (index * self._bytes + begin) // item
                out = place.own.mine.view(dtype, slot + index * share, count)
                torch.mul(self._tensor[first : first + count], factor, out=out)
            return
        source, target = self._tensor.data_ptr() + begin, place.address + slot
        for index, _ in place.peers:
            move(target + index * share, source + index * self._bytes, size)

    def drain(self, block: int, slot: int) -> None:
        place, begin, item, dtype = self.place, block * self._share, self._out.itemsize, self._reduction.dtype
        size = min(self._share, self._bytes - begin)
        count = size // item
        if not count:
            return
        inputs = [member.view(dtype, slot + place.me * self._share, count) for member in place.own.members]
        if self._reduction.factor is None:
            first = (place.me * self._bytes + begin) // item
            inputs[place.me] = self._tensor[first : first + count]
        result = slot + place.layout.result
        self._reduction.combine(inputs, place.own.mine.view(dtype, result, count), place.scratch)
        move(self._out.data_ptr() + begin, place.address + result, size)


class AllToAll(Plan):
    """`sizes` and `out_sizes` elements for, and from, each member."""

    def __init__(self, place: Place, out: torch.Tensor, tensor: torch.Tensor, out_sizes: Sequence[int], sizes: Sequence[int]) -> None:
        super().__init__(place)
        item = tensor.itemsize
        self._out = out
        self._tensor = tensor
        self._share = place.shares
        self._from = [0, *accumulate(size * item for size in sizes)]
        self._into = [0, *accumulate(size * item for size in out_sizes)]
        self.sizes = (*sizes, *out_sizes)
        self.extent = max(sizes) * item

    def agree(self, extents: Sequence[int]) -> None:
        self.total = count_blocks(max(extents), self._share)

    def fill(self, block: int, slot: int) -> None:
        place, bounds, begin = self.place, self._from, block * self._share
        source = self._tensor.data_ptr() + begin
        for index, _ in place.peers:
            size = min(self._share, bounds[index + 1] - bounds[index] - begin)
            if size > 0:
                move(place.address + slot + index * self._share, source + bounds[index], size)

    def drain(self, block: int, slot: int) -> None:
        place, bounds, begin = self.place, self._into, block * self._share
        for index, member in place.peers:
            size = min(self._share, bounds[index + 1] - bounds[index] - begin)
            if size > 0:
                move(self._out.data_ptr() + bounds[index] + begin, member.address + slot + place.me * self._share, size)
        size = min(self._share, bounds[place.me + 1] - bounds[place.me] - begin)
        if size > 0:
            source = self._tensor.data_ptr() + self._from[place.me] + begin
            move(self._out.data_ptr() + bounds[place.me] + begin, source, size)
