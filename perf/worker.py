"""One system under measurement, in an interpreter of its own, spoken to in lines of JSON.

    python -m perf.worker perf.systems.ours --procs 8

A system is a module with a class `System`: `System(procs)` is made before the loop runs, so that it may fork, and `versions` names what is
measured; its workloads are its other methods whose names don't begin with an underscore, which start what they need; `await system.close()`
ends it all.

* ``{"run": "call", "count": 1000}`` is answered by ``{"samples": {"call": [0.0001, …]}}``: samples by metric.
* A workload that raised, or that the system doesn't have: ``{"error": "…"}`` with the traceback; the system goes on.
* The first line, ``{"versions": {…}, "workloads": […]}``, says that it is ready. End of input ends the worker.

What the system prints goes to standard error: standard output belongs to the protocol. Standard library only, since peers run it too.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TextIO

__all__ = ["main"]


def _workloads(system: Any) -> dict[str, Callable[[int], Awaitable[dict[str, list[float]]]]]:
    names = [name for name in dir(system) if not name.startswith("_") and name not in ("close", "versions")]
    return {name: getattr(system, name) for name in names}


async def _serve(system: Any, requests: TextIO, answers: TextIO) -> None:
    def answer(content: dict[str, Any]) -> None:
        print(json.dumps(content), file=answers, flush=True)

    workloads = _workloads(system)
    answer({"versions": system.versions, "workloads": sorted(workloads)})
    try:
        # Only this coroutine reads, and it measures nothing meanwhile: the thread it waits in is idle during a workload.
        while line := await asyncio.to_thread(requests.readline):
            request = json.loads(line)
            try:
                answer({"samples": await workloads[request["run"]](request["count"])})
            except Exception:
                answer({"error": traceback.format_exc()})
    finally:
        await system.close()


def _run(coroutine: Coroutine[Any, Any, None]) -> None:
    """On uvloop where it is installed, for every system alike."""
    factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    if importlib.util.find_spec("uvloop") is not None:
        factory = importlib.import_module("uvloop").new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(coroutine)


def main() -> None:
    parser = argparse.ArgumentParser(prog="perf.worker", description="One system under measurement; speaks JSON lines.")
    parser.add_argument("module", help="the system's module, such as perf.systems.ours")
    parser.add_argument("--procs", type=int, default=8, help="how many processes its mesh shall have")
    arguments = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    system = importlib.import_module(arguments.module).System(arguments.procs)
    _run(_serve(system, sys.stdin, answers))


if __name__ == "__main__":
    main()
