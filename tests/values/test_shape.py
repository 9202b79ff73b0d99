"""Extents, points and shapes, compared with a numpy array of ranks as the model."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from typing import Self

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_async.points import Extent, Point, UnknownDimension
from monarch_async.shape import MeshOps, Shape

Ranks = npt.NDArray[np.int64]
NAMES = ["hosts", "gpus", "dp", "tp", "pp", "cp", "ep"]


@st.composite
def extents(draw: st.DrawFn) -> Extent:
    sizes = draw(st.lists(st.integers(1, 6), max_size=4))
    return Extent(draw(st.permutations(NAMES))[: len(sizes)], sizes)


def filled_slices(size: int) -> st.SearchStrategy[slice]:
    """Slices that select something of that many."""
    return st.slices(size).filter(lambda chosen: len(range(*chosen.indices(size))) > 0)


def model_of(shape: Shape) -> Ranks:
    return np.arange(len(shape)).reshape(shape.extent.sizes)


def check(shape: Shape, model: Ranks) -> None:
    """Everything that a shape says agrees with the array of base ranks."""
    assert model.shape == shape.extent.sizes
    assert model.size == len(shape) == shape.size() == shape.extent.nelements
    assert dict(zip(shape.extent.labels, model.shape, strict=True)) == shape.sizes
    assert tuple(model.ravel().tolist()) == shape.ranks() == tuple(shape)
    assert (np.diff(model.ravel()) == 1).all() == shape.is_dense
    for rank, (where, base) in enumerate(np.ndenumerate(model)):
        coords = dict(zip(shape.extent.labels, where, strict=True))
        point = shape.point(rank)
        assert coords == point
        assert base == shape.base_rank(rank) == shape.at(**coords) == shape.at(**point)
        assert rank == shape.index(int(base))
        assert point == shape.coordinates(int(base))
    members = set(model.ravel().tolist())
    assert [rank in members for rank in range(-3, model.max() + 4)] == [rank in shape for rank in range(-3, model.max() + 4)]
    assert shape == pickle.loads(pickle.dumps(shape))


def slice_some(data: st.DataObject, shape: Shape, model: Ranks) -> tuple[Shape, Ranks]:
    chosen: dict[str, int | slice | range] = {}
    index: list[int | slice] = []
    for label, size in shape.sizes.items():
        kind = data.draw(st.sampled_from(["all", "int", "slice", "range"]))
        where: int | slice = slice(None)
        if kind == "int":
            chosen[label] = where = data.draw(st.integers(-size, size - 1))
        elif kind == "slice":
            where = data.draw(filled_slices(size))
            chosen[label] = where
        elif kind == "range":
            start, step = data.draw(st.integers(0, size - 1)), data.draw(st.integers(1, 3))
            stop = data.draw(st.integers(start + 1, size))
            chosen[label], where = range(start, stop, step), slice(start, stop, step)
        index.append(where)
    return shape.slice(**chosen), model[tuple(index)]


def split_one(data: st.DataObject, shape: Shape, model: Ranks) -> tuple[Shape, Ranks]:
    free = [name for name in NAMES if name not in shape.sizes]
    if not shape.sizes or len(free) < 2:
        return shape, model
    label = data.draw(st.sampled_from(shape.extent.labels))
    dim, size = shape.extent.labels.index(label), shape.sizes[label]
    inner = data.draw(st.sampled_from([part for part in range(1, size + 1) if size % part == 0]))
    outer_name, inner_name = free[:2]
    given = data.draw(st.sampled_from([{inner_name: inner}, {outer_name: size // inner}, {inner_name: inner, outer_name: size // inner}]))
    parts = (*model.shape[:dim], size // inner, inner, *model.shape[dim + 1 :])
    dims: dict[str, tuple[str, ...] | int] = {label: (outer_name, inner_name), **given}
    return shape.split(**dims), model.reshape(parts)


def rename_all(data: st.DataObject, shape: Shape, model: Ranks) -> tuple[Shape, Ranks]:
    names = data.draw(st.permutations(NAMES))[: len(shape.sizes)]
    renamed = shape.rename(**dict(zip(shape.extent, names, strict=True)))
    assert tuple(names) == renamed.extent.labels
    return renamed, model


def flatten_it(data: st.DataObject, shape: Shape, model: Ranks) -> tuple[Shape, Ranks]:
    if (np.diff(model.ravel()) == 1).all():
        return shape.flatten("flat").rename(flat=NAMES[0]), model.reshape(-1)
    with pytest.raises(ValueError, match="not consecutive"):
        shape.flatten("flat")
    return shape, model


@given(extents(), st.lists(st.sampled_from([slice_some, split_one, rename_all, flatten_it]), max_size=5), st.data())
def test_operations_agree_with_numpy(extent: Extent, operations: list[Callable[..., tuple[Shape, Ranks]]], data: st.DataObject) -> None:
    """Slices of slices of splits, in any order, address the ranks that indexing and reshaping an array give."""
    shape = Shape(extent)
    model = model_of(shape)
    check(shape, model)
    for operation in operations:
        shape, model = operation(data, shape, model)
        check(shape, model)


@given(extents())
def test_points_and_ranks_round_trip(extent: Extent) -> None:
    """Each rank has one point, whose coordinates count row-major and lead back to it."""
    points = list(extent.points())
    assert list(range(extent.nelements)) == [point.rank for point in points]
    assert [tuple(where) for where in np.ndindex(*extent.sizes)] == [tuple(point.values()) for point in points]
    assert extent.nelements == len(set(points))
    for point in points:
        assert point == extent.point(point.rank) == pickle.loads(pickle.dumps(point))
        assert point.rank == Shape(extent).at(**point)


def test_point_is_a_mapping() -> None:
    """A point reads like a dictionary, in the order of its dimensions, and shows sizes beside coordinates."""
    point = Extent.of(hosts=2, gpus=8).point(3)
    assert "{'hosts': 0/2, 'gpus': 3/8}" == repr(point)
    assert {"hosts": 0, "gpus": 3} == dict(point) == point
    assert (3, 3, 8) == (point["gpus"], point.rank, point.size("gpus"))
    assert (2, True, False) == (len(point), "gpus" in point, "racks" in point)
    assert (None, 7) == (point.get("racks"), point.get("racks", 7))
    assert Extent.of(hosts=2, gpus=8) == point.extent


@pytest.mark.parametrize("error", [KeyError, ValueError, UnknownDimension])
@pytest.mark.parametrize(
    "ask",
    [
        lambda shape: shape.point(0)["racks"],
        lambda shape: shape.point(0).size("racks"),
        lambda shape: shape.extent["racks"],
        lambda shape: shape.size("racks"),
        lambda shape: shape.size(["gpus", "racks"]),
    ],
)
def test_missing_dimension(ask: Callable[[Shape], object], error: type[Exception]) -> None:
    """Asking for a dimension that is not there is the KeyError of a mapping and Monarch's ValueError, and lists those that are."""
    with pytest.raises(error) as caught:
        ask(Shape.of(hosts=2, gpus=8))
    assert "no dimension 'racks'; there are 'hosts', 'gpus'" == str(caught.value)
    assert str(caught.value) == str(pickle.loads(pickle.dumps(caught.value)))


