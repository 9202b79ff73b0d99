"""Counters and their text, without processes."""

from __future__ import annotations

import math
import subprocess
import sys
from bisect import bisect_left
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from monarch_async import observe
from monarch_async._core.events import Failure
from monarch_async.observe.inside.metering import reason_of
from monarch_async.observe.metrics.counters import Labels, Series, Value, merge
from monarch_async.observe.metrics.families import FAMILIES, OTHER, SERIES, Family
from monarch_async.observe.metrics.rendering import PREFIX, render

FROZEN = Path(__file__).with_name("families.txt")
BY_NAME = {family.name: family for family in FAMILIES}


def test_names_and_labels_are_frozen() -> None:
    """Dashboards rely on them: a change is made here and in families.txt, on purpose. Units are in the names, as Prometheus has it."""
    lines = [f"{PREFIX}{family.name} {family.kind} {','.join(family.labels)}".rstrip() for family in FAMILIES]
    assert FROZEN.read_text().splitlines() == lines
    for family in FAMILIES:
        assert (family.kind == "counter") == family.name.endswith("_total")
        assert bool(family.bounds) == (family.kind == "histogram")
        assert list(family.bounds) == sorted(family.bounds)


LABELS = st.text(max_size=8)


@given(st.dictionaries(st.tuples(LABELS, LABELS, LABELS), st.floats(0, 1e12), max_size=5))
def test_any_label_and_number_survives_the_parser(values: dict[tuple[str, str, str], float]) -> None:
    """Quotes, backslashes, line ends and whatever else users call things."""
    values["a", "b", "ok"] = 1.5
    given: dict[Labels, Value] = {labels: value for labels, value in values.items()}  # noqa: C416 - to have another type
    families = {family.name: family for family in text_string_to_metric_families(render({"calls_total": given}))}
    samples = families[f"{PREFIX}calls"].samples
    assert values == {tuple(sample.labels[name] for name in ("actor", "endpoint", "outcome")): sample.value for sample in samples}


@given(st.lists(st.floats(0, 700), max_size=30))
def test_a_histogram_counts_what_is_up_to_each_bound(values: list[float]) -> None:
    """Cumulated, the last bucket has all; sum and count agree."""
    family = BY_NAME["collective_wait_seconds"]
    series = Series(family)
    for value in values:
        at = series.at("sum")
        at[bisect_left(family.bounds, value)] += 1
        at[-1] += value
    text = render({family.name: series.snapshot()})
    families = {found.name: found for found in text_string_to_metric_families(text)}
    for sample in families[PREFIX + family.name].samples if values else ():
        if sample.name.endswith("_bucket"):
            assert sum(value <= float(sample.labels["le"]) for value in values) == sample.value
        elif sample.name.endswith("_count"):
            assert len(values) == sample.value
        else:
            assert math.isclose(math.fsum(values), sample.value, rel_tol=1e-9)


def test_series_are_bounded() -> None:
    """What comes after the first is folded, and counted once each; so it is when the values of processes are added."""
    series = Series(BY_NAME["calls_total"])
    for number in range(SERIES + 7):
        for _ in range(2):
            series.at("A", f"f{number}", "ok")[0] += 1
    values = series.snapshot()
    assert SERIES + 1 == len(values)
    assert 14 == values[OTHER, OTHER, OTHER]
    assert 7 == len(series.folded)
    total: dict[Labels, Value] = {}
    merge(series.family, total, values)
    merge(series.family, total, {("B", "g", "ok"): 5.0, ("A", "f0", "ok"): 1.0})
    assert (19, 3) == (total[OTHER, OTHER, OTHER], total["A", "f0", "ok"])


@pytest.mark.parametrize(("kind", "expected"), [("gauge", 7.0), ("counter", 7.0), ("peak", 4.0)])
def test_values_of_processes_are_added_or_the_largest_is_taken(kind: str, expected: float) -> None:
    """As the family says; histograms item by item."""
    total: dict[Labels, Value] = {}
    for value in (3.0, 4.0):
        merge(Family("x", kind, ""), total, {(): value})
    assert {(): expected} == total
    sums: dict[Labels, Value] = {}
    for counts in ([1.0, 0.0, 2.5], [0.0, 3.0, 9.0]):
        merge(Family("x", "histogram", "", (), (1.0,)), sums, {(): counts})
    assert {(): [1.0, 3.0, 11.5]} == sums


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (None, "sibling"),
        (Failure("m", "A", (0,), "killed", signal=9), "SIGKILL"),
        (Failure("m", "A", (0,), "killed", signal=99), "signal"),
        (Failure("m", "A", (0,), "exited with code 3", exit_code=3), "exit"),
        (Failure("m", "A", (0,), "ValueError in f: x", error="builtins.ValueError"), "exception"),
        (Failure("m", "A", (0,), "stopped itself: done"), "stopped"),
        (Failure("m", "A", (0,), "unreachable for the lease"), "lost"),
    ],
)
def test_reasons_are_few_words(failure: Failure | None, reason: str) -> None:
    """Whatever the text of a failure is."""
    assert reason == reason_of(failure)


def test_what_the_package_offers() -> None:
    """By its own name, loaded when it is first used: what is optional is not needed before."""
    script = (
        "import sys\nfrom monarch_async.observe import Job, attach, json_logging, serve_metrics\n"
        "print([name for name in ('aiohttp', 'opentelemetry', 'prometheus_client') if name in sys.modules])"
    )
    assert "[]\n" == subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        observe.nothing  # type: ignore[attr-defined]  # noqa: B018
