"""What a send without an awaited answer returns: `Sent` for a broadcast, `Stream` for results one by one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from typing import Any, Generic, NoReturn, TypeVar

from monarch_async._core.events import died
from monarch_async._runtime.context import Message
from monarch_async._runtime.lane import Lane
from monarch_async._runtime.local import LocalLane
from monarch_async._runtime.runtime import Runtime
from monarch_async.errors import ActorDied
from monarch_async.future import Future

__all__ = ["Sent", "Stream"]

R = TypeVar("R")


class Sent:
    """A broadcast on its way. Awaiting it waits for room, so that a fast sender goes no faster than its receivers.

    Awaiting raises `ActorDied` if a member is known to be gone; what was sent to the others is on its way.
    """

    __slots__ = ("_dead", "_lanes")

    def __init__(self, lanes: Sequence[Lane | LocalLane]) -> None:
        self._lanes = lanes
        self._dead: ActorDied | None = None

    def fail(self, runtime: Runtime, lane: Lane, endpoint: str) -> None:
        """The process of a member is gone."""
        evidence = lane.peer.why_gone
        assert evidence is not None
        self._dead = died(evidence, lane.mesh, lane.rank, started=False)
        runtime.dead_letter(f"{lane.mesh}[{lane.rank}]", endpoint, evidence)

    def __await__(self) -> Generator[Any, None, None]:
        if self._dead is not None:
            raise self._dead
        for lane in self._lanes:
            if not lane.has_room:
                yield from lane.wait_for_room().__await__()
            elif not lane.messages & 63:
                yield  # let the loop run now and then, or nothing would ever leave


class Stream(Generic[R]):
    """Results in the order they arrive: ``async for value in stream``; or, as in Monarch, ``for future in stream`` and await each."""

    awaited_by: Message | None = None

    def __init__(self, runtime: Runtime, requests: list[int], lanes: Sequence[Lane | LocalLane]) -> None:
        self._open = dict(zip(requests, lanes, strict=True))
        self.results: list[Future[R]] = []
        for _ in requests:
            future: Future[R] = Future(loop=runtime.loop)
            future.runtime = runtime
            self.results.append(future)
        self._arrived = 0

    def futures(self) -> Sequence[asyncio.Future[Any]]:
        return self.results[self._arrived :] if len(self._open) == 1 else ()

    def settle(self, request: int, value: Any) -> None:
        if self._open.pop(request, None) is not None:
            self._next().settle(request, value)

    def fail(self, request: int, error: BaseException) -> None:
        if self._open.pop(request, None) is not None:
            self._next().fail(request, error)

    def _next(self) -> Future[R]:
        future = self.results[self._arrived]
        self._arrived += 1
        return future

    def __len__(self) -> int:
        return len(self.results)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Stream stays where it was made: send its results, or a Port for them to be sent to")

    def __iter__(self) -> Iterator[Future[R]]:
        return iter(self.results)

    async def __aiter__(self) -> AsyncIterator[R]:
        for index, future in enumerate(self.results):
            try:
                yield await future
            except BaseException:
                self._give_up(index)
                raise

    def _give_up(self, index: int) -> None:
        """Nobody takes the rest: cancel what has not answered."""
        for future in self.results[index:]:
            if not future.done():
                future.cancel()
        for request, lane in list(self._open.items()):
            self.results[0].runtime.cancel_request(request, lane, "cancelled")
