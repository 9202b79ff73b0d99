"""Which event loop processes of this project run: uvloop where it is installed, else the standard one.

uvloop is imported when the first loop is made: a client that brings its own loop does without, and an agent makes up its mind
before it forks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["loop_factory", "new_event_loop"]


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """What makes the loops of this process."""
    try:
        import uvloop
    except ImportError:  # a platform without it
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A new loop."""
    return loop_factory()()
