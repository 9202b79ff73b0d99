"""Meshes of actors: what `spawn` returns, and what travels in messages as a reference.

An `ActorMesh` addresses some ranks of what was spawned. It is a reference: it can be sliced, sent and dropped freely; only the owner's
whole mesh can be stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from typing import Any, Self, TypeVar, cast

from monarch_async._core.binding import compile_binder
from monarch_async._runtime.context import current_cell, current_message
from monarch_async._runtime.local import LocalLane
from monarch_async._runtime.runtime import Runtime
from monarch_async.actor import importable
from monarch_async.ambient import current_runtime
from monarch_async.endpoints import Binder, Endpoint, definitions_of
from monarch_async.errors import UsageError
from monarch_async.future import Future, MeshFuture, as_future
from monarch_async.ids import ProcAddress
from monarch_async.lifetime import Lifetime
from monarch_async.sending import MeshEndpoint
from monarch_async.shape import Extent, MeshOps, Shape
from monarch_async.target import Target

__all__ = ["ActorMesh", "as_endpoint"]

M = TypeVar("M", bound="ActorMesh")
added: dict[str, Callable[..., Any]] = {}
"""Methods of meshes that are those of libraries above this module, which put them here when they are imported."""


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
                    lanes.append(runtime.peer(address).latest().lane(self._key, self._name, rank, *self._limits, moves=True))
            ranks = [wire_rank(index, shape.extent, self._spawned) for index in range(len(lanes))]
            target = self._target_cache = Target(runtime, self._name, shape, lanes, ranks)
        return target

    def members(self) -> list[tuple[ProcAddress, int]]:
        """Where each member is, as far as is known here, and its rank at spawn."""
        bases = self._mesh_shape.ranks()
        ranks = bases if self._ranks is None else [self._ranks[base] for base in bases]
        return [(latest(self._runtime, self._addresses[base]), rank) for base, rank in zip(bases, ranks, strict=True)]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        endpoint = self._find_endpoint(name)
        self.__dict__[name] = endpoint
        return endpoint

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._endpoints})  # for those who complete names

    def _find_endpoint(self, name: str) -> Any:
        if not isinstance(self._cls, str):
            definition = definitions_of(self._cls).get(name)
            if definition is not None:
                return self._endpoint(name, definition.binder)
            if callable(getattr(self._cls, name, None)):
                return NotAnEndpoint(self, name)
        elif name in self._endpoints:
            return self._endpoint(name, None)
        cls = self._cls if isinstance(self._cls, str) else self._cls.__qualname__
        raise AttributeError(f"{cls} has no endpoint {name!r}; it has {', '.join(sorted(self._endpoints)) or 'none'}")

    def _endpoint(self, name: str, bind: Binder | None) -> MeshEndpoint:
        """Where calls carry more than arguments, of the class that sees to that: see `observe.spans`."""
        made: type[MeshEndpoint] = self._runtime.parts.get("endpoint class", MeshEndpoint)
        return made(self._target, name, bind)

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
    def initialized(self) -> Future[Self]:
        """Monarch's way to wait for the constructors; the same as awaiting the mesh, as a future with `get`."""
        return as_future(self._runtime, _ready(self))

    async def communicator(self, **settings: Any) -> Any:
        """`monarch_async.tensor.communicator` of this mesh or slice, for its members: how they do collective operations together.

        Raises `UsageError` where `monarch_async.tensor` was not imported.
        """
        make = added.get("communicator")
        if make is None:
            raise UsageError("communicators are monarch_async.tensor's: import that first")
        return await make(self, **settings)

    def stop(self, reason: str = "") -> Future[None]:
        """Stop every member: cancel what runs, drop what is queued, clean up. A second stop does nothing.

        Raises `UsageError` unless this is the whole mesh as `spawn` returned it: only the owner stops a mesh.
        """
        if self._lifetime is None:
            raise UsageError(f"{self._name} can be stopped only by its owner, and only as a whole: this is a slice or a reference")
        return as_future(self._runtime, self._lifetime.stop(reason))

    async def __aenter__(self) -> Self:
        await self
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    def __reduce__(self) -> tuple[Any, ...]:
        shape = self._mesh_shape
        bases = shape.ranks()
        addresses = tuple(latest(self._runtime, self._addresses[base]) for base in bases)
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


def latest(runtime: Runtime, address: ProcAddress) -> ProcAddress:
    """The address of the process that is in this one's place now, as far as is known here."""
    peer = runtime.peers.get(address.uid)
    return peer.latest().address if peer is not None else address


def wire_rank(index: int, extent: Extent, spawned: Extent) -> Any:
    """A position in the addressed slice as a message carries it.

    A number in the extent at spawn, -1 for a single actor, else a list with the extent.
    """
    if not len(extent):
        return -1
    if extent == spawned:
        return index
    return [index, list(extent.labels), list(extent.sizes)]


async def _ready(mesh: M) -> M:
    await mesh
    return mesh


class NotAnEndpoint:
    """A plain method of an actor class, reached through a mesh: `as_endpoint` makes it callable."""

    def __init__(self, mesh: ActorMesh, name: str) -> None:
        self.mesh = mesh
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{self.name} is no endpoint: mark it with @endpoint, or wrap it: as_endpoint(mesh.{self.name})")


def as_endpoint(method: Any, *, propagate: Any = None, explicit_response_port: bool = False) -> Endpoint[..., Any]:
    """Call a plain method of an actor class as if it were an endpoint: ``as_endpoint(mesh.method).call_one(…)``.

    Raises `TypeError` for anything but a method reached through a mesh whose class is known here.
    """
    if isinstance(method, Endpoint):
        return method
    if not isinstance(method, NotAnEndpoint):
        raise TypeError(f"as_endpoint takes a method reached through a mesh of actors, not {method!r}")
    function = getattr(method.mesh._cls, method.name)
    if explicit_response_port:
        return cast("Endpoint[..., Any]", method.mesh._endpoint(f"{method.name}(port)", compile_binder(function, 2)))
    return cast("Endpoint[..., Any]", method.mesh._endpoint(f"{method.name}()", compile_binder(function)))


def owner_of_new_meshes(runtime: Runtime) -> tuple[ProcAddress, int]:
    """Who owns what is spawned here: the actor whose handler, or constructor, this is, or the program."""
    message = current_message.get()
    cell = message.cell if message is not None else current_cell.get()
    return runtime.me, cell.key if cell is not None else 0
