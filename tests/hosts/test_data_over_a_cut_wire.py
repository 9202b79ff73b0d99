"""One-sided copies between two network namespaces, when the wire is cut in the middle."""

from __future__ import annotations

import asyncio

from monarch_async import RDMAAction
from monarch_async._runtime.data import _made
from tests.api.owners import Owner, halves, pattern
from tests.api.waiting import until
from tests.hosts.two_hosts import HEARTBEAT, Net, on_two_hosts

SIZE = 20 << 20


@on_two_hosts
async def test_the_wire_is_cut(net: Net) -> None:
    """For longer than a connection survives, without a word: what is read and written arrives whole when the wire is back."""
    owner = net.attach().spawn_procs().spawn("owner", Owner)
    buffer = await owner.make.call_one(pattern(SIZE))
    connections = halves()[1]._data
    target = bytearray(pattern(SIZE))
    await buffer.read_into(target)
    assert connections._dialed
    for write in (False, True):
        action = RDMAAction()
        for _ in range(100):
            if write:
                action.write_from(buffer, target)
            else:
                action.read_into(buffer, target)
        copying = action.submit()
        await until(lambda: any((made := _made(dialing)) is None or made.busy for dialing in connections._dialed.values()))
        net.drop()
        await asyncio.sleep(6 * HEARTBEAT)  # that is how long the wire is cut
        assert not copying.done()
        net.pass_on()
        await copying
        assert pattern(SIZE) == target == await owner.content.call_one(buffer)
    await buffer.drop()
