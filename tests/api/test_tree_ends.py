"""Members, senders, connections and sessions that end while messages go through the agent: who is told what, and what goes on."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from monarch_async import (
    ActorDied,
    ProcMesh,
)
from monarch_async._core.events import Evidence
from monarch_async.ambient import current_runtime
from tests.api.tree_members import Member
from tests.api.waiting import until


async def test_a_member_is_killed(six: ProcMesh, failures: Any) -> None:
    """The others answer, the killed one's error says by which signal; later calls are told the same, and the bookings are gone."""
    mesh: Any = six.spawn("member", Member)
    await mesh
    answers = list((await mesh.die.options(return_exceptions=True).call(2)).values())
    assert [2] * 5 == answers[:2] + answers[3:]
    assert isinstance(answers[2], ActorDied)
    assert 9 == answers[2].signal
    assert 2 == answers[2].rank
    with pytest.raises(ActorDied) as caught:
        await mesh.take.call(1)
    assert 9 == caught.value.signal
    rest = mesh.slice(gpus=slice(3, 6))
    assert [1] * 3 == list((await rest.take.call(1)).values())
    await until(lambda: [0] * 6 == [lane.messages for lane in mesh.take.lanes])


async def test_killed_while_it_handles(six: ProcMesh, failures: Any) -> None:
    """A handler is known to have started when its process is killed."""
    mesh: Any = six.spawn("member", Member)
    pids = list((await mesh.pid.call()).values())
    runtime = current_runtime()
    future = mesh.sleep.options(return_exceptions=True).call()
    agent = runtime.peers[runtime.agent.uid]
    await until(lambda: any(len(link.started) == 6 for link in agent.links))
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    answers = list((await future).values())
    assert [(9, True)] * 6 == [(answer.signal, answer.started) for answer in answers]


async def test_the_sender_dies(six: ProcMesh, failures: Any) -> None:
    """When a process that has called through the tree is killed, what it has called is cancelled, and others are served."""
    mesh: Any = six.spawn("member", Member)
    others = mesh.slice(gpus=slice(1, 6))
    pid = await mesh.slice(gpus=0).pid.call_one()
    calling = mesh.slice(gpus=0).sleep_all.options(return_exceptions=True).call(others)
    for rank in range(5):
        await others.slice(gpus=rank).begun.call_one()
    os.kill(pid, signal.SIGKILL)
    assert [9] == [answer.signal for answer in (await calling).values()]
    await others.finished.call()
    assert [["began", "ended"]] * 5 == list((await others.story.call()).values())


@pytest.mark.parametrize("what", ["direct", "agent"])
async def test_connections_are_lost(six: ProcMesh, what: str) -> None:
    """Connections that break under a mixed load cost nothing: all arrives, once and in order."""
    mesh: Any = six.spawn("member", Member)
    await mesh
    runtime = current_runtime()
    waiting: list[Any] = []
    for number in range(200):
        if number % 3:
            waiting.append(mesh.take.call(number))
        else:
            waiting += [mesh.slice(gpus=rank).take.call_one(number) for rank in range(6)]
        if number % 20 == 10:
            uids = [runtime.agent.uid] if what == "agent" else [lane.peer.address.uid for lane in mesh.take.lanes]
            for uid in uids:
                for link in runtime.peers[uid].links:
                    link.drop_connection()
            await asyncio.sleep(0)
    await asyncio.gather(*waiting)
    assert [[*range(200)]] * 6 == list((await mesh.all.call()).values())


@pytest.mark.parametrize("what", ["direct", "agent", "behind the agent"])
async def test_sessions_are_lost(six: ProcMesh, what: str) -> None:
    """What a lost session takes with it fails and holds up nothing; what arrives is in order, and the bookings come out even."""
    mesh: Any = six.spawn("member", Member)
    await mesh
    runtime = current_runtime()
    waiting: list[Any] = []
    errors = mesh.take.options(return_exceptions=True)
    for number in range(60):
        if number % 3:
            waiting.append(errors.call(number))
            mesh.take.broadcast(number + 1000)
        else:
            waiting += [mesh.slice(gpus=rank).take.call_one(number) for rank in range(6)]
        if number % 20 == 10:
            if what == "behind the agent":
                for rank in range(6):
                    mesh.slice(gpus=rank).forget_agent.broadcast()
                continue
            uids = [runtime.agent.uid] if what == "agent" else [lane.peer.address.uid for lane in mesh.take.lanes]
            for uid in uids:
                peer = runtime.peers[uid]
                if peer.usual is not None:
                    peer.ended(peer.usual, Evidence("cut"))
        if number % 7 == 0:
            await asyncio.sleep(0.01)
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert not [answer for answer in answers if isinstance(answer, BaseException) and not isinstance(answer, ActorDied)]
    number = 60
    async with asyncio.timeout(10):
        while [number] * 6 != list((await errors.call(number)).values()):  # a session's end may still be on its way
            number += 1
    assert [999] * 6 == [await mesh.slice(gpus=rank).take.call_one(999) for rank in range(6)]
    for seen in (await mesh.all.call()).values():
        order = [number % 1000 for number in seen]
        assert order == sorted(order)
        assert len(seen) == len(set(seen))
    await until(lambda: [0] * 6 == [lane.messages for lane in mesh.take.lanes])
