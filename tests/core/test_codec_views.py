"""Memoryviews travel as what they are a view of would, uncopied where that is large."""

from __future__ import annotations

import array
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from monarch_async._core import codec


def view_of(array: Any) -> memoryview:
    return memoryview(array)


def round_trip(value: Any) -> Any:
    body, buffers = codec.dumps(value)
    return codec.loads(body, [bytearray(view) for view in buffers])


VIEWS: dict[str, Callable[[], Any]] = {
    "bytearray": lambda: memoryview(bytearray(range(100))),
    "bytes": lambda: memoryview(bytes(range(100))),
    "large": lambda: memoryview(bytearray(100_000)),
    "large, read-only": lambda: memoryview(bytes(100_000)),
    "slice": lambda: memoryview(bytearray(range(100)))[10:20],
    "stepped": lambda: memoryview(bytearray(range(100)))[::3],
    "backwards": lambda: memoryview(bytearray(range(100)))[::-1],
    "floats": lambda: memoryview(array.array("d", [1.0, 2.0])),
    "matrix": lambda: view_of(np.arange(24.0).reshape(4, 6)),
    "Fortran's order": lambda: view_of(np.asfortranarray(np.arange(24).reshape(4, 6))),
    "transposed, large": lambda: view_of(np.arange(40_000).reshape(200, 200).T),
    "no dimensions": lambda: view_of(np.array(3.5)),
    "empty": lambda: memoryview(b""),
    "empty floats": lambda: memoryview(array.array("d")),
    "characters": lambda: memoryview(b"abc").cast("c"),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_a_view_arrives(kind: str) -> None:
    """With format, shape and items, and writable if it was, alone or among others, and after a copy within the process."""
    view = VIEWS[kind]()
    for arrived in (round_trip(view), round_trip([view, "x"])[0], codec.copy_value(view), codec.loads(codec.dumps_whole(view))):
        assert type(arrived) is memoryview
        assert (view.format, view.shape, view.readonly, view.tolist()) == (
            arrived.format,
            arrived.shape,
            arrived.readonly,
            arrived.tolist(),
        )


def test_a_large_one_is_not_copied_at_the_sender() -> None:
    """What is sent is the memory that it is a view of."""
    memory = bytearray(100_000)
    body, buffers = codec.dumps(memoryview(memory))
    assert len(body) < 200
    memory[7] = 1
    assert 1 == buffers[0][7]


@pytest.mark.parametrize("view", [view_of(np.zeros(3, "i4,f8")), view_of(np.zeros((0, 3)))], ids=["structured", "empty matrix"])
def test_what_cannot_be_made_again_is_refused(view: memoryview) -> None:
    """With its place in the value, and what to do."""
    with pytest.raises(TypeError, match=r"can't send value\['x'\] \(builtins.memoryview\): .*(cast it to 'B'|send a flat one)"):
        codec.dumps({"x": view})


def test_without_any_reducer_the_first_view_brings_its_own() -> None:
    """In a process that has sent none before, and has no torch; other pickles stay as they were."""
    program = """
import pickle
from monarch_async._core import codec
assert not codec._reducers
print(codec.copy_value([memoryview(b"abc"), lambda: 5])[0].tobytes())
try:
    pickle.dumps(memoryview(b""))
except TypeError as error:
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert ("b'abc'\nrefused\n", "") == (done.stdout, done.stderr)
