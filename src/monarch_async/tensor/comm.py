"""`Communicator`: what an actor uses to work together with the other members of its mesh.

Every operation is begun when its method is called, in the order of the calls, which must be the same on all members; what it returns is
awaited for the result, or, in a `def` endpoint, asked with ``get()``. Nothing blocks the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Hashable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from monarch_async.ambient import on_loop
from monarch_async.errors import CollectiveTimeout, PeerLost, UsageError
from monarch_async.exchange import this_membership
from monarch_async.future import Future, as_future
from monarch_async.shape import Extent
from monarch_async.tensor.batch import Coalescing
from monarch_async.tensor.choosing import BACKENDS
from monarch_async.tensor.compression import Compression
from monarch_async.tensor.group import Check, Group
from monarch_async.tensor.ledger import LedgerEntry, callers_line
from monarch_async.tensor.membership import circle_of
from monarch_async.tensor.moving import (
    make_all_gather,
    make_all_to_all,
    make_barrier,
    make_broadcast,
    make_gather,
    make_scatter,
    make_transfer,
)
from monarch_async.tensor.nccl import in_current_stream
from monarch_async.tensor.operation import Operation
from monarch_async.tensor.reducing import make_all_reduce, make_reduce, make_reduce_scatter
from monarch_async.tensor.reductions import Reduction
from monarch_async.tensor.signature import Signature
from monarch_async.tensor.staged import check_tensors
from monarch_async.tensor.team import Team, Teams
from monarch_async.tensor.world import global_ranks

__all__ = ["DEFAULT_TIMEOUT", "Communicator", "own_communicator"]

T = TypeVar("T")
DEFAULT_TIMEOUT = 300.0
"""Seconds for which an operation may take, the time that the group takes to form included."""


class Communicator:
    """A group of members of one mesh, seen by one of them.

    `rank` and `size` are its place in the group and how many these are; members are named by their place in the group in arguments, and by
    their rank in the mesh in errors. `ranks` are those ranks, in the group's order.

    Each operation raises, at every member: `PeerLost` when one of them is gone, `CollectiveMismatch` when they called different ones,
    `CollectiveTimeout` when it did not end within `timeout` seconds, `CollectiveError` when a member has cancelled it or it failed
    otherwise. Wrong arguments raise `UsageError` or `TypeError` at the call.
    """

    def __init__(self, teams: Teams, team: Team, extent: Extent) -> None:
        self._teams = teams
        self._team = team
        self._extent = extent
        self._circle = teams.circle
        self._group = team.group
        self._kind = team.kind
        self._compressed = team.turns

    # Who it is.

    @property
    def rank(self) -> int:
        return self._group.index

    @property
    def size(self) -> int:
        return len(self._group.ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._group.ranks

    @property
    def extent(self) -> Extent:
        """The dimensions of the mesh that this group runs along; of a subset ``{"ranks": size}``."""
        return self._extent

    @property
    def epoch(self) -> int:
        """How often the group has been formed anew; -1 until it is for the first time. The same number at every member."""
        return self._group.number

    def ready(self) -> Future[int]:
        """Wait until the group is formed; gives the epoch. What had ended the one before counts as known: no operation raises it any more.

        All members are asked, so that it is one which had ended nowhere before the call; one that does not answer is waited for one second.

        Raises `PeerLost` when a member will not come back.
        """
        return as_future(self._circle.runtime, self._group.wait_ready())

    def ledger(self) -> list[LedgerEntry]:
        """The last operations at this member, oldest first."""
        return self._group.ledger.entries()

    def __getitem__(self, dims: str | tuple[str, ...]) -> Communicator:
        """The group along these dimensions of the mesh, of which this member is one: those that differ from it in nothing else.

        Made when it is first asked for, and it forms when all its members have. Raises `KeyError` for a dimension that the mesh has not.
        """
        names = {dims} if isinstance(dims, str) else {*dims}
        extent = self._extent
        for name in names:
            if name not in extent:
                raise KeyError(f"{self._group.name} has the dimensions {', '.join(extent.labels) or 'none'}, and no {name!r}")
        here = extent.point(self.rank)
        fixed = [label for label in extent if label not in names]
        points = map(extent.point, range(self.size))
        ranks = tuple(rank for rank, point in zip(self.ranks, points, strict=True) if all(point[label] == here[label] for label in fixed))
        return self.arranged(ranks, Extent.of(**{label: size for label, size in extent.items() if label in names}))

    def subset(self, ranks: Sequence[int]) -> Communicator:
        """A group of some members, by their ranks in the mesh; it forms when all of them have asked for it, and needs no other.

        Raises `UsageError` where this member is none of them.
        """
        chosen = tuple(sorted(set(ranks)))
        self._require(chosen)
        return self.arranged(chosen, Extent.of(ranks=len(chosen)))

    def arranged(self, ranks: Sequence[int], extent: Extent) -> Communicator:
        """A group of some members, in this order, and with these dimensions, as those of a slice of the mesh.

        Raises `UsageError` where this member is none of them.
        """
        self._require(ranks)
        return on_loop(self._circle.runtime, lambda: _seen(self._teams, tuple(ranks), extent))

    def _require(self, ranks: Sequence[int]) -> None:
        if not set(ranks) <= set(self.ranks) or self._circle.me.rank not in ranks:
            raise UsageError(f"a subset of {list(self.ranks)} with rank {self._circle.me.rank} in it is wanted, not {list(ranks)}")

    # What torch takes.

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group as `torch.distributed` knows it, of the present epoch; of no use once that is over. What is done on it directly is not
        checked, and must be in the same order with the operations here.

        Raises `UsageError` while the group is not formed: ``await comm.ready()`` first.
        """
        epoch = self._group.epoch
        if epoch is None or not self._group.ready:
            raise UsageError(f"{self._group.name} is not formed: await comm.ready() first")
        return epoch.backend.process_group

    def device_mesh(self) -> Future[DeviceMesh]:
        """A `DeviceMesh` with the dimensions of this group and their names, of the present epoch.

        The groups along each of them are formed first, so all members have to call it; and that of the whole mesh, by whose ranks torch
        names the members, so all of the mesh have to have a communicator.

        Raises `CollectiveTimeout` where they are not formed within the group's timeout, `PeerLost` when a member will not come back, and
        `UsageError` where this process has a default group of torch's that this one's members are not in.
        """
        return as_future(self._circle.runtime, self._device_mesh())

    async def _device_mesh(self) -> DeviceMesh:
        names = self._extent.labels or ("ranks",)
        groups = [self] if len(names) == 1 else [self[name] for name in names]
        limit = self._group.timeout
        wanted = [self._teams.whole.group, self._group, *(group._group for group in groups)]
        try:
            async with asyncio.timeout(limit):
                await _all_formed(*wanted)
        except TimeoutError:
            missing = ", ".join(dict.fromkeys(group.name for group in wanted if not group.ready))
            raise CollectiveTimeout(f"a DeviceMesh takes {missing}, not formed within {limit:g} s: have all members ask for it") from None
        places = global_ranks(self.process_group)
        default = dist.group.WORLD
        if default is None or default.rank() != places[self.rank]:
            raise UsageError(
                f"torch's default group in this process has not the members of {self._group.name}: a DeviceMesh names ranks by that one"
            )
        device = self._kind.device_type
        if len(names) == 1:
            return DeviceMesh.from_group(self.process_group, device, mesh_dim_names=names)
        table = torch.tensor(places).view(self._extent.sizes)
        return DeviceMesh.from_group([group.process_group for group in groups], device, mesh=table, mesh_dim_names=names)

    # Operations.

    def _run(self, operation: Operation, timeout: float | None) -> Future[Any]:
        line = callers_line()
        if self._kind.device_type == "cuda":
            in_current_stream(operation)
        batch = self._team.batch
        if batch is not None:
            return batch.add(operation, self._circle.runtime)
        return on_loop(self._circle.runtime, lambda: self._group.submit(operation, timeout, line))

    def _member(self, index: int, *, other: bool = False) -> int:
        if not 0 <= index < self.size:
            raise UsageError(f"{self._group.name} has the members 0 to {self.size - 1}, and no {index}")
        if other and index == self.rank:
            raise UsageError("that is this member itself")
        return index

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: Reduction = "sum",
        *,
        premul: float | None = None,
        compress: Compression | None = None,
        key: Hashable = None,
        timeout: float | None = None,
    ) -> Future[torch.Tensor]:
        """Combine the tensors of all members, into each of them; with `premul` each is multiplied with its member's factor first.

        With `compress` fewer bytes move, and the result is less exact: await it before the next call. `PowerSGD` keeps state by `key`.
        """
        if compress is not None:
            check_tensors(self._kind, tensor)
            alone = premul is None and self._team.batch is None
            return self._compressed.all_reduce(self, tensor, op, compress, key, timeout, alone)
        return self._run(make_all_reduce(self._kind, self.size, tensor, op, premul), timeout)

    def reduce(
        self,
        tensor: torch.Tensor,
        to: int = 0,
        op: Reduction = "sum",
        *,
        premul: float | None = None,
        timeout: float | None = None,
    ) -> Future[torch.Tensor]:
        """Combine the tensors of all members, into that of one. The others keep theirs."""
        return self._run(make_reduce(self._kind, self.size, self.rank, tensor, self._member(to), op, premul), timeout)

    def broadcast(self, tensor: torch.Tensor, source: int = 0, *, timeout: float | None = None) -> Future[torch.Tensor]:
        """Give every member the values of one's tensor, in place."""
        return self._run(make_broadcast(self._kind, self.size, self.rank, tensor, self._member(source)), timeout)

    def all_gather(self, tensor: torch.Tensor, *, timeout: float | None = None) -> Future[list[torch.Tensor]]:
        """The tensors of all members, at each. They may differ in their first dimension."""
        return self._run(make_all_gather(self._kind, self.size, self.rank, tensor), timeout)

    def gather(self, tensor: torch.Tensor, to: int = 0, *, timeout: float | None = None) -> Future[list[torch.Tensor] | None]:
        """The tensors of all members, at one; `None` at the others. They may differ in shape."""
        return self._run(make_gather(self._kind, self.size, self.rank, tensor, self._member(to)), timeout)

    def scatter(
        self, tensors: Sequence[torch.Tensor] | None = None, source: int = 0, *, timeout: float | None = None
    ) -> Future[torch.Tensor]:
        """From one, a tensor to each member; the others give `None`. They may differ in shape."""
        return self._run(make_scatter(self._kind, self.size, self.rank, tensors, self._member(source)), timeout)

    def reduce_scatter(
        self,
        tensor: torch.Tensor,
        op: Reduction = "sum",
        *,
        sizes: Sequence[int] | None = None,
        premul: float | None = None,
        timeout: float | None = None,
    ) -> Future[torch.Tensor]:
        """Combine the tensors of all members, and give each its part: as many rows as `sizes` says, the same number for all without it."""
        return self._run(make_reduce_scatter(self._kind, self.size, self.rank, tensor, op, premul, sizes), timeout)

    def all_to_all(self, tensors: Sequence[torch.Tensor], *, timeout: float | None = None) -> Future[list[torch.Tensor]]:
        """From every member a tensor to each; gives those that came, by sender. They may differ in shape."""
        return self._run(make_all_to_all(self._kind, self.size, self.rank, tensors), timeout)

    def barrier(self, *, timeout: float | None = None) -> Future[None]:
        """Until every member has come to it."""
        return self._run(make_barrier(), timeout)

    def send(self, tensor: torch.Tensor, to: int, *, timeout: float | None = None) -> Future[None]:
        """Send to one member, which receives in the order in which this one sends."""
        return self._run(make_transfer(self._kind, self.rank, self.rank, self._member(to, other=True), tensor), timeout)

    def recv(self, source: int, tensor: torch.Tensor | None = None, *, timeout: float | None = None) -> Future[torch.Tensor]:
        """Receive from one member: into `tensor`, or into a new one of the sender's dtype and shape."""
        return self._run(make_transfer(self._kind, self.rank, self._member(source, other=True), self.rank, tensor), timeout)

    def send_object(self, value: Any, to: int) -> Future[None]:
        """Send anything that can be pickled, as a message of the runtime. Done at once: it waits at the receiver until it is received."""
        where = self._member(to)
        signature = Signature("send_object", (f"to {to}",))

        def begin(epoch: Any, operation: Operation) -> None:
            epoch.objects.send(where, value)
            epoch.finished(operation)

        return self._run(Operation(signature, begin=begin), None)

    def recv_object(self, source: int, *, timeout: float | None = None) -> Future[Any]:
        """The next object that a member has sent."""
        where = self._member(source)
        signature = Signature("recv_object", (f"from {source}",))
        operation = Operation(signature, partner=where, begin=lambda epoch, operation: epoch.objects.want(operation, where))
        return self._run(operation, timeout)

    def coalesce(self, *, timeout: float | None = None) -> Coalescing:
        """Do several operations as one: ``async with comm.coalesce():`` begins what is called inside when it is left, and waits for it.

        Members agree once for all of them. What the calls inside return is done then, and is not to be awaited before. The block may be
        open for as long as an operation may take.
        """
        limit = self._group.timeout if timeout is None else timeout
        return Coalescing(self._team, lambda whole: self._run(whole, timeout), limit)


