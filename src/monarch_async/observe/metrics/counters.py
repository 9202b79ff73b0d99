"""What metrics are kept in: numbers and histograms by labels, bounded, as plain lists and dictionaries.

A histogram is a list: a count for each bucket, one for what is above them all, and the sum. So whoever has it in hand adds to it in two
steps, and the histograms of several processes are added item by item.
"""

from __future__ import annotations

from collections.abc import Mapping

from monarch_async.observe.metrics.families import OTHER, SERIES, Family

__all__ = ["Labels", "Series", "Snapshot", "Value", "merge"]

Labels = tuple[str, ...]
Value = float | list[float]
Snapshot = dict[str, dict[Labels, Value]]
"""By the name of the family, and by labels."""
_REMEMBERED = 10_000


class Series:
    """The values of one family by labels: at most `SERIES` of them. What came after those is in the one whose labels are all `OTHER`."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.values: dict[Labels, list[float]] = {}
        self.folded: set[Labels] = set()
        self._size = len(family.bounds) + 2 if family.bounds else 1

    def at(self, *labels: str) -> list[float]:
        """The list to add to: of one item, or a histogram's."""
        found = self.values.get(labels)
        if found is None:
            if len(self.values) >= SERIES and labels:
                if len(self.folded) < _REMEMBERED:
                    self.folded.add(labels)
                labels = (OTHER,) * len(labels)
                if labels in self.values:
                    return self.values[labels]
            found = self.values[labels] = [0.0] * self._size
        return found

    def snapshot(self) -> dict[Labels, Value]:
        """A copy."""
        if self.family.bounds:
            return {labels: list(value) for labels, value in self.values.items()}
        return {labels: value[0] for labels, value in self.values.items()}


def merge(family: Family, into: dict[Labels, Value], values: Mapping[Labels, Value]) -> None:
    """Add the values of a process to those of others. Past `SERIES` combinations of labels what is new is folded."""
    for labels, value in values.items():
        if labels not in into and len(into) >= SERIES and labels:
            labels = (OTHER,) * len(labels)
        before = into.get(labels)
        if isinstance(value, list):
            into[labels] = [a + b for a, b in zip(before, value, strict=True)] if isinstance(before, list) else list(value)
        elif before is None or isinstance(before, list):
            into[labels] = value
        else:
            into[labels] = max(before, value) if family.kind == "peak" else before + value
