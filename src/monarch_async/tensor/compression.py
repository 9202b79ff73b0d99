"""Sums that move fewer bytes: ``await comm.all_reduce(tensor, "mean", compress=BF16())``, and the same in the backward pass of DDP.

    from monarch_async.tensor import BF16, FP8, PowerSGD, ddp_hook

    await self.comm.all_reduce(weight.grad, "mean", compress=self.powersgd, key="weight")
    ddp.register_comm_hook(None, ddp_hook(self.comm, FP8()))

`compressors` says what there is and what it does to the numbers. This module runs their steps, in one of two ways:

* Awaited: each step is an operation of the communicator, with all that it checks. Several steps can't be begun at the call, so compressed
  sums of one group are done one after another, in the order of the calls, and a sum of several steps is to be awaited before another
  operation is called. Where tensors are large, what is calculated between the steps is so in a thread.
* In DDP: a thread of the hook's own does one bucket after another on the process group, so that gradients move while others are still being
  computed, and that all members do everything in the same order. With the last bucket of a backward pass the hook waits until all is done:
  DDP may use the group itself after that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from monarch_async.errors import CollectiveError, CollectiveTimeout, PeerLost, UsageError
from monarch_async.future import Future, as_future
from monarch_async.tensor.compressors import (
    BF16,
    FP8,
    FP16,
    AllReduce,
    AllToAll,
    Answer,
    Compression,
    Place,
    PowerSGD,
    Request,
    Steps,
    Traffic,
)
from monarch_async.tensor.group import Group
from monarch_async.tensor.ledger import asked_at, callers_line
from monarch_async.tensor.reductions import HEAVY

__all__ = ["BF16", "FP8", "FP16", "Compression", "PowerSGD", "Traffic", "Turns", "ddp_hook"]

Hook = Callable[[object, GradBucket], torch.futures.Future[torch.Tensor]]


class Comm(Protocol):
    """A communicator, as far as it is wanted here."""

    _compressed: Turns

    @property
    def size(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def process_group(self) -> dist.ProcessGroup: ...
    def all_reduce(self, tensor: torch.Tensor, *, timeout: float | None = None) -> Any: ...
    def all_to_all(self, tensors: Sequence[torch.Tensor], *, timeout: float | None = None) -> Any: ...
    def all_gather(self, tensor: torch.Tensor, *, timeout: float | None = None) -> Any: ...


class Turns:
    """The compressed sums of one group: one at a time, in the order of the calls. Where one fails, those that wait fail with it."""

    __slots__ = ("error", "failures", "group", "lock")

    def __init__(self, group: Group) -> None:
        self.group = group
        self.lock = asyncio.Lock()
        self.failures = 0
        self.error: BaseException | None = None

    def all_reduce(
        self, comm: Comm, tensor: torch.Tensor, op: str, compress: Compression, key: Hashable, timeout: float | None, alone: bool
    ) -> Future[torch.Tensor]:
        """See `Communicator.all_reduce`; `alone`: it is asked for nothing else, and not in a batch."""
        if not alone:
            raise UsageError("compress= goes with neither premul= nor coalesce()")
        compress.check(tensor, op, key)
        line = callers_line()
        return as_future(self.group.circle.runtime, self._steps(comm, tensor, op == "mean", compress, key, timeout, line))

    async def _steps(
        self, comm: Comm, tensor: torch.Tensor, mean: bool, compress: Compression, key: Hashable, timeout: float | None, line: str
    ) -> torch.Tensor:
        """All steps of one sum, in turn, in a task of its own."""
        asked_at.set(line)
        failures = self.failures
        known = False  # whether the other members hear of what goes wrong here, from an operation under way
        try:
            async with self.lock:
                if self.failures != failures and self.error is not None:
                    raise self.error
                place = Place(self.group.name, await self._formed(timeout), comm.size)
                steps = compress.run([tensor], [key], place, mean)
                request = await _next(steps, None, tensor.numel() > HEAVY)
                while request is not None:
                    known = True
                    self._check_epoch(place.epoch)
                    answer = await _awaited(comm, request, timeout)
                    known = False
                    request = await _next(steps, answer, tensor.numel() > HEAVY)
                return tensor
        except BaseException as error:
            if self.failures == failures:
                self._failed(error, known=known or isinstance(error, PeerLost))
            raise

    async def _formed(self, timeout: float | None) -> int:
        """The epoch in which what is called next will be done, or refused."""
        group = self.group
        limit = group.timeout if timeout is None else timeout
        if not group.ready and not group.owes:
            try:
                async with asyncio.timeout(limit):
                    await group.wait_ready()
            except TimeoutError:
                raise CollectiveTimeout(f"{group.name} was not formed within {limit:g} s") from None
        return group.number

    def _check_epoch(self, number: int) -> None:
        """Raises `CollectiveError` where that epoch has ended, and what is called next would be done in another one."""
        group = self.group
        if not group.owes and not (group.ready and group.number == number):
            raise CollectiveError(f"epoch {number} of {group.name} has ended between the steps of a compressed all_reduce")

    def _failed(self, error: BaseException, *, known: bool) -> None:
        """Of the sum whose turn it is, or that waits for it. `known`: the other members hear of it already."""
        cancelled = not isinstance(error, Exception)
        if cancelled or not known:
            story = "was cancelled" if cancelled else f"failed: {error}"
            error = CollectiveError(f"a compressed all_reduce at rank {self.group.circle.me.rank} of {self.group.name} {story}")
        if not known:
            self.group.abandon(error)
        self.failures += 1
        self.error = error


async def _next(steps: Steps, answer: Answer | None, heavy: bool) -> Request | None:
    """The next step, `None` at the end. Cancelled, it ends when its thread does: the tensors are nobody else's before."""
    if not heavy:
        return _advance(steps, answer)
    work = asyncio.get_running_loop().run_in_executor(None, _advance, steps, answer)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise


