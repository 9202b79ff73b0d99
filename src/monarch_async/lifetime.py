"""A mesh of actors, from its owner's side: where its members are, when they are up, what is done when one ends, how to stop it.

Rules:

* A constructor's error belongs to who awaits the mesh. Where nobody has within `UNOBSERVED` seconds, it is a failure like any other.
* With a restart policy, arguments are kept as they were pickled for the spawn, and a `Driver` decides over every end, the first life's too.
* Without one, a member comes back only with its process: where the mesh of processes has a policy, and with the whole mesh: where a
  `Supervisor` has.
* Lives of the policy's engine are counted from where it began; incarnations never begin again.
* A member with a policy whose process can't come back is a failure of the whole mesh, as one that was restarted too often.
* Whatever ends a mesh, whoever waits for a member of it is told, and so is who awaits the mesh itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from monarch_async._core.codec import dumps_whole
from monarch_async._core.events import Evidence, Failure, Identity, died
from monarch_async._core.instructions import Cause, Exit, Life
from monarch_async._runtime.asking import ask, ask_many, tell
from monarch_async._runtime.restarts import Driver
from monarch_async._runtime.runtime import Runtime
from monarch_async._runtime.supervisor import Fate
from monarch_async.errors import ActorDied, SupervisionError, UsageError
from monarch_async.future import MeshFuture
from monarch_async.ids import ProcAddress, slot
from monarch_async.members import Members, Parent
from monarch_async.restart import Restart
from monarch_async.shape import Point, Shape
from monarch_async.spawned import FirstLives, Spawned, failure_from

__all__ = ["UNOBSERVED", "Lifetime"]

_NOTHING: Mapping[int, Any] = MappingProxyType({})
UNOBSERVED = 1.0
"""Seconds that a constructor's error waits for somebody to await the mesh before the owner is told."""


