"""Writing and reading job files. Apart from `jobfile`, so that a program need not load what it needs once, and in a thread.

Rules:

* Whoever can read a job's file can join that job: so one that others could read is not believed, and none is written into a folder that
  others can write to, nor through a link.
* What stands in a file is checked, field by field, before anything is done with it: a file may be cut, of another version, or made by hand.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import stat
from collections.abc import Callable, Mapping
from typing import Any

from monarch_async._runtime.jobfile import JobFile, jobs_folder

__all__ = ["job_files", "read_job_file", "write_job_file"]

FORMAT = 1
"""The version of what stands in the file."""
LARGEST = 4 << 20
"""Bytes of one; each host of a job takes some 250."""
_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")
_KEY = re.compile(r"(?:[0-9a-f]{2}){16,64}")
_MOST = 1 << 62


def write_job_file(file: JobFile) -> JobFile:
    """Write it, for the first time or anew; returns it with its path. Raises `OSError`."""
    folder = jobs_folder()
    os.makedirs(folder, mode=0o700, exist_ok=True)
    _check_folder(folder)
    path = os.path.join(folder, f"{file.id}.json")
    draft = os.path.join(folder, f".{file.id}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(draft)  # of a process that had this pid before
    fields = {name: value for name, value in file._asdict().items() if name != "path"}
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "w", encoding="utf-8") as output:
            json.dump({"format": FORMAT, **fields}, output)
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise
    return file._replace(path=path)


def read_job_file(path: str) -> JobFile:
    """Raises `OSError`; `ValueError` for what is none, or could have been read by others."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is no file")
        if status.st_uid not in (os.geteuid(), 0) or stat.S_IMODE(status.st_mode) & 0o077:
            raise ValueError(f"{path} can be read by others, so its key is worth nothing: chmod 600 it, if it is yours")
        data = file.read(LARGEST + 1)
    try:
        if len(data) > LARGEST:
            raise ValueError(f"it has more than {LARGEST} bytes")
        return JobFile(**_checked(json.loads(data)), path=path)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no job file: {error}") from error


def job_files() -> list[JobFile]:
    """Those that can be read, the newest first. Raises `PermissionError` for a folder that is not this user's alone to change."""
    found = []
    folder = jobs_folder()
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        _check_folder(folder)
        for name in os.listdir(folder):
            if name.endswith(".json"):
                with contextlib.suppress(OSError, ValueError):
                    file = read_job_file(os.path.join(folder, name))
                    if name == f"{file.id}.json":
                        found.append(file)
    return sorted(found, key=lambda file: -file.started)


def _check_folder(folder: str) -> None:
    status = os.stat(folder)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
        raise PermissionError(f"{folder} can be changed by others, so no job file there is believed: chmod 700 it, if it is yours")


def _checked(fields: Any) -> dict[str, Any]:
    """The fields of a file, if they are what they should be. Raises `ValueError`, which says which is not."""
    if not isinstance(fields, dict) or fields.pop("format", None) != FORMAT:
        raise ValueError("it is of another version")
    _check("", fields, _FIELDS)
    fields["agents"] = tuple(fields["agents"])
    return fields


def _check(where: str, fields: Any, wanted: Mapping[str, Callable[[Any], bool]]) -> bool:
    if not isinstance(fields, dict) or set(fields) != set(wanted):
        named = ", ".join(sorted(map(str, set(fields) ^ set(wanted)))) if isinstance(fields, dict) else "all"
        raise ValueError(f"{where or 'it '}lacks fields, or has others: {named[:200]}")
    for name, fits in wanted.items():
        if not fits(fields[name]):
            raise ValueError(f"{where}{name} is {repr(fields[name])[:50]}")
    return True


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= 4096 and "\0" not in value


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_id(value: Any) -> bool:
    return isinstance(value, str) and _ID.fullmatch(value) is not None


def _is_key(value: Any) -> bool:
    return isinstance(value, str) and _KEY.fullmatch(value) is not None


def _is_address(value: Any) -> bool:
    return _check("address: ", value, _ADDRESS)


def _is_network(value: Any) -> bool:
    return value is None or _check("network: ", value, {"key": _is_key, "tls": _is_tls})


def _is_tls(value: Any) -> bool:
    return value is None or _check("tls: ", value, dict.fromkeys(("cert", "key", "ca"), _is_text))


_ADDRESS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("uid", "host"), _is_id),
    **dict.fromkeys(("unix", "tcp", "name"), _is_text),
    "rank": _is_number,
}
_FIELDS: dict[str, Callable[[Any], bool]] = {
    "id": _is_id,
    **dict.fromkeys(("name", "machine", "version"), _is_text),
    "pid": lambda value: _is_number(value) and value > 0,
    **dict.fromkeys(("born", "protocol"), _is_number),
    "started": _is_time,
    **dict.fromkeys(("agent", "client"), _is_address),
    "key": _is_key,
    "network": _is_network,
    "agents": lambda value: isinstance(value, list) and all(map(_is_address, value)),
}
