"""Digits learned three ways: the table shows equal losses and weights, also where a process was killed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.running import run_example

pytest.importorskip("torch")
pytest.importorskip("sklearn")


def test_three_ways_to_the_same_weights(tmp_path: Path) -> None:
    """Exit status 0, three lines that differ in nothing but their names and times, and the story of the loss; nothing on standard error."""
    code, out, err = run_example("ddp_digits.py", folder=tmp_path, timeout=100)
    assert (0, "") == (code, err), out
    rows = re.findall(r"^(ddp|by hand|with a loss) +(0\.\d{8}) +(0\.\d{8}) +(9\d\.\d)% +([0-9a-f]{8}) ", out, re.MULTILINE)
    assert ["ddp", "by hand", "with a loss"] == [name for name, *_ in rows]
    assert 1 == len({tuple(figures) for _, *figures in rows})
    # A member that was busy all the while hears of the next life first.
    assert re.search(r"^rank 0: with_a_loss\[1\] (is gone: killed by signal 9 \(SIGKILL\)|.*\(incarnation 1\))$", out, re.MULTILINE), out
    assert "rank 1: a new process, with the state of rank 0 at step 150\n" in out
    assert out.endswith("all weights are equal, bit for bit\n")
