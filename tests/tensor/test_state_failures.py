"""What becomes of a state dict when its publisher or its reader is gone, frozen, or slow."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from monarch_async import BufferGone, MeshFailure, ProcMesh, Restart, UsageError, this_host
from monarch_async.tensor import PublisherGone, StateDict
from monarch_async.tensor.state_pull import check_word
from tests.tensor.publishers import Puller, Trainer, constant, only_value

LEASE = 0.5


@pytest.fixture
async def pair() -> ProcMesh:
    """Two processes."""
    return this_host().spawn_procs({"gpus": 2}, name="pair", preload=["tests.tensor.publishers"])


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[MeshFailure]:
    """What reaches the program's own hook, which then does nothing else."""
    failures: list[MeshFailure] = []
    monkeypatch.setattr("monarch_async.unhandled_fault_hook", failures.append)
    return failures


async def test_a_killed_publisher_is_named(pair: ProcMesh, told: list[MeshFailure]) -> None:
    """Whatever a reader does then fails at once and says who is gone, and how; views that were had before stay."""
    trainer = pair.slice(gpus=0).spawn("trainer", Trainer, "policy")
    handle = await trainer.publish.call_one(1, 200_000)
    views = await handle.pull()
    waiting = handle.wait_for(2)
    os.kill(await trainer.pid.call_one(), signal.SIGKILL)
    with pytest.raises(
        PublisherGone, match=r"trainer\[0\], who published 'policy', is gone: .*SIGKILL.* has not published again"
    ) as caught:
        await waiting
    assert ("policy", "trainer[0]") == (caught.value.name, caught.value.publisher)
    for future in (handle.pull(), handle.pull_into(constant(0, 200_000)), handle.version()):
        with pytest.raises(PublisherGone):
            await future
    assert 1 == only_value(views)


async def test_a_publisher_that_is_restarted_is_found_by_old_handles(pair: ProcMesh) -> None:
    """Killed, or failed: its next life counts on from its last version, and handles that knew the last life find it."""
    restart = Restart(max_restarts=5, within=60.0)
    trainer = pair.slice(gpus=0).spawn("trainer", Trainer, restart=restart)
    puller = pair.slice(gpus=1).spawn("puller", Puller)
    handle = await trainer.publish.call_one(1)
    assert (1, 1) == (await puller.keep.call_one(handle), await handle.version())
    with pytest.raises(ValueError, match="boom"):
        await trainer.boom.call_one()
    await trainer.publish.call_one(2, 5001)
    assert (2, 2) == ((pulled := await handle.pull()).version, only_value(pulled))
    other = pair.slice(gpus=0).spawn("other", Trainer)
    assert 1 == await (await other.publish.call_one(9)).version()


async def test_a_dead_process_is_found_again() -> None:
    """The same where the process was killed: until the next life has published, the publisher is gone."""
    procs = this_host().spawn_procs(name="mortal", preload=["tests.tensor.publishers"])
    trainer = procs.spawn("trainer", Trainer, restart=Restart(max_restarts=2, within=60.0))
    handle = await trainer.publish.call_one(1)
    os.kill(await trainer.pid.call_one(), signal.SIGKILL)
    with pytest.raises(PublisherGone):
        await handle.wait_for(2)
    await trainer.publish.call_one(2)
    assert (2, 2) == ((pulled := await handle.pull()).version, only_value(pulled))


async def test_a_reader_that_is_frozen_holds_the_publisher_up_for_one_lease(pair: ProcMesh) -> None:
    """Both slots taken, one of them by a reader that gives no sign: the publisher goes on when the lease is over, not before."""
    trainer = pair.slice(gpus=0).spawn("trainer", Trainer, slots=2, lease=LEASE)
    puller = pair.slice(gpus=1).spawn("puller", Puller)
    handle = await trainer.publish.call_one(1)
    pid = await puller.pid.call_one()
    assert 1 == await puller.lease.call_one(handle)
    os.kill(pid, signal.SIGSTOP)
    try:
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert 4 == await trainer.go_on.call_one(2, 5, 5000)
        took = loop.time() - began
    finally:
        os.kill(pid, signal.SIGCONT)
    assert took > LEASE / 3
    await puller.let_go.call_one()


