"""Jobs to look into, whose files are in a folder of the test's own and whose stuck processes end soon."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from monarch_async import MeshFailure, configure
from monarch_async.options import Options
from tests.observe.zoo import Zoo


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where job files are."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture(autouse=True)
def quick_end() -> Iterator[None]:
    """In runtimes that are started from now on, what does not stop is killed soon."""
    before = Options()
    configure(stop_timeout=0.3, cleanup_timeout=0.3, job_name="zoo")
    yield
    configure(stop_timeout=before.stop_timeout, cleanup_timeout=before.cleanup_timeout, job_name="")


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[MeshFailure]:
    """What reaches the program's own hook, which then does nothing else."""
    told: list[MeshFailure] = []
    monkeypatch.setattr("monarch_async.unhandled_fault_hook", told.append)
    return told


@pytest.fixture
async def zoo(quick_end: None, state_home: Path, failures: list[MeshFailure]) -> AsyncIterator[Zoo]:
    """The job, all well."""
    zoo = Zoo()
    await zoo.animals
    yield zoo
    zoo.close()
