"""Values on devices between processes of one host: right, unshared, by the device where that can be, and their memory comes back.

On devices that are none (`device_actors`), so that all but the calls of CUDA is run everywhere; with CUDA: `tests/cuda`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from monarch_async import ActorDied, Channel, DecodeError, MeshFailure, configure, shutdown, this_proc
from monarch_async._channel.parcels import pool
from monarch_async._core.events import Evidence
from monarch_async._runtime import device_lending
from monarch_async._runtime.device_lending import DeviceLending
from monarch_async.ambient import current_runtime
from monarch_async.errors import ChannelError
from monarch_async.options import Options
from monarch_async.testing.plugin import MonarchProcs
from tests.api.device_actors import FakeDevices, Keeper, OnDevice, install, statistics_here, uninstall
from tests.api.device_actors import devices as here
from tests.api.lending_actors import lending_here, loans_here
from tests.api.waiting import until

MIB = 1 << 20
KIB = 1 << 10


@pytest.fixture(autouse=True)
async def devices() -> AsyncIterator[FakeDevices]:
    """In use in this process. When its runtime has ended, nothing of them may be left."""
    here.__init__()  # type: ignore[misc]
    here.in_use = True
    install()
    yield here
    try:
        await shutdown()
        await until(lambda: not (here.memory or here.opened))
    finally:
        uninstall()


def value(byte: int, size: int = MIB) -> OnDevice:
    return OnDevice(bytes([byte]) * size)


async def until_lent(keeper: Any, device: int = 0) -> None:
    """Send until the process has said that it can open memory of here."""
    async with asyncio.timeout(10):
        while not pool._takers.get(device):
            await keeper.echo.call_one(OnDevice(bytes(100 * KIB), device))


async def all_back() -> None:
    gc.collect()
    await until(lambda: not statistics_here()["loans"] and not statistics_here()["blocks"])


async def test_values_go_by_the_device(monarch_procs: MonarchProcs, devices: FakeDevices, caplog: pytest.LogCaptureFixture) -> None:
    """There and back, by async and def endpoints, ports and streams, alone and among others; the first message by host memory."""
    keeper = monarch_procs(1).spawn("keeper", Keeper)
    await keeper.first.call_one()
    assert "host" == await keeper.way.call_one(value(1))
    await until_lent(keeper)
    for size in (64 * KIB, 100_001, MIB, 3 * MIB):
        sent = value(2, size)
        assert "device" == await keeper.way.call_one(sent)
        assert sent == await keeper.echo.call_one(sent)
        assert "device" == (await keeper.echo.call_one(sent)).way
        assert sent == await keeper.echo_in_thread.call_one(sent)
    mixed = [value(3), bytearray(b"x") * MIB, value(4, 10), b"y" * 40_000, value(5, 100_000), b"z" * 70_000]
    for _ in range(2):
        assert mixed == await keeper.echo.call_one(mixed)
    large_body = ["b" * 100_000, value(6)]
    assert large_body == await keeper.echo.call_one(large_body)
    port, receiver = Channel[Any].open()
    await keeper.through.call_one(port, value(7))
    assert value(7) == await receiver.recv()
    receiver.close()
    async for streamed in keeper.echo.stream(value(8)):
        assert value(8) == streamed
    del streamed
    await all_back()
    assert 0 == devices.staged
    assert [] == caplog.records


async def test_what_is_changed_later_does_not_show(monarch_procs: MonarchProcs) -> None:
    """The sender's changes after the call, and a receiver's, in the same and in another process; in blocks that are used again too."""
    procs = monarch_procs(2)
    one, beside = procs.slice(procs=0).spawn("one", Keeper), procs.slice(procs=0).spawn("beside", Keeper)
    other = procs.slice(procs=1).spawn("other", Keeper)
    keepers = (one, beside, other)
    await until_lent(one)
    await other.first.call_one()  # now it uses devices, so that it does not have to be asked again
    await other.echo.call_one(value(0))
    await until(lambda: 2 == len(pool._takers[0]))
    sent = value(1)
    calls = [keeper.keep.call_one(sent) for keeper in keepers]
    sent.data[:] = bytes([2]) * MIB
    assert ["device"] * 3 == await asyncio.gather(*calls)
    assert [[1]] * 3 == [await keeper.first.call_one() for keeper in keepers]
    await one.write.call_one(3)
    assert [[3], [1], [1]] == [await keeper.first.call_one() for keeper in keepers]
    for byte in range(4, 10):
        sent.data[:] = bytes([byte]) * MIB
        await asyncio.gather(*(keeper.keep.call_one(sent) for keeper in keepers))
    assert [1, 4, 5, 6, 7, 8, 9] == await other.first.call_one()


async def test_a_cast_is_one_copy_with_a_loan_for_each(monarch_procs: MonarchProcs) -> None:
    """Held until the last receiver has made its copy."""
    keepers = monarch_procs(3).spawn("keepers", Keeper)
    await keepers.first.call()
    first = keepers.slice(procs=0)
    await keepers.echo.call(value(0))
    await until(lambda: 3 == len(pool._takers.get(0, ())))
    await all_back()
    await first.use.call_one({"held": True})
    assert ["device"] * 3 == list((await keepers.keep.call(value(1))).values())
    await until(lambda: 1 == statistics_here()["loans"])
    assert 1 == statistics_here()["blocks"]
    await first.use.call_one({"held": False})
    await all_back()


async def test_a_loan_lasts_until_the_copy_is_made(monarch_procs: MonarchProcs) -> None:
    """And so many messages meanwhile, in blocks of their own."""
    keeper = monarch_procs(1).spawn("keeper", Keeper)
    await until_lent(keeper)
    await all_back()
    await keeper.use.call_one({"held": True})
    for byte in range(5):
        assert "device" == await keeper.keep.call_one(value(byte))
    gc.collect()
    assert (5, 5) == (statistics_here()["loans"], statistics_here()["blocks"])
    await keeper.use.call_one({"held": False})
    assert [0, 1, 2, 3, 4] == await keeper.first.call_one()
    await all_back()


async def test_messages_wait_for_their_bytes_in_their_place(monarch_procs: MonarchProcs, devices: FakeDevices) -> None:
    """While the copy is being made the message does not leave, what was sent after it stays behind it, and the loop goes on."""
    procs = monarch_procs(2)
    keeper, other = procs.slice(procs=0).spawn("keeper", Keeper), procs.slice(procs=1).spawn("other", Keeper)
    await until_lent(keeper)
    await other.first.call_one()
    devices.filling = True
    for byte in range(3):
        keeper.note_value.broadcast(value(byte))
        keeper.note.broadcast(f"after {byte}")
    large = keeper.echo.call_one(bytearray(5 * MIB))
    assert [] == await other.notes.call_one()
    await asyncio.sleep(0.05)
    assert not large.done()
    assert 3 == statistics_here()["loans"]
    devices.filling = False
    assert 5 * MIB == len(await large)
    assert ["device 0", "after 0", "device 1", "after 1", "device 2", "after 2"] == await keeper.notes.call_one()
    await all_back()


async def test_a_sender_that_dies_before_its_bytes_are_there(failures: list[MeshFailure], monarch_procs: MonarchProcs) -> None:
    """The receiver never hears of that message, and waits for nothing."""
    procs = monarch_procs(2)
    sender, keeper = procs.slice(procs=0).spawn("sender", Keeper), procs.slice(procs=1).spawn("keeper", Keeper)
    async with asyncio.timeout(10):
        while "device" != await sender.send_on.call_one(keeper, value(1)):
            pass
    pid = await sender.pid.call_one()
    await sender.use.call_one({"filling": True})
    await sender.send_notes.call_one(keeper, 3)
    os.kill(pid, signal.SIGKILL)
    await until(lambda: failures)
    async with asyncio.timeout(10):
        while (await keeper.statistics.call_one())["mapped"]:
            pass
    assert [] == await keeper.notes.call_one()


async def test_a_receiver_that_dies_before_the_bytes_are_there(
    failures: list[MeshFailure], monarch_procs: MonarchProcs, devices: FakeDevices
) -> None:
    """What was held for it is let go."""
    keeper = monarch_procs(1).spawn("keeper", Keeper)
    await until_lent(keeper)
    pid = await keeper.pid.call_one()
    devices.filling = True
    call = keeper.echo.call_one(value(1))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorDied):
        await call
    del call
    await all_back()


async def test_a_device_that_fails(monarch_procs: MonarchProcs, devices: FakeDevices) -> None:
    """What it had not copied yet fails at who would read it, by an error that says so."""
    keeper = monarch_procs(1).spawn("keeper", Keeper)
    await until_lent(keeper)
    devices.fails = True
    with pytest.raises(DecodeError, match=r"its bytes were on a device of the sender, which has failed: illegal address"):
        await keeper.echo.call_one(value(1))
    assert "small" == await keeper.echo.call_one("small")
    await all_back()


@pytest.mark.parametrize("held", [True, False], ids=["while it is held", "at once"])
async def test_what_goes_with_what_a_device_loses(monarch_procs: MonarchProcs, devices: FakeDevices, held: bool) -> None:
    """Host memory that was lent by the same message comes back, and the link does not count what it did not send."""
    keeper = monarch_procs(1).spawn("keeper", Keeper)
    await until_lent(keeper)
    devices.filling, devices.fails = held, not held
    call = keeper.echo.call_one([value(1), bytearray(MIB)])
    devices.fails = True
    with pytest.raises(DecodeError):
        await call
    del call
    await all_back()
    await until(lambda: not loans_here())
    await until(lambda: not any(link._waiting for link in current_runtime().links))


async def test_a_session_that_is_lost_while_both_live(monarch_procs: MonarchProcs) -> None:
    """With messages under way: what they lent comes back over the next one."""
    keeper = monarch_procs(1).spawn("keeper", Keeper)
    await until_lent(keeper)
    await all_back()
    calls = [keeper.echo.call_one(value(1)) for _ in range(2)]
    (uid,) = pool._takers[0]
    peer = current_runtime().peers[uid]
    for link in list(peer.links):
        peer.ended(link, Evidence("cut"))
    assert 2 == statistics_here()["loans"]
    await asyncio.gather(*calls, return_exceptions=True)
    del calls
    await keeper.first.options(retry=5).call_one()
    await all_back()
    await until(lambda: not loans_here())


async def test_a_process_without_devices_is_asked_again(monarch_procs: MonarchProcs, caplog: pytest.LogCaptureFixture) -> None:
    """It is not made to use one by the question; nobody warns."""
    keeper = monarch_procs(1).spawn("keeper", Keeper, False)
    for _ in range(4):
        assert "host" == await keeper.way.call_one(value(1))
    await keeper.use.call_one({"in_use": True})
    await until_lent(keeper)
    assert "device" == await keeper.way.call_one(value(1))
    assert [] == caplog.records


@pytest.mark.parametrize(
    ("settings", "why"),
    [({"opens": False}, "invalid device context"), ({"sees": (b"another device!!",)}, "does not see the device GPU-64657669-6365-")],
)
async def test_where_it_can_not_be_opened(
    monarch_procs: MonarchProcs, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], why: str
) -> None:
    """Host memory, always right, with one warning that says why; and nothing is set aside for it."""
    keeper = monarch_procs(1).spawn("keeper", Keeper)
    await keeper.use.call_one(settings)
    for byte in range(5):
        assert "host" == await keeper.way.call_one(value(byte))
        assert value(byte) == await keeper.echo.call_one(value(byte))
    (record,) = caplog.records
    assert logging.WARNING == record.levelno
    assert why in record.getMessage()
    assert 0 == statistics_here()["blocks"]


async def test_some_can_and_some_can_not(monarch_procs: MonarchProcs, devices: FakeDevices) -> None:
    """One cast: each gets it by the way it can, with one copy in host memory for all that need that."""
    keepers = monarch_procs(3).spawn("keepers", Keeper)
    await keepers.first.call()
    await keepers.slice(procs=1).use.call_one({"opens": False})
    await keepers.slice(procs=2).use.call_one({"opens": False})
    await keepers.echo.call(value(0))
    await until(lambda: pool._takers.get(0) and not lending_here().on_devices._asked)
    before = lending_here().pool.allocated
    assert ["device", "host", "host"] == list((await keepers.keep.call(value(9, 5 * MIB))).values())
    assert [[9]] * 3 == list((await keepers.first.call()).values())
    assert 1 == devices.staged
    assert lending_here().pool.allocated - before == 5 * MIB
    await all_back()


async def test_no_room(monarch_procs: MonarchProcs, devices: FakeDevices, caplog: pytest.LogCaptureFixture) -> None:
    """Past the bound, and where the device gives none: host memory, with one warning, and what was set aside never passes the bound."""
    keeper = monarch_procs(1).spawn("keeper", Keeper)
    await until_lent(keeper)
    pool.limit = 20 * MIB
    await keeper.use.call_one({"held": True})
    ways = [await keeper.keep.call_one(value(byte, 3 * MIB)) for byte in range(6)]
    assert ["device", "device", "device", "host", "host", "host"] == ways
    assert list(range(6)) == await keeper.first.call_one()
    assert statistics_here()["bytes"] <= pool.limit
    (record,) = caplog.records
    assert "would pass the bound of 20971520" in record.getMessage()
    await keeper.use.call_one({"held": False})
    await all_back()
    assert "device" == await keeper.way.call_one(value(1, 3 * MIB))
    devices.allocates = False
    pool.limit = 64 * MIB
    assert "host" == await keeper.way.call_one(value(1, 9 * MIB))


async def test_unused_memory_goes_back(monarch_procs: MonarchProcs, devices: FakeDevices, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is unmapped at the receiver first, and then freed here; what comes afterwards goes by new memory."""
    monkeypatch.setattr(device_lending, "AGE", 0.05)
    keeper = monarch_procs(1).spawn("keeper", Keeper)
    await until_lent(keeper)
    await keeper.use.call_one({"held": True})  # or it may be back before it is looked at
    await keeper.keep.call_one(value(1, 3 * MIB))
    assert (await keeper.statistics.call_one())["mapped"] >= 1
    await keeper.use.call_one({"held": False})
    await until(lambda: not statistics_here()["bytes"])
    assert not devices.memory
    assert 0 == (await keeper.statistics.call_one())["mapped"]
    assert "device" == await keeper.way.call_one(value(2, 3 * MIB))


