"""Which members of a mesh are meant, and how they are arranged: slicing, splitting, flattening and renaming as arithmetic.

A mesh is spawned with *base ranks* 0 … n-1. A `Shape` addresses some of them and arranges them in an `Extent`: the member at
coordinates ``c`` has base rank ``offset + Σ c[i] * strides[i]``. A member's *rank* in a shape is its row-major position there,
which is what a `Point` and an index into a list of values count; slicing renumbers ranks and leaves base ranks alone.

Rules:

* Everything is pure: an operation makes a new shape in time proportional to the number of dimensions, never of members.
  Only `ranks()` counts them out, once per shape.
* No two coordinates share a base rank: each stride is larger than all that the later dimensions span. Slices (also with
  negative steps) and splits keep this, so base ranks can be turned back into coordinates by division.
* Equal shapes compare equal: the stride of a dimension of size 1, which means nothing, is set to what it would be in a dense one.
* `MeshOps` gives the operations to whatever has a shape: shapes, meshes of hosts, processes and actors, value meshes.

Errors: a dimension that does not exist is a `TypeError` in an operation that takes dimensions as keyword arguments, and
`UnknownDimension` where it is an argument's value; a coordinate outside its dimension is an `IndexError`; anything else that
can't be is a `ValueError`.
"""

from __future__ import annotations

import builtins
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from operator import index
from typing import Self, TypeAlias

from monarch_async.points import Extent, Point, UnknownDimension, describe_names, row_major_strides

__all__ = ["Extent", "MeshOps", "Point", "Selection", "Shape", "UnknownDimension"]

Selection: TypeAlias = builtins.slice | range | int
"""What `slice` takes per dimension: an int drops the dimension; a slice (cut to size, as Python does) or a range keeps it."""


