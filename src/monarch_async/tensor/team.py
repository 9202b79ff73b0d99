"""Teams: the groups of one circle of members, each with what all communicators over it share.

The same ranks may be asked for along different dimensions (of a mesh ``{"dp": 1, "tp": 4}`` all and those along ``tp`` are the same), as a
slice or as a subset. They have one group then, whose name comes from the ranks alone, so that all members call it the same.
"""

from __future__ import annotations

from typing import Any

from monarch_async.shape import Extent
from monarch_async.tensor.batch import Batch
from monarch_async.tensor.choosing import backend_of, maker_of
from monarch_async.tensor.compression import Turns
from monarch_async.tensor.group import Check, Group
from monarch_async.tensor.membership import Circle

__all__ = ["Settings", "Team", "Teams"]

Settings = tuple[str, float, Check]
"""Backend, timeout, what is checked."""


class Team:
    """One group."""

    __slots__ = ("batch", "group", "kind", "turns")

    def __init__(self, circle: Circle, ranks: tuple[int, ...], settings: Settings) -> None:
        backend, timeout, check = settings
        self.kind = backend_of(circle, backend, ranks)
        self.group = Group(circle, ranks, name_of(circle, ranks), maker_of(circle, ranks, self.kind), timeout, check)
        self.turns = Turns(self.group)
        self.batch: Batch | None = None  # what is being coalesced


class Teams:
    """All of a circle, which have the same settings. On the loop."""

    def __init__(self, circle: Circle, settings: Settings) -> None:
        self.circle = circle
        self._settings = settings
        self._made: dict[tuple[int, ...], Team] = {}
        self.views: dict[tuple[tuple[int, ...], Extent], Any] = {}  # communicators, by ranks and dimensions

    @property
    def whole(self) -> Team:
        """That of all members."""
        return self.of(tuple(range(self.circle.me.extent.nelements)))

    def of(self, ranks: tuple[int, ...]) -> Team:
        """That of these ranks, which begins to form when it is first asked for."""
        if ranks not in self._made:
            self._made[ranks] = Team(self.circle, ranks, self._settings)
        return self._made[ranks]


def name_of(circle: Circle, ranks: tuple[int, ...]) -> str:
    """The mesh's for all of it; else with the dimensions that the ranks run along, where they are all of those, and with the ranks."""
    me = circle.me
    if ranks == tuple(range(me.extent.nelements)):
        return me.name
    points = [me.extent.point(rank) for rank in ranks]
    along = [label for label in me.extent if len({point[label] for point in points}) > 1]
    count = 1
    for label in along:
        count *= me.extent[label]
    return f"{me.name}[{' '.join([*(along if count == len(ranks) else []), ','.join(map(str, ranks))])}]"
