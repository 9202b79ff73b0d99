"""Faults on purpose: say what shall go wrong, where and when, and see whether your supervision copes with it.

::

    with Faults(seed=1) as faults:
        procs = this_host().spawn_procs({"gpus": 4}, bootstrap=faults.bootstrap, name="procs")
        workers = procs.spawn("workers", Worker)
        faults.at(step=3, mesh="workers", rank=2).kill()
        faults.at(time=0.5, mesh="procs", rank=0).link("client").cut(0.2)
        ...
        await faults.injected(2)

Rules:

* A member is named by a mesh, of processes or of actors, and its rank there at spawn. A *step* is the n-th message that it handles after
  the fault was asked for (a process: any of its actors), a *time* is seconds after `start`, which is called for you when the first
  process comes up.
* ``str(faults.plan)`` is one line; ``Faults.replay(line)`` makes the same plan again. `random` draws from the seed only, so the same seed
  and the same calls give the same plan.
* A process that is started anew takes the place of the one before it: counts go on, and what has happened does not happen again.
* Faults happen in processes that were started with `bootstrap`. Actors in the program's own process have none, but its links do.
* One `Faults` object is in use at a time.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from monarch_async.ambient import current_runtime, on_loop
from monarch_async.errors import UsageError
from monarch_async.testing.director import Director, Injection
from monarch_async.testing.inside import Installation
from monarch_async.testing.plan import CLIENT, KINDS, Fault, Plan, draw, member

__all__ = ["At", "Faults", "Injection", "LinkAt"]

ANY_KIND = tuple(kind for kind in KINDS if kind != "thaw")


class Faults:
    """See the module's docstring. `seed` is drawn where none is given."""

    def __init__(self, seed: int | None = None) -> None:
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise TypeError(f"a seed is a whole number, not {seed!r}")
        self.seed = seed if seed is not None else int.from_bytes(os.urandom(4), "little")
        self.log: list[Injection] = []
        self._faults: list[Fault] = []
        self._random = random.Random(self.seed)
        self._director: Director | None = None

    @classmethod
    def replay(cls, line: str) -> Self:
        """The plan that ``str(faults.plan)`` wrote. Raises `ValueError` or `TypeError` for anything else, and says where."""
        plan = Plan.parse(line)
        faults = cls(plan.seed)
        faults._faults.extend(plan.faults)
        return faults

    @property
    def plan(self) -> Plan:
        """All faults so far, whether they have happened or not."""
        return Plan(self.seed, tuple(self._faults))

    def at(self, *, mesh: str, rank: int, step: int | None = None, time: float | None = None, endpoint: str = "") -> At:
        """When and where; what, say the methods of the result.

        Args:
            mesh: the name of a mesh of processes or of actors.
            rank: a position in it.
            step: the n-th message from now that this member handles, from 1; for `At.fail_constructor` the n-th construction.
            time: seconds after the start. Give this or `step`.
            endpoint: count only messages to this endpoint.

        What can't be is refused by these methods, with `ValueError` or `TypeError`, and `UsageError` for a rank that a known mesh lacks;
        for a mesh of actors that is spawned later, by its spawn.
        """
        return At(self._add, {"mesh": mesh, "rank": rank, "step": step, "time": time, "endpoint": endpoint})

    def random(
        self, n: int, *, mesh: str, within: float, kinds: Sequence[str] = ANY_KIND, ranks: int | Sequence[int] | None = None
    ) -> list[Fault]:
        """Plan `n` faults, drawn from the seed, within so many seconds of the start; returns them.

        `ranks` are those they may happen to, or how many there are; it may be left out for a mesh that is up. Raises `ValueError` for
        unknown kinds and impossible figures, `UsageError` where ranks are needed.
        """
        if ranks is None:
            ranks = self._director.members(mesh) if self._director is not None else None
            if ranks is None:
                raise UsageError(f"no members of {mesh!r} are known yet: say ranks=…, how many it has, or await it first")
        chosen = range(ranks) if isinstance(ranks, int) else ranks
        faults = draw(self._random, n, kinds=kinds, mesh=mesh, ranks=chosen, within=within)
        for fault in faults:
            self._add(fault)
        return faults

    def _add(self, fault: Fault) -> None:
        director = self._director
        if director is None:
            self._faults.append(fault)
            return

        def add() -> None:
            director.check(fault)
            self._faults.append(fault)
            director.added(len(self._faults) - 1)

        on_loop(director.runtime, add)

    def expect(self, mesh: str, size: int) -> None:
        """A mesh of processes of this size is going to be started. Raises `UsageError` if faults are planned for ranks that it lacks."""
        director = self._direct()
        on_loop(director.runtime, lambda: director.expect(mesh, size))

    # A run.

    @property
    def bootstrap(self) -> Callable[[], Any]:
        """For ``spawn_procs(bootstrap=faults.bootstrap)``: installs faults in a process, and in this program. Only clients have it.

        Raises `UsageError` while another `Faults` object is in use.
        """
        return self.bootstrap_with(None)

    def bootstrap_with(self, then: Callable[[], Any] | None) -> Callable[[], Any]:
        """The same, for processes that have a bootstrap function of their own."""
        return _Bootstrap(self._direct(), then)

    def _direct(self) -> Director:
        if self._director is None:
            runtime = current_runtime()
            if runtime.client.uid != runtime.me.uid:
                raise UsageError("faults are planned in the program itself, not in an actor's process")
            self._director = on_loop(runtime, lambda: Director(runtime, self._faults, self.log))
        return self._director

    def start(self) -> None:
        """Time begins now, unless it has begun."""
        director = self._direct()
        on_loop(director.runtime, director.start)

    async def injected(self, count: int | None = None, timeout: float = 30.0) -> list[Injection]:
        """Wait until `count` faults (all that are planned) have happened; returns the log.

        Raises `UsageError` for a fault that could not be injected, and `TimeoutError` after `timeout` seconds: both say which and why.
        """
        director = self._direct()
        try:
            async with asyncio.timeout(timeout):
                while not director.errors and len(self.log) < (len(self._faults) if count is None else count):
                    await director.changed()
        except TimeoutError:
            raise TimeoutError(f"{len(self.log)} faults after {timeout:g} s; what is still to come:{director.why_waiting()}") from None
        if director.errors:
            raise UsageError("\n".join(director.errors))
        return list(self.log)

    def calm(self) -> None:
        """End what goes on: thaw what is frozen, mend the program's links, let nothing more happen at its time."""
        if self._director is not None:
            _at_rest(self._director, self._director.calm)

    def close(self) -> None:
        """Calm down, and leave the program as it was; a second time does nothing."""
        director, self._director = self._director, None
        if director is not None:
            _at_rest(director, director.close)

    def report(self) -> str:
        """The line of the plan and the log, for people."""
        return "\n".join([f"Faults.replay({str(self.plan)!r})", *map(str, self.log)])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Faults seed={self.seed}, {len(self._faults)} planned, {len(self.log)} injected>"


