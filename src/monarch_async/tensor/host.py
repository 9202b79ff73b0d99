"""The backend for members that are all on one host: shared memory moves the tensors, and gloo stands by for what torch does itself.

`process_group` is gloo's, since DDP, DTensor and others want one of torch's own; what the communicator is asked for goes through shared
memory. Both are connected for an epoch, and end with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch._C._distributed_c10d import Store

from monarch_async.ids import ProcAddress
from monarch_async.peering import Peering
from monarch_async.tensor.backend import GlooBackend, Running
from monarch_async.tensor.shm.arithmetic import MOVED, REDUCED
from monarch_async.tensor.shm.backend import ShmBackend

__all__ = ["HostBackend"]


class HostBackend(GlooBackend):
    """`addresses` are the members' processes, in their order; `host` is the address on which gloo listens."""

    name: ClassVar[str] = "shm"
    agrees: ClassVar[bool] = True
    averages: ClassVar[bool] = True

    def __init__(self, host: str, peering: Peering, addresses: Sequence[ProcAddress]) -> None:
        super().__init__(host)
        self._shm = ShmBackend(peering, addresses)

    def connect(self, store: Store, me: int, size: int, timeout: float) -> None:
        self._shm.connect(store, me, size, timeout)
        super().connect(store, me, size, timeout)

    @staticmethod
    def moves(dtype: torch.dtype) -> bool:
        return dtype in MOVED

    @staticmethod
    def reduces(dtype: torch.dtype) -> bool:
        return dtype in REDUCED

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> Running:
        return self._shm.all_reduce(tensor, op, tag=self.tag)

    def reduce(self, tensor: torch.Tensor, to: int, op: Any) -> Running:
        return self._shm.reduce(tensor, to, op, tag=self.tag)

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, op: Any) -> Running:
        """Flat: `tensor` has a part of one size for each member; `out` gets this one's, reduced."""
        return self._shm.reduce_scatter(out, tensor, op, tag=self.tag)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Running:
        return self._shm.broadcast(tensor, source, tag=self.tag)

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> Running:
        return self._shm.all_gather(out, tensor, tag=self.tag)

    def all_to_all(self, out: torch.Tensor, tensor: torch.Tensor, out_sizes: Sequence[int], sizes: Sequence[int]) -> Running:
        return self._shm.all_to_all(out, tensor, out_sizes, sizes, tag=self.tag)

    def send(self, tensor: torch.Tensor, to: int) -> Running:
        return self._shm.send(tensor, to)

    def recv(self, tensor: torch.Tensor, source: int) -> Running:
        return self._shm.recv(tensor, source)

    def abort(self) -> None:
        self._shm.abort()
        super().abort()

    def close(self) -> None:
        self._shm.close()
        super().close()
