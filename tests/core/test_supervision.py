"""What is stopped and started again, by policy, way of ending and order of events."""

from __future__ import annotations

import pytest

from monarch_async._core.instructions import Exit
from monarch_async._core.intensity import Intensity
from monarch_async._core.supervision_states import Phase
from monarch_async.restart import Backoff, Mode, Restart, Strategy
from tests.core.supervised import Supervised, running

NORMAL, ABNORMAL = Exit.NORMAL, Exit.ABNORMAL
ALL: Strategy = "one_for_all"
REST: Strategy = "rest_for_one"


# What is told when child 1 of 0, 1, 2 ends, and then when each that was told to stop has.
ALONE = [["start 1.1"]]
TOGETHER = [["stop 2.0 0.0"], [], ["start 0.1 1.1 2.1"]]
LATER_ONES = [["stop 2.0"], ["start 1.1 2.1"]]
GONE = [["removed 1.0"]]

MATRIX: dict[tuple[Mode, Exit, Strategy], list[list[str]]] = {
    ("permanent", ABNORMAL, "one_for_one"): ALONE,
    ("permanent", ABNORMAL, "one_for_all"): TOGETHER,
    ("permanent", ABNORMAL, "rest_for_one"): LATER_ONES,
    ("permanent", NORMAL, "one_for_one"): ALONE,
    ("permanent", NORMAL, "one_for_all"): TOGETHER,
    ("permanent", NORMAL, "rest_for_one"): LATER_ONES,
    ("transient", ABNORMAL, "one_for_one"): ALONE,
    ("transient", ABNORMAL, "one_for_all"): TOGETHER,
    ("transient", ABNORMAL, "rest_for_one"): LATER_ONES,
    ("transient", NORMAL, "one_for_one"): GONE,
    ("transient", NORMAL, "one_for_all"): GONE,
    ("transient", NORMAL, "rest_for_one"): GONE,
    ("temporary", ABNORMAL, "one_for_one"): GONE,
    ("temporary", ABNORMAL, "one_for_all"): GONE,
    ("temporary", ABNORMAL, "rest_for_one"): GONE,
    ("temporary", NORMAL, "one_for_one"): GONE,
    ("temporary", NORMAL, "one_for_all"): GONE,
    ("temporary", NORMAL, "rest_for_one"): GONE,
}


@pytest.mark.parametrize("up", [True, False], ids=["running", "starting"])
@pytest.mark.parametrize(("mode", "reason", "strategy"), MATRIX)
def test_policy_by_way_of_ending(mode: Mode, reason: Exit, strategy: Strategy, up: bool) -> None:
    """Each mode and strategy does what OTP's does, whether the child was up or only starting."""
    first, *later = MATRIX[mode, reason, strategy]
    restart = Restart(mode=mode, strategy=strategy)
    supervised = running(3, restart) if up else Supervised(3, restart)
    assert first == supervised.exited(1, reason)
    asked = [int(life.partition(".")[0]) for line in first if line.startswith("stop") for life in line.split()[1:]]
    assert later == [supervised.stopped(child) for child in asked]


@pytest.mark.parametrize(("mode", "reason", "strategy"), MATRIX)
def test_policy_with_no_restarts_left(mode: Mode, reason: Exit, strategy: Strategy) -> None:
    """With `max_restarts=0` whatever would be started again ends everything instead; the rest is as before."""
    supervised = running(3, Restart(mode=mode, strategy=strategy, max_restarts=0))
    if MATRIX[mode, reason, strategy] is GONE:
        assert ["removed 1.0"] == supervised.exited(1, reason)
        assert ["running", "removed" if mode == "temporary" else "stopped", "running"] == supervised.states
        return
    assert ["stop 2.0 0.0", "escalate 1.0: 0 restarts within 5 s allowed, this would be the 1st"] == supervised.exited(1, reason)
    assert ["stopping", "stopped", "stopping"] == supervised.states
    assert [[], ["finished: escalated"]] == [supervised.stopped(2), supervised.stopped(0)]
    assert Phase.ENDED is supervised.core.phase


def test_a_constructor_that_always_raises() -> None:
    """With `max_restarts=2` there are three constructions, of which the first counts too, and then it's over."""
    supervised = Supervised(1, Restart(max_restarts=2))
    assert ["start 0.1"] == supervised.exited(0)
    assert ["start 0.2"] == supervised.exited(0)
    assert ["escalate 0.2: 2 restarts within 5 s allowed, this would be the 3rd", "finished: escalated"] == supervised.exited(0)
    assert None is supervised.core.next_due()


def test_a_group_that_always_fails_to_start_counts_once_each_time() -> None:
    """All four constructors raise every time: one restart each time, not four."""
    supervised = Supervised(4, Restart(strategy=ALL, max_restarts=2))
    for incarnation in (1, 2):
        assert [f"stop 3.{incarnation - 1} 1.{incarnation - 1} 0.{incarnation - 1}"] == supervised.exited(2)
        assert [[], []] == [supervised.exited(child) for child in (0, 1)]
        assert [f"start 0.{incarnation} 1.{incarnation} 2.{incarnation} 3.{incarnation}"] == supervised.exited(3)
    assert ["stop 3.2 1.2 0.2", "escalate 2.2: 2 restarts within 5 s allowed, this would be the 3rd"] == supervised.exited(2)


