"""Plans: what can't be is refused with a reason, the line says all, and a seed draws the same faults every time."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monarch_async.testing.faults import Faults
from monarch_async.testing.plan import KINDS, Fault, Parameter, Plan, draw


def values_of(parameter: Parameter) -> st.SearchStrategy[Any]:
    if parameter.choices:
        return st.sampled_from(parameter.choices)
    if parameter.type is int:
        return st.integers(int(parameter.least), int(min(parameter.most, 1 << 40)))
    if parameter.type is float:
        low, most = max(parameter.least, parameter.above), min(parameter.most, 1e12)
        return st.floats(low, most, exclude_min=parameter.above >= parameter.least)
    return st.text(max_size=10)


@st.composite
def faults_of(draw: st.DrawFn) -> Fault:
    kind = draw(st.sampled_from(sorted(KINDS)))
    given: dict[str, Any] = {"mesh": draw(st.text(min_size=1, max_size=10)), "rank": draw(st.integers(0, 1 << 20))}
    if kind == "fail_constructor" or draw(st.booleans()):
        given["step"] = draw(st.integers(1, 1 << 40))
        if kind != "fail_constructor":
            given["endpoint"] = draw(st.text(max_size=10))
    else:
        given["time"] = draw(st.floats(0, 1e9))
        if kind == "exhaust_memory":
            given["seconds"] = 0.5
    for name, parameter in KINDS[kind].parameters.items():
        if name == "type":
            given[name] = "some.module:Some.Name"
        elif name == "to":
            given[name] = draw(
                st.one_of(
                    st.just("client"), st.builds(lambda mesh, rank: f"{mesh}[{rank}]", st.text(min_size=1, max_size=10), st.just(1 << 30))
                )
            )
        elif name not in given and (parameter.default is None or draw(st.booleans())):
            given[name] = draw(values_of(parameter))
    return Fault.of(kind, **given)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)  # the first text takes seconds, for Hypothesis's tables
@given(st.integers(), st.lists(faults_of(), max_size=4))
def test_the_line_of_a_plan_replays_it(seed: int, faults: list[Fault]) -> None:
    """Whatever names and texts there are: it is one line, printable, and reads as the same plan."""
    plan = Plan(seed, tuple(faults))
    line = str(plan)
    assert [line] == line.splitlines()
    assert line.isascii()
    assert line.isprintable()
    assert plan == Plan.parse(line)
    replayed = Faults.replay(line)
    assert (plan, line, seed) == (replayed.plan, str(replayed.plan), replayed.seed)


def test_a_line_reads_well() -> None:
    """What people have to type or compare: parameters that have their default are left out."""
    faults = Faults(7)
    faults.at(step=3, mesh="workers", rank=2).kill()
    faults.at(step=1, mesh="my workers", rank=0, endpoint="train").fail(ValueError("bad\nbatch; really"))
    faults.at(time=1, mesh="procs", rank=0).link(("procs", 1)).cut(2)
    line = (
        'seed=7; kill workers[2] step=3; fail "my workers"[0] step=1 endpoint="train" type="builtins:ValueError" '
        'text="bad\\nbatch; really"; cut procs[0] time=1.0 to="procs[1]" seconds=2.0'
    )
    assert line == str(faults.plan)
    assert faults.plan == Faults.replay(line).plan


@given(st.integers(), st.integers(0, 8), st.integers(1, 5), st.floats(0.01, 1e6))
def test_the_same_seed_draws_the_same_plan(seed: int, count: int, ranks: int, within: float) -> None:
    """Every fault is a valid one, in its time and on a rank that was named; and its line replays it."""
    plans = []
    for _ in range(2):
        faults = Faults(seed)
        faults.random(count, mesh="workers", ranks=ranks, within=within)
        faults.random(1, mesh="others", ranks=[4], within=within, kinds=["kill"])
        plans.append(faults.plan)
    assert plans[0] == plans[1]
    assert count + 1 == len(plans[0].faults)
    assert plans[0] == Plan.parse(str(plans[0]))
    for fault in plans[0].faults[:count]:
        assert fault.rank < ranks
        assert (fault.time is None) == (fault.kind == "fail_constructor")
        assert 0 <= (fault.time or 0) <= within + 0.001


def test_different_seeds_draw_different_plans() -> None:
    """And one that nobody has given is drawn anew for each object."""
    plans = {
        str(Plan(0, tuple(draw(random.Random(seed), 5, kinds=list(KINDS), mesh="m", ranks=range(4), within=9.0)))) for seed in range(20)
    }
    assert 20 == len(plans)
    assert Faults().seed != Faults().seed


VALID: dict[str, Any] = {"kind": "kill", "mesh": "m", "rank": 0, "step": 1}

BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "an unknown kind": ({"kind": "explode"}, ValueError, "unknown kind of fault 'explode'; known are kill, freeze"),
    "step and time": ({"time": 1.0}, ValueError, "kill needs either step= .* or time="),
    "neither": ({"step": None}, ValueError, "kill needs either step= .* or time="),
    "step 0": ({"step": 0}, ValueError, "steps count from 1; step=0 never comes"),
    "half a step": ({"step": 1.5}, TypeError, "step is a whole number, not 1.5"),
    "a negative time": ({"step": None, "time": -0.1}, ValueError, "time must be 0 or more seconds after the start, not -0.1"),
    "no time at all": ({"step": None, "time": math.nan}, ValueError, "time must be 0 or more"),
    "a time that is text": ({"step": None, "time": "1"}, TypeError, "time is a number of seconds, not '1'"),
    "a negative rank": ({"rank": -1}, ValueError, "rank must be 0 or more, not -1"),
    "a rank that is a name": ({"rank": "0"}, TypeError, "rank is the position of a member"),
    "no mesh": ({"mesh": ""}, TypeError, "mesh is the name of a mesh"),
    "an endpoint and a time": ({"step": None, "time": 1.0, "endpoint": "x"}, ValueError, "endpoint= goes with step="),
    "an unknown parameter": ({"seconds": 1.0}, ValueError, "kill has no parameter 'seconds'; it has none"),
    "a missing parameter": ({"kind": "block"}, ValueError, "block needs seconds="),
    "a negative duration": ({"kind": "block", "seconds": -1}, ValueError, "seconds of block must be above 0 and at most 86400, not -1"),
    "no duration": ({"kind": "cut", "seconds": 0}, ValueError, "seconds of cut must be above 0"),
    "a duration without end": ({"kind": "block", "seconds": math.inf}, ValueError, "at most 86400, not inf"),
    "a duration that is text": ({"kind": "block", "seconds": "1"}, TypeError, "seconds of block is of type float, not '1'"),
    "an exit code that no process has": (
        {"kind": "exit", "code": 256},
        ValueError,
        "code of exit must be at least 0 and at most 255, not 256",
    ),
    "an unknown way": ({"kind": "cut", "seconds": 1, "way": "up"}, ValueError, "way of cut is one of both, out, in, not 'up'"),
    "both ways for frames": ({"kind": "drop", "way": "both"}, ValueError, "way of drop is one of out, in"),
    "a link to itself": ({"kind": "reset", "to": "m[0]"}, ValueError, r"both ends would be m\[0\]"),
    "a link to no member": ({"kind": "reset", "to": "m"}, ValueError, r'"client" or "mesh\[rank\]", not \'m\''),
    "a constructor at a time": ({"kind": "fail_constructor", "step": None, "time": 1.0}, ValueError, "fail_constructor takes step= alone"),
    "memory at a time, for no time": ({"kind": "exhaust_memory", "step": None, "time": 1.0}, ValueError, "needs seconds="),
    "a type without a module": ({"kind": "fail", "type": "ValueError"}, ValueError, 'type of an exception is "module:name"'),
}


@pytest.mark.parametrize("case", BAD)
def test_what_can_not_be_is_refused(case: str) -> None:
    """With an error that names the value and says what could be."""
    changed, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        Fault.of(**{**VALID, **changed})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "expected 'seed='"),
        ("seed=x", "expected a value"),
        ("seed=1.5", "a seed is a whole number"),
        ("seed=1;kill m[0] step=1", "expected '; '"),
        ("seed=1; m[0] step=1", r"expected ' '"),
        ("seed=1; explode m[0] step=1", "unknown kind of fault 'explode'"),
        ("seed=1; kill m[0] step=1 step=2", "step is given twice"),
        ('seed=1; kill m[0] step=1 mesh="x"', "mesh is given twice"),
        ("seed=1; kill m[0 step=1", r"expected '\]'"),
        ("seed=1; kill m[0] step", "expected '='"),
        ("seed=1; kill m[-1] step=1", "rank must be 0 or more"),
        ("seed=1; kill m[0] step=1\n", "expected '; '"),
    ],
)
def test_what_is_no_line_is_refused(line: str, message: str) -> None:
    """And it is said where and why."""
    with pytest.raises(ValueError, match=message):
        Plan.parse(line)


def test_random_faults_that_can_not_be() -> None:
    """Kinds, ranks, number and time are looked at before anything is planned."""
    faults = Faults(1)
    bad: list[tuple[dict[str, Any], str]] = [
        ({"kinds": ["explode"]}, "unknown kind of fault 'explode'"),
        ({"kinds": []}, "need kinds"),
        ({"ranks": 0}, "ranks to happen to"),
        ({"within": 0.0}, "within is a positive number"),
        ({"n": -1}, "n is how many faults"),
    ]
    for changed, message in bad:
        arguments: dict[str, Any] = {"n": 1, "mesh": "m", "within": 1.0, "ranks": 2, **changed}
        with pytest.raises(ValueError, match=message):
            faults.random(**arguments)
    assert () == faults.plan.faults
    with pytest.raises(TypeError, match="a seed is a whole number"):
        Faults("x")  # type: ignore[arg-type]


def test_exceptions_that_could_not_be_made_again() -> None:
    """They are refused when they are planned, not where they would have to be raised."""

    class Local(Exception):
        pass

    at = Faults(1).at(step=1, mesh="m", rank=0)
    for error, why in [
        (Local("x"), "can't be imported"),
        (OSError(2, "no such file"), "by its type and one text"),
        (UnicodeDecodeError, "can't be made from a text alone"),
        (int, "an exception or its type is wanted"),
    ]:
        with pytest.raises(TypeError, match=why):
            at.fail(error)  # type: ignore[arg-type]
