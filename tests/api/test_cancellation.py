"""Giving up: by cancel, by a timeout around the await, by a deadline; running, queued or in a thread; here and in another process."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest

from monarch_async import Actor, CallTimeout, ProcMesh, concurrent_endpoint, context, endpoint, this_proc
from tests.api.waiting import until


class Slow(Actor):
    def __init__(self) -> None:
        self.log: list[str] = []
        self.changed = asyncio.Event()

    def note(self, text: str) -> None:
        self.log.append(text)
        self.changed.set()

    @endpoint
    async def sleep(self, name: str = "sleep") -> None:
        self.note(f"{name} began")
        try:
            await asyncio.sleep(30)
        finally:
            self.note(f"{name} ended")

    @concurrent_endpoint
    async def sleep_beside(self, name: str) -> None:
        self.note(f"{name} began")
        try:
            await asyncio.sleep(30)
        finally:
            self.note(f"{name} ended")

    @concurrent_endpoint
    async def bad_cleanup(self) -> None:
        self.note("began")
        try:
            await asyncio.sleep(30)
        finally:
            raise KeyError("in cleanup")

    @endpoint
    async def keeps_on(self) -> str:
        self.note("began")
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            return "done all the same"
        return "slept"

    @endpoint
    def in_thread(self) -> None:
        self.log.append("thread began")
        while not context().cancelled:
            time.sleep(0.001)
        self.log.append("thread saw it")

    @concurrent_endpoint
    async def until(self, *texts: str) -> list[str]:
        """The log, once all these are in it."""
        while not set(texts) <= set(self.log):
            self.changed.clear()
            try:
                await asyncio.wait_for(self.changed.wait(), 0.02)
            except TimeoutError:
                continue  # a thread does not set the event
        return self.log

    @concurrent_endpoint
    async def at_length(self, length: int) -> list[str]:
        await until(lambda: len(self.log) >= length)
        return self.log


async def test_case_8_a_timeout_around_the_await_cancels_the_handler(place: ProcMesh) -> None:
    """The caller times out in time, and the handler's `finally` has run well within a second more."""
    actor = place.spawn("actor", Slow)
    await actor

    began = time.monotonic()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await actor.sleep.call_one()
    assert 0.29 <= time.monotonic() - began < 0.6
    assert ["sleep began", "sleep ended"] == await actor.until.call_one("sleep ended")
    assert time.monotonic() - began < 1.3


