"""A run as text: a table of the bars, a table of all systems, what failed; and as JSON, with every sample."""

from __future__ import annotations

import json
from collections.abc import Iterator

from perf.results import Results, Verdict
from perf.stats import Spread
from perf.table import METRICS, OURS, Bar
from perf.units import scaled

__all__ = ["to_json", "to_markdown"]


def to_markdown(results: Results) -> str:
    """The report as Markdown."""
    return "\n".join(_lines(results)) + "\n"


def to_json(results: Results) -> str:
    """Everything: the run, the samples of each round, the verdicts."""
    verdicts = [
        {
            "metric": verdict.bar.metric,
            "bar": _demand(verdict.bar),
            "value": list(verdict.value) if verdict.value is not None else None,
            "met": verdict.met,
        }
        for verdict in results.verdicts()
    ]
    content = {"about": results.about, "verdicts": verdicts, "failures": results.failures, "stages": results.stages}
    return json.dumps(content, indent=1, ensure_ascii=False)


def _lines(results: Results) -> Iterator[str]:
    about = results.about
    versions = ", ".join(f"{name} {number}" for name, number in sorted(about["versions"].items()))
    yield f"# Benchmarks, {about['date']}"
    yield ""
    yield f"{about['machine']}; {versions}. {about['rounds']} rounds; meshes of {about['procs']} processes."
    loads = ", ".join(f"{load:.1f} ({stage})" for stage, load in about["load"].items())
    yield f"Load average of the machine when each stage began: {loads}."
    if about["quick"]:
        yield "The quick form: it shows that everything runs; its figures mean nothing."
    yield ""
    yield "| bar | measured | demanded | met |"
    yield "|---|---|---|---|"
    for verdict in results.verdicts():
        met = {True: "yes", False: "**no**", None: "–"}[verdict.met]
        yield f"| {METRICS[verdict.bar.metric].title} | {_measured(results, verdict)} | {_demand(verdict.bar)} | {met} |"
    yield ""
    yield "Medians; in brackets the lowest and the highest round. Ratios are taken round by round."
    yield ""
    systems = results.systems()
    yield f"| workload | {' | '.join(system for _, system in systems)} |"
    yield f"|---|{'---|' * len(systems)}"
    for name, metric in METRICS.items():
        cells = [_cell(results, stage, system, name) for stage, system in systems]
        if any(cells):
            yield f"| {metric.title} | {' | '.join(cell or '–' for cell in cells)} |"
        if name in ("call", "kill"):
            cells = [_p99(results, stage, system, name) for stage, system in systems]
            if any(cells):
                yield f"| {metric.title}, p99 | {' | '.join(cell or '–' for cell in cells)} |"
    peers = [(stage, system) for stage, system in systems if stage]
    if peers:
        yield from _ratios(results, peers)
    if results.failures:
        yield from ("", "Failed:", "")
        yield from (f"```\n{text.strip()}\n```" for text in results.failures)


def _ratios(results: Results, peers: list[tuple[str, str]]) -> Iterator[str]:
    """How ours stands to each peer, where both were measured in turns."""
    yield ""
    yield f"| ours to its peers | {' | '.join(system for _, system in peers)} |"
    yield f"|---|{'---|' * len(peers)}"
    for name, metric in METRICS.items():
        found = [results.ratio(stage, system, name) for stage, system in peers]
        if any(found):
            yield f"| {metric.title} | {' | '.join('–' if value is None else _times(value) for value in found)} |"


def _cell(results: Results, stage: str, system: str, metric: str) -> str:
    value = results.summary(stage, system, metric)
    return scaled(value.middle, METRICS[metric].unit) if value is not None else ""


def _p99(results: Results, stage: str, system: str, metric: str) -> str:
    value = results.summary(stage, system, metric, "p99")
    return scaled(value.middle, METRICS[metric].unit) if value is not None else ""


def _times(value: Spread) -> str:
    return f"× {value.middle:.2f} ({value.low:.2f} – {value.high:.2f})"


def _measured(results: Results, verdict: Verdict) -> str:
    """The value in the bar's terms, and for a relation the figure behind it."""
    bar, value = verdict.bar, verdict.value
    if value is None:
        return "not measured"
    unit = METRICS[bar.metric].unit
    if bar.relation == "times":
        ours = results.summary("", OURS, bar.metric)
        return f"{_times(value)}{f': {scaled(ours.middle, unit)}' if ours is not None else ''}"
    texts = [scaled(part, unit) for part in value]
    text = texts[0] if value.low == value.high else f"{texts[0]} ({texts[1]} – {texts[2]})"
    return f"{bar.statistic} {text}" if bar.statistic is not None else text


def _demand(bar: Bar) -> str:
    """A bar as a person says it."""
    unit = METRICS[bar.metric].unit
    if bar.reference is None:
        return f"{bar.statistic or ''} {bar.sense} {scaled(bar.figure, unit)}".strip()
    system, metric = bar.reference
    of = system if metric == bar.metric else METRICS[metric].title
    return f"{bar.sense} {bar.figure:g} × {of}" if bar.relation == "times" else f"{bar.sense} {scaled(bar.figure, unit)} over {of}"
