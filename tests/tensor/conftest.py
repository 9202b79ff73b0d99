"""Processes with torch in them, and members of one mesh on them. A mesh costs seconds, so that a test does much with one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from monarch_async import MeshFailure, ProcMesh, Restart, this_host
from tests.tensor.members import Member, one_thread

PRELOAD = ("torch", "torch.distributed", "torch.distributed.device_mesh", "tests.tensor.members")


@pytest.fixture
def spawn() -> Callable[..., tuple[ProcMesh, Any]]:
    """Makes processes and members: ``procs, members = spawn({"gpus": 3})``."""

    def make(per_host: dict[str, int], *, restart: Restart | None = None, kind: type[Member] = Member) -> tuple[ProcMesh, Any]:
        procs = this_host().spawn_procs(per_host, bootstrap=one_thread, preload=PRELOAD, name="procs")
        return procs, procs.spawn("members", kind, restart=restart)

    return make


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[MeshFailure]:
    """What reaches the program's own hook, which then does nothing else."""
    told: list[MeshFailure] = []
    monkeypatch.setattr("monarch_async.unhandled_fault_hook", told.append)
    return told
