"""Has breakpoints do something else, when it is imported."""

from __future__ import annotations

import sys

sys.breakpointhook = lambda *args, **kwargs: print("the own", "hook", flush=True)  # noqa: T201
