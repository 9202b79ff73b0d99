"""The backend for members on several hosts, of which some share one: shared memory inside each host, and gloo between the hosts.

Theory: the first member of each host, its *leader*, is also in a gloo group of all leaders. A reduction is made inside each host, into the
memory of its leader, then among the leaders, and what came of it is broadcast inside each host. So every byte leaves a host once, and
not once for each of its members. Tensors go through this in pieces: while one crosses the network, the next is reduced in shared memory.

An operation is one sequence of steps of the shared memory's (`shm.transfers`), which waits for works of gloo as it does for other members.
So the operations of a host follow each other in one order, that in which they are started, and there is no thread but those of the two.

Rules:

* Members of a host are combined in their order, by one of them; leaders in the order of gloo's ring. So the bits are the same on all
  members, and in every run with the same hosts.
* What gloo alone has goes by gloo alone: exchanges, sends and receives. That is a group of its own, which is `process_group` too.
* Nothing here compares what members have begun: that is done before.
* An operation has ended when its steps and all its works of gloo have. If its steps fail the works are broken off.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from monarch_async.ids import ProcAddress
from monarch_async.peering import Peering
from monarch_async.tensor.backend import GlooBackend, TorchBackend
from monarch_async.tensor.hosts import members_by_host
from monarch_async.tensor.running import Running, Told
from monarch_async.tensor.shm.backend import ShmBackend
from monarch_async.tensor.shm.pages import OUTSIDE, move, tensor_at
from monarch_async.tensor.shm.transfers import Need, Transfer, is_met

__all__ = ["HierarchicalBackend"]

PIECE = 1 << 22
"""Bytes that are under way as one."""
AHEAD = 2
"""Pieces that may be on their way between hosts while another is reduced; as many as gloo has threads."""


class HierarchicalBackend(GlooBackend):
    """`addresses` are the members' processes, in their order, and `me` is this one's place; `host` is where gloo listens."""

    name: ClassVar[str] = "hierarchical"
    averages: ClassVar[bool] = True
    scatters: ClassVar[bool] = True

    def __init__(self, host: str, peering: Peering, addresses: Sequence[ProcAddress], me: int) -> None:
        super().__init__(host)
        self._hosts = members_by_host(addresses)
        self._here = next(index for index, members in enumerate(self._hosts) if me in members)
        self._local = self._hosts[self._here]
        self._place = self._local.index(me)  # among those of this host
        self._size = len(addresses)
        self._shm = ShmBackend(peering, [addresses[index] for index in self._local])
        self._leaders: TorchBackend | None = None  # where this is one, and there are others

    def connect(self, store: Store, me: int, size: int, timeout: float) -> None:
        self._shm.connect(PrefixStore(f"host {self._here}", store), self._place, len(self._local), timeout)
        super().connect(store, me, size, timeout)
        if not self._place and len(self._hosts) > 1:
            self._leaders = TorchBackend(self._meet(PrefixStore("leaders", store), self._here, len(self._hosts), timeout), self._follow)

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> Running:
        return self._run(lambda works: self._sum(works, tensor, op), tensor.nbytes)

    def reduce(self, tensor: torch.Tensor, to: int, op: Any) -> Running:
        """Where the result does not go the tensor is calculated in."""
        return self._run(lambda works: self._sum_at(works, tensor, to, op), tensor.nbytes)

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, op: Any) -> Running:
        return self._run(lambda works: self._scatter(works, out, tensor, op), tensor.nbytes)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Running:
        return self._run(lambda works: self._spread(works, tensor, source), tensor.nbytes)

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> Running:
        return self._run(lambda works: self._gather(works, out, tensor), out.nbytes)

    def abort(self) -> None:
        self._shm.abort()
        super().abort()

    def close(self) -> None:
        self._shm.close()
        if self._leaders is not None:
            self._let_go(self._leaders._torch)
            self._leaders._torch = None  # by this thread: one of gloo's, which has the works' callbacks, could not wait for its own end
            self._leaders = None
        super().close()

    def _run(self, steps: Callable[[Works], Transfer], nbytes: int) -> Running:
        works = Works(self._leaders, self._shm.wake, self.abort)
        works.steps = self._shm.run(steps(works), nbytes)
        return works

    # The steps of operations. What `works` starts is there on hosts' leaders only; elsewhere there is nothing to wait for.

    def _sum(self, works: Works, tensor: torch.Tensor, op: Any) -> Transfer:
        plain, divisor = self._without_mean(op)
        way: deque[tuple[torch.Tensor, Crossing | None]] = deque()
        for piece in _pieces(tensor):
            yield from self._reduce_here(piece, plain)
            way.append((piece, works.all_reduce(piece, plain)))
            if len(way) > AHEAD:
                yield from self._arrive(*way.popleft(), divisor)
        while way:
            yield from self._arrive(*way.popleft(), divisor)

    def _sum_at(self, works: Works, tensor: torch.Tensor, to: int, op: Any) -> Transfer:
        plain, divisor = self._without_mean(op)
        home = self._host_of(to)
        for piece in _pieces(tensor):
            yield from self._reduce_here(piece, plain)
            works.reduce(piece, home, plain)
        yield from works.wait()
        if self._here == home:
            self._divide(tensor, divisor)
            if self._local[0] != to:
                yield from self._shm.broadcasting(tensor, 0)

    def _spread(self, works: Works, tensor: torch.Tensor, source: int) -> Transfer:
        home = self._host_of(source)
        way: deque[tuple[torch.Tensor, Crossing | None]] = deque()
        for piece in _pieces(tensor):
            if self._here != home:
                way.append((piece, works.broadcast(piece, home)))
                if len(way) > AHEAD:
                    yield from self._arrive(*way.popleft())
                continue
            if len(self._local) > 1:
                yield from self._shm.broadcasting(piece, self._local.index(source))
            works.broadcast(piece, home)
        while way:
            yield from self._arrive(*way.popleft())
        yield from works.wait()

    def _gather(self, works: Works, out: torch.Tensor, tensor: torch.Tensor) -> Transfer:
        """The parts of one host are together in a block: in the result, if they follow each other there."""
        count = tensor.numel()
        blocks = [
            out[members[0] * count : (members[-1] + 1) * count]
            if _in_a_row(members)
            else torch.empty(len(members) * count, dtype=out.dtype)
            for members in self._hosts
        ]
        if len(self._local) > 1:
            yield from self._shm.gathering(blocks[self._here], tensor)
        else:
            move(blocks[self._here].data_ptr(), tensor.data_ptr(), tensor.nbytes)
        way: deque[tuple[int, torch.Tensor, Crossing | None]] = deque()
        for pieces in zip_longest(*map(_pieces, blocks)):
            for host, piece in enumerate(pieces):
                if piece is not None:
                    way.append((host, piece, works.broadcast(piece, host)))
            while len(way) > AHEAD * len(blocks):
                yield from self._came(*way.popleft())
        while way:
            yield from self._came(*way.popleft())
        for members, block in zip(self._hosts, blocks, strict=True):
            if not _in_a_row(members):
                for place, index in enumerate(members):
                    move(out.data_ptr() + index * tensor.nbytes, block.data_ptr() + place * tensor.nbytes, tensor.nbytes)

    def _came(self, host: int, piece: torch.Tensor, crossing: Crossing | None) -> Transfer:
        if host != self._here:
            yield from self._arrive(piece, crossing)
        elif crossing is not None:
            yield from crossing.wait()

    def _scatter(self, works: Works, out: torch.Tensor, tensor: torch.Tensor, op: Any) -> Transfer:
        """Leaders get the parts of all members of their hosts, and hand them on."""
        plain, divisor = self._without_mean(op)
        count, leads, alone = out.numel(), not self._place, len(self._local) == 1
        whole = out if alone else torch.empty(len(self._local) * count if leads else 0, dtype=out.dtype)
        for host, members in enumerate(self._hosts):
            ours = iter(_pieces(whole, count)) if leads and host == self._here else None
            for member in members:
                for piece in _pieces(tensor[member * count : (member + 1) * count]):
                    summed = piece
                    if leads:  # the caller's own is to stay as it is
                        summed = next(ours) if ours is not None else torch.empty_like(piece)
                        move(summed.data_ptr(), piece.data_ptr(), piece.nbytes)
                    yield from self._reduce_here(summed, plain)
                    works.reduce(summed, host, plain)
                    yield from works.wait(AHEAD)
        yield from works.wait()
        self._divide(whole, divisor)
        if not alone:
            mine = [count if leads else 0] * len(self._local)
            yield from self._shm.exchanging(out, whole, [count, *[0] * (len(self._local) - 1)], mine)

    # Their parts.

    def _host_of(self, member: int) -> int:
        return next(index for index, members in enumerate(self._hosts) if member in members)

    def _without_mean(self, op: Any) -> tuple[Any, int | None]:
        """What hosts are asked for, and what the sum is divided by in the end."""
        return (dist.ReduceOp.SUM, self._size) if op == dist.ReduceOp.AVG else (op, None)

    def _divide(self, tensor: torch.Tensor, divisor: int | None) -> None:
        """Where it arrives."""
        if divisor is not None and not self._place:
            tensor_at(tensor).div_(divisor)

    def _reduce_here(self, piece: torch.Tensor, op: Any) -> Transfer:
        """Into the leader's."""
        if len(self._local) > 1:
            yield from self._shm.reducing(piece, op, 0)

    def _arrive(self, piece: torch.Tensor, crossing: Crossing | None, divisor: int | None = None) -> Transfer:
        """At the leader, and from there at the others of its host."""
        if crossing is not None:
            yield from crossing.wait()
        self._divide(piece, divisor)
        if len(self._local) > 1:
            yield from self._shm.broadcasting(piece, 0)


