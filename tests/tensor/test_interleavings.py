"""Groups in a simulated world, in many interleavings: each seed is one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from monarch_async.errors import CollectiveError, CollectiveMismatch, PeerLost
from tests.tensor.simulated import Life, World

FAILED = (PeerLost, CollectiveError)


async def trains(life: Life) -> None:
    """What docs/collectives.md has: after an error all agree on where to begin again. No two operations that differ ever meet."""
    synced = False
    while True:
        try:
            if not synced:
                await life.ready()
                known = [step for step in await life.do("agree", life.step) if step >= 0]
                life.step = min(known, default=0)
                synced = True
            step = life.step
            assert [step] * life.world.size == await life.do("step", step, moves=step % 2 == 1)
            life.step = step + 1
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
                    known = [step for step in await life.do("agree", life.step) if step >= 0]
                    life.step = min(known, default=0)
                    synced = True
                step = life.step
                assert [step] * life.world.size == await life.do("step", step, moves=step % 2 == 1)
                life.step = step + 1
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
        there = [life for life in world.lives if life is not None and life.there]
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
def test_all_begin_again_at_one_point(monkeypatch: pytest.MonkeyPatch, program: Callable[[Life], Any]) -> None:
    """Whatever dies when, and whoever hears of it when: no operation meets another one, all get on, `ready` gives nothing that was over."""
    for seed in range(100):
        with monkeypatch.context() as patch:
            world = World(patch, 2 + seed % 3, seed, unreachable=0.1 * (seed % 2))
            try:
                world.run(accidents(world, program, seed % 6, 5))
            except BaseException as error:
                error.add_note(f"seed {seed}")
                raise
