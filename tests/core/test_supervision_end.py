"""How a supervision ends, what it does with late and impossible reports, and what it refuses to begin with."""

from __future__ import annotations

from typing import Any

import pytest

from monarch_async._core.instructions import Exit
from monarch_async._core.supervision import Supervision
from monarch_async._core.supervision_states import Phase
from monarch_async.errors import InternalError, UsageError
from monarch_async.restart import Restart, Strategy
from tests.core.supervised import Supervised, running

NORMAL, ABNORMAL = Exit.NORMAL, Exit.ABNORMAL
ALL: Strategy = "one_for_all"
REST: Strategy = "rest_for_one"


def test_any_significant_child_ends_all() -> None:
    """The first significant child that is done ends everything; one that isn't significant, or failed, does not."""
    supervised = running(4, Restart(mode="transient"), significant=[1, 2], auto_shutdown="any_significant")
    assert ["removed 0.0"] == supervised.exited(0, NORMAL)
    assert ["start 1.1"] == supervised.exited(1)
    assert ["removed 2.0", "stop 3.0 1.1"] == supervised.exited(2, NORMAL)
    assert [[], ["finished: automatic shutdown"]] == [supervised.exited(1), supervised.stopped(3)]


def test_the_last_significant_child_ends_all() -> None:
    """With `all_significant` the others are waited for, one that is being started again too."""
    supervised = running(4, Restart(mode="transient", backoff=1), significant=(0, 1), auto_shutdown="all_significant")
    assert [] == supervised.exited(1)
    assert ["removed 0.0"] == supervised.exited(0, NORMAL)
    supervised.now = 1
    assert ["start 1.1"] == supervised.due()
    assert ["removed 1.1", "stop 3.0 2.0"] == supervised.exited(1, NORMAL)


def test_a_significant_child_that_came_back_is_waited_for() -> None:
    """One that was done, and was started again with its group, has to be done once more."""
    supervised = running(3, Restart(mode="transient", strategy=ALL), significant={0, 1}, auto_shutdown="all_significant")
    assert ["removed 0.0"] == supervised.exited(0, NORMAL)
    assert ["stop 1.0"] == supervised.exited(2)
    assert ["start 0.1 1.1 2.1"] == supervised.exited(1, NORMAL)
    assert ["removed 1.1"] == supervised.exited(1, NORMAL)
    assert ["removed 0.1", "stop 2.1"] == supervised.exited(0, NORMAL)


@pytest.mark.parametrize("reason", list(Exit))
def test_a_temporary_significant_child_ends_all_however_it_ends(reason: Exit) -> None:
    """A failure does it as well, since it isn't started again; when it was the last, all is over at once."""
    supervised = running(2, Restart(mode="temporary"), significant=[0], auto_shutdown="any_significant")
    assert ["removed 1.0"] == supervised.exited(1, reason)
    assert ["removed 0.0", "finished: automatic shutdown"] == supervised.exited(0, reason)


def test_shutdown_stops_all_in_reverse_order() -> None:
    """Whatever is there is told to stop; what waits to be started again stays away, and what was told before isn't told twice."""
    supervised = running(5, Restart(backoff=1))
    supervised.exited(1)
    supervised.exited(3)
    supervised.now = 1
    assert ["start 1.1 3.1"] == supervised.due()
    supervised.exited(4)
    assert ["stop 3.1 2.0 1.1 0.0"] == supervised.shutdown()
    assert ["stopping", "stopping", "stopping", "stopping", "stopped"] == supervised.states
    assert [[], [], []] == [supervised.shutdown(), supervised.stopped(3), supervised.exited(0)]
    supervised.now = 10
    assert [None, []] == [supervised.core.next_due(), supervised.due()]
    assert [[], ["finished: shutdown"]] == [supervised.stopped(2), supervised.stopped(1)]


def test_shutdown_during_a_restart_of_a_group() -> None:
    """Those already told to stop are waited for, and nothing starts after that."""
    supervised = running(4, Restart(strategy=REST))
    assert ["stop 3.0 2.0"] == supervised.exited(1)
    assert [] == supervised.stopped(3)
    assert ["stop 0.0"] == supervised.shutdown()
    assert [[], ["finished: shutdown"]] == [supervised.stopped(2), supervised.stopped(0)]
    assert ["stopped"] * 4 == supervised.states


