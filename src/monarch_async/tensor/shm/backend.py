"""The `shm` backend: what the tensor layer asks of one, by the operations of this package."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from monarch_async.errors import ChannelError
from monarch_async.ids import ProcAddress
from monarch_async.peering import Peering, Segment, Window
from monarch_async.tensor.shm.arithmetic import MOVED, REDUCED, Reduction
from monarch_async.tensor.shm.pages import Layout, Member, Own
from monarch_async.tensor.shm.plans import AllGather, AllReduce, AllToAll, Broadcast, OneShot, Place, Plan, ReduceScatter
from monarch_async.tensor.shm.transfers import KINDS, Transfer, Transfers, dtype_code
from monarch_async.tensor.shm.worker import Job, Worker

__all__ = ["Aborted", "ShmBackend"]

SMALL = 1 << 16
"""Bytes; so much, or less, is moved where an operation starts if it need not wait there."""
BLOCK = 1 << 20
"""Bytes: with less the interpreter's work shows, with more what four ranks have under way leaves the cache."""
SMALL_BLOCK = 1 << 18
"""Bytes of a slot in the rings between two members; a segment has two for each member, which take memory once they are used."""


class Store(Protocol):
    """What members tell each other in before they have met."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes:
        """Waits for the key."""


class Aborted(ChannelError):
    """The group was ended while, or before, this operation was under way."""


class ShmBackend:
    """Over shared memory, for tensors in host memory of processes of one host. `addresses` are those of the members, in their order.

    One for one meeting of the group: connect, run operations, abort, close. Operations are started from one thread. All members have to
    start the same collectives in the same order; sends and receives of each pair are an order of their own. An operation that does not fit
    those of the others ends with `Mismatch` before anything was moved, and with it everything else does. What else has to be the same, as
    shapes beyond the number of elements, its caller puts into the `tag`, which is compared too.
    """

    name = "shm"
    agrees = True

    def __init__(self, peering: Peering, addresses: Sequence[ProcAddress]) -> None:
        self._peering = peering
        self._addresses = addresses
        self._over: BaseException | None = None
        self._gate = threading.Lock()  # while an abort looks at the worker, nobody closes that
        self._members: list[Member] = []
        self._worker: Worker | None = None
        self._reductions: dict[tuple[Any, torch.dtype], Reduction] = {}
        self._place: Place
        self._transfers: Transfers

    def connect(self, store: Store, me: int, size: int, timeout: float) -> None:
        """Meet the other members: give them the segment and take theirs. Blocks.

        Raises `ChannelError`, `OSError` where there is no memory for the segment, or what the store does.
        """
        limit = time.monotonic() + timeout
        if me == 0:
            store.set("shm", secrets.token_hex(16))
        name = f"shm {store.get('shm').decode()}"
        layout = Layout(size, BLOCK, SMALL_BLOCK)
        found: dict[int, Member] = {}
        try:
            self._meet(name, layout, me, limit, found)
            if self._over is not None:
                raise self._over
        except BaseException:
            self._peering.refuse(name)
            for member in found.values():
                member.close()
            raise
        self._members = [found[index] for index in range(size)]
        own = Own(self._members, me)
        self._place = Place(own, layout)
        self._transfers = Transfers(self._place)
        self._worker = Worker(own, "monarch_async shm")
        if self._over is not None:  # meanwhile
            self.abort()

    def _meet(self, name: str, layout: Layout, me: int, limit: float, found: dict[int, Member]) -> None:
        """Give own memory and take that of the others, up to a time."""
        peering, others = self._peering, [(index, address) for index, address in enumerate(self._addresses) if index != me]
        mine = found[me] = Member(Segment(0, layout.bytes), layout, os.eventfd(0, os.EFD_CLOEXEC))
        mine.commit(0, layout.small_data)
        reader = mine.open_reader()
        try:
            for _, address in others:
                peering.give(address, name, [reader, mine.bell], limit - time.monotonic(), self._is_over)
        finally:
            os.close(reader)
        for index, address in others:
            window, bell = peering.take(address, name, limit - time.monotonic(), self._is_over)
            try:
                found[index] = Member(Window(window), layout, bell)
            except BaseException:
                os.close(bell)
                raise

    def _is_over(self) -> bool:
        return self._over is not None

    def moves(self, dtype: torch.dtype) -> bool:
        return dtype in MOVED

    def reduces(self, dtype: torch.dtype) -> bool:
        return dtype in REDUCED

    def all_reduce(self, tensor: torch.Tensor, op: Any, *, tag: int = 0) -> Job:
        """In place."""
        return self._reduce("all_reduce", tensor, op, None, tag)

    def reduce(self, tensor: torch.Tensor, to: int, op: Any, *, tag: int = 0) -> Job:
        """In place at member `to`; the tensors of the others stay as they are."""
        return self._reduce("reduce", tensor, op, to, tag)

    def _reduce(self, kind: str, tensor: torch.Tensor, op: Any, to: int | None, tag: int) -> Job:
        tensor, reduction = self._reduction(tensor, op)
        plan = (OneShot if tensor.nbytes <= self._place.one_shot else AllReduce)(self._place, tensor, reduction, to)
        return self._collective(kind, plan, tensor, reduction.code, -1 if to is None else to, tag=tag)

    def _reduction(self, tensor: torch.Tensor, op: Any) -> tuple[torch.Tensor, Reduction]:
        if tensor.requires_grad:
            tensor = tensor.detach()
        key = op, tensor.dtype
        reduction = self._reductions.get(key)
        if reduction is None:
            reduction = Reduction(op, tensor.dtype, self._place.size)
            if reduction.factor is None:
                self._reductions[key] = reduction
        return tensor, reduction

    def broadcast(self, tensor: torch.Tensor, source: int, *, tag: int = 0) -> Job:
        return self._collective("broadcast", Broadcast(self._place, tensor, source), tensor, root=source, tag=tag)

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor, *, tag: int = 0) -> Job:
        """Flat: `out` has the members' parts one after the other."""
        return self._collective("all_gather", AllGather(self._place, out, tensor), tensor, nbytes=out.nbytes, tag=tag)

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, op: Any, *, tag: int = 0) -> Job:
        """Flat: `tensor` has a part for each member; `out` gets this one's, reduced."""
        tensor, reduction = self._reduction(tensor, op)
        return self._collective("reduce_scatter", ReduceScatter(self._place, out, tensor, reduction), tensor, reduction.code, tag=tag)

    def all_to_all(self, out: torch.Tensor, tensor: torch.Tensor, out_sizes: Sequence[int], sizes: Sequence[int], *, tag: int = 0) -> Job:
        """Flat: so many elements for, and from, each member."""
        plan = AllToAll(self._place, out, tensor, out_sizes, sizes)
        return self._collective("all_to_all", plan, tensor, nbytes=tensor.nbytes + out.nbytes, count=0, tag=tag)

    def send(self, tensor: torch.Tensor, to: int) -> Job:
        return self._start(f"send {to}", self._transfers.send(tensor, self._other(to)), tensor.nbytes)

    def recv(self, tensor: torch.Tensor, source: int) -> Job:
        return self._start(f"recv {source}", self._transfers.receive(tensor, self._other(source)), tensor.nbytes)

    def _other(self, index: int) -> int:
        if index == self._place.me:
            raise ValueError("a member does not send to itself")
        return index

    def _collective(
        self, kind: str, plan: Plan, tensor: torch.Tensor, code: int = -1, root: int = -1, nbytes: int = -1, count: int = -1, tag: int = 0
    ) -> Job:
        plan.signature = KINDS.index(kind), dtype_code(tensor.dtype), tensor.numel() if count < 0 else count, code, root, tag
        return self._start("", self._transfers.collective(plan), tensor.nbytes if nbytes < 0 else nbytes)

    def _start(self, lane: str, transfer: Transfer, nbytes: int) -> Job:
        assert self._worker is not None
        return self._worker.start(Job(lane, transfer, small=nbytes <= SMALL))

    def abort(self) -> None:
        """End what is under way. Returns at once; from any thread; also while `connect` runs."""
        self._over = self._over or Aborted("the group was ended")
        with self._gate:
            if self._worker is not None:
                self._worker.abort(self._over)
        self._peering.look_again()

    def close(self) -> None:
        """Let go of everything. Blocks for a moment; called when nothing is under way any more, and nothing more is started."""
        self.abort()
        worker = self._worker
        if worker is not None:
            worker.close()
            with self._gate:
                self._worker = None
            del self._place, self._transfers
        for member in self._members:
            member.close()
        self._members = []