async def _all_formed(whole: Group, *groups: Group) -> None:
    """Wait until they are. The whole may have lost a member for good: then one of the others names the members."""
    if whole.number < 0:
        with contextlib.suppress(PeerLost):
            await whole.wait_ready()
    for group in groups:
        await group.wait_ready()


def _seen(teams: Teams, ranks: tuple[int, ...], extent: Extent) -> Communicator:
    """The communicator of a team along these dimensions: the same whenever it is asked for. On the loop."""
    comm: Communicator | None = teams.views.get((ranks, extent))
    if comm is None:
        comm = teams.views[ranks, extent] = Communicator(teams, teams.of(ranks), extent)
    return comm


def own_communicator(backend: str, timeout: float, check: Check) -> Communicator:
    """The one of the actor whose code this is, over its whole mesh. The settings are those of whoever asked first."""
    me = this_membership()
    if me is None:
        raise UsageError("only an actor has a communicator: it is one of the members of its mesh")
    if backend != "auto" and backend not in BACKENDS:
        raise UsageError(f"backend={backend!r} is unknown: use {' or '.join(map(repr, ['auto', *BACKENDS]))}")
    if check not in ("always", "first", "never"):
        raise UsageError(f'check={check!r} is unknown: use "always", "first" or "never"')

    def make_one() -> Communicator:
        circle = circle_of(me)
        teams: Teams = circle.teams or Teams(circle, (backend, timeout, check))
        comm = _seen(teams, teams.whole.group.ranks, me.extent)
        circle.teams = teams  # now that there is such a backend
        return comm

    return on_loop(me.runtime, make_one)
