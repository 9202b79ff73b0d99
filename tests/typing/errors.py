"""Types of exceptions: what `except` gives, and what their constructors refuse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_type

from monarch_async.errors import ActorDied, ActorError, CallTimeout, ChannelError, ChannelFull, DeadlockError, MonarchError


def a_call_failed(error: ActorError) -> None:
    assert_type(error.type_name, str)
    assert_type(error.errors, Mapping[object, BaseException])


def an_actor_died(error: ActorDied) -> None:
    assert_type(error.rank, int | None)
    assert_type(error.started, bool | None)
    died: ActorError = error
    ActorDied("gone", 3)  # type: ignore[call-arg, arg-type]
    ActorDied("gone", rank="3")  # type: ignore[arg-type]


def a_deadline_passed(error: CallTimeout) -> None:
    as_asyncio_says: TimeoutError = error
    as_we_say: MonarchError = error


def a_link_broke(error: ChannelError) -> None:
    as_sockets_say: ConnectionError = error


def a_send_was_refused(error: ChannelFull) -> None:
    assert_type(error.limit, int)
    assert_type(error.option, str)


def a_circle(error: DeadlockError) -> None:
    assert_type(error.chain, tuple[str, ...])
    error.circle  # type: ignore[attr-defined]
