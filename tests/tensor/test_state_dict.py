"""Published state dicts: what comes is what was published, whole, of one version, wherever it is pulled."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
from torch import nn

from monarch_async import BufferMismatch, CallTimeout, UsageError, configure, this_host, this_proc
from monarch_async.options import Options
from monarch_async.tensor import Published, StateDict, StateMismatch, TensorSlice
from tests.tensor.publishers import Puller, Sharded, Trainer, constant, global_tensor, mapped, only_value

LARGE = 1 << 20
"""Elements: enough to be lent, and to be copied in a thread."""


def many_kinds() -> dict[str, torch.Tensor]:
    """Tensors of every kind that a model has."""
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    return {
        "float": base.clone(),
        "bfloat16": base.to(torch.bfloat16),
        "float8": base.to(torch.float8_e4m3fn),
        "bool": base > 5,
        "int8": base.to(torch.int8),
        "int64": base.to(torch.int64),
        "complex": torch.complex(base, -base),
        "nothing": torch.empty(0),
        "no rows": torch.empty(0, 3, dtype=torch.int32),
        "scalar": torch.tensor(7.0, dtype=torch.float64),
        "true": torch.tensor(True),
        "column": base[:, 2],
        "transposed": base.t(),
        "conjugated": torch.complex(base, base).conj(),
        "odd": torch.arange(3, dtype=torch.uint8),
    }


async def test_every_kind_of_tensor_in_one_process() -> None:
    """As from one process to another."""
    handle = await StateDict.publish(many_kinds())
    pulled = await handle.pull()
    await check_many_kinds(handle, pulled.version, dict(pulled))


async def every_kind_of_tensor(trainer: Any, puller: Any) -> None:
    """Values, dtypes and shapes come as they were, in place and as new tensors; gaps on either side don't matter."""
    handle = await trainer.publish_these.call_one(many_kinds())
    version, tensors, _ = await puller.pull.call_one(handle)
    await check_many_kinds(handle, version, tensors)


async def check_many_kinds(handle: StateDict, version: int, tensors: dict[str, torch.Tensor]) -> None:
    state = many_kinds()
    assert (1, list(state)) == (version, list(tensors))
    for key, tensor in state.items():
        assert (tensor.dtype, tensor.shape) == (tensors[key].dtype, tensors[key].shape)
        assert tensor.tolist() == tensors[key].tolist(), key

    targets = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    gaps = torch.zeros(8, 12)
    targets["float"] = gaps[::2, ::2]
    targets["int64"] = torch.zeros(6, 4, dtype=torch.int64).t()
    assert 1 == await handle.pull_into(targets)
    for key, tensor in state.items():
        assert tensor.tolist() == targets[key].tolist(), key
    assert gaps.sum() == state["float"].sum()


async def test_a_module() -> None:
    """A module stands for its state dict: parameters stay leaves that require grad, with their grad; buffers come too."""

    def make(value: float) -> nn.Module:
        module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        with torch.no_grad():
            for tensor in module.state_dict().values():
                tensor.fill_(value)
        return module

    source, target = make(3), make(0)
    published = await StateDict.publish(source, name="net")
    parameter = next(target.parameters())
    target(torch.ones(2, 3)).sum().backward()
    grad = parameter.grad
    assert grad is not None
    assert 1 == await published.pull_into(target)
    assert [3.0] * 9 == [tensor.double().mean().item() for tensor in target.state_dict().values()]
    assert parameter is next(target.parameters())
    assert (True, True) == (parameter.requires_grad, parameter.grad is grad)
    assert "<All keys matched successfully>" == str(make(0).load_state_dict(await published.pull()))


async def new_tensors_on_one_host_are_views(trainer: Any, puller: Any) -> None:
    """Without a copy; what is written to them nobody else sees; and they stay what they were however many versions follow."""
    handle = await trainer.publish.call_one(1, LARGE)
    version, tensors, views = await puller.pull.call_one(handle)
    assert (1, 1, True) == (version, only_value(tensors), views)
    assert 1 == await puller.keep.call_one(handle)
    assert 1 == await puller.kept_value.call_one(write=9)
    here = await handle.pull()
    assert mapped(here["large"])
    await trainer.go_on.call_one(2, 10, LARGE)
    assert (9, 1) == (await puller.kept_value.call_one(), only_value(here))
    assert (9, 9) == ((latest := await handle.pull()).version, only_value(latest))


