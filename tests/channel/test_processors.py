"""Threads that let others have the processor, and that have processors of their own."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from monarch_async._channel.processors import give_way, keep_apart


def in_thread(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(work).result()


def kept(index: int, count: int, least: int = 1) -> set[int]:
    keep_apart(index, count, least)
    return os.sched_getaffinity(0)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_has_its_own(count: int) -> None:
    """All processors are shared out, none twice, as long as there are enough; the rest of the process has all of them still."""
    before = os.sched_getaffinity(0)
    shares = [in_thread(partial(kept, index, count)) for index in range(count)]
    if len(before) < count:
        assert [before] * count == shares
    else:
        assert before == set().union(*shares)
        assert len(before) == sum(map(len, shares))
    assert before == os.sched_getaffinity(0)


def test_as_many_as_are_needed() -> None:
    """Where there are fewer for each than it needs, each has all, also who had its own before."""
    everything = os.sched_getaffinity(0)
    assert everything == in_thread(lambda: (kept(0, 2), kept(0, 2, len(everything)))[1])


def test_within_those_of_the_process() -> None:
    """Who was given a part of the machine stays in it."""
    everything = os.sched_getaffinity(0)
    some = {min(everything)}
    os.sched_setaffinity(0, some)
    try:
        assert some == in_thread(lambda: kept(1, 2))
    finally:
        os.sched_setaffinity(0, everything)


def test_who_gives_way_lets_python_go_on() -> None:
    """Python's lock is free meanwhile: nobody else would have it here, where it is taken away from nobody."""
    over = False
    turns = 0

    def other() -> None:
        nonlocal turns
        while not over:
            turns += 1
            give_way()

    before = sys.getswitchinterval()
    sys.setswitchinterval(3600.0)
    thread = threading.Thread(target=other)
    thread.start()
    try:
        first = turns
        for _ in range(10_000_000):
            assert 0 == give_way()
            if turns > first + 1:
                break
        assert turns > first + 1
    finally:
        over = True
        thread.join()
        sys.setswitchinterval(before)
