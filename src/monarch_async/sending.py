"""How the adverbs of endpoints send: arguments are checked and pickled once, booked on each member's lane, and written.

Rules:

* Everything about a call that can be wrong at the caller is raised at the call: arguments that don't fit, or can't be pickled
  (`TypeError`), or are too large (`FrameTooLarge`), too many under way (`ChannelFull`). What goes wrong later is in the future.
* In the runtime's thread a message is on its way when the adverb returns. Other threads hand it to the loop, in order, and are held
  back when they are far ahead of it.
* A call made by a handler carries the chain of handlers that led to it, and what is left of their deadline.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from monarch_async._core.codec import Buffers, copy_value, dumps
from monarch_async._runtime.context import Message, State, Waiter, current_message
from monarch_async._runtime.lane import Lane
from monarch_async._runtime.local import LocalLane
from monarch_async._runtime.peer import Peer
from monarch_async._runtime.retrying import Retrying
from monarch_async._runtime.runtime import Runtime
from monarch_async._runtime.tree import Member
from monarch_async.endpoints import Binder, Endpoint, check_timeout
from monarch_async.errors import UsageError
from monarch_async.future import Future, MeshFuture
from monarch_async.sent import Sent, Stream
from monarch_async.shape import Shape
from monarch_async.target import Target

__all__ = ["Collector", "MeshEndpoint"]

_get_ident = threading.get_ident
_LONGEST_CHAIN = 64
_AHEAD = 1000
_NOTHING = (b"", Buffers())
_NONE: frozenset[int] = frozenset()


class Collector(Waiter, Protocol):
    """Takes the answers of all members of a mesh."""

    def expect_answers(self, requests: Sequence[int], lanes: Sequence[Any]) -> None:
        """These requests are about to be sent, in the order of the points."""


class MeshEndpoint(Endpoint[..., Any]):
    """One endpoint on one mesh; see `Endpoint`."""

    __slots__ = ("_bind", "_name", "_plain", "_retry", "_return_exceptions", "_target", "_timeout")

    def __init__(
        self,
        target: Target,
        name: str,
        bind: Binder | None,
        timeout: float | None = None,
        retry: int = 0,
        return_exceptions: bool = False,
    ) -> None:
        self._target = target
        self._name = name
        self._bind = bind  # None: the class isn't known here, so the other side checks
        self._timeout = timeout
        self._retry = retry
        self._return_exceptions = return_exceptions
        self._plain = timeout is None  # outside of handlers its calls carry nothing but arguments

    def __repr__(self) -> str:
        return f"<endpoint {self._name} of {self._target.name}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        adverbs = ".call(), .call_one(), .choose(), .stream() or .broadcast()"
        raise TypeError(f"{self._target.name}.{self._name} is an endpoint of a mesh: use {adverbs}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        text = (
            f"an endpoint has call, call_one, choose, stream, broadcast and options(timeout=, retry=, return_exceptions=), and no {name!r}"
        )
        raise AttributeError(text)

    def options(self, *, timeout: float | None = None, retry: int = 0, return_exceptions: bool = False) -> MeshEndpoint:
        check_timeout(timeout)
        if retry < 0:
            raise UsageError(f"retry is how often to send again, 0 or more, not {retry!r}")
        return type(self)(self._target, self._name, self._bind, timeout, retry, return_exceptions)

    def call_one(self, *args: Any, **kwargs: Any) -> Future[Any]:
        target = self._target
        if len(target.lanes) != 1:
            raise ValueError(f"call_one needs a single actor, and {target.name} has {len(target.lanes)}: slice it, or use call or choose")
        return self._one(target.lanes[0], target.ranks[0], args, kwargs)

    def choose(self, *args: Any, **kwargs: Any) -> Future[Any]:
        target = self._target
        index = int.from_bytes(os.urandom(4), "little") % len(target.lanes)
        return self._one(target.lanes[index], target.ranks[index], args, kwargs)

    def _one(self, lane: Lane | LocalLane, rank: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        if self._bind is not None:
            args, kwargs = self._bind(*args, **kwargs)
        runtime = self._target.runtime
        future: Future[Any] = Future(loop=runtime.loop)
        future.runtime = runtime
        future.lane = lane
        future.request = request = next(runtime.requests)
        handler = current_message.get()
        extras = None if handler is None and self._plain else self._extras(handler, request)
        waiter: Waiter = future
        if isinstance(lane, LocalLane):
            if self._retry:
                args, kwargs = copy_value((args, kwargs))
                waiter = self._retrying(future, lane, request, rank, (args, kwargs), _NOTHING, extras)
            if _get_ident() == runtime.thread:
                lane.send(self._name, request, rank, args, kwargs, extras, waiter)
            else:
                args, kwargs = copy_value((args, kwargs))
                self._hand_over(runtime, [(future, request)], lane.send, self._name, request, rank, args, kwargs, extras, waiter)
        else:
            body, buffers = dumps((args, kwargs)) if args or kwargs else _NOTHING
            if self._retry:
                buffers = _kept(runtime, body, buffers)
                waiter = self._retrying(future, lane, request, rank, ((), {}), (body, buffers), extras)
            if _get_ident() == runtime.thread:
                lane.call(self._name, request, rank, body, buffers, extras, waiter)
            else:
                buffers = _kept(runtime, body, buffers)
                self._hand_over(runtime, [(future, request)], lane.call, self._name, request, rank, body, buffers, extras, waiter)
        if extras is not None and "d" in extras:
            self._limit(future, extras["d"])
        return future

    def call(self, *args: Any, **kwargs: Any) -> Future[Any]:
        target = self._target
        runtime = target.runtime
        future: MeshFuture[Any] = MeshFuture(loop=runtime.loop)
        future.runtime = runtime
        future.lane = target.lanes[0]
        requests = [next(runtime.requests) for _ in target.lanes]
        future.request = requests[0]
        future.expect(target.shape, target.lanes, requests, keep_errors=self._return_exceptions)
        extras = self._send(args, kwargs, requests, [future] * len(requests), [(future, requests[0])])
        if extras is not None and "d" in extras:
            self._limit(future, extras["d"])
        return future

    def stream(self, *args: Any, **kwargs: Any) -> Stream[Any]:
        target = self._target
        runtime = target.runtime
        requests = [next(runtime.requests) for _ in target.lanes]
        stream: Stream[Any] = Stream(runtime, requests, target.lanes)
        extras = self._send(args, kwargs, requests, [stream] * len(requests), [(stream, request) for request in requests])
        if extras is not None and "d" in extras:
            for future in stream.results:
                self._limit(future, extras["d"])
        return stream

    def broadcast(self, *args: Any, **kwargs: Any) -> Sent:
        target = self._target
        if self._bind is not None:
            args, kwargs = self._bind(*args, **kwargs)
        runtime = target.runtime
        if _get_ident() != runtime.thread:
            sent = Sent(target.lanes)
            body, buffers = dumps((args, kwargs)) if args or kwargs else _NOTHING
            for lane in target.lanes:
                lane.check(len(body))
            args, kwargs = self._own(args, kwargs)
            self._hand_over(runtime, [], self._cast, args, kwargs, sent, (body, _kept(runtime, body, buffers)))
            return sent
        sent = Sent(target.lanes)
        self._cast(args, kwargs, sent, None)
        return sent

    def _cast(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        sent: Sent,
        pickled: tuple[bytes, Buffers] | None,
        extras: dict[str, Any] | None = None,
    ) -> None:
        lanes = self._target.lanes
        if pickled is None and (args or kwargs) and any(isinstance(lane, Lane) for lane in lanes):
            pickled = dumps((args, kwargs))
        body, buffers = pickled or _NOTHING
        if len(lanes) > 1:
            size = len(body) + sum(view.nbytes for view in buffers)
            for lane in lanes:
                lane.check(size)
        name = self._name
        groups = self._target.groups
        done = self._through_tree(groups, None, None, (body, buffers), extras) if groups else _NONE
        for index, (lane, rank) in enumerate(zip(lanes, self._target.ranks, strict=True)):
            if index in done:
                continue
            if isinstance(lane, LocalLane):
                lane.send(name, 0, rank, args, kwargs, extras, None)
            elif not lane.cast(name, rank, body, buffers, extras):
                sent.fail(self._target.runtime, lane, name)

    def _through_tree(
        self,
        groups: Sequence[tuple[Peer, Sequence[int]]],
        requests: Sequence[int] | None,
        waiters: Sequence[Any] | None,
        pickled: tuple[bytes, Buffers],
        extras: dict[str, Any] | None,
    ) -> set[int]:
        """Send once to each host what is for several members there; returns the positions of the members that are served by that."""
        target = self._target
        done: set[int] = set()
        for agent, indices in groups:
            members = []
            taken = []
            for index in indices:
                lane = target.lanes[index]
                if isinstance(lane, Lane) and lane.peer.why_gone is None:
                    request = requests[index] if requests is not None else 0
                    members.append(Member(lane, target.ranks[index], request, waiters[index] if waiters is not None else None))
                    taken.append(index)
            if members and target.runtime.tree.send(agent, self._name, members, *pickled, extras):
                done.update(taken)
        return done

    @property
    def runtime(self) -> Runtime:
        return self._target.runtime

    @property
    def lanes(self) -> Sequence[Lane | LocalLane]:
        """The accounts with the members, in the order of the points."""
        return self._target.lanes

    def one_of(self) -> MeshEndpoint:
        """The same endpoint on one member, picked at random."""
        target = self._target
        index = int.from_bytes(os.urandom(4), "little") % len(target.lanes)
        one = Target(target.runtime, target.name, Shape.of(), [target.lanes[index]], [target.ranks[index]])
        return type(self)(one, self._name, self._bind, self._timeout, self._retry, self._return_exceptions)

    def ask(self, args: tuple[Any, ...], kwargs: dict[str, Any], waiter: Collector) -> Sent:
        """Call it on every member; `waiter` gets the answers."""
        lanes = self._target.lanes
        requests = [next(self._target.runtime.requests) for _ in lanes]
        waiter.expect_answers(requests, lanes)
        self._send(args, kwargs, requests, [waiter] * len(requests), [(waiter, request) for request in requests])
        return Sent(lanes)

    def _send(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], requests: list[int], waiters: list[Any], told: list[tuple[Waiter, int]]
    ) -> dict[str, Any] | None:
        """Send a call to every member; `told` are those to be told if that fails in another thread."""
        if self._bind is not None:
            args, kwargs = self._bind(*args, **kwargs)
        runtime = self._target.runtime
        lanes = self._target.lanes
        pickled = _NOTHING
        if (args or kwargs) and any(isinstance(lane, Lane) for lane in lanes):
            pickled = dumps((args, kwargs))
        handler = current_message.get()
        extras = None if handler is None and self._plain else self._extras(handler, requests[0])
        if self._retry:
            pickled = pickled[0], _kept(runtime, *pickled)
            args, kwargs = self._own(args, kwargs)
            waiters = [
                self._retrying(waiter, lane, request, rank, (args, kwargs), pickled, extras)
                for waiter, lane, request, rank in zip(waiters, lanes, requests, self._target.ranks, strict=True)
            ]
        if _get_ident() == runtime.thread:
            self._send_all(args, kwargs, pickled, requests, waiters, extras)
        else:
            args, kwargs = self._own(args, kwargs)
            pickled = pickled[0], _kept(runtime, *pickled)
            self._hand_over(runtime, told, self._send_all, args, kwargs, pickled, requests, waiters, extras)
        return extras

    def _retrying(
        self,
        waiter: Waiter,
        lane: Lane | LocalLane,
        request: int,
        rank: Any,
        args: tuple[tuple[Any, ...], dict[str, Any]],
        pickled: tuple[bytes, Buffers],
        extras: dict[str, Any] | None,
    ) -> Retrying:
        """Who waits for one request of an endpoint that may be sent again; the arguments have to stay as they are."""
        name = self._name

        def resend(waiter: Waiter, extras: dict[str, Any] | None) -> None:
            if isinstance(lane, LocalLane):
                lane.send(name, request, rank, *args, extras, waiter)
            else:
                lane.call(name, request, rank, *pickled, extras, waiter)

        return Retrying(self._target.runtime.loop, waiter, self._retry, extras, resend)

    def _own(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What is sent to actors of this process, if it has to wait: a copy, since the caller goes on."""
        if any(isinstance(lane, LocalLane) for lane in self._target.lanes):
            args, kwargs = copy_value((args, kwargs))
        return args, kwargs

    def _send_all(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        pickled: tuple[bytes, Buffers],
        requests: list[int],
        waiters: list[Any],
        extras: dict[str, Any] | None,
    ) -> None:
        target = self._target
        body, buffers = pickled
        size = len(body) + sum(view.nbytes for view in buffers)
        for lane in target.lanes:
            lane.check(size)
        name = self._name
        groups = target.groups
        done = self._through_tree(groups, requests, waiters, pickled, extras) if groups else _NONE
        for index, (lane, rank, request, waiter) in enumerate(zip(target.lanes, target.ranks, requests, waiters, strict=True)):
            if index in done:
                continue
            if extras is not None and "c" in extras:
                chain = extras["c"]
                extras = {**extras, "c": [*chain[:-1], (*chain[-1][:2], request, chain[-1][3])]}
            if isinstance(lane, LocalLane):
                lane.send(name, request, rank, args, kwargs, extras, waiter)
            else:
                lane.call(name, request, rank, body, buffers, extras, waiter)

    def _extras(self, handler: Message | None, request: int) -> dict[str, Any] | None:
        """What a call carries beside its arguments: the deadline, and the handlers that wait for it."""
        extras: dict[str, Any] = {}
        timeout = self._timeout
        # A task that a handler has left behind is none of its calls any more.
        if handler is not None and handler.cell is not None and handler.state is not State.DONE:
            runtime = self._target.runtime
            if handler.deadline is not None:
                left = max(handler.deadline - runtime.loop.time(), 1e-6)
                timeout = left if timeout is None else min(timeout, left)
            if not handler.number:
                handler.number = next(runtime.numbers)
            cell = handler.cell
            chain = (handler.extras or {}).get("c", ())
            extras["c"] = [*chain[-_LONGEST_CHAIN:], (cell.key, handler.number, request, f"{cell.identity}.{handler.endpoint}")]
        if timeout is not None:
            extras["d"] = timeout
        return extras or None

    def _limit(self, future: Future[Any], timeout: float) -> None:
        what = f"{self._target.name}.{self._name}"
        if _get_ident() == future.runtime.thread:
            future.expire_after(timeout, what)
        else:
            future.runtime.loop.call_soon_threadsafe(future.expire_after, timeout, what)

    def _hand_over(self, runtime: Runtime, told: list[tuple[Waiter, int]], function: Callable[..., Any], *args: Any) -> None:
        """Let the loop do it; this thread waits if it is far ahead of the loop."""
        with runtime.posting:
            runtime.posted += 1
            posted = runtime.posted
        reached = threading.Event() if posted % _AHEAD == 0 else None
        runtime.loop.call_soon_threadsafe(_handed_over, told, reached, function, args)
        if reached is not None:
            reached.wait()


def _handed_over(
    told: list[tuple[Waiter, int]], reached: threading.Event | None, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    if reached is not None:
        reached.set()
    try:
        function(*args)
    except Exception as error:
        if not told:
            raise  # the loop's exception handler logs it
        for waiter, request in told:
            waiter.fail(request, error)


def _kept(runtime: Runtime, body: bytes, buffers: Buffers) -> Buffers:
    """Of memory that its owner may change before it is sent: a copy, from which it can be lent if there is room for that."""
    if not buffers or runtime.lending.place(body, buffers):
        return buffers
    return Buffers(memoryview(bytes(view)) for view in buffers)
