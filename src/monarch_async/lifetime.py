"""A mesh of actors, from its owner's side: where its members are, when they are up, what is done when one ends, how to stop it.

Rules:

* A constructor's error belongs to who awaits the mesh. Where nobody has within `UNOBSERVED` seconds, it is a failure like any other.
* With a restart policy, arguments are kept as they were pickled for the spawn, and a `Driver` decides over every end, the first life's too.
* Without one, a member comes back only with its process: where the mesh of processes has a policy, and with the whole mesh: where a
  `Supervisor` has.
* Lives of the policy's engine are counted from where it began; incarnations never begin again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from monarch_async._core.codec import dumps_whole
from monarch_async._core.events import Evidence, Failure, Identity
from monarch_async._core.instructions import Cause, Exit, Life
from monarch_async._runtime.restarts import Driver
from monarch_async._runtime.runtime import Runtime
from monarch_async._runtime.service import ask, ask_many, tell
from monarch_async._runtime.supervisor import Fate, Home
from monarch_async.errors import ActorDied, SupervisionError, UsageError
from monarch_async.future import MeshFuture
from monarch_async.ids import ProcAddress, slot
from monarch_async.restart import Restart
from monarch_async.shape import Point, Shape
from monarch_async.spawned import FirstLives, Spawned, failure_from

__all__ = ["UNOBSERVED", "Lifetime", "Parent"]

UNOBSERVED = 1.0
"""Seconds that a constructor's error waits for somebody to await the mesh before the owner is told."""


class Parent(Protocol):
    """A supervisor that a mesh was given to."""

    def child_failed(self, child: Any, failure: Failure, *, normal: bool) -> bool:
        """What the mesh's own policy does not deal with; whether it will be started again."""


