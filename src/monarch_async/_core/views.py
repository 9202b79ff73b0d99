"""How a `memoryview` travels: beside the body, as an array would, and it arrives as a view of the same shape and format."""

from __future__ import annotations

import pickle
from typing import Any

__all__ = ["reduce_view"]


def reduce_view(view: memoryview) -> tuple[Any, ...]:
    """What `__reduce__` would return. A view with gaps, or in another order than C's, is packed first. Raises `TypeError`."""
    text = f"a memoryview of format {view.format!r} and shape {view.shape}"
    if not view.nbytes and view.ndim != 1:
        raise TypeError(f"{text} is empty, and can't be made again: send a flat one")
    try:
        memoryview(b"").cast(view.format)  # type: ignore[call-overload]  # whatever it is
    except ValueError:
        raise TypeError(f"{text} can't be made again from bytes: cast it to 'B', or send the array it is a view of") from None
    flat = view.cast("B") if view.c_contiguous and view.nbytes else memoryview(bytearray(view.tobytes()))
    return _make_view, (pickle.PickleBuffer(flat), view.format, view.shape, view.readonly)


def _make_view(buffer: Any, format: str, shape: tuple[int, ...], readonly: bool) -> memoryview:
    flat = memoryview(buffer)
    if flat.readonly and not readonly:
        flat = memoryview(bytearray(flat))
    view = flat if format == "B" and len(shape) == 1 else flat.cast("B").cast(format, shape) if flat.nbytes else flat.cast(format)  # type: ignore[call-overload]
    return view.toreadonly() if readonly else view
