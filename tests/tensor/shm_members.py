"""Members of groups over shared memory, and cases that each member can check on its own, since it knows what all others put in."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import os
import tempfile
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed import ReduceOp

from monarch_async import Actor, endpoint, shutdown_context, this_host
from monarch_async.ambient import current_runtime
from monarch_async.ids import ProcAddress
from monarch_async.peering import Peering
from monarch_async.tensor.shm.backend import ShmBackend
from monarch_async.tensor.shm.worker import Job

FLOATS = ("float32", "float64", "float16", "bfloat16")
INTEGERS = ("int8", "uint8", "int16", "int32", "int64")
TYPES = (*FLOATS, *INTEGERS)
OPS: dict[str, Any] = {
    "sum": ReduceOp.SUM,
    "mean": ReduceOp.AVG,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "product": ReduceOp.PRODUCT,
    "premul": dist._make_nccl_premul_sum(0.5),  # type: ignore[attr-defined]
}
FACTOR = 0.5
TIMEOUT = 60.0


class Case(NamedTuple):
    """One operation; `length` elements of each member, or for each where it is divided."""

    kind: str
    dtype: str
    length: int
    op: str = "sum"
    root: int = 0

    def fits(self) -> bool:
        """Whether there is such a thing."""
        if self.op in ("mean", "premul"):
            return self.dtype in FLOATS
        return True


def values_of(case: Case, member: int, count: int, run: int = 0) -> torch.Tensor:
    """What a member puts in."""
    dtype = getattr(torch, case.dtype)
    generator = torch.Generator().manual_seed(zlib.crc32(repr((run, member, count, case.op)).encode()))
    if dtype.is_floating_point and case.op != "product":
        return torch.randn(count, generator=generator, dtype=torch.float32).to(dtype)
    low, high = (0, 4) if case.dtype in ("uint8", "bool") else (-3, 4)
    return torch.randint(low, high, (count,), generator=generator).to(dtype)


def reduced(case: Case, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """The reference, in float64 or, for integers, in int64."""
    wide = torch.stack([values.to(torch.float64 if values.is_floating_point() else torch.int64) for values in inputs])
    if case.op == "sum":
        return wide.sum(0)
    if case.op == "mean":
        return wide.mean(0)
    if case.op == "premul":
        return wide.mul(FACTOR).sum(0)
    if case.op == "product":
        return wide.prod(0)
    return (wide.amin if case.op == "min" else wide.amax)(0)


def wrong(case: Case, expected: torch.Tensor, found: torch.Tensor, size: int) -> str:
    """What is wrong with a result; empty if nothing is."""
    dtype = getattr(torch, case.dtype)
    assert found.dtype == dtype
    if not dtype.is_floating_point:
        return "" if torch.equal(expected.to(dtype), found) else f"{case} differs"
    scale = 8.0 * size  # what the inputs may add up to
    off = (found.to(torch.float64) - expected).abs().max().item() if found.numel() else 0.0
    allowed = 2 * torch.finfo(dtype).eps * (scale if case.op != "product" else 3.0**size)
    return "" if off <= allowed else f"{case} is off by {off}, allowed are {allowed}"


def shares(size: int, count: int) -> list[list[int]]:
    """By member, how many elements it has for each: uneven, some none."""
    return [[(count * ((me * 7 + other * 3) % 4)) // 3 for other in range(size)] for me in range(size)]


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


async def ended(job: Job) -> None:
    """Wait for an operation; raises its error."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[BaseException | None] = loop.create_future()

    def told(error: BaseException | None) -> None:
        loop.call_soon_threadsafe(future.set_result, error)

    job.when_done(told)
    error = await future
    if error is not None:
        raise error


class Group(NamedTuple):
    """One that the process is a member of."""

    backend: ShmBackend
    me: int
    size: int


