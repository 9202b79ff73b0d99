"""Restart policies as values: what they take, what they refuse and how they say so."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest

from monarch_async.errors import UsageError
from monarch_async.restart import Backoff, Restart, check_restart

FULL = Restart(
    mode="transient",
    strategy="rest_for_one",
    max_restarts=7,
    within=60,
    backoff=Backoff(0.25, factor=3, maximum=9, jitter=0),
    checkpoint_every=30,
)


def test_defaults() -> None:
    """`Restart()` is a policy by itself: permanent, one_for_one, 3 restarts in 5 s, at once, no checkpoints."""
    restart = Restart()
    assert ("permanent", "one_for_one", 3, 5.0, None, None) == (
        restart.mode,
        restart.strategy,
        restart.max_restarts,
        restart.within,
        restart.backoff,
        restart.checkpoint_every,
    )


def test_settings_are_kept() -> None:
    """Every setting is there under its name, and seconds are floats."""
    assert ("transient", "rest_for_one", 7, 60.0, 30.0) == (
        FULL.mode,
        FULL.strategy,
        FULL.max_restarts,
        FULL.within,
        FULL.checkpoint_every,
    )
    assert FULL.backoff is not None
    assert (0.25, 3.0, 9.0, 0.0) == (FULL.backoff.initial, FULL.backoff.factor, FULL.backoff.maximum, FULL.backoff.jitter)
    assert [float] * 3 == [type(FULL.within), type(FULL.checkpoint_every), type(FULL.backoff.maximum)]


@pytest.mark.parametrize("value", [Restart(), FULL, Backoff(1), Restart(backoff=2)], ids=repr)
def test_policies_are_values(value: object) -> None:
    """A copy, shallow, deep or by way of pickle, is equal and has the same hash; so policies can be sent and used as keys."""
    for other in [copy.copy(value), copy.deepcopy(value), *(pickle.loads(pickle.dumps(value, version)) for version in (2, 5))]:
        assert value == other
        assert hash(value) == hash(other)
        assert repr(value) == repr(other)


def test_policies_differ_by_every_setting() -> None:
    """No setting is left out of the comparison, and a policy equals nothing but a policy."""
    changed: list[Any] = [
        Restart(),
        Restart(mode="temporary"),
        Restart(strategy="one_for_all"),
        Restart(max_restarts=2),
        Restart(within=2),
        Restart(backoff=2),
        Restart(backoff=Backoff(2, factor=3)),
        Restart(backoff=Backoff(2, maximum=3)),
        Restart(backoff=Backoff(2, jitter=0)),
        Restart(checkpoint_every=2),
        Backoff(2),
        Backoff(3),
        "permanent",
    ]
    assert len(changed) == len(set(changed))
    assert [] == [(one, other) for one in changed for other in changed if one is not other and one == other]


def test_repr_can_be_read_back() -> None:
    """What is printed is the call that makes it, in the order of the signature."""
    assert (
        "Restart(mode='transient', strategy='rest_for_one', max_restarts=7, within=60.0, "
        "backoff=Backoff(initial=0.25, factor=3.0, maximum=9.0, jitter=0.0), checkpoint_every=30.0)"
    ) == repr(FULL)
    assert FULL == eval(repr(FULL))


def test_policies_are_frozen() -> None:
    """A policy that is in force somewhere can't be changed under it, nor given a setting of another name."""
    restart: Any = Restart()
    with pytest.raises(AttributeError, match="can't set attribute"):
        restart.within = 3
    with pytest.raises(AttributeError, match="no attribute 'intensity'"):
        restart.intensity = 3
    with pytest.raises(AttributeError, match="can't delete attribute"):
        del restart.within
    assert Restart() == restart


def test_settings_are_given_by_name() -> None:
    """Bare numbers, whose meaning nobody sees, are refused; but for the one that a backoff needs."""
    make: Any = Restart
    with pytest.raises(TypeError, match="positional"):
        make("permanent")
    make = Backoff
    with pytest.raises(TypeError, match="positional"):
        make(1, 2)


@pytest.mark.parametrize(("seconds", "maximum"), [(0.5, 30.0), (30, 30.0), (45, 45.0)])
def test_seconds_are_a_backoff(seconds: float, maximum: float) -> None:
    """A number is the first delay of a backoff as by default, also one longer than the longest by default."""
    assert Backoff(seconds, maximum=maximum) == Restart(backoff=seconds).backoff


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"mode": "always"}, UsageError, "mode='always' is unknown: use 'permanent', 'transient' or 'temporary'"),
    ({"mode": None}, UsageError, "mode=None is unknown"),
    ({"mode": ["permanent"]}, UsageError, "mode=['permanent'] is unknown"),
    ({"strategy": "all"}, UsageError, "strategy='all' is unknown: use 'one_for_one', 'one_for_all' or 'rest_for_one'"),
    ({"strategy": 1}, UsageError, "strategy=1 is unknown"),
    ({"max_restarts": -1}, UsageError, "max_restarts must be 0 (never start again) or more, not -1"),
    ({"max_restarts": True}, TypeError, "max_restarts is how many restarts are made within a time, a whole number, not True"),
    ({"max_restarts": 3.0}, TypeError, "max_restarts is how many restarts"),
    ({"max_restarts": None}, TypeError, "max_restarts is how many restarts"),
    ({"within": 0}, UsageError, "within must be more than 0 seconds, not 0"),
    ({"within": -5.5}, UsageError, "within must be more than 0 seconds, not -5.5"),
    ({"within": math.nan}, UsageError, "within must be a finite number, not nan"),
    ({"within": math.inf}, UsageError, "within must be a finite number, not inf"),
    ({"within": 10**400}, UsageError, "within must be a finite number, not inf"),
    ({"within": True}, TypeError, "within is a number, not True"),
    ({"within": "5"}, TypeError, "within is a number, not '5'"),
    ({"within": None}, TypeError, "within is a number, not None"),
    ({"backoff": 0}, UsageError, "backoff must be more than 0 seconds, not 0; leave it out to start again at once"),
    ({"backoff": -1}, UsageError, "backoff must be more than 0 seconds, not -1"),
    ({"backoff": math.nan}, UsageError, "backoff must be a finite number"),
    ({"backoff": False}, TypeError, "backoff is a number, not False"),
    ({"backoff": "1s"}, TypeError, "backoff is a number, not '1s'"),
    ({"checkpoint_every": 0}, UsageError, "checkpoint_every must be more than 0 seconds, not 0; leave it out to take none by time"),
    ({"checkpoint_every": -math.inf}, UsageError, "checkpoint_every must be a finite number, not -inf"),
    ({"checkpoint_every": True}, TypeError, "checkpoint_every is a number, not True"),
]


