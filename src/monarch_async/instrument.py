"""Hooks by which observers hear of what is seldom: restarts, and collective operations that have ended.

Theory: what makes these knows nothing of who watches (`observe`), and the other way round; so both know these lists. Nothing of it is on
the way of a message: how handlers are watched is for `observe.inside.layers`.

Rules: lists of the whole process, empty while nobody watches. A hook is called in the thread where it happens, must be quick, and raises
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["on_collective", "on_restart"]

on_restart: list[Callable[[object, Any], None]] = []
"""Called when a life is about to be started again: with the runtime's tasks, which tell whose it is, and the failure that ended the life
before; `None` where that ended with a sibling's."""

on_collective: list[Callable[[str, float, float, float, str], None]] = []
"""Called when an operation has ended: what it is, when it was called, started (0.0: never) and ended by `time.monotonic`, ``done`` or
``failed``."""
