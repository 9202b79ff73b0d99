"""Running an example the way its reader does: ``python examples/…`` in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import monarch_async

__all__ = ["EXAMPLES", "exits_of_example", "run_example", "started_example"]

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


_ONE_AFTER_THE_OTHER = """
import contextlib, io, json, os, runpy, sys
path, exits = sys.argv[1], []
sys.path[0] = os.path.dirname(path)
for arguments in json.loads(sys.argv[2]):
    sys.argv = [path, *arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_path(path, run_name="__main__")
            status = 0
        except SystemExit as end:
            status = end.code
    exits.append((status, out.getvalue(), err.getvalue()))
print(json.dumps(exits))
"""


def exits_of_example(name: str, *runs: list[str], folder: Path) -> list[tuple[int, str, str]]:
    """The same for several runs that end before they start anything: in one process, since importing torch takes each two seconds."""
    command = [sys.executable, "-W", "error", "-c", _ONE_AFTER_THE_OTHER, str(EXAMPLES / name), json.dumps(runs)]
    environment = {**os.environ, "COLUMNS": "120", "PYTHONPATH": PACKAGE_PARENT}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60.0)
    assert (0, "") == (done.returncode, done.stderr)
    return [(status, out, err) for status, out, err in json.loads(done.stdout)]
