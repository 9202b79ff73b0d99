"""The order of steps within an operation, and who has which part of a block. Pure.

An operation goes through `total` blocks. With each block a member does up to three things, its *phases*:

* FILL: copy what others need of it into a slot of its own ring;
* REDUCE: combine its part from all members' slots, and put the result beside its own slot's input;
* DRAIN: copy what it needs from other members' slots.

Each phase has a counter, which says how many blocks, since the group has met, the member has behind it. A step waits for counters of
others:

* FILL of block b: all others have drained block b - depth, which was in the same slot;
* REDUCE: all others have filled block b;
* DRAIN: those that it reads from have reduced block b, or filled it where nothing is reduced.

The phases of different blocks overlap: block b is filled before block b - 1 is reduced and block b - 2 drained, so that a member rarely
finds another one behind.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

__all__ = ["DEPTH", "Phase", "Step", "count_blocks", "cuts", "steps"]

DEPTH = 4
"""Slots of a ring. At least one more than there are phases, or members wait for each other in turn."""
GRAIN = 64
"""Bytes; parts begin at multiples of that, so that no two members write to one cache line."""


class Phase(enum.IntEnum):
    """What is done with a block; the value is the place of its counter."""

    FILL = 0
    REDUCE = 1
    DRAIN = 2


class Step(NamedTuple):
    """What to do next: `phase` with `block`, when the counters `awaited` of others, from the operation's beginning, are at `behind` or
    more."""

    phase: Phase
    block: int
    awaited: Phase
    behind: int


def count_blocks(size: int, block: int) -> int:
    """How many blocks `size` bytes take: at least one, so that every operation is one that members meet in."""
    return max(1, -(-size // block))


def cuts(size: int, parts: int, itemsize: int) -> list[int]:
    """Where `parts` parts of `size` elements begin, and the last one ends. The last parts may be empty."""
    grain = max(1, GRAIN // itemsize)
    part = -(-size // parts)
    part = -(-part // grain) * grain
    return [min(size, index * part) for index in range(parts + 1)]


def steps(total: int, phases: tuple[Phase, ...], source: Phase, depth: int = DEPTH) -> Iterable[Step]:
    """A member's steps, where it takes part in `phases` and drains what others have brought through phase `source`."""
    if total == 1:
        return _single(phases, source)
    return _steps(total, phases, source, depth)


@functools.cache
def _single(phases: tuple[Phase, ...], source: Phase) -> Sequence[Step]:
    return tuple(_steps(1, phases, source, DEPTH))


def _steps(total: int, phases: tuple[Phase, ...], source: Phase, depth: int) -> Iterator[Step]:
    for tick in range(total + len(phases) - 1):
        for lag, phase in enumerate(phases):
            block = tick - lag
            if 0 <= block < total:
                if phase is Phase.FILL:
                    yield Step(phase, block, Phase.DRAIN, block + 1 - depth)
                else:
                    yield Step(phase, block, Phase.FILL if phase is Phase.REDUCE else source, block + 1)
