"""A `torch.distributed.Store` that the members of one epoch of a group hold together, over the runtime's own messages.

There is no server and no port: each member has a copy, and what one sets is told to all. Only `add` and `compare_set`, which must be one
after the other, are for the first member to do. A member that ends ends the epoch, and the store with it, so nothing here outlives anybody.

Rules:

* Its methods are called from threads, also C++ ones; what comes from others is put in by the loop.
* Once it is closed everything that waits, and whatever is asked then, raises: so a rendezvous never outlives its epoch.
* Waiting holds no lock of the interpreter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from monarch_async.errors import CollectiveError

__all__ = ["MemberStore"]

Tell = Callable[[str, str, Any], None]
"""Sends to the other members, from any thread: what to do, key, value."""


class MemberStore(Store):
    """See the module's text. `tell` reaches all others, `tell_first` the first member."""

    def __init__(self, me: int, tell: Tell, tell_first: Tell, timeout: float) -> None:
        super().__init__()
        self._me = me
        self._tell = tell
        self._tell_first = tell_first
        self._values: dict[str, bytes] = {}
        self._answers: dict[int, Any] = {}
        self._asked = 0
        self._news = threading.Condition()
        self._closed: BaseException | None = None
        self._timeout = timedelta(seconds=timeout)

    # From the loop.

    def heard(self, index: int, what: str, key: str, value: Any) -> tuple[int, str, Any] | None:
        """Another member says something; what to answer to that one, if anything: for which request, and what."""
        if what == "set":
            self._put(key, value)
        elif what == "delete":
            with self._news:
                self._values.pop(key, None)
        elif what in ("add", "compare_set"):
            request, *args = value
            return request, "answer", self._change(what, key, *args)
        elif what == "answer":
            request, result = value
            with self._news:
                self._answers[request] = result
                self._news.notify_all()
        return None

    def close(self, error: BaseException) -> None:
        """The epoch is over."""
        with self._news:
            self._closed = self._closed or error
            self._news.notify_all()

    def _put(self, key: str, value: bytes) -> None:
        with self._news:
            self._values[key] = value
            self._news.notify_all()

    def _change(self, what: str, key: str, *args: Any) -> Any:
        """For the first member: change a value in one step and tell all."""
        with self._news:
            before = self._values.get(key)
            result: Any
            if what == "add":
                result = int(before or b"0") + args[0]
                after = str(result).encode()
            else:
                expected, desired = args
                matches = before == expected or (before is None and not expected)
                after = desired if matches else before if before is not None else expected
                result = after
            self._values[key] = after
            self._news.notify_all()
        self._tell("set", key, after)
        return result

    def _wait_until(self, ready: Callable[[], bool], what: str, timeout: timedelta | None) -> None:
        limit = (timeout or self._timeout).total_seconds()
        with self._news:
            if not self._news.wait_for(lambda: self._closed is not None or ready(), limit):
                raise TimeoutError(f"{what} did not come within {limit:g} s")
            if self._closed is not None:
                raise CollectiveError(f"the epoch that this store belongs to is over: {self._closed}")

    # What torch calls.

    def set(self, key: str, value: Any) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._put(key, data)
        self._tell("set", key, data)

    def get(self, key: str) -> bytes:
        self._wait_until(lambda: key in self._values, f"key {key!r}", None)
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._wait_until(lambda: all(key in self._values for key in keys), f"keys {keys}", timeout)

    def check(self, keys: list[str]) -> bool:
        with self._news:
            return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        return int(self._by_first("add", key, amount))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        before, after = (value.encode() if isinstance(value, str) else bytes(value) for value in (expected, desired))
        return bytes(self._by_first("compare_set", key, before, after))

    def delete_key(self, key: str) -> bool:
        with self._news:
            there = self._values.pop(key, None) is not None
        self._tell("delete", key, None)
        return there

    def num_keys(self) -> int:
        with self._news:
            return len(self._values)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return False

    def _by_first(self, what: str, key: str, *args: Any) -> Any:
        if self._me == 0:
            return self._change(what, key, *args)
        with self._news:
            self._asked += 1
            request = self._asked
        self._tell_first(what, key, (request, *args))
        self._wait_until(lambda: request in self._answers, f"the first member's answer about key {key!r}", None)
        with self._news:
            return self._answers.pop(request)
