"""Everything about a job in one file, to be sent along with a report. Whatever can't be had is noted in its place.

Left out: keys, the values of environment variables, the values of actors' attributes.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import platform
import sys
import tarfile
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Protocol

from monarch_async._runtime.jobfile import RELEASE
from monarch_async.observe.doctor import doctor
from monarch_async.observe.records import to_json

__all__ = ["write_bundle"]

LONGEST = 10.0
"""Seconds that each part may take."""
LINES = 2000
"""Lines of output that are kept of each process, the last ones."""


class _Source(Protocol):
    name: str
    id: str

    def ps(self) -> Awaitable[Any]: ...
    def procs(self) -> Awaitable[Any]: ...
    def tree(self) -> Awaitable[Any]: ...
    def calls(self) -> Awaitable[Any]: ...
    def links(self) -> Awaitable[Any]: ...
    def deadletters(self) -> Awaitable[Any]: ...
    def events(self) -> Awaitable[Any]: ...
    def stack(self, target: str | int) -> Awaitable[Any]: ...
    def logs(self) -> Any: ...


async def write_bundle(job: _Source, path: Path) -> Path:
    """Write it; returns its path, which gets the ending ``.tar.gz`` where it has none. Raises `OSError`."""
    if not path.name.endswith((".tar.gz", ".tgz")):
        path = path.with_name(path.name + ".tar.gz")
    parts: dict[str, Any] = {"about.json": _about(job)}
    for name in ("procs", "ps", "tree", "calls", "links", "deadletters", "events"):
        parts[f"{name}.json"] = await _part(getattr(job, name)())
    procs = parts["procs.json"] if isinstance(parts["procs.json"], list) else []
    stacks = [await _part(job.stack(row["process"])) for row in procs if row["kind"] == "proc"]
    parts["stacks.json"] = stacks
    parts["doctor.json"] = to_json(doctor())
    logs: dict[str, Any] = await _part(_lines(job))
    if isinstance(logs.get("error"), str):  # and not the lines of a process of that name
        parts["logs.json"], logs = logs, {}
    await asyncio.to_thread(_write, path, f"{job.name}-{job.id}", parts, logs)
    return path


async def _part(asked: Awaitable[Any]) -> Any:
    try:
        async with asyncio.timeout(LONGEST):
            return to_json(await asked)
    except Exception as error:  # whatever it is, the rest is still worth having
        return {"error": f"{type(error).__name__}: {error}"}


async def _lines(job: _Source) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    async for line in job.logs():
        kept = found.setdefault(line.process, [])
        kept.append(line.text)
        del kept[:-LINES]
    return found


def _about(job: _Source) -> dict[str, Any]:
    return {
        "job": job.name,
        "id": job.id,
        "when": time.time(),
        "monarch_async": RELEASE,
        "python": sys.version,
        "platform": platform.platform(),
        "modules": {
            name: str(getattr(sys.modules[name], "__version__", "")) for name in ("uvloop", "torch", "numpy") if name in sys.modules
        },
        "environment": sorted(os.environ),
    }


def _write(path: Path, folder: str, parts: dict[str, Any], logs: dict[str, list[str]]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, value in parts.items():
            _add(tar, f"{folder}/{name}", json.dumps(value, indent=1))
        for process, lines in logs.items():
            _add(tar, f"{folder}/logs/{process.replace('/', '_')}.txt", "\n".join(lines) + "\n")


def _add(tar: tarfile.TarFile, name: str, text: str) -> None:
    data = text.encode("utf-8", errors="replace")
    info = tarfile.TarInfo(name)
    info.size, info.mtime = len(data), int(time.time())
    tar.addfile(info, io.BytesIO(data))
