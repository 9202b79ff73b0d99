"""Endpoints and adverbs: what may be called, how, and what is refused at the call."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from monarch_async import (
    Actor,
    ActorError,
    Extent,
    Port,
    PortClosed,
    ProcMesh,
    as_endpoint,
    concurrent_endpoint,
    context,
    current_rank,
    current_size,
    endpoint,
    this_proc,
)


class Base(Actor):
    def __init__(self, start: int = 0, *, step: int = 1) -> None:
        self.value = start
        self.step = step

    @endpoint
    async def add(self, number: int = 1, /, *, times: int = 1) -> int:
        self.value += number * times * self.step
        return self.value

    @endpoint
    async def name(self) -> str:
        return "base"

    async def plain(self, text: str, twice: bool = False) -> str:
        return text * (1 + twice)

    def plain_sync(self) -> int:
        return self.value

    def answers(self, port: Port[str], text: str) -> None:
        port.send(text)


class Derived(Base):
    @endpoint
    async def name(self) -> str:
        return f"derived from {await super().name()}"

    @endpoint
    async def where(self) -> tuple[str, int, dict[str, int], dict[str, int], str, str]:
        here = context()
        me = here.actor_instance
        return repr(here.message_rank), current_rank().rank, current_size(), dict(me.rank), me.name, me.class_name


async def test_every_adverb_on_a_single_actor(place: ProcMesh) -> None:
    """call, call_one, choose, stream and broadcast reach the one actor, in program order."""
    actor = place.spawn("actor", Base, 10, step=2)

    sent = actor.add.broadcast(1)
    first = actor.add.call_one(2, times=3)
    second = actor.add.call()
    third = actor.add.choose(0)
    stream = actor.add.stream(0)

    await sent
    assert 24 == await first
    assert [26] == list((await second).values())
    assert 26 == await third
    assert [26] == [value async for value in stream]


async def test_every_adverb_on_several_actors(pair: ProcMesh) -> None:
    """Each member gets the message once; call keeps the order of the points, choose takes one of them."""
    actors = pair.spawn("actors", Base)

    await actors.add.broadcast(5)
    result = await actors.add.call(1)
    assert Extent(["gpus"], [2]) == result.extent
    assert [6, 6] == list(result.values())
    assert [6, 6] == [value async for value in actors.add.stream(0)]
    assert [6, 6] == [await future for future in actors.add.stream(0)]
    await actors.slice(gpus=1).add.call_one(10)
    assert {6, 16} == {await actors.add.choose(0) for _ in range(64)}


async def test_call_one_needs_a_single_member(pair: ProcMesh) -> None:
    """On several, it is a ValueError that says what to do, and nothing is sent."""
    actors = pair.spawn("actors", Base)

    with pytest.raises(ValueError, match="call_one needs a single actor, and actors has 2: slice it"):
        actors.add.call_one(1)
    assert [0, 0] == list((await actors.add.call(0)).values())


async def test_wrong_arguments_are_refused_at_the_call(place: ProcMesh) -> None:
    """By every adverb: TypeError, before anything is sent. The actor never hears of it."""
    actor: Any = place.spawn("actor", Base)

    for heard, adverb in enumerate(["call", "call_one", "choose", "stream", "broadcast"], 1):
        send = getattr(actor.add, adverb)
        with pytest.raises(TypeError, match="positional"):
            send(1, 2)
        with pytest.raises(TypeError, match="unexpected keyword argument 'tims'"):
            send(tims=3)
        with pytest.raises(TypeError, match="can't send args"):
            send(threading.Lock())
        assert heard == await actor.add.call_one(), adverb


async def test_an_endpoint_that_does_not_exist(place: ProcMesh) -> None:
    """AttributeError that lists those that do, on the mesh and, where the class isn't known, at the other side."""
    actor: Any = place.spawn("actor", Base)

    with pytest.raises(AttributeError, match=r"Base has no endpoint 'ad'; it has add, name"):
        actor.ad  # noqa: B018
    with pytest.raises(TypeError, match="plain is no endpoint"):
        actor.plain("x")
    with pytest.raises(TypeError, match=r"is an endpoint of a mesh: use \.call"):
        actor.add(1)


async def test_members_know_where_they_are(pair: ProcMesh) -> None:
    """message_rank is the place in the addressed slice, actor_instance.rank that at spawn."""
    actors = pair.spawn("actors", Derived)

    assert [
        ("{'gpus': 0/2}", 0, {"gpus": 2}, {"gpus": 0}, "actors", "Derived"),
        ("{'gpus': 1/2}", 1, {"gpus": 2}, {"gpus": 1}, "actors", "Derived"),
    ] == list((await actors.where.call()).values())
    assert ("{}", 0, {}, {"gpus": 1}, "actors", "Derived") == await actors.slice(gpus=1).where.call_one()
    assert [("{'gpus': 0/1}", 0, {"gpus": 1}, {"gpus": 1}, "actors", "Derived")] == list(
        (await actors.slice(gpus=slice(1, 2)).where.call()).values()
    )
    assert ("{'a': 0/1, 'b': 1/2}", 1, {"a": 1, "b": 2}, {"gpus": 1}, "actors", "Derived") == (
        await actors.split(gpus=("a", "b"), a=1).where.call()
    ).item(a=0, b=1)


