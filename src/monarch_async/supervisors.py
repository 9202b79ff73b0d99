"""Supervisors over whole meshes: what belongs together is started again together, in the order of its start.

    async with Supervisor(Restart(strategy="rest_for_one")) as group:
        store = group.supervise(procs.spawn("store", Store))
        workers = group.supervise(procs.spawn("workers", Worker, store))

A mesh of actors is one child, in the order of the calls. What its own restart policy does not deal with, or any failure of a member where
it has none, is a failure of that child: the mesh is stopped and all its members are started again, with those that the strategy takes
along. References to them stay valid. A supervisor is a child too, so that trees can be built.

Rules:

* Children are stopped last first, each before the one before it, and started first first, each before the next begins.
* When the budget is used up, all children are stopped, and the failure is that of the supervisor: for the one above it, or for its owner's
  `__supervise__`.
* A child has ended normally when all members have stopped themselves.
* A child that is stopped by its owner meanwhile, as any mesh may be, is left out from then on.
* With an actor that owns the supervisor ends that, before the meshes in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol, Self, TypeVar

from monarch_async._core.events import Failure
from monarch_async._core.instructions import Cause, Exit, Life
from monarch_async._core.supervision import AutoShutdown
from monarch_async._runtime.restarts import Driver
from monarch_async._runtime.runtime import Runtime
from monarch_async.ambient import current_runtime, on_loop
from monarch_async.errors import SupervisionError, UsageError
from monarch_async.future import Future, as_future
from monarch_async.members import Parent
from monarch_async.mesh import ActorMesh, owner_of_new_meshes
from monarch_async.restart import Restart
from monarch_async.spawned import failure_from

__all__ = ["Supervisor"]

M = TypeVar("M")


class Child(Protocol):
    """What a supervisor needs of a mesh, or of another supervisor."""

    name: str
    parent: Parent | None

    def keep(self) -> None:
        """It may live again from now on."""

    async def suspend_all(self, reason: str) -> None:
        """End it, to be started again: who calls it waits for that."""

    async def end_all(self, reason: str) -> None:
        """End it, though it may be started again: who calls it is told."""

    async def start_all(self) -> None:
        """Start it again; does nothing if its owner has stopped it."""

    async def stop(self, reason: str) -> None:
        """End it for good."""


class Supervisor:
    """Restarts meshes together; see the module's text.

    Args:
        restart: the policy over the children; by default ``Restart()``.
        name: for errors and logs.
        auto_shutdown: with ``"any_significant"`` the first of the children given as `significant` that ends for good ends all, with
            ``"all_significant"`` the last.

    Raises `UsageError` for settings that don't go together.
    """

    def __init__(self, restart: Restart | None = None, *, name: str = "supervisor", auto_shutdown: AutoShutdown = "never") -> None:
        if restart is not None and not isinstance(restart, Restart):
            raise TypeError(f"a Supervisor takes a Restart, such as Restart(strategy='rest_for_one'), not {restart!r}")
        self.name = name
        self.parent: Parent | None = None
        self._restart = restart or Restart()
        self._auto_shutdown = auto_shutdown
        self._runtime: Runtime = current_runtime()
        self._owner = owner_of_new_meshes(self._runtime)[1]
        self._children: list[Child] = []
        self._significant: set[int] = set()
        self._driver = self._make_driver()
        self._over: asyncio.Future[None] = self._runtime.loop.create_future()
        self._over.add_done_callback(lambda over: over.cancelled() or over.exception())
        self._stopping: asyncio.Task[None] | None = None
        self._last_stop: asyncio.Task[None] | None = None  # after giving up, or shutting down by itself
        self._suspended = False

    def _make_driver(self) -> Driver:
        runtime = self._runtime
        driver = Driver(runtime.loop, runtime.tasks, self, self.name, 0, self._restart, self._auto_shutdown, one_by_one=True)
        for number in range(len(self._children)):
            driver.engine.add(significant=number in self._significant)
        return driver

    def supervise(self, mesh: M, *, significant: bool = False) -> M:
        """Take charge of a mesh of actors, as `spawn` returned it, or of another supervisor; returns it.

        Raises `UsageError` for a slice or a reference, for what has a supervisor already, and for a `significant` one where that
        means nothing; `TypeError` for anything else.
        """
        if isinstance(mesh, Supervisor):
            child: Child = mesh
        elif isinstance(mesh, ActorMesh):
            if mesh._lifetime is None:
                raise UsageError("a supervisor takes the whole mesh as spawn returned it: this is a slice or a reference")
            child = mesh._lifetime
        else:
            raise TypeError(f"a supervisor takes meshes of actors and supervisors, not {mesh!r}; processes have spawn_procs(restart=…)")
        above: Any = self
        while above is not None:
            if above is child:
                raise UsageError(f"{self.name} can't be part of itself")
            above = above.parent
        if child.parent is not None:
            raise UsageError(f"{child.name} has a supervisor already")
        on_loop(self._runtime, lambda: self._take(child, significant))
        return mesh

    def _take(self, child: Child, significant: bool) -> None:
        if self._stopping is not None or self._over.done():
            raise UsageError(f"{self.name} has ended: make another Supervisor")
        number = self._driver.engine.add(significant=significant)
        self._children.append(child)
        if significant:
            self._significant.add(number)
        owner = self._runtime.cells.get(self._owner)
        if owner is not None:  # it ends before what is in it: what was owned last ends first
            owner.owned.pop(self, None)
            owner.owned[self] = self.stop
        child.parent = self
        child.keep()
        self._driver.started(number)

    # What children tell.

    def child_failed(self, child: Child, failure: Failure, *, normal: bool) -> bool:
        driver = self._driver
        if self._suspended or self._stopping is not None or not driver.supervises:
            return False
        number = self._children.index(child)
        life = Life(number, driver.engine.incarnation(number))
        driver.exited(life, Exit.NORMAL if normal else Exit.ABNORMAL, failure)
        return driver.comes_back(number)

    # What the driver asks for.

    async def start_life(self, life: Life) -> None:
        child, driver = self._children[life.child], self._driver
        await child.suspend_all(f"stopped, to be started again by {self.name}")
        if not driver.supervises or driver.engine.incarnation(life.child) != life.incarnation:
            raise SupervisionError(f"{child.name} is not wanted any more")  # here; the one above may have taken over
        await child.start_all()

    async def stop_lives(self, lives: Sequence[Life]) -> None:
        for life in lives:
            child = self._children[life.child]
            if life.incarnation != self._driver.engine.incarnation(life.child):
                continue
            if self._driver.supervises:
                await child.suspend_all(f"stopped, to be started again by {self.name}")
            elif self._last_stop is None:  # else that does it
                await (child.stop if self.parent is None else child.end_all)(f"{self.name} has ended")

    def failure_of(self, life: Life, error: BaseException) -> Failure:
        return failure_from(self._children[life.child].name, "", [0], error, "__init__")

    def escalated(self, failure: Failure) -> None:
        runtime = self._runtime
        if not self._over.done():
            self._over.set_exception(SupervisionError(f"{self.name} has given up: {failure.report()}"))
        self._last_stop = runtime.tasks.start(self._end_children(failure.reason), name=f"stopping {self.name}")
        if self.parent is not None:
            self.parent.child_failed(self, failure, normal=False)
        else:
            runtime.handle(self._owner, failure)

    def removed(self, life: Life, failure: Failure) -> None:
        child = self._children[life.child]
        # A transient one comes back with its group.
        end = child.end_all if self._restart.mode == "transient" else child.stop
        self._runtime.tasks.start(end(failure.reason), name=f"stopping {child.name}")

    def ended(self, cause: Cause) -> None:
        if cause is Cause.AUTOMATIC and not self._over.done():
            self._last_stop = self._runtime.tasks.start(self._end_children(f"{self.name} has shut down"), name=f"stopping {self.name}")
            if self.parent is not None:
                self.parent.child_failed(self, Failure(self.name, "Supervisor", (0,), "shut down"), normal=True)

    # As a child.

    def keep(self) -> None:
        """Its children may be started again already."""

    async def suspend_all(self, reason: str) -> None:
        self._suspended = True
        self._driver.shutdown()
        if self._last_stop is not None:  # it has given up
            await asyncio.shield(self._last_stop)
        for child in reversed(self._children):
            await child.suspend_all(reason)

    async def end_all(self, reason: str) -> None:
        self._suspended = True
        self._driver.shutdown()
        for child in reversed(self._children):
            await child.end_all(reason)

    async def start_all(self) -> None:
        if self._stopping is not None:
            return
        if self._over.done():
            self._over = self._runtime.loop.create_future()
            self._over.add_done_callback(lambda over: over.cancelled() or over.exception())
        driver = self._driver = self._make_driver()
        self._suspended = False
        for number, child in enumerate(list(self._children)):
            if driver.supervises and not driver.engine.incarnation(number):  # else it has been started by itself already
                await child.start_all()
                driver.started(number)

    # The end.

    def wait(self) -> Future[None]:
        """Done when the supervisor has ended. Raises `SupervisionError` if it has given up."""
        return as_future(self._runtime, asyncio.shield(self._over))

    async def stop(self, reason: str = "") -> None:
        """Stop every child, the last first; returns when all have ended."""
        self._driver.shutdown()
        if self._stopping is None:
            self._stopping = self._runtime.loop.create_task(self._stop_children(reason))
        await asyncio.shield(self._stopping)

    async def _stop_children(self, reason: str) -> None:
        if self._last_stop is not None:
            await asyncio.shield(self._last_stop)
        for child in reversed(self._children):
            await child.stop(reason)
        if not self._over.done():
            self._over.set_result(None)
        owner = self._runtime.cells.get(self._owner)
        if owner is not None:
            owner.owned.pop(self, None)

    async def _end_children(self, reason: str) -> None:
        """It has given up, or shut down by itself: for good, unless there is one above that may start it again."""
        for child in reversed(self._children):
            await (child.stop(reason) if self.parent is None else child.suspend_all(reason))
        if not self._over.done():
            self._over.set_result(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    def __repr__(self) -> str:
        return f"<Supervisor {self.name!r} of {', '.join(child.name for child in self._children) or 'nothing'}>"
