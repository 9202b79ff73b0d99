"""A group never hangs: what goes wrong at one member is told to all, by name, and the group forms anew."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from monarch_async import MeshFailure, ProcMesh, Restart, context
from monarch_async.tensor import CollectiveError, CollectiveMismatch, CollectiveTimeout, PeerLost
from tests.tensor.members import Member, OverGloo, cancels

Spawn = Callable[..., tuple[ProcMesh, Any]]
AGAIN = Restart(max_restarts=50, within=10)
LARGE = 20_000


async def epoch(member: Member) -> int:
    return await member.comm.ready()


async def total(member: Member, count: int = LARGE) -> float:
    """What a sum of (rank + 1) comes to; it must be the same everywhere in the tensor."""
    tensor = torch.full((count,), float(member.rank + 1))
    await member.comm.all_reduce(tensor)
    assert [tensor[0].item()] * count == tensor.tolist()
    return tensor[0].item()


async def outcome(member: Member, *args: Any) -> tuple[Any, float, float]:
    """An all_reduce: its error, when that came by the clock of all processes, and the longest that the loop was held up meanwhile."""
    lag, ticking = 0.0, True

    async def tick() -> None:
        nonlocal lag
        while ticking:
            before = time.monotonic()
            await asyncio.sleep(0.005)
            lag = max(lag, time.monotonic() - before - 0.005)

    ticker = asyncio.create_task(tick())
    error: Any = None
    try:
        await member.comm.all_reduce(torch.ones(LARGE), timeout=args[0] if args else None)
    except (PeerLost, CollectiveError) as raised:
        error = raised
    ended = time.monotonic()
    ticking = False
    await ticker
    return error, ended, lag


async def pairs_total(member: Member, ranks: list[int]) -> float:
    comm = member.comm.subset(ranks)
    tensor = torch.full((LARGE,), float(member.rank + 1))
    await comm.all_reduce(tensor)
    return tensor[0].item()


@pytest.mark.parametrize("kind", [Member, OverGloo])
async def test_case_14_a_member_that_dies(spawn: Spawn, failures: list[MeshFailure], kind: type[Member]) -> None:
    """Three ranks, one never joins and is killed: the others raise PeerLost at once, their loops tick; two of them form a group and sum."""
    _, members = spawn({"gpus": 3}, kind=kind)
    await members.run.call(epoch)
    pids = list((await members.pid.call()).values())
    two = members.slice(gpus=slice(0, 2))
    waiting = two.run.call(outcome)
    await asyncio.sleep(0.2)
    killed = time.monotonic()
    os.kill(pids[2], signal.SIGKILL)
    for error, ended, lag in (await waiting).values():
        assert isinstance(error, PeerLost)
        assert (2, 9, "members", None) == (error.rank, error.signal, error.mesh, error.exit_code)
        assert "members[2] is gone: " in str(error)
        assert ended - killed < 0.5
        assert lag < 0.25
    assert [3.0, 3.0] == list((await two.run.call(pairs_total, [0, 1])).values())
    with pytest.raises(PeerLost, match=r"members\[2\] is gone") as late:
        await two.run.call(total)
    assert 2 == late.value.rank
    with pytest.raises(PeerLost, match=r"members\[2\] is gone"):  # it will not come back, so the three are never ready
        await two.run.call(epoch)
    assert failures


@pytest.mark.parametrize("kind", [Member, OverGloo])
async def test_case_14_a_member_that_is_frozen(spawn: Spawn, kind: type[Member]) -> None:
    """Three ranks, one is halted: the others raise PeerLost at the time that was set, and say so; when it goes on, the group forms anew."""
    _, members = spawn({"gpus": 3}, kind=kind)
    await members.run.call(epoch)
    pids = list((await members.pid.call()).values())
    two = members.slice(gpus=slice(0, 2))
    os.kill(pids[2], signal.SIGSTOP)
    try:
        began = time.monotonic()
        for error, ended, lag in (await two.run.call(outcome, 1.0)).values():
            assert isinstance(error, PeerLost)
            assert 2 == error.rank
            assert "its process is frozen" in str(error)
            assert 0.9 < ended - began < 2.0
            assert lag < 0.25
        assert [3.0, 3.0] == list((await two.run.call(pairs_total, [0, 1])).values())
    finally:
        os.kill(pids[2], signal.SIGCONT)
    with pytest.raises(PeerLost, match="frozen"):  # the one that knew nothing hears of it
        await members.slice(gpus=2).run.call_one(total)
    # The call that was refused has ended the epoch that may have been formed before it: for all, and nobody else is told of that.
    (again,) = set((await members.run.call(epoch)).values())
    assert again in (1, 2)
    assert [6.0] * 3 == list((await members.run.call(total)).values())


async def skips(member: Member, who: int) -> Any:
    comm = member.comm
    for number in range(1, 5):
        if number == 3 and member.rank == who:
            continue
        try:
            await (comm.barrier() if number % 2 else comm.all_reduce(torch.ones(LARGE)))
        except CollectiveMismatch as error:
            return str(error)
    return None


async def differs(member: Member) -> Any:
    before = torch.ones(8 if member.rank else 4)
    try:
        await member.comm.all_reduce(before)
    except CollectiveMismatch as error:
        assert [1.0] * len(before) == before.tolist()
        return str(error)
    return None


async def differs_in_kind(member: Member) -> Any:
    comm = member.comm
    try:
        await (comm.all_reduce(torch.ones(4)) if member.rank else comm.broadcast(torch.ones(4), 1))
    except CollectiveMismatch as error:
        return str(error)
    return None


async def differs_in_detail(member: Member, how: str) -> tuple[str, bool]:
    """As many elements on all, and another reduction, or shape; what was told, and whether the tensor is as it was."""
    tensor = torch.ones(LARGE)
    if member.rank == 1:
        await asyncio.sleep(0.05)
    other = member.rank > 0
    comm = member.comm
    try:
        if how == "root":
            await comm.broadcast(tensor, int(other))
        elif how == "coalesced" and other:
            async with comm.coalesce():
                comm.all_reduce(tensor)
                comm.barrier()
        else:
            given = tensor.view(2, -1) if how == "shape" and other else tensor.double() if how == "dtype" and other else tensor
            await comm.all_reduce(given, "mean" if how == "op" and other else "sum")
    except CollectiveMismatch as error:
        return str(error), bool((tensor == 1).all())
    return "", False


async def cancelled_and_restored(member: Member) -> float:
    """A strided sum is cancelled, the group is ready again, the tensor is set anew: how much of that is still so a while later."""
    strided = torch.ones(2048, 2048).t()
    for _ in range(5):
        try:
            async with asyncio.timeout(0.02 if member.rank == 0 else 5):
                await member.comm.all_reduce(strided)
        except (TimeoutError, CollectiveError):
            pass
        await member.comm.ready()
        strided.fill_(1000.0)
        await asyncio.sleep(0.1)
        if not bool((strided == 1000).all()):
            return float((strided == 1000).float().mean())
        await member.comm.ready()
    return 1.0


async def halves_and_factors(member: Member) -> list[Any]:
    """Means that would overflow as sums; factors that differ, and that turn an order round. On few elements and on many."""
    results = []
    for count in (8, LARGE):
        half = torch.full((count,), 40000.0, dtype=torch.float16)
        factor = 0.5 if member.rank == 0 else None
        value = torch.full((count,), float(member.rank + 1))
        results += [
            (await member.comm.all_reduce(half.clone(), "mean"))[0].item(),
            (await member.comm.reduce_scatter(half, "mean"))[0].item(),
            (await member.comm.reduce_scatter(value, "sum", premul=factor))[0].item(),
            (await member.comm.reduce_scatter(value, "max", premul=-1.0))[0].item(),
        ]
    return results


async def sends_other(member: Member) -> Any:
    comm = member.comm
    try:
        if member.rank == 0:
            await comm.send(torch.ones(LARGE), 1)
        elif member.rank == 1:
            await comm.recv(0, torch.ones(LARGE + 1))
        else:
            await comm.recv(0)
    except CollectiveError as error:
        return str(error)
    return None


async def is_ready(member: Member) -> None:
    await member.comm.ready()


async def test_case_15_members_that_do_not_agree(spawn: Spawn) -> None:
    """Other shapes, other operations, one left out: an error before anything moves, everywhere, that names ranks and what each called."""
    procs, members = spawn({"gpus": 3})
    for kind in (Member, OverGloo):
        if kind is OverGloo:  # on the same processes, since it takes them seconds to import torch
            await members.stop()
            members = procs.spawn("members", kind)
        for text in (await members.run.call(differs)).values():
            assert "operation 1 of members differs between ranks, and nothing was moved" in text
            assert "all_reduce sum float32 cpu (4,)" in text
            assert "all_reduce sum float32 cpu (8,)" in text
            assert "rank 0 called all_reduce sum float32 cpu (4,)" in text
        for how, text in (
            ("op", "all_reduce mean float32"),
            ("shape", "(2, 10000)"),
            ("dtype", "all_reduce sum float64"),
            ("root", "broadcast from 1"),
            ("coalesced", "called coalesced all_reduce sum float32 cpu (20000,) + barrier"),
        ):
            for told, untouched in (await members.run.call(differs_in_detail, how)).values():
                assert text in told
                assert "rank 0 called " + ("broadcast from 0" if how == "root" else "all_reduce sum float32") in told
                assert untouched
        for text in (await members.run.call(differs_in_kind)).values():
            assert "rank 0 called broadcast from 1 float32 cpu (4,) (last finished: nothing)" in text
            assert "called all_reduce" in text
        for text in (await members.run.call(skips, 1)).values():
            assert "operation 3 of members differs" in text
            assert f"rank 1 called all_reduce sum float32 cpu ({LARGE},) (last finished: operation 2, all_reduce)" in text
            assert "called barrier" in text
        for text in (await members.run.call(sends_other)).values():
            assert f"rank 0 sends float32 ({LARGE},), and rank 1 wants float32 ({LARGE + 1},)" in text
        await members.run.call(is_ready)  # a mismatch of two members is told to the third when it calls the next operation, else
        assert [6.0] * 3 == list((await members.run.call(total)).values())


async def test_nothing_is_written_to_once_the_group_is_formed_again(spawn: Spawn) -> None:
    """What an operation that was given up still does has come to rest by then, also where it copies its result back."""
    _, members = spawn({"gpus": 2})
    assert [1.0] * 2 == list((await members.run.call(cancelled_and_restored)).values())


async def test_halves_and_factors(spawn: Spawn) -> None:
    """A mean is rounded once, a factor is each member's own."""
    _, members = spawn({"gpus": 2})
    assert [[40000.0, 40000.0, 2.5, -1.0] * 2] * 2 == list((await members.run.call(halves_and_factors)).values())


