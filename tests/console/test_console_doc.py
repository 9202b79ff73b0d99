"""The session of docs/console.md: a stuck job is found, understood and mended in five commands, which print what stands there."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

from tests.console.terminal import Terminal
from tests.hosts.workers import ENVIRONMENT, ROOT

SESSION = re.compile(r"^```\n\$ monarch-async (.*)\n((?:.*\n)*?)```$", re.MULTILINE)
BLOCKS = {words: text.splitlines() for words, text in SESSION.findall((Path(ROOT) / "docs" / "console.md").read_text())}
FIVE = ["ps", "where trainer[1]", "calls --older 2", "stack feeder[0]", "restart feeder[0] --write"]
PATIENCE = 60
HOST = os.uname().nodename


def test_the_document_has_five_commands() -> None:
    """And one before them, by which the job is found."""
    assert ["jobs", *FIVE] == list(BLOCKS)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {**ENVIRONMENT, "XDG_STATE_HOME": str(tmp_path), "COLUMNS": "200"}


@pytest.fixture
def job(environment: dict[str, str]) -> Iterator[pexpect.spawn]:
    """The program, in a terminal, which it leaves by Ctrl-C."""
    program = str(Path(ROOT) / "examples" / "stuck.py")
    running = Terminal(sys.executable, [program], env=environment, encoding="utf-8", timeout=PATIENCE, dimensions=(50, 200))
    yield running
    running.sendintr()
    running.expect(pexpect.EOF)
    running.close()


def ask(words: str, environment: dict[str, str]) -> list[str]:
    """What a command prints in a terminal of its own; it must succeed."""
    arguments = ["-m", "monarch_async", *words.split()]
    asked = Terminal(sys.executable, arguments, env=environment, encoding="utf-8", timeout=PATIENCE, dimensions=(50, 200))
    asked.expect(pexpect.EOF)
    text = asked.before
    asked.close()
    assert 0 == asked.exitstatus, text
    return [line.rstrip() for line in text.split("\r\n") if line.strip()]


def plain(lines: list[str]) -> list[str]:
    """Without what differs each time: ages, pids, sizes, names of hosts and folders, and widths of columns by them."""
    found = []
    for line in lines:
        line = re.sub(rf"\b(?:n01|{re.escape(HOST)})\b", "HOST", line)
        line = re.sub(r"\bpid \d+|\b\d{4,}\b", "PID", line)
        line = re.sub(r"\b\d+(?:\.\d)?s\b", "AGE", line)
        line = re.sub(r"\b\d+ MiB\b", "SIZE", line)
        line = re.sub(r"\"/[^\"]*/", '"/', line)
        found.append(re.sub(r"(?<=\S) +", " ", line))
    return sorted(found)


def test_a_stuck_job_is_found_understood_and_mended(job: pexpect.spawn, environment: dict[str, str]) -> None:
    """After three steps it stands, each command says what the document shows, and after the last one it goes on."""
    job.expect("step 3: loss")
    while not any("stuck" in line for line in ask("ps", environment)):
        pass
    while len(ask("calls --older 2", environment)) < len(BLOCKS["calls --older 2"]):
        pass
    (head, row) = ask("jobs", environment)
    assert BLOCKS["jobs"][0].split() == head.split()
    assert ["train", "running"] == row.split()[:3:2]
    for words in FIVE:
        assert plain(BLOCKS[words]) == plain(ask(words, environment)), words
    job.expect("restart feeder")
    job.expect("step 4: loss")
    job.expect("step 12: loss")
