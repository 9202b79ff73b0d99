"""Workers on loopback, as processes of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import monarch_async

ROOT = str(Path(__file__).parents[2])
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(monarch_async.__file__).parents[1]), ROOT])}


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "monarch_async", *words]


def make_key(folder: Path, name: str = "key") -> str:
    """A new key file."""
    path = folder / name
    path.touch(0o600)
    path.write_bytes(os.urandom(32))
    return str(path)


@contextlib.contextmanager
def worker(
    *options: str, listen: str = "tcp://127.0.0.1:0", env: dict[str, str] | None = None
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A worker that listens: its address and its process. It must end by SIGTERM with status 0."""
    process = subprocess.Popen(
        command("worker", "--listen", listen, *options), stdout=subprocess.PIPE, text=True, env={**ENVIRONMENT, **(env or {})}, cwd=ROOT
    )
    assert process.stdout is not None
    with process.stdout:
        try:
            yield process.stdout.readline().split()[-1], process
        finally:
            process.terminate()
            status = process.wait(15)
    assert status in (0, -signal.SIGKILL)  # unless the test has killed it
