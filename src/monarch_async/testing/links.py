"""Faulty connections: what stands between a connection and its link, and delays, loses, repeats and spoils the frames that pass.

`Links` is installed as a runtime's `wrap_connection`, so that each connection goes through a `FaultyConnection`; what is wrong at present
is kept for each peer and direction in a `Way`, and holds for the connections that follow one another.

Rules:

* Whole frames pass, in their order, as soon as they are there if nothing is wrong. What is no frame passes as it is.
* *delay* and *throttle* hold frames back. *cut* loses what is sent meanwhile, and breaks the connection when it is over, so that the
  session goes on over a new one, as after a cable was pulled out and put back. *drop* tears a frame in the middle, loses what follows and
  breaks the connection. *reset* breaks it.
* A repeated or spoiled frame stays where it is in the order. Links within a host have no seal, so that not every bit that flips there
  can be noticed: only bits are flipped for which a frame is refused. With a seal it may be any bit.
* Large messages within a host pass in shared memory, which no link slows; from the end that a throttle is at they go over the link.
* What is held back is bounded by what a connection may hold; then it is full.
* A connection that is closed, or lost, lets go at once of what it holds back: to the other side, or to its link.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from weakref import WeakSet

from monarch_async._channel.stream import HIGH_WATER, Stream
from monarch_async._core.framing import MAX_HEADER, PRELUDE
from monarch_async._core.seal import SEAL_SIZE
from monarch_async._runtime.link import Link
from monarch_async._runtime.runtime import Runtime
from monarch_async.testing.plan import Fault

__all__ = ["FaultyConnection", "Links", "Splitter", "Way"]

ROOM = 1 << 16
MAX_BULK = 1 << 26
"""No frame has a bulk of so many bytes: links cut large messages into chunks."""
NOTICED = (7, *range(16, 32))
"""The bits of a prelude that no frame has set: one of the kind, and the reserved field."""


class Splitter:
    """Bytes in, whole frames out, with a seal of `tail` bytes each."""

    def __init__(self, tail: int) -> None:
        self._tail = tail
        self._data = bytearray()
        self._raw = False  # what comes is no frames

    def feed(self, data: bytes | memoryview) -> Iterator[bytes]:
        """Add bytes; what is whole now, one frame after the other."""
        self._data += data
        while self._data:
            size = len(self._data) if self._raw else self._size()
            if not size or size > len(self._data):
                return
            frame = bytes(self._data[:size])
            del self._data[:size]
            yield frame

    def _size(self) -> int:
        """Of the first frame; 0 if it can't be told yet."""
        if len(self._data) < PRELUDE.size:
            return 0
        _, _, _, header, bulk, _, _ = PRELUDE.unpack_from(self._data, 0)
        if header > MAX_HEADER or bulk > MAX_BULK:
            self._raw = True
            return len(self._data)
        return int(PRELUDE.size + header + bulk + self._tail)


class _Hit:
    """A fault that concerns the next frames, and how many it still does; `done` is called with its index after the last."""

    def __init__(self, kind: str, frames: int, bit: int, index: int) -> None:
        self.kind = kind
        self.left = frames
        self.bit = bit
        self.index = index


class Way:
    """What is wrong in one direction between this process and a peer, at present. Times are those of the loop."""

    def __init__(self, done: Callable[[int], None]) -> None:
        self.by, self.delayed_until = 0.0, 0.0
        self.rate, self.throttled_until = 0.0, 0.0
        self.cuts = 0  # under way: what is sent is lost
        self.hits: deque[_Hit] = deque()
        self._done = done

    def calm(self) -> None:
        """Nothing is wrong any more."""
        self.delayed_until = self.throttled_until = 0.0
        self.cuts = 0
        self.hits.clear()

    def add(self, kind: str, frames: int, bit: int, index: int) -> None:
        """The next frames are hit: ``"drop"``, ``"duplicate"`` or ``"corrupt"``."""
        self.hits.append(_Hit(kind, frames, bit, index))

    def hit(self) -> _Hit | None:
        """What happens to this frame, if something does."""
        if not self.hits:
            return None
        first = self.hits[0]
        first.left -= 1
        if not first.left:
            self.hits.popleft()
            self._done(first.index)
        return first

    def due(self, now: float, size: int, last: float) -> float:
        """When a frame of `size` bytes shall pass, not before the one before it, which passes at `last`."""
        due = now + self.by if now < self.delayed_until else now
        if now < self.throttled_until:
            due = min(max(due, last) + size / self.rate, self.throttled_until)
        return max(due, last)


