"""Hosts: where processes are started.

``this_host()`` is the host this code runs on; `attach_to_workers` gives the hosts on which ``monarch-async worker`` waits. Both are
meshes whose `spawn_procs` starts processes on every host of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Literal, Self, TypeVar

from monarch_async._runtime.config import SpawnRequest
from monarch_async._runtime.runtime import Runtime
from monarch_async.ambient import client_of, current_runtime, on_loop
from monarch_async.errors import UsageError
from monarch_async.future import Future, as_future
from monarch_async.ids import ProcAddress, new_uid
from monarch_async.mesh import owner_of_new_meshes
from monarch_async.procs import ProcMesh, check_not_stopping
from monarch_async.procs_lifetime import ProcsLifetime
from monarch_async.restart import Restart, check_restart
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
        restart: Restart | None = None,
        stuck: Literal["report", "kill"] = "report",
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
            restart: what is done about processes that end. One that is started again has the same rank, environment and bootstrap, and the
                actors in it are constructed again. Without it, a process that ends is a failure that the owner is told.
            stuck: what to do with a process whose event loop is blocked: ``"report"`` it in `ProcMesh.health`, or ``"kill"`` it too once
                that has lasted for the option `stuck_kill_after`.

        Errors of the start are raised when the mesh is awaited, and then no process is left: `SpawnError` for one that can't be started
        or does not answer within the option `start_timeout`, the error of a bootstrap that raised. Raises `TypeError` and `UsageError`
        for arguments that can't be.
        """
        runtime = self._runtime
        if per_host is not None and not isinstance(per_host, Mapping):
            raise TypeError(f"per_host maps the names of dimensions to their sizes, such as {{'gpus': 8}}, and is not {per_host!r}")
        inner = Extent.of(**dict(per_host or {}))
        extent = self.extent.concat(inner)
        if isinstance(preload, str):
            raise TypeError(f"preload is a sequence of module names: ({preload!r},)")
        if bootstrap is not None and not callable(bootstrap):
            raise TypeError(f"bootstrap is a function to call in each process, not {bootstrap!r}")
        if restart is not None:
            check_restart(restart, extent.nelements)
            if restart.checkpoint_every is not None:
                raise UsageError("checkpoint_every is for actors, which have a state to save: give it to their spawn")
        if stuck not in ("report", "kill"):
            raise UsageError(f'stuck must be "report" or "kill", not {stuck!r}')
        options = tuple(preload), cwd, restart, stuck == "kill"
        return on_loop(runtime, lambda: self._spawn(runtime, inner, extent, bootstrap, name, env, proc_bind, *options))

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
        restart: Restart | None,
        kill_stuck: bool,
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
                    kill_stuck,
                    restart is not None,
                )
            )
        mesh = ProcMesh(runtime, name, addresses, agents, Shape(extent))
        mesh._lifetime = ProcsLifetime(runtime, name, owner[1], requests, agents, bootstrap, restart)
        mesh._lifetime.begin(client_of(runtime))
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