def _advance(steps: Steps, answer: Any) -> Request | None:
    try:
        return steps.send(answer)
    except StopIteration:
        return None


async def _awaited(comm: Comm, request: Request, timeout: float | None) -> Answer:
    if isinstance(request, AllReduce):
        return [await comm.all_reduce(request.tensor, timeout=timeout)]
    answer: Answer
    if isinstance(request, AllToAll):
        answer = await comm.all_to_all(list(request.rows), timeout=timeout)
    else:
        answer = await comm.all_gather(request.row, timeout=timeout)
    return answer


def _blocking(group: Any, request: Request) -> Answer:
    if isinstance(request, AllReduce):
        group.allreduce([request.tensor]).wait()
        return [request.tensor]
    if isinstance(request, AllToAll):
        rows = torch.empty_like(request.rows)
        group.alltoall_base(rows.view(-1), request.rows.view(-1), [], []).wait()
        return list(rows)
    row = request.row
    whole = torch.empty(group.size() * row.numel(), dtype=row.dtype, device=row.device)
    group._allgather_base(whole, row).wait()
    return list(whole.view(group.size(), -1))


def ddp_hook(comm: Comm, compress: Compression) -> Hook:
    """A communication hook for `DistributedDataParallel`: ``ddp.register_comm_hook(None, ddp_hook(comm, BF16()))``.

    The model is made with ``process_group=comm.process_group``. Both belong to one epoch: make them again after the next ``ready()``. A
    lost member raises in ``backward()``. Like all of DDP it is for a `def` endpoint or a thread. For tensors in host memory.

    Raises `UsageError` while the group is not formed.
    """
    group: Any = comm.process_group
    place = Place(comm._compressed.group.name, comm.epoch, comm.size)
    thread = ThreadPoolExecutor(1, "monarch_async compressing")  # ends with the hook

    def reduce(tensors: list[torch.Tensor], keys: list[int], buffer: torch.Tensor, done: torch.futures.Future[torch.Tensor]) -> None:
        try:
            steps = compress.run(tensors, keys, place, mean=True)
            request = _advance(steps, None)
            while request is not None:
                request = _advance(steps, _blocking(group, request))
            done.set_result(buffer)
        except Exception as error:  # whatever gloo has run into: backward() raises it
            failed: Any = done
            failed.set_exception(error)

    def hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        compress.check(buffer, "mean", "bucket")
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        # Buckets are made anew after the first pass: it is the parameter that names a gradient.
        tensors = bucket.gradients() if compress.one_by_one else [buffer]
        keys = [id(parameter) for parameter in bucket.parameters()] if compress.one_by_one else [0]
        reduced = thread.submit(reduce, tensors, keys, buffer, done)
        if bucket.is_last():
            reduced.result()
        return done

    # As DDP wants to see them, and not as text.
    hook.__annotations__ = {"bucket": GradBucket, "return": torch.futures.Future[torch.Tensor]}
    return hook
