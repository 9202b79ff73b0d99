"""Objects that members of an epoch send each other, as messages of the runtime: buffered where they arrive, and received in order."""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from monarch_async.tensor.operation import Operation

__all__ = ["Objects"]


class Where(Protocol):
    """The epoch."""

    under_way: set[Operation]
    number: int

    @property
    def me(self) -> int: ...
    def post(self, what: str, *args: Any, to: int | None = None) -> None: ...
    def ended(self, operation: Operation, value: Any, error: BaseException | None) -> None: ...


class Objects:
    """What has come and was not received, and what is to be received and has not come."""

    def __init__(self, epoch: Where) -> None:
        self._epoch = epoch
        self._came: dict[int, deque[Any]] = {}
        self._wanted: dict[int, deque[Operation]] = {}

    def send(self, to: int, value: Any) -> None:
        if to == self._epoch.me:
            self.came(to, value)
        else:
            self._epoch.post("object", value, to=to)

    def came(self, index: int, value: Any) -> None:
        """From a member."""
        wanted = self._wanted.get(index)
        while wanted:
            operation = wanted.popleft()
            if operation in self._epoch.under_way:
                self._epoch.ended(operation, value, None)
                return
        self._came.setdefault(index, deque()).append(value)

    def want(self, operation: Operation, source: int) -> None:
        """An operation that is done with the next object of a member."""
        operation.entry.epoch = self._epoch.number
        self._epoch.under_way.add(operation)
        came = self._came.get(source)
        if came:
            self._epoch.ended(operation, came.popleft(), None)
        else:
            self._wanted.setdefault(source, deque()).append(operation)