class MeshOps(ABC):
    """Geometry for everything that is arranged as a mesh.

    A subclass supplies `_shape`, as a property or as a slot annotated ``_shape: Shape``, and `_with_shape`, which makes its like
    for another shape derived from its own.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def _shape(self) -> Shape: ...

    @abstractmethod
    def _with_shape(self, shape: Shape, /) -> Self: ...

    @property
    def extent(self) -> Extent:
        """The dimensions and their sizes, as an immutable value."""
        return self._shape._extent

    @property
    def sizes(self) -> dict[str, int]:
        """The dimensions and their sizes, as a dictionary."""
        return dict(self._shape._extent)

    def size(self, dim: str | Iterable[str] | None = None) -> int:
        """How many members there are along one dimension, along several together, or in all.

        Raises `UnknownDimension` (a `KeyError` and a `ValueError`) for a dimension that is not there.
        """
        extent = self._shape._extent
        if dim is None:
            return extent.nelements
        return extent[dim] if isinstance(dim, str) else prod(extent[name] for name in dim)

    def __len__(self) -> int:
        """How many members there are: at least one."""
        return self._shape._extent.nelements

    def slice(self, /, **dims: Selection) -> Self:
        """Select along named dimensions: ``mesh.slice(hosts=0, gpus=slice(0, 4))``.

        An int drops its dimension, and counts from the end when negative; a slice or range keeps it, with any step. What is not
        mentioned is kept whole.

        Raises `TypeError` for an unknown dimension or another kind of selection, `IndexError` for an int or a range that
        reaches outside, and `ValueError` for a selection of nothing.
        """
        return self._with_shape(_slice(self._shape, dims))

    def split(self, /, **dims: Sequence[str] | int) -> Self:
        """Split dimensions into several: ``mesh.split(gpus=("dp", "tp"), tp=4)``.

        For each dimension, the names of its parts, slowest first; for each part but at most one per dimension, its size.

        Raises `TypeError` for an unknown dimension, and `ValueError` when the sizes don't multiply to the dimension's,
        more than one is missing, or one names no part.
        """
        return self._with_shape(_split(self._shape, dims))

    def flatten(self, name: str) -> Self:
        """The same members along one dimension called `name`.

        Raises `ValueError` unless the mesh is dense, i.e. its base ranks are consecutive.
        """
        return self._with_shape(_flatten(self._shape, name))

    def rename(self, /, **names: str) -> Self:
        """Rename dimensions: ``mesh.rename(gpus="ranks")``. What is not mentioned keeps its name.

        Raises `TypeError` for an unknown dimension and `ValueError` when two would have the same name.
        """
        shape = self._shape
        _require_known(shape._extent, names, "rename")
        extent = Extent((names.get(label, label) for label in shape._extent), shape._extent.sizes)
        return self._with_shape(Shape(extent, shape._strides, shape._offset))


class Shape(MeshOps):
    """An extent, and the base rank behind each of its points. Immutable and hashable; iterating it yields the base ranks.

    ``Shape(extent)`` is all of a mesh in row-major order; `strides` (default: the extent's) and `offset` address part of one.
    Raises `ValueError` for strides and offsets that address a negative base rank, or one base rank twice.
    """

    __slots__ = ("_extent", "_lowest", "_offset", "_ranks", "_strides")

    def __init__(self, extent: Extent, strides: Sequence[int] | None = None, offset: int = 0) -> None:
        self._extent = extent
        self._offset = offset
        self._ranks: tuple[int, ...] | None = None
        self._strides = extent.strides if strides is None else _canonical_strides(extent, strides)
        back = sum(stride * (size - 1) for stride, size in zip(self._strides, extent.sizes, strict=True) if stride < 0)
        self._lowest = offset + back
        if self._lowest < 0:
            raise ValueError(f"offset {offset} and strides {self._strides} address base rank {self._lowest}; base ranks start at 0")

    @classmethod
    def of(cls, **sizes: int) -> Shape:
        """``Shape.of(hosts=2, gpus=8)``: all of a mesh of that extent."""
        return cls(Extent.of(**sizes))

    @property
    def _shape(self) -> Shape:
        return self

    def _with_shape(self, shape: Shape, /) -> Shape:
        return shape

    @property
    def strides(self) -> tuple[int, ...]:
        """By how much the base rank grows for one step along each dimension; negative where a slice reversed it."""
        return self._strides

    @property
    def offset(self) -> int:
        """The base rank of the first member."""
        return self._offset

    @property
    def is_dense(self) -> bool:
        """Whether the base ranks are consecutive and in row-major order, starting anywhere."""
        return self._strides == self._extent.strides

    def ranks(self) -> tuple[int, ...]:
        """The base ranks of all members, in row-major order. Worked out once."""
        if self._ranks is None:
            if self.is_dense:
                self._ranks = tuple(range(self._offset, self._offset + self._extent.nelements))
            else:
                ranks = [self._offset]
                for size, stride in zip(self._extent.sizes, self._strides, strict=True):
                    steps = range(0, size * stride, stride)
                    ranks = [rank + step for rank in ranks for step in steps]
                self._ranks = tuple(ranks)
        return self._ranks

    def base_rank(self, rank: int) -> int:
        """The base rank of the member at that row-major position, without counting out the others; `IndexError` outside."""
        if not 0 <= rank < self._extent.nelements:
            raise IndexError(f"rank {rank} is outside {self!r}, whose ranks are 0 to {self._extent.nelements - 1}")
        base = self._offset
        for step, stride in zip(self._extent.strides, self._strides, strict=True):
            at, rank = divmod(rank, step)
            base += at * stride
        return base

    def at(self, /, **coords: int) -> int:
        """The base rank of the member at those coordinates. Dimensions of size 1 may be left out.

        Raises `TypeError` for a dimension that is unknown or missing, and `IndexError` for a coordinate outside.
        """
        _require_known(self._extent, coords, "at")
        base = self._offset
        for (label, size), stride in zip(self._extent.items(), self._strides, strict=True):
            if label in coords:
                base += stride * _checked_coordinate(label, coords[label], size)
            elif size > 1:
                raise TypeError(f"no coordinate given for dimension {label!r} of {self._extent!r}")
        return base

    def index(self, base_rank: int, /) -> int:
        """The row-major position of the member with that base rank; `ValueError` if this shape does not address it."""
        rank = self._find(base_rank)
        if rank is None:
            raise ValueError(f"base rank {base_rank} is not in {self!r}")
        return rank

    def coordinates(self, base_rank: int, /) -> Point:
        """The point of the member with that base rank; `ValueError` if this shape does not address it."""
        return Point(self.index(base_rank), self._extent)

    def point(self, rank: int, /) -> Point:
        """The point at that row-major position; `IndexError` outside."""
        return Point(rank, self._extent)

    def points(self) -> Iterator[Point]:
        """Every point in row-major order, made one by one."""
        return self._extent.points()

    def __iter__(self) -> Iterator[int]:
        return iter(self.ranks())

    def __contains__(self, base_rank: object) -> bool:
        return isinstance(base_rank, int) and self._find(base_rank) is not None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Shape):
            return NotImplemented
        return self._offset == other._offset and self._strides == other._strides and self._extent == other._extent

    def __hash__(self) -> int:
        return hash((self._extent, self._strides, self._offset))

    def __reduce__(self) -> tuple[object, ...]:
        strides = None if self.is_dense else self._strides
        return (Shape, (self._extent, strides, self._offset))

    def __repr__(self) -> str:
        strides = "" if self.is_dense else f", strides={self._strides}"
        offset = f", offset={self._offset}" if self._offset else ""
        return f"Shape({self._extent!r}{strides}{offset})"

    def _find(self, base_rank: int) -> int | None:
        left = base_rank - self._lowest
        rank = 0
        for size, stride, step in zip(self._extent.sizes, self._strides, self._extent.strides, strict=True):
            at, left = divmod(left, abs(stride))
            if not 0 <= at < size:
                return None
            # Counted from the lowest base rank, a reversed dimension runs from its end.
            rank += step * (at if stride > 0 else size - 1 - at)
        return rank if left == 0 else None


def _slice(shape: Shape, dims: Mapping[str, Selection]) -> Shape:
    _require_known(shape._extent, dims, "slice")
    offset = shape._offset
    kept: list[tuple[str, int, int]] = []
    for (label, size), stride in zip(shape._extent.items(), shape._strides, strict=True):
        selection = dims.get(label, range(size))
        if isinstance(selection, (range, builtins.slice)):
            chosen = _checked_range(label, selection, size)
            offset += stride * chosen.start
            kept.append((label, len(chosen), stride * chosen.step))
        else:
            offset += stride * _checked_coordinate(label, selection, size)
    return _shape_of(kept, offset)


def _split(shape: Shape, dims: Mapping[str, Sequence[str] | int]) -> Shape:
    sizes = {name: _checked_part(name, value) for name, value in dims.items() if not isinstance(value, Sequence)}
    parts = {name: value for name, value in dims.items() if isinstance(value, Sequence)}
    _require_known(shape._extent, parts, "split")
    for label, names in parts.items():
        if isinstance(names, str):
            raise TypeError(f"split({label}={names!r}): give a tuple of names, or use rename({label}={names!r})")
        if not names:
            raise ValueError(f"split({label}=()): name at least one part; slice({label}=0) drops a dimension")
    unused = sizes.keys() - {name for names in parts.values() for name in names}
    if unused:
        raise ValueError(f"sizes given for {', '.join(sorted(unused))}, but no dimension is split into a part of that name")
    result: list[tuple[str, int, int]] = []
    for (label, size), stride in zip(shape._extent.items(), shape._strides, strict=True):
        names = parts.get(label, (label,))
        part_sizes = _part_sizes(label, size, names, sizes)
        steps = row_major_strides(part_sizes)
        result += [(name, part, stride * step) for name, part, step in zip(names, part_sizes, steps, strict=True)]
    return _shape_of(result, shape._offset)


def _checked_part(name: str, value: int) -> int:
    try:
        size = index(value)
    except TypeError:
        raise TypeError(f"split({name}={value!r}): give a tuple of names for a dimension, and an int for the size of a part") from None
    if size < 1:
        raise ValueError(f"a dimension's size must be at least 1, got {name}={size}")
    return size


def _part_sizes(label: str, size: int, names: Sequence[str], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The sizes of the parts of one dimension, the missing one worked out."""
    missing = [name for name in names if name not in sizes]
    given = {name: sizes[name] for name in names if name in sizes}
    if len(missing) > 1:
        raise ValueError(f"{label!r} (size {size}) is split into {tuple(names)}: give the size of all but one of {', '.join(missing)}")
    product = prod(given.values())
    if size % product if missing else size != product:
        figures = " * ".join(f"{name}={part}" for name, part in given.items()) + (f" = {product}" if len(given) > 1 else "")
        raise ValueError(f"{label!r} has size {size}, which is not {'divisible by' if missing else 'equal to'} {figures}")
    return tuple(given.get(name, size // product) for name in names)


def _flatten(shape: Shape, name: str) -> Shape:
    if not shape.is_dense:
        raise ValueError(
            f"can't flatten {shape!r}: its base ranks are not consecutive. Flatten the whole mesh before slicing it"
            " (the one dimension can then be sliced with a step), or rename a single dimension instead"
        )
    return Shape(Extent((name,), (shape._extent.nelements,)), None, shape._offset)


def _shape_of(dims: list[tuple[str, int, int]], offset: int) -> Shape:
    """From (name, size, stride) of each dimension."""
    extent = Extent((label for label, _, _ in dims), (size for _, size, _ in dims))
    return Shape(extent, [stride for _, _, stride in dims], offset)


def _canonical_strides(extent: Extent, strides: Sequence[int]) -> tuple[int, ...]:
    """Strides with those of size-1 dimensions normalised; refuses what would address a base rank twice."""
    if len(strides) != len(extent):
        raise ValueError(f"a shape needs one stride per dimension, got strides {tuple(strides)} for {extent!r}")
    result: list[int] = []
    dense, span = 1, 0
    for size, stride in zip(reversed(extent.sizes), reversed(strides), strict=True):
        if size > 1 and abs(stride) <= span:
            raise ValueError(f"strides {tuple(strides)} for {extent!r} address a base rank twice, or are not slowest-varying first")
        result.append(stride if size > 1 else dense)
        dense = abs(result[-1]) * size
        span += abs(result[-1]) * (size - 1)
    return tuple(reversed(result))


def _require_known(extent: Extent, given: Iterable[str], operation: str) -> None:
    for name in given:
        if name not in extent:
            raise TypeError(f"{operation}() got an unknown dimension {name!r}; there {describe_names(extent)}")


def _checked_coordinate(label: str, value: int, size: int) -> int:
    """A coordinate counted from the start."""
    try:
        at = index(value)
    except TypeError:
        raise TypeError(f"{label}={value!r}: select with an int, a slice or a range") from None
    if not -size <= at < size:
        raise IndexError(f"{label}={at} is outside dimension {label!r} of size {size}")
    return at % size


def _checked_range(label: str, selection: builtins.slice | range, size: int) -> range:
    chosen = selection if isinstance(selection, range) else range(*selection.indices(size))
    if not chosen:
        raise ValueError(f"{label}={selection!r} selects nothing of dimension {label!r} of size {size}")
    if not (0 <= chosen[0] < size and 0 <= chosen[-1] < size):
        raise IndexError(f"{label}={selection!r} reaches outside dimension {label!r} of size {size}; a slice would be cut to fit")
    return chosen