class Lifetime:
    """See the module's text. `begin` starts the first lives. Its methods are called on the loop."""

    def __init__(self, runtime: Runtime, spawned: Spawned, addresses: Sequence[ProcAddress], shape: Shape, restart: Restart | None) -> None:
        self._runtime = runtime
        self._spawned = spawned
        self._addresses = list(addresses)  # where each member is, or was last
        self._shape = shape
        self._restart = restart
        self._incarnations = [0] * len(addresses)
        self._offsets = [0] * len(addresses)  # the incarnation that the engine counts as 0
        self._saved: dict[int, bytes] = {}  # the last checkpoint of each rank
        self._save_every = restart.checkpoint_every if restart is not None else None
        self._errors: dict[int, BaseException] = {}  # what each rank was last not constructed for
        self._ready: MeshFuture[None] = MeshFuture(loop=runtime.loop)
        self._ready.runtime = runtime
        self._requests = [next(runtime.requests) for _ in addresses]
        self._awaited = False
        self._stopping: asyncio.Task[None] | None = None
        self._over = False
        self._suspended = False  # by its supervisor, or about to be
        self._left: set[int] = set()  # members that have stopped themselves
        self._last_stop: asyncio.Task[None] | None = None
        self.name = spawned.name
        self.parent: Parent | None = None
        self._driver = self._make_driver()
        if restart is not None:
            self._keep_processes()

    def begin(self) -> None:
        """Start the first life of every member."""
        runtime, owner = self._runtime, self._spawned.owner
        for rank in range(len(self._addresses)):
            self._own(rank)
        cell = runtime.cells.get(owner)
        if cell is not None:
            cell.owned[self] = self.stop
        ranks = range(len(self._addresses))
        self._ready.expect(self._shape, [None] * len(ranks), self._requests, keep_errors=False)
        self._ready.add_done_callback(self._constructed)
        if self._driver is None:
            ask_many(runtime, self._addresses, "spawn", tuple(self._spawned), self._ready, ranks, self._requests)
        else:
            self._spawned = self._spawned._replace(behavior=dumps_whole(self._spawned.behavior))
            first = FirstLives(self.first_life, self._requests)
            ask_many(runtime, self._addresses, "spawn", (*self._spawned, 0, True, None, self._save_every), first, ranks, self._requests)

    def _make_driver(self) -> Driver | None:
        if self._restart is None:
            return None
        size = len(self._addresses)
        return Driver(self._runtime.loop, self._runtime.tasks, self, self._spawned.name, size, self._restart)

    def _own(self, rank: int) -> None:
        spawned = self._spawned
        identity = Identity(spawned.name, spawned.class_name, rank, self._incarnations[rank])
        self._runtime.ownership.own(self._addresses[rank].uid, spawned.owner, spawned.key, identity, self)

    # The start.

    @property
    def awaited(self) -> bool:
        """Whether somebody has asked for the outcome."""
        return self._awaited

    async def wait(self) -> None:
        """Until every member is constructed."""
        self._awaited = True
        await asyncio.shield(self._ready)

    def first_life(self, rank: int, error: BaseException | None) -> None:
        """The outcome of the first constructor, where there is a policy."""
        driver = self._driver
        assert driver is not None
        if error is None:
            self._ready.settle(self._requests[rank], None)
            driver.started(rank)
        elif driver.supervises:
            self._errors[rank] = error
            driver.exited(Life(rank, 0), Exit.ABNORMAL, self.failure_of(Life(rank, 0), error))
        else:
            self._ready.fail(self._requests[rank], error)

    def _constructed(self, ready: asyncio.Future[Any]) -> None:
        error = None if ready.cancelled() else ready.exception()
        # The end of its process, or of itself, is told by other ways.
        if error is not None and not self._awaited and (not isinstance(error, ActorDied) or self._driver is not None):
            self._runtime.tasks.start(self._leave_unobserved(error), name=f"error of {self._spawned.name}")

    async def _leave_unobserved(self, error: BaseException) -> None:
        name = self._spawned.name
        try:
            await asyncio.sleep(UNOBSERVED)
        except asyncio.CancelledError:
            if not self._awaited and self._stopping is None:
                self._runtime.log.error("the program ended before anybody awaited %s, whose constructor failed: %s", name, error)
            raise
        if not self.awaited:
            ranks = [point.rank for point in getattr(error, "errors", ()) if isinstance(point, Point)] or [0]
            self._tell_owner(failure_from(name, self._spawned.class_name, ranks, error, "__init__"), normal=False)

    # What happens to members.

    def member_failed(self, failure: Failure, *, normal: bool) -> bool:
        if self._stopping is not None or self._over or self._suspended:
            return True
        rank = failure.ranks[0]
        if self._driver is not None and self._driver.supervises:
            life = Life(rank, failure.incarnation - self._offsets[rank])
            self._driver.exited(life, Exit.NORMAL if normal else Exit.ABNORMAL, failure)
            return True
        if self.parent is not None:
            self._left.add(rank)
            if not normal or len(self._left) == len(self._addresses):
                self._suspended = True
                self.parent.child_failed(self, failure, normal=normal)
            return True
        return False

    def process_ended(self, member: Identity, failure: Failure, evidence: Evidence, *, returns: bool) -> Fate:
        if self._stopping is not None or self._over:
            return Fate.ENDED
        if self._suspended:
            return Fate.RETURNS
        rank, driver = member.rank, self._driver
        if driver is not None and driver.supervises:
            if not evidence.next:
                driver.shutdown()
                return Fate.LOST
            reason = Exit.TAKEN if returns else Exit.NORMAL if evidence.code == 0 else Exit.ABNORMAL
            driver.exited(Life(rank, member.incarnation - self._offsets[rank]), reason, failure)
            return Fate.RETURNS if driver.comes_back(rank) else Fate.ENDED
        if self.parent is not None:
            self._suspended = True
            return Fate.RETURNS if self.parent.child_failed(self, failure, normal=False) else Fate.ENDED
        if not returns:
            return Fate.LOST
        self._runtime.tasks.start(self._come_along(rank), name=f"starting {self._spawned.name}[{rank}] again")
        return Fate.RETURNS

    def give_up(self, member: Identity, evidence: Evidence) -> None:
        """For meshes of processes."""

    def save(self, member: Identity, state: bytes) -> None:
        limit = self._runtime.options.checkpoint_bytes
        if len(state) > limit:
            raise UsageError(f"a checkpoint of {member} has {len(state)} bytes, more than the option checkpoint_bytes={limit}: raise it")
        self._saved[member.rank] = state

    async def _come_along(self, rank: int) -> None:
        """Its process is started again by its own policy, and so is the member."""
        try:
            await self._live_again(rank, self._incarnations[rank] + 1)
        except Exception as error:
            home = self._home(rank)
            if self._stopping is None and (home is None or not home.given_up or home.owner != self._spawned.owner):
                self._tell_owner(failure_from(self._spawned.name, self._spawned.class_name, [rank], error, "__init__"), normal=False)

    async def _live_again(self, rank: int, incarnation: int) -> None:
        self._incarnations[rank] = incarnation
        self._addresses[rank] = address = await self._process(rank)
        if self._stopping is not None or self._over:
            raise SupervisionError(f"{self._spawned.name} is being stopped")
        self._own(rank)
        returns = self._driver is not None or self.parent is not None
        arguments = (*self._spawned, incarnation, returns, self._saved.get(rank), self._save_every)
        try:
            await ask(self._runtime, address, "spawn", *arguments, rank=rank)
        except Exception as error:
            self._errors[rank] = error
            raise
        self._ready.settle(self._requests[rank], None)

    async def _process(self, rank: int) -> ProcAddress:
        """Where a member is to live: in its process, or the one that takes its place, once that answers."""
        home = self._home(rank)
        if home is not None:
            return await home.up(self._addresses[rank])
        address = self._runtime.peer(self._addresses[rank]).latest().address
        if address.uid != self._runtime.me.uid:
            await ask(self._runtime, address, "ping")
        return address

    def _home(self, rank: int) -> Home | None:
        return self._runtime.homes.get(slot(self._addresses[rank]))

    def _keep_processes(self) -> None:
        """Those of this owner's may be started again when they end."""
        homes = {self._home(rank) for rank in range(len(self._addresses))}
        for home in homes - {None}:
            assert home is not None
            home.keep(self)

    def wants(self, address: ProcAddress) -> bool:
        if self._suspended:
            return True
        driver, place = self._driver, slot(address)
        return driver is not None and any(slot(other) == place and driver.comes_back(rank) for rank, other in enumerate(self._addresses))

    def home_stopped(self) -> None:
        self._over = True
        if self._driver is not None:
            self._driver.shutdown()

    def _leave(self) -> None:
        for home in {self._home(rank) for rank in range(len(self._addresses))} - {None}:
            assert home is not None
            home.leave(self)

    # What a driver asks for.

    async def start_life(self, life: Life) -> None:
        await self._live_again(life.child, self._offsets[life.child] + life.incarnation)

    async def stop_lives(self, lives: Sequence[Life]) -> None:
        again = self._driver is not None and self._driver.supervises
        reason = f"stopped, to be started again with others of {self._spawned.name}" if again else "stopped with its mesh"
        await self._end([life.child for life in lives], "suspend" if again else "stop", reason)

    def failure_of(self, life: Life, error: BaseException) -> Failure:
        failure = failure_from(self._spawned.name, self._spawned.class_name, [life.child], error, "__init__")
        return failure._replace(incarnation=self._offsets[life.child] + life.incarnation)

    def escalated(self, failure: Failure) -> None:
        rank = failure.ranks[0]
        self._over = True
        self._disown()
        self._leave()
        evidence = Evidence(failure.reason, failure.exit_code, failure.signal)
        for other, address in enumerate(self._addresses):
            home = self._home(other)
            if home is not None:  # others in it may not have heard of its end yet
                self._runtime.loop.call_soon(home.abandon, address, evidence)
        ranks = [other for other in range(len(self._addresses)) if not self._is_gone(other)]
        self._last_stop = self._runtime.tasks.start(self._end(ranks[::-1], "stop", failure.reason), name=f"stopping {self._spawned.name}")
        if self._ready.done():
            self._tell_owner(failure, normal=False)
        else:
            error = self._errors.get(rank) or failure.as_error()
            error.add_note(failure.reason)
            self._ready.fail(self._requests[rank], error)

    def removed(self, life: Life, failure: Failure) -> None:
        rank = life.child
        error = self._errors.get(rank) or failure.as_error()
        self._ready.fail(self._requests[rank], error)
        if not self._is_gone(rank):
            self._runtime.tasks.start(self._end([rank], "stop", failure.reason), name=f"stopping {self._spawned.name}[{rank}]")

    def ended(self, cause: Cause) -> None:
        """Nothing to do."""

    def _tell_owner(self, failure: Failure, *, normal: bool) -> None:
        if self.parent is not None:
            self._suspended = True
            self.parent.child_failed(self, failure, normal=normal)
        else:
            self._runtime.handle(self._spawned.owner, failure)

    # What a supervisor asks for.

    def keep(self) -> None:
        """From now on members may live again, all together."""
        if not isinstance(self._spawned.behavior, bytes):
            self._spawned = self._spawned._replace(behavior=dumps_whole(self._spawned.behavior))
        self._keep_processes()
        for address in self._addresses:
            tell(self._runtime, address, "keep", self._spawned.key)

    async def suspend_all(self, reason: str) -> None:
        """End the present life of every member."""
        self._suspended = True
        if self._driver is not None:
            self._driver.shutdown()
        if self._last_stop is not None:
            await asyncio.shield(self._last_stop)
        await self._end([rank for rank in range(len(self._addresses)) if not self._is_gone(rank)][::-1], "suspend", reason)

    async def start_all(self) -> None:
        """Begin the next life of every member, with a policy that has forgotten the past. Raises what the first failed of."""
        self._over = self._suspended = False
        self._left.clear()
        self._offsets = [incarnation + 1 for incarnation in self._incarnations]
        self._driver = self._make_driver()
        ranks = range(len(self._addresses))
        outcomes = await asyncio.gather(*(self._live_again(rank, self._offsets[rank]) for rank in ranks), return_exceptions=True)
        error = next((outcome for outcome in outcomes if isinstance(outcome, BaseException)), None)
        if error is not None:
            raise error
        if self._driver is not None:
            for rank in ranks:
                self._driver.started(rank)

    # The end.

    async def stop(self, reason: str) -> None:
        """Stop every member for good; returns when all have ended."""
        if self._stopping is None:
            self._stopping = self._runtime.loop.create_task(self._stop(reason))
        await asyncio.shield(self._stopping)

    async def _stop(self, reason: str) -> None:
        if self._driver is not None:
            self._driver.shutdown()
        self._disown()
        self._leave()
        await self._end([rank for rank in range(len(self._addresses)) if not self._is_gone(rank)], "stop", reason)
        owner = self._runtime.cells.get(self._spawned.owner)
        if owner is not None:
            owner.owned.pop(self, None)

    async def _end(self, ranks: Sequence[int], how: str, reason: str) -> None:
        """Ask members to end, in this order; returns when all have."""
        if not ranks:
            return
        runtime = self._runtime
        answers = MeshFuture[None](loop=runtime.loop)
        answers.runtime = runtime
        requests = [next(runtime.requests) for _ in ranks]
        answers.expect(Shape.of(procs=len(ranks)), [None] * len(ranks), requests, keep_errors=True)
        addresses = [self._addresses[rank] for rank in ranks]
        ask_many(runtime, addresses, how, (self._spawned.key, reason), answers, ranks, requests)
        await answers

    def _disown(self) -> None:
        for address in self._addresses:
            self._runtime.ownership.disown(address.uid, self._spawned.owner, self._spawned.key)

    def _is_gone(self, rank: int) -> bool:
        peer = self._runtime.peers.get(self._addresses[rank].uid)
        return peer is not None and peer.evidence is not None