def test_escalation_during_a_restart_of_a_group() -> None:
    """The same when a child before the group fails once too often."""
    supervised = running(4, Restart(strategy=REST, max_restarts=1))
    assert ["stop 3.0"] == supervised.exited(2)
    assert ["stop 0.0", "escalate 1.0: 1 restart within 5 s allowed, this would be the 2nd"] == supervised.exited(1)
    assert [[], ["finished: escalated"]] == [supervised.stopped(3), supervised.stopped(0)]


@pytest.mark.parametrize("max_restarts", [0, 3])
def test_events_after_the_end_do_no_harm(max_restarts: int) -> None:
    """Whether it escalated or was shut down: late reports change nothing, and who has started all the same is stopped."""
    supervised = Supervised(2, Restart(max_restarts=max_restarts))
    if max_restarts:
        assert ["stop 1.0 0.0"] == supervised.shutdown()
        supervised.stopped(0)
    else:
        assert ["stop 1.0", "escalate 0.0: 0 restarts within 5 s allowed, this would be the 1st"] == supervised.exited(0)
    assert [] == supervised.started(1)  # it has been told to stop
    supervised.stopped(1)
    assert Phase.ENDED is supervised.core.phase
    for child in (0, 1):
        assert [[], [], []] == [supervised.exited(child), supervised.stopped(child), supervised.exited(child, NORMAL)]
        assert [f"stop {child}.0"] == supervised.started(child)
    assert [[], []] == [supervised.shutdown(), supervised.due()]
    assert ["stopped", "stopped"] == supervised.states


def test_a_second_report_of_an_end_is_no_failure_of_the_next_life() -> None:
    """The end of one life, told twice over different paths, is one restart."""
    supervised = running(1, Restart(max_restarts=1))
    assert ["start 0.1"] == supervised.exited(0)
    assert [[], []] == [supervised.exited(0, incarnation=0), supervised.stopped(0, incarnation=0)]
    assert ["starting"] == supervised.states


def test_a_life_that_was_given_up_is_stopped_when_it_starts() -> None:
    """A former life that reports late that it is up is told to stop, by its number, and the present one goes on."""
    supervised = Supervised(1, Restart(backoff=1))
    supervised.exited(0)
    assert ["stop 0.0"] == supervised.started(0, 0)
    supervised.now = 1
    supervised.due()
    assert ["stop 0.0"] == supervised.started(0, 0)
    assert [] == supervised.stopped(0, 0)
    assert [] == supervised.started(0)
    assert ["running"] == supervised.states


IMPOSSIBLE: dict[str, tuple[str, tuple[Any, ...], str]] = {
    "started twice": ("started", (0, 0, 1.0), "STARTED can't happen in state RUNNING"),
    "stopped without being told": ("stopped", (0, 0, 1.0), "child 0 was reported as stopped, which it was not told to: it is running"),
    "a life to come": ("exited", (0, 1, ABNORMAL, 1.0), "child 0 was never told to start as incarnation 1"),
    "no life": ("started", (0, -1, 1.0), "child 0 was never told to start as incarnation -1"),
    "no such child": ("started", (2, 0, 1.0), "child 2 was never told to start as incarnation 0"),
    "no child at all": ("stopped", (-1, 0, 1.0), "child -1 was never told to start"),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_what_cannot_have_happened_is_a_bug(case: str) -> None:
    """A report that fits nothing is an internal error, and changes nothing."""
    event, arguments, message = IMPOSSIBLE[case]
    supervised = running(2, Restart())
    with pytest.raises(InternalError) as caught:
        getattr(supervised.core, event)(*arguments)
    assert message in str(caught.value)
    supervised.core.validate()
    assert ["running", "running"] == supervised.states


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"size": -1}, "a supervision has 0 children or more, not -1"),
    ({"auto_shutdown": "all"}, "auto_shutdown='all' is unknown: use 'never', 'any_significant', 'all_significant'"),
    ({"significant": [0, 3, -1], "auto_shutdown": "any_significant"}, "significant names [-1, 3], but the children are 0 to 2"),
    ({"significant": [0]}, "significant children are for automatic shutdown"),
    ({"significant": [0], "auto_shutdown": "any_significant", "restart": Restart()}, "a permanent child is always started again"),
    ({"auto_shutdown": "all_significant"}, "auto_shutdown='all_significant' waits for the end of significant children: say which are"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], message: str) -> None:
    """As OTP does, and what could never take effect as well."""
    with pytest.raises(UsageError) as caught:
        Supervision(**{"size": 3, "restart": Restart(mode="transient"), "random": float, **settings})
    assert str(caught.value).startswith(message)
