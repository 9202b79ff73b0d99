"""What the smaller benchmarks share: the command line, the loop, and a table of times that were sampled."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

import uvloop

from perf.stats import quantile
from perf.units import scaled

__all__ = ["Sampled", "run_measure", "show_sampled"]

T = TypeVar("T")


class Sampled(NamedTuple):
    """One line of the table; times in seconds, `bar` is for the fraction of the samples that `of` says."""

    name: str
    samples: Sequence[float]
    bar: float | None
    of: float = 0.99


def run_measure(about: str | None, measure: Callable[[bool], Awaitable[T]], arguments: Sequence[str] | None) -> T:
    """Parse a command line that knows ``--quick``, and await ``measure(quick)`` on uvloop."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few samples, to see that everything runs")
    chosen = parser.parse_args(arguments)

    async def run() -> T:
        return await measure(chosen.quick)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


def show_sampled(rows: Sequence[Sampled]) -> None:
    """Print the table."""
    print(f"{'':48}{'best':>10}{'median':>10}{'p99':>10}{'worst':>10}{'bar':>20}  samples")
    for name, samples, bar, of in rows:
        figures = "".join(f"{scaled(quantile(samples, fraction), 's'):>10}" for fraction in (0.0, 0.5, 0.99, 1.0))
        kind = "median" if of == 0.5 else f"p{of * 100:g}"
        met = "" if bar is None else f"{kind} {scaled(bar, 's')} {'met' if quantile(samples, of) <= bar else 'MISSED'}"
        print(f"{name:48}{figures}{met:>20}  {len(samples)}")
