"""Handlers of an actor that are wrapped for a while, by several who look at once.

Rules: who comes last is outermost, but for who wants to be innermost; whoever goes is taken out, in any order, and when the last one has
gone the handlers are those from before. Another life of the actor, which has other handlers, ends all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from weakref import WeakKeyDictionary

from monarch_async._runtime.cell import Cell
from monarch_async._runtime.context import Handler

__all__ = ["unwrap", "wrap"]

Make = Callable[[str, Handler], Handler]
"""Makes the wrapped handler of an endpoint's name and its handler."""


class _Wrapped:
    def __init__(self, base: Mapping[str, Handler]) -> None:
        self.base = base
        self.layers: dict[object, Make] = {}
        self.result = base

    def put_on(self, cell: Cell) -> None:
        handlers = self.base
        for make in self.layers.values():
            handlers = {name: make(name, handler) for name, handler in handlers.items()}
        cell.handlers = self.result = handlers


_wrapped: WeakKeyDictionary[Cell, _Wrapped] = WeakKeyDictionary()


def wrap(cell: Cell, who: object, make: Make, *, innermost: bool = False) -> None:
    """Wrap an actor's handlers until `unwrap` with the same `who`."""
    found = _wrapped.get(cell)
    if found is None or cell.handlers is not found.result:
        found = _wrapped[cell] = _Wrapped(cell.handlers)
    found.layers = {who: make, **found.layers} if innermost else {**found.layers, who: make}
    found.put_on(cell)


def unwrap(cell: Cell, who: object) -> None:
    """Take that off again. Nothing happens if it is not there any more."""
    found = _wrapped.get(cell)
    if found is not None and found.layers.pop(who, None) is not None:
        if cell.handlers is found.result:
            found.put_on(cell)
        if not found.layers:
            del _wrapped[cell]
