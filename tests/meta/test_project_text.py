"""The repository's text holds on any machine: nothing in it names a place or a host of the one it was written on."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SKIPPED_FOLDERS = {".git", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".tox", "__pycache__", "build", "dist", "out"}

# Put together from pieces, so that this file doesn't hold what it looks for.
HOSTS = [
    ".".join(parts) for parts in [("pypi", "org"), ("files", "pythonhosted", "org"), ("registry", "npmjs", "org"), ("deb", "debian", "org")]
]
FOLDERS = ["/" + "/".join(parts) for parts in [("work",), ("tmp", "v")]]

FORBIDDEN = re.compile("|".join([*map(re.escape, HOSTS), *(rf"(?<![\w.~}})-]){folder}(?![\w-])" for folder in FOLDERS)]))


def forbidden_in(text: str) -> list[str]:
    """Lines that name such a place, with their numbers."""
    return [f"{number}: {line.strip()}" for number, line in enumerate(text.splitlines(), 1) if FORBIDDEN.search(line)]


def walk(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            if path.name not in SKIPPED_FOLDERS and not path.name.startswith(".venv") and path.suffix != ".egg-info":
                yield from walk(path)
        elif path.is_file():
            yield path


def project_files() -> list[Path]:
    """What is committed or may be, or, outside a checkout, what is there."""
    if (ROOT / ".git").exists():
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]
    return list(walk(ROOT))


def test_no_file_names_this_machine() -> None:
    """No file of the project holds an absolute path of a development machine or the host of a package registry."""
    found = {}
    for path in project_files():
        lines = forbidden_in(path.read_text(encoding="utf-8", errors="replace"))
        if lines or FORBIDDEN.search(str(path.relative_to(ROOT))):
            found[str(path.relative_to(ROOT))] = lines
    assert {} == found


def test_the_files_looked_at_are_the_project() -> None:
    """The search sees the sources, the tests and the hidden folders, and not what tools put beside them."""
    names = {str(path.relative_to(ROOT)) for path in project_files()}
    assert {"pyproject.toml", ".ci/run", "src/monarch_async/errors.py", "tests/meta/test_project_text.py"} <= names
    assert [] == [name for name in names if "__pycache__" in name or name.startswith(".git/")]
    assert {"pyproject.toml", ".ci/run", "src/monarch_async/errors.py"} <= {str(path.relative_to(ROOT)) for path in walk(ROOT)}


@pytest.mark.parametrize(
    "text", [*HOSTS, f"see https://{HOSTS[0]}/simple", *FOLDERS, f"cd {FOLDERS[0]}/main", f'"{FOLDERS[1]}/bin/python"']
)
def test_a_planted_place_is_found(text: str) -> None:
    """Hosts and folders are found alone, quoted, and as the beginning of a path."""
    assert [f"2: {text}"] == forbidden_in(f"first\n{text}\nlast")


@pytest.mark.parametrize("folder", [*FOLDERS])
@pytest.mark.parametrize("text", ["src{}", "{}space/x", "{}-dir", "net{}/load", "${{HOME}}{}"])
def test_other_places_are_not(text: str, folder: str) -> None:
    """A relative path and a longer name are no such place."""
    assert [] == forbidden_in(text.format(folder))


def test_the_readme_runs_what_ci_runs() -> None:
    """The README's second command starts the tests as CI does: all of them, in three processes."""
    commands = re.findall(r"^\$ (.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    pattern = re.compile(r"/pip install (torch==\S+ -e '[^']+').*/pytest(.*)$", re.DOTALL)
    told, run = pattern.search(commands[1]), pattern.search((ROOT / ".ci" / "run").read_text().strip())
    assert told is not None
    assert run is not None
    assert told.groups() == run.groups()
    assert " -n 3 --dist loadfile" == run[2]