async def test_a_dead_receiver(failures: list[MeshFailure], monarch_procs: MonarchProcs) -> None:
    """With loans out and copies under way: they end with it, and its memory is no longer waited for."""
    procs = monarch_procs(2)
    lost, other = procs.slice(procs=0).spawn("lost", Keeper), procs.slice(procs=1).spawn("other", Keeper)
    await until_lent(lost)
    await lost.use.call_one({"held": True})
    for byte in range(3):
        await lost.keep.call_one(value(byte))
    pid = await lost.pid.call_one()
    waiting = lost.waits.call_one(value(3))
    assert statistics_here()["loans"] >= 3
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorDied):
        await waiting
    del waiting
    await all_back()
    await until_lent(other)
    assert "device" == await other.way.call_one(value(1))


async def test_a_dead_sender(failures: list[MeshFailure], monarch_procs: MonarchProcs) -> None:
    """What it had lent is unmapped when no copy is under way from it; what has arrived stays."""
    procs = monarch_procs(2)
    sender, keeper = procs.slice(procs=0).spawn("sender", Keeper), procs.slice(procs=1).spawn("keeper", Keeper)
    async with asyncio.timeout(10):
        while "device" != await sender.send_on.call_one(keeper, value(1)):
            pass
    await until_lent(keeper)
    await keeper.keep.call_one(value(5))
    assert (await keeper.statistics.call_one())["mapped"] >= 2
    mine = len(pool._ledger.segments)
    os.kill(await sender.pid.call_one(), signal.SIGKILL)
    async with asyncio.timeout(10):
        while mine < (await keeper.statistics.call_one())["mapped"]:
            pass
    assert [5] == await keeper.first.call_one()