async def test_no_backend_can_be_made_at_first(spawn: Spawn) -> None:
    """As where there are no descriptors left: it is tried again, and then forms."""
    _, members = spawn({"gpus": 2})
    await members.run.call(epoch)
    assert [2.0] * 2 == list((await members.run.call(with_a_backend_that_fails_once)).values())


async def with_a_backend_that_fails_once(member: Member) -> float:
    group = member.comm._group
    make = group._make
    failed: list[bool] = []

    def fails_once() -> Any:
        if not failed:
            failed.append(True)
            raise OSError(24, "Too many open files")
        return make()

    group._make = fails_once
    with pytest.raises(CollectiveMismatch):
        await member.comm.all_reduce(torch.ones(LARGE + member.rank))
    await member.comm.ready()
    tensor = torch.ones(LARGE)
    await member.comm.all_reduce(tensor)
    assert failed
    return float(tensor[0])


async def late(member: Member, who: int, seconds: float) -> Any:
    comm = member.comm
    await comm.barrier()
    if member.rank == who:
        await asyncio.sleep(seconds)
    try:
        await comm.all_reduce(torch.ones(LARGE), timeout=0.5)
    except CollectiveTimeout as error:
        return error
    return None


async def waits_for_an_object(member: Member) -> Any:
    """From rank 1, which has something else to do."""
    try:
        await (member.comm.recv_object(1, timeout=0.4) if member.rank == 0 else member.comm.barrier())
    except CollectiveTimeout as error:
        return error
    return None


