"""Slices as arithmetic, against NumPy and against torch: every element from exactly one place, to the right one."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from monarch_async.tensor.layout import Box, count_runs, cover, overlap, runs, shard_box, span, whole, without

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""The machine may be busy with other things."""


@st.composite
def boxes(draw: Any, shape: Sequence[int]) -> Box:
    """A slice, perhaps an empty one, of a tensor of this shape."""
    edges = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return Box(tuple(first for first, _ in edges), tuple(end - first for first, end in edges))


@st.composite
def shape_and_boxes(draw: Any, most: int) -> tuple[tuple[int, ...], list[Box]]:
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    return shape, draw(st.lists(boxes(shape), min_size=1, max_size=most))


def region(box: Box) -> tuple[slice, ...]:
    return tuple(slice(first, first + size) for first, size in zip(box.offsets, box.shape, strict=True))


def counted(shape: tuple[int, ...], parts: Sequence[Box]) -> Any:
    """How many of the parts each element is in."""
    count = numpy.zeros(shape, dtype=int)
    for part in parts:
        count[region(part)] += 1
    return count


@patient
@given(shape_and_boxes(6))
def test_cover_takes_every_element_once(given_: tuple[tuple[int, ...], list[Box]]) -> None:
    """What is taken and what is missing are the wanted box, each element once; what is taken lies in its source, the first that has it."""
    shape, (wanted, *sources) = given_
    taken, missing = cover(wanted, sources)
    expected = counted(shape, [wanted])
    assert (expected == counted(shape, [part for _, part in taken] + missing)).all()
    anywhere = counted(shape, sources) > 0
    assert ((expected > 0) & ~anywhere == counted(shape, missing)).all()
    for index, part in taken:
        assert overlap(part, sources[index]) == part
        assert not (counted(shape, sources[:index]) * counted(shape, [part])).any()


@patient
@given(shape_and_boxes(2))
def test_without_is_the_rest(given_: tuple[tuple[int, ...], list[Box]]) -> None:
    """A box without a part of it, and the part, are the box; the pieces are few and none is empty."""
    shape, (one, *others) = given_
    part = overlap(one, others[0]) if others else None
    if part is None:
        return
    rest = list(without(one, part))
    assert (counted(shape, [one]) == counted(shape, [part, *rest])).all()
    assert len(rest) <= 2 * len(shape)
    assert all(box.elements for box in rest)


@patient
@given(shape_and_boxes(2))
def test_runs_move_the_part(given_: tuple[tuple[int, ...], list[Box]]) -> None:
    """Copied run by run between two memories, the part arrives, and nothing else is touched."""
    shape, found = given_
    source, target = found[0], found[-1]
    part = overlap(source, target)
    if part is None:
        return
    everything = numpy.arange(1, prod(shape) + 1).reshape(shape)
    there = everything[region(source)].flatten()
    here = numpy.zeros(target.elements, dtype=int)
    moved = list(runs(source, target, part))
    for run in moved:
        here[run.target : run.target + run.elements] += there[run.source : run.source + run.elements]
    expected = numpy.zeros(shape, dtype=int)
    expected[region(part)] = everything[region(part)]
    assert (expected[region(target)] == here.reshape(target.shape)).all()
    assert count_runs(source, target, part) == len(moved)
    if part == source == target:
        assert 1 == len(moved)

    first, elements, strides = span(source, part)
    stretch = there[first : first + elements]
    assert elements == len(stretch)
    view = numpy.lib.stride_tricks.as_strided(stretch, part.shape, [step * stretch.itemsize for step in strides])
    assert (everything[region(part)] == view).all()


def test_boxes_that_only_touch_have_nothing_in_common() -> None:
    """The border belongs to one of them, and an empty box has no part of anything."""
    assert overlap(Box((0, 0), (2, 4)), Box((2, 0), (2, 4))) is None
    assert overlap(whole((3,)), Box((1,), (0,))) is None
    assert whole(()) == overlap(whole(()), whole(()))
    assert ([], []) == cover(Box((1,), (0,)), [whole((3,))])
    assert "[1:3, 0:4]" == str(Box((1, 0), (2, 4)))


class Mesh:
    """As much of a device mesh as torch's own arithmetic asks for."""

    def __init__(self, shape: tuple[int, ...], coordinate: tuple[int, ...]) -> None:
        self.shape = shape
        self.coordinate = coordinate
        self.ndim = len(shape)

    def size(self, axis: int) -> int:
        return self.shape[axis]

    def get_coordinate(self) -> list[int]:
        return list(self.coordinate)

    def _is_current_rank_part_of_mesh(self) -> bool:
        return True

    def _sym_get_coordinate(self, axis: int) -> int:
        return self.coordinate[axis]


@patient
@given(st.data())
def test_shards_are_those_of_dtensor(data: st.DataObject) -> None:
    """On any mesh the ranks' boxes are what torch says, also where the sizes don't divide; and together they are the tensor."""
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    mesh = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    axes = [data.draw(st.none() | st.integers(0, len(shape) - 1)) for _ in mesh]
    placements = [Replicate() if axis is None else Shard(axis) for axis in axes]
    held = []
    for coordinate in numpy.ndindex(mesh):
        box = shard_box(shape, mesh, coordinate, axes)
        local, offsets = compute_local_shape_and_global_offset(shape, Mesh(mesh, coordinate), placements)  # type: ignore[arg-type]
        assert tuple(local) == box.shape
        if box.elements:
            assert tuple(offsets) == box.offsets
        held.append(box)
    copies = prod(size for size, axis in zip(mesh, axes, strict=True) if axis is None)
    assert (counted(shape, held) == copies).all()


@pytest.mark.parametrize(("shape", "ranks", "rank", "expected"), [((7,), 4, 3, Box((6,), (1,))), ((2,), 4, 3, Box((2,), (0,)))])
def test_last_shards_are_smaller_or_empty(shape: tuple[int, ...], ranks: int, rank: int, expected: Box) -> None:
    """What is left over is with the first ranks."""
    assert expected == shard_box(shape, [ranks], [rank], [0])
