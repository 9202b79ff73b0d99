"""The same jobs to look into as for the library."""

from __future__ import annotations

from tests.observe.conftest import failures, quick_end, state_home, zoo

__all__ = ["failures", "quick_end", "state_home", "zoo"]