async def readers_can_not_write_to_what_is_published(trainer: Any, puller: Any) -> None:
    """Its buffer is refused as a target, and what others pull is what it was."""
    handle = await trainer.publish.call_one(1, LARGE)
    async with handle._group.opened() as (opened, _):
        buffer = opened[0].buffer
        with pytest.raises(BufferMismatch, match="read-only"):
            buffer.write_from(bytes(buffer.size))
    assert 1 == only_value(await handle.pull())


async def test_no_reader_sees_a_torn_version() -> None:
    """While one publishes as fast as it can, three pull as fast as they can, into their tensors and as views: each version has one value
    everywhere, its own.
    """
    elements, last = 200_000, 60
    procs = this_host().spawn_procs({"procs": 4}, name="crowd", preload=["tests.tensor.publishers"], env={"OMP_NUM_THREADS": "1"})
    for views in (False, True):
        trainer = procs.slice(procs=0).spawn("trainer", Trainer)
        pullers = procs.slice(procs=slice(1, 4)).spawn("pullers", Puller)
        handle = await trainer.publish.call_one(1, elements)
        following = pullers.follow.call(handle, last, elements, views)
        assert last == await trainer.go_on.call_one(2, last + 1, elements)
        for seen in (await following).values():
            assert [version for version, _ in seen] == [value for _, value in seen]
            assert (sorted(seen), last) == (seen, seen[-1][0])
        await trainer.stop()
        await pullers.stop()


async def by_messages_too(trainer: Any, puller: Any) -> None:
    """With the backend that goes to other hosts all is the same, but for the views."""
    handle = await trainer.publish.call_one(1, LARGE)
    before = Options()
    configure(rdma_backend="tcp")
    procs = this_host().spawn_procs(name="far", preload=["tests.tensor.publishers"])
    try:
        puller = procs.spawn("puller", Puller)
        following = puller.follow.call_one(handle, 20, LARGE, False)
        await trainer.go_on.call_one(2, 21, LARGE)
        seen = await following
        assert [(version, version) for version, _ in seen] == seen
    finally:
        configure(rdma_backend=before.rdma_backend)


async def tied_weights(trainer: Any, puller: Any) -> None:
    """What is the same memory is published once, and is the same memory at the other end; so is a part of another tensor."""
    w = torch.arange(20_000.0).reshape(100, 200)
    state = {"embedding": w, "head": w, "rows": w[10:20], "other": w.clone(), "reshaped": w.view(-1)}
    handle = await trainer.publish_these.call_one(state)
    pulled = await handle.pull()
    assert all(torch.equal(state[key], tensor) for key, tensor in pulled.items())
    assert pulled["embedding"].data_ptr() == pulled["head"].data_ptr() == pulled["reshaped"].data_ptr()
    assert pulled["embedding"][10:20].data_ptr() == pulled["rows"].data_ptr()
    assert pulled["other"].data_ptr() != pulled["embedding"].data_ptr()
    size = 2 * w.numel() * w.element_size()
    assert size <= pulled["embedding"].untyped_storage().nbytes() < size + 1000

    tied = torch.zeros(100, 200)
    target = {"embedding": tied, "head": tied, "rows": torch.zeros(10, 200), "other": torch.zeros(100, 200), "reshaped": tied.view(-1)}
    await handle.pull_into(target)
    assert all(torch.equal(state[key], tensor) for key, tensor in target.items())
    with pytest.raises(StateMismatch, match="'other' and 'embedding' share memory in the target, and don't as published"):
        await handle.pull_into({**target, "other": tied})
    untied = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    await handle.pull_into(untied)
    assert all(torch.equal(state[key], tensor) for key, tensor in untied.items())


