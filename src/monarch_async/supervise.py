"""What happens to a failure that nobody handled, and the record of one.

A failure in a mesh is told to its owner's `__supervise__`; what that does not handle fails the owner, and so on up. What reaches the
program itself goes to the hook: ``monarch_async.unhandled_fault_hook``, which a program may replace by assigning to it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable

from monarch_async._core.events import Failure as MeshFailure

__all__ = ["MeshFailure", "unhandled_fault_hook"]


_ADVICE = (
    "The program ends, since nothing of it deals with this. To go on: assign a function to monarch_async.unhandled_fault_hook, "
    "or spawn the mesh from an actor whose __supervise__ returns True."
)


def unhandled_fault_hook(failure: MeshFailure) -> None:
    """Report the failure in full and end the program with status 1. Everything it has spawned ends with it.

    A program with a prompt (a REPL, a notebook) goes on: somebody is there to deal with it.
    """
    has_prompt = hasattr(sys, "ps1")
    sys.stdout.flush()
    sys.stderr.write(f"monarch_async: unhandled failure\n{failure.report()}\n" + ("" if has_prompt else f"\n{_ADVICE}\n"))
    sys.stderr.flush()
    if not has_prompt:
        os._exit(1)


def _hook() -> Callable[[MeshFailure], None]:
    """The hook that is in force."""
    hook: Callable[[MeshFailure], None] = getattr(sys.modules.get("monarch_async"), "unhandled_fault_hook", unhandled_fault_hook)
    return hook


def is_default_hook() -> bool:
    """Whether a failure will end the program."""
    return _hook() is unhandled_fault_hook


def call_unhandled_fault_hook(failure: MeshFailure) -> None:
    """Call the hook that is in force."""
    try:
        _hook()(failure)
    except Exception:
        logging.getLogger("monarch_async").exception("the unhandled_fault_hook raised, so the default one reports the failure")
        unhandled_fault_hook(failure)
