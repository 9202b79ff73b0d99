"""What type checkers make of the public API: mypy, strict, over the other files of this folder.

A case is a module that uses the API as its users do. It says what it expects in the code:

* ``assert_type(expression, T)``: mypy infers exactly ``T``.
* ``# type: ignore[code]``: mypy reports that error there. One that isn't reported is an error itself (`warn_unused_ignores`).

Cases are checked and never run, so they need no processes. All of them go through one run of mypy, in a process of its own since mypy
changes the garbage collector's settings; its cache makes the next run quick.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
CASES = sorted(path.name for path in FOLDER.glob("*.py") if path != Path(__file__))

PLANTED = """
from typing import assert_type

from monarch_async.errors import fold_ranks

assert_type(fold_ranks([1]), int)
fold_ranks([1])  # type: ignore[arg-type]
fold_ranks(1)
"""


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Errors by file name, as ``line: text  [code]``; ``planted.py`` among them."""
    planted = tmp_path_factory.mktemp("typing") / "planted.py"
    planted.write_text(PLANTED)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--no-pretty", "--no-error-summary"]
    files = [str(FOLDER / name) for name in CASES]
    run = subprocess.run([*command, *files, str(planted)], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode in (0, 1), run.stdout + run.stderr
    found: dict[str, list[str]] = {}
    for path, line, text in re.findall(r"^(.*?):(\d+): error: (.*)$", run.stdout, re.MULTILINE):
        found.setdefault(Path(path).name, []).append(f"{line}: {text}")
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_types_are_as_the_case_says(name: str, errors: dict[str, list[str]]) -> None:
    """Every inferred type and every expected error of the case is what mypy finds, and nothing else."""
    assert [] == errors.get(name, []), "\n".join(errors.get(name, []))


@pytest.mark.timeout(300)
def test_wrong_expectations_are_reported(errors: dict[str, list[str]]) -> None:
    """A wrong assert_type, an error that doesn't come, and one that nobody expected are all reported."""
    codes = [(int(line.partition(":")[0]), line.rpartition("[")[2].rstrip("]")) for line in errors["planted.py"]]
    lines = PLANTED.splitlines()
    assert [
        (lines.index("assert_type(fold_ranks([1]), int)") + 1, "assert-type"),
        (lines.index("fold_ranks([1])  # type: ignore[arg-type]") + 1, "unused-ignore"),
        (lines.index("fold_ranks(1)") + 1, "arg-type"),
    ] == codes