def _at_rest(director: Director, function: Callable[[], None]) -> None:
    """Call a function where nothing runs beside it: on the loop, or here if that does not run any more."""
    if director.runtime.loop.is_running():
        on_loop(director.runtime, function)
    else:
        function()


class _Bootstrap:
    """Becomes an `Installation`, with what is known by then, when it is sent to a process."""

    def __init__(self, director: Director, then: Callable[[], Any] | None) -> None:
        self._director = director
        self._then = then

    def __call__(self) -> Any:
        raise UsageError("faults are installed in other processes: spawn_procs(bootstrap=faults.bootstrap)")

    def __reduce__(self) -> tuple[Any, ...]:
        installation = self._director.installation(self._then)
        return Installation, (installation.service, installation.state, installation.then)


class At:
    """A moment and a place; each method plans a fault there. Durations are in seconds."""

    def __init__(self, add: Callable[[Fault], None], where: dict[str, Any]) -> None:
        self._add = add
        self._where = where

    def _plan(self, kind: str, **parameters: Any) -> None:
        self._add(Fault.of(kind, **self._where, **parameters))

    def kill(self) -> None:
        """SIGKILL for its process. At a step, the handler has been reached, but none of its code has run."""
        self._plan("kill")

    def exit(self, code: int = 1) -> None:
        """Its process ends with ``os._exit(code)``."""
        self._plan("exit", code=code)

    def freeze(self, seconds: float = 0.0) -> None:
        """SIGSTOP for its process, and SIGCONT after `seconds` (0: by `thaw`, or at the end)."""
        self._plan("freeze", seconds=seconds)

    def thaw(self) -> None:
        """SIGCONT for its process."""
        self._plan("thaw")

    def leave_child(self, seconds: float = 60.0) -> None:
        """Its process starts a child, in a session of its own, that sleeps so long, and forgets it. The log has its pid."""
        self._plan("leave_child", seconds=seconds)

    def exhaust_memory(self, limit: int = 64 << 20, seconds: float = 0.0) -> None:
        """Its process may have `limit` more bytes of address space, which are used up, but not touched, for `seconds`.

        At a step its handler raises the `MemoryError`; with ``seconds=0`` nobody else notices. The memory of the machine is in no danger.
        """
        self._plan("exhaust_memory", limit=limit, seconds=seconds)

    def block(self, seconds: float) -> None:
        """Its process's event loop is blocked, as by a long computation."""
        self._plan("block", seconds=seconds)

    def hold_gil(self, seconds: float) -> None:
        """Not one thread of its process runs, as under an extension that keeps the interpreter's lock."""
        self._plan("hold_gil", seconds=seconds)

    def fail(self, error: BaseException | type[BaseException] = RuntimeError, text: str = "injected") -> None:
        """A handler raises: `error` as it is, or of that type with `text`. At a time: the first message after it.

        Raises `TypeError` for what the process could not make again: a class that can't be imported, or arguments other than one text.
        """
        self._plan("fail", **_error_fields(error, text))

    def fail_constructor(self, error: BaseException | type[BaseException] = RuntimeError, text: str = "injected") -> None:
        """The actor's n-th construction (``step=n``) raises. The rest as `fail`."""
        self._plan("fail_constructor", **_error_fields(error, text))

    def link(self, to: str | tuple[str, int] = CLIENT) -> LinkAt:
        """The link of its process with another one: the program itself (``"client"``), or a member of a mesh, ``("workers", 1)``."""
        return LinkAt(self._plan, to if isinstance(to, str) else member(*to))


