"""The members of a mesh of actors, from its owner's side: where each is, as what it is owned, and how to reach it there.

Rules: a member's process is the last one that it was started in. One that has ended may have a successor, in which the member is only once
it was started there; what is told to that one before waits there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from monarch_async._core.events import Evidence, Failure, Identity
from monarch_async._runtime.asking import ask, ask_many, tell
from monarch_async._runtime.runtime import Runtime
from monarch_async._runtime.supervisor import Guest, Home, Ward
from monarch_async.errors import ActorDied
from monarch_async.future import MeshFuture
from monarch_async.ids import ProcAddress, slot
from monarch_async.shape import Shape
from monarch_async.spawned import Spawned

__all__ = ["Members", "Parent"]


class Parent(Protocol):
    """A supervisor that a mesh was given to."""

    def child_failed(self, child: Any, failure: Failure, *, normal: bool) -> bool:
        """What the mesh's own policy does not deal with; whether it will be started again."""


class Members:
    """Base of `Lifetime`."""

    __slots__ = ("__weakref__", "_addresses", "_incarnations", "_runtime", "_spawned")

    def __init__(self, runtime: Runtime, spawned: Spawned, addresses: list[ProcAddress]) -> None:
        self._runtime = runtime
        self._spawned = spawned
        self._addresses = addresses  # where each member is, or was last
        self._incarnations = [0] * len(addresses)  # the last one of each that was started, or is to be

    def _own(self, rank: int, ward: Ward) -> None:
        self._runtime.ownership.own(self._addresses[rank].uid, self._spawned.owner, self._spawned.key, self._identity(rank), ward)

    def _identity(self, rank: int) -> Identity:
        return Identity(self._spawned.name, self._spawned.class_name, rank, self._incarnations[rank])

    def _announce(self, rank: int) -> None:
        """Have the process that comes keep what is sent to this member, however much later that is started."""
        last = self._runtime.peer(self._addresses[rank]).latest()
        if last.evidence is None:
            tell(self._runtime, last.address, "expect", self._spawned.key, self._identity(rank), self._runtime.me.uid)

    async def _process(self, rank: int) -> ProcAddress:
        """Where a member is to live: in its process, or the one that takes its place, once that answers."""
        home = self._home(rank)
        if home is not None:
            return await home.up(self._addresses[rank])
        peer = self._runtime.peer(self._addresses[rank]).latest()
        while peer.address.uid != self._runtime.me.uid:
            try:
                await ask(self._runtime, peer.address, "ping")
                break
            except ActorDied:
                if peer.latest() is peer:
                    raise
                peer = peer.latest()  # that has ended too while it was started, and another one comes
        return peer.address

    def _home(self, rank: int) -> Home | None:
        return self._runtime.homes.get(slot(self._addresses[rank]))

    def _keep_processes(self, guest: Guest) -> None:
        """Those of this owner's may be started again when they end."""
        homes = {self._home(rank) for rank in range(len(self._addresses))}
        for home in homes - {None}:
            assert home is not None
            home.keep(guest)

    def _leave(self, guest: Guest) -> None:
        for home in {self._home(rank) for rank in range(len(self._addresses))} - {None}:
            assert home is not None
            home.leave(guest)

    async def _end_all(self, how: str, reason: str | Evidence) -> None:
        """Last to start first. For one whose process has ended and comes back, word waits there."""
        ranks = []
        for rank, address in reversed(list(enumerate(self._addresses))):
            peer = self._runtime.peers.get(address.uid)
            if peer is None or peer.evidence is None:
                ranks.append(rank)
            elif how != "suspend" and peer.latest().evidence is None:
                evidence = reason if isinstance(reason, Evidence) else Evidence(f"stopped: {reason}" if reason else "stopped")
                tell(self._runtime, peer.latest().address, "give_up", self._spawned.key, evidence, self._identity(rank))
        await self._end(ranks, how, reason)

    async def _end(self, ranks: Sequence[int], how: str, reason: str | Evidence) -> None:
        """Ask members to end, in this order; returns when all have, or after a time in which all should have."""
        if not ranks:
            return
        runtime = self._runtime
        answers = MeshFuture[None](loop=runtime.loop)
        answers.runtime = runtime
        requests = [next(runtime.requests) for _ in ranks]
        answers.expect(Shape.of(procs=len(ranks)), [None] * len(ranks), requests, keep_errors=True)
        addresses = [self._addresses[rank] for rank in ranks]
        ask_many(runtime, addresses, how, (self._spawned.key, reason), answers, ranks, requests)
        # A process that is frozen does not answer, and must not hold up whoever else is to end.
        await asyncio.wait([answers], timeout=2 * (runtime.options.stop_timeout + runtime.options.cleanup_timeout))

    def _disown(self, evidence: Evidence) -> None:
        """Nothing that happens to members counts any more, since they end for this reason."""
        ownership, me = self._runtime.ownership, self._runtime.me.uid
        for rank, address in enumerate(self._addresses):
            ownership.disown(address.uid, self._spawned.owner, self._spawned.key)
            latest = self._runtime.peer(address).latest()
            if address.uid != me and (latest.evidence is None):
                ownership.bury(latest.address.uid, self._spawned.key, self._identity(rank), evidence)

    def _is_gone(self, rank: int) -> bool:
        peer = self._runtime.peers.get(self._addresses[rank].uid)
        return peer is not None and peer.evidence is not None
