"""Compressed sums between processes: awaited, in DDP, with errors, and by what their connections have really sent."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from monarch_async import ProcMesh, Restart, UsageError
from monarch_async.tensor import BF16, FP8, FP16, CollectiveError, Compression, PeerLost, PowerSGD, ddp_hook
from tests.tensor.members import Member, OverGloo

Spawn = Callable[..., tuple[ProcMesh, Any]]
ROWS, COLUMNS = 700, 300  # enough for threads
COMPRESSIONS: dict[str, Callable[[], Compression]] = {
    "BF16": BF16,
    "FP16": FP16,
    "FP8": FP8,
    "PowerSGD": lambda: PowerSGD(4, start_after=0),
}
SHARES = {"BF16": 0.5, "FP16": 0.5, "FP8": 0.251, "PowerSGD": 4 * (ROWS + COLUMNS) / (ROWS * COLUMNS)}
ERRORS = {"BF16": 0.02, "FP16": 0.003, "FP8": 0.1, "PowerSGD": 1e-5}
"""By norm, of a matrix whose rank PowerSGD has."""


def matrix(index: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(1)
    left, right = torch.randn(ROWS, 4, generator=random), torch.randn(4, COLUMNS, generator=random)
    return left @ torch.diag(torch.tensor([1.0, 2.0, 3.0, index])) @ right


def sent_by_tcp() -> int:
    """Bytes that the TCP connections of this process have sent and had acknowledged."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            is_socket = os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        except OSError:
            continue  # the descriptor of the listing itself
        if is_socket:
            with socket.socket(fileno=os.dup(int(name))) as copy:
                if copy.family == socket.AF_INET and copy.type == socket.SOCK_STREAM:
                    info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 160)
                    total += struct.unpack_from("Q", info, 120)[0]  # tcpi_bytes_acked
    return total


async def compressed(member: Member, name: str, mean: bool) -> tuple[float, float, float, torch.Tensor]:
    """The error by norm, the share of bytes as it was counted, and as it was sent, the first sum and mean; and some of the result."""
    comm = member.comm
    await comm.ready()
    before = sent_by_tcp()
    await comm.all_reduce(matrix(comm.rank))
    await comm.barrier()
    plain = sent_by_tcp() - before
    compress, op, mine = COMPRESSIONS[name](), "mean" if mean else "sum", matrix(comm.rank)
    before = sent_by_tcp()
    assert mine is await comm.all_reduce(mine, op, compress=compress, key="matrix")  # type: ignore[arg-type]
    await comm.barrier()
    moved = sent_by_tcp() - before
    exact = sum(matrix(index).double() for index in range(comm.size)) / (comm.size if mean else 1)
    assert isinstance(exact, torch.Tensor)
    error = ((mine.double() - exact).norm() / exact.norm()).item()
    return error, compress.traffic.moved / compress.traffic.plain, moved / plain, mine[:3].clone()


async def overlapping(member: Member) -> list[float]:
    """Several at once, of equal shapes, large and small: each has its own result, in the order of the calls."""
    comm = member.comm
    made = [torch.full((100_000 if index % 2 else 3000,), float(index + 1)) for index in range(6)]
    fp8 = FP8()
    await asyncio.gather(*(comm.all_reduce(tensor, compress=fp8) for tensor in made))
    assert all(bool((tensor == tensor[0]).all()) for tensor in made)
    waited = await asyncio.to_thread(lambda: comm.all_reduce(torch.ones(3000), compress=fp8).get())
    assert float(comm.size) == waited[0].item()
    return [tensor[0].item() for tensor in made]


async def refused(member: Member) -> list[str]:
    comm, told = member.comm, []
    for arguments in ({"premul": 2.0}, {"op": "max"}, {"compress": PowerSGD()}):
        try:
            await comm.all_reduce(torch.ones(3), **{"compress": BF16(), **arguments})  # type: ignore[arg-type]
        except UsageError as error:
            told.append(str(error))
    return told


async def cancelled(member: Member, who: int) -> str:
    """One member gives up the second of three sums; what the others, which go on waiting, are told."""
    comm = member.comm
    compress = FP8()
    sums = [asyncio.ensure_future(comm.all_reduce(torch.ones(200_000), compress=compress, timeout=20)) for _ in range(3)]
    if comm.rank == who:
        sums[1].cancel()
    outcomes = await asyncio.gather(*sums, return_exceptions=True)
    assert isinstance(outcomes[2], CollectiveError), outcomes
    await comm.ready()
    after = await comm.all_reduce(torch.ones(5000), compress=compress)
    assert 3.0 == after[0].item()
    return type(outcomes[1]).__name__


