"""Faults of links: they really happen, and whatever happens, nothing is lost, doubled or out of order for who uses the link."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from monarch_async import Actor, ActorDied, endpoint
from monarch_async._core.framing import DATA, PRELUDE
from monarch_async._core.seal import SEAL_SIZE, Seal
from monarch_async.testing.faults import Faults, LinkAt
from monarch_async.testing.links import FaultyConnection, Splitter, Way
from monarch_async.testing.plugin import MonarchProcs
from tests.runtime.link_pair import KEYS, End, acknowledged, finish, opened

COUNT = 60


class Sink(Actor):
    """Writes down what comes, in its order."""

    def __init__(self) -> None:
        self.got: list[int] = []

    @endpoint
    async def call(self, number: int) -> int:
        self.got.append(number)
        return number

    @endpoint
    async def cast(self, number: int) -> None:
        self.got.append(number)

    @endpoint
    async def large(self, number: int, data: bytes) -> int:
        self.got.append(number)
        return len(data)

    @endpoint
    async def all(self) -> list[int]:
        return self.got


class Source(Actor):
    """Sends numbers to a sink that lives elsewhere."""

    @endpoint
    async def send(self, sink: Any, first: int) -> list[int]:
        return await send(sink, first)


async def send(sink: Any, first: int) -> list[int]:
    """Casts and calls, small and large, many under way at a time; returns what the calls were answered."""
    calls = []
    for number in range(first, first + COUNT):
        if number % 3 == 0:
            sink.cast.broadcast(number)
        elif number % 20 == 1:
            calls.append(sink.large.call_one(number, b"x" * 100_000))
        else:
            calls.append(sink.call.call_one(number))
        if number % 7 == 0:
            await asyncio.sleep(0)
    return [await call for call in calls]


def answers(first: int) -> list[int]:
    numbers = [number for number in range(first, first + COUNT) if number % 3]
    return [100_000 if number % 20 == 1 else number for number in numbers]


FAULTS: dict[str, Callable[[LinkAt], None]] = {
    "delay": lambda link: link.delay(by=0.02, seconds=0.5),
    "throttle": lambda link: link.throttle(rate=1_000_000, seconds=0.5),
    "cut": lambda link: link.cut(0.2),
    "cut out": lambda link: link.cut(0.2, "out"),
    "cut in": lambda link: link.cut(0.2, "in"),
    "reset": lambda link: link.reset(),
    "drop": lambda link: link.drop(3),
    "drop in": lambda link: link.drop(3, "in"),
    "duplicate": lambda link: link.duplicate(4),
    "duplicate in": lambda link: link.duplicate(4, "in"),
    "corrupt": lambda link: link.corrupt(bit=3),
    "corrupt in": lambda link: link.corrupt(way="in"),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_a_link_with_the_client(monarch_procs: MonarchProcs, faults: Faults, name: str) -> None:
    """Numbered calls and casts, before, while and after it happens: each arrives once, in order, and is answered."""
    procs = await monarch_procs(1, name="one")
    sink = procs.spawn("sink", Sink)
    FAULTS[name](faults.at(step=5, mesh="sink", rank=0).link("client"))
    for turn in range(3):
        assert answers(turn * COUNT) == await send(sink, turn * COUNT)
    assert list(range(3 * COUNT)) == await sink.all.call_one()
    assert 1 == len(await faults.injected())


@pytest.mark.parametrize("name", ["delay", "cut", "reset", "drop", "duplicate in", "corrupt in"])
async def test_a_link_between_two_processes(monarch_procs: MonarchProcs, faults: Faults, name: str) -> None:
    """The same between two ranks, at the end of the one that is named first."""
    procs = await monarch_procs(2, name="pair")
    source = procs.slice(procs=0).spawn("source", Source)
    sink = await procs.slice(procs=1).spawn("sink", Sink)
    FAULTS[name](faults.at(step=2, mesh="source", rank=0).link(("sink", 0)))
    for turn in range(3):
        assert answers(turn * COUNT) == await source.send.call_one(sink, turn * COUNT)
    assert list(range(3 * COUNT)) == await sink.all.call_one()
    assert 1 == len(await faults.injected())


async def test_many_faults_from_a_seed(monarch_procs: MonarchProcs, faults: Faults) -> None:
    """Links, loops and processes (frozen) suffer together: still each message arrives once, in order."""
    procs = await monarch_procs(2, name="pair")
    source = procs.slice(procs=0).spawn("source", Source)
    sink = await procs.slice(procs=1).spawn("sink", Sink)
    # Without "corrupt": two of them may hit the same frame, which ends a session.
    kinds = ["freeze", "block", "hold_gil", "delay", "throttle", "cut", "reset", "drop", "duplicate"]
    faults.random(12, kinds=kinds, mesh="pair", within=0.8)
    turn = 0
    while len(faults.log) < 8 or turn < 4:
        assert answers(turn * COUNT) == await source.send.call_one(sink, turn * COUNT)
        turn += 1
    assert list(range(turn * COUNT)) == await sink.all.call_one()


async def test_what_is_delayed_comes_later(monarch_procs: MonarchProcs, faults: Faults) -> None:
    """Not before its time, both ways, and then in order; afterwards at once."""
    procs = await monarch_procs(1, name="one")
    sink = await procs.spawn("sink", Sink)
    faults.at(time=0.0, mesh="one", rank=0).link().delay(by=0.1, seconds=0.05)
    await faults.injected()
    began = time.monotonic()
    assert 1 == await sink.call.call_one(1)
    assert 0.1 <= time.monotonic() - began
    assert answers(0) == await send(sink, 0)


async def test_a_throttled_link_takes_its_time(monarch_procs: MonarchProcs, faults: Faults) -> None:
    """A megabyte at two megabytes a second; calls to others meanwhile are not held up."""
    procs = await monarch_procs(2, name="pair")
    sinks = await procs.spawn("sinks", Sink)
    faults.at(time=0.0, mesh="pair", rank=0).link().throttle(rate=2e6, seconds=30.0)
    await faults.injected()
    began = time.monotonic()
    slow = asyncio.ensure_future(sinks.slice(procs=0).large.call_one(1, bytes(1_000_000)))
    assert 2 == await sinks.slice(procs=1).call.call_one(2)
    assert not slow.done()
    assert 1_000_000 == await slow
    assert 0.5 <= time.monotonic() - began


async def test_nothing_passes_while_a_link_is_cut(monarch_procs: MonarchProcs, faults: Faults) -> None:
    """The call that was made meanwhile is answered after the cut, not before."""
    procs = await monarch_procs(1, name="one")
    sink = await procs.spawn("sink", Sink)
    for way in ("both", "out", "in"):
        faults.at(time=0.0, mesh="one", rank=0).link().cut(0.3, way)
        await faults.injected()
        began = time.monotonic()
        assert 1 == await sink.call.call_one(1)
        assert 0.25 <= time.monotonic() - began


async def test_a_frame_that_is_bad_twice_ends_the_session(monarch_procs: MonarchProcs, faults: Faults) -> None:
    """It is taken for the peer's fault: the caller gets an error that says so, and the next call has a new session."""
    procs = await monarch_procs(1, name="one")
    sink = await procs.spawn("sink", Sink)
    faults.at(step=1, mesh="sink", rank=0).link().corrupt(frames=2, bit=5)
    with pytest.raises(ActorDied, match=r"no frame|session"):
        await sink.call.call_one(1)
    assert 2 == await sink.call.call_one(2)


