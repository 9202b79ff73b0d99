"""Members of a group in a simulated world: one loop, whose clock jumps; messages, threads, news of deaths each take a time that is drawn.

The groups are the real ones, with all that makes them form and end. In place of processes there are queues: what one process sends another
arrives in order, and of what a killed one had sent last nothing may arrive. A seed gives one interleaving, the same every time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import selectors
import threading
from collections.abc import Callable, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from monarch_async._core.codec import loads
from monarch_async.errors import PeerLost
from monarch_async.ids import ProcAddress
from monarch_async.tensor import epoch as epoch_module
from monarch_async.tensor.epoch import Epoch, Stage
from monarch_async.tensor.group import Group
from monarch_async.tensor.membership import Circle
from monarch_async.tensor.operation import Operation
from monarch_async.tensor.signature import Signature

__all__ = ["Life", "World"]

LIMIT = 2000.0
"""Seconds, of the world's clock, for a whole story: what takes longer hangs."""


class _Selector(selectors.DefaultSelector):
    loop: JumpingLoop

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "nothing is left that could happen"
        self.loop.now += max(0.0, timeout)
        return super().select(0)


class JumpingLoop(asyncio.SelectorEventLoop):
    """One whose time passes at once when there is nothing to do."""

    def __init__(self) -> None:
        selector = _Selector()
        selector.loop = self
        self.now = 0.0
        super().__init__(selector)

    def time(self) -> float:
        return self.now


