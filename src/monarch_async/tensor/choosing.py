"""Which backend a group has, and how one is made for each of its epochs."""

from __future__ import annotations

from collections.abc import Callable

from monarch_async.errors import UsageError
from monarch_async.peering import Peering
from monarch_async.tensor.backend import Backend, GlooBackend
from monarch_async.tensor.host import HostBackend
from monarch_async.tensor.membership import Circle
from monarch_async.tensor.nccl import NcclBackend

__all__ = ["BACKENDS", "backend_of", "maker_of"]

BACKENDS: dict[str, type[Backend]] = {"shm": HostBackend, "gloo": GlooBackend, "nccl": NcclBackend}


def backend_of(circle: Circle, name: str, ranks: tuple[int, ...]) -> type[Backend]:
    """The kind of backend by this name for a group; with ``auto`` the best one for tensors in host memory.

    Raises `UsageError` for ``shm`` where the members are not all on this host.
    """
    if name not in ("auto", "shm"):
        return BACKENDS[name]
    peering = Peering(circle.me.runtime)
    away = [rank for rank in ranks if rank != circle.me.rank and not peering.reaches(circle.address_of(rank))]
    if away and name == "shm":
        raise UsageError(f"backend='shm' is for members on one host, and ranks {away} are on others: use 'auto', or 'gloo'")
    return GlooBackend if away else HostBackend


def maker_of(circle: Circle, ranks: tuple[int, ...], kind: type[Backend]) -> Callable[[], Backend]:
    """What makes the backend of an epoch, with the members' processes as they are then."""
    host = _address_here(circle)
    if kind is HostBackend:
        me = circle.me

        def make() -> Backend:
            addresses = [me.runtime.me if rank == me.rank else circle.address_of(rank) for rank in ranks]
            return HostBackend(host, Peering(me.runtime), addresses)

        return make
    return lambda: kind(host)  # type: ignore[call-arg]


def _address_here(circle: Circle) -> str:
    """Where the other members reach this process."""
    me = circle.runtime.me
    if all(address.host == me.host for address in circle.me.addresses):
        return "127.0.0.1"
    return me.tcp.rpartition(":")[0].strip("[]")
