"""A run as a picture: horizontal bars on a logarithmic scale, grouped by metric, one panel for each unit. Plain SVG.

A short line across a group marks the bar that ours must meet, where that is an absolute figure or can be worked out in this run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from perf.results import Results
from perf.table import BARS, METRICS, OURS, RAW, Bar, Metric, Unit
from perf.units import scaled

__all__ = ["draw"]

_COLOURS = {OURS: "#1f6feb", RAW: "#8b949e", "monarch": "#e3742f", "ray": "#8957e5", "xoscar": "#2da44e"}
_TITLES: dict[Unit, str] = {
    "s": "time: shorter is better",
    "/s": "messages a second: longer is better",
    "B/s": "payload: longer is better",
    "B": "memory: shorter is better",
}
_LEFT, _WIDTH, _RIGHT = 350, 560, 110
_BAR, _GAP, _GROUP = 13, 2, 12

_HALO = 'stroke="white" stroke-width="3" paint-order="stroke"'
"""A figure stays readable on whatever it lies."""

_Panel = list[tuple[Metric, list[tuple[str, float]]]]


@dataclass(frozen=True, slots=True)
class _Scale:
    """From a value to a place: whole decades, so that every power of ten has a line."""

    low: int
    high: int

    @classmethod
    def of(cls, values: list[float]) -> _Scale:
        low = math.floor(math.log10(min(values)))
        return cls(low, max(math.ceil(math.log10(max(values))), low + 1))

    def x(self, value: float) -> float:
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return _LEFT + _WIDTH * min(max(share, 0.0), 1.0)


def draw(results: Results) -> str:
    """The chart of a run."""
    systems = results.systems()
    parts = list(_legend(systems))
    y = 70.0
    for unit, title in _TITLES.items():
        panel = _values(results, systems, unit)
        if panel:
            lines, y = _panel(panel, {metric.name: _mark(results, metric) for metric, _ in panel}, unit, title, y)
            parts += lines
    width, height = _LEFT + _WIDTH + _RIGHT, math.ceil(y)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    heading = f"monarch_async, {results.about['date']}: {results.about['machine']}"
    return "\n".join(
        [
            f'{head} font-family="sans-serif" font-size="12">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            f'<text x="16" y="24" font-size="15" font-weight="bold">{escape(heading)}</text>',
            *parts,
            "</svg>\n",
        ]
    )


def _values(results: Results, systems: list[tuple[str, str]], unit: Unit) -> _Panel:
    """What a panel shows: each metric with the systems that measured it."""
    panel = []
    for name, metric in METRICS.items():
        if metric.unit == unit:
            found = [(system, results.summary(stage, system, name)) for stage, system in systems]
            values = [(system, value.middle) for system, value in found if value is not None and value.middle > 0]
            if values:
                panel.append((metric, values))
    return panel


def _mark(results: Results, metric: Metric) -> float | None:
    """What the bars demand of a metric, as a figure of this run; the hardest, where there are several."""
    demands = [demand for bar in BARS if bar.metric == metric.name and (demand := _demand(results, bar)) is not None]
    return (min if metric.unit in ("s", "B") else max)(demands, default=None)


def _demand(results: Results, bar: Bar) -> float | None:
    if bar.reference is None:
        return bar.figure if bar.statistic is None else None
    system, metric = bar.reference
    reference = results.summary(system if system in results.stages else "", system, metric)
    if reference is None:
        return None
    return reference.middle * bar.figure if bar.relation == "times" else reference.middle + bar.figure


def _legend(systems: list[tuple[str, str]]) -> Iterator[str]:
    x = 16.0
    for _, system in systems:
        yield f'<rect x="{x}" y="38" width="12" height="12" fill="{_COLOURS[system]}"/>'
        yield f'<text x="{x + 18}" y="48">{escape(system)}</text>'
        x += 40 + 8 * len(system)
    yield f'<line x1="{x + 6}" y1="36" x2="{x + 6}" y2="52" stroke="#cf222e" stroke-width="2"/>'
    yield f'<text x="{x + 14}" y="48">what ours must meet</text>'


def _panel(panel: _Panel, marks: dict[str, float | None], unit: Unit, title: str, top: float) -> tuple[list[str], float]:
    """The lines of a panel, and where it ends."""
    scale = _Scale.of([value for _, values in panel for _, value in values] + [mark for mark in marks.values() if mark])
    bars: list[str] = []
    y = top + 40
    for metric, values in panel:
        height = len(values) * (_BAR + _GAP)
        bars.append(f'<text x="{_LEFT - 10}" y="{y + height / 2 + 3:.1f}" text-anchor="end">{escape(metric.title.replace("`", ""))}</text>')
        figures = []
        for index, (system, value) in enumerate(values):
            place = y + index * (_BAR + _GAP)
            end = scale.x(value)
            bars.append(
                f'<rect x="{_LEFT}" y="{place:.1f}" width="{max(end - _LEFT, 1):.1f}" height="{_BAR}" fill="{_COLOURS[system]}">'
                f"<title>{escape(f'{system}: {scaled(value, unit)}')}</title></rect>"
            )
            figures.append(
                f'<text x="{end + 5:.1f}" y="{place + _BAR - 2:.1f}" font-size="11" {_HALO}>{escape(scaled(value, unit))}</text>'
            )
        if (mark := marks[metric.name]) is not None:
            x = scale.x(mark)
            bars.append(
                f'<line x1="{x:.1f}" y1="{y - 3:.1f}" x2="{x:.1f}" y2="{y + height + 1:.1f}" stroke="#cf222e" stroke-width="2">'
                f"<title>{escape(f'must meet {scaled(mark, unit)}')}</title></line>"
            )
        bars += figures
        y += height + _GROUP
    grid = [f'<text x="16" y="{top + 14}" font-size="13" font-weight="bold">{escape(title)}</text>']
    for power in range(scale.low, scale.high + 1):
        x = scale.x(10.0**power)
        grid.append(f'<line x1="{x:.1f}" y1="{top + 34}" x2="{x:.1f}" y2="{y - _GROUP / 2:.1f}" stroke="#d0d7de"/>')
        label = escape(scaled(10.0**power, unit))
        grid.append(f'<text x="{x:.1f}" y="{top + 30}" text-anchor="middle" font-size="11" fill="#57606a">{label}</text>')
    return grid + bars, y + 14