async def test_inherited_and_overridden_endpoints(place: ProcMesh) -> None:
    """A subclass has its base's endpoints and may override them, and call the base's method."""
    actor = place.spawn("actor", Derived, 3)

    assert "derived from base" == await actor.name.call_one()
    assert 4 == await actor.add.call_one()


async def test_plain_methods_as_endpoints(place: ProcMesh) -> None:
    """as_endpoint calls a method without a mark, checked as strictly; with a response port if asked for."""
    actor: Any = place.spawn("actor", Base, 7)

    assert "abab" == await as_endpoint(actor.plain).call_one("ab", twice=True)
    assert 7 == await as_endpoint(actor.plain_sync).call_one()
    assert "x" == await as_endpoint(actor.answers, explicit_response_port=True).call_one("x")
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'text'"):
        as_endpoint(actor.plain).call_one()
    with pytest.raises(TypeError, match="as_endpoint takes a method reached through a mesh"):
        as_endpoint(Base.plain)


def bad_generator(self: Any) -> Any:
    yield 1


@pytest.mark.parametrize(
    ("decorate", "message"),
    [
        (lambda: endpoint(Base.add), "is an endpoint already"),  # type: ignore[call-overload]
        (lambda: endpoint(bad_generator), "is a generator"),
        (lambda: endpoint(staticmethod(bad_generator)), "a method with 'self'"),
        (lambda: endpoint(3), "a method with 'self'"),  # type: ignore[call-overload]
        (lambda: concurrent_endpoint(Base.plain_sync), "async def"),  # type: ignore[arg-type]
    ],
)
def test_what_can_be_no_endpoint_is_refused_where_it_is_marked(decorate: Callable[[], Any], message: str) -> None:
    """The decorator itself raises TypeError, so that the line that is wrong is in the traceback."""
    with pytest.raises(TypeError, match=message):
        decorate()


def test_an_override_that_lost_its_mark_is_refused_with_the_class() -> None:
    """Otherwise the endpoint would silently be the base's or none."""
    with pytest.raises(TypeError, match=r"Lost\.name overrides an endpoint but is none: mark it with @endpoint"):

        class Lost(Base):
            async def name(self) -> str:  # type: ignore[override]
                return "lost"


@pytest.mark.parametrize("name", ["stop", "slice", "size", "initialized", "_private"])
def test_an_endpoint_that_could_not_be_reached_is_refused_with_the_class(name: str) -> None:
    """A mesh has methods of its own: an endpoint of the same name would be hidden by them."""

    async def method(self: Any) -> None: ...

    method.__name__ = name
    with pytest.raises(TypeError, match=f"{name}.* can't be the name of an endpoint"):
        type("Hidden", (Actor,), {name: endpoint(method)})


async def test_a_class_that_can_not_be_spawned(place: ProcMesh) -> None:
    """TypeError at spawn: for an instance, another class, a port that is missing, arguments that don't fit the constructor."""

    class NoPort(Actor):
        @endpoint(explicit_response_port=True)  # type: ignore[arg-type]
        async def answer(self) -> None: ...

    spawn: Any = place.spawn
    with pytest.raises(TypeError, match="spawn takes a class"):
        spawn("x", Base())  # type: ignore[abstract]
    with pytest.raises(TypeError, match="int is no Actor"):
        spawn("x", int)
    with pytest.raises(TypeError, match=r"takes no argument for the actor itself|port"):
        spawn("x", NoPort)
    with pytest.raises(TypeError, match="unexpected keyword argument 'stop'"):
        spawn("x", Base, stop=3)
    with pytest.raises(TypeError, match="a mesh needs a name"):
        spawn("", Base)
    with pytest.raises(TypeError, match="can't send"):
        spawn("x", Base, threading.Lock())


class Meeting(Actor):
    """Concurrent endpoints that can only end together."""

    def __init__(self) -> None:
        self.began: list[int] = []
        self.all_here = asyncio.Event()

    @concurrent_endpoint
    async def attend(self, number: int, of: int) -> list[int]:
        self.began.append(number)
        if len(self.began) == of:
            self.all_here.set()
        await self.all_here.wait()
        return self.began

    @endpoint
    async def count(self) -> int:
        return len(self.began)