async def a_part_of_it(trainer: Any, puller: Any) -> None:
    """By a prefix or a predicate: only those keys come, and only those are written."""
    state = {f"{part}.{key}": torch.full((50_000,), float(number)) for number, part in enumerate(("a", "b")) for key in ("w", "bias")}
    handle = await trainer.publish_these.call_one(state)
    assert ["b.w", "b.bias"] == list(await handle.pull(only="b."))
    target = {key: torch.full((50_000,), -1.0) for key in state}
    await handle.pull_into(target, only=lambda key: key.endswith("w"))
    assert [0.0, -1.0, 1.0, -1.0] == [tensor.mean().item() for tensor in target.values()]
    assert {} == await handle.pull(only="c")
    here = await StateDict.publish(state)
    assert [1.0, 1.0] == [tensor.mean().item() for tensor in (await here.pull(only="b.")).values()]


async def what_does_not_fit_is_listed_and_nothing_is_written(trainer: Any, puller: Any) -> None:
    """Keys, shapes and dtypes, all of them in one error; tensors that would have fitted are as they were."""
    handle = await trainer.publish.call_one(5)
    good = constant(0, 5000)
    bad = {**good, "whole": torch.zeros(33, 8, dtype=torch.int64), "one": torch.tensor(0.0), "extra": torch.zeros(1)}
    del bad["half"]
    with pytest.raises(StateMismatch) as caught:
        await handle.pull_into(bad)
    expected = (
        "'extra' is not published",
        "'half' is published, and not in the target",
        "'whole' is int64 [33, 7] as published, int64 [33, 8] in the target",
        "'one' is int64 [] as published, float32 [] in the target",
    )
    assert expected == caught.value.problems
    assert "the state dict 'weights' can't be pulled into this, and nothing was written:" in str(caught.value)
    assert not any(tensor.any() for tensor in bad.values())
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(caught.value), expected) == (str(again), again.problems)
    many = StateMismatch("what", [f"line {number}" for number in range(25)])
    assert "and 5 more" in str(many)
    assert 1 == await handle.pull_into(good)
    assert 5 == only_value(good)


async def test_what_is_no_tensor_is_refused_at_once() -> None:
    """Before anything is sent, by the name of the key."""
    with pytest.raises(TypeError, match="'extra' is no tensor but a dict"):
        StateDict.publish({"extra": {}})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="a state is a module or a dictionary of tensors, not list"):
        StateDict.publish([torch.zeros(1)])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'w' has no plain memory"):
        StateDict.publish({"w": torch.zeros(2, 2).to_sparse()})
    with pytest.raises(TypeError, match="'w' has no plain memory"):
        StateDict.publish({"w": torch.zeros(2, 2, device="meta")})
    with pytest.raises(ValueError, match="is not within a tensor of shape"):
        StateDict.publish({"w": TensorSlice(torch.zeros(2, 2), (3, 2), (2, 0))})
    with pytest.raises(UsageError, match="at least 2 slots"):
        StateDict.publish({}, slots=1)
    with pytest.raises(UsageError, match="gather takes the handles of one state dict"):
        StateDict.gather([])


async def versions_are_counted_and_waited_for(trainer: Any, puller: Any) -> None:
    """From 1, or as the publisher says; publishing again under the same name is the next version, seen through every handle."""
    handle = await trainer.publish.call_one(1)
    assert (1, 1) == (await handle.version(), await handle.wait_for(1))
    waiting, pulling = handle.wait_for(11), handle.pull(newer_than=1)
    await trainer.publish.call_one(2, version=10)
    assert (10, 2) == ((pulled := await pulling).version, only_value(pulled))
    assert not waiting.done()
    await trainer.publish.call_one(3)
    assert 11 == await waiting
    for wrong in (11, 5):
        with pytest.raises(UsageError, match=f"version {wrong} of 'weights' is not higher than the last, 11"):
            await trainer.publish.call_one(4, version=wrong)
    with pytest.raises(UsageError, match="counted from 1"):
        await trainer.publish.call_one(4, version=0)
    target = constant(0, 5000)
    with pytest.raises(CallTimeout, match=r"'weights': not done within 0\.05 s"):
        await handle.pull_into(target, newer_than=11, timeout=0.05)
    with pytest.raises(CallTimeout):
        await handle.wait_for(12, timeout=0.01)
    assert 11 == await handle.pull_into(target)
    assert 3 == only_value(target)


