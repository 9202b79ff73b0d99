"""Meshes of actors: what `spawn` returns, and what travels in messages as a reference.

An `ActorMesh` addresses some ranks of what was spawned. It is a reference: it can be sliced, sent and dropped freely; only the owner's
whole mesh can be stopped.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any, Self, cast

from monarch_async._core.binding import compile_binder
from monarch_async._core.events import Identity
from monarch_async._runtime.context import constructing, current_message
from monarch_async._runtime.local import LocalLane
from monarch_async._runtime.runtime import Runtime
from monarch_async._runtime.service import ask_many
from monarch_async.ambient import current_runtime
from monarch_async.endpoint import Endpoint, definitions_of
from monarch_async.errors import UsageError
from monarch_async.future import MeshFuture
from monarch_async.ids import ProcAddress
from monarch_async.sending import MeshEndpoint, Target
from monarch_async.shape import Extent, MeshOps, Shape

__all__ = ["ActorMesh", "as_endpoint"]


class ActorMesh(MeshOps):
    """Actors of one class, one in each of some processes."""

    def __init__(
        self,
        runtime: Runtime,
        key: int,
        name: str,
        cls: type | str,
        endpoints: tuple[str, ...],
        addresses: Sequence[ProcAddress],
        spawned: Extent,
        shape: Shape,
        ranks: Sequence[int] | None,
        limits: tuple[int, int],
    ) -> None:
        self._runtime = runtime
        self._key = key
        self._name = name
        self._cls = cls  # its qualified name where the class is not known
        self._endpoints = endpoints
        self._addresses = addresses  # by base rank of `shape`
        self._spawned = spawned  # the extent at spawn
        self._mesh_shape = shape
        self._ranks = ranks  # rank at spawn by base rank of `shape`; None: the same
        self._limits = limits
        self._lifetime: Lifetime | None = None  # the owner's, on the whole mesh
        self._target_cache: Target | None = None

    @property
    def _shape(self) -> Shape:
        return self._mesh_shape

    def _with_shape(self, shape: Shape, /) -> Self:
        mesh = type(self)(
            self._runtime,
            self._key,
            self._name,
            self._cls,
            self._endpoints,
            self._addresses,
            self._spawned,
            shape,
            self._ranks,
            self._limits,
        )
        return mesh

    @property
    def _target(self) -> Target:
        target = self._target_cache
        if target is None:
            runtime = self._runtime
            shape = self._mesh_shape
            lanes: list[Any] = []
            for base in shape.ranks():
                address = self._addresses[base]
                rank = base if self._ranks is None else self._ranks[base]
                if address.uid == runtime.me.uid:
                    lanes.append(runtime.local_lane(self._key, self._name, rank, self._limits[0]))
                else:
                    lanes.append(runtime.peer(address).lane(self._key, self._name, rank, *self._limits))
            ranks = [wire_rank(index, shape.extent, self._spawned) for index in range(len(lanes))]
            target = self._target_cache = Target(runtime, self._name, shape, lanes, ranks)
        return target

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        endpoint = self._find_endpoint(name)
        self.__dict__[name] = endpoint
        return endpoint

    def _find_endpoint(self, name: str) -> Any:
        if not isinstance(self._cls, str):
            definition = definitions_of(self._cls).get(name)
            if definition is not None:
                return MeshEndpoint(self._target, name, definition.binder)
            if callable(getattr(self._cls, name, None)):
                return NotAnEndpoint(self, name)
        elif name in self._endpoints:
            return MeshEndpoint(self._target, name, None)
        cls = self._cls if isinstance(self._cls, str) else self._cls.__qualname__
        raise AttributeError(f"{cls} has no endpoint {name!r}; it has {', '.join(sorted(self._endpoints)) or 'none'}")

    def __await__(self) -> Generator[Any, None, Self]:
        """Wait until every member is constructed; raises the error of a constructor that failed."""
        if self._lifetime is not None:
            yield from self._lifetime.wait().__await__()
        else:
            yield from self._probe().__await__()
        return self

    def _probe(self) -> asyncio.Future[Any]:
        runtime = self._runtime
        target = self._target
        future: MeshFuture[None] = MeshFuture(loop=runtime.loop)
        future.runtime = runtime
        requests = [next(runtime.requests) for _ in target.lanes]
        future.expect(target.shape, target.lanes, requests, keep_errors=False)
        for lane, request in zip(target.lanes, requests, strict=True):
            if isinstance(lane, LocalLane):
                lane.send("", request, 0, (), {}, {"r": 1}, future)
            else:
                lane.call("", request, 0, b"", [], {"r": 1}, future)
        return future

    @property
    def initialized(self) -> Awaitable[Self]:
        """Monarch's way to wait for the constructors; the same as awaiting the mesh, as a task."""
        return asyncio.ensure_future(_identity(self))

    async def stop(self, reason: str = "") -> None:
        """Stop every member: cancel what runs, drop what is queued, clean up. A second stop does nothing.

        Raises `UsageError` unless this is the whole mesh as `spawn` returned it: only the owner stops a mesh.
        """
        if self._lifetime is None:
            raise UsageError(f"{self._name} can be stopped only by its owner, and only as a whole: this is a slice or a reference")
        await self._lifetime.stop(reason)

    async def __aenter__(self) -> Self:
        await self
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    def __reduce__(self) -> tuple[Any, ...]:
        shape = self._mesh_shape
        bases = shape.ranks()
        addresses = tuple(self._addresses[base] for base in bases)
        ranks: tuple[int, ...] | None = tuple(base if self._ranks is None else self._ranks[base] for base in bases)
        if ranks == tuple(range(len(addresses))):
            ranks = None
        cls = self._cls
        if not isinstance(cls, str) and not importable(cls):
            cls = cls.__qualname__
        state = (self._key, self._name, cls, self._endpoints, addresses, self._spawned, shape.extent, ranks, self._limits)
        return _actor_mesh, state

    def __repr__(self) -> str:
        cls = self._cls if isinstance(self._cls, str) else self._cls.__qualname__
        return f"<ActorMesh {self._name!r} of {cls} {dict(self.extent)}>"