async def test_what_is_read_after_its_sender_has_died(failures: list[MeshFailure], monarch_procs: MonarchProcs) -> None:
    """It was open when it came, and is unmapped when it has been taken."""
    procs = monarch_procs(2)
    sender, keeper = procs.slice(procs=0).spawn("sender", Keeper), procs.slice(procs=1).spawn("keeper", Keeper)
    async with asyncio.timeout(10):
        while "device" != await sender.send_on.call_one(keeper, value(1)):
            pass
    pid = await sender.pid.call_one()
    running = keeper.waits.call_one(None)
    await sender.send_notes.call_one(keeper, 3)  # behind what runs, in a segment that is new there
    await sender.first.call_one()
    os.kill(pid, signal.SIGKILL)
    await until(lambda: failures)
    running.cancel()
    assert ["device 0", "device 1", "device 2"] == await keeper.notes.call_one()
    async with asyncio.timeout(10):
        while (await keeper.statistics.call_one())["mapped"]:
            pass


async def test_messages_that_nobody_reads_give_back(monarch_procs: MonarchProcs) -> None:
    """Cancelled while queued, and for an actor that has ended."""
    procs = monarch_procs(1)
    keeper, ended = procs.spawn("keeper", Keeper), procs.spawn("ended", Keeper)
    await until_lent(keeper)
    running = keeper.waits.call_one(value(1))
    queued = [keeper.echo.call_one(value(2)) for _ in range(3)]
    await asyncio.sleep(0)
    for call in (*queued, running):
        call.cancel()
    await asyncio.wait([*queued, running])
    await ended.stop()
    with pytest.raises(ActorDied):
        await ended.echo.call_one(value(3))
    del running, queued, call
    await keeper.statistics.call_one()
    await all_back()


