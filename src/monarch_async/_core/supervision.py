"""Which children are stopped and started again when one of them ends: Erlang/OTP's `supervisor`, without its processes.

A supervision watches children in the order of their start, for instance the ranks of a mesh, under one `Restart` policy. It is told what
happens to them, and answers with instructions (`_core/instructions.py`), to be carried out in order.

Rules, as in OTP's `supervisor.erl` where nothing else is said:

* *What counts.* A child that ends by itself and is to be started again is one restart, however many siblings go with it, and whether it was
  up or only starting: also for the first time. One restart too many (`_core/intensity.py`) ends it all: `Escalate`.
* *Who goes along.* `one_for_all`: every child; `rest_for_one`: those after it. They are told to stop, last first; once all have ended, and
  the delay is over, all are started, first first. What ends meanwhile belongs to that restart, and counts no second time. A child from
  before those that are under way can widen the restart; that counts, and the later of both delays holds.
* *Who comes back.* A transient child that has ended normally is started again with its group, since OTP keeps it in its list. Temporary
  children are never started again; as all children have the same mode, none of them has a sibling that is.
* *Normal ends while starting.* A transient child that ends normally before it is up has nothing to do: it stays ended, as OTP's `ignore`.
* *Starts overlap.* OTP starts one child after the other. Here those of a group are told in that order and not awaited; if one of them
  fails, that is a new restart, by which the ones that go along with it are stopped, up or not.
* *Delays* (OTP has none) grow with the failures of a child in a row. A row ends when it has been up for longer than `within`.
* *Automatic shutdown* follows the end of significant children that are not started again by themselves.

Stray reports do no harm. A report on a former life, or on one that is known to have ended, changes nothing; if it says that this life has
started, it is answered with a `Stop` of it, so that nothing lives on unwatched. A `Stop` also holds for a life that is still starting.

Pure: the time is an argument, in seconds that never go back, and randomness too. An end is O(log n), unless it takes siblings along.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable
from typing import Literal, get_args

from monarch_async._core.instructions import Cause, Escalate, Exit, Finished, Instruction, Life, Removed, Start, Stop
from monarch_async._core.intensity import Intensity
from monarch_async._core.supervision_states import CHILD_MOVES, PHASE_MOVES, ChildState, Move, Phase, Turn, next_state
from monarch_async.errors import InternalError, UsageError
from monarch_async.restart import Restart

__all__ = ["AutoShutdown", "Supervision"]

AutoShutdown = Literal["never", "any_significant", "all_significant"]

_UP = (ChildState.STARTING, ChildState.RUNNING)
_GONE = (ChildState.DELAYED, ChildState.STOPPED, ChildState.REMOVED)


class Supervision:
    """Of `size` children, all of which have been told to start, as incarnation 0.

    `significant` children are those whose end can end all: with ``auto_shutdown="any_significant"`` that of the first of them, with
    ``"all_significant"`` that of the last. `random` gives a number from 0 up to 1 for each delay.

    Raises `UsageError` where these don't go together. Every event raises `InternalError` for what can't have happened.
    """

    __slots__ = (
        "_active_significant",
        "_auto_shutdown",
        "_cause",
        "_delays",
        "_failures",
        "_group",
        "_incarnations",
        "_intensity",
        "_live",
        "_phase",
        "_random",
        "_restart",
        "_significant",
        "_since",
        "_states",
        "_stopping",
    )

    def __init__(
        self,
        size: int,
        restart: Restart,
        *,
        random: Callable[[], float],
        significant: Collection[int] = (),
        auto_shutdown: AutoShutdown = "never",
    ) -> None:
        _check(size, restart, significant, auto_shutdown)
        self._restart = restart
        self._random = random
        self._significant = frozenset(significant)
        self._auto_shutdown = auto_shutdown
        self._intensity = Intensity(restart.max_restarts, restart.within)
        self._phase = Phase.SUPERVISING
        self._cause: Cause | None = None  # set when it no longer is supervising
        self._states = [ChildState.STARTING] * size
        self._incarnations = [0] * size
        self._failures = [0] * size  # in a row
        self._since = [0.0] * size  # when it came up; says something in state RUNNING only
        self._live = size  # how many are in the first three states
        self._stopping = 0  # how many of them have been told to stop
        self._active_significant = len(self._significant)  # how many of these neither have ended nor been removed
        self._delays: list[tuple[float, int]] = []  # one_for_one: a heap of when which child is to start; exactly the delayed ones
        self._group: tuple[int, float] | None = None  # the group restart under way: its first child, and not before when it starts

    def add(self, *, significant: bool = False) -> int:
        """One more child, the last in order, which has been told to start as incarnation 0; returns its number.

        Raises `UsageError` for a significant one where that means nothing.
        """
        if significant:
            _check_significant(self._restart, self._auto_shutdown)
        child = len(self._states)
        self._states.append(ChildState.STARTING)
        self._incarnations.append(0)
        self._failures.append(0)
        self._since.append(0.0)
        self._live += 1
        if significant:
            self._significant |= {child}
            self._active_significant += 1
        return child

    @property
    def phase(self) -> Phase:
        return self._phase

    def state(self, child: int) -> ChildState:
        return self._states[child]

    def incarnation(self, child: int) -> int:
        """The last one that was told to start."""
        return self._incarnations[child]

    @property
    def restart(self) -> Restart:
        """The policy."""
        return self._restart

    def used(self, now: float) -> int:
        """How many restarts count against the next one."""
        return self._intensity.count(now)

    def restarts(self, reason: Exit) -> bool:
        """Whether a child that ends so is to be started again."""
        mode = self._restart.mode
        return mode == "permanent" or (mode == "transient" and reason is not Exit.NORMAL)

    def next_due(self) -> float | None:
        """When `due` has to be called next; `None` while nothing waits for a time."""
        if self._group is not None:
            return None if self._stopping else self._group[1]
        return self._delays[0][0] if self._delays else None

    def started(self, child: int, incarnation: int, now: float) -> list[Instruction]:
        """That life is up."""
        state = self._state_of(child, incarnation)
        if state in _GONE:
            return [Stop((Life(child, incarnation),))]
        if state is not ChildState.STOPPING:
            self._move(child, Move.STARTED)
            self._since[child] = now
        return []

    def exited(self, child: int, incarnation: int, reason: Exit, now: float) -> list[Instruction]:
        """That life has ended; if it had been told to stop, this is as good as `stopped`."""
        state = self._state_of(child, incarnation)
        if state in _GONE:
            return []
        if state is ChildState.STOPPING:
            return self._stopped(child, now)
        self._live -= 1
        if self.restarts(reason):
            return self._restart_for(child, now, counts=reason is not Exit.TAKEN)
        self._move(child, Move.REMOVE if self._restart.mode == "temporary" else Move.END)
        removed = Removed(Life(child, incarnation))
        if child in self._significant:
            self._active_significant -= 1
            if self._auto_shutdown == "any_significant" or not self._active_significant:
                return [removed, *self._end(Cause.AUTOMATIC), *self._finish()]
        return [removed]

    def stopped(self, child: int, incarnation: int, now: float) -> list[Instruction]:
        """That life has ended as it was told to."""
        state = self._state_of(child, incarnation)
        if state in _GONE:
            return []
        if state is not ChildState.STOPPING:
            raise InternalError(f"supervision: child {child} was reported as stopped, which it was not told to: it is {state.value}")
        return self._stopped(child, now)

    def due(self, now: float) -> list[Instruction]:
        """So late it is. Too early or too often does no harm."""
        if self._group is not None:
            return self._start_group(now)
        children = []
        while self._delays and self._delays[0][0] <= now:
            children.append(heapq.heappop(self._delays)[1])
        return [self._start(sorted(children))] if children else []

    def shutdown(self) -> list[Instruction]:
        """The owner wants an end. Does nothing where one is under way."""
        return [*self._end(Cause.SHUTDOWN), *self._finish()] if self._phase is Phase.SUPERVISING else []

    def _state_of(self, child: int, incarnation: int) -> ChildState:
        """Of that life: one that is over is stopped, whatever has become of the child."""
        if not 0 <= child < len(self._states) or not 0 <= incarnation <= self._incarnations[child]:
            raise InternalError(f"supervision: child {child} was never told to start as incarnation {incarnation}")
        return self._states[child] if incarnation == self._incarnations[child] else ChildState.STOPPED

    def _move(self, child: int, move: Move) -> None:
        self._states[child] = next_state(CHILD_MOVES, self._states[child], move)

    def _restart_for(self, child: int, now: float, *, counts: bool) -> list[Instruction]:
        if counts and not self._intensity.add(now):
            self._move(child, Move.END)
            escalate = Escalate(Life(child, self._incarnations[child]), self._intensity.exceeded())
            return [*self._end(Cause.ESCALATED), escalate, *self._finish()]
        due = now + (self._delay(child, now) if counts else 0.0)
        self._move(child, Move.RESTART)
        if self._restart.strategy != "one_for_one":
            return self._restart_group(0 if self._restart.strategy == "one_for_all" else child, due, now)
        if due <= now:
            return [self._start([child])]
        heapq.heappush(self._delays, (due, child))
        return []

    def _delay(self, child: int, now: float) -> float:
        settled = self._states[child] is ChildState.RUNNING and now - self._since[child] > self._restart.within
        self._failures[child] = 1 if settled else self._failures[child] + 1
        backoff = self._restart.backoff
        return backoff.delay(self._failures[child], self._random()) if backoff is not None else 0.0

    def _restart_group(self, first: int, due: float, now: float) -> list[Instruction]:
        """Take along what follows `first`, up to where a restart under way has done so."""
        end, not_before = self._group or (len(self._states), -math.inf)
        stop = self._stop(range(first, end))
        for child in range(first, end):
            if self._states[child] is ChildState.STOPPED:
                self._move(child, Move.RESTART)
                self._active_significant += child in self._significant
        self._group = first, max(due, not_before)
        return [*stop, *self._start_group(now)]

    def _start_group(self, now: float) -> list[Instruction]:
        """The group restart under way, once nothing holds it up."""
        if self._group is None or self._stopping or now < self._group[1]:
            return []
        first, self._group = self._group[0], None
        return [self._start(range(first, len(self._states)))]

    def _start(self, children: Iterable[int]) -> Start:
        lives = []
        for child in children:
            self._move(child, Move.START)
            self._incarnations[child] += 1
            lives.append(Life(child, self._incarnations[child]))
        self._live += len(lives)
        return Start(tuple(lives))

    def _stop(self, children: range) -> list[Instruction]:
        """Tell those that are up or starting."""
        lives = [Life(child, self._incarnations[child]) for child in reversed(children) if self._states[child] in _UP]
        for child, _ in lives:
            self._move(child, Move.STOP)
        self._stopping += len(lives)
        return [Stop(tuple(lives))] if lives else []

    def _stopped(self, child: int, now: float) -> list[Instruction]:
        self._live -= 1
        self._stopping -= 1
        if self._phase is Phase.SUPERVISING:
            self._move(child, Move.RESTART)
            return self._start_group(now)
        self._move(child, Move.END)
        return self._finish()

    def _end(self, cause: Cause) -> list[Instruction]:
        """Call off what waits and tell the rest to stop."""
        self._phase = next_state(PHASE_MOVES, self._phase, Turn.END)
        self._cause = cause
        self._group = None
        self._delays.clear()
        for child, state in enumerate(self._states):
            if state is ChildState.DELAYED:
                self._move(child, Move.END)
        return self._stop(range(len(self._states)))

    def _finish(self) -> list[Instruction]:
        """Say so once nothing is left."""
        if self._live or self._cause is None:
            return []
        self._phase = next_state(PHASE_MOVES, self._phase, Turn.LAST_GONE)
        return [Finished(self._cause)]

    def validate(self) -> None:
        """Raise `AssertionError` if an invariant is broken. For tests."""
        states, one_by_one = self._states, self._restart.strategy == "one_for_one"
        delayed = {child for child, state in enumerate(states) if state is ChildState.DELAYED}
        stopping = {child for child, state in enumerate(states) if state is ChildState.STOPPING}
        assert self._stopping == len(stopping)
        assert self._live == len(stopping) + sum(state in _UP for state in states)
        assert (self._cause is None) == (self._phase is Phase.SUPERVISING)
        if self._phase is Phase.SUPERVISING:
            self._intensity.validate()
            assert self._active_significant == sum(
                states[child] not in (ChildState.STOPPED, ChildState.REMOVED) for child in self._significant
            )
            assert one_by_one or not self._delays
            assert not one_by_one or self._group is None
            assert not one_by_one or not stopping
            assert not one_by_one or sorted(delayed) == sorted(child for _, child in self._delays)
            assert one_by_one or delayed | stopping == set(range(self._group[0] if self._group is not None else len(states), len(states)))
            assert ChildState.STOPPED not in states or self._restart.mode == "transient"
            assert ChildState.REMOVED not in states or self._restart.mode == "temporary"
        else:
            assert not delayed
            assert self._group is None
            assert not self._delays
            assert self._live == self._stopping
            assert (self._live == 0) == (self._phase is Phase.ENDED)


def _check(size: int, restart: Restart, significant: Collection[int], auto_shutdown: AutoShutdown) -> None:
    if size < 0:
        raise UsageError(f"a supervision has 0 children or more, not {size}")
    if auto_shutdown not in get_args(AutoShutdown):
        raise UsageError(f"auto_shutdown={auto_shutdown!r} is unknown: use {', '.join(map(repr, get_args(AutoShutdown)))}")
    if unknown := sorted(child for child in significant if not 0 <= child < size):
        raise UsageError(f"significant names {unknown}, but the children are 0 to {size - 1}")
    if significant:
        _check_significant(restart, auto_shutdown)
    if size and not significant and auto_shutdown != "never":
        raise UsageError(f"auto_shutdown={auto_shutdown!r} waits for the end of significant children: say which are")


def _check_significant(restart: Restart, auto_shutdown: AutoShutdown) -> None:
    if auto_shutdown == "never":
        raise UsageError("significant children are for automatic shutdown: give auto_shutdown='any_significant' or 'all_significant'")
    if restart.mode == "permanent":
        raise UsageError("a permanent child is always started again, so none is significant: use mode='transient' or 'temporary'")