def test_a_crash_loop_slows_down_and_ends() -> None:
    """At most 3 restarts in 10 s: incarnations 0 to 3, each later than the one before, then the end."""
    supervised = Supervised(1, Restart(max_restarts=3, within=10, backoff=Backoff(0.5, jitter=0)))
    delays = []
    for incarnation in (1, 2, 3):
        assert [] == supervised.started(0)
        supervised.now += 0.125
        assert [] == supervised.exited(0)
        due = supervised.core.next_due()
        assert due is not None
        delays.append(due - supervised.now)
        supervised.now = due - 0.125
        assert [] == supervised.due()
        supervised.now = due
        assert [f"start 0.{incarnation}"] == supervised.due()
        assert [] == supervised.due()
    assert [0.5, 1.0, 2.0] == delays
    supervised.started(0)
    assert ["escalate 0.3: 3 restarts within 10 s allowed, this would be the 4th", "finished: escalated"] == supervised.exited(0)


@pytest.mark.parametrize(("up_for", "delay"), [(5.0, 4.0), (5.125, 1.0)])
def test_a_row_of_failures_ends_with_a_long_life(up_for: float, delay: float) -> None:
    """A child that was up for longer than `within` starts with the first delay again; exactly as long is not enough."""
    supervised = running(1, Restart(max_restarts=10, backoff=Backoff(1, jitter=0)))
    for failure in (1, 2):
        supervised.exited(0)
        assert supervised.now + failure == supervised.core.next_due()
        supervised.now += failure
        supervised.due()
        supervised.started(0)
    supervised.now += up_for
    supervised.exited(0)
    assert supervised.now + delay == supervised.core.next_due()


def test_time_spent_starting_is_no_long_life() -> None:
    """A start that takes longer than `within` and fails goes on with the row of failures."""
    supervised = Supervised(1, Restart(max_restarts=10, backoff=Backoff(1, jitter=0)))
    for delay in (1, 2, 4):
        supervised.now += 100
        supervised.exited(0)
        assert supervised.now + delay == supervised.core.next_due()
        supervised.now += delay
        supervised.due()


def test_each_child_has_a_row_of_failures_of_its_own() -> None:
    """The delay of one child says nothing about another, and what is found due at the same time starts together, in order."""
    supervised = running(3, Restart(max_restarts=10, backoff=Backoff(1, jitter=0)))
    supervised.exited(2)
    supervised.now = 1
    assert ["start 2.1"] == supervised.due()
    supervised.exited(2)
    assert 3 == supervised.core.next_due()
    supervised.now = 1.5
    supervised.exited(1)
    supervised.now = 2
    supervised.exited(0)
    assert 2.5 == supervised.core.next_due()
    supervised.now = 3
    assert ["start 0.1 1.1 2.2"] == supervised.due()


def test_jitter_comes_from_the_given_source() -> None:
    """The random number moves the delay, and one is asked for each restart."""
    supervised = running(2, Restart(backoff=Backoff(4, jitter=0.5)))
    supervised.random = 0.0
    supervised.exited(0)
    assert 2 == supervised.core.next_due()
    supervised.random = 0.75
    supervised.exited(1)
    supervised.now = 2
    assert ["start 0.1"] == supervised.due()
    assert 5 == supervised.core.next_due()


def test_a_jitter_that_eats_the_delay_starts_at_once() -> None:
    """A delay of nothing needs no call of `due`."""
    supervised = running(1, Restart(backoff=Backoff(4, jitter=1)), random=0.0)
    assert ["start 0.1"] == supervised.exited(0)


@pytest.mark.parametrize("delay_ends_first", [True, False])
def test_a_group_waits_for_its_delay_and_for_what_stops(delay_ends_first: bool) -> None:
    """A group starts again when both its delay is over and all have ended, whichever comes first; the delay runs from the failure."""
    supervised = running(3, Restart(strategy=ALL, backoff=Backoff(2, jitter=0)))
    assert ["stop 2.0 0.0"] == supervised.exited(1)
    assert None is supervised.core.next_due()
    if delay_ends_first:
        supervised.now = 2
        assert [[], []] == [supervised.due(), supervised.stopped(0)]
        assert ["start 0.1 1.1 2.1"] == supervised.stopped(2)
    else:
        assert [[], []] == [supervised.stopped(2), supervised.stopped(0)]
        assert 2 == supervised.core.next_due()
        supervised.now = 1
        assert [] == supervised.due()
        supervised.now = 2
        assert ["start 0.1 1.1 2.1"] == supervised.due()
    assert None is supervised.core.next_due()


def test_what_ends_during_a_restart_of_its_group_belongs_to_it() -> None:
    """Siblings that fail, too, or end before they are stopped, count no second time."""
    supervised = running(4, Restart(strategy=ALL, max_restarts=1))
    assert ["stop 3.0 2.0 0.0"] == supervised.exited(1)
    assert [[], []] == [supervised.exited(0), supervised.exited(3, NORMAL)]
    assert ["start 0.1 1.1 2.1 3.1"] == supervised.stopped(2)


