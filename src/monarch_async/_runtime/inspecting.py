"""The doors by which others look into a process (``inspect``), or change something in it (``alter``).

What is behind them is in `monarch_async.observe.inside`, which is loaded when somebody first looks: a process that nobody looks at has not
even imported it. It is named here like the entry of a process, since a library above this layer knows more of what there is to see than the
runtime does of itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["alter_runtime", "inspect_runtime"]

INSIDE = "monarch_async.observe.inside"


def inspect_runtime(runtime: object, name: str, args: tuple[Any, ...]) -> Any:
    """Call a function that only looks; a coroutine's result is the answer. Raises `AttributeError` for one that is not known."""
    return _find("READS", name)(runtime, *args)


def alter_runtime(runtime: object, name: str, args: tuple[Any, ...]) -> Any:
    """Call a function that changes something."""
    return _find("WRITES", name)(runtime, *args)


def _find(table: str, name: str) -> Callable[..., Any]:
    names: Mapping[str, str] = getattr(import_module(f"{INSIDE}.services"), table)
    if name not in names:
        raise AttributeError(f"{name!r} is nothing that can be asked for here: is that process of another version?")
    module, _, function = names[name].partition(".")
    found: Callable[..., Any] = getattr(import_module(f"{INSIDE}.{module}"), function)
    return found
