"""What `import monarch_async` gives is a list that changes only on purpose, and costs no import of torch."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

EXPORTS = Path(__file__).with_name("exports.txt")
"""The public names, sorted, one a line."""


def test_public_names_are_the_frozen_list() -> None:
    """`__all__` of the package is exports.txt: a name is added or removed in both, and so in the change notes."""
    names = getattr(importlib.import_module("monarch_async"), "__all__", None)
    if names is None:
        pytest.skip("the package exports nothing yet")
    assert EXPORTS.read_text().split() == sorted(names)


def test_every_public_name_is_there() -> None:
    """Each exported name can be had, also where it is loaded on first use."""
    package = importlib.import_module("monarch_async")
    missing = [name for name in EXPORTS.read_text().split() if not hasattr(package, name)]
    assert [] == missing


@pytest.mark.parametrize("heavy", ["torch", "numpy", "aiohttp", "rich", "cloudpickle"])
def test_importing_the_package_leaves_heavy_ones_alone(heavy: str) -> None:
    """In a fresh interpreter the package imports without what is optional or slow, so starting stays quick."""
    script = f"import sys, monarch_async; sys.exit({heavy!r} in sys.modules)"
    assert 0 == subprocess.run([sys.executable, "-c", script]).returncode
