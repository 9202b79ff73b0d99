"""What large values cost, however many get them: one pickle, one copy, and for each segment one mapping. And when too many come at once."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from monarch_async import endpoint
from monarch_async._channel.segment import SUPPORTED
from monarch_async._core.address import address_of
from monarch_async.testing.plugin import MonarchProcs
from tests.api.lending_actors import Holder, lending_here, loans_here
from tests.api.waiting import until

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="needs memfd")
MIB = 1 << 20
OWN_SEGMENT = 4 * MIB + 4096
"""More than is cut from a segment with others."""


class Counted:
    """Knows how often it was pickled in this process."""

    pickled = 0

    def __init__(self, data: Any) -> None:
        self.data = data

    def __reduce__(self) -> tuple[Any, ...]:
        Counted.pickled += 1
        return Counted, (self.data,)


class Where(Holder):
    @endpoint
    async def address(self, value: memoryview) -> int:
        """Where what comes is in this process."""
        return address_of(value)

    @endpoint
    async def pid(self) -> int:
        return os.getpid()


@pytest.mark.parametrize("thread", [False, True], ids=["loop", "thread"])
async def test_a_cast_to_all_is_pickled_once_and_copied_once(monarch_procs: MonarchProcs, thread: bool) -> None:
    """By call, by broadcast, and by a call that may be sent again; from the loop and from a thread."""
    holders = monarch_procs(3).spawn("holders", Holder)
    await holders.echo.call(None)
    value = Counted(np.ones(5 * MIB, "u1"))

    def send(adverb: Any) -> Any:
        return adverb(value)

    for adverb in (holders.keep.call, holders.keep.broadcast, holders.keep.options(retry=1).call):
        Counted.pickled = 0
        await (await asyncio.to_thread(send, adverb) if thread else send(adverb))
        await holders.echo.call(None)
        assert 1 == Counted.pickled
        assert 5 * MIB == lending_here().pool.allocated
        assert 3 == loans_here()
        await holders.drop.call()
        await until(lambda: not loans_here())


async def test_a_segment_is_mapped_once(monarch_procs: MonarchProcs) -> None:
    """However often it carries something to the same process: it stays where it is there."""
    where = monarch_procs(1).spawn("where", Where)
    await where.echo.call_one(None)
    addresses = set()
    for byte in range(20):
        addresses.add(await where.address.call_one(memoryview(bytearray([byte]) * OWN_SEGMENT)))
        await until(lambda: not loans_here())
    assert 1 == len(addresses)
    assert 2 == (await where.numbers.call_one())[3]


async def test_more_new_segments_than_an_inbox_takes(monarch_procs: MonarchProcs, caplog: pytest.LogCaptureFixture) -> None:
    """The rest takes the socket, in order and without a warning, since no memory is short; the next ones are lent again."""
    where = monarch_procs(1).spawn("where", Where)
    pid = await where.pid.call_one()
    room = int(Path("/proc/sys/net/unix/max_dgram_qlen").read_text())
    if room > 30:
        pytest.skip(f"an inbox takes {room} descriptors here: to fill one takes too much memory")
    os.kill(pid, signal.SIGSTOP)
    try:
        calls = [where.keep.call_one(memoryview(bytearray([number]) * OWN_SEGMENT)) for number in range(room + 4)]
        assert 0 < loans_here() < len(calls)
    finally:
        os.kill(pid, signal.SIGCONT)
    await asyncio.gather(*calls)
    assert [bytes([number]) * 16 for number in range(len(calls))] == await where.content.call_one()
    await where.drop.call_one()
    await until(lambda: not loans_here())
    await where.keep.call_one(memoryview(bytearray(b"x") * OWN_SEGMENT))
    assert 1 == loans_here()
    assert [] == caplog.records
