"""What code can know about where it runs: in handlers, constructors, cleanups, threads, and in the program itself."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any

import pytest

from monarch_async import (
    Actor,
    ActorDied,
    MeshFailure,
    ProcMesh,
    UsageError,
    context,
    current_actor_name,
    current_rank,
    endpoint,
    this_proc,
)
from tests.api.waiting import until

mark: contextvars.ContextVar[str] = contextvars.ContextVar("mark", default="none")


class Aware(Actor):
    def __init__(self, told: Any = None) -> None:
        self.at_birth = (context().actor_instance.name, context().message_rank.rank)
        self.told = told

    @endpoint
    async def names(self) -> tuple[Any, str, int, str]:
        me = context().actor_instance
        return self.at_birth, current_actor_name(), me.proc_mesh.size(), me.class_name

    @endpoint
    async def set_mark(self, value: str) -> str:
        before = mark.get()
        mark.set(value)
        return before

    @endpoint
    async def background(self) -> str:
        return await asyncio.create_task(self.later())

    async def later(self) -> str:
        await asyncio.sleep(0)
        return current_actor_name()

    @endpoint
    async def end(self, how: str) -> str:
        me = context().actor_instance
        (me.stop if how == "stop" else me.abort)("had enough")
        return "ended"

    async def __cleanup__(self, error: BaseException | None) -> None:
        if self.told is not None:
            await self.told.take.call_one(current_actor_name())


class Told(Actor):
    def __init__(self) -> None:
        self.names: list[str] = []

    @endpoint
    async def take(self, name: str) -> None:
        self.names.append(name)

    @endpoint
    async def all(self) -> list[str]:
        return self.names


async def test_an_actor_knows_itself_everywhere(place: ProcMesh) -> None:
    """In its constructor, its handlers, their tasks, and in its cleanup, where it was taken for the program."""
    told = this_proc().spawn("told", Told)
    actor = place.spawn("actor", Aware, told)

    assert (("actor", 0), "actor", 1, "Aware") == await actor.names.call_one()
    assert "actor" == await actor.background.call_one()
    await actor.stop()
    assert ["actor"] == await told.all.call_one()


async def test_handlers_of_an_actor_share_their_context_variables(place: ProcMesh) -> None:
    """As if the actor were one long task; other actors and the program have their own."""
    one, two = place.spawn("one", Aware), place.spawn("two", Aware)
    assert ["none", "a"] == [await one.set_mark.call_one("a"), await one.set_mark.call_one("b")]
    assert "none" == await two.set_mark.call_one("c")
    assert "none" == mark.get()


async def test_the_program_itself_is_the_client() -> None:
    """It has a name, no dimensions, and can't stop itself as an actor can."""
    assert ("client", 0, "client") == (context().actor_instance.name, current_rank().rank, current_actor_name())
    assert not context().cancelled
    with pytest.raises(UsageError, match="only an actor can stop itself"):
        context().actor_instance.stop()


@pytest.mark.parametrize("how", ["stop", "abort"])
async def test_an_actor_ends_itself_once_its_handler_has_ended(place: ProcMesh, failures: list[MeshFailure], how: str) -> None:
    """The handler answers, what is queued behind it is refused; an abort is a failure that its owner hears of, a stop is none."""
    actor = place.spawn("actor", Aware)
    ended, queued = actor.end.call_one(how), actor.names.call_one()
    assert "ended" == await ended
    if how == "stop":
        with pytest.raises(ActorDied, match="stopped: had enough"):
            await queued
        assert [] == failures
    else:
        queued.cancel()
        await until(lambda: failures)
        assert ["RuntimeError in abort: had enough"] == [told.reason for told in failures]
        with pytest.raises(ActorDied, match="had enough"):
            await actor.names.call_one()
