"""Random events against a naive model of OTP's rules, and against a world that starts and stops as it is told.

The model keeps every restart there ever was and looks at all children each time; it shares nothing with what it is compared with but the
names of the instructions.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from monarch_async._core.instructions import Exit
from monarch_async._core.supervision_states import Phase
from monarch_async.restart import Backoff, Restart
from tests.core.supervised import Supervised

MODES = st.sampled_from(["permanent", "permanent", "transient", "transient", "temporary"])
STRATEGIES = st.sampled_from(["one_for_one", "one_for_all", "rest_for_one"])
QUARTERS = st.integers(1, 24).map(lambda quarters: quarters / 4)  # floats without rounding, so that borders are hit


class Model:
    """What should happen, worked out from the whole history."""

    def __init__(self, size: int, restart: Restart, significant: frozenset[int], any_ends: bool) -> None:
        self.restart, self.significant, self.any_ends = restart, significant, any_ends
        self.lives = [0] * size
        self.alive = dict.fromkeys(range(size), -1.0)  # since when it is up; -1 while it only starts
        self.stopping: set[int] = set()
        self.waiting: dict[int, float] = {}  # from when on it may start; only its group's latest matters
        self.restarts: list[float] = []
        self.rows: list[list[str]] = [[] for _ in range(size)]  # of each child: its failures since it last did well
        self.cause = ""

    def name(self, children: list[int]) -> str:
        return " ".join(f"{child}.{self.lives[child]}" for child in children)

    def stop(self, children: set[int]) -> list[str]:
        told = sorted(children & set(self.alive), reverse=True)
        for child in told:
            del self.alive[child]
        self.stopping |= set(told)
        return [f"stop {self.name(told)}"] if told else []

    def finish(self) -> list[str]:
        return [f"finished: {self.cause}"] if not self.alive and not self.stopping else []

    def end(self, cause: str) -> list[str]:
        self.cause = cause
        self.waiting.clear()
        return self.stop(set(self.alive))

    def start(self, now: float, ended: int | None = None) -> list[str]:
        """Whatever may start at this time; one by one, only what has just ended, if that is why this is asked."""
        if self.restart.strategy == "one_for_one":
            ready = sorted(child for child, due in self.waiting.items() if due <= now and ended in (None, child))
        else:
            ready = [] if self.stopping or max(self.waiting.values(), default=0) > now else sorted(self.waiting)
        for child in ready:
            del self.waiting[child]
            self.lives[child] += 1
            self.alive[child] = -1.0
        return [f"start {self.name(ready)}"] if ready else []

    def ended(self, child: int, normally: bool, now: float) -> list[str]:
        if child in self.stopping:
            self.stopping.remove(child)
            if self.cause:
                return self.finish()
            self.waiting[child] = 0
            return self.start(now)
        up_since = self.alive.pop(child)
        again = {"permanent": True, "transient": not normally, "temporary": False}[self.restart.mode]
        if not again:
            active = self.significant & (self.alive.keys() | self.stopping | self.waiting.keys())
            ends = child in self.significant and (self.any_ends or not active)
            return [f"removed {self.name([child])}", *([*self.end("automatic shutdown"), *self.finish()] if ends else [])]
        self.restarts.append(now)
        if sum(now - time <= self.restart.within for time in self.restarts) > self.restart.max_restarts:
            stops = self.end("escalated")
            return [*stops, f"escalate {self.name([child])}", *self.finish()]
        if up_since >= 0 and now - up_since > self.restart.within:
            self.rows[child].clear()
        self.rows[child].append("failed")
        backoff, due = self.restart.backoff, now
        if backoff is not None:
            delay = backoff.initial
            for _ in self.rows[child][1:]:
                delay = min(delay * backoff.factor, backoff.maximum)
            due += delay
        self.waiting[child] = due
        everyone = set(range(len(self.lives)))
        group = {"one_for_one": {child}, "one_for_all": everyone, "rest_for_one": {other for other in everyone if other >= child}}
        stops = self.stop(group[self.restart.strategy])
        for other in group[self.restart.strategy] - self.stopping - self.waiting.keys():
            self.waiting[other] = 0
        return [*stops, *self.start(now, child)]


class SupervisionMachine(RuleBasedStateMachine):
    """The world knows which lives there are, told to stop or not, and reports on them in any order."""

    @initialize(
        size=st.integers(1, 5),
        mode=MODES,
        strategy=STRATEGIES,
        max_restarts=st.integers(0, 6),
        within=QUARTERS,
        initial=st.none() | QUARTERS,
        factor=st.sampled_from([1, 1.5, 2]),
        significant=st.frozensets(st.integers(0, 4)),
        any_ends=st.booleans(),
    )
    def begin(
        self,
        size: int,
        mode: str,
        strategy: str,
        max_restarts: int,
        within: float,
        initial: float | None,
        factor: float,
        significant: frozenset[int],
        any_ends: bool,
    ) -> None:
        backoff = Backoff(initial, factor=factor, maximum=8, jitter=0) if initial is not None else None
        restart = Restart(mode=mode, strategy=strategy, max_restarts=max_restarts, within=within, backoff=backoff)  # type: ignore[arg-type]
        significant = frozenset(child for child in significant if child < size and mode != "permanent")
        auto = "never" if not significant else "any_significant" if any_ends else "all_significant"
        self.supervised = Supervised(size, restart, significant=significant, auto_shutdown=auto)  # type: ignore[arg-type]
        self.model = Model(size, restart, significant, any_ends)
        self.size = size
        self.now = self.supervised.now = 1.0

    def agree(self, expected: list[str], actual: list[str]) -> None:
        assert expected == [line.partition(":")[0] if line.startswith("escalate") else line for line in actual]

    def candidates(self, *, starting: bool) -> list[int]:
        return sorted(child for child, since in self.model.alive.items() if not starting or since < 0)

    @precondition(lambda self: self.candidates(starting=True))
    @rule(data=st.data())
    def start_up(self, data: st.DataObject) -> None:
        child = data.draw(st.sampled_from(self.candidates(starting=True)))
        self.model.alive[child] = self.now
        self.agree([], self.supervised.started(child))

    @precondition(lambda self: self.candidates(starting=True))
    @rule()
    def all_start_up(self) -> None:
        for child in self.candidates(starting=True):
            self.model.alive[child] = self.now
            self.agree([], self.supervised.started(child))

    @precondition(lambda self: self.candidates(starting=False))
    @rule(data=st.data(), normally=st.booleans())
    def end_by_itself(self, data: st.DataObject, normally: bool) -> None:
        child = data.draw(st.sampled_from(self.candidates(starting=False)))
        self.agree(self.model.ended(child, normally, self.now), self.supervised.exited(child, Exit.NORMAL if normally else Exit.ABNORMAL))

    @precondition(lambda self: self.model.stopping)
    @rule(data=st.data(), how=st.sampled_from(["stopped", "normal", "abnormal"]))
    def end_when_told(self, data: st.DataObject, how: str) -> None:
        child = data.draw(st.sampled_from(sorted(self.model.stopping)))
        expected = self.model.ended(child, False, self.now)
        self.agree(expected, self.supervised.stopped(child) if how == "stopped" else self.supervised.exited(child, Exit(how)))

    @rule(quarters=QUARTERS, look=st.booleans())
    def time_passes(self, quarters: float, look: bool) -> None:
        self.now += quarters
        self.supervised.now = self.now
        if look:
            self.agree(self.model.start(self.now), self.supervised.due())

    @rule(data=st.data())
    def stray_report(self, data: st.DataObject) -> None:
        """On a life that is over: nothing happens, and one that says that it has started is stopped."""
        child = data.draw(st.integers(0, self.size - 1))
        is_there = child in self.model.alive or child in self.model.stopping
        lives = range(self.model.lives[child] + (not is_there))
        if lives:
            life = data.draw(st.sampled_from(lives))
            self.agree([], self.supervised.exited(child, data.draw(st.sampled_from(Exit)), life))
            self.agree([], self.supervised.stopped(child, life))
            self.agree([f"stop {child}.{life}"], self.supervised.started(child, life))

    @precondition(lambda self: self.model.stopping)
    @rule(data=st.data())
    def start_up_when_told_to_stop(self, data: st.DataObject) -> None:
        self.agree([], self.supervised.started(data.draw(st.sampled_from(sorted(self.model.stopping)))))

    @precondition(lambda self: max(self.model.lives) >= 2)
    @rule()
    def shut_down(self) -> None:
        expected = [] if self.model.cause else [*self.model.end("shutdown"), *self.model.finish()]
        self.agree(expected, self.supervised.shutdown())

    @invariant()
    def next_due_is_when_something_starts(self) -> None:
        waiting, one_by_one = self.model.waiting, self.model.restart.strategy == "one_for_one"
        due = self.supervised.core.next_due()
        if not waiting or (self.model.stopping and not one_by_one):
            assert None is due
        else:
            assert (min if one_by_one else max)(waiting.values()) == due

    @invariant()
    def present_lives_agree(self) -> None:
        assert self.model.lives == [self.supervised.core.incarnation(child) for child in range(self.size)]
        assert bool(self.model.cause) == (self.supervised.core.phase is not Phase.SUPERVISING)

    def teardown(self) -> None:
        """Nothing is forgotten: once all that was told to stop has, and time has passed, nobody waits for anything."""
        if not hasattr(self, "model"):
            return
        for child in sorted(self.model.stopping):
            self.agree(self.model.ended(child, False, self.now), self.supervised.stopped(child))
        while (due := self.supervised.core.next_due()) is not None:
            self.now = self.supervised.now = max(due, self.now)
            self.agree(self.model.start(self.now), self.supervised.due())
        assert {} == self.model.waiting
        assert set() == {"stopping", "delayed"} & set(self.supervised.states)


TestSupervision = SupervisionMachine.TestCase
TestSupervision.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
