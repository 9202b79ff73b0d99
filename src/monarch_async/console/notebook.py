"""An extension for IPython and Jupyter: ``%load_ext monarch_async.console.notebook``.

The runtime needs none there: cells can `await`, and what processes print appears in the cell that runs. This brings what the REPL has
beside that: the names at hand, results of meshes as tables, brief errors, the commands as functions (``await ps()``). In a terminal the
loop is kept alive while the prompt waits, as it is in Jupyter anyway.
"""

from __future__ import annotations

import asyncio
from typing import Any

from monarch_async.console.commands import Commands
from monarch_async.console.repl import names_at_hand
from monarch_async.console.show import format_error, format_value
from monarch_async.errors import MonarchError
from monarch_async.future import Future, MeshFuture
from monarch_async.observe.job import Job
from monarch_async.value_mesh import ValueMesh

__all__ = ["load_ipython_extension"]


def load_ipython_extension(shell: Any) -> None:
    """Called by IPython, with its shell."""
    names = names_at_hand()
    del names["__name__"]
    shell.push({**names, **Commands(Job.here, {}).functions}, interactive=False)
    formatter = shell.display_formatter.formatters["text/plain"]
    for kind in (ValueMesh, Future, MeshFuture):
        formatter.for_type(kind, _show)
    shell.set_custom_exc((MonarchError,), _show_error)
    if shell.active_eventloop is None and _in_terminal(shell):
        shell.enable_gui("asyncio")


def _in_terminal(shell: Any) -> bool:
    """Whether the prompt is IPython's own; a kernel's loop runs all the time."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return hasattr(shell, "enable_gui") and not hasattr(shell, "kernel")
    return False


def _show(value: Any, printer: Any, cycle: bool) -> None:
    printer.text(format_value(value))


def _show_error(shell: Any, kind: type[BaseException], error: BaseException, trace: Any, tb_offset: int | None = None) -> list[str]:
    """In place of a traceback with all of the runtime's frames."""
    lines = format_error(error).split("\n")
    shell._showtraceback(kind, error, lines)
    return lines
