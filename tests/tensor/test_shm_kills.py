"""A member of a group over shared memory that is killed."""

from __future__ import annotations

import os
import signal

import pytest

from tests.tensor.shm_members import TIMEOUT, Case, members

LARGE = 16 << 20
"""Elements, 64 MiB: what takes a while to reduce."""


@pytest.mark.parametrize("when", ["waiting", "moving"])
def test_a_killed_member(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before it comes to an operation, or amid its blocks: the survivors are freed by abort, and form a group of their own."""
    monkeypatch.setattr("monarch_async.unhandled_fault_hook", lambda failure: None)
    with members(3) as three:
        three.connect("doomed", 3)
        last = three.each[2]
        pid = last.pid.call_one().get(timeout=TIMEOUT)
        if when == "moving":
            last.start.call_one("doomed", LARGE).get(timeout=TIMEOUT)
        for member in three.each[:2]:
            member.start.call_one("doomed", LARGE).get(timeout=TIMEOUT)
        os.kill(pid, signal.SIGKILL)
        for member in three.each[:2]:
            member.abort.call_one("doomed").get(timeout=TIMEOUT)
        errors = {member.outcome.call_one().get(timeout=TIMEOUT)[0] for member in three.each[:2]}
        assert {"Aborted: the group was ended"} >= errors - ({""} if when == "moving" else set())
        for member in three.each[:2]:
            member.close.call_one("doomed").get(timeout=TIMEOUT)
        with three.group(2) as name:
            three.check(name, 2, [Case("all_reduce", "float32", 100_000)])
