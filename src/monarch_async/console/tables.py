"""Records as tables for people: which columns, how numbers are written, how wide."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

__all__ = ["COLUMNS", "render", "render_hops", "render_stacks", "render_tree"]

Column = tuple[str, str, Callable[[Any], str]]
"""Its head, the field of the record, how that is written."""


def text(value: Any) -> str:
    return "" if value is None else str(value)


def age(value: float | None) -> str:
    """``0.3s``, ``12s``, ``4m10s``, ``2h05m``, ``3d04h``."""
    if value is None:
        return ""
    if value < 10:
        return f"{value:.1f}s"
    if value < 60:
        return f"{value:.0f}s"
    minutes, seconds = divmod(int(value), 60)
    if minutes < 60:
        return f"{minutes}m{seconds:02}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours < 24 else f"{hours // 24}d{hours % 24:02}h"


def size(value: float | None) -> str:
    """``512 B``, ``27 MiB``."""
    if value is None:
        return ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def rate(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f}%"


def clock(value: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(value)) + f".{int(value * 1000) % 1000:03}" if value else ""


def yes(value: bool) -> str:
    return "yes" if value else "no"


_ACTOR: Column = ("ACTOR", "actor", text)
_PROCESS: Column = ("PROCESS", "process", text)
_PID: Column = ("PID", "pid", text)
_STATE: Column = ("STATE", "state", text)
_SINCE: Column = ("SINCE", "since", age)
_ENDPOINT: Column = ("ENDPOINT", "endpoint", text)
_WAITING: Column = ("QUEUED", "mailbox", text)
_RUNNING: Column = ("RUNNING", "in_flight", text)
_RSS: Column = ("MEMORY", "rss", size)
_WHEN: Column = ("WHEN", "when", clock)

COLUMNS: dict[str, tuple[Column, ...]] = {
    "ps": (
        _ACTOR,
        ("CLASS", "class_name", text),
        _STATE,
        _SINCE,
        _ENDPOINT,
        _WAITING,
        _RUNNING,
        ("RESTARTS", "restarts", text),
        _PROCESS,
        ("HOST", "host", text),
        _PID,
        _RSS,
    ),
    "procs": (
        _PROCESS,
        ("KIND", "kind", text),
        _STATE,
        _SINCE,
        ("IN", "place", text),
        ("HOST", "host", text),
        _PID,
        _RSS,
        ("CPU", "cpu", age),
        ("THREADS", "threads", text),
        ("WHY", "why", text),
    ),
    "top": (_ACTOR, _STATE, ("MSG/S", "handled", rate), ("CPU", "cpu", share), _RSS, _ENDPOINT, _WAITING, _RUNNING, _PROCESS, _PID),
    "calls": (
        ("WAITS", "caller", text),
        ("FOR", "actor", text),
        _ENDPOINT,
        ("AGE", "age", age),
        _STATE,
        ("BLOCKED", "blocks", yes),
        _PROCESS,
    ),
    "links": (
        ("FROM", "process", text),
        ("TO", "peer", text),
        ("KIND", "kind", text),
        ("UP", "connected", yes),
        ("LOST", "reconnects", text),
        ("SENT", "sent", text),
        ("RECEIVED", "received", text),
        ("OUT", "sent_bytes", size),
        ("IN", "received_bytes", size),
        ("QUEUED", "queued", size),
        ("MESSAGES", "messages", text),
        ("BYTES", "bytes", size),
        ("CALLS", "calls", text),
        ("SILENT", "silent", age),
    ),
    "deadletters": (_WHEN, _PROCESS, _ACTOR, _ENDPOINT, ("REASON", "reason", text)),
    "events": (_WHEN, ("EVENT", "kind", text), ("WHO", "subject", text), ("WHAT", "text", text), ("NOTED BY", "process", text)),
    "jobs": (
        ("JOB", "name", text),
        ("ID", "id", text),
        _STATE,
        _PID,
        ("STARTED", "started", lambda when: time.strftime("%m-%d %H:%M:%S", time.localtime(when))),
        ("VERSION", "version", text),
        ("ADDRESS", "address", text),
    ),
    "trace": (
        _WHEN,
        _ACTOR,
        _ENDPOINT,
        ("SENDER", "sender", text),
        ("SIZE", "size", size),
        ("TOOK", "duration", lambda seconds: f"{1000 * seconds:.2f} ms"),
        ("OUTCOME", "outcome", text),
    ),
    "doctor": (("", "ok", lambda ok: "ok" if ok else "--"), ("WHAT", "name", text), ("FOUND", "found", text), ("FIX", "fix", text)),
    "done": (("WHO", "target", text), ("WHAT", "text", text)),
    "eval": (_ACTOR, ("VALUE", "value", text), ("TYPE", "type_name", text), ("ERROR", "error", text)),
}


def render(kind: str, records: Sequence[Any]) -> str:
    """A table; columns that are empty throughout are left out."""
    columns = COLUMNS[kind]
    rows = [[write(getattr(record, field)) for _, field, write in columns] for record in records]
    kept = [index for index in range(len(columns)) if any(row[index] for row in rows)]
    return _align([[columns[index][0] for index in kept], *([row[index] for index in kept] for row in rows)])


def _align(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


def render_tree(records: Iterable[Any]) -> str:
    """The supervision tree, indented."""
    rows = [["WHAT", "CLASS", "SIZE", "WHERE", "POLICY", "RESTARTS", ""]]
    for row in records:
        used = f"{row.used} of {row.budget} in {row.within:g} s" if row.policy else ""
        kind = "" if row.kind in ("program", "actor") else f" ({row.kind})"
        rows.append(["  " * row.depth + row.name + kind, row.class_name, text(row.size or ""), row.process, row.policy, used, row.state])
    return _align(rows)


def render_stacks(records: Iterable[Any]) -> str:
    """One paragraph for each process."""
    parts = []
    for row in records:
        place = f" in {row.actor}.{row.endpoint}" if row.actor else f" in {row.endpoint}" if row.endpoint else ""
        why = f": {row.why}" if row.why else ""
        source = f" (told by {row.source})" if row.source not in ("", "itself") else ""
        body = row.text or "  nothing runs, and no handler waits" if row.source else ""
        parts.append("\n".join(line for line in (f"{row.process} (pid {row.pid}) {row.state}{place}{why}{source}", body) if line))
    return "\n\n".join(parts)


def render_hops(records: Iterable[Any]) -> str:
    """Who waits for whom, one below the other."""
    parts = []
    for hop in records:
        endpoint = f".{hop.endpoint}" if hop.endpoint else ""
        held = f" for {age(hop.age)}" if hop.age is not None else ""
        lines = [f"{hop.actor}{endpoint}  {hop.state}{held}  in {hop.process}"]
        lines += [f"    {os.path.basename(frame.file)}:{frame.line} in {frame.function}" for frame in hop.frames]
        if hop.waits_for:
            lines.append(f"    waits for {hop.waits_for}" if hop.endpoint and hop.state == "running" else f"    {hop.waits_for}")
        parts.append("\n".join(lines))
    return "\n".join(parts)