async def test_case_8_an_error_in_the_cleanup_is_reported(place: ProcMesh, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody waits for the answer any more: it is logged, and the actor goes on."""
    actor = place.spawn("actor", Slow)

    future = actor.bad_cleanup.call_one()
    await actor.until.call_one("began")
    future.cancel()
    await until(lambda: caplog.records)
    assert [(logging.ERROR, True)] == [(record.levelno, "KeyError: 'in cleanup'" in record.getMessage()) for record in caplog.records]
    assert ["began"] == await actor.until.call_one()


async def test_every_way_to_give_up_reaches_the_handler(place: ProcMesh) -> None:
    """future.cancel(), wait_for, cancelling the task or the gather that awaits, the endpoint's own timeout."""
    actor = place.spawn("actor", Slow)
    await actor
    expected: list[str] = []
    for how in ("cancel", "wait_for", "task", "gather", "options"):
        future = (actor.sleep_beside if how != "options" else actor.sleep_beside.options(timeout=0.3)).call_one(how)
        await actor.until.call_one(f"{how} began")

        if how == "cancel":
            assert future.cancel()
            assert not future.cancel()
        elif how == "wait_for":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(future, 0.01)
        elif how == "options":
            with pytest.raises(CallTimeout):
                await future
        else:
            waiting: asyncio.Future[Any] = asyncio.gather(future) if how == "gather" else asyncio.ensure_future(_wait(future))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        assert future.cancelled() or how == "options"
        expected += [f"{how} began", f"{how} ended"]
        assert expected == await actor.until.call_one(f"{how} ended")


async def _wait(future: asyncio.Future[Any]) -> Any:
    return await future


async def test_a_queued_call_that_is_given_up_never_begins(place: ProcMesh) -> None:
    """Behind another one it is dropped, and what comes after it is handled."""
    actor = place.spawn("actor", Slow)
    await actor

    first, second, third = actor.sleep.call_one("first"), actor.sleep.call_one("second"), actor.until.call_one("first ended")
    second.cancel()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(first, 0.2)
    assert ["first began", "first ended"] == await third


async def test_a_concurrent_call_that_is_given_up_before_its_first_step_settles(place: ProcMesh) -> None:
    """Its task would be cancelled before it ran, and so never answer nor leave the list of those that run."""
    actor = place.spawn("actor", Slow)
    await actor

    for number in range(20):
        future = actor.sleep_beside.call_one(str(number))
        if number % 2:
            await asyncio.sleep(0)
        future.cancel()
    runtime = actor._runtime  # type: ignore[attr-defined]
    assert isinstance(await actor.until.call_one(), list)
    await until(lambda: not runtime.local_calls and not any(link.pending for peer in runtime.peers.values() for link in peer.links))


async def test_a_handler_that_does_not_stop_when_told(place: ProcMesh) -> None:
    """It may catch the cancellation and return: the caller is gone all the same, and the next call is handled."""
    actor = place.spawn("actor", Slow)
    await actor
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await actor.keeps_on.call_one()
    assert ["began"] == await actor.until.call_one("began")


async def test_a_def_endpoint_sees_that_it_is_cancelled(place: ProcMesh) -> None:
    """context().cancelled turns true in the thread."""
    actor = place.spawn("actor", Slow)
    await actor
    future = actor.in_thread.call_one()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(future, 0.1)
    assert ["thread began", "thread saw it"] == await actor.until.call_one("thread saw it")


async def test_cancelling_a_call_on_a_mesh_cancels_every_member(pair: ProcMesh) -> None:
    """Both handlers are told."""
    actors = pair.spawn("actors", Slow)
    future = actors.sleep_beside.call("it")
    await actors.until.call("it began")
    future.cancel()
    assert [["it began", "it ended"]] * 2 == list((await actors.until.call("it ended")).values())


async def test_a_stream_given_up_half_way_cancels_the_rest(pair: ProcMesh) -> None:
    """Breaking out of the loop cancels what has not answered."""
    actors = pair.spawn("actors", HalfSlow)
    await actors
    async for value in actors.work.stream():
        assert 0 == value
        break
    assert "ended" == await actors.slice(gpus=1).outcome.call_one()


class HalfSlow(Actor):
    """Rank 0 answers soon, rank 1 never."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    @concurrent_endpoint
    async def work(self) -> int:
        if context().message_rank.rank:
            try:
                await asyncio.sleep(30)
            finally:
                self.ended.set()
        await asyncio.sleep(0.2)  # the other one has begun by then
        return 0

    @concurrent_endpoint
    async def outcome(self) -> str:
        await asyncio.wait_for(self.ended.wait(), 5)
        return "ended"


class Relay(Actor):
    """Calls on, to see what becomes of the deadline and the cancellation."""

    def __init__(self, slow: Slow) -> None:
        self.slow = slow
        self.background: asyncio.Task[Any] | None = None

    @endpoint
    async def pass_on(self) -> None:
        await self.slow.sleep_beside.call_one("inner")

    @endpoint
    def wait_in_thread(self) -> None:
        self.slow.sleep_beside.call_one("inner").get()

    @endpoint
    async def in_background(self) -> None:
        self.background = asyncio.create_task(self.later())

    async def later(self) -> Any:
        await asyncio.sleep(0.2)
        return await self.slow.until.call_one()

    @endpoint
    async def outcome(self) -> Any:
        assert self.background is not None
        return await self.background


async def test_deadlines_and_cancellations_are_inherited(pair: ProcMesh) -> None:
    """The inner handler of a chain of two is stopped when the outer call's time is up, or its caller gives up."""
    slow = pair.slice(gpus=1).spawn("slow", Slow)
    relay = pair.slice(gpus=0).spawn("relay", Relay, slow)
    await asyncio.gather(slow.initialized, relay.initialized)

    with pytest.raises(CallTimeout):
        await relay.pass_on.options(timeout=0.2).call_one()
    assert ["inner began", "inner ended"] == await slow.until.call_one("inner ended")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(relay.pass_on.call_one(), 0.2)
    assert ["inner began", "inner ended"] * 2 == await slow.at_length.call_one(4)


async def test_what_a_cancelled_handlers_thread_waits_for_is_cancelled(pair: ProcMesh) -> None:
    """A `def` handler that is blocked in `get` is woken when its caller gives up or its time is up, and so is the one it waits for."""
    slow = pair.slice(gpus=1).spawn("slow", Slow)
    relay = pair.slice(gpus=0).spawn("relay", Relay, slow)
    for times in (1, 2):
        call = relay.wait_in_thread.options(timeout=0.3 if times == 2 else None).call_one()
        assert ["inner began"] == (await slow.at_length.call_one(2 * times - 1))[-1:]
        if times == 1:
            call.cancel()
        with pytest.raises((asyncio.CancelledError, CallTimeout)):
            await call
        assert ["inner began", "inner ended"] * times == await slow.at_length.call_one(2 * times)
    with pytest.raises(AssertionError):  # its thread is free
        await relay.outcome.call_one()


async def test_a_background_task_does_not_inherit_the_deadline_of_the_handler_that_left_it(place: ProcMesh) -> None:
    """The handler has answered in time; what its task calls later is none of that call."""
    slow = this_proc().spawn("slow", Slow)
    relay = place.spawn("relay", Relay, slow)
    await relay

    await relay.in_background.options(timeout=0.1).call_one()
    assert [] == await relay.outcome.call_one()


async def test_a_local_deadline_is_a_call_timeout(caplog: pytest.LogCaptureFixture) -> None:
    """In one process both sides watch the clock; the handler's cancellation must not be taken for its answer."""
    actor = this_proc().spawn("actor", Slow)
    for _ in range(20):
        with pytest.raises(CallTimeout):
            await actor.sleep.options(timeout=0.01).call_one()
    assert [] == caplog.records