async def test_calm_mends_links_and_lets_go_of_what_is_held(monarch_procs: MonarchProcs, faults: Faults) -> None:
    """A cut, a delay and a throttle of an hour are over at once."""
    procs = await monarch_procs(1, name="one")
    sink = await procs.spawn("sink", Sink)
    for name in ("delay", "throttle", "cut"):
        link = faults.at(time=0.0, mesh="one", rank=0).link()
        {
            "delay": lambda link: link.delay(3600, 3600),
            "throttle": lambda link: link.throttle(1, 3600),
            "cut": lambda link: link.cut(3600),
        }[name](link)
        await faults.injected()
        answer = asyncio.ensure_future(sink.call.call_one(1))
        await asyncio.sleep(0)
        assert not answer.done()
        faults.calm()
        assert 1 == await answer


# The connection by itself.


class Ends:
    """Two links over a real connection, one of them through a faulty one."""

    def __init__(self, sealed: bool) -> None:
        self.sealed = sealed
        self.one, self.other = End(), End()
        self.done: list[int] = []
        self.out, self.back = Way(self.done.append), Way(self.done.append)
        self.connections = 0

    async def connect(self) -> None:
        """Anew, over a new connection, as the keeper of a link does."""
        streams = await opened(30_000)
        self.one.stream, self.other.stream = streams
        received = self.one.link.last_received, self.other.link.last_received
        seals: list[Any] = [None, None]
        if self.sealed:
            seals = [(Seal(KEYS[0]), Seal(KEYS[1])), (Seal(KEYS[1]), Seal(KEYS[0]))]
        loop = asyncio.get_running_loop()
        middle = FaultyConnection(loop, streams[0], self.one.link, self.out, self.back, SEAL_SIZE if self.sealed else 0)
        self.one.link.attach(middle, received[1], seals[0])
        self.other.link.attach(streams[1], received[0], seals[1])
        streams[0].bind(middle, b"")
        streams[1].bind(self.other.link, b"")
        self.connections += 1

    async def keep_connected(self) -> None:
        while True:
            await self.one.until(lambda: self.one.link.connection is None)
            await self.connect()


