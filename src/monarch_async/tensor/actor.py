"""`TensorActor`: an actor that has a communicator with the other members of its mesh."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from monarch_async.actor import Actor
from monarch_async.errors import UsageError
from monarch_async.exchange import this_membership
from monarch_async.mesh import ActorMesh
from monarch_async.tensor.comm import DEFAULT_TIMEOUT, Communicator, own_communicator
from monarch_async.tensor.group import Check

__all__ = ["TensorActor", "communicator"]


class TensorActor(Actor):
    """An actor whose members work together: ``await self.comm.all_reduce(tensor)``.

    The group of the whole mesh begins to form when the actor is constructed. A subclass may set, for all of its groups:

    * `comm_backend`: ``"nccl"`` for tensors on CUDA devices; for those in host memory ``"shm"``, where all members are on one host,
      ``"hierarchical"``, where some are, or ``"gloo"``; ``"auto"`` is the first of these three that serves;
    * `comm_timeout`: seconds that an operation may take;
    * `comm_check`: whether shapes are compared before anything moves: ``"always"``, ``"first"`` (until the same operation with the same
      shapes was agreed on once) or ``"never"``. That all call the same operation is looked at always. Where gloo is given sizes that
      differ it ends the process; shared memory compares the number of elements always.
    """

    comm_backend: ClassVar[str] = "auto"
    comm_timeout: ClassVar[float] = DEFAULT_TIMEOUT
    comm_check: ClassVar[Check] = "always"

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        actor = super().__new__(cls)
        if this_membership() is not None:
            actor.__dict__["_comm"] = own_communicator(cls.comm_backend, cls.comm_timeout, cls.comm_check)
        return actor

    @property
    def comm(self) -> Communicator:
        """The group of the whole mesh; ``self.comm["dp"]`` and ``self.comm["dp", "tp"]`` are those along its dimensions."""
        found: Communicator | None = self.__dict__.get("_comm")
        if found is None:
            raise UsageError("only an actor that was spawned has a communicator: it is one of the members of its mesh")
        return found


async def communicator(
    mesh: Any = None, *, backend: str = "auto", timeout: float = DEFAULT_TIMEOUT, check: Check = "always"
) -> Communicator:
    """The same for an actor of any class, called in all members: the group of its mesh, or of a slice of that which the actor is in.

    It has the dimensions of `mesh` as that is: sliced, split, renamed. ``await mesh.communicator()`` is the same.

    Returns once the group is formed. Raises `UsageError` outside of actors, and for a mesh that the actor is no member of.
    """
    comm = own_communicator(backend, timeout, check)
    if mesh is not None:
        me = this_membership()
        if not isinstance(mesh, ActorMesh) or me is None or mesh._key != me.key:
            raise UsageError(f"{mesh!r} is no mesh of which this actor is a member: the members of a mesh call this, each for itself")
        comm = comm.arranged([rank for _, rank in mesh.members()], mesh.extent)
    await comm.ready()
    return comm
