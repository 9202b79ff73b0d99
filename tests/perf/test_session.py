"""What becomes of a worker that misbehaves."""

from __future__ import annotations

import sys

import pytest

from perf.session import Session, WorkerFailed

MODULE = "tests.perf.misbehaving"


def test_samples_come_back_whatever_is_printed() -> None:
    """What a system prints does not reach the protocol, and its workloads and versions are known."""
    with Session(MODULE, sys.executable, 2) as session:
        assert {"procs": "2"} == session.versions
        assert frozenset(("ends", "hangs", "prints", "raises")) == session.workloads
        assert {"prints": [7.0]} == session.run("prints", 7)


def test_a_workload_that_raised_leaves_the_others() -> None:
    """The error has the worker's traceback, and the same worker runs the next workload."""
    with Session(MODULE, sys.executable, 2) as session:
        with pytest.raises(WorkerFailed, match=r"misbehaving\.raises raised:\n(?s:.*)ValueError: on purpose"):
            session.run("raises", 1)
        assert {"prints": [1.0]} == session.run("prints", 1)


def test_a_worker_that_ends_or_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ended is told with its status, one that is silent after the time it has; closing leaves no process of either."""
    with Session(MODULE, sys.executable, 2) as session, pytest.raises(WorkerFailed, match=r"ended \(status 3\)"):
        session.run("ends", 1)
    with Session(MODULE, sys.executable, 2) as session:
        monkeypatch.setattr("perf.session.PATIENCE", 0.1)
        monkeypatch.setattr("perf.session.ENDING", 0.1)
        with pytest.raises(WorkerFailed, match=r"did not answer within 0\.1 s"):
            session.run("hangs", 1)


def test_a_module_that_cannot_be_imported() -> None:
    """The worker's end is noticed before anything is asked of it."""
    with pytest.raises(WorkerFailed, match=r"perf\.systems\.nowhere ended \(status 1\)"):
        Session("perf.systems.nowhere", sys.executable, 2)
