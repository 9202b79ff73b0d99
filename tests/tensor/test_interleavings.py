"""Groups in a simulated world, in many interleavings: each seed is one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from monarch_async.errors import CollectiveError, CollectiveMismatch, PeerLost
from monarch_async.tensor.operation import Operation
from monarch_async.tensor.presence import PATIENCE
from monarch_async.tensor.signature import Signature
from tests.tensor.simulated import Life, World

FAILED = (PeerLost, CollectiveError)
SEEDS = [range(40), pytest.param(range(40, 1000), marks=[pytest.mark.slow, pytest.mark.timeout(600)])]


def tell_all(monkeypatch: pytest.MonkeyPatch, seeds: range, story: Callable[[World, int], Any]) -> None:
    """A story, with none to five accidents, in one world for each seed."""
    for seed in seeds:
        with monkeypatch.context() as patch:
            world = World(patch, 2 + seed % 3, seed, unreachable=0.1 * (seed % 2))
            try:
                world.run(story(world, seed % 6))
            except BaseException as error:
                error.add_note(f"seed {seed}")
                raise


async def agree(life: Life) -> None:
    """On the step to go on at."""
    known = [step for step in await life.do("agree", life.step) if step >= 0]
    life.step = min(known, default=0)


async def step(life: Life) -> None:
    """The next one, in which all are at the same."""
    now = life.step
    assert [now] * life.world.size == await life.do("step", now, moves=now % 2 == 1)
    life.step = now + 1


async def trains(life: Life) -> None:
    """What docs/collectives.md has: after an error all agree on where to begin again. No two operations that differ ever meet."""
    synced = False
    while True:
        try:
            if not synced:
                await life.ready()
                await agree(life)
                synced = True
            await step(life)
        except CollectiveMismatch:
            raise
        except FAILED:
            synced = False


async def gives_up_at_times(life: Life) -> None:
    """The same where operations are cancelled, most likely amid forming too."""
    dice = life.world.dice
    synced = False
    while True:
        try:
            async with asyncio.timeout(dice.choice((0.02, 1000.0, 1000.0, 1000.0))):
                if not synced:
                    if dice.random() < 0.7:
                        await life.ready()
                    await agree(life)
                    synced = True
                await step(life)
        except CollectiveMismatch:
            raise
        except (*FAILED, TimeoutError):
            synced = False


async def accidents(world: World, program: Callable[[Life], Any], count: int, steps: int) -> None:
    """So many members are lost, at any time, one perhaps before the last one is back; all get on afterwards."""
    dice = world.dice
    tasks: dict[Life, asyncio.Task[None]] = {}

    def start(life: Life) -> None:
        tasks[life] = asyncio.create_task(program(life))

    def restart(rank: int) -> None:
        start(world.restart(rank))

    for life in world.begin():
        start(life)
    for _ in range(count):
        await asyncio.sleep(dice.choice((0.0, 0.005, 0.05, 0.3)) * dice.uniform(0.5, 1.5))
        there = [life for life in world.lives if life.there]
        if there:
            life = dice.choice(there)
            (world.kill if dice.random() < 0.7 else world.fail)(life.rank)
            tasks.pop(life).cancel()
            world.loop.call_later(dice.choice((0.001, 0.02, 0.2)), restart, life.rank)
    await asyncio.sleep(1.0)
    ends = max(life.step for life in tasks) + steps
    while any(life.step < ends for life in tasks):
        for task in tasks.values():
            if task.done():
                task.result()
        await asyncio.sleep(0.05)
    for task in tasks.values():
        task.cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)


@pytest.mark.parametrize("program", [trains, gives_up_at_times])
@pytest.mark.parametrize("seeds", SEEDS)
def test_all_begin_again_at_one_point(monkeypatch: pytest.MonkeyPatch, program: Callable[[Life], Any], seeds: range) -> None:
    """Whatever dies when, and whoever hears of it when: no operation meets another one, all get on, `ready` gives nothing that was over."""
    tell_all(monkeypatch, seeds, lambda world, count: accidents(world, program, count, 5))


class Controller:
    """Calls all members and waits for all answers, as a call on a mesh does with `return_exceptions`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.accidents = 0
        self._calls: dict[int, asyncio.Task[Any]] = {}
        for life in world.begin():
            life.called = False

    async def call(self, handler: Callable[[Life], Any], timeout: float | None = None) -> list[Any]:
        """What each has, or the error; a string of one that was lost meanwhile."""
        self._calls = {rank: asyncio.create_task(self._begin(rank, handler)) for rank in range(self.world.size)}
        await asyncio.wait(self._calls.values(), timeout=timeout)
        for call in self._calls.values():
            self.world.later(call.cancel)
        return await asyncio.gather(*self._calls.values(), return_exceptions=True)

    async def _begin(self, rank: int, handler: Callable[[Life], Any]) -> Any:
        life = self.world.lives[rank]
        life.called = True
        try:
            await asyncio.sleep(self.world.latency())
            return await handler(life) if life.there else "lost"
        finally:
            life.called = False

    async def accident(self) -> None:
        """One is lost, and later started again."""
        world, dice = self.world, self.world.dice
        there = [life for life in world.lives if life.there]
        if there:
            life = dice.choice(there)
            self.accidents += 1
            (world.kill if dice.random() < 0.7 else world.fail)(life.rank)
            if life.rank in self._calls:
                self._calls[life.rank].cancel()
            world.loop.call_later(dice.choice((0.05, 0.2)), self._restart, life.rank)

    def _restart(self, rank: int) -> None:
        self.world.restart(rank).called = False


