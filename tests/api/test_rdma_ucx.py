"""The backend ``ucx``, in programs of their own: UCX keeps threads and descriptors for as long as a process lives."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from monarch_async import RDMAError, this_host
from tests.api.owners import Owner
from tests.hosts.workers import ENVIRONMENT, ROOT, make_key, worker

HEAD = """
import asyncio, os, sys
import monarch_async
from monarch_async import *
from tests.api.owners import Owner, pattern
from tests.api.waiting import until

monarch_async.unhandled_fault_hook = lambda failure: None

async def see_copies(owner):
    for size in (0, 5000, (40 << 20) + 7):
        buffer, target = await owner.make.call_one(pattern(size), "ucx"), bytearray(size)
        assert buffer.backend == "ucx"
        await buffer.read_into(target)
        assert target == pattern(size)
        await buffer.write_from(target[::-1])
        assert await owner.content.call_one(buffer) == pattern(size)[::-1]
        await RDMAAction().write_from(buffer, target).read_into(await owner.make.call_one(pattern(9), "ucx"), nine := bytearray(9)).submit()
        assert (nine, await owner.content.call_one(buffer)) == (pattern(9), pattern(size))
        await buffer.drop()
        try:
            await buffer.read_into(target)
        except BufferGone as error:
            assert "by ucx failed: it was dropped" in str(error)
        else:
            raise AssertionError("it was read though it was dropped")

async def endless(owner):
    buffer, target = await owner.make.call_one(b"o" * (64 << 20), "ucx"), bytearray(64 << 20)
    action = RDMAAction()
    for _ in range(1000):
        action.read_into(buffer, target)
    copying = action.submit()
    await until(lambda: target[4])
    return buffer, target, copying
"""

ENDS = """
from monarch_async.ambient import current_runtime
from tests.api.owners import halves

async def nothing_left(owner):
    async with asyncio.timeout(5):
        while await owner.serving.call_one():
            pass

async def main():
    owner = this_host().spawn_procs().spawn("owner", Owner)
    await see_copies(owner)
    await nothing_left(owner)
    # Given up at any point of it.
    buffer, memory = await owner.make.call_one(pattern(32 << 20), "ucx"), bytearray(32 << 20)
    for moment in range(12):
        copying = asyncio.ensure_future((buffer.write_from if moment % 2 else buffer.read_into)(memory))
        await asyncio.sleep(moment * 0.002)
        copying.cancel()
        await asyncio.wait([copying])
    await nothing_left(owner)
    # This end can't be posted: the owner's does not wait for it, so that dropping the buffer has an end.
    ucx = halves()[1]._ucx
    ucx._fabric.receive = lambda *args: (_ for _ in ()).throw(RuntimeError("it broke"))
    try:
        await buffer.read_into(memory)
    except RDMAError as error:
        assert "UCX: it broke" in str(error)
    else:
        raise AssertionError("it was read though it was not posted")
    del ucx._fabric.receive
    await nothing_left(owner)
    async with asyncio.timeout(5):
        await buffer.drop()
    # The owner's end of a write fails: so does the write.
    buffer = await owner.make.call_one(pattern(64 << 20), "ucx")
    wrong = 0
    for _ in range(5):
        writing = asyncio.ensure_future(buffer.write_from(bytearray(64 << 20)))
        await owner.serving.call_one()
        await owner.forget_fabric.call_one(current_runtime().me.uid)
        try:
            await writing
        except RDMAError:
            wrong += 1
    assert wrong, "nothing was in the way of any"
    await nothing_left(owner)
    # The process is gone between the two steps of a copy.
    address = buffer.owner
    os.kill(await owner.pid.call_one(), 9)
    await until(lambda: not ucx._peers)
    try:
        await ucx._post(ucx._fabric, address, False, 1, memoryview(bytearray(9)))
    except ActorDied:
        pass
    else:
        raise AssertionError("it was posted to nobody")
    await shutdown()
    print("done")

asyncio.run(main())
"""

WITHIN = """
async def main():
    owner = this_host().spawn_procs().spawn("owner", Owner)
    await see_copies(owner)
    buffer, target, copying = await endless(owner)
    for _ in range(20):
        await owner.rank.call_one()
    assert copying.cancel()
    await asyncio.wait([copying])
    assert copying.cancelled()
    await buffer.read_into(target)
    buffer, target, copying = await endless(owner)
    os.kill(await owner.pid.call_one(), 9)
    async with asyncio.timeout(2):
        try:
            await copying
        except BufferGone as error:
            assert "by ucx failed: its process is gone" in str(error)
    await shutdown()
    print("done")

asyncio.run(main())
"""

BETWEEN = """
async def main():
    owner = attach_to_workers([sys.argv[1]], key=sys.argv[2]).spawn_procs().slice(hosts=0).spawn("owner", Owner)
    await see_copies(owner)
    await shutdown()
    print("done")

asyncio.run(main())
"""

needs_ucx = pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="ucxx is not installed")


def run(tmp_path: Path, body: str, *arguments: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(HEAD + body)
    environment = {**ENVIRONMENT, "UCX_TLS": "tcp,self,sm", "PYTHONPATH": ":".join([ENVIRONMENT["PYTHONPATH"], *sys.path[1:]])}
    done = subprocess.run([sys.executable, str(script), *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=90)
    assert "done\n" in done.stdout, done.stderr


@needs_ucx
def test_within_a_host(tmp_path: Path) -> None:
    """Both ways, all sizes, batches; calls pass, it is cancelled, and an owner that is killed is noticed."""
    run(tmp_path, WITHIN)


@needs_ucx
def test_ends(tmp_path: Path) -> None:
    """Copies that are given up, can't be posted, or break at the owner leave nothing there, and none is taken for done."""
    run(tmp_path, ENDS)


@needs_ucx
def test_between_hosts(tmp_path: Path) -> None:
    """The same between a worker's host and this one."""
    key = make_key(tmp_path)
    with worker("--key-file", key, env={"UCX_TLS": "tcp,self,sm"}) as (url, _):
        run(tmp_path, BETWEEN, url, key)


@pytest.mark.skipif(importlib.util.find_spec("ucxx") is not None, reason="ucxx is installed")
async def test_where_there_is_none() -> None:
    """Asked for by name, the error says what to install; it is never chosen otherwise."""
    owner = this_host().spawn_procs().spawn("owner", Owner)
    buffer = await owner.make.call_one(b"far", "ucx")
    with pytest.raises(RDMAError, match=r"by ucx failed: UCX is needed at both ends.*pip install") as caught:
        await buffer.read_into(bytearray(3))
    assert "ucx" == caught.value.backend
