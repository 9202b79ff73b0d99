"""Supervision of thousands of children: what an event costs, in looks at states of children."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from monarch_async._core.instructions import Exit, Start, Stop
from monarch_async._core.supervision import Supervision
from monarch_async._core.supervision_states import ChildState
from monarch_async.restart import Backoff, Restart, Strategy


class CountingList(list[ChildState]):
    """Counts how often an item is read."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        return super().__getitem__(index)


def counted(size: int, restart: Restart, random: Iterator[float]) -> tuple[Supervision, CountingList]:
    supervision = Supervision(size, restart, random=random.__next__)
    states = CountingList(supervision._states)
    supervision._states = states
    return supervision, states


def spread() -> Iterator[float]:
    """Numbers from 0 up to 1, in an order that mixes them."""
    number = 0
    while True:
        number = (number + 6_180) % 9_973
        yield number / 9_973


@pytest.mark.parametrize("size", [1_000, 10_000])
def test_many_children_fail_one_by_one(size: int) -> None:
    """Each of many children that fail with a delay is started once, and no sibling is looked at."""
    supervision, states = counted(size, Restart(max_restarts=size, backoff=Backoff(1, jitter=0.9)), spread())
    for child in range(size):
        assert [] == supervision.exited(child, 0, Exit.ABNORMAL, 0.0)
    started = []
    while (due := supervision.next_due()) is not None:
        for instruction in supervision.due(due):
            assert isinstance(instruction, Start)
            started += [life.child for life in instruction.lives]
    assert list(range(size)) == sorted(started)
    assert states.reads <= 6 * size
    supervision.validate()


@pytest.mark.parametrize("strategy", ["one_for_all", "rest_for_one"])
@pytest.mark.parametrize("size", [1_000, 10_000])
def test_many_children_fail_at_once(size: int, strategy: Strategy) -> None:
    """The children of a lost host end one after the other, in the worst order: a few looks at each of them, and one start for all."""
    supervision, states = counted(size, Restart(strategy=strategy, max_restarts=size, backoff=1), spread())
    stopped = 0
    for child in reversed(range(size)):
        for instruction in supervision.exited(child, 0, Exit.ABNORMAL, 0.0):
            assert isinstance(instruction, Stop)
            stopped += len(instruction.lives)
    assert (size - 1 if strategy == "one_for_all" else 0) == stopped
    due = supervision.next_due()
    assert due is not None
    (start,) = supervision.due(due)
    assert isinstance(start, Start)
    assert [(child, 1) for child in range(size)] == list(start.lives)
    assert states.reads <= 12 * size
    supervision.validate()