async def driven(world: World, count: int) -> None:
    """Steps that a controller drives. After an error it asks until all are in one epoch: then a step fails for what is new alone."""
    controller, dice = Controller(world), world.dice
    finished, step, known = 0, 0, 0

    async def loses() -> None:
        for _ in range(count):
            await asyncio.sleep(dice.choice((0.0, 0.005, 0.05, 0.3)) * dice.uniform(0.5, 1.5))
            await controller.accident()

    async def does(life: Life) -> None:
        for part in range(2):
            if dice.random() < 0.3:
                await asyncio.sleep(dice.choice((0.01, 0.1)))
            value = 2 * step + part
            assert [value] * world.size == await life.do("step", value, moves=part == 1)

    loser = asyncio.create_task(loses())
    while not loser.done() or finished < 3:
        accidents = controller.accidents
        gives_up = dice.random() < 0.2
        step += 1
        results = await controller.call(does, dice.uniform(0.0, 0.1) if gives_up else None)
        for result in results:
            assert not isinstance(result, CollectiveMismatch)
            assert result is None or result == "lost" or isinstance(result, (*FAILED, asyncio.CancelledError)), repr(result)
        if all(result is None for result in results):
            finished += 1
            continue
        assert finished == 0 or gives_up or controller.accidents > accidents or accidents > known, results
        finished = 0
        while True:
            accidents = controller.accidents
            numbers = await controller.call(Life.ready)
            if all(isinstance(number, int) for number in numbers) and len(set(numbers)) == 1:
                known, finished = accidents, 1
                break
            assert "lost" in numbers or controller.accidents > accidents, numbers
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("seeds", SEEDS)
def test_a_controller_drives_steps(monkeypatch: pytest.MonkeyPatch, seeds: range) -> None:
    """After an error it asks all until they are ready in one epoch; no call waits for ever, and then steps fail for what is new alone."""
    tell_all(monkeypatch, seeds, driven)


def holds(world: World, source: int, to: int, until: float, what: Callable[[tuple[Any, ...]], bool]) -> None:
    """Keep messages of one rank to another back until then."""
    before = world.hold
    world.hold = lambda a, b, message: (
        max(0.0, until - world.loop.time()) if (a, b) == (source, to) and what(message) else before(a, b, message)
    )