async def other_tensors_in_the_next_version(trainer: Any, puller: Any) -> None:
    """What is published may change its shape: handles that know the last one are told, and old targets are refused."""
    handle = await trainer.publish.call_one(1, 5000)
    assert 1 == (await puller.pull.call_one(handle))[0]
    await handle.pull()
    await trainer.publish.call_one(2, 6000)
    pulled = await handle.pull()
    assert (2, 6000, 2) == (pulled.version, len(pulled["large"]), only_value(pulled))
    with pytest.raises(StateMismatch, match=r"'large' is float32 \[6000\] as published"):
        await handle.pull_into(constant(0, 5000))
    await trainer.publish_these.call_one({})
    assert ({}, 3) == ((empty := await handle.pull()), empty.version)


async def in_threads(trainer: Any, puller: Any) -> None:
    """Actors whose endpoints are plain functions publish and pull by `get`."""
    handle = await trainer.publish_in_thread.call_one(4, LARGE)
    assert 5 == await puller.pull_in_thread.call_one(handle, constant(0, LARGE))
    assert "<StateDict 'weights' of trainer[0]>" == repr(handle)


async def test_several_state_dicts_of_one_actor() -> None:
    """Names keep them apart; a `Published` is a handle of its own, and a plain one where it is sent."""
    one, two = await StateDict.publish(constant(1, 10), name="one"), await StateDict.publish(constant(2, 10), name="two")
    assert [1, 2] == [only_value(await each.pull()) for each in (one, two)]
    assert one is await StateDict.publish(constant(3, 10), name="one")
    assert (2, 1) == (await one.version(), await two.version())
    sent = pickle.loads(pickle.dumps(one))
    assert (StateDict, Published) == (type(sent), type(one))
    assert 3 == only_value(await sent.pull())
    with pytest.raises(UsageError, match="these are of"):
        StateDict.gather([one, two])


async def test_the_loop_is_free_while_tensors_are_copied() -> None:
    """Publishing and pulling much, the loop comes round all the time."""
    state = {"w": torch.ones(32 << 20)}
    target = {"w": torch.zeros(8 << 20, 4).t()}
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.001)

    ticking = asyncio.create_task(tick())
    published = await StateDict.publish(state)
    assert ticks > 5
    ticks = 0
    await published.update({"w": torch.ones(4, 8 << 20)})
    assert ticks > 5
    ticks = 0
    await published.pull_into(target)
    assert ticks > 5
    ticking.cancel()
    assert 32 << 20 == target["w"].sum()


async def test_little_shared_memory(caplog: pytest.LogCaptureFixture) -> None:
    """Where there is none left for a version it is in other memory, which is logged; readers copy."""
    before = Options()
    configure(segment_bytes=1 << 20)
    try:
        published = await StateDict.publish(constant(7, LARGE))
        puller = this_host().spawn_procs(name="there", preload=["tests.tensor.publishers"]).spawn("puller", Puller)
        version, tensors, _ = await puller.pull.call_one(published)
        assert (1, 7) == (version, only_value(tensors))
        assert 7 == await puller.pull_in_thread.call_one(published, constant(0, LARGE))
    finally:
        configure(segment_bytes=before.segment_bytes)
    assert "in memory that is not shared" in caplog.text


CASES: list[Callable[[Any, Any], Awaitable[None]]] = [
    every_kind_of_tensor,
    new_tensors_on_one_host_are_views,
    readers_can_not_write_to_what_is_published,
    by_messages_too,
    tied_weights,
    a_part_of_it,
    what_does_not_fit_is_listed_and_nothing_is_written,
    versions_are_counted_and_waited_for,
    other_tensors_in_the_next_version,
    in_threads,
]


