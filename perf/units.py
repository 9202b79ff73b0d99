"""Figures as a person reads them."""

from __future__ import annotations

from perf.table import Unit

__all__ = ["scaled"]

_STEPS: dict[Unit, tuple[tuple[float, str], ...]] = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "/s": ((1.0, "/s"),),
    "B": ((1e6, "MB"), (1e3, "KB"), (1.0, "B")),
    "B/s": ((1e9, "GB/s"), (1e6, "MB/s")),
}


def scaled(value: float, unit: Unit) -> str:
    """Three significant digits or all before the point, in the largest unit that leaves something before the point."""
    steps = _STEPS[unit]
    factor, name = next((step for step in steps if abs(value) >= step[0]), steps[-1])
    number = value / factor
    digits = max(0, 2 - len(str(int(abs(number)))) + 1) if abs(number) < 100 else 0
    return f"{number:,.{digits}f} {name}" if name != "/s" else f"{number:,.0f} /s"