class Member(Actor):
    """A process that is a member of any number of groups, by name."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.groups: dict[str, Group] = {}
        self.jobs: list[tuple[Job, torch.Tensor]] = []

    @endpoint
    async def address(self) -> ProcAddress:
        return current_runtime().me

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def connect(self, name: str, addresses: list[ProcAddress], path: str, timeout: float = 30.0) -> None:
        me = addresses.index(current_runtime().me)
        backend = ShmBackend(Peering(current_runtime()), addresses)
        self.groups[name] = Group(backend, me, len(addresses))
        try:
            await asyncio.to_thread(backend.connect, FileStore(path, len(addresses)), me, len(addresses), timeout)
        except BaseException:
            del self.groups[name]
            raise

    @endpoint
    async def connect_and_abort(self, addresses: list[ProcAddress], path: str) -> str:
        """Wait for members that don't come, and be aborted; the error."""
        me = addresses.index(current_runtime().me)
        backend = ShmBackend(Peering(current_runtime()), addresses)
        store = FileStore(path, len(addresses))
        connecting = asyncio.create_task(asyncio.to_thread(backend.connect, store, me, len(addresses), TIMEOUT))
        await asyncio.to_thread(store.wait, ["shm"])  # until it has begun
        backend.abort()
        try:
            await connecting
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            await asyncio.to_thread(backend.close)
        return ""

    @endpoint
    async def close(self, name: str) -> None:
        group = self.groups.pop(name)
        group.backend.abort()
        await asyncio.to_thread(group.backend.close)

    @endpoint
    async def abort(self, name: str) -> None:
        self.groups[name].backend.abort()

    @endpoint
    async def check(self, name: str, cases: list[Case], run: int = 0) -> tuple[list[str], list[str]]:
        """Do them all; what is wrong, and a digest of each result."""
        bad, digests = [], []
        for case in cases:
            problem, result = await self._check(self.groups[name], case, run)
            if problem:
                bad.append(problem)
            digests.append(digest(result))
        return bad, digests

    @endpoint
    async def check_both(self, names: list[str], cases: list[Case]) -> list[str]:
        """The same at once in several groups."""
        found = await asyncio.gather(*(self._check(self.groups[name], case, 0) for case in cases for name in names))
        return [problem for problem, _ in found if problem]

    async def _check(self, group: Group, case: Case, run: int) -> tuple[str, torch.Tensor]:
        backend, me, size = group
        kind, op, count = case.kind, OPS[case.op], case.length
        each = [values_of(case, member, count, run) for member in range(size)]
        if kind in ("all_reduce", "reduce"):
            tensor = each[me].clone()
            await ended(backend.all_reduce(tensor, op) if kind == "all_reduce" else backend.reduce(tensor, case.root, op))
            if kind == "reduce" and me != case.root:
                return "" if torch.equal(each[me], tensor) else f"{case} wrote to a tensor that is not the root's", tensor[:0]
            return wrong(case, reduced(case, each), tensor, size), tensor
        if kind == "broadcast":
            tensor = each[me].clone()
            await ended(backend.broadcast(tensor, case.root))
            return "" if torch.equal(each[case.root], tensor) else f"{case} differs", tensor
        if kind == "all_gather":
            out = torch.zeros(count * size, dtype=each[0].dtype)
            await ended(backend.all_gather(out, each[me]))
            return "" if torch.equal(torch.cat(each), out) else f"{case} differs", out
        if kind == "reduce_scatter":
            whole = [values_of(case, member, count * size, run) for member in range(size)]
            out = torch.zeros(count, dtype=each[0].dtype)
            await ended(backend.reduce_scatter(out, whole[me], op))
            mine = [values[me * count : (me + 1) * count] for values in whole]
            return wrong(case, reduced(case, mine), out, size), out[:0]
        if kind == "all_to_all":
            table = shares(size, count)
            rows = [values_of(case, member, sum(table[member]), run) for member in range(size)]
            expected = torch.cat([torch.split(rows[member], table[member])[me] for member in range(size)])
            out = torch.zeros_like(expected)
            await ended(backend.all_to_all(out, rows[me], [table[member][me] for member in range(size)], table[me]))
            return "" if torch.equal(expected, out) else f"{case} differs", out[:0]
        assert kind == "ring"  # everybody sends to the next one
        out = torch.zeros_like(each[me])
        sent, got = backend.send(each[me], (me + 1) % size), backend.recv(out, (me - 1) % size)
        await ended(got)
        await ended(sent)
        return "" if torch.equal(each[me - 1], out) else f"{case} differs", out[:0]

    @endpoint
    async def cross(self, name: str, count: int) -> bool:
        """The first member sends, and then reduces; the second one reduces, and then receives. Whether both got what they should."""
        backend, me, _ = self.groups[name]
        whole, single = torch.ones(count), torch.full((count,), float(me))
        if me == 0:
            jobs = [backend.send(single, 1), backend.all_reduce(whole, ReduceOp.SUM)]
        else:
            jobs = [backend.all_reduce(whole, ReduceOp.SUM), backend.recv(single, 0)]
        for job in jobs:
            await ended(job)
        return bool((whole == 2).all()) and bool((single == 0).all())

    @endpoint
    async def start(self, name: str, count: int) -> None:
        """Start an all_reduce, and don't wait."""
        tensor = torch.ones(count)
        self.jobs.append((self.groups[name].backend.all_reduce(tensor, ReduceOp.SUM), tensor))

    @endpoint
    async def outcome(self) -> tuple[str, bool]:
        """The error that it ends with, and whether the tensor is as it was."""
        job, tensor = self.jobs.pop(0)
        try:
            await ended(job)
        except Exception as error:
            return f"{type(error).__name__}: {error}", bool((tensor == 1).all())
        return "", bool((tensor == 1).all())

    @endpoint
    async def differ(self, name: str, kind: str, *args: Any) -> str:
        """Call what the others don't; the error, if nothing was moved."""
        group = self.groups[name]
        tensor = torch.ones(args[0])
        out = torch.zeros(sum(args[1])) if kind == "all_to_all" else torch.zeros(args[0] * group.size)
        try:
            if kind == "all_reduce":
                await ended(group.backend.all_reduce(tensor, OPS[args[1]]))
            elif kind == "broadcast":
                await ended(group.backend.broadcast(tensor, args[1]))
            elif kind == "all_to_all":
                await ended(group.backend.all_to_all(out, tensor, args[1], args[2]))
            elif kind == "send":
                await ended(group.backend.send(tensor, args[1]))
            elif kind == "recv":
                await ended(group.backend.recv(tensor, args[1]))
            else:
                await ended(group.backend.all_gather(out, tensor))
        except Exception as error:
            moved = not bool((tensor == 1).all()) or bool(out.any())
            return f"{type(error).__name__}: {error}" + (" MOVED" if moved else "")
        return ""

    @endpoint
    async def open(self) -> tuple[int, int, int]:
        """Descriptors, threads of backends, and mappings of segments."""
        with open("/proc/self/maps") as maps:
            mapped = sum("memfd:monarch-async" in line for line in maps)
        threads = [thread for thread in threading.enumerate() if "shm" in thread.name]
        return len(os.listdir("/proc/self/fd")), len(threads), mapped


