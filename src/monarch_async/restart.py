"""What is started again after it ended, how often, how soon: the policy that `spawn(…, restart=…)` takes.

The words and their meaning are those of Erlang/OTP's `supervisor`. A policy is a value: checked when it is made, never changed, equal to
another one of the same settings, and sent to other processes like any other value. What it says is done by `_core/supervision.py`.

Rules:

* Every setting is given by name, since ``Restart(3, 5)`` tells nobody what it does.
* What can't work is refused here, with the name of the setting and what to give instead; what depends on the mesh, by `check_restart`.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, Self, get_args

from monarch_async.errors import UsageError

__all__ = ["Backoff", "Mode", "Restart", "Strategy", "check_restart"]

Mode = Literal["permanent", "transient", "temporary"]
Strategy = Literal["one_for_one", "one_for_all", "rest_for_one"]

LONGEST_BACKOFF = 30.0
"""Seconds."""


class _Backoff(NamedTuple):
    initial: float
    factor: float
    maximum: float
    jitter: float


class _Restart(NamedTuple):
    mode: Mode
    strategy: Strategy
    max_restarts: int
    within: float
    backoff: Backoff | None
    checkpoint_every: float | None


class Backoff(_Backoff):
    """How long to wait before starting again what fails again and again: exponential, with jitter.

    The first delay is `initial` seconds, each further one `factor` times as long, up to `maximum` seconds; each is then made longer or
    shorter by a random part of it, up to `jitter` (0.1: a tenth), so that what failed together does not come back together.

    Raises `TypeError` for what is no number and `UsageError` for one that can't be.
    """

    __slots__ = ()

    def __new__(cls, initial: float, *, factor: float = 2.0, maximum: float = LONGEST_BACKOFF, jitter: float = 0.1) -> Self:
        initial = _positive("initial", initial)
        factor = _number("factor", factor)
        maximum = _positive("maximum", maximum)
        jitter = _number("jitter", jitter)
        if factor < 1:
            raise UsageError(
                f"factor must be at least 1, not {factor:g}: with 1 every delay is the same, with 2 each doubles the one before"
            )
        if maximum < initial:
            raise UsageError(f"maximum ({maximum:g} s) is shorter than initial ({initial:g} s): give a longer maximum or a shorter initial")
        if not 0 <= jitter <= 1:
            raise UsageError(f"jitter is a part of the delay, from 0 (none) to 1 (all of it), not {jitter:g}")
        return super().__new__(cls, initial, factor, maximum, jitter)

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]:
        return (), self._asdict()

    def delay(self, failures: int, random: float) -> float:
        """Seconds to wait after the last of so many failures in a row (1 or more); `random` is from 0 up to 1."""
        try:
            base = min(self.initial * self.factor ** (failures - 1), self.maximum)
        except OverflowError:
            base = self.maximum
        return base * (1 + self.jitter * (2 * random - 1))


class Restart(_Restart):
    """What is done about the members of a mesh that end by themselves.

    Attributes:
        mode: which are started again: ``"permanent"``: all; ``"transient"``: those that failed, by an exception, a signal or an exit code
            other than 0; ``"temporary"``: none, what has ended is gone.
        strategy: what is started again with the one that ended: ``"one_for_one"``: nothing; ``"one_for_all"``: all others;
            ``"rest_for_one"``: those that were started after it. These are stopped first.
        max_restarts: so many restarts are made within any `within` seconds; one more, and the mesh is stopped and has failed as a whole.
            With 0 the first failure is the mesh's.
        within: seconds.
        backoff: how long to wait before starting again; `None`: not at all. A number of seconds is the first delay of a `Backoff` that
            is otherwise as by default.
        checkpoint_every: seconds between two checkpoints of each member's state; `None`: none is taken by time.

    The default is that of OTP, but for `max_restarts`, which is 1 there.

    Raises `TypeError` for a value of the wrong type and `UsageError` for one that can't be.
    """

    __slots__ = ()

    def __new__(
        cls,
        *,
        mode: Mode = "permanent",
        strategy: Strategy = "one_for_one",
        max_restarts: int = 3,
        within: float = 5.0,
        backoff: float | Backoff | None = None,
        checkpoint_every: float | None = None,
    ) -> Self:
        _check_known("mode", mode, get_args(Mode))
        _check_known("strategy", strategy, get_args(Strategy))
        if isinstance(max_restarts, bool) or not isinstance(max_restarts, int):
            raise TypeError(f"max_restarts is how many restarts are made within a time, a whole number, not {max_restarts!r}")
        if max_restarts < 0:
            raise UsageError(f"max_restarts must be 0 (never start again) or more, not {max_restarts}")
        if backoff is not None and not isinstance(backoff, Backoff):
            initial = _positive("backoff", backoff, "; leave it out to start again at once")
            backoff = Backoff(initial, maximum=max(initial, LONGEST_BACKOFF))
        if checkpoint_every is not None:
            checkpoint_every = _positive("checkpoint_every", checkpoint_every, "; leave it out to take none by time")
        return super().__new__(cls, mode, strategy, max_restarts, _positive("within", within), backoff, checkpoint_every)

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]:
        return (), self._asdict()


def check_restart(restart: object, size: int) -> Restart:
    """The policy, if it can do something for a mesh of `size` members.

    Raises `TypeError` for what is no `Restart`, and `UsageError` where the strategy is about members that aren't there.
    """
    if not isinstance(restart, Restart):
        raise TypeError(f"restart takes a Restart, such as Restart(mode='permanent', max_restarts=3), not {restart!r}")
    if restart.strategy == "rest_for_one" and size < 2:
        raise UsageError("strategy='rest_for_one' starts later members again, and a single one has none: use 'one_for_one'")
    return restart


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is a number, not {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise UsageError(f"{name} must be a finite number, not {number}")
    return number


def _positive(name: str, value: object, otherwise: str = "") -> float:
    number = _number(name, value)
    if number <= 0:
        raise UsageError(f"{name} must be more than 0 seconds, not {number:g}{otherwise}")
    return number


def _check_known(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"{name}={value!r} is unknown: use {', '.join(map(repr, known[:-1]))} or {known[-1]!r}")
