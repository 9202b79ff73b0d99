"""How a recording is drawn: values in, a trace out."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from monarch_async.health import Health, ProcState
from monarch_async.ids import ProcAddress
from monarch_async.observe.inside.recording import CALL, COLLECTIVE, COUNTER, FAULT, HANDLER
from monarch_async.observe.survey import Proc
from monarch_async.observe.timeline import _corrected, _Followed
from monarch_async.observe.trace_events import Recording, Silence, trace_events
from tests.observe.trace_format import names_of, wrong_in


def of_phase(trace: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def test_a_call_flows_to_its_handler() -> None:
    """From the program's track, and from inside of a handler to the next; the clock of another host is put right."""
    client = Recording("c", "client", "n01", 1, [(CALL, 10.001, "", 7), (CALL, 10.5, "", 8)])
    first = Recording("a", "gpus[0]", "n01", 2, [(HANDLER, 10.002, 10.009, "a[0]", "step", "c", 7, "ok"), (CALL, 10.003, "a[0]", 3)])
    second = Recording("b", "gpus[1]", "n02", 2, [(HANDLER, 110.004, 110.008, "a[1]", "next", "a", 3, "error")], ahead=100.0)
    trace = trace_events([client, first, second], 10.0, 11.0)
    assert [] == wrong_in(trace)
    assert {1: "client (n01, pid 1)", 2: "gpus[0] (n01, pid 2)", 3: "gpus[1] (n02, pid 2)"} == names_of(trace, "process_name")
    slices = {event["name"]: event for event in of_phase(trace, "X")}
    assert {"call a[0].step", "a[0].step", "a[1].next"} == set(slices)
    assert (4000.0, 4000.0) == (slices["a[1].next"]["ts"], slices["a[1].next"]["dur"])
    assert [(1, 1000.0, 1), (2, 3000.0, 2)] == [(event["pid"], event["ts"], event["id"]) for event in of_phase(trace, "s")]
    assert [(2, 2000.0, 1), (3, 4000.0, 2)] == sorted((event["pid"], event["ts"], event["id"]) for event in of_phase(trace, "f"))


def test_handlers_that_overlap_are_spread() -> None:
    """Over threads of the actor's name, as few as do."""
    times = [(0.0, 4.0), (1.0, 2.0), (2.0, 3.0), (3.5, 9.0)]
    events = [(HANDLER, start, end, "a[0]", "f", "", 0, "ok") for start, end in times]
    trace = trace_events([Recording("a", "gpus[0]", "", 0, events)], 0.0, 5.0)
    assert [] == wrong_in(trace)
    threads = names_of(trace, "thread_name")
    assert ["a[0]", "a[0] (2)", "a[0] (2)", "a[0] (2)"] == [
        threads[event["pid"], event["tid"]] for event in sorted(of_phase(trace, "X"), key=lambda event: event["ts"])
    ]
    assert 1.5e6 == max(of_phase(trace, "X"), key=lambda event: event["ts"])["dur"]  # it is not over


def test_what_else_there_is() -> None:
    """Counters, faults, collectives, silence; what was dropped is said."""
    events = [
        (COUNTER, 1.0, "mailbox messages", 3),
        (FAULT, 2.0, "failed", "a[0]", "ValueError in f"),
        (COLLECTIVE, 1.0, 3.0, "all_reduce", "done", 2.5),
        (COLLECTIVE, 1.5, 2.0, "broadcast", "failed", 0.0),
    ]
    silent = Recording("s", "gpus[1]", "n01", 9, (), silence=Silence("frozen", "a[1].f", -5.0))
    trace = trace_events([Recording("a", "gpus[0]", "", 0, events, dropped=12), silent], 0.0, 4.0)
    assert [] == wrong_in(trace)
    assert [{"value": 3}] == [event["args"] for event in of_phase(trace, "C")]
    assert ["failed: a[0]"] == [event["name"] for event in of_phase(trace, "i")]
    slices = {event["name"]: (event["ts"], event["dur"], event["args"]) for event in of_phase(trace, "X")}
    assert (1e6, 2e6, {"state": "done", "waited_ms": 1500.0}) == slices["all_reduce"]
    assert (0.0, 4e6, {}) == slices["frozen: a[1].f"]
    assert {"gpus[0]": 12} == trace["otherData"]["dropped"]


MOMENTS = st.floats(0, 10, allow_nan=False)
ACTORS = st.sampled_from(["a[0]", "a[1]"])
UIDS = st.sampled_from(["p", "q"])
HANDLERS = st.tuples(st.just(HANDLER), MOMENTS, MOMENTS, ACTORS, st.just("f"), UIDS, st.integers(0, 9), st.just("ok"))
CALLS = st.tuples(st.just(CALL), MOMENTS, st.one_of(st.just(""), ACTORS), st.integers(0, 9))
COLLECTIVES = st.tuples(st.just(COLLECTIVE), MOMENTS, MOMENTS, st.just("sum"), st.just("done"), st.just(0.0))


def ascending(event: tuple[Any, ...]) -> tuple[Any, ...]:
    if event[0] in (HANDLER, COLLECTIVE):
        return (event[0], *sorted(event[1:3]), *event[3:])
    return event


@given(st.lists(st.one_of(HANDLERS, CALLS, COLLECTIVES), max_size=30), st.lists(st.one_of(HANDLERS, CALLS), max_size=30), MOMENTS)
def test_any_recording_is_drawn_by_the_rules(first: list[Any], second: list[Any], ahead: float) -> None:
    """Whatever times and numbers there are, also such as can't be: nothing that a viewer would stumble over."""
    recordings = [
        Recording("p", "p", "", 0, [ascending(event) for event in first]),
        Recording("q", "q", "", 0, [ascending(event) for event in second], ahead),
    ]
    assert [] == wrong_in(trace_events(recordings, 2.0, 8.0))


def test_clocks_agree_with_the_calls_that_were_seen() -> None:
    """No handler begins before it was called: what was measured of a host's clock is moved just so far, in either direction."""
    near, far = followed("a", "here"), followed("b", "there")
    near.events = [(CALL, 10.0, "", 1), (CALL, 11.0, "", 2), (HANDLER, 12.5, 12.6, "x[0]", "f", "b", 1, "ok")]
    far.events = [
        (HANDLER, 110.3, 110.4, "y[0]", "f", "a", 1, "ok"),
        (HANDLER, 111.1, 111.2, "y[0]", "f", "a", 2, "ok"),
        (CALL, 112.4, "", 1),
    ]
    for measured, expected in ((100.5, 100.1), (100.0, 100.0), (99.0, 99.9)):
        assert math.isclose(expected, _corrected({"there": measured}, [near, far], "here")["there"])
    assert {"there": 99.0} == _corrected({"there": 99.0}, [near, followed("b", "there")], "here")


def followed(uid: str, host: str) -> _Followed:
    address = ProcAddress(uid, host, "", name=uid)
    return _Followed(Proc(address, "proc", 1, Health(ProcState.READY), None, host, address), 1)
