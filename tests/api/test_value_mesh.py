"""Value meshes: values, their places, and what slicing does to both."""

from __future__ import annotations

import pickle
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_async.points import Extent, Point
from monarch_async.shape import Shape
from monarch_async.value_mesh import ValueMesh

EXTENT = Extent.of(hosts=2, gpus=4)


def filled_slices(size: int) -> st.SearchStrategy[slice]:
    """Slices that select something of that many."""
    return st.slices(size).filter(lambda chosen: len(range(*chosen.indices(size))) > 0)


def letters() -> ValueMesh[str]:
    return ValueMesh(EXTENT, "abcdefgh")


def test_reading_values() -> None:
    """Values are found by rank, by coordinates, and in order of rank with their points."""
    mesh = letters()
    assert ("g", "g", "h") == (mesh.get(6), mesh[6], mesh[-1])
    assert ("g", "d") == (mesh.item(hosts=1, gpus=2), mesh.item(hosts=0, gpus=-1))
    assert list("abcdefgh") == list(mesh.values())
    assert [(Point(rank, EXTENT), value) for rank, value in enumerate("abcdefgh")] == list(mesh) == list(mesh.items())
    assert all(value == mesh.item(**point) for point, value in mesh)
    assert (8, EXTENT, {"hosts": 2, "gpus": 4}) == (len(mesh), mesh.extent, mesh.sizes)


def test_item_of_a_single_point() -> None:
    """Where there is one value, `item()` needs no coordinates, with or without dimensions of size 1."""
    assert 7 == ValueMesh(Extent(), [7]).item()
    assert 7 == ValueMesh(Extent.of(hosts=1, gpus=1), [7]).item()
    assert "f" == letters().slice(hosts=1, gpus=range(1, 2)).item()


@pytest.mark.parametrize("rank", [8, -9])
def test_rank_outside(rank: int) -> None:
    """A rank that is not there is an IndexError that names the ranks that are."""
    with pytest.raises(IndexError, match=f"rank {rank} is outside .* ranks are 0 to 7"):
        letters().get(rank)


def test_coordinates_that_name_no_value() -> None:
    """Missing and unknown dimensions are TypeErrors, coordinates outside are IndexErrors."""
    with pytest.raises(TypeError, match="no coordinate given for dimension 'gpus'"):
        letters().item(hosts=0)
    with pytest.raises(TypeError, match="unknown dimension 'racks'"):
        letters().item(hosts=0, gpus=0, racks=0)
    with pytest.raises(IndexError, match="gpus=4 is outside"):
        letters().item(hosts=0, gpus=4)


@pytest.mark.parametrize("count", [0, 7, 9])
def test_wrong_number_of_values(count: int) -> None:
    """One value per point, or a ValueError with both figures."""
    with pytest.raises(ValueError, match=f"has 8 points, but {count} values"):
        ValueMesh(EXTENT, range(count))


@given(st.data())
def test_slices_agree_with_numpy(data: st.DataObject) -> None:
    """Slices of slices and splits of a value mesh hold what indexing an array of the values gives, ranks counted anew."""
    mesh = ValueMesh(Extent.of(a=3, b=4, c=6), range(72))
    model = np.arange(72).reshape(3, 4, 6)
    for _ in range(data.draw(st.integers(1, 3))):
        where = [data.draw(filled_slices(size)) for size in model.shape]
        mesh = mesh.slice(**dict(zip(mesh.sizes, where, strict=True)))
        model = model[tuple(where)]
    assert model.ravel().tolist() == list(mesh.values()) == [mesh.get(rank) for rank in range(len(mesh))]
    assert list(range(model.size)) == [point.rank for point, _ in mesh]
    flat = mesh.flatten("all")
    assert model.ravel().tolist() == [flat.item(all=rank) for rank in range(model.size)]
    rows = mesh.split(b=("outer", "b"), outer=1).slice(outer=0, a=0)
    assert model[0].ravel().tolist() == list(rows.values())


def test_a_shape_gives_its_extent() -> None:
    """Replies of a slice are given with its shape, whose base ranks don't matter any more."""
    shape = Shape.of(hosts=2, gpus=4).slice(gpus=slice(1, None, 2))
    mesh = ValueMesh(shape, "wxyz")
    assert ValueMesh(Extent.of(hosts=2, gpus=2), "wxyz") == mesh
    assert "z" == mesh.get(3) == mesh.item(hosts=1, gpus=1)
    assert ("x", "z") == tuple(mesh.slice(gpus=1).values())