def test_a_start_that_fails_after_a_restart_counts_again() -> None:
    """A child of the group that fails before it is up is a restart of its own, which takes along those still starting."""
    supervised = running(3, Restart(strategy=REST, max_restarts=2))
    supervised.exited(1)
    assert ["start 1.1 2.1"] == supervised.stopped(2)
    assert ["stop 2.1"] == supervised.exited(1)
    assert [] == supervised.started(2)  # on its way when it was told to stop
    assert ["start 1.2 2.2"] == supervised.stopped(2)
    assert ["stop 1.2 0.0", "escalate 2.2: 2 restarts within 5 s allowed, this would be the 3rd"] == supervised.exited(2)


def test_an_earlier_child_widens_a_restart() -> None:
    """A failure before those that are being restarted counts, takes the ones between along, and the later delay holds."""
    supervised = running(5, Restart(strategy=REST, backoff=Backoff(2, jitter=0)))
    assert ["stop 4.0"] == supervised.exited(3)
    supervised.now = 1
    assert ["stop 2.0"] == supervised.exited(1)
    assert [] == supervised.stopped(4)
    assert [] == supervised.stopped(2)
    assert 3 == supervised.core.next_due()
    supervised.now = 3
    assert ["start 1.1 2.1 3.1 4.1"] == supervised.due()
    assert ["running", "starting", "starting", "starting", "starting"] == supervised.states


def test_the_longer_of_two_delays_holds() -> None:
    """A short delay of an earlier child does not cut a long one short."""
    supervised = running(2, Restart(strategy=REST, max_restarts=9, backoff=Backoff(1, jitter=0)))
    for due in (1, 3):
        supervised.exited(1)
        supervised.now = due
        assert [f"start 1.{due // 2 + 1}"] == supervised.due()
    supervised.exited(1)
    assert 7 == supervised.core.next_due()
    assert [] == supervised.exited(0)
    assert 7 == supervised.core.next_due()


@pytest.mark.parametrize(("strategy", "again"), [("one_for_one", "start 1.1"), (ALL, "start 0.1 1.1 2.1"), (REST, "start 1.1 2.1")])
def test_a_transient_child_that_is_done_comes_back_only_with_its_group(strategy: Strategy, again: str) -> None:
    """One that has ended normally is started again where its group is, as in OTP, and stays away otherwise."""
    supervised = running(3, Restart(mode="transient", strategy=strategy))
    assert [["removed 0.0"], ["removed 2.0"]] == [supervised.exited(0, NORMAL), supervised.exited(2, NORMAL)]
    assert [again] == supervised.exited(1)


def test_temporary_children_come_back_never() -> None:
    """They end one by one, and when all are gone nothing is left to do but to end."""
    supervised = running(2, Restart(mode="temporary", strategy=ALL, max_restarts=0))
    assert [["removed 1.0"], ["removed 0.0"]] == [supervised.exited(1), supervised.exited(0, NORMAL)]
    assert Phase.SUPERVISING is supervised.core.phase
    assert ["finished: shutdown"] == supervised.shutdown()


@pytest.mark.parametrize(
    ("times", "allowed"),
    [
        ([0, 0, 0], [True, True, False]),
        ([0, 1, 5], [True, True, False]),
        ([0, 1, 5.125], [True, True, True]),
        ([0, 5, 5, 5], [True, True, False, False]),
        ([0, 1, 6, 7, 11], [True, True, True, True, False]),
    ],
)
def test_intensity(times: list[float], allowed: list[bool]) -> None:
    """Two in 5 s: one that is exactly 5 s old counts, an older one does not, and of several at once each does."""
    intensity = Intensity(2, 5)
    assert allowed == [intensity.add(time) for time in times]


@pytest.mark.parametrize(
    ("max_restarts", "within", "text"),
    [
        (0, 5, "0 restarts within 5 s allowed, this would be the 1st"),
        (1, 0.5, "1 restart within 0.5 s allowed, this would be the 2nd"),
        (2, 5, "2 restarts within 5 s allowed, this would be the 3rd"),
        (10, 60, "10 restarts within 60 s allowed, this would be the 11th"),
        (12, 5, "12 restarts within 5 s allowed, this would be the 13th"),
        (21, 5, "21 restarts within 5 s allowed, this would be the 22nd"),
        (111, 5, "111 restarts within 5 s allowed, this would be the 112th"),
    ],
)
def test_the_rule_that_was_broken_is_told(max_restarts: int, within: float, text: str) -> None:
    """In proper English."""
    assert text == Intensity(max_restarts, within).exceeded()


def test_restarts_far_enough_apart_go_on_for_ever() -> None:
    """A child may fail any number of times, so long as it isn't too often at a time; the incarnations count on."""
    supervised = running(1, Restart(max_restarts=1, within=5))
    for incarnation in range(1, 50):
        supervised.now += 5.125
        assert [f"start 0.{incarnation}"] == supervised.exited(0)
        supervised.started(0)
