"""Works that never end by themselves are given up once their connections are broken, and those that end are told of once."""

from __future__ import annotations

import threading

import pytest

from monarch_async.tensor import breaking
from monarch_async.tensor.breaking import UnderWay
from monarch_async.tensor.running import Told


class Begun:
    """A work that ends when the test says so."""

    def __init__(self) -> None:
        self.told: Told

    def when_done(self, told: Told) -> None:
        self.told = told


def follow(under_way: UnderWay) -> tuple[Begun, list[BaseException | None], threading.Event]:
    """A work, what was told of it, and when."""
    work, outcomes, event = Begun(), list[BaseException | None](), threading.Event()

    def told(error: BaseException | None) -> None:
        outcomes.append(error)
        event.set()

    under_way.follow(work).when_done(told)
    return work, outcomes, event


def wait_for_watch() -> None:
    for thread in threading.enumerate():
        if thread.name == "monarch_async breaking gloo off":
            thread.join(10)


def test_a_work_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before its connections are broken, and then with an error; what it says afterwards is not told."""
    monkeypatch.setattr(breaking, "PATIENCE", 0.02)
    under_way = UnderWay()
    ended, done, _ = follow(under_way)
    work, outcomes, event = follow(under_way)
    ended.told(None)
    assert [None] == done
    assert not event.wait(0.1)
    under_way.broken()
    under_way.broken()
    assert event.wait(10)
    wait_for_watch()
    work.told(None)
    ((error,), hung) = outcomes, under_way.hung
    assert isinstance(error, RuntimeError)
    assert hung
    assert [None] == done


def test_works_that_end_are_not_given_up() -> None:
    """Whoever watches leaves when the last one has ended, long before its patience is over."""
    under_way = UnderWay()
    works = [follow(under_way) for _ in range(2)]
    under_way.broken()
    failed = OSError("broken")
    for work, _, _ in works:
        work.told(failed)
    wait_for_watch()
    assert [[failed]] * 2 == [outcomes for _, outcomes, _ in works]
    assert not under_way.hung
    under_way.broken()  # nothing is left to watch
    assert not any(thread.name == "monarch_async breaking gloo off" for thread in threading.enumerate())