async def test_threads_and_retries(monarch_procs: MonarchProcs) -> None:
    """From `def` endpoints, from threads of the program, and with `retry`: by the device too, with the bytes at the call."""
    procs = monarch_procs(2)
    one, other = procs.slice(procs=0).spawn("one", Keeper), procs.slice(procs=1).spawn("other", Keeper)
    await until_lent(one)
    ways = await one.send_from_thread.call_one(other, value(1), 20)
    assert "device" == ways[-1]

    def send() -> Any:
        sent = value(4)
        call = one.keep.call_one(sent)
        sent.data[:] = bytes(MIB)
        return call

    assert "device" == await (await asyncio.to_thread(send))
    sent = value(6)
    call = one.keep.options(retry=1).call_one(sent)
    sent.data[:] = bytes(MIB)
    assert "device" == await call
    assert [4, 6] == await one.first.call_one()
    del call
    await all_back()


async def test_through_the_tree(through_tree: None, monarch_procs: MonarchProcs) -> None:
    """An agent opens nothing: what goes by it goes by host memory, and the answers too; what goes directly is not affected."""
    keepers = monarch_procs(3).spawn("keepers", Keeper)
    one = keepers.slice(procs=0)
    await one.first.call_one()
    await until_lent(one)
    for byte in range(2):
        assert ["host"] * 3 == list((await keepers.keep.call(value(byte))).values())
        assert [value(byte)] * 3 == list((await keepers.echo.call(value(byte))).values())
        assert "device" == await one.way.call_one(value(9))
    assert [[0, 1]] * 3 == list((await keepers.first.call()).values())
    await all_back()


