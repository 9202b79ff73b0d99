"""What code in an actor can know: who it is, which message it handles, whether its caller has given up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from monarch_async._runtime.behavior import CellState
from monarch_async._runtime.cell import Cell
from monarch_async._runtime.context import Message, State, current_cell, current_message
from monarch_async.ambient import current_runtime
from monarch_async.errors import UsageError
from monarch_async.procs import ProcMesh, this_proc
from monarch_async.shape import Extent, Point, Shape

__all__ = ["ActorInstance", "Context", "context", "current_actor_name", "current_rank", "current_size"]

_NOWHERE = Extent.of().point(0)


class ActorInstance:
    """The actor that code runs in.

    `name` is that of its mesh and `rank` its position there at spawn; `incarnation` counts its restarts; `creator` is the process that
    spawned it.
    """

    __slots__ = ("_cell", "actor_id", "class_name", "creator", "incarnation", "name", "proc_id", "rank")

    def __init__(self, cell: Cell | None) -> None:
        me = current_runtime().me
        self._cell = cell
        self.proc_id = me.uid
        if cell is None:
            self.name, self.class_name, self.rank, self.incarnation = me.name, "", _NOWHERE, 0
            self.actor_id, self.creator = me.uid, ""
        else:
            identity = cell.identity
            self.name, self.class_name, self.incarnation = identity.mesh, identity.class_name, identity.incarnation
            self.rank = _extent(cell).point(identity.rank)
            self.actor_id = f"{me.uid}/{cell.key:x}"
            self.creator = str(cell.owner[0]) if cell.owner is not None else ""

    @property
    def proc(self) -> ProcMesh:
        """The process it is in, as a mesh without dimensions."""
        return this_proc()

    @property
    def proc_mesh(self) -> ProcMesh:
        """The processes that its mesh was spawned on."""
        if self._cell is None or self._cell.place is None:
            return this_proc()
        place = self._cell.place
        return ProcMesh(current_runtime(), place.name, place.addresses, place.agents, Shape(place.extent))

    def stop(self, reason: str = "") -> None:
        """Stop this actor once the handler that asks for it has ended. Raises `UsageError` in code of a life that is over."""
        self._act("stop", lambda cell: cell.stop_next(reason), at_once=threading.get_ident() == current_runtime().thread)

    def abort(self, reason: str = "") -> None:
        """Fail: the owner is told, as of an exception. Raises `UsageError` in code of a life that is over."""
        error = RuntimeError(reason or "aborted")
        self._act("abort", lambda cell: cell.fail(error, "abort"), at_once=False)

    kill = abort

    def _act(self, name: str, function: Callable[[Cell], None], *, at_once: bool) -> None:
        """End the life that the code belongs to, never the one after it."""
        cell = self._cell
        if cell is None:
            raise UsageError(f"only an actor can {name} itself, and this is no code of an actor")
        life = self.incarnation
        if cell.identity.incarnation != life or cell.state is CellState.RESTARTING or _outlives_its_life(current_message.get(), cell):
            raise UsageError(f"this is code of a life of {cell.identity} that is over: it can't {name} the next one")

        def act() -> None:
            if cell.identity.incarnation == life and cell.state is not CellState.RESTARTING:  # else it has ended meanwhile
                function(cell)

        if at_once:
            act()
        else:
            cell.runtime.loop.call_soon_threadsafe(act)


class Context:
    """`actor_instance` is the actor, `message_rank` the position of this member in the slice that the message was sent to."""

    __slots__ = ("_message", "actor_instance")

    def __init__(self, actor_instance: ActorInstance, message: Message | None) -> None:
        self.actor_instance = actor_instance
        self._message = message

    @property
    def message_rank(self) -> Point:
        message, cell = self._message, self.actor_instance._cell
        if message is None or cell is None:
            return self.actor_instance.rank
        return _point(message.rank, _extent(cell))

    @property
    def cancelled(self) -> bool:
        """Whether the caller has given up: a handler in a thread should end soon, one on the loop is being cancelled."""
        return self._message is not None and self._message.cancelled


def context() -> Context:
    """Where this code runs. Outside an actor it is the program itself, called ``client``."""
    message = current_message.get()
    cell: Cell | None = message.cell if message is not None else current_cell.get()
    return Context(ActorInstance(cell), message if cell is not None else None)


def current_rank() -> Point:
    """The position of this actor in the slice that the message was sent to."""
    return context().message_rank


def current_size() -> dict[str, int]:
    """The dimensions of the slice that the message was sent to."""
    return dict(context().message_rank.extent)


def current_actor_name() -> str:
    """The name of the mesh that this actor is in."""
    return context().actor_instance.name


def _outlives_its_life(message: Message | None, cell: Cell) -> bool:
    """Whether this is a handler that goes on after its life. What a handler has left running, when it had ended itself, is none."""
    return (
        message is not None
        and message.cell is cell
        and message.state is not State.DONE
        and message is not cell.current
        and message not in cell.overlapping
    )


def _extent(cell: Cell) -> Extent:
    extent: Extent = cell.place.extent if cell.place is not None else Extent.of()
    return extent


def _point(rank: Any, spawned: Extent) -> Point:
    if isinstance(rank, list):
        return Extent(rank[1], rank[2]).point(rank[0])
    return _NOWHERE if rank < 0 else spawned.point(rank)
