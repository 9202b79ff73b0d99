"""Places for actors to be: this very process, and one or two others."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_async import MeshFailure, ProcMesh, configure, shutdown, this_host, this_proc
from monarch_async.options import Options
from tests.api.owners import Owner
from tests.api.restarting import Diary


@pytest.fixture
async def pair() -> ProcMesh:
    """Two processes, ``{"gpus": 2}``."""
    return this_host().spawn_procs({"gpus": 2}, name="pair")


@pytest.fixture(params=["here", "there"])
async def place(request: pytest.FixtureRequest) -> ProcMesh:
    """One process without dimensions: this one, or another."""
    return this_proc() if request.param == "here" else this_host().spawn_procs(name="there")


@pytest.fixture(params=["local", "cma", "segment", "tcp"])
async def backend(request: pytest.FixtureRequest) -> str:
    """Each way to make a one-sided copy that needs nothing else installed."""
    name: str = request.param
    return name


@pytest.fixture
async def owner(backend: str) -> Any:
    """An owner of memory that the backend can be used with."""
    place = this_proc() if backend == "local" else this_host().spawn_procs(name="there")
    return place.spawn("owner", Owner)


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[MeshFailure]:
    """What reaches the program's own hook, which then does nothing else."""
    told: list[MeshFailure] = []
    monkeypatch.setattr("monarch_async.unhandled_fault_hook", told.append)
    return told


@pytest.fixture
def through_tree() -> Iterator[None]:
    """In runtimes that are started from now on, calls to more than two members go through the agent. Ask for it before any place."""
    before = Options()
    configure(fan_out=2, fan_out_local=True)
    yield
    configure(fan_out=before.fan_out, fan_out_local=before.fan_out_local, mailbox_messages=before.mailbox_messages)


@pytest.fixture
async def six(through_tree: None) -> ProcMesh:
    """Six processes, behind the agent."""
    return this_host().spawn_procs({"gpus": 6}, name="six")


@pytest.fixture
def diary(tmp_path: Path) -> Diary:
    return Diary(tmp_path / "diary")


@pytest.fixture
async def complaints(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> AsyncIterator[list[str]]:
    """What a test expects to be logged as an error, in any process: nothing else may be. Nor may an error be left that nobody saw."""
    expected: list[str] = []
    yield expected
    await shutdown()
    logged = [record.getMessage() for record in caplog.records if record.name == "monarch_async" and record.levelno >= logging.ERROR]
    out, err = capfd.readouterr()
    for stream in (out, err):
        logged += [
            line for line in stream.splitlines() if "ERROR monarch_async:" in line or "never retrieved" in line or "Traceback" in line
        ]
    assert [] == [line for line in logged if not any(text in line for text in expected)]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if parameters.get("memory") == "shared" and parameters.get("backend") != "segment":
            item.add_marker(pytest.mark.slow)
