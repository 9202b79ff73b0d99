"""Which event loop processes of this project run: uvloop where it is installed, else the standard one."""

from __future__ import annotations

import asyncio

try:
    import uvloop
except ImportError:  # a platform without it
    new_event_loop = asyncio.new_event_loop
else:
    new_event_loop = uvloop.new_event_loop

__all__ = ["new_event_loop"]
