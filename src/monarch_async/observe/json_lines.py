"""Logs as JSON lines: one object for each record, with where it comes from.

    json_logging()          # or configure(log_json=True), or MONARCH_ASYNC_LOG_JSON=1

Fields: `time` (UTC), `level`, `logger`, `message`; `actor` and `endpoint` of the handler that logs, `rank`; `process`, `host`, `pid`,
`job`; `exception`, a traceback; `extra`, what the caller has added. What does not apply is null. Names are frozen (`FIELDS`).

Output of other processes is shown as ever, by the program. Lines that are records already are passed on as they are, others become the
message of one whose logger is ``stdout`` or ``stderr``, with the process and rank that have printed them; so everything that the program
writes for its processes can be read line by line. Equal lines of several ranks are not folded.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from monarch_async._runtime.context import Message, current_cell, current_message
from monarch_async._runtime.current import find_runtime
from monarch_async._runtime.runtime import Runtime
from monarch_async.ambient import configure
from monarch_async.ids import ProcAddress

__all__ = ["FIELDS", "JsonFormatter", "begin", "json_logging"]

FIELDS = (
    *("time", "level", "logger", "message", "actor", "endpoint", "rank"),
    *("process", "host", "pid", "job", "exception", "extra"),
)
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One line for each record. For any handler of `logging` that formats in the thread that logs."""

    def format(self, record: logging.LogRecord) -> str:
        message = current_message.get()
        cell = message.cell if message is not None else current_cell.get()
        trouble = self.formatException(record.exc_info) if record.exc_info else record.exc_text
        if record.stack_info:
            trouble = f"{trouble}\n{record.stack_info}" if trouble else record.stack_info
        extra = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        fields = {
            **_here(),
            "time": _written(record.created),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "actor": str(cell.identity) if cell is not None else None,
            "endpoint": message.endpoint if message is not None else None,
            "exception": trouble or None,
            "extra": extra or None,
        }
        if cell is not None:
            fields["rank"] = cell.identity.rank
        return _line(fields)


def _line(fields: Mapping[str, Any]) -> str:
    record = {name: fields.get(name) for name in FIELDS}
    try:
        return json.dumps(record, default=repr, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):  # what was added has keys that are no text, numbers that JSON does not know, or itself in it
        record["extra"] = {name: repr(value) for name, value in (fields.get("extra") or {}).items()}
        return json.dumps(record, default=repr, ensure_ascii=False)


def _written(when: float) -> str:
    return datetime.datetime.fromtimestamp(when, datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _here() -> dict[str, Any]:
    """What is the same for all that this process logs."""
    runtime = find_runtime()
    fields: dict[str, Any] = {"host": os.uname().nodename, "pid": os.getpid()}
    if runtime is not None:
        me = runtime.me
        fields |= {"process": _name(me), "job": runtime.client.host}
        if me.uid != runtime.client.uid:
            fields["rank"] = me.rank
    return fields


def _name(me: ProcAddress) -> str:
    return me.name if me.name in ("client", "agent", "visitor") else str(me)


def json_logging(level: int | str | None = None, stream: TextIO | None = None) -> logging.Handler:
    """Log as JSON lines, in this program and in the processes of runtimes that it starts from now on.

    What the root logger writes to the console is written as JSON from now on, or, with `stream`, goes there too as JSON; other handlers
    stay as they are. Returns the handler. `level` is the root logger's; by default it stays.
    """
    configure(log_json=True)
    handler = _install(stream)
    if level is not None:
        logging.getLogger().setLevel(level)
    return handler


def _install(stream: TextIO | None) -> logging.Handler:
    root = logging.getLogger()
    handler: logging.Handler | None = None
    if stream is None:
        for other in root.handlers:
            if type(other) is logging.StreamHandler and _is_console(other.stream):
                handler = other
    if handler is None:
        handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
        root.addHandler(handler)
    handler.setFormatter(JsonFormatter())
    return handler


def _is_console(stream: Any) -> bool:
    if stream in (sys.stderr, sys.stdout):
        return True
    try:
        return stream.fileno() in (1, 2)  # an object of before the fork
    except (AttributeError, OSError, ValueError):
        return False


def begin(runtime: Runtime) -> None:
    """The option says so: in this process from now on."""
    if not any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers):
        _install(None)
    if runtime.me.name == "client":
        runtime.service = {**runtime.service, "output": _Output(runtime).show}


class _Output:
    """What the client does with the output of processes, in place of folding it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def show(self, message: Message, mesh: str, rank: int, size: int, stream: str, lines: list[str]) -> None:
        """A process has printed something."""
        now = _written(time.time())
        shown = []
        for line in lines:
            if not _is_record(line):
                known = {"time": now, "level": "INFO", "logger": stream, "message": line}
                line = _line({**known, "rank": rank, "process": f"{mesh}[{rank}]", "job": self._runtime.client.host})
            shown.append(line + "\n")
        out = sys.stdout if stream == "stdout" else sys.stderr
        out.write("".join(shown))
        out.flush()


def _is_record(line: str) -> bool:
    if not line.startswith('{"time":'):
        return False
    try:
        return bool(json.loads(line).keys() == set(FIELDS))
    except (ValueError, AttributeError):
        return False
