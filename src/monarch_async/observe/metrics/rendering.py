"""Metrics as text, in version 0.0.4 of Prometheus's format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from monarch_async.observe.metrics.counters import Labels, Snapshot, Value
from monarch_async.observe.metrics.families import FAMILIES, Family

__all__ = ["CONTENT_TYPE", "PREFIX", "render"]

PREFIX = "monarch_async_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


def render(snapshot: Snapshot) -> str:
    """The page. A family without labels is there with 0 even if nothing was counted."""
    return "".join(_lines(snapshot))


def _lines(snapshot: Snapshot) -> Iterator[str]:
    for family in FAMILIES:
        values = snapshot.get(family.name, {})
        if not values and not family.labels and not family.bounds:
            values = {(): 0.0}
        if not values:
            continue
        name = PREFIX + family.name
        kind = "gauge" if family.kind == "peak" else family.kind
        yield f"# HELP {name} {family.help}\n# TYPE {name} {kind}\n"
        for labels, value in sorted(values.items()):
            yield from _samples(family, name, labels, value)


def _samples(family: Family, name: str, labels: Labels, value: Value) -> Iterator[str]:
    pairs = list(zip(family.labels, labels, strict=True))
    if not isinstance(value, list):
        yield f"{name}{_braces(pairs)} {_number(value)}\n"
        return
    *counts, total = value
    seen = 0.0
    for bound, count in zip((*family.bounds, float("inf")), counts, strict=True):
        seen += count
        yield f"{name}_bucket{_braces([*pairs, ('le', '+Inf' if bound == float('inf') else repr(bound))])} {_number(seen)}\n"
    yield f"{name}_sum{_braces(pairs)} {_number(total)}\n{name}_count{_braces(pairs)} {_number(seen)}\n"


def _braces(pairs: Iterable[tuple[str, str]]) -> str:
    text = ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in pairs)
    return f"{{{text}}}" if text else ""


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)
