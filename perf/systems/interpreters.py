"""What fresh interpreters cost: starting one, and importing a module in one. Seconds."""

from __future__ import annotations

import subprocess
import sys
import time

__all__ = ["import_seconds", "start_seconds"]

_TIMED = "import time; start = time.perf_counter(); import {module}; print(time.perf_counter() - start)"


def start_seconds(code: str, count: int) -> list[float]:
    """From starting an interpreter that runs `code` to its end. The first run, which may find no bytecode, doesn't count."""
    samples = []
    for _ in range(count + 1):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        samples.append(time.perf_counter() - start)
    return samples[1:]


def import_seconds(module: str, count: int) -> list[float]:
    """The import alone, as the interpreter that does it sees it."""
    command = [sys.executable, "-c", _TIMED.format(module=module)]
    return [float(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(count)]
