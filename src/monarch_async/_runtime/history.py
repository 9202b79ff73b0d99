"""What has happened to what a process owns, for whoever asks later: the last failures, ends and restarts.

Rules: an entry is noted where something ends or lives again, never for a message; the first lives of actors are not noted, since there may
be many. The last `KEPT` are remembered.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from monarch_async._core.events import Identity
from monarch_async.errors import fold_ranks

__all__ = ["LONGEST", "Entry", "History", "fold_members"]

KEPT = 2000
LONGEST = 20_000
"""Characters that are kept of a traceback, the last ones."""


class Entry(NamedTuple):
    """One event; `when` is in seconds since the epoch. `kind` and the rest are as in `monarch_async.observe.records.Event`."""

    when: float
    kind: str
    subject: str
    text: str
    detail: str = ""


def fold_members(members: Iterable[Identity]) -> str:
    """``"trainer[0–3], feeder[0]"``: however many a process had, none is left out."""
    ranks: dict[str, list[int]] = {}
    for who in members:
        ranks.setdefault(who.mesh, []).append(who.rank)
    return ", ".join(f"{mesh}[{fold_ranks(found)}]" for mesh, found in ranks.items())


class History:
    """The last entries, the oldest first."""

    __slots__ = ("entries",)

    def __init__(self) -> None:
        self.entries: deque[Entry] = deque(maxlen=KEPT)

    def note(self, kind: str, subject: object, text: str, detail: str = "") -> None:
        self.entries.append(Entry(time.time(), kind, str(subject), text, detail))

    def lived(self, cell: Any) -> None:
        """A life of an actor begins."""
        if cell.identity.incarnation:
            self.note("restarted", cell.identity, f"life {cell.identity.incarnation} begins")
