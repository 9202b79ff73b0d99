"""Types of extents, points and shapes: mappings from names to sizes."""

from __future__ import annotations

from typing import assert_type

from monarch_async.points import Extent, Point
from monarch_async.shape import Shape


def extents(extent: Extent) -> None:
    assert_type(extent["hosts"], int)
    extent["hosts"] = 3  # type: ignore[index]
    extent[0]  # type: ignore[index]


def points(point: Point) -> None:
    assert_type(point["hosts"], int)
    assert_type(point.rank, int)
    point.rank = 3  # type: ignore[misc]


def shapes(shape: Shape) -> None:
    assert_type(shape.extent, Extent)
    assert_type(shape.slice(hosts=0), Shape)