async def test_concurrent_endpoints_start_in_order_and_overlap(place: ProcMesh) -> None:
    """Ten calls, each of which waits for the last one to begin; a plain endpoint runs between."""
    meeting = place.spawn("meeting", Meeting)

    calls = [meeting.attend.call_one(number, 10) for number in range(9)]
    assert 9 == await meeting.count.call_one()
    calls.append(meeting.attend.call_one(9, 10))
    assert [list(range(10))] * 10 == await asyncio.gather(*calls)


class Answering(Actor):
    def __init__(self) -> None:
        self.kept: list[Port[Any]] = []

    @endpoint(explicit_response_port=True)
    async def now(self, port: Port[int], value: int) -> None:
        port.send(value)

    @endpoint(explicit_response_port=True)
    def from_thread(self, port: Port[int], value: int) -> None:
        port.send(value)

    @endpoint(explicit_response_port=True)
    async def later(self, port: Port[int], value: int) -> None:
        self.kept.append(port)

    @endpoint
    async def release(self) -> None:
        for number, port in enumerate(self.kept):
            port.send(number)
        self.kept.clear()

    @endpoint(explicit_response_port=True)
    async def error(self, port: Port[int]) -> None:
        port.exception(KeyError("by port"))

    @endpoint(explicit_response_port=True)
    async def raises(self, port: Port[int]) -> None:
        raise LookupError("before it answered")

    @endpoint(explicit_response_port=True)
    async def drops(self, port: Port[int]) -> None:
        """Goes without an answer."""

    @endpoint(explicit_response_port=True)
    async def twice(self, port: Port[int]) -> None:
        port.send(1)
        with pytest.raises(PortClosed, match="has been answered"):
            port.send(2)

    @endpoint(explicit_response_port=True)
    async def delegate(self, port: Port[int], other: Any, value: int) -> None:
        other.take.broadcast(port, value)

    @endpoint
    async def take(self, port: Port[int], value: int) -> None:
        port.send(value * 2)


async def test_answers_through_a_port(place: ProcMesh) -> None:
    """At once, later, from the actor's thread, an error; dropped without an answer it is PortClosed, and the actor goes on."""
    actor = place.spawn("actor", Answering)

    assert 1 == await actor.now.call_one(1)
    assert 2 == await actor.from_thread.call_one(2)
    late = [actor.later.call_one(0) for _ in range(3)]
    await actor.release.call_one()
    assert [0, 1, 2] == await asyncio.gather(*late)
    with pytest.raises(KeyError, match="by port"):
        await actor.error.call_one()
    with pytest.raises(LookupError, match="before it answered"):
        await actor.raises.call_one()
    with pytest.raises(PortClosed, match="drops dropped its response port without an answer"):
        await actor.drops.call_one()
    assert 1 == await actor.twice.call_one()
    assert [3] == list((await actor.now.call(3)).values())
    actor.now.broadcast(3)
    assert 4 == await actor.now.call_one(4)


async def test_another_actor_answers_through_the_port(pair: ProcMesh) -> None:
    """A response port that is sent on answers the call from wherever it got."""
    actors = pair.spawn("actors", Answering)
    here = this_proc().spawn("here", Answering)
    first, second = actors.slice(gpus=0), actors.slice(gpus=1)

    assert 42 == await first.delegate.call_one(second, 21)
    assert 44 == await here.delegate.call_one(first, 22)
    assert 46 == await second.delegate.call_one(here, 23)
    assert 48 == await here.delegate.call_one(here, 24)


def traced(function: Any) -> Any:
    """A decorator as people write them: what it returns is no coroutine function any more."""

    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


class Decorated(Actor):
    @endpoint
    @traced
    async def value(self) -> int:
        await asyncio.sleep(0)
        return 5


async def test_a_coroutine_function_behind_a_decorator(place: ProcMesh) -> None:
    """What a wrapped coroutine function returns is awaited instead of being sent as a result, which fails."""
    actor = place.spawn("actor", Decorated)

    assert 5 == await actor.value.call_one()


async def test_an_unknown_endpoint_is_refused_by_the_other_side(place: ProcMesh) -> None:
    """A reference to a class that the sender does not know lists what there is, wherever it is asked."""

    class Local(Actor):
        def __init__(self) -> None: ...

        @endpoint
        async def hidden(self) -> int:
            return 1

    actor = place.spawn("actor", Local)
    user = this_proc().spawn("user", UsesUnknown)
    assert (1, "Local has no endpoint 'hiden'; it has hidden") == await user.use.call_one(actor)


class UsesUnknown(Actor):
    @endpoint
    async def use(self, mesh: Any) -> tuple[int, str]:
        with pytest.raises(AttributeError) as caught:
            mesh.hiden  # noqa: B018
        text = str(caught.value).rpartition(">.")[2]
        with pytest.raises(ActorError):
            await mesh.hidden.call_one(3)
        return await mesh.hidden.call_one(), text
