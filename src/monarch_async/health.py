"""What is known of a process's health: its state, for how long, and what it is in the middle of.

The host's agent tells it, which runs no user code, so the answer comes whatever the process does.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

__all__ = ["Health", "ProcState"]


class ProcState(enum.StrEnum):
    """Where a process is in its life. Only `failed` and `stopped` are ends; nothing is killed for any of the others unless asked for."""

    STARTING = "starting"
    """Asked for; its event loop does not run yet."""
    READY = "ready"
    """Nothing to do."""
    BUSY = "busy"
    """A handler runs or messages wait, and the event loop answers."""
    STUCK = "stuck"
    """The event loop has not come round for the option `stuck_after`: something blocks it."""
    FROZEN = "frozen"
    """Halted by a signal (SIGSTOP), until SIGCONT."""
    UNREACHABLE = "unreachable"
    """The agent of its host does not answer, so nothing is known."""
    FAILED = "failed"
    """It ended, and nobody had asked for that."""
    RESTARTING = "restarting"
    """It ended, and another is being started in its place."""
    STOPPED = "stopped"
    """It ended because it was told to, or by itself with exit code 0."""


class Health(NamedTuple):
    """One process, as its host's agent sees it. All times are in seconds.

    `since` is the age of the state, without the time for which the process was frozen. `actor` and `endpoint` are what runs, for `running`
    seconds: where several handlers do, the one that has for longest; for a stuck process what its event loop is in. Empty where that is not
    known. `stack` is the Python stack of a stuck process, innermost call last, and `why` says in words what the state comes from.
    """

    state: ProcState
    since: float = 0.0
    pid: int = 0
    actor: str = ""
    endpoint: str = ""
    running: float = 0.0
    stack: str = ""
    why: str = ""

    @property
    def place(self) -> str:
        """What runs, as ``actor.endpoint``; empty where that is not known."""
        return f"{self.actor}.{self.endpoint}" if self.actor else self.endpoint

    def __str__(self) -> str:
        inside = f" in {self.place} for {self.running:.1f} s" if self.place else ""
        return f"{self.state} for {self.since:.1f} s{inside}{f': {self.why}' if self.why else ''}"
