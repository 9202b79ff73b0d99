"""Values as text of bounded length, whatever they hold."""

from __future__ import annotations

import array
import time
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

from monarch_async.observe.inside.showing import ITEMS, shown


class Pair(NamedTuple):
    left: int
    right: str


@dataclass
class Config:
    name: str
    sizes: list[int]


class Loud:
    def __repr__(self) -> str:
        raise KeyError("spoon")


class Wrong(UserList[int]):
    def __len__(self) -> int:
        raise ValueError("none of your business")


class Mine(list[int]):
    """With the `repr` of a list."""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        (True, "True"),
        (None, "None"),
        ("a'b", '"a\'b"'),
        ([1, "x", None], "[1, 'x', None]"),
        ((1,), "(1,)"),
        ({"a": (1, 2)}, "{'a': (1, 2)}"),
        (set(), "set{}"),
        (Pair(1, "r"), "Pair(left=1, right='r')"),
        (Config("c", [1, 2]), "Config(name='c', sizes=[1, 2])"),
        (Mine([1]), "Mine[1]"),
        (deque([1]), "deque[1]"),
        (Counter("aa"), "Counter{'a': 2}"),
        (OrderedDict(a=1), "OrderedDict{'a': 1}"),
        (defaultdict(list, a=[1]), "defaultdict{'a': [1]}"),
        (UserDict(a=1), "UserDict{'a': 1}"),
        (array.array("d", [1.5]), "array[1.5]"),
        ([[[[[[1]]]]]], "[[[[[… 1 items]]]]]"),
        (10**1000, "<int of 3322 bits>"),
        (memoryview(bytes(7)), "<memoryview of 7 bytes>"),
        (np.zeros((3, 4), np.float32), "ndarray(shape=(3, 4), dtype=float32)"),
        ([np.zeros(2)], "[ndarray(shape=(2,), dtype=float64)]"),
        (Loud(), "<Loud, whose repr raised KeyError>"),
        (Wrong(), "<Wrong, which can't be shown: ValueError>"),
    ],
)
def test_what_is_shown(value: Any, text: str) -> None:
    """Containers by their items, arrays by what they are, what raises by that."""
    assert text == shown(value, 500)


def test_tensors() -> None:
    """By shape and type, and the device where it is not the usual one."""
    torch = pytest.importorskip("torch")
    assert "{'w': Tensor(shape=(2, 3), dtype=torch.float16)}" == shown({"w": torch.zeros(2, 3, dtype=torch.float16)}, 500)
    assert "Tensor(shape=(2,), dtype=torch.float32, device=meta)" == shown(torch.zeros(2, device="meta"), 500)


def test_an_endless_nesting() -> None:
    """Ends at some depth."""
    value: list[Any] = [1]
    value.append(value)
    assert "[1, [1, [1, [1, [… 2 items]]]]]" == shown(value, 500)


HUGE: dict[str, Any] = {
    "str": "x" * (64 << 20),
    "bytes": bytes(64 << 20),
    "list": [0] * (8 << 20),
    "subclass": Mine([0] * (8 << 20)),
    "dict": {"k": list(range(1 << 20)), "j": UserList([0] * (8 << 20))},
    "wide": [[list(range(1000))] * 1000] * 1000,
    "dataclass": Config("x" * (64 << 20), [0] * (8 << 20)),
    "object": np.full(1 << 20, None, object),
    "int": 1 << (64 << 20),
}


@pytest.mark.parametrize("name", HUGE)
def test_what_is_huge_is_bounded(name: str) -> None:
    """In length and in the time it takes, which a whole `repr` would exceed by far."""
    start = time.process_time()
    text = shown(HUGE[name], 500)
    assert time.process_time() - start < 0.1
    assert len(text) <= 700


def test_what_is_left_out_is_told() -> None:
    """How many items and characters there are."""
    assert shown(list(range(ITEMS + 1)), 500).endswith(f"19, … {ITEMS + 1} items]")
    assert "'xxxx… (5002 characters)" == shown("x" * 5000, 5)