async def test_within_a_process_it_is_a_copy_there(monarch_procs: MonarchProcs) -> None:
    """Nothing is lent, and nothing goes by host memory; what is mapped is what this program has asked about."""
    keepers = monarch_procs(1)
    one, other = keepers.spawn("one", Keeper), keepers.spawn("other", Keeper)
    await other.first.call_one()
    assert "here" == await one.send_on.call_one(other, value(1))
    assert {"bytes": 0, "blocks": 0, "loans": 0, "mapped": 1, "staged": 0} == await one.statistics.call_one()


async def test_beside_a_function_within_a_process(monarch_procs: MonarchProcs) -> None:
    """What has to be pickled by value does not make it a loan, though others could have one."""
    await until_lent(monarch_procs(1).spawn("keeper", Keeper))
    echoed, _ = await this_proc().spawn("here", Keeper).echo.call_one([value(1), lambda: 1])
    assert (value(1), "here") == (echoed, echoed.way)


async def test_what_can_not_be_opened_after_all_fails_alone(monarch_procs: MonarchProcs) -> None:
    """With a `DecodeError` that says why; the loan comes back, and the next message arrives."""
    keeper = monarch_procs(1).spawn("keeper", Keeper)
    await until_lent(keeper)
    await keeper.use.call_one({"opens": False})
    with pytest.raises(DecodeError, match="invalid device context"):
        await keeper.echo.call_one(value(1, 3 * MIB))
    await keeper.statistics.call_one()
    await all_back()
    await keeper.use.call_one({"opens": True})
    assert value(2, 3 * MIB) == await keeper.echo.call_one(value(2, 3 * MIB))


