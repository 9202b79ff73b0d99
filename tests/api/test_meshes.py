"""Meshes, references and ports travel in messages and work where they arrive; meshes are awaited and entered."""

from __future__ import annotations

from typing import Any

import pytest

from monarch_async import (
    Accumulator,
    Actor,
    Channel,
    Port,
    PortClosed,
    ProcMesh,
    context,
    endpoint,
    get_or_spawn_controller,
    send,
    this_host,
    this_proc,
)
from tests.api.waiting import until


class Member(Actor):
    def __init__(self, start: int = 0) -> None:
        self.value = start

    @endpoint
    async def add(self, number: int) -> int:
        self.value += number
        return self.value

    @endpoint
    async def rank(self) -> int:
        return int(context().actor_instance.rank.rank)

    @endpoint
    async def ask(self, mesh: Any, number: int) -> list[int]:
        await mesh
        return list((await mesh.add.call(number)).values())

    @endpoint
    async def give(self, mesh: Any) -> Any:
        return mesh.slice(gpus=1), mesh

    @endpoint
    async def spawn_on(self, procs: Any) -> Any:
        self.mine = procs.spawn("mine", Member, 100)
        return self.mine

    @endpoint
    async def stream(self, port: Port[int], count: int) -> None:
        for number in range(count):
            await port.send(number)

    @endpoint
    def stream_from_thread(self, port: Port[int], count: int) -> None:
        for number in range(count):
            port.send(number)

    @endpoint
    async def push(self, port: Port[Any]) -> None:
        port.with_rank(context().message_rank.rank).send(context().message_rank.rank * 10)

    @endpoint
    async def push_error(self, port: Port[Any]) -> None:
        port.exception(KeyError("through the port"))

    @endpoint
    async def controller(self, start: int) -> Any:
        mesh = await get_or_spawn_controller("one", Member, start)
        return await mesh.add.call_one(1)


async def test_references_work_where_they_arrive(pair: ProcMesh) -> None:
    """A whole mesh, a slice, one of this process; sent, sent back, awaited by who does not own it."""
    members = pair.spawn("members", Member)
    here = this_proc().spawn("here", Member, 1000)

    assert [1, 1] == await members.slice(gpus=0).ask.call_one(members.slice(gpus=slice(1, 2)), 1) + [1]
    assert [1001] == await members.slice(gpus=1).ask.call_one(here, 1)
    assert [11, 11] == [(await here.ask.call_one(members.slice(gpus=1), 10))[0], (await here.ask.call_one(members.slice(gpus=1), 0))[0]]
    one, whole = await here.give.call_one(members)
    assert 1 == await one.rank.call_one()
    assert [0, 1] == list((await whole.rank.call()).values())
    with pytest.raises(Exception, match="only by its owner"):
        whole.stop()


async def test_process_meshes_work_where_they_arrive(pair: ProcMesh) -> None:
    """An actor spawns on processes that it was sent."""
    members = pair.spawn("members", Member)
    mine = await members.slice(gpus=0).spawn_on.call_one(pair.slice(gpus=1))
    assert 101 == await mine.add.call_one(1)


async def test_meshes_are_entered() -> None:
    """async with waits until all is up, and stops at the end."""
    async with this_host().spawn_procs() as procs, procs.spawn("member", Member) as member:
        assert 1 == await member.add.call_one(1)
    with pytest.raises(Exception, match="died"):
        await member.add.call_one(1)


async def test_ports_keep_order_and_say_who_sent(pair: ProcMesh) -> None:
    """From another process, from a thread there, ranked, an error, once, and to a closed receiver."""
    members = pair.spawn("members", Member)
    port, receiver = Channel[Any].open()
    first = members.slice(gpus=0)
    first.stream.broadcast(port, 1000)
    assert list(range(1000)) == [await receiver.recv() for _ in range(1000)]
    first.stream_from_thread.broadcast(port, 1000)
    assert list(range(1000)) == [await receiver.recv() for _ in range(1000)]
    members.slice(gpus=1).push_error.broadcast(port)
    with pytest.raises(KeyError, match="through the port"):
        await receiver.recv()
    receiver.close()
    with pytest.raises(PortClosed):
        await receiver.recv()
    with pytest.raises(PortClosed):
        port.send(1)

    ranked, answers = Channel[Any].open_ranked()
    members.push.broadcast(ranked)
    assert {(0, 0), (1, 10)} == {await answers.recv(), await answers.recv()}

    once, single = Channel[int].open(once=True)
    once.send(5)
    with pytest.raises(PortClosed):
        once.send(6)
    assert 5 == await single.recv()


