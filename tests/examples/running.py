"""Running an example the way its reader does: ``python examples/…`` in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import monarch_async

__all__ = ["EXAMPLES", "run_example", "started_example"]

EXAMPLES = Path(__file__).parents[2] / "examples"
PACKAGE_PARENT = str(Path(monarch_async.__file__).absolute().parents[1])  # the very package under test, wherever an example is run


@contextmanager
def started_example(name: str, *arguments: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start it in `folder`, as the leader of a session, like a command typed into a terminal; it does not outlive the block."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-W", "error", str(EXAMPLES / name), *arguments],
        cwd=folder,
        env={**os.environ, "COLUMNS": "120", "PYTHONPATH": PACKAGE_PARENT},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def run_example(name: str, *arguments: str, folder: Path, timeout: float = 60.0) -> tuple[int, str, str]:
    """Exit status, standard output and standard error. `subprocess.TimeoutExpired` if it takes longer."""
    with started_example(name, *arguments, folder=folder) as process:
        out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err
