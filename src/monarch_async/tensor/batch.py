"""Several operations as one: the members agree once, and all are started together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monarch_async.errors import UsageError
from monarch_async.exchange import Runtime
from monarch_async.future import Future
from monarch_async.tensor.backend import Backend, Running, Together
from monarch_async.tensor.operation import Operation
from monarch_async.tensor.signature import Signature

__all__ = ["Batch"]


class Batch:
    """What was called so far."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    def add(self, operation: Operation, runtime: Runtime) -> Future[Any]:
        """One more. Raises `UsageError` for what is not of all members."""
        if operation.channel or operation.begin is not None:
            raise UsageError(f"{operation.signature.kind} is between two members: it can't be coalesced with operations of all")
        operation.future = Future(loop=runtime.loop)
        operation.future.runtime = runtime
        self.operations.append(operation)
        return operation.future

    def as_one(self) -> Operation:
        """All of them."""
        operations = self.operations

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
        for operation in self.operations:
            operation.future.fail(0, error)
            operation.future.exception()
