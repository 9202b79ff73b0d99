"""Tensors of many processes: state dicts that are published and pulled. Names are loaded when they are first used, and torch with them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monarch_async.tensor.state_dict import Published, StateDict
    from monarch_async.tensor.state_errors import PublisherGone, StateMismatch
    from monarch_async.tensor.state_parts import TensorSlice
    from monarch_async.tensor.state_pull import Pulled

__all__ = ["Published", "PublisherGone", "Pulled", "StateDict", "StateMismatch", "TensorSlice"]

_HOMES = {
    "state_dict": ("Published", "StateDict"),
    "state_errors": ("PublisherGone", "StateMismatch"),
    "state_parts": ("TensorSlice",),
    "state_pull": ("Pulled",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


if not TYPE_CHECKING:  # or a type checker would let any name pass

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
