"""One operation on its way: what it says of itself, how it is prepared, started and finished."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from monarch_async.future import Future
from monarch_async.tensor.backend import Backend, Running
from monarch_async.tensor.ledger import Entry
from monarch_async.tensor.signature import Signature

__all__ = ["Launch", "Operation"]

Launch = Callable[[Backend, Sequence[Signature]], Running | None]
"""Starts it, given what all participants have said, in their order; `None`: there is nothing to move."""


class Operation:
    """See the module's text.

    `prepare` makes what has to be copied first; it takes the backend, and runs in a thread where `heavy`. `finish` makes the result; it
    runs where the backend tells of the end, or in a thread too where it copies much, so that neither holds up the loop. `channel` names
    the sequence that it is one of: ``""`` for those of all members, else the pair that it is between, whose other member is `partner`.
    """

    __slots__ = (
        "begin",
        "channel",
        "entry",
        "finish",
        "free",
        "future",
        "heavy",
        "launch",
        "number",
        "partner",
        "prepare",
        "prepared",
        "signature",
        "started",
        "timeout",
        "timer",
        "views",
    )

    def __init__(
        self,
        signature: Signature,
        *,
        launch: Launch | None = None,
        prepare: Callable[[Backend], None] | None = None,
        finish: Callable[[], Any] | None = None,
        heavy: bool = False,
        channel: str = "",
        partner: int | None = None,
        begin: Callable[[Any, Operation], None] | None = None,
        free: bool = False,
    ) -> None:
        self.signature = signature
        self.launch = launch
        self.prepare = prepare
        self.finish = finish
        self.heavy = heavy
        self.channel = channel
        self.partner = partner
        self.free = free  # `launch` needs nothing of what the others have said
        self.begin = begin  # in place of the usual way, for what moves no tensors
        self.number = 0
        self.prepared = prepare is None
        self.views: Sequence[Signature] | None = None  # once all have said theirs
        self.started = False
        self.timeout = 0.0
        self.timer: asyncio.TimerHandle | None = None
        self.entry: Entry
        self.future: Future[Any]