def _actor_mesh(
    key: int,
    name: str,
    cls: type | str,
    endpoints: tuple[str, ...],
    addresses: tuple[ProcAddress, ...],
    spawned: Extent,
    extent: Extent,
    ranks: tuple[int, ...] | None,
    limits: tuple[int, int],
) -> ActorMesh:
    return ActorMesh(current_runtime(), key, name, cls, endpoints, addresses, spawned, Shape(extent), ranks, limits)


def wire_rank(index: int, extent: Extent, spawned: Extent) -> Any:
    """A position in the addressed slice as a message carries it: a number in the extent at spawn, -1 for a single actor, else with the extent."""
    if not len(extent):
        return -1
    if extent == spawned:
        return index
    return [index, list(extent.labels), list(extent.sizes)]


def importable(cls: type) -> bool:
    """Whether other processes can import the class by its name, instead of being sent its code."""
    module = sys.modules.get(cls.__module__)
    found: Any = module
    for part in cls.__qualname__.split("."):
        found = getattr(found, part, None)
    return cls.__module__ != "__main__" and found is cls


class Lifetime:
    """What the owner of a mesh of actors holds: when it is up, and how to stop it."""

    def __init__(self, runtime: Runtime, key: int, name: str, addresses: Sequence[ProcAddress], owner: int) -> None:
        self._runtime = runtime
        self._key = key
        self._name = name
        self._addresses = addresses
        self._owner = owner
        self.ready: MeshFuture[None] | None = None
        self.awaited = False
        self._stopping: asyncio.Task[None] | None = None

    def own(self, identity: Callable[[int], Identity]) -> None:
        """The owner hears of the end of any process that a member is in."""
        for rank, address in enumerate(self._addresses):
            self._runtime.ownership.own(address.uid, self._owner, identity(rank))

    async def wait(self) -> None:
        """Until every member is constructed."""
        self.awaited = True
        assert self.ready is not None
        await asyncio.shield(self.ready)

    async def stop(self, reason: str) -> None:
        if self._stopping is None:
            self._stopping = self._runtime.loop.create_task(self._stop(reason))
        await asyncio.shield(self._stopping)

    async def _stop(self, reason: str) -> None:
        runtime = self._runtime
        for address in self._addresses:
            runtime.ownership.disown(address.uid, self._owner, self._name)
        alive = [address for address in self._addresses if address.uid == runtime.me.uid or runtime.peer(address).evidence is None]
        if alive:
            answers = MeshFuture[None](loop=runtime.loop)
            answers.runtime = runtime
            ranks = list(range(len(alive)))
            requests = [next(runtime.requests) for _ in alive]
            answers.expect(Shape.of(procs=len(alive)), [None] * len(alive), requests, keep_errors=True)
            ask_many(runtime, alive, "stop", (self._key, reason), answers, ranks, requests)
            await answers


async def _identity(mesh: Any) -> Any:
    return await mesh


class NotAnEndpoint:
    """A plain method of an actor class, reached through a mesh: `as_endpoint` makes it callable."""

    def __init__(self, mesh: ActorMesh, name: str) -> None:
        self.mesh = mesh
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{self.name} is no endpoint: mark it with @endpoint, or wrap it: as_endpoint(mesh.{self.name})")


def as_endpoint(method: Any, *, propagate: Any = None, explicit_response_port: bool = False) -> Endpoint[..., Any]:
    """Call a plain method of an actor class as if it were an endpoint: ``as_endpoint(mesh.method).call_one(…)``."""
    if isinstance(method, Endpoint):
        return method
    if not isinstance(method, NotAnEndpoint):
        raise TypeError(f"as_endpoint takes a method reached through a mesh of actors, not {method!r}")
    function = getattr(method.mesh._cls, method.name)
    return cast("Endpoint[..., Any]", MeshEndpoint(method.mesh._target, f"{method.name}()", compile_binder(function, 1)))


def owner_of_new_meshes(runtime: Runtime) -> tuple[ProcAddress, int]:
    """Who owns what is spawned here: the actor whose handler, or constructor, this is, or the program."""
    message = current_message.get()
    cell = message.cell if message is not None else constructing.get()
    return runtime.me, cell.key if cell is not None else 0