class Lifetime(Members):
    """See the module's text. `begin` starts the first lives. Its methods are called on the loop."""

    __slots__ = tuple(  # as words, since there are many
        """_awaited _driver _errors _final _last_stop _left _offsets _over _ready _requests _restart _save_every _saved _shape _stopping
        _suspended _told _withdrawn name owner parent why_lost""".split()  # noqa: SIM905
    )

    def __init__(self, runtime: Runtime, spawned: Spawned, addresses: list[ProcAddress], shape: Shape, restart: Restart | None) -> None:
        super().__init__(runtime, spawned, addresses)
        self._shape = shape
        self._restart = restart
        self._offsets: Sequence[int] = (0,) * len(addresses)  # the incarnation that the engine counts as 0
        # What most meshes never need is shared and replaced: there may be many thousands of them.
        self._saved: Mapping[int, tuple[tuple[int, int], bytes]] = _NOTHING  # the last checkpoint of each rank: incarnation, number, state
        self._save_every = restart.checkpoint_every if restart is not None else None
        self._errors: Mapping[int, BaseException] = _NOTHING  # what each rank was last not constructed for
        self._ready: MeshFuture[None] = MeshFuture(loop=runtime.loop)
        self._ready.runtime = runtime
        self._requests = [next(runtime.requests) for _ in addresses]
        self._awaited = False
        self._stopping: asyncio.Task[None] | None = None
        self._over = False  # given up, unless its supervisor begins again
        self._suspended = False  # by its supervisor, or about to be
        self._left: frozenset[int] = frozenset()  # members that have stopped themselves
        self._final: Failure | None = None  # of which it was given up
        self._told = False  # the owner of that
        self._withdrawn = False  # its processes were stopped on purpose
        self._last_stop: asyncio.Task[None] | None = None
        self.name = spawned.name
        self.owner = spawned.owner
        self.parent: Parent | None = None
        self.why_lost = ""
        self._driver = self._make_driver()
        if restart is not None:
            self._keep_processes(self)

    def begin(self) -> None:
        """Start the first life of every member."""
        runtime, owner = self._runtime, self._spawned.owner
        for rank in range(len(self._addresses)):
            self._own(rank, self)
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
            self._errors = {**self._errors, rank: error}
            driver.exited(Life(rank, 0), Exit.ABNORMAL, self.failure_of(Life(rank, 0), error))
        else:
            self._ready.fail(self._requests[rank], error)

    def _constructed(self, ready: asyncio.Future[Any]) -> None:
        error = None if ready.cancelled() else ready.exception()
        # The end of its process, or of itself, is told by other ways.
        if error is not None and not self._awaited and (not isinstance(error, ActorDied) or self._driver is not None):
            self._runtime.tasks.start(self._leave_unobserved(error), name=f"error of {self._spawned.name}")

    async def _leave_unobserved(self, error: BaseException) -> None:
        name, lives = self._spawned.name, self._offsets
        try:
            await asyncio.sleep(UNOBSERVED)
        except asyncio.CancelledError:
            if not self._awaited and self._stopping is None:
                self._runtime.log.error("the program ended before anybody awaited %s, whose constructor failed: %s", name, error)
            raise
        if self._awaited or self._told or (self._driver is not None and self._stopping is not None):
            return
        if self._offsets is not lives:  # its supervisor has started it again meanwhile
            return
        ranks = [point.rank for point in getattr(error, "errors", ()) if isinstance(point, Point)] or [0]
        self._tell_owner(self._final or failure_from(name, self._spawned.class_name, ranks, error, "__init__"))

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
            if normal:
                self._left |= {rank}
            if normal and len(self._left) < len(self._addresses):
                self._runtime.tasks.start(self._end([rank], "give_up", _evidence(failure)), name=f"stopping {self.name}[{rank}]")
            else:
                self._suspended = True
                self.parent.child_failed(self, failure, normal=normal)
            return True
        return False

    def process_ended(self, member: Identity, failure: Failure, evidence: Evidence, *, returns: bool) -> Fate:
        if self._stopping is not None or self._over:
            return Fate.ENDED
        rank, driver = member.rank, self._driver
        home = self._home(rank)
        can = evidence.next and (returns or home is None or not home.returns)  # its own policy decides, where it has one
        back = Fate.RETURNS if can else Fate.ENDED
        if self._suspended:
            return back
        reason = Exit.TAKEN if returns else Exit.NORMAL if evidence.code == 0 else Exit.ABNORMAL
        if driver is not None and driver.supervises:
            if back is Fate.ENDED and driver.engine.restarts(reason):
                driver.shutdown()
                self._give_up(failure)
                self._told = self.parent is None
                return Fate.LOST if self._told else self._ask_parent(failure, back)
            driver.exited(Life(rank, member.incarnation - self._offsets[rank]), reason, failure)
            back = back if driver.comes_back(rank) else Fate.ENDED
        elif self.parent is not None:
            back = self._ask_parent(failure, back)
        elif returns and back is Fate.RETURNS:
            self._runtime.tasks.start(self._come_along(rank), name=f"starting {self._spawned.name}[{rank}] again")
        else:
            return Fate.LOST
        if back is Fate.RETURNS:
            self._announce(rank)
        return back

    def moved(self, member: Identity, address: ProcAddress) -> None:
        self._addresses[member.rank] = address

    def _ask_parent(self, failure: Failure, back: Fate) -> Fate:
        assert self.parent is not None
        self._suspended = True
        return back if self.parent.child_failed(self, failure, normal=False) else Fate.ENDED

    def give_up(self, member: Identity, evidence: Evidence) -> None:
        """For meshes of processes."""

    def save(self, member: Identity, number: int, state: bytes) -> None:
        limit = self._runtime.options.checkpoint_bytes
        if len(state) > limit:
            raise UsageError(f"a checkpoint of {member} has {len(state)} bytes, more than the option checkpoint_bytes={limit}: raise it")
        taken = member.incarnation, number
        if taken > self._saved.get(member.rank, ((-1, 0), b""))[0]:
            self._saved = {**self._saved, member.rank: (taken, state)}

    async def _come_along(self, rank: int) -> None:
        """Its process is started again by its own policy, and so is the member."""
        incarnation = self._incarnations[rank] + 1
        try:
            await self._live_again(rank, incarnation)
        except Exception as error:
            home = self._home(rank)
            if self._wants(rank, incarnation) and (home is None or not home.given_up or home.owner != self._spawned.owner):
                self._tell_owner(failure_from(self._spawned.name, self._spawned.class_name, [rank], error, "__init__"))

    def _wants(self, rank: int, incarnation: int) -> bool:
        """Whether this life is still to be started."""
        return self._stopping is None and not self._over and not self._suspended and self._incarnations[rank] == incarnation

    async def _live_again(self, rank: int, incarnation: int) -> None:
        self._incarnations[rank] = incarnation
        address = await self._process(rank)
        if not self._wants(rank, incarnation):
            raise SupervisionError(f"{self._spawned.name}[{rank}] is not wanted any more")
        self._addresses[rank] = address
        self._own(rank, self)
        returns = self._driver is not None or self.parent is not None
        _, saved = self._saved.get(rank, (None, None))
        arguments = (*self._spawned, incarnation, returns, saved, self._save_every)
        try:
            await ask(self._runtime, address, "spawn", *arguments, rank=rank)
        except Exception as error:
            self._errors = {**self._errors, rank: error}
            raise
        self._ready.settle(self._requests[rank], None)

    def wants(self, address: ProcAddress) -> bool:
        if self._over or self._stopping is not None:
            return False
        if self._suspended:
            return True
        driver, place = self._driver, slot(address)
        return driver is not None and any(slot(other) == place and driver.comes_back(rank) for rank, other in enumerate(self._addresses))

    def home_stopped(self, failure: Failure | None) -> None:
        self._over = self._told = True
        self._withdrawn = failure is None
        if self._driver is not None:
            self._driver.shutdown()
        self._fail_ready(died(Evidence("its processes were stopped"), self.name, None, started=False))
        if failure is not None and self.parent is not None:
            self._suspended = True
            self.parent.child_failed(self, failure, normal=False)

    # What a driver asks for.

    async def start_life(self, life: Life) -> None:
        incarnation = self._offsets[life.child] + life.incarnation
        try:
            await self._live_again(life.child, incarnation)
        except ActorDied:
            if self._wants(life.child, incarnation):
                self._announce(life.child)
            raise

    async def stop_lives(self, lives: Sequence[Life]) -> None:
        if self._last_stop is not None and self._over:  # given up, which ends them all
            await asyncio.shield(self._last_stop)
            return
        ranks = [child for child, incarnation in lives if self._offsets[child] + incarnation == self._incarnations[child]]
        await self._end(ranks, "suspend", f"stopped, to be started again with others of {self.name}")

    def failure_of(self, life: Life, error: BaseException) -> Failure:
        failure = failure_from(self._spawned.name, self._spawned.class_name, [life.child], error, "__init__")
        return failure._replace(incarnation=self._offsets[life.child] + life.incarnation)

    def escalated(self, failure: Failure) -> None:
        tells = self._ready.done()  # else that belongs to who awaits the mesh
        self._give_up(failure)
        if tells:
            self._tell_owner(failure)

    def _give_up(self, failure: Failure) -> None:
        """Every member ends, and none is started again."""
        self._over = True
        self._final = failure
        self._disown(_evidence(failure))
        self._leave(self)
        self._last_stop = self._runtime.tasks.start(self._end_all("give_up", _evidence(failure)), name=f"stopping {self.name}")
        if not self._ready.done():
            error = self._errors.get(failure.ranks[0]) or failure.as_error()
            error.add_note(failure.reason)
            self._ready.fail(self._requests[failure.ranks[0]], error)

    def removed(self, life: Life, failure: Failure) -> None:
        rank = life.child
        if not self._ready.done():
            self._ready.fail(self._requests[rank], self._errors.get(rank) or failure.as_error())
        if not self._is_gone(rank):
            self._runtime.tasks.start(self._end([rank], "give_up", _evidence(failure)), name=f"stopping {self._spawned.name}[{rank}]")

    def ended(self, cause: Cause) -> None:
        """Nothing to do."""

    def _tell_owner(self, failure: Failure) -> None:
        self._told = True
        if self.parent is not None:
            self._suspended = True
            self.parent.child_failed(self, failure, normal=False)
        else:
            self._runtime.handle(self._spawned.owner, failure)

    def _fail_ready(self, error: BaseException) -> None:
        """Nobody is constructed any more."""
        for request in self._requests if not self._ready.done() else ():
            self._ready.fail(request, error)

    # What a supervisor asks for.

    def keep(self) -> None:
        """From now on members may live again, all together."""
        if not isinstance(self._spawned.behavior, bytes):
            self._spawned = self._spawned._replace(behavior=dumps_whole(self._spawned.behavior))
        self._keep_processes(self)
        for address in self._addresses:
            tell(self._runtime, address, "keep", self._spawned.key)

    async def suspend_all(self, reason: str) -> None:
        """End the present life of every member."""
        self._suspended = True
        if self._driver is not None:
            self._driver.shutdown()
        if self._last_stop is not None:
            await asyncio.shield(self._last_stop)
        await self._end_all("suspend", reason)

    async def end_all(self, reason: str) -> None:
        """End every member, and tell who waits for one so; all may be started again all the same."""
        self._suspended = True
        await self._end_all("give_up", Evidence(reason))

    async def start_all(self) -> None:
        """Begin the next life of every member, with a policy that has forgotten the past. Raises what the first failed of.

        Does nothing for a mesh that its owner has stopped, or its processes.
        """
        if self._stopping is not None or self._withdrawn:
            return
        self._over = self._suspended = self._told = False
        self._left = frozenset()
        self._offsets = [incarnation + 1 for incarnation in self._incarnations]
        self._driver = self._make_driver()
        self._keep_processes(self)
        lives = [self._first_of(self._driver, rank, incarnation) for rank, incarnation in enumerate(self._offsets)]
        outcomes = await asyncio.gather(*lives, return_exceptions=True)
        error = next((outcome for outcome in outcomes if isinstance(outcome, BaseException)), None)
        if error is not None and self._stopping is None:
            raise error

    async def _first_of(self, driver: Driver | None, rank: int, incarnation: int) -> None:
        await self._live_again(rank, incarnation)
        if driver is not None:
            driver.started(rank)

    # The end.

    async def stop(self, reason: str) -> None:
        """Stop every member for good; returns when all have ended."""
        if self._stopping is None:
            self._stopping = self._runtime.loop.create_task(self._stop(reason))
        await asyncio.shield(self._stopping)

    async def _stop(self, reason: str) -> None:
        if self._driver is not None:
            self._driver.shutdown()
        self._disown(Evidence(f"stopped: {reason}" if reason else "stopped"))
        self._leave(self)
        if self._driver is not None:
            self._fail_ready(died(Evidence(f"stopped: {reason}" if reason else "stopped"), self.name, None, started=False))
        await self._end_all("stop", reason)
        owner = self._runtime.cells.get(self._spawned.owner)
        if owner is not None:
            owner.owned.pop(self, None)


def _evidence(failure: Failure) -> Evidence:
    return Evidence(failure.reason, failure.exit_code, failure.signal)
