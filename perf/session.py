"""The near end of a worker (`worker.py`): start it, ask it for samples, end it and everything it has started."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["Session", "WorkerFailed"]

ROOT = Path(__file__).parents[1]
PATIENCE = 180.0
"""Seconds until a worker that has not answered is given up."""
ENDING = 20.0


class WorkerFailed(Exception):
    """A worker ended, was silent for too long, or its workload raised; the text says which."""


class Session:
    """A worker running module `module` under interpreter `python`. Raises `WorkerFailed` if it doesn't come up."""

    def __init__(self, module: str, python: str, procs: int) -> None:
        self.module = module
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
        # An installed package has its bytecode; without it each start and import would be measured with a compilation.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self._process = subprocess.Popen(
            [python, "-m", "perf.worker", module, "--procs", str(procs)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._received = b""
        try:
            ready = self._answer()
            self.versions: dict[str, str] = ready["versions"]
            self.workloads = frozenset[str](ready["workloads"])
        except BaseException:
            self.close()
            raise

    def run(self, workload: str, count: int) -> dict[str, list[float]]:
        """Samples by metric. Raises `WorkerFailed`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"run": workload, "count": count}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerFailed(f"{self.module} has ended before {workload}") from None
        answer = self._answer()
        if "error" in answer:
            raise WorkerFailed(f"{self.module}.{workload} raised:\n{answer['error']}")
        samples: dict[str, list[float]] = answer["samples"]
        return samples

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        stdout = self._process.stdout.fileno()
        deadline = time.monotonic() + PATIENCE
        while b"\n" not in self._received:
            if not select.select([stdout], [], [], max(deadline - time.monotonic(), 0))[0]:
                raise WorkerFailed(f"{self.module} did not answer within {PATIENCE:g} s")
            data = os.read(stdout, 1 << 20)
            if not data:
                raise WorkerFailed(f"{self.module} ended (status {self._process.wait()}); what it printed says why")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the worker, by force if it takes longer than it may, and what is left of its process group."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.close()
        try:
            process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            process.wait(ENDING)
        except subprocess.TimeoutExpired:
            process.kill()
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
