"""A supervision whose invariants are checked after every event, and whose instructions read as text."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from monarch_async._core.instructions import Escalate, Exit, Finished, Instruction, Life, Removed, Start, Stop
from monarch_async._core.supervision import AutoShutdown, Supervision
from monarch_async.restart import Restart


def _lives(lives: Iterable[Life]) -> str:
    return " ".join(f"{child}.{incarnation}" for child, incarnation in lives)


def told(instructions: Iterable[Instruction]) -> list[str]:
    """``"start 0.1 2.1"``: start children 0 and 2 as incarnation 1."""
    lines = []
    for instruction in instructions:
        match instruction:
            case Stop(lives):
                lines.append(f"stop {_lives(lives)}")
            case Start(lives):
                lines.append(f"start {_lives(lives)}")
            case Removed(life):
                lines.append(f"removed {_lives([life])}")
            case Escalate(life, text):
                lines.append(f"escalate {_lives([life])}: {text}")
            case Finished(cause):
                lines.append(f"finished: {cause.value}")
    return lines


class Supervised:
    """At the time `now`, which is set by hand. Reports are on the present life unless another is named."""

    def __init__(
        self, size: int, restart: Restart, *, significant: Collection[int] = (), auto_shutdown: AutoShutdown = "never", random: float = 0.5
    ) -> None:
        self.size = size
        self.random = random
        self.core = Supervision(size, restart, random=lambda: self.random, significant=significant, auto_shutdown=auto_shutdown)
        self.core.validate()
        self.now = 0.0

    def _told(self, instructions: list[Instruction]) -> list[str]:
        self.core.validate()
        return told(instructions)

    def _incarnation(self, child: int, incarnation: int | None) -> int:
        return self.core.incarnation(child) if incarnation is None else incarnation

    def started(self, child: int, incarnation: int | None = None) -> list[str]:
        return self._told(self.core.started(child, self._incarnation(child, incarnation), self.now))

    def exited(self, child: int, reason: Exit = Exit.ABNORMAL, incarnation: int | None = None) -> list[str]:
        return self._told(self.core.exited(child, self._incarnation(child, incarnation), reason, self.now))

    def stopped(self, child: int, incarnation: int | None = None) -> list[str]:
        return self._told(self.core.stopped(child, self._incarnation(child, incarnation), self.now))

    def due(self) -> list[str]:
        return self._told(self.core.due(self.now))

    def shutdown(self) -> list[str]:
        return self._told(self.core.shutdown())

    @property
    def states(self) -> list[str]:
        return [self.core.state(child).value for child in range(self.size)]


def running(size: int, restart: Restart, **settings: Any) -> Supervised:
    """All of them up, at time 0."""
    supervised = Supervised(size, restart, **settings)
    for child in range(size):
        assert [] == supervised.started(child)
    return supervised
