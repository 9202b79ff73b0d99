"""How much memory there is: the machine's, unless a container may have less, wherever its limit is written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from monarch_async._channel.machine import memory_here

MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
MIB = 1 << 20

TREES: dict[str, tuple[str, dict[str, str], int]] = {
    "no limit": ("0::/jobs/mine", {"memory.max": "max", "jobs/mine/memory.max": "max"}, MACHINE),
    "its own": ("0::/jobs/mine", {"jobs/mine/memory.max": f"{64 * MIB}\n"}, 64 * MIB),
    "of one above": ("0::/jobs/mine", {"jobs/mine/memory.max": "max", "jobs/memory.max": f"{32 * MIB}"}, 32 * MIB),
    "the least of several": ("0::/jobs/mine", {"jobs/mine/memory.max": f"{64 * MIB}", "jobs/memory.max": f"{32 * MIB}"}, 32 * MIB),
    "of a container that sees only itself": ("0::/", {"memory.max": f"{48 * MIB}"}, 48 * MIB),
    "of a container that does not see where it is": ("0::/docker/0123", {"memory.max": f"{48 * MIB}"}, 48 * MIB),
    "the first version": ("9:memory:/mine\n0::/", {"memory/mine/memory.limit_in_bytes": f"{16 * MIB}"}, 16 * MIB),
    "no limit in the first version": ("9:memory:/mine", {"memory/mine/memory.limit_in_bytes": "9223372036854771712"}, MACHINE),
    "another controller's": ("8:pids:/mine", {"memory/mine/memory.limit_in_bytes": "1"}, MACHINE),
    "more than there is": ("0::/", {"memory.max": str(1 << 62)}, MACHINE),
}


@pytest.mark.parametrize("name", TREES)
def test_limits_of_containers(name: str, tmp_path: Path) -> None:
    """Of both kinds of cgroup, from the process's own up to the topmost that can be seen."""
    membership, files, expected = TREES[name]
    (tmp_path / "membership").write_text(membership + "\n")
    for path, text in files.items():
        file = tmp_path / "root" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert expected == memory_here(str(tmp_path / "root"), str(tmp_path / "membership"))


def test_where_nothing_tells(tmp_path: Path) -> None:
    """It is the machine's."""
    assert MACHINE == memory_here(str(tmp_path), str(tmp_path / "nothing"))
    assert 0 < memory_here() <= MACHINE
