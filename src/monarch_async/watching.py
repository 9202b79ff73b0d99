"""Being told of the end of an actor, whoever owns it: `watch`."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from monarch_async._core.events import Evidence, Identity
from monarch_async._runtime.asking import Answer, ask_many, cancel
from monarch_async._runtime.runtime import Runtime
from monarch_async.actor import Actor
from monarch_async.ambient import on_loop
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

    At once where one has ended already; one that is not in its process yet is waited for (option `unknown_grace`; one that is to be started
    again, without limit). It concerns the present life: of an actor that is restarted, watch the next one again. Cancel it to
    stop watching. Raises `UsageError` for anything but a mesh of actors.
    """
    mesh: Any = actors
    if not isinstance(mesh, ActorMesh):
        raise UsageError(f"watch takes a mesh of actors, a slice or a reference, not {mesh!r}")
    runtime: Runtime = mesh._runtime
    return on_loop(runtime, lambda: as_future(runtime, _first([_Watch(runtime, mesh, *member) for member in mesh.members()])))


async def _first(watches: list[_Watch]) -> Ended:
    try:
        done, _ = await asyncio.wait([watch.future for watch in watches], return_when=asyncio.FIRST_COMPLETED)
        return next(watch.result() for watch in watches if watch.future in done)
    finally:
        for watch in watches:
            watch.close()


class _Watch:
    """One member, asked from now on."""

    def __init__(self, runtime: Runtime, mesh: ActorMesh, address: ProcAddress, rank: int) -> None:
        self._runtime = runtime
        self._address = address
        self._name, self._rank = mesh._name, rank
        answer, self._request = Answer(runtime.loop), next(runtime.requests)
        self.future: asyncio.Future[tuple[Identity, Evidence]] = answer.future
        ask_many(runtime, [address], "watch", (mesh._key,), answer, [rank], [self._request])

    def result(self) -> Ended:
        """Once it is done."""
        try:
            identity, evidence = self.future.result()
        except ActorDied as died:
            return Ended(self._name, self._rank, died.incarnation, died.reason, died.exit_code, died.signal)
        return Ended(self._name, self._rank, identity.incarnation, evidence.text, evidence.code, evidence.signal)

    def close(self) -> None:
        """It is not wanted any more."""
        if not self.future.done():
            cancel(self._runtime, self._address, self._request)
