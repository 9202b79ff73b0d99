"""Meshes of processes: where actors are spawned.

``host.spawn_procs(per_host={"gpus": 8})`` returns a `ProcMesh` at once, while the processes start; awaiting it waits until all answer.
Processes end when their mesh is stopped, when the actor that owns the mesh ends, and with the program, whatever ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from typing import Any, ParamSpec, Self, TypeVar, cast, overload

from monarch_async._core.codec import dumps
from monarch_async._runtime.absent import DeadLetters
from monarch_async._runtime.asking import ask
from monarch_async._runtime.runtime import Runtime
from monarch_async._runtime.service import Place
from monarch_async.actor import Actor, ActorBehavior, check_arguments, check_class, takes_argument
from monarch_async.ambient import current_runtime, on_loop
from monarch_async.checkup import check_up
from monarch_async.endpoints import EndpointDefinition
from monarch_async.errors import SpawnError, UsageError
from monarch_async.future import Future, as_future
from monarch_async.health import Health
from monarch_async.ids import ProcAddress, new_actor_key
from monarch_async.lifetime import Lifetime
from monarch_async.mesh import ActorMesh, latest, owner_of_new_meshes
from monarch_async.procs_lifetime import ProcsLifetime
from monarch_async.restart import Restart, check_restart
from monarch_async.shape import Extent, MeshOps, Shape
from monarch_async.spawned import Spawned
from monarch_async.value_mesh import ValueMesh

__all__ = ["ProcMesh", "this_proc"]

P = ParamSpec("P")
A = TypeVar("A", bound=Actor)
M = TypeVar("M", bound="ProcMesh")


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

    @overload
    def spawn(self, name: str, cls: Callable[..., A], *args: Any, restart: Restart | None, **kwargs: Any) -> A: ...
    @overload
    def spawn(self, name: str, cls: Callable[P, A], *args: P.args, **kwargs: P.kwargs) -> A: ...
    def spawn(self, name: str, cls: Callable[..., A], *args: Any, **kwargs: Any) -> A:
        """Make an instance of an actor class in each process; returns a mesh of them at once.

        Await the mesh to wait for the constructors, and to see the error of one that raised. `restart` says what is done about members that
        fail, or whose process ends; without it they are not started again, unless with their process, by a policy of that.

        Raises `TypeError` for what is no actor class and for arguments that can't be sent, `SpawnError` if the owner is stopping,
        `UsageError` for a policy that can't work.
        """
        runtime = self._runtime
        endpoints = check_class(cls)
        if not name or not isinstance(name, str):
            raise TypeError(f"a mesh needs a name, not {name!r}")
        restart: Restart | None = None
        if "restart" in kwargs and (isinstance(kwargs["restart"], Restart) or not takes_argument(cast("Any", cls), "restart")):
            restart = kwargs.pop("restart")
            if restart is not None:
                check_restart(restart, self._mesh_shape.extent.nelements)
            if restart is not None and restart.checkpoint_every is not None and not hasattr(cls, "__checkpoint__"):
                raise UsageError(f"checkpoint_every is set, and {cls.__qualname__} has no __checkpoint__: define it, and __restore__")
        check_arguments(cast("Any", cls), args, kwargs)
        return cast("A", on_loop(runtime, lambda: self._spawn(runtime, name, cast("Any", cls), endpoints, args, kwargs, restart)))

    def _spawn(
        self,
        runtime: Runtime,
        name: str,
        cls: type[Actor],
        endpoints: dict[str, EndpointDefinition[..., Any]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        restart: Restart | None,
    ) -> ActorMesh:
        owner = owner_of_new_meshes(runtime)
        check_not_stopping(runtime, owner[1], name)
        key = new_actor_key()
        addresses = [latest(runtime, self._addresses[base]) for base in self._mesh_shape.ranks()]
        extent = self._mesh_shape.extent
        limits = (
            self._defaults.get("mailbox_messages", runtime.options.mailbox_messages),
            self._defaults.get("mailbox_bytes", runtime.options.mailbox_bytes),
        )
        shape = self._mesh_shape if self._mesh_shape.is_dense and not self._mesh_shape.offset else Shape(extent)
        mesh = ActorMesh(runtime, key, name, cls, tuple(endpoints), addresses, extent, shape, None, limits)
        if self._place is None:
            agents = tuple(self._agents[base] for base in self._mesh_shape.ranks())
            self._place, _ = dumps(Place(extent, agents, tuple(addresses), self._name, runtime.me))
        spawned = Spawned(key, name, cls.__qualname__, ActorBehavior(cls, args, kwargs), owner[1], limits[0], self._place)
        lifetime = mesh._lifetime = Lifetime(runtime, spawned, addresses, shape, restart)
        lifetime.begin()
        if self._lifetime is not None and not self._lifetime.is_up:
            self._lifetime.users.append(lifetime)
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
        return [latest(self._runtime, self._addresses[base]) for base in self._mesh_shape.ranks()]

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
        texts = await asyncio.gather(
            *(ask(self._runtime, self._agents[base], "output_text", latest(self._runtime, self._addresses[base]).uid) for base in bases)
        )
        return ValueMesh(self._mesh_shape.extent, texts)

    async def health(self) -> ValueMesh[Health]:
        """The state of each process, as its host's agent sees it: in bounded time, whatever the process does. Cheap, and disturbs nobody.

        Raises nothing for processes that are gone or out of reach: that is a state too.
        """
        runtime = self._runtime
        procs = [(latest(runtime, self._addresses[base]), self._agents[base]) for base in self._mesh_shape.ranks()]
        return ValueMesh(self._mesh_shape.extent, await check_up(runtime, procs))

    async def dead_letters(self) -> ValueMesh[DeadLetters]:
        """The messages that each process could not deliver and whose senders did not wait: the last of them (option `dead_letters`)."""
        answers = await asyncio.gather(*(ask(self._runtime, address, "dead_letters") for address in self._chosen()))
        return ValueMesh(self._mesh_shape.extent, answers)

    def __reduce__(self) -> tuple[Any, ...]:
        bases = self._mesh_shape.ranks()
        addresses = tuple(latest(self._runtime, self._addresses[base]) for base in bases)
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
