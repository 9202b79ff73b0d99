"""Calls that wait for each other in a circle are refused at once, with the chain; calls that only look like it are not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from monarch_async import Actor, DeadlockError, ProcMesh, concurrent_endpoint, endpoint, this_proc


class Node(Actor):
    def __init__(self) -> None:
        self.me: Any = None
        self.next: Any = None
        self.count = 0
        self.kept: list[Any] = []

    @endpoint
    async def link(self, me: Any, following: Any) -> None:
        self.me, self.next = me, following

    @endpoint
    async def ping(self) -> str:
        self.count += 1
        return "pong"

    @endpoint
    async def around(self, steps: int, how: str = "await") -> str:
        """Call the next actor, which does the same, `steps` times; the last calls `ping`."""
        future = self.next.around.call_one(steps - 1, how) if steps > 1 else self.next.ping.call_one()
        return str(await self.await_(future, how))

    async def await_(self, future: Any, how: str) -> Any:
        if how == "gather":
            return (await asyncio.gather(asyncio.sleep(0), future))[1]
        if how == "wait_for":
            return await asyncio.wait_for(future, 60)
        if how == "shield":
            return await asyncio.shield(future)
        if how == "wait":
            done, _ = await asyncio.wait([future])
            return done.pop().result()
        if how == "coroutines":
            return (await asyncio.gather(asyncio.sleep(0), self.await_(future, "await")))[1]
        if how == "group":
            async with asyncio.TaskGroup() as group:
                task = group.create_task(self.await_(future, "await"))
            return task.result()
        return await future

    @endpoint
    def around_in_thread(self, steps: int) -> str:
        future = self.next.around_in_thread.call_one(steps - 1) if steps > 1 else self.next.ping.call_one()
        result: str = future.get()
        return result

    @concurrent_endpoint
    async def around_beside(self, steps: int) -> Any:
        return await (self.next.around_beside.call_one(steps - 1) if steps > 1 else self.next.ping.call_one())

    @endpoint
    async def not_awaited(self) -> str:
        """Ask oneself something, and go on."""
        self.kept.append(self.me.ping.call_one())
        await asyncio.sleep(0.2)
        return "went on"

    @endpoint
    async def notify_back(self, steps: int) -> str:
        """The last of the circle calls the first without awaiting it."""
        if steps > 1:
            return str(await self.next.notify_back.call_one(steps - 1))
        self.kept.append(self.next.ping.call_one())
        await asyncio.sleep(0.2)
        return "told"

    @endpoint
    async def either(self) -> str:
        """Wait for oneself or for something that does happen."""
        future, other = self.me.ping.call_one(), asyncio.ensure_future(asyncio.sleep(0.2))
        self.kept.append(future)
        done, _ = await asyncio.wait([future, other], return_when=asyncio.FIRST_COMPLETED)
        return "the other" if done == {other} else "itself"

    @endpoint
    async def detached(self) -> None:
        self.kept.append(asyncio.ensure_future(self.me.ping.call_one()))

    @endpoint
    async def kept_results(self) -> list[Any]:
        kept, self.kept = self.kept, []
        return list(await asyncio.gather(*kept))


async def circle(*places: ProcMesh) -> list[Any]:
    """One node in each place, linked in a circle."""
    nodes = [place.spawn(f"node{index}", Node) for index, place in enumerate(places)]
    await asyncio.gather(*(node.link.call_one(node, nodes[(index + 1) % len(nodes)]) for index, node in enumerate(nodes)))
    return nodes


@pytest.mark.parametrize("how", ["await", "gather", "wait_for", "shield", "wait", "coroutines", "group"])
async def test_case_18_an_actor_that_awaits_itself(how: str) -> None:
    """In whatever way it awaits, it is told at once, and takes the next call."""
    [node] = await circle(this_proc())

    async with asyncio.timeout(1):
        with pytest.raises((DeadlockError, ExceptionGroup)) as caught:
            await node.around.call_one(1, how)
    error: Any = caught.value
    assert "node0[0].around → node0[0].ping" in str(error if how != "group" else error.exceptions[0])
    assert "pong" == await node.ping.call_one()


@pytest.mark.parametrize("length", [1, 2, 3])
async def test_case_18_circles_through_processes(pair: ProcMesh, length: int) -> None:
    """The chain names every handler, first to last; afterwards all take calls again. In threads too."""
    places = [pair.slice(gpus=0), pair.slice(gpus=1), this_proc()][:length]
    nodes = await circle(*places)

    async with asyncio.timeout(3):
        with pytest.raises(DeadlockError) as caught:
            await nodes[0].around.call_one(length)
    expected = [f"node{index}[0].around" for index in range(length)] + ["node0[0].ping"]
    assert expected == list(caught.value.chain) or " → ".join(expected) in str(caught.value)
    async with asyncio.timeout(3):
        with pytest.raises(DeadlockError, match=r"around_in_thread → node0\[0\]\.ping"):
            await nodes[0].around_in_thread.call_one(length)
    assert ["pong"] * length == await asyncio.gather(*(node.ping.call_one() for node in nodes))


async def test_what_only_looks_like_a_deadlock_goes_through(pair: ProcMesh) -> None:
    """Concurrent handlers, calls that are not awaited here or at the other end of the circle, waiting for either of two, detached tasks."""
    first, second = await circle(pair.slice(gpus=0), pair.slice(gpus=1))
    async with asyncio.timeout(10):
        assert "pong" == await first.around_beside.call_one(2)
        for node in (first, second):
            assert "went on" == await node.not_awaited.call_one()
            assert "the other" == await node.either.call_one()
            await node.detached.call_one()
            assert ["pong"] * 3 == await node.kept_results.call_one()
        assert "told" == await first.notify_back.call_one(2)
        assert ["pong"] == await second.kept_results.call_one()


class Rank(Actor):
    """Ranks of one mesh that make the same calls at the same time, as trainers do."""

    @endpoint
    async def who(self) -> str:
        return "answered"

    @endpoint
    async def wait_for(self, other: Any) -> str:
        return str(await other.slowly.call_one())

    @endpoint
    async def ask(self, other: Any) -> str:
        return str(await other.who.call_one())


class Slow(Actor):
    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.go = asyncio.Event()

    @concurrent_endpoint
    async def slowly(self) -> str:
        self.asked.set()
        await self.go.wait()
        return "done"

    @concurrent_endpoint
    async def until_asked(self) -> None:
        await self.asked.wait()

    @concurrent_endpoint
    async def finish(self) -> None:
        self.go.set()


async def test_ranks_that_call_in_step_are_not_taken_for_each_other(pair: ProcMesh) -> None:
    """Rank 1 calls rank 0, which waits for a third actor: no circle, though their keys and counts are the same."""
    ranks = await pair.spawn("ranks", Rank)
    slow = await this_proc().spawn("slow", Slow)
    waiting = ranks.slice(gpus=0).wait_for.call_one(slow)
    await slow.until_asked.call_one()
    asking = ranks.slice(gpus=1).ask.call_one(ranks.slice(gpus=0))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(asking), 0.3)
    await slow.finish.call_one()
    assert ["done", "answered"] == [await waiting, await asking]