async def a_slow_reader_is_waited_for(pair: ProcMesh) -> None:
    """One that is alive keeps its version for as long as it likes; the publisher goes on as soon as it has done."""
    trainer = pair.slice(gpus=0).spawn("trainer", Trainer, slots=2, lease=LEASE)
    puller = pair.slice(gpus=1).spawn("puller", Puller)
    handle = await trainer.publish.call_one(1)
    await puller.lease.call_one(handle)
    going_on = trainer.go_on.call_one(2, 4, 5000)
    assert 2 == await handle.wait_for(2)
    done, _ = await asyncio.wait([going_on], timeout=3 * LEASE)
    assert not done
    await puller.let_go.call_one()
    assert 3 == await going_on


async def a_reader_whose_version_is_gone_begins_again(pair: ProcMesh) -> None:
    """The lease was given up while it read: what it read is not taken for that version, and it gets the newest."""
    trainer = pair.slice(gpus=0).spawn("trainer", Trainer, slots=2)
    handle = await trainer.publish.call_one(1)
    versions = []

    async def take(opened: Any, layouts: Any) -> int:
        versions.append(opened[0].version)
        if len(versions) == 1:
            await handle._group.sources[0].keeper.end.call_one(opened[0].lease)
            await trainer.go_on.call_one(2, 5, 5000)
        await check_word(layouts[0], opened[0].buffer, opened[0].version)
        return 7

    assert 7 == await handle._pull(take, None)
    assert [1, 4] == versions

    async def never(opened: Any, layouts: Any) -> int:
        raise BufferGone("gone")

    with pytest.raises(BufferGone):
        await handle._pull(never, None)


async def cancelled_pulls_leave_no_lease(pair: ProcMesh) -> None:
    """Whenever a pull is given up, its lease ends: the publisher is not held up."""
    trainer = pair.slice(gpus=0).spawn("trainer", Trainer, slots=2, lease=60.0)
    handle = await trainer.publish.call_one(1, 1 << 20)
    target = constant(0, 1 << 20)
    cancelled = 0
    for moment in range(8):
        pulling = asyncio.ensure_future(handle.pull_into(target))
        await asyncio.sleep(moment * 0.0005)  # at any point of it, and after it
        pulling.cancel()
        await asyncio.wait([pulling])
        cancelled += pulling.cancelled()
    assert cancelled > 0
    with pytest.raises(ValueError, match="nothing was written"):
        await handle.pull_into({})
    async with asyncio.timeout(20):
        assert 5 == await trainer.go_on.call_one(2, 6, 1 << 20)


async def test_a_life_that_is_over_publishes_no_more() -> None:
    """What its `Published` is used for then is refused, by name."""
    published = await StateDict.publish({"w": torch.zeros(3)}, name="mine")
    published._shelf.close()
    with pytest.raises(UsageError, match="can't publish 'mine' by this any more"):
        await published.update({"w": torch.zeros(3)})


async def a_version_that_was_given_up_can_be_published(pair: ProcMesh) -> None:
    """While it waited for room, or at any other point: its number is not used up, unless it is there."""
    puller = pair.slice(gpus=0).spawn("puller", Puller)
    published = await StateDict.publish(constant(1, 5000), name="mine", slots=2, lease=60.0)
    await puller.lease.call_one(published)
    await published.update(constant(2, 5000))
    updating = asyncio.ensure_future(published.update(constant(3, 5000), version=7))
    await puller.pid.call_one()
    assert 2 == await published.version()
    updating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await updating
    await puller.let_go.call_one()
    await published.update(constant(4, 5000), version=7)
    assert (7, 4) == ((pulled := await published.pull()).version, only_value(pulled))
    for moment in range(8):
        version = await published.version() + 1
        updating = asyncio.ensure_future(published.update(constant(version, 5000), version=version))
        await asyncio.sleep(moment * 0.0003)
        updating.cancel()
        await asyncio.wait([updating])
        if await published.version() < version:
            await published.update(constant(version, 5000), version=version)
        assert version == await published.version()


CASES: list[Callable[[ProcMesh], Awaitable[None]]] = [
    a_slow_reader_is_waited_for,
    a_reader_whose_version_is_gone_begins_again,
    cancelled_pulls_leave_no_lease,
    a_version_that_was_given_up_can_be_published,
]


async def test_of_all_that_leaves_both_processes_as_they_were(pair: ProcMesh) -> None:
    """What is said above of a trainer and a puller. They are new for each; not so their processes, as torch takes two seconds to import."""
    for case in CASES:
        await case(pair)
