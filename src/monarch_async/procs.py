"""Meshes of processes: where actors are spawned.

``host.spawn_procs(per_host={"gpus": 8})`` returns a `ProcMesh` at once, while the processes start; awaiting it waits until all answer. Processes
end when their mesh is stopped, when the actor that owns the mesh ends, and with the program, whatever ends it.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, ParamSpec, Self, TypeVar, cast

from monarch_async._core.events import Identity
from monarch_async._runtime.runtime import Runtime
from monarch_async._runtime.service import ask, ask_many
from monarch_async.actor import Actor, ActorBehavior, check_class
from monarch_async.ambient import current_runtime, run_on
from monarch_async.endpoint import EndpointDefinition
from monarch_async.errors import SpawnError, UsageError
from monarch_async.future import Future, MeshFuture
from monarch_async.ids import ProcAddress, new_actor_key
from monarch_async.mesh import ActorMesh, Lifetime, owner_of_new_meshes
from monarch_async.shape import Extent, MeshOps, Shape
from monarch_async.value_mesh import ValueMesh

__all__ = ["ProcMesh", "this_proc"]

P = ParamSpec("P")
A = TypeVar("A", bound=Actor)


class ProcsLifetime:
    """What the owner of a mesh of processes holds: the task that starts them, and how to stop them."""

    def __init__(self, runtime: Runtime, addresses: Sequence[ProcAddress], agents: Sequence[ProcAddress], owner: int, name: str) -> None:
        self._runtime = runtime
        self._addresses = addresses
        self._agents = agents  # of the host of each address
        self._owner = owner
        self._name = name
        self.starting: asyncio.Task[None]
        self._stopping: asyncio.Task[None] | None = None

    async def wait(self) -> None:
        """Until every process answers. Raises `SpawnError`, or `ActorDied` for one that ended before it did."""
        await asyncio.shield(self.starting)

    async def stop(self, reason: str) -> None:
        if self._stopping is None:
            self._stopping = self._runtime.loop.create_task(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        runtime = self._runtime
        for address in self._addresses:
            for owner, members in runtime.ownership.release(address.uid).items():
                for member in members:
                    if owner != self._owner:
                        runtime.ownership.own(address.uid, owner, member)
        by_agent: dict[ProcAddress, list[str]] = {}
        for address, agent in zip(self._addresses, self._agents, strict=True):
            by_agent.setdefault(agent, []).append(address.uid)
        timeout = runtime.options.stop_timeout
        await asyncio.gather(
            *(ask(runtime, agent, "stop_procs", uids, timeout) for agent, uids in by_agent.items()), return_exceptions=True
        )


class ProcMesh(MeshOps):
    """Processes, or some of them. A reference, which can be sliced and sent; only the owner's whole mesh can be stopped."""

    def __init__(
        self,
        runtime: Runtime,
        name: str,
        addresses: Sequence[ProcAddress],
        agents: Sequence[ProcAddress],
        shape: Shape,
        defaults: dict[str, int] | None = None,
    ) -> None:
        self._runtime = runtime
        self._name = name
        self._addresses = addresses  # by base rank of the shape, as `_agents`, the agent of each one's host
        self._agents = agents
        self._mesh_shape = shape
        self._defaults = defaults or {}
        self._lifetime: ProcsLifetime | None = None
        self._after: asyncio.Task[None] | None = None

    @property
    def _shape(self) -> Shape:
        return self._mesh_shape

    def _with_shape(self, shape: Shape, /) -> Self:
        return type(self)(self._runtime, self._name, self._addresses, self._agents, shape, self._defaults)

    def options(self, *, mailbox_messages: int | None = None, mailbox_bytes: int | None = None) -> Self:
        """The same processes; actors spawned through what this returns have these bounds on what one sender may have under way to them."""
        changes = {"mailbox_messages": mailbox_messages, "mailbox_bytes": mailbox_bytes}
        given = {name: value for name, value in changes.items() if value is not None}
        for name, value in given.items():
            if value < 1:
                raise UsageError(f"{name} must be at least 1, not {value!r}")
        mesh = type(self)(self._runtime, self._name, self._addresses, self._agents, self._mesh_shape, {**self._defaults, **given})
        mesh._lifetime = self._lifetime
        return mesh

    def spawn(self, name: str, cls: Callable[P, A], *args: P.args, **kwargs: P.kwargs) -> A:
        """Make an instance of an actor class in each process; returns a mesh of them at once.

        Await the mesh to wait for the constructors, and to see the error of one that raised. Raises `TypeError` for what is no actor class and
        for arguments that can't be sent, `SpawnError` if the owner is stopping.
        """
        runtime = self._runtime
        endpoints = check_class(cls)
        if not name or not isinstance(name, str):
            raise TypeError(f"a mesh needs a name, not {name!r}")
        return cast("A", on_loop(runtime, lambda: self._spawn(runtime, name, cast("Any", cls), endpoints, args, kwargs)))

    def _spawn(
        self,
        runtime: Runtime,
        name: str,
        cls: type[Actor],
        endpoints: dict[str, EndpointDefinition[..., Any]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> ActorMesh:
        owner = owner_of_new_meshes(runtime)
        check_not_stopping(runtime, owner[1], name)
        key = new_actor_key()
        addresses = [self._addresses[base] for base in self._mesh_shape.ranks()]
        extent = self._mesh_shape.extent
        limits = (
            self._defaults.get("mailbox_messages", runtime.options.mailbox_messages),
            self._defaults.get("mailbox_bytes", runtime.options.mailbox_bytes),
        )
        behavior = ActorBehavior(cls, args, kwargs)
        mesh = ActorMesh(runtime, key, name, cls, tuple(endpoints), addresses, extent, Shape(extent), None, limits)
        lifetime = mesh._lifetime = Lifetime(runtime, key, name, addresses, owner[1])
        ready: MeshFuture[None] = MeshFuture(loop=runtime.loop)
        ready.runtime = runtime
        ready.add_done_callback(lambda done: done.cancelled() or done.exception())
        requests = [next(runtime.requests) for _ in addresses]
        ready.expect(Shape(extent), [None] * len(addresses), requests, keep_errors=False)
        lifetime.ready = ready
        place = (extent, [self._agents[base] for base in self._mesh_shape.ranks()], addresses, self._name)
        arguments = (key, name, cls.__qualname__, behavior, owner, limits[0], place)
        ask_many(runtime, addresses, "spawn", arguments, ready, range(len(addresses)), requests)
        lifetime.own(lambda rank: Identity(name, cls.__qualname__, rank))
        cell = runtime.cells.get(owner[1])
        if cell is not None:
            cell.owned.append(lifetime.stop)
        return mesh

    def __await__(self) -> Generator[Any, None, Self]:
        """Wait until every process answers."""
        if self._lifetime is not None:
            yield from self._lifetime.wait().__await__()
        else:
            yield from asyncio.gather(*(ask(self._runtime, address, "ping") for address in self._chosen())).__await__()
        return self

    @property
    def initialized(self) -> Future[Self]:
        """Monarch's way to wait; the same as awaiting the mesh, as a future with `get`."""
        return as_future(self._runtime, self)

    def _chosen(self) -> list[ProcAddress]:
        return [self._addresses[base] for base in self._mesh_shape.ranks()]

    async def stop(self, reason: str = "") -> None:
        """Stop every actor and end every process; returns when all are gone. A second stop does nothing.

        Raises `UsageError` unless this is the whole mesh as `spawn_procs` returned it.
        """
        if self._lifetime is None:
            raise UsageError(f"{self._name} can be stopped only by its owner, and only as a whole: this is a slice or a reference")
        await self._lifetime.stop(reason)

    async def __aenter__(self) -> Self:
        await self
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def logs(self) -> ValueMesh[str]:
        """What each process has printed, in full as far as it is kept (option `log_bytes`), also of processes that are gone."""
        bases = self._mesh_shape.ranks()
        texts = await asyncio.gather(*(ask(self._runtime, self._agents[base], "output_text", self._addresses[base].uid) for base in bases))
        return ValueMesh(self._mesh_shape.extent, texts)

    def __reduce__(self) -> tuple[Any, ...]:
        bases = self._mesh_shape.ranks()
        addresses = tuple(self._addresses[base] for base in bases)
        return _proc_mesh, (self._name, addresses, tuple(self._agents[base] for base in bases), self.extent, self._defaults)

    def __repr__(self) -> str:
        return f"<ProcMesh {self._name!r} {dict(self.extent)}>"


def _proc_mesh(
    name: str, addresses: tuple[ProcAddress, ...], agents: tuple[ProcAddress, ...], extent: Extent, defaults: dict[str, int]
) -> ProcMesh:
    return ProcMesh(current_runtime(), name, addresses, agents, Shape(extent), defaults)


def this_proc() -> ProcMesh:
    """This process, as a mesh without dimensions: actors spawned on it live here, in the runtime's loop."""
    runtime = current_runtime()
    return ProcMesh(runtime, runtime.me.name, [runtime.me], [runtime.agent], Shape.of())


T = TypeVar("T")


def on_loop(runtime: Runtime, function: Callable[[], T]) -> T:
    """Run a function in the runtime's thread, and wait for it; with the context of the handler that asks."""
    if threading.get_ident() == runtime.thread:
        return function()
    context = contextvars.copy_context()

    async def run() -> T:
        return context.run(function)

    return run_on(runtime.loop, run())


def as_future(runtime: Runtime, awaitable: Any) -> Future[Any]:
    """A `Future` of something that can be awaited."""
    future: Future[Any] = Future(loop=runtime.loop)
    future.runtime = runtime

    async def wait() -> None:
        try:
            future.settle(0, await awaitable)
        except Exception as error:
            future.fail(0, error)

    on_loop(runtime, lambda: runtime.tasks.start(wait(), name="waiting"))
    return future


def check_not_stopping(runtime: Runtime, owner: int, name: str) -> None:
    """`SpawnError` if the owner of what is to be spawned is being stopped: nothing may be left behind."""
    cell = runtime.cells.get(owner)
    if runtime.evidence is not None or (owner and (cell is None or cell.evidence is not None)):
        raise SpawnError(f"{name} was not spawned: its owner is being stopped")
