"""What can follow at the cursor: names, attributes, endpoints, and the dimensions of a mesh.

Rules: only names and dotted names are evaluated, never a call or a subscript, so that completing runs nothing but attribute lookups.
In a call that takes dimensions (``mesh.slice(…``) those that are still free are offered, with their equals sign, and other names only where
none fits.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["Completions", "complete"]

_WORD = re.compile(r"(?:([A-Za-z_][\w.]*)\.)?([A-Za-z_]\w*)?$")
_CALL = re.compile(r"([A-Za-z_][\w.]*)\.(slice|split|rename|item|flatten)\(([^()\[\]]*)$")
_GIVEN = re.compile(r"(\w+)\s*=")


class Completions(NamedTuple):
    """`names` may stand in place of the text from `start` to the cursor."""

    start: int
    names: list[str]


def complete(text: str, namespace: Mapping[str, Any]) -> Completions:
    """What can stand at the end of `text`, the input up to the cursor."""
    match = _WORD.search(text)
    assert match is not None
    owner, word = match.group(1), match.group(2) or ""
    start = len(text) - len(word)
    if owner is not None:
        return Completions(start, _attributes(owner, word, namespace))
    if text[:start].endswith("."):
        return Completions(start, [])  # of what a call or subscript gives
    names = _dimensions(text[:start], word, namespace)
    if word and not names:
        known = {*namespace, *dir(builtins), *keyword.kwlist}
        names += sorted(name for name in known if name.startswith(word) and (not name.startswith("__") or word.startswith("__")))
    return Completions(start, list(dict.fromkeys(names)))


def _attributes(owner: str, word: str, namespace: Mapping[str, Any]) -> list[str]:
    found, value = _find(owner, namespace)
    if not found:
        return []
    names = sorted({name for name in dir(value) if name.startswith(word)})
    if word.startswith("_"):
        return names
    return [name for name in names if not name.startswith("_")]


def _dimensions(before: str, word: str, namespace: Mapping[str, Any]) -> list[str]:
    match = _CALL.search(before)
    if match is None:
        return []
    found, value = _find(match.group(1), namespace)
    extent = getattr(value, "extent", None) if found else None
    given = set(_GIVEN.findall(match.group(3)))
    labels = getattr(extent, "labels", ())
    return [f"{label}=" for label in labels if label.startswith(word) and label not in given]


def _find(dotted: str, namespace: Mapping[str, Any]) -> tuple[bool, Any]:
    """What a dotted name means; properties on the way are computed, as typing it would."""
    first, *rest = dotted.split(".")
    if first in namespace:
        value = namespace[first]
    elif hasattr(builtins, first):
        value = getattr(builtins, first)
    else:
        return False, None
    for name in rest:
        try:
            value = getattr(value, name)
        except Exception:  # whatever a property raises: then there is nothing to offer
            return False, None
    return True, value
