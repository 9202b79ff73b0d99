"""What is lent outlives everything but those who look at it: actors, processes, links, the program; and nothing is left of it then."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from monarch_async import Actor, ActorDied, MeshFailure, Restart, endpoint, shared_buffer, shutdown, this_host
from monarch_async._channel.segment import SUPPORTED
from monarch_async.testing.plugin import MonarchProcs
from tests.api.lending_actors import Holder, lending_here, loans_here, mapped_segments
from tests.api.waiting import until

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="needs memfd")
MIB = 1 << 20
ROOT = Path(__file__).parents[2]


async def gone(pid: int) -> None:
    await until(lambda: not os.path.exists(f"/proc/{pid}"))


@pytest.mark.parametrize("size", [100_000, 5 * MIB])
async def test_a_view_outlives_all(failures: list[MeshFailure], size: int) -> None:
    """The actor that sent it, then its process by SIGKILL, then this program's runtime; it may still be written to, and leaves nothing."""
    maps = mapped_segments()
    for end in ("actor", "process", "stop", "shutdown"):
        procs = this_host().spawn_procs(name=end)
        holder = procs.spawn("holder", Holder)
        await holder.echo.call_one(None)
        pid, *_ = await holder.numbers.call_one()
        view = await holder.make_view.call_one(size)
        assert lending_here().borrowing._leased
        if end == "actor":
            await holder.stop()
        elif end == "process":
            os.kill(pid, signal.SIGKILL)
            await gone(pid)
        elif end == "stop":
            await procs.stop()
        else:
            await shutdown()
        assert size == len(view)
        assert b"v" * size == view.tobytes()
        view[10] = 1
        assert b"v" * 10 + b"\1" + b"v" * (size - 11) == view.tobytes()
        del view
        if end == "actor":
            assert b"v" * size == (await procs.spawn("again", Holder).make_view.call_one(size)).tobytes()
    assert maps == mapped_segments()


@pytest.mark.parametrize("size", [100_000, 5 * MIB])
async def test_a_process_that_is_stopped_takes_nothing_from_others(
    monarch_procs: MonarchProcs, failures: list[MeshFailure], size: int
) -> None:
    """What it has lent to a third process stays as it was there, however it ends: its pool must not give that memory back to the system."""
    keeper = monarch_procs(1, name="keeper").spawn("keeper", Holder)
    for name in ("stopped", "killed"):
        procs = this_host().spawn_procs(name=name)
        sender = procs.spawn("sender", Holder)
        await asyncio.gather(keeper.echo.call_one(1), sender.echo.call_one(1))
        await sender.send_on.call_one(keeper, 10)
        await sender.send_on.call_one(keeper, size)
        *_, leased, mapped = await keeper.numbers.call_one()
        assert (1, 2) == (leased, mapped)
        pid, *_ = await sender.numbers.call_one()
        if name == "stopped":
            await procs.stop()
        else:
            os.kill(pid, signal.SIGKILL)
        await gone(pid)
        assert [b"s" * 16] == (await keeper.content.call_one())[1:]
        await keeper.drop.call_one()
        async with asyncio.timeout(5):  # until it has heard of that end
            while (await keeper.numbers.call_one())[3]:
                pass


async def test_blocks_come_back_when_their_receiver_dies(failures: list[MeshFailure]) -> None:
    """By SIGKILL, while it looks at one and with others on their way; in its successor nothing of them is left."""
    procs = this_host().spawn_procs(restart=Restart())
    holder = procs.spawn("holder", Holder, restart=Restart())
    await holder.echo.call_one(None)
    array = np.ones(5 * MIB, "u1")
    await holder.keep.call_one(array)
    calls = [holder.wait.call_one(array) for _ in range(3)]
    await until(lambda: 4 == loans_here())
    os.kill(await procs.spawn("pid", Pid).pid.call_one(), signal.SIGKILL)
    for call in calls:
        with pytest.raises(ActorDied):
            await call
    await until(lambda: not loans_here())
    assert 20 * MIB >= lending_here().pool.allocated
    assert bytes(array) == bytes(await holder.echo.call_one(array))
    *_, lent, leased, mapped = await holder.numbers.call_one()
    assert lent <= 1
    assert not leased
    assert mapped <= 3
    assert 20 * MIB >= lending_here().pool.allocated


class Pid(Actor):
    @endpoint
    async def pid(self) -> int:
        return os.getpid()


async def test_the_inbox_of_every_process_goes_with_it(failures: list[MeshFailure]) -> None:
    """After a stop, after SIGKILL, and after the end of the program."""
    stopped, killed = this_host().spawn_procs(name="stopped"), this_host().spawn_procs(name="killed")
    first, second = stopped.spawn("first", Holder), killed.spawn("second", Holder)
    await asyncio.gather(first.echo.call_one(1), second.echo.call_one(1))
    inbox = lending_here().borrowing.inbox
    assert inbox is not None
    folder = Path(inbox._path).parent
    inboxes = {path.name for path in folder.glob("inbox-*")}
    assert 4 == len(inboxes)  # this one's, the agent's, and two
    pid, *_ = await second.numbers.call_one()
    os.kill(pid, signal.SIGKILL)
    await until(lambda: 3 == len([*folder.glob("inbox-*")]))
    await stopped.stop()
    await until(lambda: 2 == len([*folder.glob("inbox-*")]))
    await shutdown()
    assert not folder.exists()