def test_points_of_different_extents_differ() -> None:
    """Equal coordinates in another extent are another point."""
    assert Extent.of(gpus=4).point(1) != Extent.of(gpus=8).point(1)
    assert Extent.of(gpus=4).point(1) != Extent.of(ranks=4).point(1)
    assert Extent.of(gpus=4).point(1) != 1


@pytest.mark.parametrize("rank", [-1, 8])
def test_point_outside_its_extent(rank: int) -> None:
    """A point, and the base rank of a position, exist only within the extent."""
    with pytest.raises(IndexError, match="ranks are 0 to 7"):
        Point(rank, Extent.of(gpus=8))
    with pytest.raises(IndexError, match="ranks are 0 to 7"):
        Shape.of(gpus=16).slice(gpus=slice(8, 16)).base_rank(rank)


def test_extent_is_an_ordered_immutable_value() -> None:
    """Extents compare by names, order and sizes, serve as keys, and survive pickling in few bytes."""
    extent = Extent(["hosts", "gpus"], [2, 8])
    assert Extent.of(hosts=2, gpus=8) == extent == {"gpus": 8, "hosts": 2}
    assert hash(Extent.of(hosts=2, gpus=8)) == hash(extent)
    assert extent != Extent.of(gpus=8, hosts=2)
    assert extent != ("hosts", "gpus")
    assert "{'hosts': 2, 'gpus': 8}" == repr(extent)
    assert (16, (8, 1), 2) == (extent.nelements, extent.strides, len(extent))
    assert extent == pickle.loads(pickle.dumps(extent))
    assert len(pickle.dumps(extent)) < 150
    for name in ("labels", "sizes", "nelements", "anything"):
        with pytest.raises(AttributeError):
            setattr(extent, name, ())


