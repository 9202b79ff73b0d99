"""Actors on another host, and a wire that is cut: two network namespaces."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from monarch_async import Actor, ActorDied, Channel, MeshFailure, Port, endpoint, this_host
from tests.hosts.two_hosts import HEARTBEAT, LEASE, WORKER, Net, on_two_hosts
from tests.hosts.workers import ENVIRONMENT, ROOT
from tests.runtime.agents import wait_gone


class Worker(Actor):
    """Does what the tests want."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def addresses(self) -> str:
        return subprocess.run(["ip", "-4", "-o", "address"], capture_output=True, text=True, check=True).stdout

    @endpoint
    async def double(self, array: Any) -> Any:
        return array * 2

    @endpoint
    async def note(self, number: int) -> None:
        self.seen.append(number)

    @endpoint
    async def noted(self) -> list[int]:
        return self.seen

    @endpoint
    async def pid_of(self, other: Worker) -> int:
        return await other.pid.call_one()

    @endpoint
    async def count(self, port: Port[int], upto: int) -> None:
        for number in range(upto):
            port.send(number)
            await asyncio.sleep(0.001)

    @endpoint
    async def stick(self, seconds: float) -> str:
        """Hold the loop, as C code does that never gives it back."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            re.match(r"(a+)+$", "a" * 20 + "b")
        return "back"

    @endpoint
    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@on_two_hosts
async def test_actors_on_another_host(net: Net) -> None:
    """Processes run on that host; calls, broadcasts, arrays, ports, and actors that call each other across hosts."""
    here = this_host().spawn_procs().spawn("here", Worker)  # before this host is on any network
    hosts = net.attach()
    there = hosts.spawn_procs({"gpus": 2}).spawn("there", Worker)
    await there
    assert {"hosts": 1, "gpus": 2} == dict(there.extent)
    assert WORKER in await there.slice(hosts=0, gpus=0).addresses.call_one()
    big = np.arange(1 << 20, dtype=np.float64)
    for _, doubled in (await there.double.call(big)).items():
        np.testing.assert_array_equal(big * 2, doubled)
    for number in range(100):
        there.note.broadcast(number)
    assert [list(range(100))] * 2 == [seen for _, seen in (await there.noted.call()).items()]
    one = there.slice(hosts=0, gpus=1)
    mine = await one.pid.call_one()
    assert mine == await here.pid_of.call_one(one)
    assert mine == await there.slice(hosts=0, gpus=0).pid_of.call_one(one)
    assert await here.pid.call_one() == await one.pid_of.call_one(here)
    port, receiver = Channel[int].open()
    await one.count.call_one(port, 50)
    assert list(range(50)) == [await receiver.recv() for _ in range(50)]


async def _through_a_cut(net: Net, cut: Any, heal: Any, seconds: float) -> None:
    there = net.attach().spawn_procs().spawn("there", Worker)
    await there
    one = there.slice(hosts=0)
    port, receiver = Channel[int].open()
    counting = one.count.call_one(port, 3000)
    for number in range(200):
        one.note.broadcast(number)
    assert 0 == await receiver.recv()
    cut()
    calls = [one.double.call_one(number) for number in range(100)]
    for number in range(200, 400):
        one.note.broadcast(number)
    await asyncio.sleep(seconds)
    heal()
    assert [2 * number for number in range(100)] == [await call for call in calls]
    assert list(range(400)) == await one.noted.call_one()
    await counting
    assert list(range(1, 3000)) == [await receiver.recv() for _ in range(2999)]


@on_two_hosts
async def test_a_short_loss_of_packets(net: Net) -> None:
    """Shorter than the patience: TCP mends it, and nothing is lost, doubled or reordered."""
    await _through_a_cut(net, net.drop, net.pass_on, HEARTBEAT)


@on_two_hosts
async def test_a_loss_of_packets_mends_with_a_new_connection(net: Net) -> None:
    """Longer than the patience, shorter than the lease: a new connection is made, and nothing is lost, doubled or reordered."""
    await _through_a_cut(net, net.drop, net.pass_on, LEASE - 1.5)


@on_two_hosts
async def test_an_interface_that_goes_down(net: Net) -> None:
    """The same where the other host's interface is taken down and up again."""
    await _through_a_cut(net, net.pull, net.plug, LEASE - 1.5)


