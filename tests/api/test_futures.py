"""The future of a call: awaited, waited for, called back, combined with asyncio's own tools."""

from __future__ import annotations

import asyncio
import pickle
import threading
from typing import Any

import pytest

from monarch_async import Actor, ActorError, CallTimeout, Channel, ProcMesh, UsageError, concurrent_endpoint, endpoint, this_proc


class Worker(Actor):
    def __init__(self) -> None:
        self.gate = asyncio.Event()

    @endpoint
    async def echo(self, value: Any) -> Any:
        return value

    @concurrent_endpoint
    async def wait(self) -> str:
        await self.gate.wait()
        return "open"

    @endpoint
    async def open(self) -> None:
        self.gate.set()

    @endpoint
    async def fail(self) -> None:
        raise LookupError("nothing here")


async def test_a_future_is_awaited_any_number_of_times(place: ProcMesh) -> None:
    """By several tasks too, and the answer or the error is always the same."""
    actor = place.spawn("actor", Worker)

    future = actor.echo.call_one([1])
    values = await asyncio.gather(future, future, asyncio.shield(future))
    assert [[1]] * 3 == list(values)
    assert [[1]] * 3 == [await future, future.result(), future.get()]
    failed = actor.fail.call_one()
    for _ in range(2):
        with pytest.raises(LookupError, match="nothing here"):
            await failed
    assert isinstance(failed.exception(), ActorError)


async def test_a_future_is_one_of_asyncio(place: ProcMesh) -> None:
    """wait, wait_for, as_completed, callbacks and as_asyncio work on it."""
    actor = place.spawn("actor", Worker)

    late = actor.wait.call_one()
    done, pending = await asyncio.wait([late, actor.echo.call_one(1)], return_when=asyncio.FIRST_COMPLETED)
    assert [1] == [future.result() for future in done]
    assert {late} == pending
    called: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    late.add_done_callback(lambda future: called.set_result(future.result()))
    actor.open.broadcast()
    assert "open" == await asyncio.wait_for(late.as_asyncio(), 10)
    assert "open" == await called
    assert {1, 2} == {await future for future in asyncio.as_completed([actor.echo.call_one(1), actor.echo.call_one(2)])}


async def test_get_blocks_a_thread_and_refuses_to_block_the_loop(place: ProcMesh) -> None:
    """In a thread it has the answer, the error, or TimeoutError, after which the future goes on; in the loop it is UsageError."""
    actor = place.spawn("actor", Worker)
    late = actor.wait.call_one()

    with pytest.raises(UsageError, match="use 'await' here"):
        late.get()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.01 s"):
        await asyncio.to_thread(late.get, 0.01)
    actor.open.broadcast()
    assert "open" == await asyncio.to_thread(late.get, 10)
    with pytest.raises(LookupError):
        await asyncio.to_thread(actor.fail.call_one().get)


async def test_what_stays_in_its_process_can_not_be_sent(place: ProcMesh) -> None:
    """A future, a stream and a receiver say so, and what to send instead."""
    actor = place.spawn("actor", Worker)
    _, receiver = Channel[int].open()

    future, stream = actor.echo.call_one(1), actor.echo.stream(1)
    with pytest.raises(TypeError, match="a Future stays where it was made: await it and send the result"):
        actor.echo.call_one(future)
    with pytest.raises(TypeError, match="a Stream stays where it was made"):
        actor.echo.call_one([stream])
    with pytest.raises(TypeError, match="a PortReceiver stays where it was opened"):
        actor.echo.call_one({"receiver": receiver})
    with pytest.raises(TypeError, match="a Future stays"):
        pickle.dumps(future)
    assert 1 == await future
    assert [1] == [value async for value in stream]
    receiver.close()


async def test_a_timeout_of_an_endpoint(place: ProcMesh) -> None:
    """CallTimeout, a TimeoutError that names the endpoint, in time; and the actor takes the next call."""
    actor = place.spawn("actor", Worker)
    await actor

    began = asyncio.get_running_loop().time()
    with pytest.raises(CallTimeout, match=r"no answer from actor\.wait within 0\.1 s"):
        await actor.wait.options(timeout=0.1).call_one()
    assert 0.09 < asyncio.get_running_loop().time() - began < 1  # uvloop's clock counts milliseconds
    with pytest.raises(TimeoutError):
        await actor.wait.options(timeout=0.1).call()
    with pytest.raises(TimeoutError):
        async for _ in actor.wait.options(timeout=0.1).stream():
            pass
    assert 1 == await actor.echo.options(timeout=10).call_one(1)


@pytest.mark.parametrize("wrong", [{"timeout": 0}, {"timeout": -1.0}, {"retry": -1}])
async def test_options_that_can_not_be(wrong: dict[str, Any]) -> None:
    """UsageError when they are given, not when they are used."""
    actor = this_proc().spawn("actor", Worker)

    with pytest.raises(UsageError):
        actor.echo.options(**wrong)


async def test_calls_from_many_threads_settle_once(pair: ProcMesh) -> None:
    """Four threads, each with a thousand calls: every one gets its own answer."""
    actors = pair.spawn("actors", Worker)
    wrong: list[Any] = []

    def work(number: int) -> None:
        one = actors.slice(gpus=number % 2)
        futures = [(one.echo.call_one((number, count)), (number, count)) for count in range(1000)]
        wrong.extend(expected for future, expected in futures if future.get(30) != expected)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    await asyncio.gather(*(asyncio.to_thread(thread.join) for thread in threads))
    assert [] == wrong
