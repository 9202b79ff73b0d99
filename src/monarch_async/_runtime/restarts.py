"""Carries out what a `Supervision` instructs, and tells it the outcome.

Theory: the engine is told what happens to its children and answers with lives to stop and to start. A `Driver` hands these to a `Crew`,
which knows what a child is, in tasks of their own, since both take time; so what a crash loop costs is some tasks, and messages,
siblings and shutdown go on beside it.

Rules:

* What a crew could not start has failed: that is told to the engine as the end of that life, and counts.
* Of one batch the stops are begun before the starts; a start of a child waits for the end of the stop of the same child, since the engine
  does not start what has not ended.
* Lives to start are started at once, or, `one_by_one`, each when the one before it is up.
* When the engine ends, the crew is told so once: `ended`, with the failure that was once too often, if that is why.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Protocol

from monarch_async._core.events import Failure
from monarch_async._core.instructions import Cause, Escalate, Exit, Finished, Instruction, Life, Removed, Start, Stop
from monarch_async._core.supervision import AutoShutdown, Supervision
from monarch_async._core.supervision_states import ChildState, Phase
from monarch_async._runtime.tasks import TaskSet
from monarch_async.instrument import on_restart
from monarch_async.restart import Restart

__all__ = ["Crew", "Driver"]


class Crew(Protocol):
    """Who can start and stop the children of a supervision."""

    async def start_life(self, life: Life) -> None:
        """Start a child again. Raises what it failed of."""

    async def stop_lives(self, lives: Sequence[Life]) -> None:
        """End these, the first one first; they may be started again. One that is over already, whatever has come after it, is no error."""

    def failure_of(self, life: Life, error: BaseException) -> Failure:
        """What to tell an owner of a life that could not be started."""

    def escalated(self, failure: Failure) -> None:
        """The budget is used up, or a child is gone for good: nothing is started any more, and what is there is being stopped."""

    def removed(self, life: Life, failure: Failure) -> None:
        """This life has ended and is not followed by another."""

    def ended(self, cause: Cause) -> None:
        """All children have ended, and that is it."""


class Driver:
    """One supervision, in a loop. Its methods are called on that."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        tasks: TaskSet,
        crew: Crew,
        name: str,
        size: int,
        restart: Restart,
        auto_shutdown: AutoShutdown = "never",
        *,
        one_by_one: bool = False,
    ) -> None:
        self._loop = loop
        self._tasks = tasks
        self._crew = crew
        self._name = name
        self.engine = Supervision(size, restart, random=random.random, auto_shutdown=auto_shutdown)
        self._one_by_one = one_by_one
        self._failures: dict[int, Failure] = {}  # the last of each child
        self._failed: dict[int, int] = {}  # the life that it was of
        self._timer: asyncio.TimerHandle | None = None

    @property
    def supervises(self) -> bool:
        """Whether it still starts anything."""
        return self.engine.phase is Phase.SUPERVISING

    def comes_back(self, child: int) -> bool:
        """Whether a child that has ended is being started again, or will be."""
        return self.supervises and self.engine.state(child) in (ChildState.DELAYED, ChildState.STARTING, ChildState.STOPPING)

    def started(self, child: int) -> None:
        """The first life of a child is up, unless that is over already."""
        if not self.engine.incarnation(child):
            self._follow(self.engine.started(child, 0, self._loop.time()))

    def exited(self, life: Life, reason: Exit, failure: Failure) -> None:
        """This life has ended by itself, or with something that was restarted."""
        if life.incarnation == self.engine.incarnation(life.child):
            self._failures[life.child], self._failed[life.child] = failure, life.incarnation
        self._follow(self.engine.exited(*life, reason, self._loop.time()))

    def shutdown(self) -> None:
        """Start nothing any more. The children are for whoever asks for this to stop."""
        self._stop_timer()
        if self.supervises:
            self.engine.shutdown()

    def _follow(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Stop):
                self._tasks.start(self._stop(instruction.lives), name=f"stopping members of {self._name}")
            elif isinstance(instruction, Start):
                if self._one_by_one:
                    self._tasks.start(self._start_in_turn(instruction.lives), name=f"starting children of {self._name} again")
                for life in () if self._one_by_one else instruction.lives:
                    self._tasks.start(self._start(life), name=f"starting {self._name}[{life.child}] again")
            elif isinstance(instruction, Escalate):
                failure = self._failures[instruction.life.child]
                self._crew.escalated(failure._replace(reason=f"{failure.reason}; not started again: {instruction.text}"))
            elif isinstance(instruction, Removed):
                self._crew.removed(instruction.life, self._failures[instruction.life.child])
            elif isinstance(instruction, Finished):
                self._crew.ended(instruction.cause)
        self._stop_timer()
        due = self.engine.next_due()
        if due is not None:
            self._timer = self._loop.call_at(due, self._due)

    def _due(self) -> None:
        if not self._tasks.closed:
            self._follow(self.engine.due(self._loop.time()))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _start_in_turn(self, lives: Sequence[Life]) -> None:
        for life in lives:
            # Else an end of another one meanwhile has taken it along.
            if self.engine.incarnation(life.child) == life.incarnation and self.engine.state(life.child) is ChildState.STARTING:
                await self._start(life)

    async def _start(self, life: Life) -> None:
        for told in on_restart:
            told(self._tasks, self._failures[life.child] if self._failed.get(life.child) == life.incarnation - 1 else None)
        try:
            await self._crew.start_life(life)
        except Exception as error:
            self.exited(life, Exit.ABNORMAL, self._crew.failure_of(life, error))
        else:
            self._follow(self.engine.started(*life, self._loop.time()))

    async def _stop(self, lives: Sequence[Life]) -> None:
        await self._crew.stop_lives(lives)
        for life in lives:
            self._follow(self.engine.stopped(*life, self._loop.time()))
