"""Nothing outlives its owner: whatever is killed, what it owned is gone within 2 s, its files too; others are untouched."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.runtime.clients import client, named, wait_all_gone

BOUND = 2.0


def test_a_killed_client_takes_everything_with_it_and_nothing_of_another(tmp_path: Path) -> None:
    """SIGKILL of the client: processes, their children, what left their groups, agent and zygotes; another live job goes on."""
    (tmp_path / "other").mkdir()
    (tmp_path / "mine").mkdir()
    with client("hang", tmp_path / "other") as (other, theirs), client("hang", tmp_path / "mine") as (process, pids):
        assert len(pids) >= 9
        process.kill()
        wait_all_gone(pids, BOUND)
        assert None is other.poll()
        for pid in theirs:
            os.kill(pid, 0)
    wait_all_gone(theirs, BOUND)
    assert [] == os.listdir(tmp_path / "mine") == os.listdir(tmp_path / "other")


def test_nested_processes_go_with_a_killed_client(tmp_path: Path) -> None:
    """What a process has spawned goes too."""
    with client("nested", tmp_path) as (process, pids):
        assert len(pids) >= 15
        process.kill()
        wait_all_gone(pids, BOUND)
    assert [] == os.listdir(tmp_path)


def test_nested_processes_go_with_the_one_that_spawned_them(tmp_path: Path) -> None:
    """SIGKILL of a process: what it has spawned goes, its sibling stays until the program's fault hook ends all."""
    with client("nested", tmp_path) as (process, pids):
        os.kill(pids[0], signal.SIGKILL)
        wait_all_gone(pids, BOUND)
        _, errors = process.communicate(timeout=10)
    assert 1 == process.returncode
    assert "killed by signal 9 (SIGKILL)" in errors
    assert [] == os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("victim", "evidence"),
    [
        ("agent", r"lost with the agent of this host: killed by signal 9 \(SIGKILL\)"),
        ("monarch-root", r"its zygote died first|killed by signal 9"),
        ("monarch-zygote", r"its zygote died first|killed by signal 9"),
    ],
)
def test_a_killed_helper_takes_what_is_below_it_and_the_program_is_told(victim: str, evidence: str, tmp_path: Path) -> None:
    """SIGKILL of agent or zygote: everything below is gone, and the failure says what was lost. Files are removed too."""
    with client("hang", tmp_path) as (process, pids):
        os.kill(named(pids, victim), signal.SIGKILL)
        _, errors = process.communicate(timeout=10)
        wait_all_gone(pids, BOUND)
    assert 1 == process.returncode
    assert re.search(evidence, errors), errors
    assert [] == os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("mode", "number", "status"),
    [
        ("hang", signal.SIGINT, -signal.SIGINT),
        ("hang", signal.SIGTERM, -signal.SIGTERM),
        ("exit", None, 7),
        ("return", None, 0),
        ("raise", None, 1),
    ],
)
def test_every_other_end_of_the_program(mode: str, number: signal.Signals | None, status: int, tmp_path: Path) -> None:
    """Ctrl-C, SIGTERM, os._exit, an exception, an ordinary end: the exit status is Python's own, and nothing is left."""
    with client(mode, tmp_path) as (process, pids):
        if number is not None:
            process.send_signal(number)
        _, errors = process.communicate(timeout=10)
        wait_all_gone(pids, BOUND)
    assert status == process.returncode
    assert "unhandled failure" not in errors
    if mode == "return":
        assert "" == errors
    assert [] == os.listdir(tmp_path)


def test_an_ordinary_end_kills_who_does_not_stop_in_time(tmp_path: Path) -> None:
    """A process that holds its loop is killed after `stop_timeout`; the program ends soon after, with status 0."""
    with client("deaf", tmp_path) as (process, pids):
        start = time.monotonic()
        process.communicate(timeout=20)
        assert time.monotonic() - start < 12
        wait_all_gone(pids, BOUND)
    assert 0 == process.returncode
    assert [] == os.listdir(tmp_path)