@on_two_hosts
async def test_cut_past_the_lease(net: Net) -> None:
    """Pending and later calls fail with what happened, the owner hears of it, and what ran there is gone in time."""
    lost: set[int] = set()
    all_lost = asyncio.Event()

    def hook(failure: MeshFailure) -> None:
        lost.update(failure.ranks)
        if len(lost) == 2:
            all_lost.set()

    sys.modules["monarch_async"].unhandled_fault_hook = hook  # type: ignore[attr-defined]
    there = net.attach().spawn_procs({"gpus": 2}).spawn("there", Worker)
    await there
    pending = there.sleep.call(60)
    net.drop()
    start = time.monotonic()
    with pytest.raises(ActorDied, match="unreachable for the lease") as caught:
        await pending
    assert LEASE - HEARTBEAT - 0.5 < time.monotonic() - start < LEASE + 2
    await net.wait_no_procs(LEASE + 2 - (time.monotonic() - start))
    with pytest.raises(ActorDied, match=r"unreachable|lease"):
        await there.slice(hosts=0, gpus=1).pid.call_one()
    assert caught.value.rank in (0, 1)
    async with asyncio.timeout(LEASE):
        await all_lost.wait()
    net.pass_on()
    again = net.attach().spawn_procs().spawn("again", Worker)
    assert 0 < await again.slice(hosts=0).pid.call_one()


@on_two_hosts
async def test_a_busy_process_is_not_dead(net: Net) -> None:
    """One that holds its loop for longer than 3 heartbeats and the lease answers when it is done."""
    there = net.attach().spawn_procs().spawn("there", Worker)
    await there
    assert "back" == await there.slice(hosts=0).stick.call_one(LEASE + 2)


@on_two_hosts
async def test_a_killed_process_is_told_with_its_signal(net: Net) -> None:
    """A process on another host that is killed fails its pending call with the evidence; its siblings go on."""
    sys.modules["monarch_async"].unhandled_fault_hook = lambda failure: None  # type: ignore[attr-defined]
    there = net.attach().spawn_procs({"gpus": 2}).spawn("there", Worker)
    pids = [pid for _, pid in (await there.pid.call()).items()]
    pending = there.slice(hosts=0, gpus=0).sleep.call_one(60)
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(ActorDied) as caught:
        await pending
    assert signal.SIGKILL == caught.value.signal
    assert pids[1] == await there.slice(hosts=0, gpus=1).pid.call_one()


@on_two_hosts
async def test_a_client_that_is_killed(net: Net) -> None:
    """What it had on the worker's host is gone within 2 s; another client's is untouched, and the worker takes the next one."""
    code = (
        "import asyncio, sys\nfrom monarch_async import attach_to_workers\n"
        "async def main():\n    procs = attach_to_workers([sys.argv[1]], key=sys.argv[2]).spawn_procs({'gpus': 2})\n    await procs\n"
        "    print('up', flush=True)\n    await asyncio.sleep(60)\nasyncio.run(main())"
    )
    mine = net.attach().spawn_procs().spawn("mine", Worker)
    pid = await mine.slice(hosts=0).pid.call_one()
    before = {process.pid for process in net.procs()}
    command = [sys.executable, "-c", code, net.url, net.key_file]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=ENVIRONMENT) as other:
        assert other.stdout is not None
        assert "up" == (await asyncio.to_thread(other.stdout.readline)).strip()
        theirs = [process for process in net.procs() if process.pid not in before]
        other.kill()
    await wait_gone([process.pid for process in theirs], 2.5)
    assert pid == await mine.slice(hosts=0).pid.call_one()


@on_two_hosts
async def test_strangers_get_nowhere(net: Net) -> None:
    """Garbage, silence and a worker's port spoken to as if it were a process: closed, and the worker goes on."""
    host, port = net.url.removeprefix("tcp://").split(":")
    loop = asyncio.get_running_loop()
    for data in (b"GET / HTTP/1.0\r\n\r\n", b"MAR1\x06worker" + b"\xff" * 5000, b"MAR1\x03abc", b"\x80\x05."):
        with socket.socket() as sock:
            sock.setblocking(False)
            await loop.sock_connect(sock, (host, int(port)))
            await loop.sock_sendall(sock, data)
            async with asyncio.timeout(8):
                try:
                    while await loop.sock_recv(sock, 4096):
                        pass
                except ConnectionResetError:
                    pass
    there = net.attach().spawn_procs().spawn("there", Worker)
    assert 0 < await there.slice(hosts=0).pid.call_one()