async def cancelled_by_time(member: Member) -> Any:
    if member.rank == 2:
        return None
    try:
        async with asyncio.timeout(0.2):
            await member.comm.all_reduce(torch.ones(LARGE))
    except TimeoutError:
        return "out of time"
    except CollectiveError as error:
        return str(error)
    return None


async def formed_again(members: Any, before: int) -> int:
    """The epoch that all members are in, which is one after that: also where one is not told yet that it has ended."""
    async with asyncio.timeout(20):
        (number,) = set((await members.run.call(epoch)).values())
    assert number > before
    return int(number)


async def test_time_and_cancellation_end_the_epoch_for_all(spawn: Spawn) -> None:
    """Who is late is named, with what it last finished; who cancels too; each rank is told once, and then sums are right again."""
    _, members = spawn({"gpus": 3})
    epochs = [await formed_again(members, -1)]
    for error in (await members.run.call(late, 1, 0.9)).values():
        assert isinstance(error, CollectiveTimeout)
        assert (1,) == error.missing
        assert "rank 1 (last finished: operation 1, barrier" in str(error)
        assert "did not reach it" in str(error)
    epochs.append(await formed_again(members, epochs[-1]))
    assert [6.0] * 3 == list((await members.run.call(total)).values())
    texts = list((await members.run.call(cancels, 0, LARGE)).values())
    assert "cancelled" == texts[0]
    # Who needed nothing more of rank 0 has its sum.
    assert all(text is None or "rank 0 of members has cancelled operation 2, all_reduce sum" in text for text in texts[1:])
    epochs.append(await formed_again(members, epochs[-1] - 1))  # the same, if the sum was done just before it was cancelled
    texts = list((await members.run.call(cancelled_by_time)).values())
    assert "out of time" in texts
    assert None is texts[2]
    with pytest.raises(CollectiveError, match="has cancelled"):
        await members.slice(gpus=2).run.call_one(total)
    epochs.append(await formed_again(members, epochs[-1]))
    for error in (await members.run.call(waits_for_an_object)).values():
        assert (1,) == error.missing
        assert "recv_object from 1 of members did not end within 0.4 s: rank 1 (last finished: " in str(error)
    epochs.append(await formed_again(members, epochs[-1]))
    assert 5 == len(epochs)
    assert [6.0] * 3 == list((await members.run.call(total)).values())


