"""Calls and casts through the agent, on one host: the same results, errors, order, bounds and ends as on direct links."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from monarch_async import (
    ActorError,
    CallTimeout,
    Channel,
    ChannelFull,
    DeadlockError,
    ProcMesh,
    configure,
    this_host,
)
from monarch_async._runtime.tree import Tree
from monarch_async.ambient import current_runtime
from tests.api.tree_members import Member
from tests.api.waiting import until


@pytest.fixture
def trees(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many members each message through the tree was for."""
    sent: list[int] = []
    send = Tree.send

    def noting(self: Tree, agent: Any, endpoint: str, members: Any, *rest: Any) -> bool:
        sent.append(len(members))
        return send(self, agent, endpoint, members, *rest)

    monkeypatch.setattr(Tree, "send", noting)
    return sent


async def test_results_and_ranks(six: ProcMesh, trees: list[int]) -> None:
    """Each member answers for itself, knows its position in the slice that was addressed, and all went as one message."""
    mesh: Any = six.spawn("member", Member)
    assert [7] * 6 == list((await mesh.take.call(7)).values())
    assert [(rank, {"gpus": rank}) for rank in range(6)] == list((await mesh.rank.call()).values())
    some = mesh.slice(gpus=slice(1, 5))
    assert [(rank, {"gpus": rank}) for rank in range(4)] == list((await some.rank.call()).values())
    assert [6, 6, 4] == trees
    assert len(set((await mesh.pid.call()).values())) == 6


async def test_few_go_directly(six: ProcMesh, trees: list[int]) -> None:
    """As many as the fan-out get a message each."""
    mesh: Any = six.spawn("member", Member)
    await mesh.slice(gpus=slice(0, 2)).take.call(1)
    assert [] == trees


async def test_errors(six: ProcMesh, trees: list[int]) -> None:
    """The first error raises at once and is of its own type, with the remote traceback; as values, all come."""
    mesh: Any = six.spawn("member", Member)
    with pytest.raises(LookupError, match="no such thing at 3") as caught:
        await mesh.fail.call(3)
    assert isinstance(caught.value, ActorError)
    assert "raise LookupError" in caught.value.remote_traceback
    assert [3] == [getattr(point, "rank", None) for point in caught.value.errors]
    answers = list((await mesh.fail.options(return_exceptions=True).call(3)).values())
    assert [3, 3, 3, LookupError, 3, 3] == [answer if answer == 3 else LookupError for answer in answers]
    assert isinstance(answers[3], LookupError)
    assert [6, 6] == trees


@pytest.mark.parametrize("seed", [1, 2])
async def test_order_under_mixed_load(six: ProcMesh, trees: list[int], seed: int) -> None:
    """Casts and calls, through the tree and directly, small and large, from one sender arrive in the order in which they were sent."""
    mesh: Any = six.spawn("member", Member)
    rng = random.Random(seed)
    expected: list[list[int]] = [[] for _ in range(6)]
    waiting: list[Any] = []
    for number in range(300):
        filler = np.zeros(rng.choice([0, 0, 0, 10, 200_000]), dtype=np.uint8)
        match rng.randrange(4):
            case 0:
                mesh.take.broadcast(number, filler)
                chosen = range(6)
            case 1:
                waiting.append(mesh.take.call(number, filler))
                chosen = range(6)
            case 2:
                first = rng.randrange(6)
                mesh.slice(gpus=first).take.broadcast(number, filler)
                chosen = range(first, first + 1)
            case _:
                first = rng.randrange(6)
                waiting.append(mesh.slice(gpus=first).take.call_one(number, filler))
                chosen = range(first, first + 1)
        for rank in chosen:
            expected[rank].append(number)
        if number % 50 == 49:
            await asyncio.gather(*waiting)
    await asyncio.gather(*waiting)
    assert expected == list((await mesh.all.call()).values())
    assert len(trees) > 100


async def test_order_from_an_actor(six: ProcMesh) -> None:
    """An actor of one process reaches its neighbours through the tree; ports in arguments go straight to where they belong."""
    mesh: Any = six.spawn("member", Member)
    others = mesh.slice(gpus=slice(1, 6))
    assert [5] * 5 == await mesh.slice(gpus=0).ask_all.call_one(others, 5)
    assert [[0, 1, 2, 3, 4, 5]] * 5 == list((await others.all.call()).values())
    port, receiver = Channel[int].open()
    mesh.send_to.broadcast(port)
    assert list(range(6)) == sorted([await receiver.recv() for _ in range(6)])


