"""Where worker processes begin, with all that actors import already loaded.

The zygote imports this module once and every process is a fork of it: so a process, also one that is started again, has the public API
without importing it, and shares its pages with the others.
"""

from __future__ import annotations

from importlib import import_module

from monarch_async._runtime.proc import run

__all__ = ["run"]

for name in ("actor", "controllers", "host", "info", "lowlevel", "supervisors", "watching"):  # these bring the rest
    import_module(f"monarch_async.{name}")
