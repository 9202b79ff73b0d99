"""Asyncio-native actors for distributed PyTorch.

    from monarch_async import Actor, endpoint, this_host

See README.md for a first program and docs/design.md for how it works.
"""

from monarch_async._core.events import Failure as MeshFailure
from monarch_async.actor import Actor
from monarch_async.ambient import configure, shutdown, shutdown_context
from monarch_async.controllers import get_or_spawn_controller
from monarch_async.endpoint import Endpoint, concurrent_endpoint, endpoint
from monarch_async.errors import (
    ActorDied,
    ActorError,
    AddressError,
    AuthenticationError,
    CallTimeout,
    ChannelFull,
    DeadlockError,
    DecodeError,
    FrameTooLarge,
    MonarchError,
    PortClosed,
    SpawnError,
    SupervisionError,
    UsageError,
    VersionMismatch,
)
from monarch_async.future import Future
from monarch_async.host import HostMesh, this_host
from monarch_async.info import Context, context, current_actor_name, current_rank, current_size
from monarch_async.lowlevel import Accumulator, send
from monarch_async.mesh import ActorMesh, as_endpoint
from monarch_async.options import Options
from monarch_async.port import Channel, Port, PortReceiver
from monarch_async.procs import ProcMesh, this_proc
from monarch_async.shape import Extent, Point, Shape
from monarch_async.supervise import unhandled_fault_hook
from monarch_async.value_mesh import ValueMesh
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
    "CallTimeout",
    "Channel",
    "ChannelFull",
    "Context",
    "DeadlockError",
    "DecodeError",
    "Endpoint",
    "Extent",
    "FrameTooLarge",
    "Future",
    "HostMesh",
    "MeshFailure",
    "MonarchError",
    "Options",
    "Point",
    "Port",
    "PortClosed",
    "PortReceiver",
    "ProcMesh",
    "Shape",
    "SpawnError",
    "SupervisionError",
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
    "shutdown",
    "shutdown_context",
    "this_host",
    "this_proc",
    "unhandled_fault_hook",
]
