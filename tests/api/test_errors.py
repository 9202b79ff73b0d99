"""Errors that cross processes: their types, texts and tracebacks; and what can't be sent or read harms only its own call."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from monarch_async import Actor, ActorError, DecodeError, MonarchError, ProcMesh, current_rank, endpoint


class Picky(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class Silent(Exception):
    def __init__(self) -> None:
        super().__init__("nothing given")


class Holder(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class Bomb:
    """Goes off where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _explode, ()


def _explode() -> None:
    raise LookupError("boom")


class Raising(Actor):
    @endpoint
    async def awkward(self, kind: str) -> None:
        if kind == "Picky":
            raise Picky(code=7)
        if kind == "Silent":
            raise Silent
        if kind == "Holder":
            raise Holder("with a lock")
        if kind == "KeyError":
            raise KeyError("k")
        if kind == "SystemExit":
            raise SystemExit(3)
        if kind == "StopIteration":
            raise StopIteration("end")
        if kind == "CancelledError":
            raise asyncio.CancelledError

    @endpoint
    def awkward_in_thread(self, kind: str) -> None:
        if kind == "SystemExit":
            raise SystemExit(3)
        raise StopIteration("end") if kind == "StopIteration" else KeyError("k")

    @endpoint
    async def where(self, rank: int) -> int:
        if current_rank().rank >= rank:
            raise ValueError("too high")
        return current_rank().rank

    @endpoint
    async def ping(self) -> str:
        return "pong"

    @endpoint
    async def take(self, value: Any) -> None: ...

    @endpoint
    async def give(self, what: str) -> Any:
        return threading.Lock() if what == "lock" else Bomb()


async def test_case_6_awkward_exceptions(place: ProcMesh) -> None:
    """Class name, message and remote traceback arrive, as an instance of the type where it can be; the next call is answered."""
    actor = place.spawn("actor", Raising)
    kinds: list[type[Exception]] = [Picky, Silent, Holder, KeyError]
    for kind in kinds:
        with pytest.raises(ActorError) as caught:
            await actor.awkward.call_one(kind.__name__)
        error = caught.value
        assert kind.__qualname__ == error.type_name.rpartition(".")[2]
        assert "in awkward" in error.remote_traceback
        assert "actor[0]" == error.actor
        assert isinstance(error, kind) == (kind is not Holder)
        if isinstance(error, Picky):
            assert 7 == error.code
        assert "pong" == await actor.ping.call_one(), kind


async def test_what_would_stop_a_loop_is_an_error_of_its_call(place: ProcMesh) -> None:
    """It arrives by name; handler, actor and process go on, again and again."""
    actor = place.spawn("actor", Raising)
    for kind, raising in (
        ("SystemExit", actor.awkward),
        ("StopIteration", actor.awkward),
        ("CancelledError", actor.awkward),
        ("SystemExit", actor.awkward_in_thread),
        ("StopIteration", actor.awkward_in_thread),
    ):
        for _ in range(5):
            with pytest.raises(ActorError, match=kind):
                await raising.call_one(kind)
            assert "pong" == await actor.ping.call_one(), kind


@pytest.mark.parametrize("large", [False, True])
async def test_case_7_a_bad_payload_on_a_good_link(place: ProcMesh, large: bool) -> None:
    """One decode error, then a hundred right answers over the same link; and the same for a bad result."""
    actor = place.spawn("actor", Raising)
    await actor
    filler = bytes(1 << 20) if large else b""

    with pytest.raises(DecodeError, match="LookupError: boom"):
        await actor.take.call_one((Bomb(), filler))
    assert ["pong"] * 100 == [await actor.ping.call_one() for _ in range(100)]
    with pytest.raises(DecodeError, match="LookupError: boom"):
        await actor.give.call_one("bomb")
    with pytest.raises(TypeError, match="can't send value"):
        await actor.give.call_one("lock")
    assert ["pong"] * 100 == [await actor.ping.call_one() for _ in range(100)]


async def test_call_fails_fast_and_knows_every_error(pair: ProcMesh) -> None:
    """The first error raises; `.errors` has what is known per point; equal ones are folded in the text."""
    actors = pair.spawn("actors", Raising)
    with pytest.raises(ValueError, match="too high") as caught:
        await actors.where.call(1)
    assert isinstance(caught.value, ActorError)
    assert [1] == [point.rank for point in caught.value.errors]  # type: ignore[attr-defined]
    future = actors.where.call(0)
    with pytest.raises(ValueError, match="too high") as caught:
        await future
    await actors.ping.call()
    assert {0, 1} == {point.rank for point in caught.value.errors}  # type: ignore[attr-defined]
    assert "ranks 0–1: ValueError: too high" in str(caught.value)


async def test_errors_as_values(pair: ProcMesh) -> None:
    """With return_exceptions, call waits for all and has errors in their places; they can be sent on."""
    actors = pair.spawn("actors", Raising)
    values = list((await actors.where.options(return_exceptions=True).call(1)).values())
    assert 0 == values[0]
    assert isinstance(values[1], ValueError)
    assert isinstance(values[1], MonarchError)
    await actors.take.call(values)


async def test_an_error_with_the_errors_of_all_points_can_be_sent_on(pair: ProcMesh) -> None:
    """It is in its own `.errors`: pickling it must not go round in circles."""
    actors = pair.spawn("actors", Raising)
    with pytest.raises(ValueError, match="too high") as caught:
        await actors.where.call(1)
    await actors.take.call(caught.value)
