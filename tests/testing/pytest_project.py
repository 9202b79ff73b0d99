"""Another project, in whose environment this package is installed: what tests of the plugin run pytest in."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
FLAGS = ("-p", "no:cacheprovider", "-W", "error", "-o", "asyncio_default_fixture_loop_scope=function")


class PytestProject:
    """In an empty folder; the entry points of the package are those of pyproject.toml."""

    def __init__(self, folder: Path) -> None:
        self._site, self._project = folder / "site", folder / "project"
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        info = self._site / f"monarch_async-{project['version']}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: monarch-async\nVersion: {project['version']}\n")
        (info / "RECORD").write_text("monarch_async/__init__.py,,\nmonarch_async/testing/plugin.py,,\n")
        lines = [f"{name} = {where}" for name, where in project["entry-points"]["pytest11"].items()]
        (info / "entry_points.txt").write_text("\n".join(["[pytest11]", *lines, ""]))
        self._project.mkdir()

    def run(self, source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a test file with pytest."""
        (self._project / "test_it.py").write_text(source)
        path = os.pathsep.join([str(self._site), str(ROOT / "src")])
        command = [sys.executable, "-m", "pytest", "-q", *FLAGS, *arguments, "test_it.py"]
        environment = {**os.environ, "PYTHONPATH": path}
        return subprocess.run(command, cwd=self._project, env=environment, capture_output=True, text=True, timeout=100)
