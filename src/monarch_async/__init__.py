"""Asyncio-native actors for distributed PyTorch.

    from monarch_async import Actor, endpoint, this_host

See README.md for a first program and docs/design.md for how it works.

Names are loaded when they are first used, so that whoever needs few of them, as the command line, does not wait for the others.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monarch_async.actor import Actor
    from monarch_async.ambient import configure, shutdown, shutdown_context
    from monarch_async.controllers import get_or_spawn_controller
    from monarch_async.endpoints import Endpoint, concurrent_endpoint, endpoint
    from monarch_async.errors import (
        ActorDied,
        ActorError,
        AddressError,
        AuthenticationError,
        BufferGone,
        BufferMismatch,
        CallTimeout,
        ChannelFull,
        CollectiveError,
        DeadlockError,
        DecodeError,
        FrameTooLarge,
        MonarchError,
        PeerLost,
        PortClosed,
        RDMAError,
        SpawnError,
        SupervisionError,
        UsageError,
        VersionMismatch,
    )
    from monarch_async.future import Future
    from monarch_async.health import Health, ProcState
    from monarch_async.host import HostMesh, this_host
    from monarch_async.info import Context, context, current_actor_name, current_rank, current_size
    from monarch_async.lowlevel import Accumulator, send
    from monarch_async.mesh import ActorMesh, as_endpoint
    from monarch_async.options import Options
    from monarch_async.port import Channel, Port, PortReceiver
    from monarch_async.procs import ProcMesh, this_proc
    from monarch_async.rdma import RDMAAction, RDMABuffer
    from monarch_async.restart import Backoff, Restart
    from monarch_async.shape import Extent, Point, Shape
    from monarch_async.shared import shared_buffer, shared_empty
    from monarch_async.supervise import MeshFailure, unhandled_fault_hook
    from monarch_async.supervisors import Supervisor
    from monarch_async.value_mesh import ValueMesh
    from monarch_async.watching import Ended, watch
    from monarch_async.workers import TLS, attach_to_workers, run_worker_loop_forever

__all__ = [
    "TLS",
    "Accumulator",
    "Actor",
    "ActorDied",
    "ActorError",
    "ActorMesh",
    "AddressError",
    "AuthenticationError",
    "Backoff",
    "BufferGone",
    "BufferMismatch",
    "CallTimeout",
    "Channel",
    "ChannelFull",
    "CollectiveError",
    "Context",
    "DeadlockError",
    "DecodeError",
    "Ended",
    "Endpoint",
    "Extent",
    "FrameTooLarge",
    "Future",
    "Health",
    "HostMesh",
    "MeshFailure",
    "MonarchError",
    "Options",
    "PeerLost",
    "Point",
    "Port",
    "PortClosed",
    "PortReceiver",
    "ProcMesh",
    "ProcState",
    "RDMAAction",
    "RDMABuffer",
    "RDMAError",
    "Restart",
    "Shape",
    "SpawnError",
    "SupervisionError",
    "Supervisor",
    "UsageError",
    "ValueMesh",
    "VersionMismatch",
    "as_endpoint",
    "attach_to_workers",
    "concurrent_endpoint",
    "configure",
    "context",
    "current_actor_name",
    "current_rank",
    "current_size",
    "endpoint",
    "get_or_spawn_controller",
    "run_worker_loop_forever",
    "send",
    "shared_buffer",
    "shared_empty",
    "shutdown",
    "shutdown_context",
    "this_host",
    "this_proc",
    "unhandled_fault_hook",
    "watch",
]

_HOMES = {
    "actor": ("Actor",),
    "ambient": ("configure", "shutdown", "shutdown_context"),
    "controllers": ("get_or_spawn_controller",),
    "endpoints": ("Endpoint", "concurrent_endpoint", "endpoint"),
    "errors": (
        "ActorDied",
        "ActorError",
        "AddressError",
        "AuthenticationError",
        "BufferGone",
        "BufferMismatch",
        "CallTimeout",
        "ChannelFull",
        "CollectiveError",
        "DeadlockError",
        "DecodeError",
        "FrameTooLarge",
        "MonarchError",
        "PeerLost",
        "PortClosed",
        "RDMAError",
        "SpawnError",
        "SupervisionError",
        "UsageError",
        "VersionMismatch",
    ),
    "future": ("Future",),
    "health": ("Health", "ProcState"),
    "host": ("HostMesh", "this_host"),
    "info": ("Context", "context", "current_actor_name", "current_rank", "current_size"),
    "lowlevel": ("Accumulator", "send"),
    "mesh": ("ActorMesh", "as_endpoint"),
    "options": ("Options",),
    "port": ("Channel", "Port", "PortReceiver"),
    "procs": ("ProcMesh", "this_proc"),
    "rdma": ("RDMAAction", "RDMABuffer"),
    "restart": ("Backoff", "Restart"),
    "shape": ("Extent", "Point", "Shape"),
    "shared": ("shared_buffer", "shared_empty"),
    "supervise": ("MeshFailure", "unhandled_fault_hook"),
    "supervisors": ("Supervisor",),
    "value_mesh": ("ValueMesh",),
    "watching": ("Ended", "watch"),
    "workers": ("TLS", "attach_to_workers", "run_worker_loop_forever"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


if not TYPE_CHECKING:  # or a type checker would let any name pass

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
