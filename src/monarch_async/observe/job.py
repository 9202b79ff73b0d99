"""A job that runs, as whoever looks into it sees it: this program's own (`Job.here`), or another's (`attach`).

Targets are named as everywhere: ``trainer[3]`` is an actor, ``trainer`` all of that mesh, ``gpus[3]`` a process; ``client`` and ``agent``
are the program and the agent of its host; a number is a pid. A name that does not exist raises `UnknownName`, which suggests the nearest.

Rules:

* Whatever is asked ends within `patience` seconds for each process that does not answer; what that can't say itself its agent does.
* What changes something (`stop`, `kill`, `restart`, `freeze`, `thaw`, `eval`) needs a job that was attached with ``write=True``; the job
  refuses it else with `ReadOnlyError`, and logs it if not.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from monarch_async.observe.records import (
    ActorRow,
    CallRow,
    Cause,
    DeadLetterRow,
    Done,
    Evaluated,
    Event,
    Hop,
    LinkRow,
    LogLine,
    ProcRow,
    Profile,
    StackRow,
    StateRow,
    TopRow,
    Traced,
    TreeRow,
)

__all__ = ["Job", "attach"]

Target = str | int


class Job:
    """See the module's text. Use it in the event loop in which it was made."""

    name: str
    id: str

    @classmethod
    def here(cls) -> Job:
        """The job that this code belongs to. Nothing has to be closed."""
        raise NotImplementedError

    async def close(self) -> None:
        """Leave a job that was attached to."""
        raise NotImplementedError

    async def ps(self, *targets: Target) -> list[ActorRow]:
        """The actors: all, or those of these targets."""
        raise NotImplementedError

    async def procs(self) -> list[ProcRow]:
        """The processes."""
        raise NotImplementedError

    async def tree(self) -> list[TreeRow]:
        """Who owns what, from the program down, with policies and budgets."""
        raise NotImplementedError

    async def top(self, interval: float = 1.0) -> list[TopRow]:
        """Rates over `interval` seconds."""
        raise NotImplementedError

    async def calls(self, older: float = 0.0) -> list[CallRow]:
        """The calls that wait for an answer for at least `older` seconds, the oldest first."""
        raise NotImplementedError

    async def where(self, actor: Target) -> list[Hop]:
        """Where the handlers of an actor stand, and on through whom they wait for, in whatever process."""
        raise NotImplementedError

    async def stack(self, target: Target, *, native: bool = False) -> list[StackRow]:
        """The stack of a process, also of one that is stuck, frozen, or keeps the interpreter's lock."""
        raise NotImplementedError

    async def links(self) -> list[LinkRow]:
        """The links of every process."""
        raise NotImplementedError

    async def deadletters(self) -> list[DeadLetterRow]:
        """Messages that nobody got, the oldest first."""
        raise NotImplementedError

    async def why(self, actor: Target) -> list[Cause]:
        """What led to the last end of an actor or process, the end itself first."""
        raise NotImplementedError

    async def events(self) -> list[Event]:
        """What has happened, the oldest first, as far as it is remembered."""
        raise NotImplementedError

    def logs(self, target: Target | None = None, *, follow: bool = False, grep: str = "") -> AsyncIterator[LogLine]:
        """The output of processes, as far as it is kept; with `follow` also what comes."""
        raise NotImplementedError

    async def state(self, actor: Target) -> list[StateRow]:
        """The attributes of actors."""
        raise NotImplementedError

    async def stop(self, target: Target, reason: str = "") -> list[Done]:
        """Stop a mesh, or one actor of it."""
        raise NotImplementedError

    async def kill(self, target: Target) -> list[Done]:
        """SIGKILL a process, or that of an actor."""
        raise NotImplementedError

    async def restart(self, target: Target) -> list[Done]:
        """End the present life of an actor, or of a process, whose policy then starts the next."""
        raise NotImplementedError

    async def freeze(self, target: Target) -> list[Done]:
        """SIGSTOP."""
        raise NotImplementedError

    async def thaw(self, target: Target) -> list[Done]:
        """SIGCONT."""
        raise NotImplementedError

    async def eval(self, actor: Target, expression: str) -> list[Evaluated]:
        """The value of an expression in an actor, which is ``self`` there; awaited where it can be."""
        raise NotImplementedError

    def trace(self, actor: Target, max: int = 10) -> AsyncIterator[Traced]:
        """The next `max` messages of an actor, as it handles them."""
        raise NotImplementedError

    async def profile(self, target: Target, seconds: float = 5.0) -> Profile:
        """Where a process spends its time."""
        raise NotImplementedError

    async def bundle(self, path: str | Path) -> Path:
        """All of this in one ``.tar.gz`` for a report, without keys and values of environment variables."""
        raise NotImplementedError

    async def reference(self, actor: str) -> Any:
        """A mesh of actors by its name, to be called like the one that `spawn` returned."""
        raise NotImplementedError


@asynccontextmanager
async def attach(job: str = "", *, write: bool = False, patience: float = 1.0) -> AsyncIterator[Job]:
    """Visit a job of this user: by its name, the beginning of its id, the pid of its client, or its file; ``""`` where only one runs.

    Raises `JobError` when it can't be reached.
    """
    raise NotImplementedError
    yield