async def test_from_one_process_to_another() -> None:
    """All that is said above of a trainer and a puller in two processes.

    They are new for each, and their processes are the same for all, since it takes those two seconds to import torch.
    """
    procs = this_host().spawn_procs({"gpus": 2}, name="pair", preload=["tests.tensor.publishers"])
    for case in CASES:
        trainer, puller = procs.slice(gpus=0).spawn("trainer", Trainer), procs.slice(gpus=1).spawn("puller", Puller)
        await case(trainer, puller)
        await trainer.stop()
        await puller.stop()


async def test_slices_of_several_ranks() -> None:
    """Rows of three ranks are put together to the whole, to columns, and to a block across all; replicas are read once."""
    procs = this_host().spawn_procs({"ranks": 3}, name="ranks", preload=["tests.tensor.publishers"])
    ranks = procs.spawn("ranks", Sharded)
    whole = global_tensor(300, 1000)
    handle = StateDict.gather(list((await ranks.publish_rows.call(300, 1000)).values()))
    pulled = await handle.pull()
    assert torch.equal(whole, pulled["w"])
    assert not pulled["same"].any()
    columns, block = torch.zeros(300, 10), torch.zeros(150, 500)
    for tensor, offsets in ((columns, (0, 7)), (block, (75, 250))):
        await handle.pull_into({"w": TensorSlice(tensor, (300, 1000), offsets), "same": torch.zeros(3)})
        assert torch.equal(whole[offsets[0] : offsets[0] + len(tensor), offsets[1] : offsets[1] + tensor.shape[1]], tensor)
    row = torch.zeros(1, 1000)
    await handle.pull_into({"w": TensorSlice(row, (300, 1000), (299, 0))}, only="w")
    assert torch.equal(whole[299:], row)
    part = StateDict.gather([await ranks.slice(ranks=rank).publish_rows.call_one(300, 1000) for rank in (0, 2)])
    with pytest.raises(StateMismatch, match=r"'w': nobody publishes \[100:200, 0:1000\]"):
        await part.pull()


async def test_ranks_that_are_not_at_the_same_version() -> None:
    """A reader gets the newest version that all have, and waits where there is none; never parts of two."""
    procs = this_host().spawn_procs({"ranks": 2}, name="ranks", preload=["tests.tensor.publishers"])
    ranks = procs.spawn("ranks", Sharded)
    one, two = (ranks.slice(ranks=rank) for rank in (0, 1))
    handle = StateDict.gather(list((await ranks.publish_rows.call(4, 3, slots=2)).values()))
    expected = global_tensor(4, 3)

    async def pulled(version: int) -> bool:
        found = await handle.pull()
        return (version, True) == (found.version, torch.equal(expected + found["same"][0], found["w"]))

    await one.publish_rows.call_one(4, 3, 100.0)
    assert (1, True) == (await handle.version(), await pulled(1))
    waiting = handle.pull(newer_than=1)
    await one.publish_rows.call_one(4, 3, 200.0)  # its first version is gone now
    assert not waiting.done()
    behind = asyncio.ensure_future(pulled(2))
    await two.publish_rows.call_one(4, 3, 100.0)
    assert 2 == (await waiting).version
    assert await behind
    await two.publish_rows.call_one(4, 3, 200.0)
    assert await pulled(3)
    waiting = handle.pull(newer_than=3)
    await one.publish_rows.call_one(4, 3, 300.0, version=10)
    await two.publish_rows.call_one(4, 3, 300.0, version=9)
    assert await pulled(3)
    assert not waiting.done()
    await two.publish_rows.call_one(4, 3, 300.0, version=10)
    assert 10 == (await waiting).version


async def test_in_one_process() -> None:
    """Publisher and reader may be actors of the very same process: the reader's tensors are its own."""
    trainer, puller = this_proc().spawn("trainer", Trainer), this_proc().spawn("puller", Puller)
    handle = await trainer.publish.call_one(6, LARGE)
    following = puller.follow.call_one(handle, 10, LARGE, True)
    await trainer.go_on.call_one(2, 11, LARGE)
    assert 10 == (await following)[-1][1]