def test_a_late_refusal_ends_nothing_that_was_called_since(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two members give up what waits for a third one, and call anew; only then they hear of each other, which is about the first."""
    world = World(monkeypatch, 3, 1)

    async def story() -> None:
        lives = world.begin()[:2]
        for rank in (0, 1):
            holds(world, 2, rank, 2.0, lambda message: True)  # so that nothing is formed
        await asyncio.sleep(0.5)
        first = [asyncio.create_task(life.do("first", 1)) for life in lives]
        await asyncio.sleep(0.1)
        holds(world, 0, 1, 1.5, lambda message: True)
        holds(world, 1, 0, 1.5, lambda message: True)
        for call in first:
            call.cancel()
        assert all(isinstance(outcome, asyncio.CancelledError) for outcome in await asyncio.gather(*first, return_exceptions=True))
        second = [asyncio.create_task(life.do("second", 2)) for life in lives]
        await asyncio.sleep(0.2)  # the third one has heard of both
        second.append(asyncio.create_task(world.lives[2].do("second", 2)))
        assert [[2, 2, 2]] * 3 == await asyncio.gather(*second)

    world.run(story())


def test_a_refusal_is_told_to_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """One member gives up what two of them wait with: the other one is told, and not only when its time is over."""
    world = World(monkeypatch, 3, 1)

    async def story() -> None:
        lives = world.begin()[:2]
        for rank in (0, 1):
            holds(world, 2, rank, 2.0, lambda message: True)
        await asyncio.sleep(0.5)
        first = [asyncio.create_task(life.do("first", 1)) for life in lives]
        await asyncio.sleep(0.1)
        first[0].cancel()
        with pytest.raises(CollectiveError, match="rank 0 of members has cancelled first"):
            await first[1]
        assert world.loop.time() < 1.0

    world.run(story())


@pytest.mark.parametrize("heavy", [False, True], ids=["small", "heavy"])
def test_what_can_not_be_prepared_ends_the_epoch(monkeypatch: pytest.MonkeyPatch, heavy: bool) -> None:
    """Where there is no memory for a copy, that is what is awaited raises, and not the call; all are told, and get on in the next epoch."""
    world = World(monkeypatch, 3, 1)

    def prepare(backend: Any) -> None:
        raise MemoryError("no memory for a copy")

    async def story() -> None:
        lives = world.begin()
        await asyncio.gather(*(life.ready() for life in lives))
        future = lives[0].group.submit(Operation(Signature("sum"), prepare=prepare, heavy=heavy), None, "")
        with pytest.raises(CollectiveError, match="failed at rank 0: no memory for a copy"):
            await future
        await asyncio.sleep(0.1)  # by the world's clock; then the others have heard of it
        with pytest.raises(CollectiveError, match="failed at rank 0: no memory for a copy"):
            await lives[1].do("next", 7)
        assert 1 == len(set(await asyncio.gather(*(life.ready() for life in lives))))
        assert [[7, 7, 7]] * 3 == await asyncio.gather(*(life.do("next", 7) for life in lives))
        assert world.loop.time() < 5.0

    world.run(story())


def test_who_says_nothing_is_waited_for_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member whose loop is held up tells nobody whether it is ready: the others take it as it was."""
    world = World(monkeypatch, 3, 1)

    async def story() -> None:
        lives = world.begin()
        assert [0, 0, 0] == await asyncio.gather(*(life.ready() for life in lives))
        asked = world.loop.time()
        holds(world, 2, 0, asked + 100.0, lambda message: "there" in message)
        assert [0, 0] == await asyncio.gather(*(life.ready() for life in lives[:2]))
        assert PATIENCE <= world.loop.time() - asked < PATIENCE + 0.1

    world.run(story())


def test_lives_that_ended_with_the_one_before_are_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are started again; word of the end of a life before comes late to a new one, and fails nothing that waits for all."""
    world = World(monkeypatch, 3, 1)

    async def story() -> None:
        world.begin()
        await asyncio.sleep(0.5)
        for rank in range(3):
            world.fail(rank)
        await asyncio.sleep(0.5)
        lives = [world.restart(rank) for rank in range(3)]
        calls = [asyncio.create_task(life.do("sum", 1)) for life in lives]
        await asyncio.sleep(0)
        for rank in range(1, 3):
            lives[0].circle.hear_of_end(rank, 0)
        assert [[1, 1, 1]] * 3 == await asyncio.gather(*calls)

    world.run(story())
