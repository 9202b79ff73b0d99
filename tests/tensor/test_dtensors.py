"""State dicts of real DTensors, which need a process group."""

from __future__ import annotations

from pathlib import Path

import torch

from monarch_async import this_host
from monarch_async.tensor import StateDict
from tests.tensor.meshes import Meshed
from tests.tensor.publishers import global_tensor


async def test_dtensors(tmp_path: Path) -> None:
    """What two ranks have as rows, two ranks get as columns, and a process without any group as a whole."""
    procs = this_host().spawn_procs({"ranks": 2}, name="ranks", preload=["tests.tensor.meshes"])
    ranks = procs.spawn("ranks", Meshed)
    await ranks.join.call(str(tmp_path / "store"))
    handle = StateDict.gather(list((await ranks.publish_dtensor.call(7, 5)).values()))
    assert [(True, True)] * 2 == list((await ranks.pull_dtensor.call(handle, 7, 5)).values())
    pulled = await handle.pull()
    assert torch.equal(global_tensor(7, 5), pulled["w"])
    assert torch.equal(global_tensor(3, 3), pulled["r"])
    for errors in (await ranks.refused.call()).values():
        assert 2 == len(errors)
        assert all("has no slice of its own here: redistribute it to Shard or Replicate" in error for error in errors)
    await ranks.leave.call()