async def test_a_group_forms_anew_after_a_restart(spawn: Spawn) -> None:
    """A rank is killed in mid-operation: PeerLost at once, it comes back, survivors keep their state, sums are right at a later epoch."""
    _, members = spawn({"gpus": 3}, restart=AGAIN)
    await members.run.call(epoch)
    await members.run.call(remember)
    pids = list((await members.pid.call()).values())
    two = members.slice(gpus=slice(0, 2))
    waiting = two.run.call(outcome)
    await asyncio.sleep(0.1)
    killed = time.monotonic()
    os.kill(pids[2], signal.SIGKILL)
    for error, ended, _ in (await waiting).values():
        assert isinstance(error, PeerLost)
        assert (2, 0) == (error.rank, error.incarnation)
        assert ended - killed < 0.5
    assert [6.0] * 3 == list((await members.run.call(total)).values())
    took = time.monotonic() - killed
    assert took < 5
    assert [{"kept": 0}, {"kept": 1}, {}] == list((await members.run.call(lambda member: member.state)).values())
    numbers = set((await members.run.call(epoch)).values())
    assert 1 == len(numbers)
    assert numbers.pop() > 0


async def remember(member: Member) -> None:
    member.state["kept"] = member.rank


def life(member: Member) -> int:
    return context().actor_instance.incarnation