class Payload:
    """Something whose end can be seen."""


def test_a_slice_holds_only_its_own_values() -> None:
    """Values outside a slice are neither kept alive nor pickled with it."""
    payloads = [Payload(), Payload()]
    first, second = map(weakref.ref, payloads)
    part = ValueMesh(Extent.of(gpus=2), payloads).slice(gpus=1)
    payloads.clear()
    assert first() is None
    assert second() is part.item()
    big = ValueMesh(Extent.of(gpus=2), [b"x" * 100_000, b"y"])
    assert len(pickle.dumps(big.slice(gpus=1))) < 300


def test_map() -> None:
    """`map` keeps the extent."""
    assert ValueMesh(EXTENT, "ABCDEFGH") == letters().map(str.upper)


def test_equality_and_pickling() -> None:
    """Meshes are equal by extent and values, survive pickling, and are no keys."""
    mesh = letters()
    assert mesh == letters() == pickle.loads(pickle.dumps(mesh))
    assert mesh != ValueMesh(EXTENT, "abcdefgX")
    assert mesh != mesh.rename(gpus="ranks")
    assert mesh != list("abcdefgh")
    with pytest.raises(TypeError, match="unhashable"):
        hash(mesh)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["ok"] * 8, "0–7: 'ok'"),
        (["ok"] * 7 + ["late"], "0–6: 'ok'; 7: 'late'"),
        ([None, 1, None, None, 1, 2, 2, None], "0,2–3,7: None; 1,4: 1; 5–6: 2"),
        ([True, 1, 1.0, 1, True, 1, 1, 1], "0,4: True; 1,3,5–7: 1; 2: 1.0"),
        ([{"loss": 0.5}] * 4 + [{"loss": 0.25}] * 4, "0–3: {'loss': 0.5}; 4–7: {'loss': 0.25}"),
        ([np.array([1, 2])] * 8, "0–7: array([1, 2])"),
        ([np.array([[1], [2]]) for _ in range(7)] + [0], "; ".join(f"{r}: array([[1], [2]])" for r in range(7)) + "; 7: 0"),
    ],
)
def test_repr_folds_equal_values(values: list[Any], expected: str) -> None:
    """Equal values of one type appear once, with their ranks; arrays, which can't be compared in one word, only if identical."""
    assert f"ValueMesh({{'hosts': 2, 'gpus': 4}}; ranks {expected})" == repr(ValueMesh(EXTENT, values))


def test_repr_does_not_fold_what_only_looks_equal() -> None:
    """Values whose shortened texts coincide, but which differ, stay apart."""
    one, two = "x" * 500 + "1" + "y" * 500, "x" * 500 + "2" + "y" * 500
    assert repr(ValueMesh(Extent.of(gpus=2), [one, two])).startswith("ValueMesh({'gpus': 2}; ranks 0: 'xxx")
    assert "; 1: 'xxx" in repr(ValueMesh(Extent.of(gpus=2), [one, two]))


class Costly:
    """Counts how often it is shown."""

    shown = 0

    def __repr__(self) -> str:
        Costly.shown += 1
        return "Costly"


def test_repr_of_a_big_mesh_is_short() -> None:
    """Ten thousand values make a line, whether all differ, alternate or are huge, and few of them are formatted."""
    extent = Extent.of(hosts=1250, gpus=8)
    differing = repr(ValueMesh(extent, range(10_000)))
    assert differing.endswith("; 6: 6; 7: 7; 8–9999: …)")
    alternating = repr(ValueMesh(extent, [rank % 2 for rank in range(10_000)]))
    assert "ranks 0,2,4," in alternating
    assert ",…: 0; 1,3,5," in alternating
    assert alternating.endswith(",…: 1)")
    huge = repr(ValueMesh(extent, [bytes([rank % 8]) * 100_000 for rank in range(8)] * 1250))
    assert all(len(text) < 1200 for text in (differing, alternating, huge))
    repr(ValueMesh(extent, [Costly() for _ in range(10_000)]))
    assert 8 == Costly.shown
