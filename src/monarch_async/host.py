"""Hosts: where processes are started.

``this_host()`` is the host this code runs on; `attach_to_workers` gives the hosts on which ``monarch-async worker`` waits. Both are
meshes whose `spawn_procs` starts processes on every host of them.
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from typing import Any, Self, TypeVar

from monarch_async._core.events import Failure, Identity
from monarch_async._core.stories import format_error
from monarch_async._runtime.config import SpawnRequest
from monarch_async._runtime.peer import Peer
from monarch_async._runtime.runtime import Runtime
from monarch_async._runtime.service import ask, tell
from monarch_async.ambient import client_of, current_runtime, on_loop
from monarch_async.errors import SpawnError, UsageError
from monarch_async.future import Future, as_future
from monarch_async.ids import ProcAddress, new_uid
from monarch_async.mesh import UNOBSERVED, owner_of_new_meshes
from monarch_async.procs import ProcMesh, ProcsLifetime, check_not_stopping
from monarch_async.shape import Extent, MeshOps, Point, Shape

__all__ = ["HostMesh", "this_host"]

T = TypeVar("T")
Environment = Mapping[str, str | None] | Callable[[Point], Mapping[str, str | None]]
Binding = Sequence[Iterable[int]] | Callable[[Point], Iterable[int] | None]


class HostMesh(MeshOps):
    """Hosts, each known by its agent."""

    def __init__(self, runtime: Runtime, agents: Sequence[ProcAddress], shape: Shape) -> None:
        self._runtime = runtime
        self._agents = agents  # by base rank of the shape
        self._mesh_shape = shape

    @property
    def _shape(self) -> Shape:
        return self._mesh_shape

    def _with_shape(self, shape: Shape, /) -> Self:
        return type(self)(self._runtime, self._agents, shape)

    def spawn_procs(
        self,
        per_host: Mapping[str, int] | None = None,
        bootstrap: Callable[[], Any] | None = None,
        name: str | None = None,
        *,
        env: Environment | None = None,
        proc_bind: Binding | None = None,
        preload: Sequence[str] = (),
        cwd: str | None = None,
    ) -> ProcMesh:
        """Start processes on every host; returns their mesh at once, with the dimensions of the hosts and then those of `per_host`.

        Args:
            per_host: how many on each host, by dimension: ``{"gpus": 8}``. Nothing: one.
            bootstrap: a function that each process runs before anything else, once the environment is set; may be ``async``.
            name: shown in listings, errors and before lines of output.
            env: variables to set or, with `None`, to remove; or a function from the `Point` of a process to such a mapping.
            proc_bind: the CPUs of each process, in order on each host; or a function from its `Point`.
            preload: modules to import once, and share, before processes are forked: ``("torch",)``.
            cwd: the directory to run in.

        Errors of the start are raised when the mesh is awaited, and then no process is left: `SpawnError` for one that can't be started
        or does not answer within the option `start_timeout`, the error of a bootstrap that raised. Raises `TypeError` and `UsageError`
        for arguments that can't be.
        """
        runtime = self._runtime
        inner = Extent.of(**dict(per_host or {}))
        extent = self.extent.concat(inner)
        if isinstance(preload, str):
            raise TypeError(f"preload is a sequence of module names: ({preload!r},)")
        if bootstrap is not None and not callable(bootstrap):
            raise TypeError(f"bootstrap is a function to call in each process, not {bootstrap!r}")
        return on_loop(runtime, lambda: self._spawn(runtime, inner, extent, bootstrap, name, env, proc_bind, tuple(preload), cwd))

    def _spawn(
        self,
        runtime: Runtime,
        inner: Extent,
        extent: Extent,
        bootstrap: Callable[[], Any] | None,
        name: str | None,
        env: Environment | None,
        proc_bind: Binding | None,
        preload: tuple[str, ...],
        cwd: str | None,
    ) -> ProcMesh:
        owner = owner_of_new_meshes(runtime)
        name = name or f"procs{next(runtime.names)}"
        check_not_stopping(runtime, owner[1], name)
        size = extent.nelements
        if not size:
            raise UsageError(f"{name} would have no processes: every dimension of per_host must be at least 1, not {dict(inner)}")
        agents, addresses, requests = [], [], []
        hosts = [self._agents[base] for base in self._mesh_shape.ranks()]
        for rank in range(size):
            agent = hosts[rank // inner.nelements]
            point = extent.point(rank)
            address = ProcAddress(new_uid(), agent.host, agent.unix, agent.tcp, name, rank)
            agents.append(agent)
            addresses.append(address)
            requests.append(
                SpawnRequest(
                    address,
                    size,
                    runtime.me,
                    _environment(env, point),
                    cwd or (os.getcwd() if agent.host == runtime.me.host else None),
                    tuple(path for path in sys.path if path),
                    preload,
                    _cpus(proc_bind, point, rank % inner.nelements),
                )
            )
        mesh = ProcMesh(runtime, name, addresses, agents, Shape(extent))
        lifetime = mesh._lifetime = ProcsLifetime(runtime, addresses, agents, owner[1], name)
        for address in addresses:
            runtime.ownership.own(address.uid, owner[1], 0, Identity(name, "", address.rank))
        starting = {address.uid for address in addresses}
        # Sent now, so that it comes before all that the caller sends to these processes without waiting for them.
        answers = [ask(runtime, address, "bootstrap", bootstrap) for address in addresses] if bootstrap is not None else []
        start = _start(runtime, agents, addresses, requests, answers, starting)
        lifetime.starting = runtime.loop.create_future()
        lifetime.starting.add_done_callback(lambda done: _started(runtime, lifetime, owner[1], addresses[0], done))
        runtime.tasks.start(_settle(runtime, start, addresses, starting, lifetime.starting), name=f"starting {name}")
        cell = runtime.cells.get(owner[1])
        if cell is not None:
            cell.owned[lifetime] = lifetime.stop
        return mesh

    def __await__(self) -> Generator[Any, None, Self]:
        """Wait until all hosts can be used.

        Raises what `attach_to_workers` says, `SpawnError` if this host's agent could not be started.
        """
        client = client_of(self._runtime)
        if client is not None:
            yield from client.ready().__await__()
            yield from client.attached([self._agents[base] for base in self._mesh_shape.ranks()]).__await__()
        return self

    @property
    def initialized(self) -> Future[HostMesh]:
        """Monarch's way to wait; the same as awaiting the mesh, as a future with `get`."""
        return as_future(self._runtime, _ready(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return _host_mesh, (tuple(self._agents[base] for base in self._mesh_shape.ranks()), self.extent)

    def __repr__(self) -> str:
        return f"<HostMesh {dict(self.extent)}>"


def _host_mesh(agents: tuple[ProcAddress, ...], extent: Extent) -> HostMesh:
    return HostMesh(current_runtime(), agents, Shape(extent))


def _environment(env: Environment | None, point: Point) -> dict[str, str | None]:
    """The variables of one process. Raises `TypeError` for what is no mapping of strings."""
    chosen: dict[Any, Any] = dict(env(point)) if callable(env) else dict(env or {})
    for name, value in chosen.items():
        if not isinstance(name, str) or not isinstance(value, str | None):
            raise TypeError(f"env maps names to strings, or to None to remove them; not {name!r} to {value!r}")
        if not name or "=" in name or "\0" in f"{name}{value}":
            raise UsageError(f"{name!r}={value!r} can't be an environment variable: no '=' in names, no NUL in either, no empty name")
    return chosen


def _cpus(proc_bind: Binding | None, point: Point, index: int) -> frozenset[int] | None:
    """The CPUs that one process is bound to."""
    if proc_bind is None:
        return None
    if callable(proc_bind):
        chosen = proc_bind(point)
    elif index < len(proc_bind):
        chosen = proc_bind[index]
    else:
        raise UsageError(f"proc_bind has {len(proc_bind)} entries, one is needed for each process of a host")
    return None if chosen is None else frozenset(chosen)


async def _start(
    runtime: Runtime,
    agents: Sequence[ProcAddress],
    addresses: Sequence[ProcAddress],
    requests: Sequence[SpawnRequest],
    answers: list[asyncio.Future[Any]],
    starting: set[str],
) -> None:
    """Have every host start its processes, and wait until all have answered. Whatever goes wrong, none is left then."""
    client = client_of(runtime)
    by_agent: dict[ProcAddress, list[SpawnRequest]] = {}
    for agent, request in zip(agents, requests, strict=True):
        by_agent.setdefault(agent, []).append(request)
    limit = runtime.options.start_timeout
    try:
        if client is not None:
            await client.ready()
            await client.attached(by_agent)
        async with asyncio.timeout(limit):
            started = [ask(runtime, agent, "spawn_procs", theirs) for agent, theirs in by_agent.items()]
            if not answers:
                answers = [ask(runtime, address, "ping") for address in addresses]
            for address, answer in zip(addresses, answers, strict=True):
                answer.add_done_callback(functools.partial(_is_up, starting, address.uid))
            await asyncio.gather(*started)
            await asyncio.gather(*answers)
    except BaseException as error:
        for agent, theirs in by_agent.items():
            tell(runtime, agent, "kill_procs", [request.me.uid for request in theirs])
        if not isinstance(error, TimeoutError):
            raise
        late = [address for address, answer in zip(addresses, answers, strict=True) if not answer.done()]
        text = f"{', '.join(map(str, late))} did not answer within the option start_timeout={limit:g} s"
        raise SpawnError(text) from None


def _is_up(starting: set[str], uid: str, answer: asyncio.Future[Any]) -> None:
    if not answer.cancelled() and answer.exception() is None:
        starting.discard(uid)


async def _settle(
    runtime: Runtime,
    start: Coroutine[Any, Any, None],
    addresses: Sequence[ProcAddress],
    starting: set[str],
    outcome: asyncio.Future[None],
) -> None:
    """Wait for a start. The end of a process that is not up yet is for those who wait for it, and no failure to be told to its owner."""

    def release(peer: Peer) -> None:
        if peer.address.uid in starting:
            runtime.ownership.release(peer.address.uid)

    runtime.on_peer_gone.insert(0, release)
    try:
        await start
    except asyncio.CancelledError:
        outcome.cancel()
        raise
    except Exception as error:
        for address in addresses:
            runtime.ownership.release(address.uid)
        outcome.set_exception(error)
    else:
        outcome.set_result(None)
    finally:
        runtime.on_peer_gone.remove(release)


def _started(runtime: Runtime, lifetime: ProcsLifetime, owner: int, first: ProcAddress, start: asyncio.Future[None]) -> None:
    """A start has ended; if it failed and nobody asks for the outcome, its owner is told."""
    error = None if start.cancelled() else start.exception()
    if error is None:
        lifetime.users.clear()
        return

    def tell_owner() -> None:
        if not lifetime.awaited and not runtime.closing and runtime.stopping is None:
            type_name, text, story = format_error(error)
            kind = type_name.rpartition(".")[2]
            name = first.name
            failure = Failure(name, "", (0,), f"{kind} while it was started: {text}", error=type_name, traceback=story, meshes=(name,))
            runtime.ownership.own(first.uid, owner, 0, Identity(name, "", 0))
            tell(runtime, runtime.me, "failed", owner, failure, first.uid, 0)
            runtime.ownership.release(first.uid)

    runtime.loop.call_later(UNOBSERVED, tell_owner)


async def _ready(hosts: HostMesh) -> HostMesh:
    await hosts
    return hosts


def this_host() -> HostMesh:
    """The host that this code runs on, as a mesh without dimensions. In a client this starts the host's agent, if it doesn't run yet."""
    runtime = current_runtime()
    client = client_of(runtime)
    if client is not None:
        on_loop(runtime, client.start_agent)
    return HostMesh(runtime, [runtime.agent], Shape.of())
