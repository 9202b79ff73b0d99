"""Being told of the end of an actor, whoever owns it: `watch`."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from monarch_async._core.events import Evidence, Identity
from monarch_async._runtime.runtime import Runtime
from monarch_async._runtime.service import Answer, ask_many, cancel
from monarch_async.actor import Actor
from monarch_async.ambient import current_runtime
from monarch_async.errors import ActorDied, UsageError
from monarch_async.future import Future, as_future
from monarch_async.ids import ProcAddress
from monarch_async.mesh import ActorMesh

__all__ = ["Ended", "watch"]


class Ended(NamedTuple):
    """The end of one life of an actor: of which mesh, rank and incarnation, why, and how its process ended where that was the reason."""

    mesh: str
    rank: int
    incarnation: int
    reason: str
    exit_code: int | None = None
    signal: int | None = None

    def __str__(self) -> str:
        return f"{self.mesh}[{self.rank}] ended: {self.reason}"


def watch(actors: Actor) -> Future[Ended]:
    """Done when the first member of a mesh, a slice or a reference has ended: failed, stopped, or gone with its process.

    At once where one has ended already. It concerns the present life: of an actor that is restarted, watch the next one again. Cancel it to
    stop watching. Raises `UsageError` for anything but a mesh of actors.
    """
    mesh: Any = actors
    if not isinstance(mesh, ActorMesh):
        raise UsageError(f"watch takes a mesh of actors, a slice or a reference, not {mesh!r}")
    return as_future(mesh._runtime, _first(mesh))


async def _first(mesh: ActorMesh) -> Ended:
    members = mesh.members()
    watches = [asyncio.ensure_future(_watch(current_runtime(), address, mesh._key, mesh._name, rank)) for address, rank in members]
    try:
        done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for other in watches:
            other.cancel()


async def _watch(runtime: Runtime, address: ProcAddress, key: int, name: str, rank: int) -> Ended:
    answer, request = Answer(runtime.loop), next(runtime.requests)
    ask_many(runtime, [address], "watch", (key,), answer, [rank], [request])
    identity: Identity
    evidence: Evidence
    try:
        identity, evidence = await answer.future
    except ActorDied as died:
        return Ended(name, rank, died.incarnation, died.reason, died.exit_code, died.signal)
    except asyncio.CancelledError:
        cancel(runtime, address, request)
        raise
    return Ended(name, rank, identity.incarnation, evidence.text, evidence.code, evidence.signal)
