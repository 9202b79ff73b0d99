"""What moves the tensors of one epoch of a group: the `Backend` protocol, and the one over gloo.

Rules:

* A backend is connected once, in a thread, and belongs to one epoch. After `abort` nothing it was asked for goes on, and all of that ends,
  with an error where it had not been done; after `close` no thread of it is left.
* An operation is started in the caller's thread, which must not wait, in the same order on all members; `Running` tells its end from any
  thread.
* What it is given is dense, contiguous and of a dtype that it `moves` or `reduces`; sizes fit. That is seen to above it.
* Nothing here checks that members agree, unless a backend says so: gloo ends the process where they do not.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from monarch_async.tensor.breaking import UnderWay, keep_for_ever
from monarch_async.tensor.running import Running, Told
from monarch_async.tensor.sockets import Connections, Endpoint, listening_sockets

__all__ = ["Backend", "GlooBackend", "Running", "ScatteringBackend", "Together", "TorchBackend"]

FOREVER = timedelta(days=1)
"""Limits of gloo's own are not used: what waits too long is ended from above."""


class Backend(Protocol):
    """See the module's text. Members are numbered by their index in the group."""

    name: ClassVar[str]
    torch_name: ClassVar[str]
    """Of the backend that its `process_group` has."""
    device_type: ClassVar[str]
    agrees: ClassVar[bool]
    """It finds out by itself whether members have begun the same, before it moves anything: the same to move, and the same `tag`, which is
    then set before each operation."""
    tag: int
    averages: ClassVar[bool]
    """It has means itself; else they are sums that are divided."""
    scatters: ClassVar[bool]
    """It is a `ScatteringBackend`."""
    process_group: dist.ProcessGroup

    def connect(self, store: Store, me: int, size: int, timeout: float) -> None:
        """Meet the other members. Blocks; raises what went wrong."""

    @staticmethod
    def moves(dtype: torch.dtype) -> bool: ...
    @staticmethod
    def reduces(dtype: torch.dtype) -> bool: ...
    def all_reduce(self, tensor: torch.Tensor, op: Any) -> Running: ...
    def reduce(self, tensor: torch.Tensor, to: int, op: Any) -> Running: ...
    def broadcast(self, tensor: torch.Tensor, source: int) -> Running: ...
    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> Running:
        """Flat: `out` has the members' parts one after the other."""

    def all_to_all(self, out: torch.Tensor, tensor: torch.Tensor, out_sizes: Sequence[int], sizes: Sequence[int]) -> Running:
        """Flat: so many elements for, and from, each member."""

    def send(self, tensor: torch.Tensor, to: int) -> Running: ...
    def recv(self, tensor: torch.Tensor, source: int) -> Running: ...

    def abort(self) -> None:
        """End what is under way. Returns at once; from any thread; also while `connect` runs."""

    def close(self) -> None:
        """Let go of everything. Blocks for a moment; called when nothing is under way any more."""


class ScatteringBackend(Backend, Protocol):
    """One that divides a reduction among the members as one operation."""

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, op: Any) -> Running:
        """Flat: `tensor` has a part of one size for each member; `out` gets this one's, reduced."""


class WorkRunning:
    """A `torch.distributed.Work`, by its future."""

    __slots__ = ("_work",)

    def __init__(self, work: Any) -> None:
        self._work = work

    def when_done(self, told: Told) -> None:
        def ended(future: Any) -> None:
            try:
                future.value()  # it is done
            except Exception as error:  # whatever torch has made of it
                told(error)
            else:
                told(None)

        self._work.get_future().add_done_callback(ended)


class Together:
    """Several operations as one."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[Running]) -> None:
        self._parts = parts

    def when_done(self, told: Told) -> None:
        lock, left = threading.Lock(), len(self._parts)
        first: list[BaseException | None] = [None]

        def ended(error: BaseException | None) -> None:
            nonlocal left
            with lock:
                left -= 1
                first[0] = first[0] or error
                over = not left
            if over:
                told(first[0])

        if not self._parts:
            told(None)
        for part in self._parts:
            part.when_done(ended)


class _Waited:
    """A work that has no future: a thread waits for it."""

    __slots__ = ("_threads", "_work")

    def __init__(self, work: Any, threads: ThreadPoolExecutor) -> None:
        self._work = work
        self._threads = threads

    def when_done(self, told: Told) -> None:
        def wait() -> None:
            try:
                self._work.wait()
            except Exception as error:  # whatever gloo has run into
                told(error)
            else:
                told(None)

        self._threads.submit(wait)


class _Devices:
    """Gloo devices of this process: each is a listening socket and a thread.

    Ending one holds the interpreter's lock for a tenth of a second, so that they are kept, and used again by the next epoch or group.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[str, list[tuple[Any, Endpoint]]] = {}
        self._unknown: list[Any] = []

    def take(self, host: str) -> tuple[Any, Endpoint]:
        with self._lock:
            free = self._free.get(host)
            if free:
                return free.pop()
            while True:
                before = listening_sockets()
                device = ProcessGroupGloo.create_device(hostname=host)
                new = listening_sockets() - before
                if len(new) == 1:
                    return device, new.pop()
                self._unknown.append(device)  # another thread began to listen just then, so which of them is it?

    def give_back(self, host: str, device: tuple[Any, Endpoint]) -> None:
        with self._lock:
            self._free.setdefault(host, []).append(device)