async def test_unused_segments_are_retired_everywhere(monarch_procs: MonarchProcs, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not used for a while goes back to the system, here and in the processes that had it mapped."""
    monkeypatch.setattr("monarch_async._runtime.lending.AGE", 0.05)
    holder = monarch_procs(1).spawn("holder", Holder)
    await holder.echo.call_one(None)
    for size in (5, 6, 7):
        await holder.keep.call_one(np.ones(size * MIB, "u1"))
    assert 6 == (await holder.numbers.call_one())[3]
    await holder.drop.call_one()
    await until(lambda: not lending_here().pool.allocated)
    assert 0 == mapped_segments()
    assert 0 == (await holder.numbers.call_one())[3]
    buffer = shared_buffer(5 * MIB)
    assert 0 != lending_here().pool.allocated
    del buffer
    await until(lambda: not lending_here().pool.allocated)


async def test_a_forked_child_goes_on_looking(monarch_procs: MonarchProcs) -> None:
    """As a DataLoader's worker does: its parent drops what it got and gets more, of the same size; the child's bytes never change."""
    holder = monarch_procs(1).spawn("holder", Holder)
    await holder.echo.call_one(None)
    for size in (100_000, 5 * MIB):
        await holder.keep.call_one(np.full(size, 1, "u1"))
    await holder.fork.call_one()
    await holder.drop.call_one()
    for byte in range(2, 12):
        for size in (100_000, 5 * MIB):
            await holder.keep.call_one(np.full(size, byte, "u1"))
        await holder.fill.call_one(byte + 100)
        await holder.drop.call_one()
    assert "y" == await holder.ask_child.call_one()
    await until(lambda: 2 == loans_here())  # those that the child could see; nobody can tell when it is done


async def test_a_forked_child_of_the_sender_goes_on_looking(monarch_procs: MonarchProcs) -> None:
    """The memory of `shared_buffer` is not used again after a fork; in the child there is none to be had, and it is told so."""
    holder = monarch_procs(1).spawn("holder", Holder)
    assert "UsageError: this process was forked from one that holds actors" in await holder.share_in_child.call_one()
    await holder.echo.call_one(None)
    buffer = shared_buffer(MIB)
    buffer[:] = b"p" * MIB
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.read(read, 1)
        os._exit(0 if b"p" * MIB == bytes(buffer) else 1)
    del buffer
    for byte in b"abcd":
        assert byte == (await holder.echo.call_one(bytearray([byte]) * MIB))[0]
    os.write(write, b"x")
    os.close(read)
    os.close(write)
    await gone_child(pid)


async def gone_child(pid: int) -> None:
    _, status = await asyncio.to_thread(os.waitpid, pid, 0)
    assert 0 == os.waitstatus_to_exitcode(status)


CASE_10 = """
import asyncio, sys
sys.path.insert(0, {root!r})
from monarch_async import Actor, endpoint, shared_buffer, this_host
from tests.api.lending_actors import Holder

class Owner(Actor):
    def __init__(self):
        self.held = [memoryview(bytearray(1 << 20)), shared_buffer(1 << 20)]
        for held in self.held:
            held[:] = b"s" * (1 << 20)

    @endpoint
    async def show(self, other):
        for held in self.held:
            await other.keep.call_one(held)

async def main():
    a, b, c = (this_host().spawn_procs(name=name) for name in "abc")
    owner = a.spawn("owner", Owner)
    second, third = (procs.spawn("holder", Holder) for procs in (b, c))
    await asyncio.gather(second.echo.call_one(None), third.echo.call_one(None))
    for _ in range(2):
        await owner.show.call_one(second)
    assert [b"s" * 16] * 4 == await second.content.call_one()
    *_, leased, _ = await second.numbers.call_one()
    assert leased, "nothing was lent"
    await b.stop()
    for _ in range(2):
        await owner.show.call_one(third)
    assert [b"s" * 16] * 4 == await third.content.call_one()

asyncio.run(main())
print("right")
"""


def test_case_10_segment_ownership() -> None:
    """A holds 1 MiB, B reads it and ends, C reads it later: right bytes, nothing on stderr, nothing new under /dev/shm."""
    before = os.listdir("/dev/shm")
    program = CASE_10.format(root=str(ROOT))
    done = subprocess.run([sys.executable, "-X", "dev", "-c", program], capture_output=True, text=True, timeout=60)
    assert ("right\n", "") == (done.stdout, done.stderr)
    assert before == os.listdir("/dev/shm")


CASE_11 = """
import asyncio, os, subprocess, sys
sys.path.insert(0, {root!r})
from monarch_async import Actor, endpoint, this_host
from tests.api.lending_actors import Holder

class Parent(Actor):
    @endpoint
    async def start(self):
        child = subprocess.Popen(["sleep", "1000"])
        return os.getpid(), child.pid

async def main():
    procs = this_host().spawn_procs({{"procs": 4}})
    holders = procs.spawn("holders", Holder)
    await holders.echo.call(1)
    await holders.keep.call(bytearray(5 << 20))
    views = [view for _, view in (await holders.make_view.call(5 << 20)).items()]
    pids = [numbers[0] for _, numbers in (await holders.numbers.call()).items()]
    pids += await procs.slice(procs=0).spawn("parent", Parent).start.call_one()
    print(*pids, flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    assert all(view == b"v" * (5 << 20) for view in views)
    assert [[bytes(16)]] * 4 == [content for _, content in (await holders.content.call()).items()]
    print("whole", flush=True)

asyncio.run(main())
"""


def test_case_11_kill_and_sweep(tmp_path: Path) -> None:
    """SIGKILL of a client with 4 processes that hold segments: every pid is gone within 2 s, a child too, and no shared memory is left.

    Another program of the same kind, which lives beside it, still has all it had.
    """
    before = os.listdir("/dev/shm")
    with _session(tmp_path / "mine") as (client, pids), _session(tmp_path / "other") as (other, theirs):
        client.kill()
        deadline = time.monotonic() + 2.0
        while alive := [pid for pid in pids if os.path.exists(f"/proc/{pid}")] or os.listdir(tmp_path / "mine"):
            assert time.monotonic() < deadline, alive
            time.sleep(0.005)
        assert all(os.path.exists(f"/proc/{pid}") for pid in theirs)
        out, _ = other.communicate("go on\n", timeout=30)
        assert ("whole\n", 0) == (out, other.returncode)
    assert before == os.listdir("/dev/shm")


@contextlib.contextmanager
def _session(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A program whose files are in a folder of its own, and what it has started."""
    folder.mkdir()
    command = [sys.executable, "-c", CASE_11.format(root=str(ROOT))]
    environment = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as client:
        try:
            assert client.stdout is not None
            pids = [*map(int, client.stdout.readline().split())]
            assert 6 == len(pids)
            yield client, pids
        finally:
            client.kill()


async def test_case_13_large_and_small_together(monarch_procs: MonarchProcs) -> None:
    """256 MiB to an actor that is pinged every 50 ms meanwhile: the slowest ping takes under 250 ms."""
    holder = monarch_procs(1).spawn("holder", Holder)
    await holder.echo.call_one(None)
    value = np.ones(256 * MIB, "u1")
    loop = asyncio.get_running_loop()
    slowest = 0.0
    sending = loop.create_task(_send(holder, value, 3))
    while not sending.done():
        began = loop.time()
        await holder.echo.call_one(None)
        slowest = max(slowest, loop.time() - began)
        await asyncio.sleep(0.05)
    await sending
    assert slowest < 0.25 * _slack()


async def _send(holder: Any, value: Any, times: int) -> None:
    for _ in range(times):
        assert 1 == await holder.first.call_one(value)
        await asyncio.sleep(0.05)


def _slack() -> float:
    """How much slower than alone this process may be: other tests may run beside it."""
    return max(1.0, os.getloadavg()[0])


async def survive(kills: int, messages: int) -> None:
    """Messages with segments, both ways, then SIGKILL of the other side, again and again; nothing is left here."""
    restart = Restart(max_restarts=10_000, within=1.0)
    procs = this_host().spawn_procs(restart=restart)
    holder = procs.spawn("holder", Holder, restart=restart)
    sizes = [66_000, 100_000, 300_000, 5 * MIB]
    most = len(os.listdir("/proc/self/fd")) + 20
    for _ in range(kills):
        kept = memoryview(b"")
        pid, *_ = await holder.numbers.options(retry=10).call_one()
        for number in range(messages // kills):
            value = memoryview(bytearray(sizes[number % 3] if number % 100 else sizes[3]))
            await holder.keep.call_one(value)
            if number % 10 == 0:
                del value
                kept = await holder.make_view.call_one(70_000)
                await holder.drop.call_one()
        calls = [holder.wait.call_one(bytearray(200_000)) for _ in range(3)]
        os.kill(pid, signal.SIGKILL)
        await asyncio.wait(calls)
        assert all(isinstance(call.exception(), ActorDied) for call in calls)
        await until(lambda: not loans_here())
        assert b"v" * 70_000 == kept.tobytes()
        del kept, calls
        gc.collect()
        assert mapped_segments() <= 8
        assert len(os.listdir("/proc/self/fd")) <= most
    await procs.stop()


async def test_a_killed_receiver_leaves_nothing(failures: list[MeshFailure]) -> None:
    """2,000 messages and 5 kills of the other side."""
    await survive(5, 2000)


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_200_killed_receivers_leave_nothing(failures: list[MeshFailure]) -> None:
    """100,000 messages and 200 kills."""
    await survive(200, 100_000)
