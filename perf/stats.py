"""Statistics of samples: what a round's samples say, and how two systems compare round by round.

Rules: a figure of one round is one statistic of its samples; a figure of a run is the median of its rounds. A ratio is taken within a
round, where both systems met the same machine, and only then summed up: ratios hold where absolute times drift.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

__all__ = ["Relation", "Spread", "Statistic", "figure", "quantile", "relate", "spread"]

Statistic = Literal["median", "p99", "best"]
Relation = Literal["times", "above"]


class Spread(NamedTuple):
    """A figure of several rounds: their median, and the lowest and highest of them."""

    middle: float
    low: float
    high: float


def quantile(samples: Sequence[float], fraction: float) -> float:
    """The sample below which `fraction` of all lie; `ValueError` for none."""
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    return ordered[min(int(len(ordered) * fraction), len(ordered) - 1)]


def figure(samples: Sequence[float], statistic: Statistic) -> float:
    """One statistic of the samples of a round. ``best`` is the lowest."""
    if statistic == "p99":
        return quantile(samples, 0.99)
    if statistic == "best":
        return min(samples)
    return statistics.median(samples)


def spread(values: Sequence[float]) -> Spread:
    """What the figures of several rounds have in common."""
    return Spread(statistics.median(values), min(values), max(values))


_RELATIONS: dict[Relation, Callable[[float, float], float]] = {
    "times": lambda ours, reference: ours / reference,
    "above": lambda ours, reference: ours - reference,
}


def relate(ours: Sequence[float], reference: Sequence[float], relation: Relation) -> Spread:
    """How `ours` stands to `reference`, round by round: a ratio, or what it is above it. Rounds are paired in order."""
    pairs = zip(ours, reference, strict=False)  # a system that failed in a round has fewer
    return spread([_RELATIONS[relation](mine, other) for mine, other in pairs])
