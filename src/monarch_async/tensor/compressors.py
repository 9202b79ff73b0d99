"""What may be done to gradients so that fewer bytes move: BF16, FP16, FP8, PowerSGD, and the class to write others from.

Rules:

* A compression does not communicate. It is a generator that asks for one exchange after another and is sent the outcome, so that the same
  one runs awaited between actors and in the backward pass of DDP.
* All members take the same steps, with equal shapes: what it does depends on shapes, keys and how often it was asked, never on values.
* The result is the same at all members, bit for bit, wherever their backend's sums are and their processors calculate alike.
* What is kept from one time to the next belongs to a group and an epoch of it. A member that was started again has nothing, so with a new
  epoch all begin anew.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Hashable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from monarch_async.errors import UsageError
from monarch_async.tensor.eightbit import dequantise, parts_of, quantise
from monarch_async.tensor.lowrank import as_matrix, first_q, is_smaller, orthonormal, residual

__all__ = [
    "BF16",
    "FP8",
    "FP16",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Answer",
    "Compression",
    "Place",
    "PowerSGD",
    "Request",
    "Steps",
    "Traffic",
]


class AllReduce(NamedTuple):
    """The sum of all members, in place; answered with it."""

    tensor: torch.Tensor


class AllToAll(NamedTuple):
    """Row i to member i; answered with the rows that came, by sender."""

    rows: torch.Tensor


class AllGather(NamedTuple):
    """Answered with the rows of all members."""

    row: torch.Tensor


Request = AllReduce | AllToAll | AllGather
Answer = Sequence[torch.Tensor]
Steps = Generator[Request, Answer, None]


class Place(NamedTuple):
    """Where it is done: the group, its present epoch, and how many members it has."""

    group: str
    epoch: int
    members: int


class Traffic:
    """Bytes that this member has sent: `moved`, and `plain`, what they would be without compression.

    Calculated for ring algorithms: a sum of B bytes between n members costs each of them 2 B (n - 1) / n.
    """

    __slots__ = ("moved", "plain")

    def __init__(self) -> None:
        self.moved = 0
        self.plain = 0

    def __repr__(self) -> str:
        share = f", {self.moved / self.plain:.1%}" if self.plain else ""
        return f"Traffic(moved={self.moved:,}, plain={self.plain:,} bytes{share})"


def bytes_sent(request: Request, members: int) -> int:
    tensor = request[0]
    size = tensor.numel() * tensor.itemsize
    match request:
        case AllReduce():
            return 2 * size * (members - 1) // members
        case AllToAll():
            return size * (members - 1) // members
        case AllGather():
            return size * (members - 1)


class Compression(ABC):
    """A way to all_reduce; subclasses write `steps`. One object may serve any number of tensors, of one group."""

    one_by_one: ClassVar[bool] = False
    """Whether it has to see tensors apart, with a key for each, and not as one flat tensor."""

    def __init__(self) -> None:
        self.traffic = Traffic()

    def check(self, tensor: Any, op: str, key: Hashable) -> None:
        """Raises `TypeError` or `UsageError` for what can't be compressed."""
        if op not in ("sum", "mean"):
            raise UsageError(f"{type(self).__name__} is for sums and means, and not for {op!r}")
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            raise TypeError(f"{type(self).__name__} compresses real numbers, not {getattr(tensor, 'dtype', tensor)}")
        if self.one_by_one and key is None:
            raise UsageError(f"{type(self).__name__} keeps what belongs to a tensor from one time to the next: name it, key='…'")

    @abstractmethod
    def steps(self, tensors: Sequence[torch.Tensor], keys: Sequence[Hashable], place: Place, mean: bool) -> Steps:
        """Put the sum or mean of all members into each of these tensors."""

    def run(self, tensors: Sequence[torch.Tensor], keys: Sequence[Hashable], place: Place, mean: bool) -> Steps:
        """`steps`, counted."""
        members = place.members
        self.traffic.plain += sum(bytes_sent(AllReduce(tensor), members) for tensor in tensors)
        steps = self.steps(tensors, keys, place, mean)
        answer: Any = None
        while True:
            try:
                request = steps.send(answer)
            except StopIteration:
                return
            self.traffic.moved += bytes_sent(request, members)
            answer = yield request


class _Half(Compression):
    """Numbers of 16 bits on the way. Those that have no more are left as they are."""

    dtype: ClassVar[torch.dtype]

    def steps(self, tensors: Sequence[torch.Tensor], keys: Sequence[Hashable], place: Place, mean: bool) -> Steps:
        for tensor in tensors:
            given = tensor.detach()
            if given.itemsize <= 2:
                yield AllReduce(given)
                if mean:
                    given.div_(place.members)
            else:
                # Divided first: sums would leave float16's range sooner.
                half = (given / place.members if mean else given).to(self.dtype).contiguous()
                yield AllReduce(half)
                given.copy_(half)


class BF16(_Half):
    """Half the bytes of float32: bfloat16, which has float32's range and 8 significant bits.

    With n members an element is off by at most (n + 1) · 2⁻⁸ of the sum of their magnitudes.
    """

    dtype = torch.bfloat16


class FP16(_Half):
    """Half the bytes of float32: float16, with 11 significant bits. Beyond ±65504 it is inf: for means of moderate values.

    With n members an element is off by at most (n + 1) · 2⁻¹¹ of the sum of their magnitudes and n · 2⁻²⁴ more.
    """

    dtype = torch.float16


