"""JSON Schemas of records, made of their annotations, and the little of validating that they need."""

from __future__ import annotations

import types
import typing
from typing import Any

__all__ = ["schema_of", "wrong"]

_NAMES: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def schema_of(kind: Any) -> dict[str, Any]:
    """The schema of values of this type."""
    if hasattr(kind, "_fields"):
        hints = typing.get_type_hints(kind)
        properties = {name: schema_of(hints[name]) for name in kind._fields}
        return {"type": "object", "properties": properties, "required": list(kind._fields), "additionalProperties": False}
    if isinstance(kind, types.UnionType):
        return {"type": [_NAMES[part] for part in typing.get_args(kind)]}
    if typing.get_origin(kind) is tuple:
        inner = [part for part in typing.get_args(kind) if part is not Ellipsis]
        return {"type": "array", "items": schema_of(inner[0])}
    return {"type": _NAMES[kind]}


def wrong(value: Any, schema: dict[str, Any], path: str = "$") -> list[str]:
    """What of a value does not fit a schema."""
    names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    fits = {
        "string": lambda: isinstance(value, str),
        "integer": lambda: isinstance(value, int) and not isinstance(value, bool),
        "number": lambda: isinstance(value, int | float) and not isinstance(value, bool),
        "boolean": lambda: isinstance(value, bool),
        "null": lambda: value is None,
        "array": lambda: isinstance(value, list),
        "object": lambda: isinstance(value, dict),
    }
    if not any(fits[name]() for name in names):
        return [f"{path} is {value!r}, not {' or '.join(names)}"]
    if isinstance(value, list):
        return [text for index, item in enumerate(value) for text in wrong(item, schema["items"], f"{path}[{index}]")]
    if isinstance(value, dict):
        texts = [f"{path} has {sorted(value)}, not {sorted(schema['required'])}"] if set(value) != set(schema["required"]) else []
        known = schema["properties"]
        return texts + [text for name, item in value.items() if name in known for text in wrong(item, known[name], f"{path}.{name}")]
    return []
