"""The fixtures that come with the package, whether or not it is installed."""

from __future__ import annotations

import pytest

from monarch_async import MeshFailure
from monarch_async.testing.plugin import faults, monarch_procs

__all__ = ["faults", "monarch_procs"]


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[MeshFailure]:
    """What reaches the program's own hook, which then does nothing else."""
    told: list[MeshFailure] = []
    monkeypatch.setattr("monarch_async.unhandled_fault_hook", told.append)
    return told
