"""Actors with a process group, for tests of DTensors. Apart from the others because of what it takes to import it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from monarch_async import Actor, context, endpoint
from monarch_async.tensor import StateDict
from tests.tensor.publishers import global_tensor

__all__ = ["Meshed"]


class Meshed(Actor):
    """A rank with a device mesh."""

    @endpoint
    def join(self, path: str) -> None:
        """Make the process group, which DTensors need."""
        point = context().actor_instance.rank
        rank, ranks = point.rank, point.extent.nelements
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=ranks)
        self.mesh = init_device_mesh("cpu", (ranks,))

    @endpoint
    def publish_dtensor(self, rows: int, columns: int) -> StateDict:
        state = {
            "w": distribute_tensor(global_tensor(rows, columns), self.mesh, [Shard(0)]),
            "r": distribute_tensor(global_tensor(3, 3), self.mesh, [Replicate()]),
        }
        return StateDict.publish(state, name="dtensors").get()

    @endpoint
    def pull_dtensor(self, handle: StateDict, rows: int, columns: int) -> tuple[bool, bool]:
        """Into other shards than were published; whether what came is right."""
        w = distribute_tensor(torch.zeros(rows, columns), self.mesh, [Shard(1)])
        r = distribute_tensor(torch.zeros(3, 3), self.mesh, [Shard(0)])
        handle.pull_into({"w": w, "r": r}).get()
        return torch.equal(w.full_tensor(), global_tensor(rows, columns)), torch.equal(r.full_tensor(), global_tensor(3, 3))

    @endpoint
    def leave(self) -> None:
        dist.destroy_process_group()

    @endpoint
    def refused(self) -> list[str]:
        """What is said of placements that have no slice here."""
        errors = []
        for placement in (Partial(), _StridedShard(0, split_factor=2)):
            tensor = DTensor.from_local(torch.zeros(4, 4), self.mesh, [placement], run_check=False)
            try:
                StateDict.publish({"w": tensor})
            except ValueError as error:
                errors.append(str(error))
        return errors