@pytest.mark.parametrize(("settings", "error", "message"), REFUSED, ids=[str(settings)[:40] for settings, *_ in REFUSED])
def test_bad_settings_are_refused(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    """Each field refuses what it can't be, by its name."""
    with pytest.raises(error) as caught:
        Restart(**settings)
    assert str(caught.value).startswith(message)
    assert error is type(caught.value)


REFUSED_BACKOFFS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"initial": 0}, UsageError, "initial must be more than 0 seconds, not 0"),
    ({"initial": math.inf}, UsageError, "initial must be a finite number, not inf"),
    ({"initial": True}, TypeError, "initial is a number, not True"),
    ({"factor": 0.5}, UsageError, "factor must be at least 1, not 0.5"),
    ({"factor": math.nan}, UsageError, "factor must be a finite number, not nan"),
    ({"factor": "2"}, TypeError, "factor is a number, not '2'"),
    ({"maximum": 0.5}, UsageError, "maximum (0.5 s) is shorter than initial (1 s): give a longer maximum or a shorter initial"),
    ({"maximum": -1}, UsageError, "maximum must be more than 0 seconds, not -1"),
    ({"maximum": False}, TypeError, "maximum is a number, not False"),
    ({"jitter": -0.1}, UsageError, "jitter is a part of the delay, from 0 (none) to 1 (all of it), not -0.1"),
    ({"jitter": 1.5}, UsageError, "jitter is a part of the delay"),
    ({"jitter": True}, TypeError, "jitter is a number, not True"),
]


@pytest.mark.parametrize(("settings", "error", "message"), REFUSED_BACKOFFS, ids=[str(settings) for settings, *_ in REFUSED_BACKOFFS])
def test_bad_backoffs_are_refused(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    """The same for a backoff."""
    with pytest.raises(error) as caught:
        Backoff(**{"initial": 1, **settings})
    assert str(caught.value).startswith(message)
    assert error is type(caught.value)


@pytest.mark.parametrize("settings", [{"max_restarts": 0}, {"within": 1e-9}, {"backoff": Backoff(1, factor=1, maximum=1, jitter=1)}])
def test_settings_at_the_border_are_taken(settings: dict[str, Any]) -> None:
    """The least and the most that make sense are allowed."""
    (name, value), *_ = settings.items()
    assert value == getattr(Restart(**settings), name)


def test_delays_grow_to_a_maximum() -> None:
    """Each delay is `factor` times the one before, up to `maximum`; also after more failures than floats can count."""
    backoff = Backoff(0.5, factor=3, maximum=10)
    assert [0.5, 1.5, 4.5, 10, 10, 10] == [backoff.delay(failures, 0.5) for failures in [1, 2, 3, 4, 5, 100_000]]
    assert [2, 2] == [Backoff(2, factor=1).delay(failures, 0.5) for failures in [1, 100_000]]


@pytest.mark.parametrize(("jitter", "random", "delay"), [(0, 0, 4), (0.25, 0, 3), (0.25, 0.75, 4.5), (0.25, 0.5, 4), (1, 0, 0)])
def test_jitter_is_a_part_of_the_delay(jitter: float, random: float, delay: float) -> None:
    """The random number moves the delay by at most that part of it, up or down; 0.5 leaves it as it is."""
    assert delay == Backoff(4, jitter=jitter).delay(1, random)


def test_a_policy_that_cannot_work_is_refused() -> None:
    """`rest_for_one` needs later members; every other policy is good for any mesh, and comes back as it is."""
    with pytest.raises(UsageError, match=r"strategy='rest_for_one' .* use 'one_for_one'"):
        check_restart(FULL, 1)
    assert FULL is check_restart(FULL, 2)
    single = Restart(strategy="one_for_all")
    assert single is check_restart(single, 1)


@pytest.mark.parametrize("restart", [True, "permanent", 3, None, Backoff(1), Restart])
def test_what_is_no_policy_is_refused(restart: object) -> None:
    """What people might give in place of a policy is refused with an example of one."""
    with pytest.raises(TypeError, match=r"restart takes a Restart, such as Restart\(mode='permanent', max_restarts=3\), not "):
        check_restart(restart, 4)
