"""Places for actors to be: this very process, and one or two others."""

from __future__ import annotations

import pytest

from monarch_async import MeshFailure, ProcMesh, this_host, this_proc


@pytest.fixture
async def pair() -> ProcMesh:
    """Two processes, ``{"gpus": 2}``."""
    return this_host().spawn_procs({"gpus": 2}, name="pair")


@pytest.fixture(params=["here", "there"])
async def place(request: pytest.FixtureRequest) -> ProcMesh:
    """One process without dimensions: this one, or another."""
    return this_proc() if request.param == "here" else this_host().spawn_procs(name="there")


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[MeshFailure]:
    """What reaches the program's own hook, which then does nothing else."""
    told: list[MeshFailure] = []
    monkeypatch.setattr("monarch_async.unhandled_fault_hook", told.append)
    return told
