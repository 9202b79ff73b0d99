"""Meshes of processes: where actors are spawned.

``host.spawn_procs(per_host={"gpus": 8})`` returns a `ProcMesh` at once, while the processes start; awaiting it waits until all answer.
Processes end when their mesh is stopped, when the actor that owns the mesh ends, and with the program, whatever ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from typing import Any, ParamSpec, Self, TypeVar, cast

from monarch_async._core.codec import dumps
from monarch_async._core.events import Evidence
from monarch_async._runtime.runtime import Runtime
from monarch_async._runtime.service import Place, ask, ask_many
from monarch_async.actor import Actor, ActorBehavior, check_arguments, check_class
from monarch_async.ambient import current_runtime, on_loop
from monarch_async.checkup import check_up
from monarch_async.endpoints import EndpointDefinition
from monarch_async.errors import SpawnError, UsageError
from monarch_async.future import Future, MeshFuture, as_future
from monarch_async.health import Health
from monarch_async.ids import ProcAddress, new_actor_key
from monarch_async.mesh import ActorMesh, Lifetime, owner_of_new_meshes
from monarch_async.shape import Extent, MeshOps, Shape
from monarch_async.value_mesh import ValueMesh

__all__ = ["ProcMesh", "this_proc"]

STOPPED = Evidence("its process was stopped with its mesh")
P = ParamSpec("P")
A = TypeVar("A", bound=Actor)
M = TypeVar("M", bound="ProcMesh")


class ProcsLifetime:
    """What the owner of a mesh of processes holds: the task that starts them, and how to stop them."""

    def __init__(self, runtime: Runtime, addresses: Sequence[ProcAddress], agents: Sequence[ProcAddress], owner: int, name: str) -> None:
        self._runtime = runtime
        self._addresses = addresses
        self._agents = agents  # of the host of each address
        self._owner = owner
        self._name = name
        self.users: list[Lifetime] = []  # of the meshes of actors that were spawned on it before it was up
        self.starting: asyncio.Future[None]
        self._awaited = False
        self._stopping: asyncio.Task[None] | None = None

    async def wait(self) -> None:
        """Until every process answers. Raises `SpawnError`, or `ActorDied` for one that ended before it did."""
        self._awaited = True
        await asyncio.shield(self.starting)

    @property
    def is_up(self) -> bool:
        """Whether the start has ended well, so that it does not matter any more who asks."""
        return self.starting.done() and not self.starting.cancelled() and self.starting.exception() is None

    @property
    def awaited(self) -> bool:
        """Whether somebody has asked for the outcome of the start, or of what was spawned on it."""
        return self._awaited or any(user.awaited for user in self.users)

    async def stop(self, reason: str) -> None:
        if self._stopping is None:
            self._stopping = self._runtime.loop.create_task(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        runtime = self._runtime
        for address in self._addresses:
            runtime.ownership.disown_all(address.uid, self._owner)
        by_agent: dict[ProcAddress, list[str]] = {}
        for address, agent in zip(self._addresses, self._agents, strict=True):
            by_agent.setdefault(agent, []).append(address.uid)
        timeout = runtime.options.stop_timeout
        await asyncio.gather(
            *(ask(runtime, agent, "stop_procs", uids, timeout) for agent, uids in by_agent.items()), return_exceptions=True
        )
        for address in self._addresses:  # whoever calls them from now on is told that this was meant
            runtime.peer(address).gone(STOPPED)
            runtime.peer(address).evidence = STOPPED
        owner = runtime.cells.get(self._owner)
        if owner is not None:
            owner.owned.pop(self, None)


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
        self._place: bytes | None = None  # for those who are spawned here, once there are some

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

        Await the mesh to wait for the constructors, and to see the error of one that raised. Raises `TypeError` for what is no actor
        class and for arguments that can't be sent, `SpawnError` if the owner is stopping.
        """
        runtime = self._runtime
        endpoints = check_class(cls)
        if not name or not isinstance(name, str):
            raise TypeError(f"a mesh needs a name, not {name!r}")
        check_arguments(cast("Any", cls), args, kwargs)
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
        shape = self._mesh_shape if self._mesh_shape.is_dense and not self._mesh_shape.offset else Shape(extent)
        mesh = ActorMesh(runtime, key, name, cls, tuple(endpoints), addresses, extent, shape, None, limits)
        ready: MeshFuture[None] = MeshFuture(loop=runtime.loop)
        ready.runtime = runtime
        requests = [next(runtime.requests) for _ in addresses]
        ready.expect(shape, [None] * len(addresses), requests, keep_errors=False)
        if self._place is None:
            agents = tuple(self._agents[base] for base in self._mesh_shape.ranks())
            self._place, _ = dumps(Place(extent, agents, tuple(addresses), self._name, runtime.me))
        arguments = (key, name, cls.__qualname__, behavior, owner[1], limits[0], self._place)
        ask_many(runtime, addresses, "spawn", arguments, ready, range(len(addresses)), requests)
        mesh._lifetime = Lifetime(runtime, key, name, cls.__qualname__, addresses, owner[1], ready)
        if self._lifetime is not None and not self._lifetime.is_up:
            self._lifetime.users.append(mesh._lifetime)
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
        return as_future(self._runtime, _ready(self))

    def _chosen(self) -> list[ProcAddress]:
        return [self._addresses[base] for base in self._mesh_shape.ranks()]

    def stop(self, reason: str = "") -> Future[None]:
        """Stop every actor and end every process; returns when all are gone. A second stop does nothing.

        Raises `UsageError` unless this is the whole mesh as `spawn_procs` returned it.
        """
        if self._lifetime is None:
            raise UsageError(f"{self._name} can be stopped only by its owner, and only as a whole: this is a slice or a reference")
        return as_future(self._runtime, self._lifetime.stop(reason))

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

    async def health(self) -> ValueMesh[Health]:
        """The state of each process, as its host's agent sees it: in bounded time, whatever the process does. Cheap, and disturbs nobody.

        Raises nothing for processes that are gone or out of reach: that is a state too.
        """
        bases = self._mesh_shape.ranks()
        return ValueMesh(
            self._mesh_shape.extent, await check_up(self._runtime, [(self._addresses[base], self._agents[base]) for base in bases])
        )

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


async def _ready(mesh: M) -> M:
    await mesh
    return mesh


def check_not_stopping(runtime: Runtime, owner: int, name: str) -> None:
    """`SpawnError` if the owner of what is to be spawned is being stopped: nothing may be left behind."""
    cell = runtime.cells.get(owner)
    if runtime.stopping is not None or (owner and (cell is None or cell.evidence is not None)):
        raise SpawnError(f"{name} was not spawned: its owner is being stopped")
