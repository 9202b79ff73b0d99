"""Memory that nothing uses goes back to the system, whatever it was taken for, without holding up the loop; and others are told."""

from __future__ import annotations

import asyncio
import gc

import numpy as np
import pytest

from monarch_async import ProcMesh, shared_buffer
from monarch_async._channel.blocks import SLICE
from monarch_async._channel.segment import SUPPORTED
from monarch_async._core.codec import Buffers
from monarch_async._runtime.lending import Lending
from monarch_async.testing.plugin import MonarchProcs
from tests.api.lending_actors import Holder, lending_here, loans_here, mapped_segments
from tests.api.waiting import until

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="needs memfd")
MIB = 1 << 20


@pytest.fixture
def ages_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not used for a twentieth of a second goes back."""
    monkeypatch.setattr("monarch_async._runtime.lending.AGE", 0.05)


async def test_what_was_put_there_and_never_lent(monarch_procs: MonarchProcs, ages_soon: None) -> None:
    """As the arguments of a call that may be sent again, or comes from a thread, to an actor whose process has ended."""
    holder = monarch_procs(1).spawn("holder", Holder)
    await holder.echo.call_one(None)
    lending = lending_here()
    assert not lending.pool.allocated
    buffers = Buffers([memoryview(bytearray(5 * MIB))])
    assert await asyncio.to_thread(lending.place, b"", buffers)
    assert 5 * MIB == lending.pool.allocated
    del buffers
    await until(lambda: not lending.pool.allocated)
    assert 0 == mapped_segments()


async def test_others_run_while_it_goes_back(monarch_procs: MonarchProcs, ages_soon: None) -> None:
    """A few megabytes at a time."""
    pool = (await _lending_used(monarch_procs)).pool
    buffer = shared_buffer(5 * SLICE)
    del buffer
    seen = {pool.allocated}
    while pool.allocated:
        seen.add(pool.allocated)
        await asyncio.sleep(0)
    assert {SLICE, 2 * SLICE, 3 * SLICE, 4 * SLICE, 5 * SLICE} == seen


async def _lending_used(monarch_procs: MonarchProcs) -> Lending:
    await monarch_procs(1).spawn("holder", Holder).echo.call_one(None)
    return lending_here()


async def test_who_was_reached_through_the_tree_last_is_told_too(six: ProcMesh, ages_soon: None) -> None:
    """That a segment is gone; or it would have it mapped until this process ends."""
    holders = six.spawn("holders", Holder)
    await holders.echo.call(None)
    first = holders.slice(gpus=0)
    await first.echo.call_one(None)
    await first.keep.call_one(np.ones(5 * MIB, "u1"))
    await first.drop.call_one()
    assert 2 == (await first.numbers.call_one())[3]
    await until(lambda: not loans_here())
    await holders.collect.call()
    gc.collect()
    await until(lambda: not lending_here().pool.allocated)
    async with asyncio.timeout(5):
        while any(numbers[3] for _, numbers in (await holders.numbers.call()).items()):
            pass