def test_concat() -> None:
    """The extent of processes is that of the hosts followed by what each host has; a shared name is refused."""
    assert Extent.of(hosts=2, gpus=8) == Extent.of(hosts=2).concat(Extent.of(gpus=8))
    assert Extent.of(gpus=8) == Extent().concat(Extent.of(gpus=8))
    with pytest.raises(ValueError, match="'gpus' occurs twice"):
        Extent.of(gpus=2).concat(Extent.of(gpus=8))


@pytest.mark.parametrize(
    ("labels", "sizes", "error", "message"),
    [
        (["gpus"], [0], ValueError, "at least 1, not 0"),
        (["gpus"], [-1], ValueError, "at least 1, not -1"),
        (["gpus"], [2.0], TypeError, "float"),
        (["gpus", "gpus"], [1, 2], ValueError, "'gpus' occurs twice"),
        (["my gpus"], [1], ValueError, "keyword argument, got 'my gpus'"),
        ([""], [1], ValueError, "keyword argument, got ''"),
        (["for"], [1], ValueError, "keyword argument, got 'for'"),
        ([1], [1], TypeError, "must be a string, got 1"),
        (["gpus"], [1, 2], ValueError, "one size per name"),
    ],
)
def test_bad_extents(labels: Iterable[str], sizes: Iterable[int], error: type[Exception], message: str) -> None:
    """What can't name or size a dimension is refused, saying what was given."""
    with pytest.raises(error, match=message):
        Extent(labels, sizes)


