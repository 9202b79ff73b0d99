"""Values as text of bounded length, in bounded time and memory, whatever they hold.

Rules:

* Of containers the first few items are shown, a few levels deep, and how many there are; of texts and bytes the beginning; tensors and
  arrays by shape, dtype and device, so that nothing is copied from a device and no value leaks.
* Only what has a `repr` of its own, made by its class, is asked for that, and only where it is no container: what such code does is the
  user's.
"""

from __future__ import annotations

import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, ValuesView
from collections.abc import Set as AbstractSet
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any

__all__ = ["shown"]

ITEMS = 20
"""Of one container that are shown."""
DEPTH = 4
"""Levels of containers in each other that are shown."""
MOST = 500
"""Values that are looked at in all."""
SLACK = 100
"""Characters beyond the longest, for what says how many there are."""
_PLAIN = (bool, float, complex, type(None), type(...), type, FunctionType, MethodType, ModuleType, range)


def shown(value: object, longest: int) -> str:
    """What a value is, in at most about `longest` characters."""
    parts: list[str] = []
    room = longest + SLACK
    try:
        for part in _Writer(longest).write(value, DEPTH):
            parts.append(part[:room])
            room -= len(part)
            if room < 0:
                return "".join(parts) + "…"
    except Exception as error:  # of a user's own container
        return f"<{type(value).__name__}, which can't be shown: {type(error).__name__}>"
    return "".join(parts)


def cut(text: str, longest: int, size: int | None = None) -> str:
    """A text that may be shown, of `size` characters in all."""
    size = len(text) if size is None else size
    return text if size <= longest else f"{text[:longest]}… ({size} characters)"


class _Writer:
    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._left = MOST

    def write(self, value: Any, depth: int) -> Iterator[str]:
        self._left -= 1
        kind = type(value)
        if isinstance(value, str | bytes | bytearray):
            yield self._text(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            yield repr(value) if value.bit_length() <= 1000 else f"<{kind.__name__} of {value.bit_length()} bits>"
        elif isinstance(value, _PLAIN):
            yield repr(value)
        elif (summary := _of_array(value)) is not None:
            yield summary
        elif isinstance(value, memoryview):
            yield f"<memoryview of {value.nbytes} bytes>"
        elif isinstance(value, Mapping):
            yield from self._items(kind, len(value), ((key, item) for key, item in value.items()), "{}", depth)
        elif isinstance(value, tuple) and hasattr(value, "_fields"):
            yield from self._items(kind, len(value), zip(value._fields, value, strict=False), "()", depth, named=True)
        elif isinstance(value, Sequence | AbstractSet | ValuesView | deque | array.array):
            ends = "()" if kind is tuple else "{}" if kind is set else "[]"
            yield from self._items(kind, len(value), value, ends, depth)
        elif hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
            fields = {name: getattr(value, name) for name in value.__dataclass_fields__ if hasattr(value, name)}
            yield from self._items(kind, len(fields), fields.items(), "()", depth, named=True)
        else:
            yield self._own(value)

    def _items(self, kind: type, size: int, items: Iterable[Any], ends: str, depth: int, *, named: bool = False) -> Iterator[str]:
        yield ("" if kind in (list, tuple, dict) else kind.__name__) + ends[0]
        if size and (depth == 0 or self._left <= 0):
            yield f"… {size} items"
        else:
            pairs = issubclass(kind, Mapping)
            for index, item in enumerate(islice(items, ITEMS)):
                yield ", " if index else ""
                if named:
                    yield f"{item[0]}="
                    yield from self.write(item[1], depth - 1)
                elif pairs:
                    yield from self.write(item[0], depth - 1)
                    yield ": "
                    yield from self.write(item[1], depth - 1)
                else:
                    yield from self.write(item, depth - 1)
                if self._left <= 0:
                    break
            if size > ITEMS or (self._left <= 0 and size > 1):
                yield f", … {size} items"
        yield ",)" if kind is tuple and size == 1 else ends[1]

    def _text(self, value: str | bytes | bytearray) -> str:
        return cut(repr(value[: self._longest]), self._longest, len(repr(value)) if len(value) <= self._longest else len(value) + 2)

    def _own(self, value: object) -> str:
        try:
            return cut(repr(value), self._longest)
        except Exception as error:  # whatever the user's __repr__ raises
            return f"<{type(value).__name__}, whose repr raised {type(error).__name__}>"


def _of_array(value: Any) -> str | None:
    """A tensor, or an array of any library."""
    try:
        shape, dtype = value.shape, value.dtype
        if isinstance(value, type):
            return None
        device = getattr(value, "device", None)
        where = f", device={device}" if device is not None and str(device) != "cpu" else ""
        return f"{type(value).__name__}(shape={tuple(shape)}, dtype={dtype}{where})"
    except Exception:  # it has no such attributes, or they say something else
        return None
