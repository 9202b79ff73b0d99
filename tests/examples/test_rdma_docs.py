"""What docs/rdma.md shows runs, and what it lists is there."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

from monarch_async import RDMAAction, RDMABuffer
from monarch_async.options import RDMA_BACKENDS
from tests.hosts.workers import ENVIRONMENT, ROOT

TEXT = (Path(ROOT) / "docs" / "rdma.md").read_text()


def test_the_example_runs(tmp_path: Path) -> None:
    """As a script: both actors have the learner's weights."""
    blocks = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(blocks[0])
    done = subprocess.run([sys.executable, str(script)], env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert 0 == done.returncode, done.stderr
    assert 1 == len(done.stdout.strip("{}\n").split(","))


def test_the_tables_are_complete() -> None:
    """Every public method with its parameters, every property, every backend."""
    for name in ("read_into", "write_from", "drop"):
        (listed,) = re.findall(rf"`await buffer\.{name}\((.*?)\)`", TEXT)
        parameters = inspect.signature(getattr(RDMABuffer, name)).parameters
        assert [re.sub("=.*", "", text) for text in listed.split(", ") if text] == list(parameters)[1:]
    properties = [name for name, value in vars(RDMABuffer).items() if isinstance(value, property)]
    assert all(f"`{name}`" in TEXT for name in properties)
    assert all(name in TEXT for name in vars(RDMAAction) if not name.startswith("_"))
    assert all(f"| `{name}` |" in TEXT for name in RDMA_BACKENDS if name != "auto")
