"""How old requests are is known from which number came next, and when."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator

import pytest

from monarch_async import Actor, this_host
from monarch_async._runtime import ages as ages_module
from monarch_async._runtime.ages import KEPT, Ages, Looks
from monarch_async.ambient import current_runtime
from tests.api.waiting import until


def test_a_request_is_as_old_as_the_first_look_after_it() -> None:
    """So an age is never too high; one since which nobody has looked has none yet."""
    requests = itertools.count(1)
    ages = Ages(requests)
    ages.look(10.0)
    first = next(requests)
    assert 0.0 == ages.age(first, 10.4)
    ages.look(10.5)
    second = next(requests)
    ages.look(11.0)
    ages.look(11.5)
    assert [9.5, 9.0] == [ages.age(number, 20.0) for number in (first, second)]
    assert 3 == next(requests)


def test_looks_become_sparser_with_their_age() -> None:
    """Few are kept, the order stays, and of an old request the age is known to within some percent."""
    requests = itertools.count(1)
    ages = Ages(requests)
    made = {}
    for second in range(20 * KEPT):
        made[next(requests)] = float(second)
        ages.look(float(second))
    assert len(ages._times) <= KEPT
    assert sorted(ages._numbers) == ages._numbers
    now = 20.0 * KEPT
    for number, when in list(made.items())[:: KEPT // 7]:
        assert 0.85 * (now - when) <= ages.age(number, now) <= now - when


class Requests:
    """Of a runtime that does nothing else."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.requests: Iterator[int] = itertools.count(1)


async def test_nothing_wakes_up_while_no_request_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the next one does, whose age is then known from that moment on; numbers go on as if nothing were."""
    monkeypatch.setattr(ages_module, "LOOK", 0.01)
    runtime = Requests()
    numbers = runtime.requests
    ages = Ages(numbers)
    looks = Looks(runtime, ages)
    looks.start()
    assert 1 == next(runtime.requests)
    await until(lambda: runtime.requests is not numbers and looks._timer is None)
    start = time.monotonic()
    assert 2 == next(runtime.requests)
    assert runtime.requests is numbers
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert 1000 - (time.monotonic() - start) <= ages.age(2, start + 1000) <= 1000
    assert 3 == next(runtime.requests)
    await until(lambda: runtime.requests is not numbers)
    assert 4 == await asyncio.to_thread(next, runtime.requests)
    assert 5 == next(runtime.requests)
    looks.close()
    await asyncio.sleep(0)
    assert runtime.requests is numbers
    assert looks._timer is None or looks._timer.cancelled()


async def test_an_idle_client_sleeps() -> None:
    """Its loop is not woken by anything for longer than looks are apart."""
    await this_host().spawn_procs().spawn("plain", Actor)
    runtime = current_runtime()
    await until(lambda: not isinstance(runtime.requests, itertools.count))
    scheduled: list[float] = []
    later = runtime.loop.call_later
    with pytest.MonkeyPatch.context() as patch:
        looks = runtime.parts["client"]._looks
        patch.setattr(looks, "_look", lambda: scheduled.append(later(0.0, int).when()))
        await asyncio.sleep(1.2)
    assert [] == scheduled
