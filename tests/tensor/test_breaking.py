"""What is broken off: works that never end by themselves are given up, each is told of once, and no later epoch is touched."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore
from torch.distributed import ReduceOp

from monarch_async.tensor import breaking
from monarch_async.tensor.backend import GlooBackend
from monarch_async.tensor.breaking import UnderWay
from monarch_async.tensor.running import Told
from tests.tensor.members import Member


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


def together(*functions: Callable[[], None]) -> None:
    """Each in a thread of its own, to the end."""
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)


def meet(backends: list[GlooBackend]) -> None:
    """Connect an epoch whose members are in one process."""
    store = HashStore()
    together(*(lambda me=me, backend=backend: backend.connect(store, me, 2, 5.0) for me, backend in enumerate(backends)))


def sums(backends: list[GlooBackend]) -> list[Any]:
    """What each member has of a sum of 1 and 2, or why it failed."""
    outcomes: list[Any] = [None, None]

    def add(me: int) -> None:
        tensor, event = torch.tensor([me + 1.0]), threading.Event()

        def told(error: BaseException | None) -> None:
            outcomes[me] = str(error) if error is not None else tensor.item()
            event.set()

        backends[me].all_reduce(tensor, ReduceOp.SUM).when_done(told)
        event.wait(10)

    together(lambda: add(0), lambda: add(1))
    return outcomes


def closes_late(member: Member, late: int) -> list[Any]:
    """One member lets go of the first epoch only when the second is connected, in which the other one has the same device again."""
    first = [GlooBackend("127.0.0.1") for _ in range(2)]
    meet(first)
    outcomes = sums(first)
    first[late].abort()
    first[1 - late].close()
    used_again = GlooBackend("127.0.0.1")
    assert used_again._mine == first[1 - late]._mine
    second = [GlooBackend("127.0.0.1")]
    second.insert(1 - late, used_again)
    meet(second)
    first[late].close()
    outcomes += sums(second)
    for backend in second:
        backend.close()
    return outcomes


@pytest.mark.parametrize("late", [0, 1])
async def test_an_epoch_that_is_let_go_of_late_breaks_none_that_follows(spawn: Callable[..., Any], late: int) -> None:
    """Connections of a later epoch lead to a device that one of before led to: they are not that one's to break, whoever has dialed."""
    _, members = spawn({"gpus": 1})
    assert [3.0] * 4 == await members.run.call_one(closes_late, late)
