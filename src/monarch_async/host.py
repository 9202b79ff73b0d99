"""Hosts: where processes are started.

``this_host()`` is the host this code runs on; `attach_to_workers` gives the hosts on which ``monarch-async worker`` waits. Both are meshes whose
`spawn_procs` starts processes on every host of them.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self, TypeVar

from monarch_async._core.events import Identity
from monarch_async._runtime.agent import SpawnRequest
from monarch_async._runtime.runtime import Runtime
from monarch_async._runtime.service import ask
from monarch_async.ambient import client_of, current_runtime
from monarch_async.errors import UsageError
from monarch_async.ids import ProcAddress, new_uid
from monarch_async.mesh import owner_of_new_meshes
from monarch_async.procs import ProcMesh, ProcsLifetime, check_not_stopping, on_loop
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

        Errors of the start are raised when the mesh is awaited: `SpawnError` when a process can't be started.
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
        name = name or f"procs{next(runtime.numbers)}"
        check_not_stopping(runtime, owner[1], name)
        size = extent.nelements
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
                    runtime.client,
                    dict(env(point) if callable(env) else env or {}),
                    cwd or (os.getcwd() if agent.host == runtime.me.host else None),
                    tuple(path for path in sys.path if path),
                    preload,
                    _cpus(proc_bind, point, rank % inner.nelements),
                )
            )
        mesh = ProcMesh(runtime, name, addresses, agents, Shape(extent))
        lifetime = mesh._lifetime = ProcsLifetime(runtime, addresses, agents, owner[1], name)
        for address in addresses:
            runtime.ownership.own(address.uid, owner[1], Identity(name, "", address.rank))
        lifetime.starting = runtime.tasks.start(_start(runtime, agents, addresses, requests, bootstrap), name=f"starting {name}")
        lifetime.starting.add_done_callback(lambda done: done.cancelled() or done.exception())
        cell = runtime.cells.get(owner[1])
        if cell is not None:
            cell.owned.append(lifetime.stop)
        return mesh

    def __reduce__(self) -> tuple[Any, ...]:
        return _host_mesh, (tuple(self._agents[base] for base in self._mesh_shape.ranks()), self.extent)

    def __repr__(self) -> str:
        return f"<HostMesh {dict(self.extent)}>"


def _host_mesh(agents: tuple[ProcAddress, ...], extent: Extent) -> HostMesh:
    return HostMesh(current_runtime(), agents, Shape(extent))


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
    bootstrap: Callable[[], Any] | None,
) -> None:
    """Have every host start its processes, run the bootstrap in each, and wait until all answer."""
    client = client_of(runtime)
    if client is not None:
        await client.ready()
    by_agent: dict[ProcAddress, list[SpawnRequest]] = {}
    for agent, request in zip(agents, requests, strict=True):
        by_agent.setdefault(agent, []).append(request)
    started = [ask(runtime, agent, "spawn_procs", theirs) for agent, theirs in by_agent.items()]
    if bootstrap is not None:
        answers = [ask(runtime, address, "bootstrap", bootstrap) for address in addresses]
    else:
        answers = [ask(runtime, address, "ping") for address in addresses]
    try:
        await asyncio.gather(*started)
        async with asyncio.timeout(runtime.options.start_timeout):
            await asyncio.gather(*answers)
    except TimeoutError:
        late = [str(address) for address, answer in zip(addresses, answers, strict=True) if not answer.done()]
        raise TimeoutError(
            f"{', '.join(late)} did not answer within the option start_timeout={runtime.options.start_timeout:g} s"
        ) from None


def this_host() -> HostMesh:
    """The host that this code runs on, as a mesh without dimensions. In a client this starts the host's agent, if it doesn't run yet."""
    runtime = current_runtime()
    client = client_of(runtime)
    if client is not None:
        on_loop(runtime, client.start_agent)
    return HostMesh(runtime, [runtime.agent], Shape.of())
