"""The storm's journal, and the oracle that reads it.

Every handler writes one line before it answers, to a file of its process that outlives it: when (nanoseconds of the machine's monotonic
clock), what, which number, and which life of which rank. A line is one `write` to a file opened for appending, so it is there whole or not
at all, whatever kills the process next.

From these lines and the outcomes that callers saw, `judge` counts what must not be:

* *lost*: a call that was answered with a value, but no handler has run; or a value that is not the answer to that call.
* *twice*: a call without `retry` that was handled more than once; a cast that was.
* *unsettled*: a call whose future was not done within its limit.
* *overlaps*: a life of a rank that wrote something after a later life of that rank had begun.
* *disorder*: casts of one sender that one life of a rank has handled in another order than they were sent.
* *gaps*: casts between two that one life of a rank has handled, which it has not: lost in silence. At the end of a life some are lost;
  within one, none.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["Entry", "Journal", "Outcome", "Verdict", "answer_to", "judge", "read"]


class Entry(NamedTuple):
    """One line. `what` is ``start``, ``call`` or ``cast``; `number` of a call or cast, unique over all; `sender` of a cast."""

    when: int
    what: str
    number: int
    sender: int
    rank: int
    incarnation: int

    @classmethod
    def parse(cls, line: str) -> Entry:
        when, what, *rest = line.split()
        number, sender, rank, incarnation = map(int, rest)
        return cls(int(when), what, number, sender, rank, incarnation)


class Journal:
    """One process's file in `folder`."""

    def __init__(self, folder: str, rank: int, incarnation: int) -> None:
        self._tail = f"{rank} {incarnation}\n"
        self._file = os.open(os.path.join(folder, f"{rank}-{os.getpid()}-{incarnation}"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self.write("start", 0)

    def write(self, what: str, number: int, sender: int = 0) -> None:
        os.write(self._file, f"{time.monotonic_ns()} {what} {number} {sender} {self._tail}".encode())

    def close(self) -> None:
        os.close(self._file)


def read(folder: str) -> list[Entry]:
    """All lines of all files, by time."""
    lines = [line for path in Path(folder).iterdir() for line in path.read_text().splitlines()]
    return sorted(map(Entry.parse, lines))


class Outcome(NamedTuple):
    """What a caller saw of one call: a value, the name of the error, or nothing within its limit (``"unsettled"``)."""

    number: int
    retry: bool
    result: int | str


class Verdict(NamedTuple):
    """Violations, as texts; all empty if the system kept its promises."""

    lost: list[str]
    twice: list[str]
    unsettled: list[str]
    overlaps: list[str]
    disorder: list[str]
    gaps: list[str]

    @property
    def violations(self) -> int:
        return sum(map(len, self))


def answer_to(number: int) -> int:
    """What a handler returns for a call."""
    return 2 * number + 1


def judge(entries: Iterable[Entry], outcomes: Mapping[int, Outcome], sent: Mapping[int, Sequence[int]]) -> Verdict:
    """Hold the outcomes of all calls, by number, and the casts that were sent, by sender, against what handlers wrote."""
    entries = sorted(entries)
    verdict = Verdict([], [], [], [], [], [])
    place = {number: index for numbers in sent.values() for index, number in enumerate(numbers)}
    handled = Counter(entry.number for entry in entries if entry.what == "call")
    for outcome in outcomes.values():
        number, result = outcome.number, outcome.result
        if result == "unsettled":
            verdict.unsettled.append(f"call {number}")
        elif isinstance(result, int) and (result != answer_to(number) or not handled[number]):
            verdict.lost.append(f"call {number} was answered with {result} and handled {handled[number]} times")
        if handled[number] > 1 and not outcome.retry:
            verdict.twice.append(f"call {number} was handled {handled[number]} times")
    casts = Counter((entry.number, entry.rank) for entry in entries if entry.what == "cast")
    verdict.twice.extend(f"cast {number} was handled {times} times by rank {rank}" for (number, rank), times in casts.items() if times > 1)
    lives: dict[int, int] = {}
    last_cast: dict[tuple[int, int, int], int] = {}
    for entry in entries:
        newest = lives.get(entry.rank, -1)
        if entry.incarnation < newest:
            verdict.overlaps.append(f"incarnation {entry.incarnation} of rank {entry.rank} was there after incarnation {newest}")
        lives[entry.rank] = max(newest, entry.incarnation)
        if entry.what == "cast":
            key = entry.sender, entry.rank, entry.incarnation
            before = last_cast.get(key)
            if before is not None and entry.number <= before:
                verdict.disorder.append(f"cast {entry.number} came to rank {entry.rank} after {before}")
            elif before is not None and place[entry.number] != place[before] + 1:
                missing = sent[entry.sender][place[before] + 1 : place[entry.number]]
                verdict.gaps.append(f"casts {missing} never came to incarnation {entry.incarnation} of rank {entry.rank}")
            last_cast[key] = entry.number
    return verdict