class _Tasks:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def start(self, coroutine: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
        return self._loop.create_task(coroutine, name=name)


class _Moving:
    """A work of the backend's."""

    def __init__(self, backend: _Backend) -> None:
        self.backend = backend

    def when_done(self, told: Callable[[BaseException | None], None]) -> None:
        world = self.backend.world
        self.told = told
        self.handle = world.loop.call_later(world.latency(), self.end, None)
        self.backend.works.append(self)

    def end(self, error: BaseException | None) -> None:
        if self in self.backend.works:
            self.backend.works.remove(self)
            self.handle.cancel()
            self.told(error)


class _Backend:
    """Connects, or now and then does not; moves nothing, in some time."""

    torch_name, agrees, tag, process_group = "none", False, 0, None

    def __init__(self, world: World) -> None:
        self.world = world
        self.works: list[_Moving] = []

    def connect(self, store: Any, me: int, size: int, timeout: float) -> None:
        if self.world.dice.random() < self.world.unreachable:
            raise OSError("not reached")

    def abort(self) -> None:
        for work in list(self.works):
            self.world.loop.call_later(self.world.latency(), work.end, OSError("broken off"))

    def close(self) -> None:
        assert not self.works


class _Circle(Circle):
    """What a life knows of the others in this world."""

    def __init__(self, world: World, life: Life, me: Any) -> None:
        self.world = world
        self.life = life
        super().__init__(me)

    def watch(self, rank: int) -> None:
        if rank != self.me.rank and rank not in self._watches:
            self._watches[rank] = None  # type: ignore[assignment]
            other = self.world.lives[rank] if rank < len(self.world.lives) else None
            if other is not None and not other.there:
                self.world.later(self.news, rank, other.incarnation)

    def news(self, rank: int, incarnation: int) -> None:
        """Word of the end of a life has come, unless whoever has begun to watch only now watches the next life."""
        if not self.world.lives[rank].there or self.world.dice.random() >= 0.3:
            self.hear_of_end(rank, incarnation)

    def hear_of_end(self, rank: int, incarnation: int) -> None:
        """What `_watch` of a circle does when a life ends."""
        known = self._lives.get(rank)
        if known is None or known == incarnation:
            text = f"members[{rank}] is gone"
            self.has_ended(incarnation, PeerLost(text, mesh="members", rank=rank, incarnation=known or 0, reason="killed"))
        if self.is_gone(rank):
            self._tell_groups(rank, self.lost[rank])

    def wire_to(self, rank: int) -> Any:
        world, process = self.world, self.address_of(rank).uid
        if process in world.killed and world.dice.random() < 0.5:  # that its place is taken is known here, or not yet
            process = world.address(rank).uid
        return SimpleNamespace(cast=lambda name, _, body, buffers, __: world.send(self.life, rank, process, body, buffers))

    def is_gone(self, rank: int) -> bool:
        return rank in self.lost and rank in self.world.gone


class _Me:
    """In place of a `Membership`."""

    key, name, why_over = 1, "members", ""

    def __init__(self, life: Life, runtime: Any, addresses: Sequence[ProcAddress]) -> None:
        self.life, self.runtime, self.addresses = life, runtime, addresses
        self.rank, self.incarnation = life.rank, life.incarnation

    @property
    def called(self) -> bool:
        return self.life.called

    def when_over(self, told: Callable[[str], None]) -> None:
        pass


class Life:
    """One life of one member, and the process that it is in."""

    def __init__(self, world: World, rank: int, incarnation: int, process: str) -> None:
        self.world, self.rank, self.incarnation, self.process = world, rank, incarnation, process
        self.there = True
        self.called = True  # whether a handler is under way
        self.step = -1  # it knows none
        addresses = [_address(other, f"{other}.0") for other in range(world.size)]  # where all were spawned
        addresses[rank] = mine = _address(rank, process)
        runtime = SimpleNamespace(
            loop=world.loop,
            me=mine,
            log=logging.getLogger("simulated"),
            tasks=_Tasks(world.loop),
            stopping=None,
            thread=threading.get_ident(),
        )
        self.circle = _Circle(world, self, _Me(self, runtime, addresses))
        world.lives[rank : rank + 1] = [self]
        world.processes[process] = self
        self.group = Group(self.circle, tuple(range(world.size)), "members", lambda: _Backend(world), 1e9, "always")  # type: ignore[arg-type, return-value]

    async def do(self, kind: str, value: int, *, moves: bool = False) -> list[int]:
        """An operation; what all members have brought to it."""
        views: list[Signature] = []

        def launch(backend: Any, said: Sequence[Signature]) -> Any:
            views.extend(said)
            return _Moving(backend) if moves else None

        def finish() -> list[int]:
            return [view.own[0] for view in views]

        operation = Operation(Signature(kind, (), (value,)), launch=launch, finish=finish)
        result: list[int] = await self.group.submit(operation, None, "")
        return result

    async def ready(self) -> int:
        """See `Communicator.ready`; what it gives was over nowhere before the call."""
        called = self.world.loop.time()
        number = await self.group.wait_ready()
        epoch = self.group.epoch
        assert epoch is not None
        assert epoch.number == number
        assert self.world.over.get(epoch.token, called) >= called, f"epoch {number} had ended before rank {self.rank} asked"
        return number


class World:
    """See the module's text. `unreachable`: how often connecting fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int, seed: int, *, unreachable: float = 0.0) -> None:
        self.dice = random.Random(seed)
        self.size = size
        self.unreachable = unreachable
        self.loop = JumpingLoop()
        self.lives: list[Life] = []
        self.processes: dict[str, Life] = {}  # the life that each has, or had
        self.killed: set[str] = set()
        self.gone: set[int] = set()  # ranks that are not started again
        self.over: dict[str, float] = {}  # epochs, by their tokens, and when they ended first
        self.numbers: dict[str, int] = {}
        self._links: dict[tuple[str, str], float] = {}  # when the last message arrives
        self._cut: dict[tuple[str, str], float] = {}  # what would arrive later is lost
        self.hold: Callable[[int, int, tuple[Any, ...]], float] = lambda source, to, message: 0.0
        """More seconds for a message between two ranks."""
        world = self

        class Thread:
            def __init__(self, target: Callable[..., None], args: tuple[Any, ...] = (), **_: Any) -> None:
                self._run = target, args

            def start(self) -> None:
                world.later(self._run[0], *self._run[1])

        end, formed = Epoch.end, Group.epoch_ready

        def noted(epoch: Epoch, error: BaseException) -> bool:
            if epoch.stage is Stage.READY:
                world.over.setdefault(epoch.token, world.loop.time())
            return end(epoch, error)

        def ready(group: Group, epoch: Epoch) -> None:
            assert epoch.number == world.numbers.setdefault(epoch.token, epoch.number)
            assert epoch.number > group.number
            formed(group, epoch)

        monkeypatch.setattr(epoch_module, "threading", SimpleNamespace(Thread=Thread))
        monkeypatch.setattr(epoch_module, "enter", _nothing)
        monkeypatch.setattr(epoch_module, "remove", _nothing)
        monkeypatch.setattr(Epoch, "end", noted)
        monkeypatch.setattr(Group, "epoch_ready", ready)

    def run(self, story: Coroutine[Any, Any, Any]) -> Any:
        """Until it is told; what it gives."""
        asyncio.set_event_loop(self.loop)
        try:
            return self.loop.run_until_complete(asyncio.wait_for(story, LIMIT))
        finally:
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            asyncio.set_event_loop(None)
            self.loop.close()

    def latency(self) -> float:
        return self.dice.choice((0.0001, 0.001, 0.001, 0.01, 0.03)) * self.dice.uniform(0.5, 1.5)

    def later(self, what: Callable[..., object], *args: Any) -> None:
        self.loop.call_later(self.latency(), what, *args)

    def address(self, rank: int) -> ProcAddress:
        return _address(rank, self.lives[rank].process if rank < len(self.lives) else f"{rank}.0")

    def begin(self) -> list[Life]:
        """The first life of all."""
        return [Life(self, rank, 0, f"{rank}.0") for rank in range(self.size)]

    def send(self, source: Life, rank: int, process: str, body: Any, buffers: Any) -> None:
        if source.process in self.killed:
            return
        link = source.process, process
        args = loads(body, buffers)[0]
        delay = self.latency() + self.hold(source.rank, rank, args)
        when = self._links[link] = max(self._links.get(link, 0.0) + 1e-6, self.loop.time() + delay)
        self.loop.call_at(when, self._arrive, link, when, args)

    def _arrive(self, link: tuple[str, str], when: float, args: tuple[Any, ...]) -> None:
        if when > self._cut.get(link, when):
            return
        life = self.processes.get(link[1])
        if life is not None and life.there:
            _, name, what, *rest = args
            group = life.circle.groups.get(name)
            if group is not None:
                group.heard(what, *rest)

    def kill(self, rank: int) -> Life:
        """With its process; the others hear of it, each in its time."""
        life = self.lives[rank]
        now = self.loop.time()
        if life.group.ready and life.group.epoch is not None:
            self.over.setdefault(life.group.epoch.token, now)
        for link, last in self._links.items():
            if link[0] == life.process:
                self._cut[link] = self.dice.uniform(now, max(now, last))
        self.killed.add(life.process)
        self._end(life, "killed")
        return life

    def fail(self, rank: int) -> Life:
        """Only its actor, in a process that lives."""
        life = self.lives[rank]
        self._end(life, "failed")
        return life

    def _end(self, life: Life, why: str) -> None:
        life.group.close(why)
        life.there = False
        for other in self.lives:
            if other.there:
                self.later(other.circle.news, life.rank, life.incarnation)

    def restart(self, rank: int) -> Life:
        before = self.lives[rank]
        assert not before.there
        incarnation = before.incarnation + 1
        return Life(self, rank, incarnation, f"{rank}.{incarnation}" if before.process in self.killed else before.process)

    def give_up(self, rank: int) -> None:
        """It will not be started again."""
        self.gone.add(rank)
        for other in self.lives:
            if other.there:
                with contextlib.suppress(KeyError):
                    self.later(other.circle._tell_groups, rank, other.circle.lost[rank])


def _address(rank: int, process: str) -> ProcAddress:
    return ProcAddress(process, "host", "", "", "procs", rank)


def _nothing(*_: Any) -> None:
    pass
