"""The samples of a run, and what the bars say of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from perf.stats import Spread, Statistic, figure, relate, spread
from perf.table import BARS, METRICS, OURS, Bar

__all__ = ["Results", "Verdict"]

Rounds = dict[str, list[list[float]]]
"""The samples of each round, by metric."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A bar and what was measured: `value` is in the bar's own terms (a ratio, a difference, a figure); `met` None: not measured."""

    bar: Bar
    value: Spread | None
    met: bool | None


@dataclass(slots=True)
class Results:
    """`about` describes the run and the machine; `stages` has the samples, by stage, system and metric.

    A stage is a set of systems that were measured in turns, so that ratios within it hold; its name is the peer's, or ``""`` without one.
    """

    about: dict[str, Any]
    stages: dict[str, dict[str, Rounds]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def add(self, stage: str, system: str, samples: Mapping[str, list[float]], *, turn: int = 0) -> None:
        """Samples of one more round, or, past its first turn, more samples of the same round."""
        rounds = self.stages.setdefault(stage, {}).setdefault(system, {})
        for metric, values in samples.items():
            if turn and metric in rounds:
                rounds[metric][-1] += values
            else:
                rounds.setdefault(metric, []).append(list(values))

    def figures(self, stage: str, system: str, metric: str, statistic: Statistic | None = None) -> list[float]:
        """One figure a round; nothing if the system has not measured this."""
        rounds = self.stages.get(stage, {}).get(system, {}).get(metric, [])
        return [figure(samples, statistic or METRICS[metric].statistic) for samples in rounds if samples]

    def summary(self, stage: str, system: str, metric: str, statistic: Statistic | None = None) -> Spread | None:
        figures = self.figures(stage, system, metric, statistic)
        return spread(figures) if figures else None

    def systems(self) -> list[tuple[str, str]]:
        """Each system with the stage in which it is reported: ours and the raw limit without peers beside them."""
        known: dict[str, str] = {}
        for stage, systems in self.stages.items():
            for system in systems:
                known.setdefault(system, stage)
        return [(stage, system) for system, stage in known.items()]

    def ratio(self, stage: str, system: str, metric: str) -> Spread | None:
        """Ours to another system's, within its stage."""
        ours, other = self.figures(stage, OURS, metric), self.figures(stage, system, metric)
        return relate(ours, other, "times") if ours and other else None

    def judge(self, bar: Bar) -> Verdict:
        """What a bar says; met or not is decided by the median of the rounds."""
        value = self._value(bar)
        if value is None:
            return Verdict(bar, None, None)
        return Verdict(bar, value, value.middle <= bar.figure if bar.sense == "≤" else value.middle >= bar.figure)

    def verdicts(self) -> list[Verdict]:
        return [self.judge(bar) for bar in BARS]

    def _value(self, bar: Bar) -> Spread | None:
        stage = bar.reference[0] if bar.reference is not None and bar.reference[0] in self.stages else ""
        statistic = bar.statistic or METRICS[bar.metric].statistic
        if bar.pooled:
            samples = list(chain.from_iterable(self.stages.get(stage, {}).get(OURS, {}).get(bar.metric, [])))
            return spread([figure(samples, statistic)]) if samples else None
        ours = self.figures(stage, OURS, bar.metric, statistic)
        if bar.reference is None or bar.relation is None:
            return spread(ours) if ours else None
        reference = self.figures(stage, *bar.reference)
        return relate(ours, reference, bar.relation) if ours and reference else None
