"""Runs the body of a test in a fresh interpreter that has a launcher, as an agent does.

A launcher must be made before there is a loop or a thread, which can't be had inside pytest. `in_agent` makes a test of a coroutine
function: once for each kind of loop, in a process of its own, in which nothing may be left at the end either.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from monarch_async._runtime import linux
from monarch_async._runtime.child import Child, Exit, ProcSpec
from monarch_async._runtime.launcher import Launcher

ROOT = str(Path(__file__).parents[2])

Body = Callable[..., Awaitable[None]]


def in_agent(body: Body) -> Callable[..., None]:
    """A test that calls ``body(launcher, tmp_path)`` in an agent."""

    @pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
    def test(loop: str, tmp_path: Path) -> None:
        command = [sys.executable, "-m", "tests.runtime.agents", body.__module__, body.__name__, loop, str(tmp_path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        if done.returncode or done.stderr:
            pytest.fail(f"the agent exited with {done.returncode} and wrote:\n{done.stdout}{done.stderr}", pytrace=False)

    test.__doc__, test.__name__ = body.__doc__, body.__name__
    test.body = body  # type: ignore[attr-defined]
    return test


def spec(entry: str, payload: bytes = b"", **changes: Any) -> ProcSpec:
    """A process that runs a function of `tests.runtime.entries`."""
    settings = {"name": entry, "env": {}, "sys_path": (ROOT,), **changes}
    return ProcSpec(entry=entry if ":" in entry else f"tests.runtime.entries:{entry}", payload=payload, **settings)


async def receive(child: Child) -> str:
    """The next message that the process sends on its control socket."""
    return (await asyncio.get_running_loop().sock_recv(child.control, 65536)).decode()


async def end_of(child: Child) -> tuple[Exit, str, str]:
    """How it ended, and all that it wrote (not more than a pipe holds)."""
    how = await child.exited
    output = os.read(child.stdout, 65536).decode(), os.read(child.stderr, 65536).decode()
    return how, *output


async def wait_gone(pids: list[int], timeout: float = 2.0) -> None:
    """Return when none of the processes lives any more; raises `TimeoutError` otherwise."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(timeout):
        for pid in pids:
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            gone = asyncio.Event()
            loop.add_reader(fd, gone.set)
            try:
                await gone.wait()
            finally:
                loop.remove_reader(fd)
                os.close(fd)


def zygote_pids() -> tuple[int, list[int]]:
    """The root zygote of this process, and the proc zygotes."""
    (root,) = psutil.Process().children()
    return root.pid, [child.pid for child in root.children()]


def main(module: str, name: str, loop: str, folder: str) -> None:
    """What the fresh interpreter runs."""
    factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    if loop == "uvloop":
        factory = importlib.import_module("uvloop").new_event_loop
    before = linux.open_descriptors()
    launcher = Launcher.start()
    body: Body = getattr(importlib.import_module(module), name).body

    async def run() -> None:
        launcher.attach(asyncio.get_running_loop())
        async with asyncio.timeout(50):
            await body(launcher, Path(folder))

    with asyncio.Runner(loop_factory=factory) as runner:
        try:
            runner.run(run())
        finally:
            launcher.close()
    assert [] == linux.children()
    left = linux.open_descriptors() - before
    # libuv keeps a pipe for signals, made with the first loop of a process.
    assert len(left) <= (2 if loop == "uvloop" else 0), [os.readlink(f"/proc/self/fd/{fd}") for fd in left]


if __name__ == "__main__":
    main(*sys.argv[1:])
