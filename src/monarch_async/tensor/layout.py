"""Slices of tensors as arithmetic: which part of which slice goes where. Knows no torch, and nothing of memory but its order.

A `Box` is a slice of a tensor of several dimensions: where it begins, and how far it goes in each. What a process holds of a tensor is a
box, whose elements lie in its memory in C order; what another one wants is a box as well. `cover` finds from which boxes it can be put
together, each element from exactly one, and `runs` which stretches of memory that means.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

__all__ = ["Box", "Item", "Layout", "Run", "count_runs", "cover", "overlap", "runs", "shard_box", "span", "whole", "without"]


class Box(NamedTuple):
    """A slice: its first element's place in the whole tensor, and its size, per dimension."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.shape)

    def __str__(self) -> str:
        return f"[{', '.join(f'{first}:{first + size}' for first, size in zip(self.offsets, self.shape, strict=True))}]"


class Run(NamedTuple):
    """Elements that lie one after the other on both sides: where they begin in each one's memory, and how many."""

    source: int
    target: int
    elements: int


class Item(NamedTuple):
    """One tensor of a state dict, or a slice of it, in a block of memory. Items at the same `offset`, in bytes, share their memory."""

    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    box: Box
    offset: int


class Layout(NamedTuple):
    """What lies where in a block: items by key, and how many bytes that takes."""

    items: dict[str, Item]
    size: int


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def overlap(one: Box, other: Box) -> Box | None:
    """What both have; `None` if that is nothing."""
    offsets = tuple(map(max, one.offsets, other.offsets))
    ends = (min(a + n, b + m) for a, n, b, m in zip(one.offsets, one.shape, other.offsets, other.shape, strict=True))
    shape = tuple(end - first for first, end in zip(offsets, ends, strict=True))
    return Box(offsets, shape) if all(size > 0 for size in shape) else None


def without(box: Box, part: Box) -> Iterator[Box]:
    """The rest of a box without a part of it, in boxes that have nothing in common: at most two per dimension."""
    offsets, shape = list(box.offsets), list(box.shape)
    for axis, (first, size) in enumerate(zip(part.offsets, part.shape, strict=True)):
        end, stop = first + size, offsets[axis] + shape[axis]
        for start, length in ((offsets[axis], first - offsets[axis]), (end, stop - end)):
            if length > 0:
                yield Box((*offsets[:axis], start, *offsets[axis + 1 :]), (*shape[:axis], length, *shape[axis + 1 :]))
        offsets[axis], shape[axis] = first, size


def cover(wanted: Box, sources: Sequence[Box]) -> tuple[list[tuple[int, Box]], list[Box]]:
    """From which source each part of `wanted` comes, the earlier ones preferred; and the parts that none has."""
    taken: list[tuple[int, Box]] = []
    missing = [wanted] if wanted.elements else []
    for index, source in enumerate(sources):
        if not missing:
            break
        rest: list[Box] = []
        for box in missing:
            part = overlap(box, source)
            if part is None:
                rest.append(box)
            else:
                taken.append((index, part))
                rest += without(box, part)
        missing = rest
    return taken, missing


def count_runs(source: Box, target: Box, part: Box) -> int:
    """How many stretches of memory `runs` would give."""
    return prod(part.shape[: _together(source, target, part)])


def runs(source: Box, target: Box, part: Box) -> Iterator[Run]:
    """The stretches of memory that a part of both, not empty, consists of."""
    axis = _together(source, target, part)
    elements = prod(part.shape[axis:])
    steps = [_steps(box.shape) for box in (source, target)]
    starts = [_place(box, step, part.offsets) for box, step in zip((source, target), steps, strict=True)]
    for index in product(*map(range, part.shape[:axis])):
        there, here = (start + sum(i * n for i, n in zip(index, step, strict=False)) for start, step in zip(starts, steps, strict=True))
        yield Run(there, here, elements)


def span(source: Box, part: Box) -> tuple[int, int, tuple[int, ...]]:
    """The shortest stretch of a box's memory with all of a part, not empty: where it begins, its elements, and the strides of the part."""
    steps = _steps(source.shape)
    last = sum((size - 1) * step for size, step in zip(part.shape, steps, strict=True))
    return _place(source, steps, part.offsets), last + 1, steps


def _together(source: Box, target: Box, part: Box) -> int:
    """From which dimension on the elements of a part lie together on both sides."""
    axis = max(len(part.shape) - 1, 0)
    while axis and part.shape[axis] == source.shape[axis] == target.shape[axis]:
        axis -= 1
    return axis


def _steps(shape: Sequence[int]) -> tuple[int, ...]:
    """How many elements on the next one lies, per dimension."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _place(box: Box, steps: Sequence[int], offsets: Sequence[int]) -> int:
    return sum((at - first) * step for at, first, step in zip(offsets, box.offsets, steps, strict=True))


def shard_box(shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], axes: Sequence[int | None]) -> Box:
    """What one rank has of a tensor that is sharded as `DTensor` does it.

    Args:
        shape: of the whole tensor.
        mesh, coordinate: the mesh's sizes, and where in it the rank is.
        axes: per dimension of the mesh the tensor's dimension that is split over it, in parts of equal size as far as it goes, the last
            ones smaller or empty; `None` where all ranks have the same.
    """
    offsets, sizes = [0] * len(shape), list(shape)
    for ranks, rank, axis in zip(mesh, coordinate, axes, strict=True):
        if axis is None:
            continue
        each = -(-sizes[axis] // ranks)
        first = min(each * rank, sizes[axis])
        offsets[axis] += first
        sizes[axis] = min(each, sizes[axis] - first)
    return Box(tuple(offsets), tuple(sizes))