async def all_live_again(members: Any) -> None:
    """Until every member is in its next life."""
    async with asyncio.timeout(20):
        while {1} != set((await members.run.options(return_exceptions=True).call(life)).values()):  # noqa: ASYNC110  # no event tells
            await asyncio.sleep(0.02)


async def test_all_are_started_again(spawn: Spawn) -> None:
    """With one_for_all the survivors' actors begin new lives in their processes: the group is formed of the new lives only."""
    _, members = spawn({"gpus": 3}, restart=Restart(strategy="one_for_all", max_restarts=50, within=10))
    await members.run.call(epoch)
    await members.run.call(remember)
    before = list((await members.pid.call()).values())
    os.kill(before[1], signal.SIGKILL)
    await all_live_again(members)
    assert [6.0] * 3 == list((await members.run.call(total)).values())
    assert [{}] * 3 == list((await members.run.call(lambda member: member.state)).values())
    after = list((await members.pid.call()).values())
    assert [True, False, True] == [one == other for one, other in zip(before, after, strict=True)]


async def fails(member: Member) -> None:
    raise LookupError("on purpose")


async def test_an_actor_that_fails_in_a_process_that_lives(spawn: Spawn) -> None:
    """Its life is over, so the others raise PeerLost; its next life, in the same process, joins; other groups are not touched."""
    _, members = spawn({"dp": 2, "tp": 2}, restart=AGAIN)
    await members.run.call(epoch)
    assert [4.0, 6.0, 4.0, 6.0] == list((await members.run.call(along, "dp")).values())
    pids = list((await members.pid.call()).values())
    rest = members.flatten("rank").slice(rank=slice(0, 3))
    waiting = rest.run.call(outcome)
    await asyncio.sleep(0.1)
    began = time.monotonic()
    members.slice(dp=1, tp=1).run.broadcast(fails)
    for error, ended, _ in (await waiting).values():
        assert isinstance(error, PeerLost)
        assert 3 == error.rank
        assert "LookupError in run: on purpose" in str(error)
        assert ended - began < 0.7
    assert [10.0] * 4 == list((await members.run.call(total)).values())
    assert pids == list((await members.pid.call()).values())
    left = members.slice(tp=0)
    assert [4.0] * 2 == list((await left.run.call(along, "dp")).values())
    assert [0, 0] == list((await left.run.call(epoch_along, "dp")).values())
    with pytest.raises(PeerLost, match="on purpose"):  # rank 1's group along dp had lost a member
        await members.slice(dp=0, tp=1).run.call_one(along, "dp")
    column = members.slice(tp=1)
    assert 1 == len(set((await column.run.call(epoch_along, "dp")).values()))
    assert [6.0] * 2 == list((await column.run.call(along, "dp")).values())


async def along(member: Member, dim: str) -> float:
    tensor = torch.full((LARGE,), float(member.rank + 1))
    await member.comm[dim].all_reduce(tensor)
    return tensor[0].item()


async def epoch_along(member: Member, dim: str) -> int:
    return await member.comm[dim].ready()


class First(Member):
    comm_check = "first"


class Never(Member):
    comm_check = "never"
    comm_timeout = 0.7


async def test_what_is_checked(spawn: Spawn) -> None:
    """With "first" new shapes are compared; with "never" only the operations are; a class's own timeout holds."""
    procs, members = spawn({"gpus": 2}, kind=First)
    others = procs.spawn("others", Never)
    for _ in range(2):
        assert [3.0] * 2 == list((await members.run.call(total)).values())
        assert [3.0] * 2 == list((await others.run.call(total)).values())
    for text in (await members.run.call(differs)).values():
        assert "operation 3 of members differs" in text
    for text in (await others.run.call(differs_in_kind)).values():
        assert "operation 3 of others differs" in text
    with pytest.raises(CollectiveTimeout, match=r"within 0\.7 s: rank 1 .* did not reach it"):
        await others.slice(gpus=0).run.call_one(total)
