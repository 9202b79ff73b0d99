"""Ends that drag on, and what was never there: each is bounded in time, and whoever waits is told."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from monarch_async import Actor, ActorDied, MeshFailure, Port, ProcMesh, SpawnError, configure, endpoint, this_proc
from monarch_async.options import Options
from tests.api.waiting import until


@pytest.fixture
def impatient() -> Iterator[None]:
    """Short limits, in runtimes that are started from now on. Ask for it before any place."""
    before = Options()
    configure(cleanup_timeout=0.3, unknown_grace=0.3)
    yield
    configure(cleanup_timeout=before.cleanup_timeout, unknown_grace=before.unknown_grace)


class Stubborn(Actor):
    @endpoint
    def blocks(self) -> None:
        threading.Event().wait(2)

    @endpoint
    async def pid(self) -> int:
        return 1


class HangingCleanup(Stubborn):
    async def __cleanup__(self, error: BaseException | None) -> None:
        await asyncio.sleep(60)


async def test_a_cleanup_that_hangs_is_given_up_and_reported(impatient: None, caplog: pytest.LogCaptureFixture) -> None:
    """After the option cleanup_timeout; the stop then returns."""
    actor = this_proc().spawn("actor", HangingCleanup)
    await actor
    async with asyncio.timeout(2):
        await actor.stop()
    assert [(logging.ERROR, "actor[0]: __cleanup__ did not end within the option cleanup_timeout=0.3 s")] == [
        (record.levelno, record.getMessage()) for record in caplog.records
    ]


async def test_the_caller_of_a_handler_that_does_not_end_is_told_when_its_actor_is_stopped(impatient: None, place: ProcMesh) -> None:
    """It would wait as long as the handler does, for ever perhaps."""
    actor: Any = place.spawn("actor", Stubborn)
    await actor
    call = actor.blocks.call_one()
    await asyncio.sleep(0.1)
    async with asyncio.timeout(1.5):
        await actor.stop()
        with pytest.raises(ActorDied, match=r"stopped \(its handler had started\)"):
            await call
        with pytest.raises(ActorDied, match="stopped"):
            await actor.pid.call_one()


async def test_an_actor_that_never_existed(impatient: None, place: ProcMesh) -> None:
    """A message for it is kept for the option unknown_grace, then refused; given up before, it is dropped and nothing stays behind."""
    actor: Any = place.spawn("actor", Stubborn)
    await actor
    stranger: Any = actor.slice()
    stranger._key += 1
    given_up = stranger.pid.call_one()
    await asyncio.sleep(0)
    given_up.cancel()
    async with asyncio.timeout(2):
        with pytest.raises(ActorDied, match=r"never existed here: nobody spawned it within the option unknown_grace=0\.3 s"):
            await stranger.pid.call_one()
    runtime = stranger._runtime
    await until(lambda: not runtime.local_calls and not any(link.pending for peer in runtime.peers.values() for link in peer.links))


async def test_a_mesh_that_failed_keeps_its_reason_when_it_is_stopped(place: ProcMesh, failures: list[MeshFailure]) -> None:
    """Stopping what is gone already must not make it look as if it had been stopped before it was spawned."""
    actor = place.spawn("actor", Failing)
    actor.fail.broadcast()
    await until(lambda: failures)
    await actor.stop()
    with pytest.raises(ActorDied, match="RuntimeError in fail: failed"):
        await actor.fail.call_one()


class Failing(Actor):
    @endpoint
    async def fail(self) -> None:
        raise RuntimeError("failed")


async def test_two_meshes_of_one_name_are_told_apart(pair: ProcMesh, failures: list[MeshFailure]) -> None:
    """Stopping one must not make the failures of the other go unheard."""
    one, other = pair.spawn("same", Failing), pair.spawn("same", Failing)
    await asyncio.gather(one.initialized, other.initialized)
    await one.stop()
    other.slice(gpus=0).fail.broadcast()
    await until(lambda: failures)
    assert [("same", (0,))] == [(told.mesh, told.ranks) for told in failures]


async def test_case_19_a_spawn_while_its_owner_is_being_stopped(place: ProcMesh) -> None:
    """Refused with a clear error, in the handler that is being cancelled and in the cleanup; nothing is left."""
    notes = this_proc().spawn("notes", Notes)
    owner = place.spawn("owner", LateSpawner, notes)
    await owner
    call = owner.wait.call_one()
    await asyncio.sleep(0.1)
    await owner.stop()
    assert ["late was not spawned: its owner is being stopped"] * 2 == await notes.all.call_one()
    with pytest.raises(ActorDied):
        await call


class LateSpawner(Actor):
    def __init__(self, notes: Any) -> None:
        self.notes = notes

    @endpoint
    async def wait(self) -> None:
        try:
            await asyncio.sleep(30)
        finally:
            await self.try_to_spawn()

    async def __cleanup__(self, error: BaseException | None) -> None:
        await self.try_to_spawn()

    async def try_to_spawn(self) -> None:
        try:
            this_proc().spawn("late", Stubborn)
        except SpawnError as error:
            await self.notes.note.call_one(str(error))


class Notes(Actor):
    def __init__(self) -> None:
        self.notes: list[str] = []

    @endpoint
    async def note(self, text: str) -> None:
        self.notes.append(text)

    @endpoint
    async def all(self) -> list[str]:
        return self.notes


class AnswersEarly(Actor):
    @endpoint(explicit_response_port=True)
    def answer(self, port: Port[str]) -> None:
        port.send("early")
        threading.Event().wait(0.3)


async def test_a_stop_during_a_handler_that_has_answered_ends_with_it(place: ProcMesh) -> None:
    """There is nothing left to cancel, but the actor ends when the handler does: not at the limit, and without its task left behind."""
    actor = await place.spawn("actor", AnswersEarly)
    assert "early" == await actor.answer.call_one()
    began = time.monotonic()
    await actor.stop()
    assert time.monotonic() - began < 2.0  # the option cleanup_timeout is 3 s
