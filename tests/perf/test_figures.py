"""The arithmetic of the report."""

from __future__ import annotations

import pytest

from perf.results import Results
from perf.stats import Spread, figure, quantile, relate, spread
from perf.table import Bar, Unit
from perf.units import scaled


def test_quantiles_and_figures() -> None:
    """The statistic of a round is that of its samples, in whatever order they came."""
    samples = [float(number) for number in range(100, 0, -1)]
    assert 50.5 == figure(samples, "median")
    assert 100.0 == figure(samples, "p99")
    assert 1.0 == figure(samples, "best")
    assert 26.0 == quantile(samples, 0.25)
    with pytest.raises(ValueError, match="no samples"):
        quantile([], 0.5)


def test_ratios_are_taken_within_rounds() -> None:
    """A machine that slows down between rounds changes no ratio: the ratio of medians would be 2.5 here."""
    assert Spread(2.0, 2.0, 2.0) == relate([2.0, 20.0, 4.0], [1.0, 10.0, 2.0], "times")
    assert Spread(1.0, 0.5, 2.0) == relate([2.0, 1.5, 3.0], [1.0, 1.0, 1.0], "above")
    assert Spread(2.0, 1.0, 9.0) == spread([9.0, 1.0, 2.0])


def results() -> Results:
    found = Results({})
    for call, echo in ((3.0, 2.0), (30.0, 20.0)):
        found.add("", "raw", {"call": [echo]})
        found.add("", "ours", {"call": [call], "kill": [0.01] * 50})
    found.add("xoscar", "ours", {"mesh": [1.0]})
    found.add("xoscar", "xoscar", {"mesh": [4.0]})
    return found


@pytest.mark.parametrize(
    ("bar", "value", "met"),
    [
        (Bar("call", "≤", 1.5, "times", ("raw", "call")), 1.5, True),
        (Bar("call", "≤", 1.4, "times", ("raw", "call")), 1.5, False),
        (Bar("call", "≥", 1.4, "times", ("raw", "call")), 1.5, True),
        (Bar("call", "≤", 5.5, "above", ("raw", "call")), 5.5, True),
        (Bar("call", "≤", 16.0), 16.5, False),
        (Bar("mesh", "≤", 0.35, "times", ("xoscar", "mesh")), 0.25, True),
        (Bar("kill", "≤", 0.02, statistic="p99", pooled=True), 0.01, True),
    ],
)
def test_what_a_bar_says(bar: Bar, value: float, met: bool) -> None:
    """A bar is judged in its own terms, against the system and in the stage that it names."""
    verdict = results().judge(bar)
    assert verdict.value is not None
    assert (value, met) == (verdict.value.middle, verdict.met)


@pytest.mark.parametrize("bar", [Bar("local", "≤", 1.0), Bar("call", "≤", 1.0, "times", ("ray", "call"))])
def test_a_bar_without_a_measurement_says_nothing(bar: Bar) -> None:
    """What was not measured, or has nothing to be compared with, is neither met nor missed."""
    verdict = results().judge(bar)
    assert (None, None) == (verdict.value, verdict.met)


def test_ours_and_the_limit_are_reported_without_peers_beside_them() -> None:
    """A system is reported from the first stage it was in; ratios to a peer come from the peer's own stage."""
    assert [("", "raw"), ("", "ours"), ("xoscar", "xoscar")] == results().systems()
    assert Spread(0.25, 0.25, 0.25) == results().ratio("xoscar", "xoscar", "mesh")


def test_turns_of_a_round_are_one_round() -> None:
    """Samples of later turns join those of the first; the next round stands alone."""
    found = Results({})
    for turn, samples in ((0, [1.0]), (1, [2.0, 9.0]), (0, [4.0])):
        found.add("", "raw", {"call": samples}, turn=turn)
    assert {"call": [[1.0, 2.0, 9.0], [4.0]]} == found.stages[""]["raw"]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1.5, "s", "1.50 s"),
        (0.0123, "s", "12.3 ms"),
        (0.000_121_4, "s", "121 µs"),
        (2e-7, "s", "0.20 µs"),
        (123_456.7, "/s", "123,457 /s"),
        (9_900.0, "B", "9.90 KB"),
        (3.8e6, "B", "3.80 MB"),
        (10.4e9, "B/s", "10.4 GB/s"),
        (5e8, "B/s", "500 MB/s"),
    ],
)
def test_figures_as_a_person_reads_them(value: float, unit: Unit, text: str) -> None:
    """Three digits, and the largest unit that leaves something before the point."""
    assert text == scaled(value, unit)
