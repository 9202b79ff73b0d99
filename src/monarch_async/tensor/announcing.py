"""How the members of an epoch tell each other what they are about to do, and see that it fits.

Every operation is announced under its channel and number. Members of a small group announce to each other directly, those of a larger one
in rounds (see `rounds`); what is between two members only these two hear of. Views are compared as they come.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from monarch_async.tensor.ledger import Ledger
from monarch_async.tensor.operation import Operation
from monarch_async.tensor.rounds import Rounds, Said
from monarch_async.tensor.signature import Compared, Wire, compared, describe_mismatch, fits, signature_from, to_wire

__all__ = ["DIRECT", "Announcer", "Announcing"]

DIRECT = 8
"""Members, up to which each tells each other one, which takes one step instead of several."""

SHAPES_KEPT = 4096
"""Signatures that are remembered as agreed on, until they are looked at anew."""

Key = tuple[str, int]
"""Channel and number."""


class Announcer(Protocol):
    """The group, as far as it is wanted here."""

    name: str
    ranks: tuple[int, ...]
    index: int
    ledger: Ledger
    check: str
    agreed_shapes: set[Compared]

    def mismatch(self, epoch: Any, text: str) -> None: ...


class Announcing:
    """Base of `Epoch`. Its methods are called on the loop."""

    def __init__(self, owner: Announcer, size: int) -> None:
        self.owner = owner
        self._size = size
        self.done: dict[int, str] = {}  # what each other member had last finished when it last announced something, by index
        self._numbers: dict[str, int] = {}  # the last one given, by channel
        self._open: dict[Key, Operation] = {}  # announced here, not yet by all
        self._heard: dict[Key, dict[int, Wire]] = {}  # what others have announced, by index
        self._rounds: dict[int, Rounds] = {}  # of operations of all members, where there are many; `heard` is in `_heard` too

    # What `Epoch` does.

    def post(self, what: str, *args: Any, to: int | None = None) -> None:
        """Tell all others, or one."""
        raise NotImplementedError

    def _agreed(self, operation: Operation) -> None:
        """All have announced it, and `views` has what they have said."""
        raise NotImplementedError

    def _number(self, operation: Operation) -> None:
        channel = operation.channel
        operation.number = self._numbers[channel] = self._numbers.get(channel, 0) + 1

    def _announce(self, operation: Operation) -> None:
        number, wire = operation.number, to_wire(operation.signature)
        if operation.partner is None and self._size > DIRECT:
            self._say(number, self._rounds_of(number).begin(wire))
        else:
            self.post("at", operation.channel, number, wire, self.owner.ledger.last_done, to=operation.partner)

    def _rounds_of(self, number: int) -> Rounds:
        found = self._rounds.get(number)
        if found is None:
            found = self._rounds[number] = Rounds(self._size, self.owner.index)
            self._heard["", number] = found.heard
        return found

    def _say(self, number: int, all_said: Iterable[Said]) -> None:
        for to, turn, told in all_said:
            self.post("round", number, turn, told, self.owner.ledger.last_done, to=to)

    def heard(self, index: int, channel: str, number: int, wire: Wire, done: str) -> None:
        """Another member has come to an operation."""
        self.done[index] = done
        key = channel, number
        heard = self._heard.get(key)
        if heard is None:
            heard = self._heard[key] = {}
        heard[index] = wire
        operation = self._open.get(key)
        if operation is not None and self._compare(operation, index, wire):
            self._see_whether_all(key)

    def heard_round(self, index: int, number: int, turn: int, told: Any, done: str) -> None:
        """Another member says who has come to an operation."""
        self.done[index] = done
        rounds = self._rounds_of(number)
        new = rounds.take(turn, told)
        self._say(number, rounds.go_on())
        operation = self._open.get(("", number))
        if operation is not None and all(self._compare(operation, other, rounds.heard[other]) for other in new):
            self._see_whether_all(("", number))

    def _fits_all(self, operation: Operation) -> bool:
        """Whether it fits what has been heard so far. If not, the epoch is over."""
        heard = self._heard.get((operation.channel, operation.number), {})
        return all(self._compare(operation, index, wire) for index, wire in heard.items())

    def missing(self, operation: Operation) -> list[int]:
        """The members, by index, that are not known to have come to it."""
        if operation.begin is not None and operation.partner is not None:
            return [operation.partner]  # it announces nothing: what it sends is what is waited for
        if (operation.channel, operation.number) not in self._open:
            return []
        heard = self._heard.get((operation.channel, operation.number), {})
        wanted = range(self._size) if operation.partner is None else (operation.partner,)
        return [index for index in wanted if index not in heard and index != self.owner.index]

    def _compare(self, operation: Operation, index: int, wire: Wire) -> bool:
        owner = self.owner
        mine = operation.signature
        if fits(mine, wire, shapes=owner.check != "never"):
            return True
        if owner.check == "first" and compared(mine, shapes=True) in owner.agreed_shapes and fits(mine, wire, shapes=False):
            return True
        ranks = owner.ranks
        views = {ranks[other]: signature_from(theirs) for other, theirs in self._heard[operation.channel, operation.number].items()}
        done = {ranks[other]: text for other, text in self.done.items()} | {ranks[owner.index]: owner.ledger.last_done}
        owner.mismatch(self, describe_mismatch(owner.name, operation.number, views | {ranks[owner.index]: mine}, done))
        return False

    def _see_whether_all(self, key: Key) -> None:
        operation, number = self._open[key], key[1]
        heard = self._heard.get(key, {})
        mine, me = operation.signature, self.owner.index
        if operation.partner is None:
            rounds = self._rounds.get(number)
            if len(heard) < self._size - 1 or (rounds is not None and not rounds.complete):
                return
            views = [mine if index == me else signature_from(heard[index]) for index in range(self._size)]
            self._rounds.pop(number, None)
        elif operation.partner in heard:
            views = [mine, signature_from(heard[operation.partner])]
        else:
            return
        del self._open[key]
        self._heard.pop(key, None)
        if self.owner.check == "first":
            if len(self.owner.agreed_shapes) >= SHAPES_KEPT:
                self.owner.agreed_shapes.clear()
            self.owner.agreed_shapes.add(compared(mine, shapes=True))
        operation.views = views
        self._agreed(operation)