SHAPE = Shape.of(hosts=2, gpus=8)


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda: SHAPE.slice(racks=0), TypeError, "unknown dimension 'racks'; there are 'hosts', 'gpus'"),
        (lambda: Shape(Extent()).slice(gpus=0), TypeError, "unknown dimension 'gpus'; there are none"),
        (lambda: SHAPE.slice(gpus=8), IndexError, "gpus=8 is outside dimension 'gpus' of size 8"),
        (lambda: SHAPE.slice(gpus=-9), IndexError, "gpus=-9 is outside"),
        (lambda: SHAPE.slice(gpus=range(4, 9)), IndexError, r"range\(4, 9\) reaches outside dimension 'gpus' of size 8"),
        (lambda: SHAPE.slice(gpus=range(-2, 2)), IndexError, "reaches outside"),
        (lambda: SHAPE.slice(gpus=slice(3, 3)), ValueError, "selects nothing of dimension 'gpus'"),
        (lambda: SHAPE.slice(gpus=slice(8, 9)), ValueError, "selects nothing of dimension 'gpus' of size 8"),
        (lambda: SHAPE.slice(gpus=range(0)), ValueError, "selects nothing"),
        (lambda: SHAPE.slice(gpus=slice(0, 8, 0)), ValueError, "zero"),
        (lambda: SHAPE.slice(gpus=[0, 1]), TypeError, "an int, a slice or a range"),  # type: ignore[arg-type]
        (lambda: SHAPE.split(racks=("a", "b"), a=1), TypeError, "unknown dimension 'racks'"),
        (lambda: SHAPE.split(gpus=("dp", "tp"), tp=3), ValueError, "'gpus' has size 8, which is not divisible by tp=3$"),
        (lambda: SHAPE.split(gpus=("a", "b", "c"), a=2, b=3), ValueError, r"not divisible by a=2 \* b=3 = 6"),
        (lambda: SHAPE.split(gpus=("dp", "tp"), dp=2, tp=2), ValueError, r"not equal to dp=2 \* tp=2 = 4"),
        (lambda: SHAPE.split(gpus=("a", "b", "c"), a=2), ValueError, "all but one of b, c"),
        (lambda: SHAPE.split(gpus=("dp", "tp"), tp=0), ValueError, "at least 1, got tp=0"),
        (lambda: SHAPE.split(gpus=("dp", "tp"), pp=2), ValueError, "sizes given for pp"),
        (lambda: SHAPE.split(gpus=("hosts", "tp"), tp=2), ValueError, "'hosts' occurs twice"),
        (lambda: SHAPE.split(gpus="dp"), TypeError, r"rename\(gpus='dp'\)"),
        (lambda: SHAPE.split(gpus=()), ValueError, "at least one part"),
        (lambda: SHAPE.split(gpus=("dp", "tp"), tp=2.0), TypeError, "an int for the size"),  # type: ignore[arg-type]
        (lambda: SHAPE.slice(gpus=0).flatten("x"), ValueError, "not consecutive. Flatten the whole mesh before slicing"),
        (lambda: SHAPE.slice(gpus=slice(None, None, -1)).flatten("x"), ValueError, "not consecutive"),
        (lambda: SHAPE.flatten("not a name"), ValueError, "keyword argument"),
        (lambda: SHAPE.rename(racks="x"), TypeError, "unknown dimension 'racks'"),
        (lambda: SHAPE.rename(gpus="hosts"), ValueError, "'hosts' occurs twice"),
        (lambda: SHAPE.at(hosts=0), TypeError, "no coordinate given for dimension 'gpus'"),
        (lambda: SHAPE.at(hosts=0, gpus=0, racks=0), TypeError, "unknown dimension 'racks'"),
        (lambda: SHAPE.at(hosts=2, gpus=0), IndexError, "hosts=2 is outside"),
        (lambda: SHAPE.slice(hosts=1).index(7), ValueError, "base rank 7 is not in"),
        (lambda: SHAPE.coordinates(16), ValueError, "base rank 16 is not in"),
        (lambda: Shape(Extent.of(a=2, b=8), (4, 1)), ValueError, "address a base rank twice"),
        (lambda: Shape(Extent.of(a=2), (0,)), ValueError, "address a base rank twice"),
        (lambda: Shape(Extent.of(a=3), (-1,), 1), ValueError, "address base rank -1"),
        (lambda: Shape(Extent.of(a=3), (1,), -1), ValueError, "address base rank -1"),
        (lambda: Shape(Extent.of(a=3), ()), ValueError, "one stride per dimension"),
    ],
)
def test_what_can_not_be(act: Callable[[], object], error: type[Exception], message: str) -> None:
    """Each mistake raises the documented type, with the names and figures that are needed to mend it."""
    with pytest.raises(error, match=message):
        act()


def test_int_drops_and_range_keeps() -> None:
    """A slice by int loses the dimension; one by a range of a single element keeps it."""
    assert {"gpus": 8} == SHAPE.slice(hosts=1).sizes
    assert {"hosts": 1, "gpus": 8} == SHAPE.slice(hosts=range(1, 2)).sizes
    assert SHAPE.slice(hosts=1).ranks() == SHAPE.slice(hosts=slice(-1, None)).ranks() == tuple(range(8, 16))
    assert {"gpus": 8} == SHAPE.slice(hosts=1, gpus=slice(0, 100)).sizes


def test_no_dimensions_is_one_element() -> None:
    """A host by itself has no dimensions and one member, which can be flattened and split like any other."""
    shape = Shape(Extent())
    assert (1, (0,), {}, True) == (len(shape), shape.ranks(), shape.sizes, shape.is_dense)
    assert 0 == shape.at() == shape.index(0) == shape.base_rank(0)
    assert {"hosts": 1} == shape.flatten("hosts").sizes
    assert "{}" == repr(shape.point(0))


def test_size() -> None:
    """Sizes along one dimension, several, or all."""
    assert (16, 8, 16, 2, 1) == (SHAPE.size(), SHAPE.size("gpus"), SHAPE.size(["hosts", "gpus"]), SHAPE.size(("hosts",)), SHAPE.size(()))


