"""Named sizes and the points within them: how a mesh is laid out, and where in it one member stands.

An `Extent` is an ordered set of named dimensions with their sizes; a `Point` is one place in an extent. Members are numbered
row-major: the last dimension varies fastest, so in ``{'hosts': 2, 'gpus': 8}`` host 1, gpu 3 is rank 11.

Rules:

* Both are immutable, hashable mappings in the order of the dimensions, and pickle to their few defining values.
* A point stores its rank only; coordinates are worked out when asked for, because one is made for every message.
* An extent without dimensions has one element, rank 0: that is what `this_host()` is.
* A name is usable as a keyword argument (``mesh.slice(gpus=0)``), and occurs once. A size is at least 1.
* A missing name raises `UnknownDimension`: a `KeyError`, as of any mapping, and a `ValueError`, as in Monarch.
* Each equals a plain ``dict`` with the same items; with its own kind, the order of dimensions and (for points) the extent count too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from keyword import iskeyword
from math import prod
from operator import index

__all__ = ["Extent", "Point", "UnknownDimension"]


class UnknownDimension(KeyError, ValueError):
    """A dimension was asked for that is not there; the message lists those that are."""

    def __init__(self, name: object, known: Iterable[str]) -> None:
        super().__init__(name, tuple(known))

    def __str__(self) -> str:
        name, known = self.args
        return f"no dimension {name!r}; there {describe_names(known)}"


class Extent(Mapping[str, int]):
    """Ordered dimensions and their sizes, e.g. ``Extent(["hosts", "gpus"], [2, 8])`` or ``Extent.of(hosts=2, gpus=8)``.

    Raises `ValueError` for a name that is no identifier or occurs twice, for a size below 1 and for unequal counts;
    `TypeError` for a name that is no string and a size that is no integer.
    """

    __slots__ = ("_labels", "_nelements", "_sizes", "_strides")

    def __init__(self, labels: Iterable[str] = (), sizes: Iterable[int] = ()) -> None:
        self._labels = tuple(labels)
        sizes = tuple(sizes)
        names = [repr(label) for label in self._labels] if len(self._labels) == len(sizes) else ["a dimension"] * len(sizes)
        self._sizes = tuple(_checked_size(name, size) for name, size in zip(names, sizes, strict=True))
        if len(self._labels) != len(self._sizes):
            raise ValueError(f"an extent needs one size per name, got names {self._labels} and sizes {self._sizes}")
        seen: set[str] = set()
        for label in self._labels:
            if not isinstance(label, str):
                raise TypeError(f"a dimension's name must be a string, got {label!r}")
            if not label.isidentifier() or iskeyword(label):
                raise ValueError(f"a dimension's name must be usable as a keyword argument, got {label!r}")
            if label in seen:
                raise ValueError(f"dimension {label!r} occurs twice in {self._labels}; give each dimension its own name")
            seen.add(label)
        self._strides = row_major_strides(self._sizes)
        self._nelements = prod(self._sizes)

    @classmethod
    def of(cls, **sizes: int) -> Extent:
        """``Extent.of(hosts=2, gpus=8)``; a dictionary's items serve as well: ``Extent.of(**per_host)``."""
        return cls(sizes.keys(), sizes.values())

    @property
    def labels(self) -> tuple[str, ...]:
        """The names, slowest-varying first."""
        return self._labels

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes, in the order of `labels`."""
        return self._sizes

    @property
    def strides(self) -> tuple[int, ...]:
        """By how much the rank grows for one step along each dimension."""
        return self._strides

    @property
    def nelements(self) -> int:
        """How many points there are. `len()` counts the dimensions, as of any mapping."""
        return self._nelements

    def point(self, rank: int) -> Point:
        """The point of that rank; `IndexError` outside ``0 … nelements - 1``."""
        return Point(rank, self)

    def points(self) -> Iterator[Point]:
        """Every point in order of rank, made one by one."""
        return (Point(rank, self) for rank in range(self._nelements))

    def concat(self, inner: Extent) -> Extent:
        """The dimensions of this extent, then those of `inner`; `ValueError` if they share a name."""
        return Extent(self._labels + inner._labels, self._sizes + inner._sizes)

    def __getitem__(self, label: str) -> int:
        return self._sizes[_position(label, self._labels)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._labels)

    def __len__(self) -> int:
        return len(self._labels)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Extent):
            return self._labels == other._labels and self._sizes == other._sizes
        return dict(self) == other if isinstance(other, dict) else NotImplemented

    def __hash__(self) -> int:
        return hash((self._labels, self._sizes))

    def __reduce__(self) -> tuple[object, ...]:
        return (Extent, (self._labels, self._sizes))

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{label!r}: {size}" for label, size in self.items()) + "}"


class Point(Mapping[str, int]):
    """One place in an extent: a mapping from dimension to coordinate, shown as ``{'hosts': 0/2, 'gpus': 3/8}``.

    Raises `IndexError` for a rank outside the extent.
    """

    __slots__ = ("_extent", "_rank")

    def __init__(self, rank: int, extent: Extent) -> None:
        if not 0 <= rank < extent._nelements:
            raise IndexError(f"rank {rank} is outside {extent!r}, whose ranks are 0 to {extent._nelements - 1}")
        self._rank = rank
        self._extent = extent

    @property
    def rank(self) -> int:
        """The row-major position in the extent."""
        return self._rank

    @property
    def extent(self) -> Extent:
        return self._extent

    def size(self, label: str) -> int:
        """The size of a dimension; `UnknownDimension` (a `ValueError`) if there is none of that name."""
        return self._extent[label]

    def __getitem__(self, label: str) -> int:
        extent = self._extent
        dim = _position(label, extent._labels)
        return self._rank // extent._strides[dim] % extent._sizes[dim]

    def __iter__(self) -> Iterator[str]:
        return iter(self._extent._labels)

    def __len__(self) -> int:
        return len(self._extent._labels)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Point):
            return self._rank == other._rank and self._extent == other._extent
        return dict(self) == other if isinstance(other, dict) else NotImplemented

    def __hash__(self) -> int:
        return hash((self._rank, self._extent))

    def __reduce__(self) -> tuple[object, ...]:
        return (Point, (self._rank, self._extent))

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{label!r}: {at}/{self._extent[label]}" for label, at in self.items()) + "}"


def row_major_strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """``(2, 3, 4)`` → ``(12, 4, 1)``."""
    strides: list[int] = []
    step = 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def describe_names(names: Iterable[str]) -> str:
    """For error messages: which dimensions there are, as the end of a sentence."""
    listed = ", ".join(map(repr, names))
    return f"are {listed}" if listed else "are none"


def _position(label: object, labels: tuple[str, ...]) -> int:
    if label not in labels:
        raise UnknownDimension(label, labels)
    return labels.index(label)


def _checked_size(name: str, size: int) -> int:
    size = index(size)
    if size < 1:
        raise ValueError(f"the size of {name} must be at least 1, not {size}")
    return size
