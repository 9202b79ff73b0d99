"""Calls to many members on another host: the body crosses the network once, and everything else is as on direct links."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np

import monarch_async
from monarch_async import Actor, ActorDied, endpoint
from tests.hosts.two_hosts import HEARTBEAT, LEASE, Net, on_two_hosts

MANY = 5


class Member(Actor):
    """Does what the tests want."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    @endpoint
    async def take(self, number: int, filler: Any = None) -> int:
        self.seen.append(number)
        return number

    @endpoint
    async def total(self, array: Any) -> float:
        return float(array.sum())

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def ask(self, mesh: Any, numbers: int) -> list[int]:
        """Call others, and have the last one answer directly."""
        for number in range(numbers):
            mesh.take.broadcast(number)
        return [*(await mesh.take.call(numbers)).values(), await mesh.slice(gpus=0).take.call_one(numbers + 1)]

    @endpoint
    async def all(self) -> list[int]:
        return self.seen

    @endpoint
    async def sleep(self) -> None:
        await asyncio.sleep(60)


def bytes_sent() -> int:
    """What has left this host."""
    return int(Path("/sys/class/net/eth/statistics/tx_bytes").read_text())


@on_two_hosts
async def test_the_body_crosses_once(net: Net) -> None:
    """An array for all members of a host crosses the network once; past the fan-out only, else once for each."""
    mesh: Any = net.attach(fan_out=4).spawn_procs({"gpus": MANY}).spawn("member", Member)
    await mesh
    array = np.ones(1_000_000)
    before = bytes_sent()
    assert [1e6] * MANY == list((await mesh.total.call(array)).values())
    through_tree = bytes_sent() - before
    assert 8_000_000 <= through_tree < 9_500_000, through_tree
    few = mesh.slice(gpus=slice(0, 4))
    before = bytes_sent()
    assert [1e6] * 4 == list((await few.total.call(array)).values())
    directly = bytes_sent() - before
    assert directly >= 4 * 8_000_000, directly


@on_two_hosts
async def test_order_while_the_wire_is_cut(net: Net) -> None:
    """Messages through the tree and direct ones arrive in order, though packets are lost for a while in between."""
    mesh: Any = net.attach(fan_out=2).spawn_procs({"gpus": MANY}).spawn("member", Member)
    await mesh
    waiting: list[Any] = []
    for number in range(120):
        if number % 2:
            waiting.append(mesh.take.call(number, b"x" * 1000))
        else:
            waiting += [mesh.slice(gpus=rank).take.call_one(number) for rank in range(MANY)]
        if number == 40:
            net.drop()
            await asyncio.sleep(3 * HEARTBEAT)
        if number == 80:
            net.pass_on()
            await asyncio.sleep(HEARTBEAT / 4)
    await asyncio.gather(*waiting)
    assert [[*range(120)]] * MANY == list((await mesh.all.call()).values())


@on_two_hosts
async def test_a_member_is_killed(net: Net) -> None:
    """The others go on; the killed one's error says by which signal."""
    mesh: Any = net.attach(fan_out=2).spawn_procs({"gpus": MANY}).spawn("member", Member)
    monarch_async.unhandled_fault_hook = lambda failure: None
    pids = list((await mesh.pid.call()).values())
    future = mesh.slice(gpus=slice(1, 5)).sleep.options(return_exceptions=True).call()
    await mesh.slice(gpus=0).take.call_one(1)
    for pid in pids[1:]:
        os.kill(pid, signal.SIGKILL)
    answers = list((await future).values())
    assert [(ActorDied, 9)] * 4 == [(type(answer), answer.signal) for answer in answers]
    assert 2 == await mesh.slice(gpus=0).take.call_one(2)


@on_two_hosts
async def test_the_host_is_lost(net: Net) -> None:
    """Every call under way through the tree fails within the lease when the host is out of reach."""
    mesh: Any = net.attach(fan_out=2).spawn_procs({"gpus": MANY}).spawn("member", Member)
    monarch_async.unhandled_fault_hook = lambda failure: None
    await mesh.take.call(1)
    future = mesh.sleep.options(return_exceptions=True).call()
    net.drop()
    async with asyncio.timeout(2 * LEASE + 1):
        answers = list((await future).values())
    assert [ActorDied] * MANY == [type(answer) for answer in answers]
    net.pass_on()


@on_two_hosts
async def test_from_the_other_host(net: Net) -> None:
    """An actor on the worker's host reaches the members on the client's, which were there before any network was, through their agent."""
    monarch_async.configure(fan_out=2)
    here: Any = monarch_async.this_host().spawn_procs({"gpus": MANY}).spawn("here", Member)
    await here
    there: Any = net.attach(fan_out=2).spawn_procs().spawn("there", Member)
    assert [20] * MANY + [21] == await there.slice(hosts=0).ask.call_one(here, 20)
    seen = list((await here.all.call()).values())
    assert [[*range(22)], *[[*range(21)]] * (MANY - 1)] == seen
