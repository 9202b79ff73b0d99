"""What is observed from the start of a process, where the options say so: metrics, spans, logs as JSON lines.

Like what looks in later (`inspecting`), it is in `monarch_async.observe`, which a process loads only for that. Nothing of it is here
otherwise: no branch on the way of a message.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Protocol

from monarch_async.errors import UsageError
from monarch_async.options import Options

__all__ = ["begin_observing", "from_environment"]

_STARTS = {
    "metrics": "monarch_async.observe.inside.metering",
    "spans": "monarch_async.observe.spans",
    "log_json": "monarch_async.observe.json_lines",
}
"""By option, the modules whose ``begin(runtime)`` is called."""
_VARIABLE = "MONARCH_ASYNC_"
_NO = ("", "0", "no", "false", "off")


class _Observed(Protocol):
    @property
    def options(self) -> Options: ...


def begin_observing(runtime: _Observed) -> None:
    """Begin with what the options of a new runtime say."""
    for option, module in _STARTS.items():
        if getattr(runtime.options, option):
            begin: Callable[[Any], None] = import_module(module).begin
            begin(runtime)


def from_environment(options: Options, environ: Mapping[str, str] = os.environ) -> Options:
    """The same options, with what ``MONARCH_ASYNC_METRICS``, ``_SPANS``, ``_LOG_JSON`` and ``_DEBUG`` switch on. Raises `UsageError`."""
    changes: dict[str, Any] = {}
    for option in ("spans", "log_json", "debug"):
        if environ.get(_VARIABLE + option.upper(), "").lower() not in _NO:
            changes[option] = True
    address = environ.get(_VARIABLE + "METRICS", "")
    if address and not options.metrics:
        changes["metrics"] = address
    try:
        return options.with_(**changes) if changes else options
    except ValueError as error:
        raise UsageError(f"{_VARIABLE}METRICS: {error}") from None
