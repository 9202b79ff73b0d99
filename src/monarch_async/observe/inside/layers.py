"""Layers around the handlers of this process's actors, for those who watch messages: spans, a timeline, and, outermost, metrics.

Theory: a message calls ``cell.handlers[endpoint].function``. Who watches puts functions of its own there, so that nobody pays for what
nobody watches: there is no branch on the way of a message. All layers of a process are kept here, in one place, so that they go on and off
in any order. Metrics are for every message of a job, so they have a way of their own that costs less: `steps`.

Rules:

* A layer's functions serve all actors of a class; which one it is they know from the message. So actors with the same handlers share them.
* The handlers of each later life are watched as well. A handler that runs already is not.
* Others may have put something around ours meanwhile (`tracing`, a debugger). What they go back to may be out of date then, so it is looked
  at again each second until it is not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MethodType
from typing import Any, Protocol

from monarch_async._runtime.cell import Cell
from monarch_async._runtime.context import SYNC, Handler
from monarch_async._runtime.runtime import Runtime
from monarch_async.observe.inside.steps import Measured, Tallies, first_step

__all__ = ["Function", "Layer", "Layers", "layers_of"]

AGAIN = 1.0
_GIVEN = "handlers before layers, and with them"
"""What is left in an actor that has layers: to keep it apart, for many, would cost a weak reference each."""

Function = Callable[..., Any]
Handlers = Mapping[str, Handler]


class Layer(Protocol):
    """Who watches. Each function takes the instance and the arguments of the endpoint."""

    def around_async(self, actor: str, endpoint: str, function: Callable[..., Awaitable[Any]]) -> Function:
        """In place of a coroutine function, one that calls it; `actor` is the class's name."""

    def around_sync(self, actor: str, endpoint: str, function: Function) -> Function:
        """The same for a function that runs in the actor's thread."""


class Layers:
    """Those of one process, the outermost last."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._layers: list[Layer] = []
        self._tallies: Tallies | None = None
        self._made: dict[int, tuple[Handlers, Handlers]] = {}  # by the id of what is inside: that, and with the layers around it
        self._stale: list[Cell] = []  # those with others' functions around layers that have changed
        self._timer: asyncio.TimerHandle | None = None

    def add(self, layer: Layer) -> None:
        """Watch from now on."""
        self._layers.append(layer)
        self._renew()

    def remove(self, layer: Layer) -> None:
        """Do not any more."""
        if layer in self._layers:
            self._layers.remove(layer)
            self._renew()

    def measure(self, tallies: Tallies | None) -> None:
        """Count handlers from now on, around all layers; or, with `None`, do not any more."""
        self._tallies = tallies
        self._renew()

    def _lived(self, cell: Cell) -> None:
        vars(cell).pop(_GIVEN, None)
        self._put(cell)

    def _renew(self) -> None:
        self._made.clear()
        hears, wanted = self._lived in self._runtime.on_life, bool(self._layers) or self._tallies is not None
        if wanted and not hears:
            self._runtime.on_life.append(self._lived)
        elif hears and not wanted:
            self._runtime.on_life.remove(self._lived)
        self._put_all(list(self._runtime.cells.values()))

    def _put_all(self, cells: Sequence[Cell]) -> None:
        self._stale = [cell for cell in cells if not self._put(cell)]
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._stale and not self._runtime.closing:
            self._timer = self._runtime.loop.call_later(AGAIN, self._try_again)

    def _try_again(self) -> None:
        self._put_all([cell for cell in self._stale if cell.evidence is None])

    def _put(self, cell: Cell) -> bool:
        """Give an actor its handlers, with the layers that there are; False if somebody else's are around them."""
        if self._tallies is not None:
            cell._first_step = MethodType(first_step, cell)  # type: ignore[method-assign]
        else:
            vars(cell).pop("_first_step", None)  # the method again
        before, given = vars(cell).get(_GIVEN) or (cell.handlers, cell.handlers)
        if cell.handlers is not given:
            return False
        if not self._layers and self._tallies is None:
            vars(cell).pop(_GIVEN, None)
            cell.handlers = before
            return True
        made = self._made.get(id(before))
        if made is None:
            actor = cell.identity.class_name
            made = self._made[id(before)] = before, {name: self._around(actor, name, handler) for name, handler in before.items()}
        vars(cell)[_GIVEN] = made
        cell.handlers = made[1]
        return True

    def _around(self, actor: str, name: str, handler: Handler) -> Handler:
        function = handler.function
        endpoint = name.partition("(")[0]  # a plain method that is called as one has the name ``method()``
        for layer in self._layers:
            around = layer.around_sync if handler.kind == SYNC else layer.around_async
            inside, function = function, around(actor, endpoint, function)
            function.__wrapped__ = inside  # type: ignore[attr-defined]  # for debuggers
        found = Handler(function, handler.kind, handler.concurrent, handler.explicit_port)
        if self._tallies is None:
            return found
        measured = Measured(found, actor, endpoint, self._tallies)
        measured.function.__wrapped__ = function
        return measured


def layers_of(runtime: Runtime) -> Layers:
    """Those of a process."""
    layers: Layers | None = runtime.parts.get("layers")
    if layers is None:
        layers = runtime.parts["layers"] = Layers(runtime)
    return layers
