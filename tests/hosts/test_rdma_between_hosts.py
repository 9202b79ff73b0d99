"""One-sided copies between hosts: by messages over TCP, with others passing them."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest

from monarch_async import BufferGone, RDMAAction, RDMABuffer, RDMAError, attach_to_workers, shutdown, this_host
from tests.api.owners import Owner, halves, pattern
from tests.api.waiting import until
from tests.hosts.workers import make_key, worker

SIZE = (20 << 20) + 77


async def test_between_hosts(tmp_path: Path) -> None:
    """Both ways, from the program and from a process of the other host; what only works within a host is refused by name."""
    key = make_key(tmp_path)
    with worker("--key-file", key) as (one, _), worker("--key-file", key) as (two, _):
        hosts = attach_to_workers([one, two], key=key)
        procs = hosts.spawn_procs(preload=("torch",))
        first, second = procs.slice(hosts=0).spawn("first", Owner), procs.slice(hosts=1).spawn("second", Owner)
        here = this_host().spawn_procs().spawn("here", Owner)
        buffer, near = await first.make.call_one(pattern(SIZE)), await here.make.call_one(pattern(5000))
        assert ["tcp", "cma"] == [buffer.backend, near.backend]
        target, other = bytearray(SIZE), bytearray(5000)
        await RDMAAction().read_into(buffer, target).read_into(near, other).submit()
        assert pattern(SIZE) == target
        assert pattern(5000) == other
        await buffer.write_from(target[::-1])
        assert pattern(SIZE)[::-1] == await second.read.call_one(buffer)
        mine = RDMABuffer(bytearray(b"of the program"))
        assert b"of the program" == await second.read_in_thread.call_one(mine)
        for backend in ("cma", "segment", "local"):
            with pytest.raises(RDMAError, match=f"by {backend} failed: .* is (on )?another"):
                await (await first.make.call_one(b"far", backend)).read_into(bytearray(3))
        await buffer.drop()
        with pytest.raises(BufferGone, match="by tcp failed: it was dropped"):
            await buffer.read_into(target)
        await mine.drop()
        await near.drop()
        assert {} == halves()[1]._leases._leases
        await shutdown()


async def test_calls_pass_and_it_is_cancelled(tmp_path: Path) -> None:
    """While minutes' worth of bytes are read from another host twenty calls to it are answered; then it is cancelled, and rests."""
    key = make_key(tmp_path)
    with worker("--key-file", key) as (url, _):
        owner = attach_to_workers([url], key=key).spawn_procs().slice(hosts=0).spawn("owner", Owner)
        for write in (False, True):
            buffer = await owner.make_zeros.call_one(32 << 20)
            target = bytearray(b"x") * (32 << 20)
            action = RDMAAction()
            for _ in range(1000):
                if write:
                    action.write_from(buffer, target)
                else:
                    action.read_into(buffer, target)
            copying = action.submit()
            if not write:
                await until(partial(_is_zero, target))
            for _ in range(20):
                await owner.rank.call_one()
            assert not copying.done()
            copying.cancel()
            with pytest.raises(asyncio.CancelledError):
                await copying
            target[:] = b"y" * len(target)
            await owner.rank.call_one()
            assert target.count(b"y") == len(target)
        await shutdown()


def _is_zero(target: bytearray) -> bool:
    return not target[0]