_devices = _Devices()


class TorchBackend:
    """What those over a process group of torch's have in common: how it is asked."""

    agrees: ClassVar[bool] = False
    averages: ClassVar[bool] = False
    scatters: ClassVar[bool] = False
    tag = 0
    process_group: dist.ProcessGroup

    def __init__(self, group: Any = None, follow: Callable[[Running], Running] = lambda running: running) -> None:
        self._torch = group  # torch's backend, once it is connected
        self._follow = follow  # what is done with each work that is begun

    def _make_group(self, store: Store, me: int, size: int, device: str, kind: Any) -> None:
        """Make `process_group` of it."""
        group = dist.ProcessGroup(store, me, size)
        group._set_default_backend(kind)
        group._register_backend(torch.device(device), kind, self._torch)
        self.process_group = group

    def _running(self, work: Any) -> Running:
        return self._follow(WorkRunning(work))

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> Running:
        options = dist.AllreduceOptions()
        options.reduceOp = op
        return self._running(self._torch.allreduce([tensor], options))

    def reduce(self, tensor: torch.Tensor, to: int, op: Any) -> Running:
        options = dist.ReduceOptions()
        options.reduceOp, options.rootRank = op, to
        return self._running(self._torch.reduce([tensor], options))

    def broadcast(self, tensor: torch.Tensor, source: int) -> Running:
        options = dist.BroadcastOptions()
        options.rootRank = source
        return self._running(self._torch.broadcast([tensor], options))

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> Running:
        return self._running(self._torch._allgather_base(out, tensor))

    def all_to_all(self, out: torch.Tensor, tensor: torch.Tensor, out_sizes: Sequence[int], sizes: Sequence[int]) -> Running:
        return self._running(self._torch.alltoall_base(out, tensor, list(out_sizes), list(sizes)))

    def send(self, tensor: torch.Tensor, to: int) -> Running:
        return self._running(self._torch.send([tensor], to, 0))

    def recv(self, tensor: torch.Tensor, source: int) -> Running:
        return self._running(self._torch.recv([tensor], source, 0))


class GlooBackend(TorchBackend):
    """Over TCP, for tensors in host memory. `host` is the address of this one that the other members reach."""

    name: ClassVar[str] = "gloo"
    torch_name: ClassVar[str] = "gloo"
    device_type: ClassVar[str] = "cpu"

    def __init__(self, host: str) -> None:
        self._under_way = UnderWay()
        super().__init__(follow=self._under_way.follow)
        self._host = host
        self._device, self._mine = _devices.take(host)
        self._taken = time.monotonic_ns()  # of this host's clock, which all have to whom this address may ever belong
        self._connections = Connections(self._mine)
        self._threads: ThreadPoolExecutor | None = None

    def connect(self, store: Store, me: int, size: int, timeout: float) -> None:
        store.set(f"device {me}", f"{self._mine[0]} {self._mine[1]} {self._taken}")
        for index in set(range(size)) - {me}:
            host, port, taken = store.get(f"device {index}").decode().split()
            self._connections.may_lead_to((host, int(port)), int(taken))
        prefixed = PrefixStore("gloo", store)
        self._torch = self._meet(prefixed, me, size, timeout)
        self._make_group(prefixed, me, size, "cpu", dist.ProcessGroup.BackendType.GLOO)

    def _meet(self, store: Store, me: int, size: int, timeout: float) -> Any:
        """A group of gloo's over the device of this one."""
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._devices = [self._device]
        options._timeout = timedelta(seconds=timeout)
        options._threads = 2
        group = gloo(store, me, size, options)
        group._set_default_timeout(FOREVER)
        group._set_sequence_number_for_group()
        return group

    @staticmethod
    def moves(dtype: torch.dtype) -> bool:
        return dtype in _MOVED

    @staticmethod
    def reduces(dtype: torch.dtype) -> bool:
        return dtype in _REDUCED

    def send(self, tensor: torch.Tensor, to: int) -> Running:
        return self._follow(_Waited(self._torch.send([tensor], to, 0), self._waiting()))

    def recv(self, tensor: torch.Tensor, source: int) -> Running:
        return self._follow(_Waited(self._torch.recv([tensor], source, 0), self._waiting()))

    def _waiting(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(8, "monarch_async point to point")
        return self._threads

    def abort(self) -> None:
        self._connections.break_off()
        self._under_way.broken()

    def close(self) -> None:
        hung = self._under_way.hung
        if self._threads is not None:
            self._threads.shutdown(wait=not hung)
        self.abort()  # else a pair whose other end lives on would keep its socket
        self._let_go(self._torch)
        self._torch = None
        with contextlib.suppress(AttributeError):  # it was never connected
            del self.process_group
        self._connections.let_go()
        if not hung:
            _devices.give_back(self._host, (self._device, self._mine))

    def _let_go(self, group: Any) -> None:
        """Called for each group of gloo's before the last reference to it goes."""
        if group is not None and self._under_way.hung:
            keep_for_ever(group)


_REDUCED = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64}
_MOVED = {*_REDUCED, torch.bool}
