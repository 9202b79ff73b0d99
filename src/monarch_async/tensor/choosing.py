"""Which backend a group has, and how one is made for each of its epochs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from monarch_async.errors import UsageError
from monarch_async.peering import SUPPORTED, Peering
from monarch_async.tensor.backend import Backend, GlooBackend
from monarch_async.tensor.hierarchical import HierarchicalBackend
from monarch_async.tensor.host import HostBackend
from monarch_async.tensor.hosts import members_by_host
from monarch_async.tensor.membership import Circle
from monarch_async.tensor.nccl import NcclBackend, device_of

__all__ = ["BACKENDS", "backend_of", "maker_of"]

BACKENDS: dict[str, type[Backend]] = {"shm": HostBackend, "hierarchical": HierarchicalBackend, "gloo": GlooBackend, "nccl": NcclBackend}


def backend_of(circle: Circle, name: str, ranks: tuple[int, ...]) -> type[Backend]:
    """The kind of backend by this name for a group; with ``auto`` the best one for tensors in host memory: shared memory where all members
    are on one host, that and gloo where some are, else gloo. All members come to the same: hosts are told apart by their names alone.

    Raises `UsageError` for ``shm`` where the members are not all on this host, and for ``nccl`` where there is no CUDA device.
    """
    if name == "nccl" and not torch.cuda.is_available():
        raise UsageError("backend='nccl' is for tensors on CUDA devices, and this process has none: use 'auto'")
    if name not in ("auto", "shm"):
        return BACKENDS[name]
    peering = Peering(circle.me.runtime)
    away = [rank for rank in ranks if rank != circle.me.rank and not peering.reaches(circle.address_of(rank))]
    if away and name == "shm":
        raise UsageError(f"backend='shm' is for members on one host, and ranks {away} are on others: use 'auto', or 'gloo'")
    if not away:
        return HostBackend
    shares = SUPPORTED and any(len(members) > 1 for members in members_by_host([circle.address_of(rank) for rank in ranks]))
    return HierarchicalBackend if shares else GlooBackend


def maker_of(circle: Circle, ranks: tuple[int, ...], kind: type[Backend]) -> Callable[[], Backend]:
    """What makes the backend of an epoch, with the members' processes as they are then."""
    host, me = _address_here(circle), circle.me

    def make() -> Backend:
        addresses = [me.runtime.me if rank == me.rank else circle.address_of(rank) for rank in ranks]
        if kind is HostBackend:
            return HostBackend(host, Peering(me.runtime), addresses)
        if kind is HierarchicalBackend:
            return HierarchicalBackend(host, Peering(me.runtime), addresses, ranks.index(me.rank))
        if kind is NcclBackend:
            return NcclBackend(host, device_of(me.runtime.loop))
        return kind(host)  # type: ignore[call-arg]

    return make


def _address_here(circle: Circle) -> str:
    """Where the other members reach this process."""
    me = circle.runtime.me
    if all(address.host == me.host for address in circle.me.addresses):
        return "127.0.0.1"
    return me.tcp.rpartition(":")[0].strip("[]")
