"""What the tests with a device have in common. `pytest -m cuda` runs them, within five minutes on one device."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from monarch_async import MeshFailure
from monarch_async._channel.parcels import pool
from monarch_async.testing.leaks import LeakCheck
from monarch_async.testing.plugin import MonarchProcs
from tests.cuda.actors import OnGpu, count_fetches, fetches


@pytest.fixture(scope="session", autouse=True)
def device_in_use() -> Iterator[None]:
    """What CUDA opens with the first use of each kind is there before a test looks at what it leaves behind."""
    if torch.cuda.is_available():
        torch.empty(1 << 20, pin_memory=True).copy_(torch.ones(1 << 20, device="cuda"))
        torch.cuda.synchronize()
        count_fetches()
    yield
    fetches.clear()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No thread, process or segment of ours more than before. What the driver opens to share memory it keeps, descriptors among it."""
    check = LeakCheck(kinds=("thread", "process", "segment"), ignore=(r"nvidia", r"/cuda\.shm"))
    yield
    check.assert_none()


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[MeshFailure]:
    """What reaches the program's own hook, which then does nothing else."""
    told: list[MeshFailure] = []
    monkeypatch.setattr("monarch_async.unhandled_fault_hook", told.append)
    return told


@pytest.fixture
def gpu_actors(monarch_procs: MonarchProcs) -> Callable[..., Any]:
    """``await gpu_actors(2)``: so many actors, each in a process of its own, that use the device and can be lent memory of it."""

    async def start(count: int = 1, *, ready: bool = True, **options: Any) -> Any:
        actors = monarch_procs(count, preload=("torch",), **options).spawn("actors", OnGpu)
        await actors.use.call()
        if ready:
            tensor = torch.ones(100_000, device="cuda")
            async with asyncio.timeout(20):
                while True:  # until both ways are by the device
                    before = len(fetches)
                    await actors.echo.call(tensor)
                    if len(fetches) - before >= count <= len(pool._takers.get(0, ())):
                        break
            del tensor
        return actors

    return start
