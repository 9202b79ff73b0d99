"""Fixtures for pytest, which come with the package: processes, faults in them, and a check that nothing is left behind.

* `monarch_procs`: ``procs = await monarch_procs(4, name="procs")`` starts processes on this host; all are stopped after the test. In a
  test that also asks for `faults`, they have these installed.
* `faults`: a `Faults` object for the test. Its plan, with the seed, and what has happened stand in the report of a test that fails;
  ``--faults-seed=N`` gives every test that seed.
* `monarch_leaks`: after the test, and after what it has asked for later, no process, descriptor, thread or segment is left that was not
  there before.

It works with synchronous tests and with any plugin for asynchronous ones. It imports the rest of the package when a fixture is first used,
so that a project that uses none does not pay for it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from monarch_async.procs import ProcMesh
    from monarch_async.testing.faults import Faults
    from monarch_async.testing.leaks import LeakCheck

__all__ = ["MonarchProcs", "faults", "monarch_leaks", "monarch_procs"]

_report = pytest.StashKey[Callable[[], str]]()
_failed = pytest.StashKey[bool]()
_OPTION = "--faults-seed"


class MonarchProcs(Protocol):
    """What `monarch_procs` gives."""

    def __call__(self, n: int | Mapping[str, int] = 1, *, name: str | None = None, bootstrap: Any = None, **options: Any) -> ProcMesh:
        """Start `n` processes, ``{"procs": n}``, or those of an extent; await the result to wait until they are up.

        `options` are those of `HostMesh.spawn_procs`.
        """


def _load(module: str, name: str) -> Any:
    return getattr(import_module(f"monarch_async.{module}"), name)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("monarch_async").addoption(_OPTION, type=int, default=None, metavar="N", help="the seed of every test's `faults`")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[_failed] = True
        if _report in item.stash:
            report.sections.append(("faults", item.stash[_report]()))
    return report


@pytest.fixture
def faults(request: pytest.FixtureRequest) -> Iterator[Faults]:
    """Faults for this test; see `monarch_async.testing.faults`."""
    made: Faults = _load("testing.faults", "Faults")(request.config.getoption(_OPTION, None))
    request.node.stash[_report] = made.report
    with made:
        yield made


@pytest.fixture
def monarch_procs(request: pytest.FixtureRequest) -> Iterator[MonarchProcs]:
    """Starts processes on this host, which are stopped after the test; see `MonarchProcs`."""
    planned: Faults | None = request.getfixturevalue("faults") if "faults" in request.fixturenames else None
    meshes: list[ProcMesh] = []
    this_host = _load("host", "this_host")

    def start(n: int | Mapping[str, int] = 1, *, name: str | None = None, bootstrap: Any = None, **options: Any) -> ProcMesh:
        extent = {"procs": n} if isinstance(n, int) else dict(n)
        if planned is not None:
            if name is not None:
                planned.expect(name, math.prod(extent.values()))
            bootstrap = planned.bootstrap_with(bootstrap)
        mesh: ProcMesh = this_host().spawn_procs(extent, bootstrap, name, **options)
        meshes.append(mesh)
        return mesh

    yield start
    if planned is not None:
        planned.calm()
    for mesh in reversed(meshes):
        _stop(mesh)


def _stop(mesh: ProcMesh) -> None:
    """From outside of any coroutine: in the loop of the test, if that still exists and rests, or while it runs in its own thread."""
    loop = mesh._runtime.loop
    if loop.is_closed():
        return  # and with it all is stopped
    if loop.is_running():
        mesh.stop().get()
    else:
        loop.run_until_complete(_stopped(mesh))


async def _stopped(mesh: ProcMesh) -> None:
    await mesh.stop()


@pytest.fixture
def monarch_leaks(request: pytest.FixtureRequest) -> Iterator[LeakCheck]:
    """Fails the test if it leaves something behind. Ask for it before what it shall look at. An async test's tasks are not looked at."""
    if "uvloop" in sys.modules:
        sys.modules["uvloop"].new_event_loop().close()  # the first one opens descriptors that stay for the process
    check: LeakCheck = _load("testing.leaks", "LeakCheck")(kinds=("thread", "process", "fd", "segment"))
    yield check
    # A failed test's traceback keeps alive what its frames hold.
    if not request.node.stash.get(_failed, False):
        check.assert_none()
