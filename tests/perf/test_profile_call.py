"""The breakdown of a call is made of real calls."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from perf.profile_call import STAGES

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_stage_of_a_call_is_seen() -> None:
    """All stages are printed, none of them takes no time, and together they are the whole."""
    run = subprocess.run([sys.executable, "perf/profile_call.py", "--count", "20"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert 0 == run.returncode, run.stderr
    stages, _, ingredients = run.stdout.partition("Ingredients")
    found = {label.strip(): float(figure) for label, figure in re.findall(r"^(.+?) +([\d.]+) µs$", stages, re.MULTILINE)}
    assert [*STAGES, "together"] == list(found)
    assert all(found.values())
    assert found.pop("together") == pytest.approx(sum(found.values()), abs=0.1)
    assert "pickle them" in ingredients