class FP8(Compression):
    """About a quarter of the bytes of float32: e4m3 with a scale for each `chunk` elements; summed in float32.

    Every member quantises its tensor and sends each other one its part; that one sums, quantises the sum, and sends it to all. With A
    the sum of all members' magnitudes of an element, and B the sum of the largest magnitudes in its chunk, that element is off by at
    most A / 7 + B · 2⁻¹⁷. A chunk that holds inf or NaN at a member becomes NaN.

    Tensors of fewer than `smallest` elements are left as they are: there is little to gain.
    """

    def __init__(self, chunk: int = 1024, smallest: int = 1024) -> None:
        super().__init__()
        if chunk < 1 or smallest < 0:
            raise UsageError(f"chunk={chunk} has to be at least 1, and smallest={smallest} at least 0")
        self.chunk = chunk
        self.smallest = smallest

    def steps(self, tensors: Sequence[torch.Tensor], keys: Sequence[Hashable], place: Place, mean: bool) -> Steps:
        for tensor in tensors:
            given = tensor.detach()
            count = given.numel()
            if count < self.smallest or given.itemsize == 1:
                yield AllReduce(given)
                if mean:
                    given.div_(place.members)
                continue
            members, chunks, chunk = parts = parts_of(count, place.members, self.chunk)
            values = torch.zeros(parts.elements, dtype=torch.float32, device=given.device)
            values[:count].copy_(given.reshape(-1))
            came = yield AllToAll(quantise(values.view(members, chunks, chunk)))
            total = dequantise(came[0], chunks, chunk)
            for row in came[1:]:
                total += dequantise(row, chunks, chunk)
            if mean:
                total /= members
            whole = yield AllGather(quantise(total))
            torch.stack([dequantise(row, chunks, chunk) for row in whole], out=values.view(members, chunks, chunk))
            given.copy_(values[:count].view(given.shape))


class _Memory:
    """What PowerSGD keeps of one tensor. `error` and `q` are for the shape `shape`."""

    __slots__ = ("error", "q", "shape", "times")

    def __init__(self, shape: torch.Size) -> None:
        self.shape = shape
        self.times = 0
        self.q: torch.Tensor | None = None
        self.error: torch.Tensor | None = None


class PowerSGD(Compression):
    """Matrices by two thin ones of `rank` columns: (rows + columns) · rank numbers in place of rows · columns. See `lowrank`.

    Tensors with one dimension, and those that would not become smaller, go as they are; so do all for the first `start_after` times, in
    which gradients change much. With `error_feedback` what was lost is added the next time, which it takes to converge as without
    compression. For gradients: it is the trainer who has the patience for an answer that is right on average over time.

    State is kept by key, so tensors have to be named; a new epoch of the group forgets it.
    """

    one_by_one = True

    def __init__(self, rank: int = 2, *, start_after: int = 10, error_feedback: bool = True) -> None:
        super().__init__()
        if rank < 1 or start_after < 0:
            raise UsageError(f"rank={rank} has to be at least 1, and start_after={start_after} at least 0")
        self.rank = rank
        self.start_after = start_after
        self.error_feedback = error_feedback
        self._memories: dict[Hashable, _Memory] = {}
        self._place: Place | None = None

    def steps(self, tensors: Sequence[torch.Tensor], keys: Sequence[Hashable], place: Place, mean: bool) -> Steps:
        if self._place != place:
            if self._place is not None and self._place.group != place.group:
                raise UsageError(f"this PowerSGD is for {self._place.group}: make another one for {place.group}")
            self._memories.clear()
            self._place = place
        plain, low = [], []
        for tensor, key in zip(tensors, keys, strict=True):
            memory = self._memory(key, tensor)
            if memory.times > self.start_after and is_smaller(tensor.shape, self.rank):
                low.append((tensor.detach(), memory))
            else:
                plain.append(tensor.detach())
        for together in _by_dtype(plain):
            flat = torch.cat([tensor.reshape(-1) for tensor in together])
            yield AllReduce(flat)
            _put_back(flat.div_(place.members) if mean else flat, together)
        if low:
            yield from self._low_rank(low, place.members, mean)

    def _memory(self, key: Hashable, tensor: torch.Tensor) -> _Memory:
        memory = self._memories.get(key)
        if memory is None or memory.shape != tensor.shape:
            memory = self._memories[key] = _Memory(tensor.shape)
        memory.times += 1
        return memory

    def _low_rank(self, low: Sequence[tuple[torch.Tensor, _Memory]], members: int, mean: bool) -> Steps:
        wide = torch.float64 if any(tensor.dtype == torch.float64 for tensor, _ in low) else torch.float32
        matrices, qs = [], []
        for tensor, memory in low:
            matrix = as_matrix(tensor, wide)
            if memory.error is not None:
                matrix += memory.error
            matrices.append(matrix)
            qs.append(memory.q if memory.q is not None else first_q(matrix.shape[1], self.rank, matrix))
        ps = yield from _means([matrix @ q for matrix, q in zip(matrices, qs, strict=True)], members)
        ps = [orthonormal(p) for p in ps]
        own = [matrix.T @ p for matrix, p in zip(matrices, ps, strict=True)]
        qs = yield from _means(own, members)
        for (tensor, memory), matrix, p, q, mine in zip(low, matrices, ps, qs, own, strict=True):
            result = p @ q.T
            # The same at all members, so all forget together. Else one inf would spoil every later step.
            good = bool(torch.isfinite(result).all())
            memory.q = q if good else None
            memory.error = residual(matrix, p, mine) if good and self.error_feedback else None
            tensor.copy_((result if mean else result * members).view(tensor.shape))


def _by_dtype(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


def _put_back(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))


def _means(tensors: Sequence[torch.Tensor], members: int) -> Generator[Request, Answer, list[torch.Tensor]]:
    """The members' means of several tensors, moved as one."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    yield AllReduce(flat)
    flat.div_(members)
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