class Members:
    """Processes, for the tests of a module, which are synchronous: what they are about is in the processes."""

    def __init__(self, size: int, directory: Path) -> None:
        self.path = directory
        self._numbers = itertools.count()
        self.procs = this_host().spawn_procs({"ranks": size}, name="shm", preload=("torch",))
        self.mesh: Member = self.procs.spawn("member", Member)
        self.each = [self.mesh.slice(ranks=index) for index in range(size)]
        self.addresses = [member.address.call_one().get() for member in self.each]

    @contextlib.contextmanager
    def group(self, size: int) -> Iterator[str]:
        """A group of the first so many members, for a while."""
        name = f"group {next(self._numbers)}"
        self.connect(name, size)
        try:
            yield name
        finally:
            for answer in [member.close.call_one(name) for member in self.each[:size]]:
                answer.get(timeout=TIMEOUT)

    def connect(self, name: str, size: int) -> None:
        path = str(self.path / name)
        for answer in [member.connect.call_one(name, self.addresses[:size], path) for member in self.each[:size]]:
            answer.get(timeout=TIMEOUT)

    def check(self, name: str, size: int, cases: Sequence[Case], run: int = 0) -> list[list[str]]:
        """Nothing may be wrong anywhere; the digests, by member."""
        found = [member.check.call_one(name, list(cases), run) for member in self.each[:size]]
        results = [answer.get(timeout=TIMEOUT) for answer in found]
        assert [[] for _ in results] == [bad for bad, _ in results]
        return [digests for _, digests in results]


@contextlib.contextmanager
def members(size: int) -> Iterator[Members]:
    with tempfile.TemporaryDirectory() as directory:
        yield Members(size, Path(directory))
        shutdown_context().get()
