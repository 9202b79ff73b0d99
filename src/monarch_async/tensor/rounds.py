"""How many members learn what all of them have called, with few messages each. Pure.

Theory: dissemination. In round k a member tells the one 2^k places after it all it knows by then, as soon as it has called the operation
itself and has heard of round k - 1. So after ⌈log2 n⌉ rounds everybody knows of everybody, with as many messages each. Equal views are
told once, with the members that they are of.

Rules:

* Who has not called the operation says nothing, so what it has heard stops there: that one is not heard of does not mean that it has not
  come. Whoever wants to know asks it.
* All rounds have to be heard of before it is complete, even where all members are known before: others wait for what is said after them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from monarch_async.tensor.signature import Wire

__all__ = ["Rounds", "Said"]

Told = Sequence[tuple[Wire, Sequence[int]]]


class Said(NamedTuple):
    """What to tell whom, in which round."""

    to: int
    round: int
    told: Told


class Rounds:
    """What member `me` of `size` knows of one operation. `heard` has the views of others, by index."""

    __slots__ = ("_came", "_me", "_mine", "_said", "_size", "_total", "heard")

    def __init__(self, size: int, me: int) -> None:
        self._size = size
        self._me = me
        self._total = (size - 1).bit_length()
        self.heard: dict[int, Wire] = {}
        self._mine: Wire | None = None  # once it is called here
        self._came: set[int] = set()  # rounds that were heard of
        self._said = 0  # rounds, this member's own

    @property
    def complete(self) -> bool:
        return self._mine is not None and len(self._came) == self._total

    def begin(self, mine: Wire) -> Iterator[Said]:
        """It is called here."""
        self._mine = mine
        return self.go_on()

    def take(self, number: int, told: Told) -> list[int]:
        """Somebody's round has come; who is new in it. Then ask `go_on`."""
        self._came.add(number)
        new = [index for _, indexes in told for index in indexes if index != self._me and index not in self.heard]
        for wire, indexes in told:
            for index in indexes:
                if index != self._me:
                    self.heard.setdefault(index, wire)
        return new

    def go_on(self) -> Iterator[Said]:
        """What is to be said now, if it is called here."""
        while self._mine is not None and self._said < self._total and (not self._said or self._said - 1 in self._came):
            yield Said((self._me + (1 << self._said)) % self._size, self._said, self._folded())
            self._said += 1

    def _folded(self) -> Told:
        assert self._mine is not None
        folded: dict[Wire, list[int]] = {self._mine: [self._me]}
        for index, wire in self.heard.items():
            folded.setdefault(wire, []).append(index)
        return list(folded.items())
