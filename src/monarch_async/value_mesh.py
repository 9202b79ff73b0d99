"""Values arranged as a mesh: what `call` returns, one value per member that was addressed.

Rules:

* The values are a tuple in row-major order, and a value mesh is always dense over its own: slicing one takes the chosen values
  with it and leaves the rest to the garbage collector, so a slice is no larger, in memory or pickled, than what it shows.
* Ranks count from 0 within this mesh, whatever part of another mesh its values came from.
* Iterating yields ``(point, value)`` pairs, as in Monarch; `values()` yields the values alone.
* Immutable, but not hashable, since the values need not be.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from monarch_async.errors import fold_ranks
from monarch_async.shape import Extent, MeshOps, Point, Shape

__all__ = ["ValueMesh"]

T = TypeVar("T")
U = TypeVar("U")

SHOWN_VALUES = 8
"""How many distinct values `repr` shows."""
SHOWN_RANKS = 48
"""How many characters of ranks `repr` shows per value."""


class ValueMesh(MeshOps, Generic[T]):
    """One value per point of an extent.

    `extent` may be a shape, of which only the extent is kept; `values` are in row-major order.
    Raises `ValueError` when their number is not that of the points.
    """

    __slots__ = ("_shape", "_values")

    _shape: Shape
    _values: tuple[T, ...]

    def __init__(self, extent: Extent | Shape, values: Iterable[T]) -> None:
        extent = extent if isinstance(extent, Extent) else extent.extent
        self._shape = Shape(extent)
        self._values = tuple(values)
        if len(self._values) != extent.nelements:
            raise ValueError(f"{extent!r} has {extent.nelements} points, but {len(self._values)} values were given")

    def _with_shape(self, shape: Shape, /) -> ValueMesh[T]:
        return ValueMesh(shape.extent, (self._values[rank] for rank in shape.ranks()))

    def get(self, rank: int, /) -> T:
        """The value at a rank, counted from the end when negative; `IndexError` outside."""
        try:
            return self._values[rank]
        except IndexError:
            raise IndexError(f"rank {rank} is outside {self.extent!r}, whose ranks are 0 to {len(self) - 1}") from None

    def __getitem__(self, rank: int, /) -> T:
        return self.get(rank)

    def item(self, /, **coords: int) -> T:
        """The value at the given coordinates: ``item(hosts=0, gpus=3)``, or ``item()`` where there is only one.

        Dimensions of size 1 may be left out. Raises `TypeError` for a dimension that is unknown or missing, and
        `IndexError` for a coordinate outside.
        """
        return self._values[self._shape.at(**coords)]

    def items(self) -> Iterator[tuple[Point, T]]:
        """Points and their values, in order of rank."""
        return zip(self._shape.points(), self._values, strict=True)

    def values(self) -> Iterator[T]:
        """The values, in order of rank."""
        return iter(self._values)

    def map(self, function: Callable[[T], U], /) -> ValueMesh[U]:
        """The mesh of ``function(value)``, of the same extent."""
        return ValueMesh(self.extent, map(function, self._values))

    def __iter__(self) -> Iterator[tuple[Point, T]]:
        return self.items()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ValueMesh):
            return NotImplemented
        return self.extent == other.extent and self._values == other._values

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[object, ...]:
        return (ValueMesh, (self.extent, self._values))

    def __repr__(self) -> str:
        return f"ValueMesh({self.extent!r}; {_describe(self._values)})"


def _describe(values: tuple[object, ...]) -> str:
    """``ranks 0–6: 'ok'; 7: 'late'``: each distinct value with its ranks; past `SHOWN_VALUES` of them, the ranks that remain."""
    groups: list[tuple[object, list[int]]] = []
    rest = ""
    for rank, value in enumerate(values):
        ranks = next((ranks for known, ranks in groups if _same(known, value)), None)
        if ranks is not None:
            ranks.append(rank)
        elif len(groups) < SHOWN_VALUES:
            groups.append((value, [rank]))
        else:
            rest = f"; {fold_ranks(list(range(rank, len(values))))}: …"
            break
    return "ranks " + "; ".join(f"{_shorten(fold_ranks(ranks))}: {_text(value)}" for value, ranks in groups) + rest


def _same(one: object, other: object) -> bool:
    """Whether two values may be shown as one. Arrays that can't say so in one word count as different."""
    if one is other:
        return True
    try:
        return type(one) is type(other) and bool(one == other)
    except (TypeError, ValueError, RuntimeError):
        return False


def _text(value: object) -> str:
    text = _brief.repr(value)
    return " ".join(text.split()) if "\n" in text else text


def _shorten(ranks: str) -> str:
    return ranks if len(ranks) <= SHOWN_RANKS else ranks[: ranks.rindex(",", 0, SHOWN_RANKS)] + ",…"


_brief = reprlib.Repr()
_brief.maxother = _brief.maxstring = 60
