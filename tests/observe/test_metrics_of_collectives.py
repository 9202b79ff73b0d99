"""Metrics of collective operations."""

from __future__ import annotations

from typing import Any

import torch

from monarch_async import endpoint, this_host
from monarch_async.observe.metrics.serving import serve_metrics
from monarch_async.tensor import TensorActor
from tests.observe.meters import scrape_all, values
from tests.observe.working import settled


class Summing(TensorActor):
    @endpoint
    async def add(self) -> float:
        value = torch.ones(4)
        await self.comm.all_reduce(value)
        return float(value[0])


async def test_collectives_have_durations() -> None:
    """At each of their ranks, by kind of operation."""
    procs = this_host().spawn_procs({"gpus": 2}, name="procs", preload=("torch", "torch.distributed"))
    summing: Any = procs.spawn("summing", Summing)
    await summing
    await settled(procs)
    async with serve_metrics() as served:
        await scrape_all(served)
        assert {2.0} == set((await summing.add.call()).values())
        text = await scrape_all(served)
    assert {("all_reduce", "ok"): 2} == values(text, "collectives_total")
    assert {("all_reduce",): 2} == values(text, "collective_duration_seconds_count")