def test_unknown_ways_are_refused() -> None:
    """With those that there are."""
    with pytest.raises(ValueError, match="option 'cuda_ipc' must be one of auto, always, never, not 'sometimes'"):
        Options(cuda_ipc="sometimes")
    with pytest.raises(ValueError, match="option 'cuda_ipc_bytes' must be positive, got 0"):
        Options(cuda_ipc_bytes=0)


@pytest.fixture
def mode(request: pytest.FixtureRequest) -> Iterator[str]:
    """For runtimes that are started from now on. Ask for it before any place."""
    configure(cuda_ipc=request.param)
    yield request.param
    configure(cuda_ipc=Options().cuda_ipc)


@pytest.mark.parametrize("mode", ["never"], indirect=True)
async def test_forbidden(mode: str, monarch_procs: MonarchProcs, caplog: pytest.LogCaptureFixture) -> None:
    """Host memory, without a word."""
    keeper = monarch_procs(1).spawn("keeper", Keeper)
    for _ in range(4):
        assert "host" == await keeper.way.call_one(value(1))
    assert [] == caplog.records
    assert 0 == statistics_here()["bytes"]


@pytest.mark.parametrize("mode", ["always"], indirect=True)
async def test_forced(mode: str, monarch_procs: MonarchProcs) -> None:
    """Once a process has said that it can't, or there is no room, a message is refused at the call; others are not affected."""
    procs = monarch_procs(2)
    can, can_not = procs.slice(procs=0).spawn("can", Keeper), procs.slice(procs=1).spawn("can_not", Keeper)
    await can_not.use.call_one({"opens": False})
    await can_not.echo.call_one(value(1))
    await until(lambda: lending_here().on_devices._refusals)
    with pytest.raises(ChannelError, match=r"can't be lent memory of a CUDA device: invalid device context; the option cuda_ipc='always'"):
        await can_not.echo.call_one(value(1))
    assert "small" == await can_not.echo.call_one("small")
    await until_lent(can)
    assert "device" == await can.way.call_one(value(1))
    pool.limit = MIB
    with pytest.raises(MemoryError, match="would pass the bound of 1048576; the option cuda_ipc='always' forbids"):
        await can.echo.call_one(value(1, 3 * MIB))


async def test_a_question_that_is_lost_is_asked_again(monarch_procs: MonarchProcs, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a while, with the next message; an answer that nobody waits for changes nothing."""
    monkeypatch.setattr(device_lending, "AGAIN", 0.05)
    answered = DeviceLending._answered
    lost: list[Any] = []
    monkeypatch.setattr(DeviceLending, "_answered", lambda self, *answer: lost.append(answer))
    keeper = monarch_procs(1).spawn("keeper", Keeper)
    await keeper.first.call_one()  # now there is a connection
    await keeper.echo.call_one(value(1))
    await until(lambda: lost)
    on_devices = lending_here().on_devices
    on_devices._asked.clear()
    answered(on_devices, *lost[0])
    assert not pool._takers
    monkeypatch.undo()
    on_devices._runtime.kinds[lost[0][1][0]] = on_devices._answered
    await until_lent(keeper)