def test_split_may_reuse_the_name_and_make_many_parts() -> None:
    """Monarch's example: several dimensions at once, one size each worked out, old names free again."""
    shape = Shape.of(host=32, gpu=8).split(host=("dp", "pp"), gpu=("gpu", "cp"), pp=16, cp=2)
    assert [("dp", 2), ("pp", 16), ("gpu", 4), ("cp", 2)] == list(shape.sizes.items())
    assert shape == Shape.of(dp=2, pp=16, gpu=4, cp=2)


def test_names_of_parameters_are_free_for_dimensions() -> None:
    """Dimensions called like a method's own parameters work as keywords."""
    shape = Shape.of(self=2, shape=3, dims=4)
    assert (20, 21, 22, 23) == shape.slice(self=1, shape=2).ranks()
    assert 23 == shape.at(self=1, shape=2, dims=3)
    assert {"self": 2, "name": 3, "dims": 4} == shape.rename(shape="name").sizes


def test_equal_shapes_compare_equal() -> None:
    """The same members under the same names are the same shape, whichever way it was reached."""
    assert SHAPE.slice(gpus=slice(0, 8, 8)) == SHAPE.slice(gpus=slice(0, 1)) == SHAPE.slice(gpus=slice(0, None, 50))
    assert hash(SHAPE.slice(gpus=slice(0, 8, 8))) == hash(SHAPE.slice(gpus=slice(0, 1)))
    assert SHAPE.slice(hosts=0) == Shape.of(gpus=8)
    assert SHAPE.slice(hosts=1) != Shape.of(gpus=8)
    assert SHAPE != SHAPE.extent


def test_shape_repr_shows_what_is_unusual() -> None:
    """Strides and offset appear only where they are not those of a whole mesh."""
    assert "Shape({'hosts': 2, 'gpus': 8})" == repr(SHAPE)
    assert "Shape({'gpus': 8}, offset=8)" == repr(SHAPE.slice(hosts=1))
    assert "Shape({'hosts': 2}, strides=(8,), offset=3)" == repr(SHAPE.slice(gpus=3))


def test_operations_do_not_count_out_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 100,000 ranks no operation makes a point or a list of ranks; `ranks()` makes no point, and its list only once."""
    made: list[int] = []
    initialise = Point.__init__

    def counting(self: Point, rank: int, extent: Extent) -> None:
        made.append(rank)
        initialise(self, rank, extent)

    monkeypatch.setattr(Point, "__init__", counting)
    shape = Shape.of(hosts=12_500, gpus=8)
    part = shape.split(gpus=("dp", "tp"), tp=4).rename(dp="pp").slice(pp=1, hosts=slice(None, None, 5))
    assert (10_000, 99_967, 9_999) == (len(part), part.base_rank(9_999), part.index(99_967))
    assert 99_967 in part
    assert (None, None) == (part._ranks, shape._ranks)
    assert part.ranks() is part.ranks()
    assert [] == made
    assert 0 == next(iter(shape.points())).rank
    assert [0] == made
    assert len(pickle.dumps(part)) < 300


class Named(MeshOps):
    """The least that has a geometry: a shape in a slot, and a name."""

    __slots__ = ("_shape", "name")

    _shape: Shape

    def __init__(self, name: str, shape: Shape) -> None:
        self.name = name
        self._shape = shape

    def _with_shape(self, shape: Shape, /) -> Self:
        return type(self)(self.name, shape)


def test_mesh_ops_keep_the_subclass() -> None:
    """Whatever has a shape gets the operations, and each returns its own type with what else it holds."""
    mesh = Named("trainers", SHAPE)
    for made in (mesh.slice(gpus=0), mesh.split(gpus=("dp", "tp"), tp=2), mesh.flatten("ranks"), mesh.rename(gpus="ranks")):
        assert (Named, "trainers") == (type(made), made.name)
    assert (2, {"hosts": 2}, Extent.of(hosts=2)) == (len(mesh.slice(gpus=0)), mesh.slice(gpus=0).sizes, mesh.slice(gpus=0).extent)
