"""What a value is pickled from: to name the part of one that can't be."""

from __future__ import annotations

import copyreg
import functools
import types
from collections.abc import Iterator
from typing import Any

__all__ = ["parts_of"]


def parts_of(obj: Any, path: str) -> Iterator[tuple[str, Any]]:
    """What pickling `obj` would pickle in turn, each with its path."""
    if type(obj) is tuple and not path:
        yield from (("args", obj[0]), ("kwargs", obj[1]))
    elif isinstance(obj, dict):
        for key, item in list(obj.items()):
            yield f"{path}[{key!r}]", item
            yield f"{path} key {key!r}", key
    elif isinstance(obj, (list, tuple)):
        yield from ((f"{path}[{index}]", item) for index, item in enumerate(list(obj)))
    elif isinstance(obj, (set, frozenset)):
        yield from ((f"{path} member {item!r}", item) for item in list(obj))
    elif isinstance(obj, functools.partial):
        yield from ((f"{path}.func", obj.func), (f"{path}.args", obj.args), (f"{path}.keywords", obj.keywords))
    elif isinstance(obj, types.MethodType):
        yield f"{path}.__self__", obj.__self__
    elif isinstance(obj, types.FunctionType):
        code = obj.__code__
        for name, cell in zip(code.co_freevars, obj.__closure__ or (), strict=False):
            try:
                yield f"{path} variable {name!r}", cell.cell_contents
            except ValueError:
                continue  # the enclosing function has not set it yet
        yield from ((f"{path} global {name!r}", obj.__globals__[name]) for name in code.co_names if name in obj.__globals__)
    # What has a way of its own to be pickled does not pickle its attributes.
    reduce: Any = type(obj).__reduce__
    if reduce is object.__reduce__ and not isinstance(obj, (type, types.FunctionType, types.ModuleType)):
        yield from ((f"{path}.{name}", item) for name, item in list(getattr(obj, "__dict__", {}).items()))
        for name in copyreg._slotnames(type(obj)):  # type: ignore[attr-defined]
            if hasattr(obj, name):
                yield f"{path}.{name}", getattr(obj, name)