@pytest.fixture(params=[False, True], ids=["bare", "sealed"])
async def ends(request: pytest.FixtureRequest) -> AsyncIterator[Ends]:
    ends = Ends(request.param)
    await ends.connect()
    yield ends
    await finish(ends.one, ends.other)


@pytest.mark.parametrize("seed", range(3))
async def test_any_mixture_of_faults(ends: Ends, seed: int) -> None:
    """Both ways, messages of all sizes, frames torn, repeated, spoiled at any bit that is noticed: exactly once, in order, intact."""
    rng = random.Random(seed)
    one, other = ends.one, ends.other
    keeper = asyncio.ensure_future(ends.keep_connected())
    hits = 0
    for number in range(400):
        for end in (one, other):
            if rng.random() < 0.05:
                end.large(number, rng.randrange(1000), rng.randrange(1 << 20))
            else:
                end.small(number, rng.randrange(300))
        if rng.random() < 0.05 and not ends.out.hits and not ends.back.hits:
            hits += 1
            way = rng.choice((ends.out, ends.back))
            way.add(rng.choice(("drop", "duplicate", "corrupt")), 1, rng.randrange(1 << 16), hits)
            way.by, way.delayed_until = rng.uniform(0, 0.01), asyncio.get_running_loop().time() + 0.02
        await asyncio.sleep(0)
    await one.until(lambda: len(one.got) >= len(other.sent))
    await other.until(lambda: len(other.got) >= len(one.sent))
    assert other.sent == one.got
    assert one.sent == other.got
    assert hits > 5
    await acknowledged(one)
    await acknowledged(other)
    keeper.cancel()
    await asyncio.wait([keeper])


async def test_a_delayed_connection_that_closes_sends_what_it_holds(ends: Ends) -> None:
    """The last words are not lost with it."""
    ends.out.by, ends.out.delayed_until = 3600.0, asyncio.get_running_loop().time() + 3600
    ends.one.small(1)
    await asyncio.sleep(0)
    ends.one.link.end()
    await ends.other.until(lambda: bool(ends.other.got))
    assert ends.one.sent == ends.other.got


async def test_a_delayed_connection_that_fills_up_says_so(ends: Ends) -> None:
    """What is held back is bounded as by any connection: the rest waits in the link."""
    ends.out.by, ends.out.delayed_until = 3600.0, asyncio.get_running_loop().time() + 3600
    ends.one.large(1, 100, 20 << 20)
    middle = ends.one.link.connection
    assert isinstance(middle, FaultyConnection)
    assert middle.full
    assert middle._out.held < 4 << 20
    ends.out.calm()
    middle.hasten()
    await ends.other.until(lambda: bool(ends.other.got))
    assert ends.one.sent == ends.other.got


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
def test_frames_are_found_in_any_pieces(size: int) -> None:
    """However the bytes are cut, the same frames come out; with and without seals."""
    for tail in (0, SEAL_SIZE):
        frames = [
            PRELUDE.pack(DATA, 0, 0, header, bulk, 1, 0) + bytes(header + bulk + tail)
            for header, bulk in [(0, 0), (5, 0), (100, 3000), (0, 9)]
        ]
        data = b"".join(frames)
        splitter = Splitter(tail)
        found = [frame for start in range(0, len(data), size) for frame in splitter.feed(data[start : start + size])]
        assert frames == found


def test_what_is_no_frame_passes_as_it_is() -> None:
    """It is for the link to refuse it."""
    splitter = Splitter(0)
    good = PRELUDE.pack(DATA, 0, 0, 2, 0, 1, 0) + b"ab"
    assert [good, b"\xff" * 40] == list(splitter.feed(good + b"\xff" * 40))
    assert [b"more"] == list(splitter.feed(b"more"))
