"""State dicts between hosts: a worker on loopback is another host, so weights go there by TCP."""

from __future__ import annotations

from pathlib import Path

import torch

from monarch_async import attach_to_workers, shutdown, this_host
from monarch_async.tensor import StateDict, TensorSlice
from tests.hosts.workers import make_key, worker
from tests.tensor.publishers import Puller, Sharded, Trainer, constant, global_tensor, only_value

ELEMENTS = 300_000


async def test_weights_reach_another_host(tmp_path: Path) -> None:
    """While it publishes here, a puller there gets whole versions, in place and as tensors of its own."""
    key = make_key(tmp_path)
    with worker("--key-file", key) as (url, _):
        there = attach_to_workers([url], key=key).spawn_procs(name="there", preload=["tests.tensor.publishers"])
        here = this_host().spawn_procs(name="here", preload=["tests.tensor.publishers"])
        trainer, puller = here.spawn("trainer", Trainer), there.spawn("puller", Puller)
        handle = await trainer.publish.call_one(1, ELEMENTS)
        version, tensors, views = await puller.pull.call_one(handle)
        assert (1, 1, False) == (version, only_value(tensors), views)
        for views in (False, True):
            first = await handle.version()
            following = puller.follow.call_one(handle, first + 15, ELEMENTS, views)
            await trainer.go_on.call_one(first + 1, first + 16, ELEMENTS)
            seen = await following
            assert [version for version, _ in seen] == [value for _, value in seen]
            assert first + 15 == seen[-1][0]
        await shutdown()


async def test_slices_on_two_hosts(tmp_path: Path) -> None:
    """Rows of ranks on one host, pulled as columns on another; and published there, pulled here."""
    key = make_key(tmp_path)
    with worker("--key-file", key) as (url, _):
        there = attach_to_workers([url], key=key).spawn_procs({"ranks": 2}, name="there", preload=["tests.tensor.publishers"])
        ranks = there.flatten("ranks").spawn("ranks", Sharded)
        handle = StateDict.gather(list((await ranks.publish_rows.call(200, 300)).values()))
        pulled = await handle.pull()
        assert torch.equal(global_tensor(200, 300), pulled["w"])
        columns = torch.zeros(200, 20)
        await handle.pull_into({"w": TensorSlice(columns, (200, 300), (0, 40))}, only="w")
        assert torch.equal(global_tensor(200, 300)[:, 40:60], columns)
        mine = await StateDict.publish(constant(3, ELEMENTS), name="mine")
        puller = there.flatten("ranks").slice(ranks=0).spawn("puller", Puller)
        assert 3 == only_value((await puller.pull.call_one(mine))[1])
        await shutdown()
