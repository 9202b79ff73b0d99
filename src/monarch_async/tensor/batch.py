"""Several operations as one: the members agree once, and all are started together.

Rule: nothing waits for ever for what is begun only later. Who awaits an operation inside the block is told at once that it can't be; who
waits for it in another way, as with `asyncio.gather`, is told when the block has been open for as long as an operation may take.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from monarch_async.errors import CollectiveTimeout, UsageError
from monarch_async.exchange import Runtime
from monarch_async.future import Future
from monarch_async.tensor.backend import Backend, Running, Together
from monarch_async.tensor.operation import Operation
from monarch_async.tensor.signature import Signature

__all__ = ["Batch", "Coalescing"]


class _Coalesced(Future[Any]):
    """The result of one operation of a batch."""

    begun = False

    def __await__(self) -> Generator[Any, None, Any]:
        self._must_be_begun()
        return super().__await__()

    def get(self, timeout: float | None = None) -> Any:
        self._must_be_begun()
        return super().get(timeout)

    def _must_be_begun(self) -> None:
        if not self.begun and not self.done():
            raise UsageError("what is called inside of coalesce() begins when the block is left: await it after that")


class Batch:
    """What was called so far."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._futures: list[_Coalesced] = []
        self.error: BaseException | None = None

    def add(self, operation: Operation, runtime: Runtime) -> Future[Any]:
        """One more. Raises `UsageError` for what is not of all members."""
        if operation.channel or operation.begin is not None:
            raise UsageError(f"{operation.signature.kind} is between two members: it can't be coalesced with operations of all")
        future = operation.future = _Coalesced(loop=runtime.loop)
        future.runtime = runtime
        self.operations.append(operation)
        self._futures.append(future)
        if self.error is not None:
            self.fail(self.error)
        return future

    def as_one(self) -> Operation:
        """All of them, which begin with it."""
        operations = self.operations
        for future in self._futures:
            future.begun = True

        def prepare(backend: Backend) -> None:
            for operation in operations:
                if operation.prepare is not None:
                    operation.prepare(backend)

        def launch(backend: Backend, views: Sequence[Signature]) -> Running | None:
            started = []
            for place, operation in enumerate(operations):
                if operation.launch is not None:
                    running = operation.launch(backend, [view.parts[place] for view in views])  # none, where they are free
                    if running is not None:
                        started.append(running)
            return Together(started) if started else None

        def finish() -> list[Any]:
            return [operation.finish() if operation.finish is not None else None for operation in operations]

        signature = Signature("coalesced", parts=tuple(operation.signature for operation in operations))
        copies = any(operation.prepare is not None for operation in operations)
        heavy = any(operation.heavy for operation in operations)
        free = all(operation.free for operation in operations)
        return Operation(signature, launch=launch, prepare=prepare if copies else None, finish=finish, heavy=heavy, free=free)

    def settle(self, values: Sequence[Any]) -> None:
        for operation, value in zip(self.operations, values, strict=True):
            operation.future.settle(0, value)

    def fail(self, error: BaseException) -> None:
        """None of them was done. Whoever leaves the block hears of it, so the single ones need not be asked."""
        self.error = error
        for future in self._futures:
            if not future.done():
                future.fail(0, error)
                future.exception()


class Batching(Protocol):
    """What a batch is collected for: what all communicators over the same group share."""

    batch: Batch | None


class Coalescing:
    """See `Communicator.coalesce`. `begin` begins the whole; `limit` is for how many seconds the block may be open."""

    def __init__(self, where: Batching, begin: Callable[[Operation], Future[Any]], limit: float) -> None:
        self._where = where
        self._begin = begin
        self._limit = limit
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        if self._where.batch is not None:
            raise UsageError("operations are being coalesced already: leave that block first")
        batch = self._where.batch = Batch()
        late = CollectiveTimeout(f"the block of coalesce() was not left within {self._limit:g} s, so that nothing in it was begun")
        self._timer = asyncio.get_running_loop().call_later(self._limit, batch.fail, late)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        batch, self._where.batch = self._where.batch, None
        assert batch is not None
        assert self._timer is not None
        self._timer.cancel()
        if error is not None:
            batch.fail(error)
            return
        if batch.error is not None:
            raise batch.error
        if batch.operations:
            try:
                batch.settle(await self._begin(batch.as_one()))
            except BaseException as trouble:
                batch.fail(trouble)
                raise