async def test_a_receiver_that_is_dropped_closes_its_port() -> None:
    """Nothing is kept for it; but what is being received still comes."""
    port, receiver = Channel[int].open()
    coming = receiver.recv()
    del receiver
    port.send(1)
    assert 1 == await coming
    del coming
    await until(lambda: port._key not in port._runtime.ports)
    with pytest.raises(PortClosed):
        port.send(2)


async def test_send_with_a_port_for_the_answers(pair: ProcMesh) -> None:
    """Every member's answer comes with its rank, errors too; or one member's; or none is wanted."""
    members = pair.spawn("members", Member)
    port, receiver = Channel[int].open_ranked()
    send(members.add, (5,), port=port)
    assert [(0, 5), (1, 5)] == sorted([await receiver.recv(), await receiver.recv()])
    send(members.add, [], {"number": 1}, port, "choose")
    assert 6 == (await receiver.recv())[1]
    await send(members.add, (1,))
    assert 13 == sum((await members.add.call(0)).values()) - 0
    send(members.give, (3,), port=port, selection="choose")
    with pytest.raises(AttributeError):
        await receiver.recv()
    with pytest.raises(TypeError, match="missing"):
        send(members.add, port=port)
    with pytest.raises(ValueError, match='selection is "all" or "choose"'):
        send(members.add, (1,), selection="some")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="an endpoint of a mesh is wanted"):
        send(Member.add)  # type: ignore[arg-type]
    receiver.close()


async def test_an_accumulator_combines_as_answers_come(pair: ProcMesh) -> None:
    """A sum over the members; the error of a member and of the function are the future's; wrong arguments raise at once."""
    members = pair.spawn("members", Member, 3)
    total = Accumulator(members.add, 0, lambda sofar, value: sofar + value)
    assert 8 == await total.accumulate(1)
    assert 10 == await total.accumulate(1)
    with pytest.raises(TypeError, match="missing"):
        total.accumulate()  # type: ignore[call-arg]
    with pytest.raises(ZeroDivisionError):
        await Accumulator(members.add, 0, lambda sofar, value: sofar // 0).accumulate(0)
    with pytest.raises(TypeError, match="unsupported operand"):
        await total.accumulate("x")  # type: ignore[arg-type]


async def test_a_controller_is_the_same_for_all(pair: ProcMesh) -> None:
    """Asked for at once from three processes, it is made once, in this one; a name belongs to one class."""
    members = pair.spawn("members", Member)
    here = get_or_spawn_controller("one", Member, 10)
    results = list((await members.controller.call(10)).values())
    controller = await here
    assert [11, 12] == sorted(results)
    assert 13 == await controller.add.call_one(1)
    assert 13 == await (await get_or_spawn_controller("one", Member, 99)).add.call_one(0)

    class Other(Actor): ...

    with pytest.raises(TypeError, match=r"the controller 'one' is a Member, not a .*Other"):
        await get_or_spawn_controller("one", Other)
    with pytest.raises(TypeError, match="positional"):
        get_or_spawn_controller("two", Member, 1, 2)  # type: ignore[call-arg]


async def test_sizes_that_are_no_mapping_are_refused() -> None:
    """A bare number names no dimension."""
    with pytest.raises(TypeError, match="per_host maps the names of dimensions to their sizes"):
        this_host().spawn_procs(4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the size of 'gpus' must be at least 1, not 0"):
        this_host().spawn_procs({"gpus": 0})


async def test_an_adverb_that_does_not_exist_is_named() -> None:
    """With those that do."""
    local = this_proc().spawn("local", Member, 0)
    with pytest.raises(AttributeError, match=r"an endpoint has call, call_one, .* and no 'call_all'"):
        local.rank.call_all()  # type: ignore[attr-defined]
    await local