class _Flow:
    """One direction of a connection: frames on their way to `passes`."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, way: Way, tail: int, passes: Callable[[bytes], None], broken: Callable[[], None]
    ) -> None:
        self.held = 0  # bytes in the queue
        self.drained: Callable[[], None] = lambda: None
        self._loop = loop
        self._way = way
        self._tail = tail
        self._splitter = Splitter(tail)
        self._passes = passes
        self._broken = broken
        self._queue: deque[tuple[float, bytes]] = deque()
        self._last = 0.0  # when the last frame of the queue is due
        self._timer: asyncio.TimerHandle | None = None
        self._torn = False  # a frame was torn: nothing passes after it
        self._closed = False

    def take(self, data: bytes | memoryview) -> None:
        for frame in self._splitter.feed(data):
            if self._torn or self._closed:
                return
            if self._way.cuts:
                continue
            hit = self._way.hit()
            if hit is None:
                self._put(frame)
            elif hit.kind == "duplicate":
                self._put(frame)
                self._put(frame)
            elif hit.kind == "corrupt":
                self._put(self._spoil(frame, hit.bit))
            else:
                self._put(frame[: len(frame) // 2])
                self._torn = True
                self._loop.call_soon(self._broken)

    def _spoil(self, frame: bytes, bit: int) -> bytes:
        place = bit % (8 * len(frame)) if self._tail else NOTICED[bit % len(NOTICED)]
        spoiled = bytearray(frame)
        spoiled[place // 8] ^= 1 << place % 8
        return bytes(spoiled)

    def _put(self, frame: bytes) -> None:
        now = self._loop.time()
        due = self._way.due(now, len(frame), self._last)
        if due <= now and not self._queue:
            self._passes(frame)
            return
        self._last = due
        self._queue.append((due, frame))
        self.held += len(frame)
        if self._timer is None:
            self._timer = self._loop.call_at(due, self._release)

    def _release(self) -> None:
        self._timer = None
        now = self._loop.time()
        while self._queue and self._queue[0][0] <= now:
            self._pass_first()
        if self._queue and not self._closed:
            self._timer = self._loop.call_at(self._queue[0][0], self._release)
        self.drained()

    def _pass_first(self) -> None:
        _, frame = self._queue.popleft()
        self.held -= len(frame)
        self._passes(frame)

    def let_go(self) -> None:
        """Pass what is held, at once."""
        while self._queue and not self._closed:
            self._pass_first()
        self._last = 0.0

    def close(self) -> None:
        self._closed = True
        self._queue.clear()
        self.held = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class FaultyConnection:
    """Between `stream` and `link`: to the one it is the receiver, to the other the connection."""

    full = False

    def __init__(self, loop: asyncio.AbstractEventLoop, stream: Stream, link: Link, out: Way, back: Way, tail: int) -> None:
        self._stream = stream
        self._link = link
        self._closed = False
        self._out = _Flow(loop, out, tail, stream.write, self.abort_and_tell)
        self._in = _Flow(loop, back, tail, self._feed, self.abort_and_tell)
        self._out.drained = self._look
        self._room = memoryview(bytearray(ROOM))
        self.on_lost: Callable[[FaultyConnection], None] = lambda connection: None

    # What the link calls.

    def write(self, data: bytes | memoryview) -> None:
        if not self._closed:
            self._out.take(data)
            self.full = self._is_full()

    def close(self) -> None:
        self._out.let_go()
        self._end()
        self._stream.close()

    def abort(self) -> None:
        self._end()
        self._stream.abort()

    # What the stream calls.

    def get_buffer(self) -> memoryview:
        return self._room

    def received(self, size: int) -> None:
        self._in.take(self._room[:size])

    def writable(self) -> None:
        self._look()

    def lost(self, connection: object, error: Exception | None) -> None:
        if not self._closed:
            self._in.let_go()
        self._end()
        self.on_lost(self)
        self._link.lost(self, error)

    # What faults call.

    def abort_and_tell(self) -> None:
        """Break the connection; the link is told when it is gone."""
        self._in.close()
        self._out.close()
        self._stream.abort()

    def hasten(self) -> None:
        """Let go of what is held back."""
        self._out.let_go()
        self._in.let_go()
        self._look()

    def _feed(self, frame: bytes) -> None:
        rest = memoryview(frame)
        while rest and not self._closed:
            room = self._link.get_buffer()
            size = min(len(room), len(rest))
            room[:size] = rest[:size]
            rest = rest[size:]
            self._link.received(size)

    def _is_full(self) -> bool:
        return self._stream.full or self._out.held > HIGH_WATER

    def _look(self) -> None:
        """Tell the link if there is room again."""
        was, self.full = self.full, self._is_full()
        if was and not self.full and not self._closed:
            self._link.writable()

    def _end(self) -> None:
        self._closed = True
        self._in.close()
        self._out.close()


class Links:
    """The faulty links of a runtime. `done` is called with the index of a fault of frames when the last of them was hit."""

    def __init__(self, runtime: Runtime, done: Callable[[int], None]) -> None:
        self._runtime = runtime
        self._done = done
        self._ways: dict[str, tuple[Way, Way]] = {}  # by the peer's uid: out and back
        self._connections: dict[str, set[FaultyConnection]] = {}
        self._timers: list[asyncio.TimerHandle] = []
        self._lending = WeakSet[Link]()  # those that lend no shared memory while they are throttled from here: all is to go over the link

    def wrap(self, link: Link, stream: Stream, sealed: bool) -> FaultyConnection:
        """For `Runtime.wrap_connection`."""
        uid = self._runtime.peer_of(link).address.uid
        lend, out = link.lend, self._of(uid)[0]
        if lend is not None and link not in self._lending:
            self._lending.add(link)
            now = self._runtime.loop.time
            link.lend = lambda *message: None if now() < out.throttled_until else lend(*message)
        connection = FaultyConnection(self._runtime.loop, stream, link, *self._of(uid), SEAL_SIZE if sealed else 0)
        connections = self._connections.setdefault(uid, set())
        connections.add(connection)
        connection.on_lost = connections.discard
        return connection

    def _of(self, uid: str) -> tuple[Way, Way]:
        ways = self._ways.get(uid)
        if ways is None:
            ways = self._ways[uid] = Way(self._done), Way(self._done)
        return ways

    def inject(self, index: int, fault: Fault, uid: str, *, turned: bool = False) -> None:
        """Let a fault happen to the link with a peer. `turned`: the fault names the peer first, so that its ``out`` is ``in`` here."""
        out, back = self._of(uid)
        if turned:
            out, back = back, out
        loop = self._runtime.loop
        now = loop.time()
        chosen = {"out": (out,), "in": (back,), "both": (out, back)}[fault.value("way")] if fault.kind != "reset" else ()
        for way in chosen:
            match fault.kind:
                case "delay":
                    way.by, way.delayed_until = fault.value("by"), now + fault.value("seconds")
                case "throttle":
                    way.rate, way.throttled_until = fault.value("rate"), now + fault.value("seconds")
                case "cut":
                    way.cuts += 1
                case kind:
                    way.add(kind, fault.value("frames"), fault.value("bit") if kind == "corrupt" else 0, index)
        if fault.kind == "reset":
            self._break(uid)
        elif fault.kind == "cut":
            self._timers.append(loop.call_at(now + fault.value("seconds"), self._heal, uid, chosen))

    def _heal(self, uid: str, ways: tuple[Way, ...]) -> None:
        """A cut is over. What was sent meanwhile is lost, so no connection may go on."""
        self._break(uid)
        for way in ways:
            way.cuts -= 1

    def _break(self, uid: str) -> None:
        for connection in list(self._connections.get(uid, ())):
            connection.abort_and_tell()

    def calm(self) -> None:
        """End what is wrong now; connections that are losing what is sent are broken, so that it is sent again."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        for uid, ways in self._ways.items():
            if any(way.cuts for way in ways):
                self._break(uid)
            for way in ways:
                way.calm()
            for connection in list(self._connections.get(uid, ())):
                connection.hasten()
