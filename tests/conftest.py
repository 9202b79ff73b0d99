"""What holds for every test of this project.

* Every async test runs twice: on stock asyncio and on uvloop; but for those whose subject is in other processes, which run on uvloop in any
  case, and which take seconds to start: they run on uvloop, and with ``--all-loops`` on both.
* After every test nothing may be left that it started: see `monarch_async.testing.leaks`. In an async test this is looked at twice: tasks
  while its loop still runs, everything else once the loop is closed, so that the loop's own descriptors and threads don't count.
* In an async test nothing may have reached the loop's exception handler: an error that nobody awaits is a failure, not a log line.

Order matters and comes from the fixtures: `nothing_left` is set up first and checks last, after the loop is closed.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import importlib.util
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any

import hypothesis
import pytest
import pytest_asyncio

from monarch_async import shutdown
from monarch_async.testing.leaks import LeakCheck

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
if importlib.util.find_spec("uvloop") is not None:
    import uvloop

    LOOPS["uvloop"] = uvloop.new_event_loop

# Folders and files of tests whose subject is in other processes.
ELSEWHERE = {
    "tensor",
    "observe",
    "console",
    "hosts",
    "cuda",
    "testing",
    "test_delivery",
    "test_device_lending",
    "test_health",
    "test_lending",
    "test_lending_arrow",
    "test_lending_costs",
    "test_lending_ends",
    "test_lending_kills",
    "test_lending_sessions",
    "test_lending_tensors",
    "test_lending_unused",
    "test_programs",
    "test_rdma",
    "test_rdma_ends",
    "test_rdma_errors",
    "test_rdma_ucx",
    "test_restarts",
    "test_restarts_corners",
    "test_restarts_ends",
    "test_restarts_escalation",
    "test_restarts_groups",
    "test_restarts_references",
    "test_restarts_state",
    "test_shared",
    "test_start",
    "test_tree",
    "test_tree_ends",
    "test_watch",
}

# What a driver opens once for a process, and never closes.
KEPT_BY_DRIVERS = (r"/dev/nvidia",)

call_failed = pytest.StashKey[bool]()

# How long an example takes says more of what else runs on the machine.
hypothesis.settings.register_profile("project", deadline=None)
hypothesis.settings.load_profile("project")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-loops", action="store_true", help="run every async test on every loop")


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    if config.getoption("--all-loops", default=False) or ELSEWHERE.isdisjoint((*item.path.parts[-2:-1], item.path.stem)):
        return LOOPS
    return dict([list(LOOPS.items())[-1]])


def pytest_collection_finish(session: pytest.Session) -> None:
    """Make what the leak check repeats after every test cheap and exact."""
    # libuv opens some descriptors once for the process, with the first loop.
    for factory in LOOPS.values():
        loop = factory()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
    _set_aside()


def _set_aside() -> None:
    """Let the collector look at nothing of what is here now. With torch imported collecting takes 70 ms, and without that under 1 ms."""
    gc.collect()
    gc.freeze()


def pytest_configure() -> None:
    """Ctrl-C means something, as in a terminal, where tests run in the background of a shell too: what they start inherits that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="module")
def earlier_modules_aside() -> None:
    """Shared by a module's tests, and first of all: what was imported since, such as the parts of torch that it imports when they are
    used, would cost every later test of this process up to 200 ms.
    """
    _set_aside()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[call_failed] = report.failed
    return report


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, missing in NEEDS.items():
        if item.get_closest_marker(marker) is not None and (reason := missing()):
            pytest.skip(reason)


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After the test, and after every other fixture of it: no thread, process, descriptor or segment more than before."""
    check = LeakCheck(ignore=KEPT_BY_DRIVERS)
    yield
    # A failed test's traceback keeps alive what its frames hold.
    if not request.node.stash.get(call_failed, False):
        check.assert_none()


@pytest.fixture(autouse=True)
def async_checks(request: pytest.FixtureRequest, nothing_left: None) -> None:
    """Async tests get `nothing_running` too; for the others no loop is made."""
    if pytest_asyncio.is_async_test(request.node):
        request.getfixturevalue("nothing_running")


@pytest.fixture
async def nothing_running(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """After an async test, in its loop: no task more than before, and no error that nobody saw."""
    unseen: list[str] = []
    loop = asyncio.get_running_loop()

    def note(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        unseen.append(f"{context['message']}: {error or context.get('task')!r}")
        # What pytest-timeout raises in its signal handler ends stock asyncio's loop; uvloop brings it here and would wait on for ever.
        if isinstance(error, pytest.fail.Exception):
            for task in asyncio.all_tasks(loop):
                task.cancel(str(error))

    loop.set_exception_handler(note)
    check = LeakCheck(kinds=["task"])
    yield
    # Where a runtime that the test left in this loop is closed; after it, not one task may be left.
    await shutdown()
    if not request.node.stash.get(call_failed, False):
        await check.wait_none()
        assert [] == unseen


def _missing_cuda() -> str:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return "" if torch.cuda.is_available() else "no CUDA device"


@functools.cache
def _missing_netns() -> str:
    if os.name != "posix" or os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need iproute2's `ip`"
    probe = f"monarch-async-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespaces here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", probe], check=True)
    return ""


NEEDS: dict[str, Callable[[], str]] = {"cuda": _missing_cuda, "netns": _missing_netns}
