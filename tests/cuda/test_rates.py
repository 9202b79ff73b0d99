"""How fast tensors on a device come to another process, by each way. The figures are printed; the test is that lending is worth it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from monarch_async import configure
from monarch_async.options import Options

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(100)]
KIB, MIB = 1 << 10, 1 << 20
SIZES = {"64 KiB": 64 * KIB, "1 MiB": MIB, "16 MiB": 16 * MIB, "256 MiB": 256 * MIB, "1 GiB": 1024 * MIB}
SECONDS = 0.5
"""At each size."""


@pytest.fixture
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """For runtimes that are started from now on. Ask for it before any place."""
    configure(cuda_ipc=request.param)
    yield request.param
    configure(cuda_ipc=Options().cuda_ipc)


_found: dict[str, dict[str, float]] = {}


@pytest.mark.parametrize("way", ["never", "auto"], indirect=True)
async def test_rates(way: str, gpu_actors: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    """One call at a time with a tensor as its argument, until the receiver has it and its device has copied it."""
    actor = await gpu_actors(ready=way == "auto")
    times = _found[way] = {}
    for name, size in SIZES.items():
        tensor = torch.ones(size // 4, device="cuda")
        for _ in range(3):
            await actor.take.call_one(tensor)
        begun, count = time.perf_counter(), 0
        while time.perf_counter() < begun + SECONDS or count < 3:
            await actor.take.call_one(tensor)
            count += 1
        times[name] = (time.perf_counter() - begun) / count
        del tensor
    with capsys.disabled():
        print(f"\n{'by IPC' if way == 'auto' else 'by host memory'}:")  # noqa: T201  # this is what it is for
        for name, took in times.items():
            print(f"{name:>10}: {took * 1e6:10.0f} µs, {SIZES[name] / took / 1e9:8.2f} GB/s")  # noqa: T201
    if len(_found) == 2:
        assert 2 * _found["auto"]["256 MiB"] < _found["never"]["256 MiB"]
