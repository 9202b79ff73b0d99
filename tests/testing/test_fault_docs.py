"""What docs/fault-injection.md shows is true."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from monarch_async.testing.faults import At, LinkAt
from tests.testing.pytest_project import ROOT, PytestProject

TEXT = (ROOT / "docs" / "fault-injection.md").read_text()


def test_the_worked_tests_pass(tmp_path: Path) -> None:
    """Put together in their order, as a user would copy them into a file."""
    blocks = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    done = PytestProject(tmp_path).run("\n\n".join(blocks), "-o", "asyncio_mode=auto")
    assert "3 passed" in done.stdout, done.stdout


def test_the_table_has_every_kind() -> None:
    """Each method that plans a fault, with its parameters."""
    rows = "".join(re.findall(r"^\| `.*?` \|", TEXT, re.MULTILINE))
    listed = {name: set(filter(None, parameters.split(", "))) for name, parameters in re.findall(r"(\w+)\((.*?)\)", rows)}
    for cls, others in ((At, {"link"}), (LinkAt, set[str]())):
        for name, method in inspect.getmembers(cls, inspect.isfunction):
            if not name.startswith("_") and name not in others:
                known = set(inspect.signature(method).parameters) - {"self", "text"}
                assert name in listed
                assert listed[name] <= known