class Crossing:
    """A work between the hosts, as steps in shared memory wait for it."""

    __slots__ = ("error", "words")

    def __init__(self) -> None:
        self.words = {OUTSIDE: 0}
        self.error: BaseException | None = None

    def wait(self) -> Transfer:
        need = Need(OUTSIDE, 1, (self,))
        if not is_met(need):
            yield need
        if self.error is not None:
            raise self.error


class Works:
    """The works between hosts of one operation. As a `Running` it is the whole of it: it has ended when they have, and its `steps`."""

    def __init__(self, leaders: TorchBackend | None, wake: Callable[[], None], abort: Callable[[], None]) -> None:
        self.steps: Running
        self._leaders = leaders
        self._wake = wake
        self._abort = abort
        self._lock = threading.Lock()
        self._left = 0
        self._crossings: deque[Crossing] = deque()  # not waited for yet
        self._outcome: tuple[BaseException | None, Told] | None = None  # of the steps, once they have ended

    def all_reduce(self, piece: torch.Tensor, op: Any) -> Crossing | None:
        return None if self._leaders is None else self._follow(self._leaders.all_reduce(piece, op))

    def reduce(self, piece: torch.Tensor, to: int, op: Any) -> Crossing | None:
        return None if self._leaders is None else self._follow(self._leaders.reduce(piece, to, op))

    def broadcast(self, piece: torch.Tensor, source: int) -> Crossing | None:
        return None if self._leaders is None else self._follow(self._leaders.broadcast(piece, source))

    def wait(self, but: int = 0) -> Transfer:
        """Until so many are under way at most."""
        while len(self._crossings) > but:
            yield from self._crossings.popleft().wait()

    def _follow(self, running: Running) -> Crossing:
        crossing = Crossing()
        self._crossings.append(crossing)
        with self._lock:
            self._left += 1

        def arrived(error: BaseException | None) -> None:
            crossing.error = error
            crossing.words[OUTSIDE] = 1
            self._wake()
            with self._lock:
                self._left -= 1
                outcome = self._outcome if not self._left else None
            if outcome is not None:
                outcome[1](outcome[0])

        running.when_done(arrived)
        return crossing

    def when_done(self, told: Told) -> None:
        def steps_ended(error: BaseException | None) -> None:
            with self._lock:
                self._outcome = error, told
                left = self._left
            if not left:
                told(error)
            elif error is not None:
                self._abort()  # else they would wait for what never comes

        self.steps.when_done(steps_ended)


def _pieces(tensor: torch.Tensor, parts_of: int = 0) -> Iterator[torch.Tensor]:
    """Of a flat tensor; `parts_of`: none goes over the end of one of its parts of so many elements."""
    most, count = PIECE // tensor.itemsize, tensor.numel()
    part = parts_of or max(count, 1)
    for first in range(0, count, part):
        for begin in range(first, first + part, most):
            yield tensor[begin : min(begin + most, first + part)]


def _in_a_row(members: Sequence[int]) -> bool:
    return members[-1] - members[0] == len(members) - 1