async def test_deadlock(six: ProcMesh) -> None:
    """A call that comes back through the tree to the actor that waits for it is refused with the chain."""
    mesh: Any = six.spawn("member", Member)
    with pytest.raises(DeadlockError, match=r"member\[0\]\.ask_all → member\[0\]\.take"):
        await mesh.slice(gpus=0).ask_all.call_one(mesh, 1)
    others: Any = six.spawn("other", Member)
    with pytest.raises(DeadlockError, match=r"member\[0\].* → other\[\d\]\.ask_back → member\[0\]"):
        await mesh.slice(gpus=0).ask_through.call_one(others, mesh)


async def test_cancel(six: ProcMesh) -> None:
    """Cancelling the future cancels every handler."""
    mesh: Any = six.spawn("member", Member)
    await mesh.take.call(1)
    future = mesh.sleep.call()
    runtime = current_runtime()
    agent = runtime.peers[runtime.agent.uid]
    await until(lambda: any(len(link.started) == 6 for link in agent.links))
    future.cancel()
    assert [["began", "ended"]] * 6 == list((await mesh.story.call()).values())
    await until(lambda: [0] * 6 == [lane.messages for lane in mesh.take.lanes])


async def test_cancelled_while_held(six: ProcMesh) -> None:
    """What a busy member has in its mailbox is dropped when its call is cancelled."""
    mesh: Any = six.spawn("member", Member)
    busy = mesh.sleep.call()
    queued = mesh.take.call(1)
    queued.cancel()
    busy.cancel()
    assert [[]] * 6 == list((await mesh.all.call()).values())


async def test_timeout(six: ProcMesh) -> None:
    """A deadline passes through the tree: the caller is told in time, the handlers end."""
    mesh: Any = six.spawn("member", Member)
    await mesh
    with pytest.raises(CallTimeout):
        await mesh.sleep.options(timeout=0.2).call()
    assert [["began", "ended"]] * 6 == list((await mesh.story.call()).values())


async def test_large(six: ProcMesh, trees: list[int]) -> None:
    """Arrays go and come, and only one copy leaves for the agent."""
    mesh: Any = six.spawn("member", Member)
    await mesh
    array = np.arange(1_000_000, dtype=np.float64)
    runtime = current_runtime()
    answers = mesh.double.call(array)
    agent = runtime.peers[runtime.agent.uid]
    assert agent.usual is not None
    pool = runtime.lending.pool
    assert 8_000_000 <= agent.usual.backlog + pool.allocated - pool.kept < 10_000_000
    direct = [lane.peer.usual for lane in mesh.double.lanes]
    assert all(link is None or link.backlog < 10_000 for link in direct)
    for answer in (await answers).values():
        assert np.array_equal(array * 2, answer)
    assert [6] == trees


async def test_bounds(through_tree: None) -> None:
    """What goes through the tree is booked on each member's account: at the limit nothing is sent, and credit makes room."""
    configure(mailbox_messages=10)
    mesh: Any = this_host().spawn_procs({"gpus": 4}).spawn("member", Member)
    await mesh
    busy = mesh.sleep.call()
    for number in range(9):
        mesh.take.broadcast(number)
    with pytest.raises(ChannelFull, match="mailbox_messages=10"):
        mesh.take.broadcast(9)
    with pytest.raises(ChannelFull):
        mesh.slice(gpus=1).take.broadcast(9)
    busy.cancel()
    await until(lambda: [0] * 4 == [lane.messages for lane in mesh.take.lanes])
    await mesh.take.broadcast(11)
    assert [*range(9), 11] == next(iter((await mesh.all.call()).values()))


async def test_an_awaited_cast_waits_for_room(through_tree: None) -> None:
    """A sender that awaits its casts never meets the limit, and goes no faster than its receivers give credit."""
    configure(mailbox_messages=16)
    mesh: Any = this_host().spawn_procs({"gpus": 3}).spawn("member", Member)
    for number in range(200):
        await mesh.take.broadcast(number)
    assert [[*range(200)]] * 3 == list((await mesh.all.call()).values())


async def test_stream(six: ProcMesh) -> None:
    """Results come one by one."""
    mesh: Any = six.spawn("member", Member)
    assert [3] * 6 == [value async for value in mesh.take.stream(3)]