class LinkAt:
    """A moment, and a link between two processes. Whatever happens to it, nothing may get lost, doubled or out of order for who uses it.

    ``"out"`` is from the process that is named first to the other one, ``"in"`` the way back.
    """

    def __init__(self, plan: Callable[..., None], to: str) -> None:
        self._plan = plan
        self._to = to

    def delay(self, by: float, seconds: float, way: str = "both") -> None:
        """For `seconds`, what is sent arrives `by` seconds later."""
        self._plan("delay", to=self._to, by=by, seconds=seconds, way=way)

    def throttle(self, rate: float, seconds: float, way: str = "both") -> None:
        """For `seconds`, no more than `rate` bytes a second pass."""
        self._plan("throttle", to=self._to, rate=rate, seconds=seconds, way=way)

    def cut(self, seconds: float, way: str = "both") -> None:
        """For `seconds`, what is sent is lost; then the connection breaks, and is made anew."""
        self._plan("cut", to=self._to, seconds=seconds, way=way)

    def reset(self) -> None:
        """The connection breaks."""
        self._plan("reset", to=self._to)

    def drop(self, frames: int = 1, way: str = "out") -> None:
        """The next frame is torn in the middle, what follows it is lost and the connection breaks; as often as `frames` says."""
        self._plan("drop", to=self._to, frames=frames, way=way)

    def duplicate(self, frames: int = 1, way: str = "out") -> None:
        """The next frames arrive twice."""
        self._plan("duplicate", to=self._to, frames=frames, way=way)

    def corrupt(self, frames: int = 1, way: str = "out", bit: int = 0) -> None:
        """One bit of each of the next frames arrives flipped.

        Between hosts, where frames carry a seal, `bit` counts through the whole frame. Within a host they carry none, and nothing would
        notice a flipped bit of the user's data: `bit` counts through those of a frame's head by which it is refused. A refused frame is
        sent again over a new connection; one that is bad twice running is taken for the peer's fault, and ends the session: its
        callers get `ActorDied`.
        """
        self._plan("corrupt", to=self._to, frames=frames, way=way, bit=bit)


def _error_fields(error: BaseException | type[BaseException], text: str) -> dict[str, str]:
    """Type and text of an exception, if they are all that is needed to make it again."""
    if isinstance(error, BaseException):
        if len(error.args) > 1 or any(not isinstance(arg, str) for arg in error.args):
            raise TypeError(f"an exception is planned by its type and one text; {error!r} has other arguments")
        text = error.args[0] if error.args else ""
        error = type(error)
    checked: Any = error
    if not (isinstance(checked, type) and issubclass(checked, BaseException)):
        raise TypeError(f"an exception or its type is wanted, not {error!r}")
    found: Any = sys.modules.get(error.__module__)
    for part in error.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is not error or error.__module__ == "__main__":
        raise TypeError(
            f"{error.__qualname__} can't be imported as {error.__module__}.{error.__qualname__} by the process that shall raise it"
        )
    try:
        error(text)
    except TypeError as wrong:
        raise TypeError(f"{error.__qualname__} can't be made from a text alone: {wrong}") from None
    return {"type": f"{error.__module__}:{error.__qualname__}", "text": text}
