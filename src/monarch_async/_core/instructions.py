"""What a supervision is told about its children, and the instructions that it answers with.

A *life* is one incarnation of a child. Reports and instructions name lives and not just children, since a report can be late: what it says
about a former life must not be taken for news of the present one.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

__all__ = ["Cause", "Escalate", "Exit", "Finished", "Instruction", "Life", "Removed", "Start", "Stop"]


class Exit(Enum):
    """How a child ended: normally, or of an exception, a signal, an exit code other than 0, or an error of its constructor.

    Or it was taken along by something else that is being restarted and counts that itself: it comes back with its group, uncounted.
    """

    NORMAL = "normal"
    ABNORMAL = "abnormal"
    TAKEN = "taken along"


class Cause(Enum):
    """Why a supervision ended."""

    SHUTDOWN = "shutdown"
    AUTOMATIC = "automatic shutdown"
    ESCALATED = "escalated"


class Life(NamedTuple):
    """One incarnation, from 0, of a child, from 0 in the order of start."""

    child: int
    incarnation: int


class Stop(NamedTuple):
    """Stop these, last to start first; each is then reported as stopped."""

    lives: tuple[Life, ...]


class Start(NamedTuple):
    """Start these lives, in this order."""

    lives: tuple[Life, ...]


class Removed(NamedTuple):
    """This life has ended, and the child is not started again, unless its group is."""

    life: Life


class Escalate(NamedTuple):
    """This life has ended, which was once too often: the failure is the owner's. The others are told to stop before."""

    life: Life
    text: str


class Finished(NamedTuple):
    """All have ended and nothing will be started any more. The last instruction, but for what stray reports need."""

    cause: Cause


Instruction = Stop | Start | Removed | Escalate | Finished
"""Told apart by type only: tuples of the same fields are equal."""
