"""How much memory there is for this process: that of the machine, or what its container may have of it.

A container's limit (of its cgroup, or one above that) counts shared memory too, and who passes it is killed rather than refused. So
whatever is sized by the memory of the machine has to be sized by this.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

__all__ = ["memory_here"]


def memory_here(root: str = "/sys/fs/cgroup", membership: str = "/proc/self/cgroup") -> int:
    """Bytes of memory that this process and those in its container may have together. Where nothing tells of a limit, the machine's."""
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_limits(Path(root), membership)])


def _limits(root: Path, membership: str) -> Iterator[int]:
    """Those of the process's cgroup and of all above it. In a container some of these can't be seen, and the nearest that can is `root`."""
    try:
        lines = Path(membership).read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = PurePosixPath(path)
        for place in (group, *group.parents):
            try:
                text = (base / str(place).lstrip("/") / name).read_text().strip()
            except OSError:
                continue
            if text.isdecimal():  # else "max"
                yield int(text)
