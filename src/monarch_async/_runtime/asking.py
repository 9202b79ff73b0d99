"""How to ask another runtime, or this one, for one of its services (`service`): calls and casts to the key 0."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from monarch_async._core.codec import dumps
from monarch_async._runtime.answer import Answer
from monarch_async._runtime.context import Waiter
from monarch_async._runtime.runtime import Runtime
from monarch_async.ids import ProcAddress

__all__ = ["SERVICE", "Answer", "ask", "ask_many", "cancel", "tell"]

SERVICE = 0
_LIMIT = 1 << 40


def ask(runtime: Runtime, address: ProcAddress, name: str, *args: Any, rank: int = 0) -> asyncio.Future[Any]:
    """Call a service of a process; the future has its answer, or `ActorDied` if the process is gone."""
    answer = Answer(runtime.loop)
    ask_many(runtime, [address], name, args, answer, [rank], [next(runtime.requests)])
    return answer.future


def ask_many(
    runtime: Runtime,
    addresses: Sequence[ProcAddress],
    name: str,
    args: tuple[Any, ...],
    waiter: Waiter,
    ranks: Sequence[int],
    requests: Sequence[int],
) -> None:
    """Call the same service of several processes with one pickle of the arguments; each gets its rank and request number."""
    pickled: tuple[bytes, list[memoryview]] | None = None
    for address, request, rank in zip(addresses, requests, ranks, strict=True):
        if address.uid == runtime.me.uid:
            runtime.local_lane(SERVICE, "runtime", 0, _LIMIT).send(name, request, rank, args, {}, None, waiter)
            continue
        pickled = pickled or dumps((args, {}))
        peer = runtime.peer(address)
        lane = peer.lanes.get(SERVICE) or peer.lane(SERVICE, str(address), address.rank, _LIMIT, _LIMIT)
        lane.call(name, request, rank, *pickled, None, waiter)


def cancel(runtime: Runtime, address: ProcAddress, request: int) -> None:
    """The answer of a service is not wanted any more."""
    if address.uid == runtime.me.uid:
        runtime.cancel_request(request, runtime.local_lane(SERVICE, "runtime", 0, _LIMIT), "cancelled")
    else:
        runtime.cancel_request(request, runtime.peer(address).lane(SERVICE, str(address), address.rank, _LIMIT, _LIMIT), "cancelled")


def tell(runtime: Runtime, address: ProcAddress, name: str, *args: Any) -> None:
    """Cast to a service of a process."""
    if address.uid == runtime.me.uid:
        runtime.local_lane(SERVICE, "runtime", 0, _LIMIT).send(name, 0, 0, args, {}, None, None)
    else:
        body, buffers = dumps((args, {}))
        runtime.peer(address).lane(SERVICE, str(address), address.rank, _LIMIT, _LIMIT).cast(name, 0, body, buffers, None)
