"""The backend over NCCL, for tensors on CUDA devices.

Theory: an operation is queued on NCCL's own stream, which waits for the stream that is current where it is started. A thread then has a
side stream wait for it, records an event there and waits for that, without the interpreter's lock; so the loop is told when the result
is there, and not only when it is queued.

Rules:

* An operation belongs to the stream that is current where it is called (`in_current_stream`), and a backend to the device that is current
  in the loop's thread (`device_of`).
* NCCL's watchdog must not end the process: its handling of errors is switched off, and what is stuck or broken is aborted from above.
* The store of the rendezvous is one of torch's own, hosted by the first member on a port that the system chooses: NCCL's threads ask it at
  times of their own, and must not need the interpreter for that.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from monarch_async.tensor.backend import FOREVER, Backend, TorchBackend
from monarch_async.tensor.operation import Operation
from monarch_async.tensor.running import Running, Told
from monarch_async.tensor.signature import Signature

__all__ = ["NcclBackend", "device_of", "in_current_stream"]

PATIENCE = 10.0
"""Seconds for which the loop may take to say which device is current."""

Stream: Any = torch.cuda.Stream
Event: Any = torch.cuda.Event

_MOVED = {
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
}


class _OnDevice:
    """A work on NCCL's stream."""

    __slots__ = ("_device", "_threads", "_work")

    def __init__(self, work: Any, device: torch.device, threads: ThreadPoolExecutor) -> None:
        self._work = work
        self._device = device
        self._threads = threads

    def when_done(self, told: Told) -> None:
        def wait() -> None:
            try:
                with torch.cuda.device(self._device), torch.cuda.stream(Stream(self._device)):
                    self._work.wait()  # the stream waits, not the thread
                    event = Event()
                    event.record()
                event.synchronize()
                error = self._work.exception() if hasattr(self._work, "exception") else None
                if error is not None:
                    raise RuntimeError(str(error))
            except Exception as trouble:  # whatever NCCL has run into
                told(trouble)
            else:
                told(None)

        self._threads.submit(wait)


def device_of(loop: asyncio.AbstractEventLoop) -> torch.device:
    """The device that is current in a loop's thread, where actors choose it: each thread has its own. For other threads, which wait."""

    async def current() -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    return asyncio.run_coroutine_threadsafe(current(), loop).result(PATIENCE)


def in_current_stream(operation: Operation) -> None:
    """Whatever an operation does on the device it does in the stream that is current now, where it is called, and not in the one that is
    current where it happens to begin or end."""
    stream: Any = torch.cuda.current_stream()
    launch, prepare, finish = operation.launch, operation.prepare, operation.finish
    moved = False

    def begin(backend: Backend, views: Sequence[Signature]) -> Running | None:
        nonlocal moved
        assert launch is not None
        with torch.cuda.stream(stream):
            running = launch(backend, views)
        moved = running is not None
        return running

    def make(backend: Backend) -> None:
        assert prepare is not None
        with torch.cuda.stream(stream):
            prepare(backend)

    def end() -> Any:
        assert finish is not None
        with torch.cuda.stream(stream):
            value = finish()
            if moved:  # else this is the loop's thread, and nothing was done
                event = Event()
                event.record()
                event.synchronize()
        return value

    operation.launch = begin if launch is not None else None
    operation.prepare = make if prepare is not None else None
    operation.finish = end if finish is not None else None


class NcclBackend(TorchBackend):
    """Over NCCL, on this device, or the one that is current here."""

    name: ClassVar[str] = "nccl"
    torch_name: ClassVar[str] = "nccl"
    device_type: ClassVar[str] = "cuda"

    def __init__(self, host: str, device: torch.device | None = None) -> None:
        super().__init__()
        self._host = host
        self._device = device or torch.device("cuda", torch.cuda.current_device())
        self._threads = ThreadPoolExecutor(4, "monarch_async nccl")
        self._store: TCPStore | None = None
        self._aborted = threading.Event()

    def connect(self, store: Store, me: int, size: int, timeout: float) -> None:
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
        limit = timedelta(seconds=timeout)
        if me == 0:
            self._store = TCPStore(self._host, 0, None, True, limit, wait_for_workers=False)
            store.set("nccl store", f"{self._host} {self._store.port}")
        else:
            host, port = store.get("nccl store").decode().split()
            self._store = TCPStore(host, int(port), None, False, limit, wait_for_workers=False)
        torch.cuda.set_device(self._device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = FOREVER
        prefixed = PrefixStore("nccl", self._store)
        self._torch = dist.ProcessGroupNCCL(prefixed, me, size, options)
        self._torch._set_sequence_number_for_group()
        self._torch.eager_connect_single_device(self._device)  # else the first operation would wait for it, in the loop's thread
        self._make_group(prefixed, me, size, "cuda", dist.ProcessGroup.BackendType.NCCL)

    @staticmethod
    def moves(dtype: torch.dtype) -> bool:
        return dtype in _MOVED

    @staticmethod
    def reduces(dtype: torch.dtype) -> bool:
        return dtype in _MOVED and dtype is not torch.bool

    def _running(self, work: Any) -> Running:
        return _OnDevice(work, self._device, self._threads)

    def abort(self) -> None:
        if self._torch is not None and not self._aborted.is_set():
            self._aborted.set()
            # In a thread: it waits for kernels that are under way.
            threading.Thread(target=self._torch.abort, name="monarch_async aborting nccl", daemon=True).start()

    def close(self) -> None:
        self._threads.shutdown()
        if self._torch is not None and not self._aborted.is_set():
            self._aborted.set()
            self._torch.abort()
        self._torch = self._store = None
        self.__dict__.pop("process_group", None)
