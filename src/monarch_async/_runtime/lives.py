"""Which life of an actor is the present one, told to whoever is linked with its process.

So an error can say in which life of its actor a call was lost, when the process can't be asked any more. Only later lives than the first
are told, when they begin and on every new link, and when such an actor is gone; a call costs nothing for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from monarch_async._core.framing import LIFE, pack_message
from monarch_async._runtime.cell import Cell
from monarch_async._runtime.link import Link
from monarch_async._runtime.peer import Peer
from monarch_async._runtime.tree import Handle

__all__ = ["Lives"]


class Residence(Protocol):
    """What this needs of its runtime."""

    cells: dict[int, Cell]
    kinds: dict[int, Handle]

    @property
    def links(self) -> Iterable[Link]: ...

    def peer_of(self, link: Link) -> Peer: ...


class Lives:
    """Tells and hears of lives, for one runtime."""

    def __init__(self, runtime: Residence) -> None:
        self._runtime = runtime
        runtime.kinds[LIFE] = self._heard

    def tell(self, cell: Cell, *, over: bool = False) -> None:
        """An actor lives again, or is gone."""
        if cell.identity.incarnation:
            for link in self._runtime.links:
                link.send_control(pack_message((LIFE, cell.key, 0 if over else cell.identity.incarnation)))

    def greet(self, link: Link) -> None:
        """Another process is linked with this one."""
        cells: Mapping[int, Cell] = self._runtime.cells
        for key, cell in cells.items():
            if cell.identity.incarnation:
                link.send_control(pack_message((LIFE, key, cell.identity.incarnation)))

    def _heard(self, link: Link, fields: list[Any], buffers: list[memoryview] | None) -> None:
        _, key, incarnation = fields
        lives = self._runtime.peer_of(link).lives
        if incarnation:
            lives[key] = incarnation
        else:
            lives.pop(key, None)
