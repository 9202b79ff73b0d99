"""The checks that conftest.py puts round every test do fail a test that deserves it, and no other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PYPROJECT = TESTS.parent / "pyproject.toml"

CASES = """
import asyncio, gc, os, threading
import pytest

loops = []

@pytest.fixture
async def helper():
    task = asyncio.create_task(asyncio.Event().wait())
    yield task
    task.cancel()

async def test_clean(helper):
    loops.append(type(asyncio.get_running_loop()).__module__)
    await asyncio.to_thread(int)

def test_loops():
    assert {"asyncio", "uvloop"} == {name.partition(".")[0] for name in loops}

async def test_task():
    loops.append(asyncio.create_task(asyncio.Event().wait(), name="forgotten"))

def test_fd():
    os.memfd_create("forgotten")

async def test_unseen():
    async def fail():
        raise KeyError("unseen")
    asyncio.create_task(fail())
    await asyncio.sleep(0)
    await asyncio.sleep(0)

async def test_never_awaited():
    asyncio.sleep(0)

@pytest.mark.timeout(1)
async def test_hangs():
    await asyncio.Event().wait()

async def test_failed():
    loops.append(asyncio.create_task(asyncio.Event().wait(), name="not the news"))
    raise ValueError("the news")
"""


@pytest.mark.slow
def test_leaks_fail_the_test_that_left_them(tmp_path: Path) -> None:
    """Run on its own, each planted leak and a hang fail their own test on both loops, and clean tests pass."""
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (tmp_path / "test_cases.py").write_text(CASES)
    command = [sys.executable, "-m", "pytest", "-c", str(PYPROJECT), "--rootdir", str(tmp_path), "-p", "no:cacheprovider", "-q", "-rA"]
    run = subprocess.run([*command, str(tmp_path)], cwd=PYPROJECT.parent, capture_output=True, text=True)
    outcomes: dict[str, set[str]] = {}
    for line in run.stdout.splitlines():
        word, _, rest = line.partition(" ")
        if word in {"PASSED", "FAILED", "ERROR"}:
            name = rest.partition("::")[2].partition(" ")[0]
            outcomes.setdefault(name, set()).add(word)
    expected = {"test_loops": {"PASSED"}, "test_fd": {"PASSED", "ERROR"}}
    for loop in ("asyncio", "uvloop"):
        expected |= {
            f"test_clean[{loop}]": {"PASSED"},
            f"test_task[{loop}]": {"PASSED", "ERROR"},
            f"test_unseen[{loop}]": {"PASSED", "ERROR"},
            f"test_never_awaited[{loop}]": {"FAILED"},
            f"test_hangs[{loop}]": {"FAILED"},
            f"test_failed[{loop}]": {"FAILED"},
        }
    assert expected == outcomes, run.stdout
    assert "memfd:forgotten" in run.stdout
    assert "task 'forgotten' of Event.wait" in run.stdout
    assert "Task exception was never retrieved: KeyError('unseen')" in run.stdout
    assert "not the news" not in run.stdout.partition("short test summary")[2]