async def test_awaited(spawn: Spawn) -> None:
    """All compressions over three processes: errors, equal results, counted bytes that are those on the wire; many at once; errors."""
    _, members = spawn({"gpus": 3}, kind=OverGloo)
    for name in COMPRESSIONS:
        for mean in (False, True):
            results = list((await members.run.call(compressed, name, mean)).values())
            for error, counted, _, _ in results:
                assert error < ERRORS[name], name
                assert SHARES[name] == pytest.approx(counted, rel=0.01), name
            if name != "PowerSGD":  # whose factors are so small that they go in messages, and not by gloo
                assert SHARES[name] == pytest.approx(sum(sent for _, _, sent, _ in results) / 3, rel=0.35), name
            assert all(torch.equal(results[0][3], part) for _, _, _, part in results)
    assert [[3.0, 6.0, 9.0, 12.0, 15.0, 18.0]] * 3 == list((await members.run.call(overlapping)).values())
    for told in (await members.run.call(refused)).values():
        assert ["neither premul", "not for 'max'", "key="] == [
            part for part, text in zip(("neither premul", "not for 'max'", "key="), told, strict=True) if part in text
        ]
    assert ["CollectiveError", "CancelledError", "CollectiveError"] == list((await members.run.call(cancelled, 1)).values())


def train(member: Member, name: str, steps: int) -> tuple[float, torch.Tensor]:
    """DDP with a hook and with several buckets; the loss at the end."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 200), torch.nn.Tanh(), torch.nn.Linear(200, 200), torch.nn.Tanh(), torch.nn.Linear(200, 1)
    )
    ddp = DistributedDataParallel(model, process_group=member.comm.process_group, bucket_cap_mb=0.05, find_unused_parameters=True)
    if name:
        member.state["compress"] = compress = COMPRESSIONS[name]()
        ddp.register_comm_hook(None, ddp_hook(member.comm, compress))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    random = torch.Generator().manual_seed(member.rank)
    loss = torch.zeros(())
    for _ in range(steps):
        x = torch.randn(32, 20, generator=random)
        loss = (ddp(x).squeeze(1) - x[:, 0] * 2 + x[:, 1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item(), torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


async def in_ddp(member: Member, name: str, steps: int) -> tuple[float, torch.Tensor, float]:
    await member.comm.ready()
    member.state.clear()
    loss, weights = await asyncio.to_thread(train, member, name, steps)
    traffic = member.state["compress"].traffic if name else None
    return loss, weights, traffic.moved / traffic.plain if traffic else 1.0


async def endless_ddp(member: Member) -> None:
    await in_ddp(member, "FP8", 1_000_000)


async def test_in_ddp(spawn: Spawn) -> None:
    """Every compression learns what plain DDP does, with equal weights on all members; a killed member raises; it goes on."""
    _, members = spawn({"gpus": 2}, restart=Restart(max_restarts=3, within=60))
    plain = next(iter((await members.run.call(in_ddp, "", 60)).values()))
    assert plain[0] < 0.5
    for name in COMPRESSIONS:
        (loss, weights, share), (_, others, _) = (await members.run.call(in_ddp, name, 60)).values()
        assert torch.equal(weights, others), name
        assert loss < 1.0, name
        assert (weights - plain[1]).norm() < 0.2 * plain[1].norm(), name
        assert share < (0.3 if name in ("FP8", "PowerSGD") else 0.51), name
    calls = members.aside.options(return_exceptions=True).call(endless_ddp)
    await members.aside.call(_training)
    await members.slice(gpus=1).aside.options(return_exceptions=True).call(_die)
    survivor, _ = (await calls).values()
    assert isinstance(survivor, Exception)
    assert not isinstance(survivor, UsageError)
    # What torch does is not told to the group, and gloo may notice before the runtime does: an awaited operation knows.
    assert 1 == await members.slice(gpus=0).run.call_one(who_is_lost)
    again = list((await members.run.call(in_ddp, "FP8", 5)).values())
    assert torch.equal(again[0][1], again[1][1])


async def who_is_lost(member: Member) -> int | None:
    with pytest.raises(PeerLost) as lost:
        await member.comm.barrier()
    return lost.value.rank


async def _training(member: Member) -> None:
    """Until the first bytes have moved."""
    while "compress" not in member.state or not member.state["compress"].traffic.moved:  # noqa: ASYNC110  # another thread moves them
        await asyncio.sleep(0.01)


async def _die(member: Member) -> None:
    os.kill(os.getpid(), 9)


async def endless(member: Member) -> None:
    """Sums with a kept state, until a member is lost."""
    compress = member.state["powersgd"] = PowerSGD(2, start_after=3)
    while True:
        await member.comm.all_reduce(torch.ones(300, 300), compress=compress, key="w", timeout=20)
        member.state["compress"] = compress


async def once_more(member: Member) -> tuple[float, int]:
    compress = member.state.get("powersgd") or PowerSGD(2, start_after=3)
    tensor = torch.ones(())
    for _ in range(6):
        tensor = await member.comm.all_reduce(torch.ones(300, 300), "mean", compress=compress, key="w", timeout=20)
    assert bool(((tensor - 1).abs() < 1e-5).all())
    return tensor[0, 0].item(), member.comm.epoch


async def test_a_lost_member(spawn: Spawn) -> None:
    """PeerLost names it; after its restart old and new state of PowerSGD go together, since all begin anew."""
    _, members = spawn({"gpus": 2}, restart=Restart(max_restarts=3, within=60))
    calls = members.aside.options(return_exceptions=True).call(endless)
    await members.aside.call(_training)
    await members.slice(gpus=1).aside.options(return_exceptions=True).call(_die)
    survivor, _ = (await calls).values()
    assert isinstance(survivor, PeerLost), survivor
    assert 1 == survivor.rank
    first, second = (await members.run.call(once_more)).values()
    assert first == second
    assert 1 <= first[1]
