"""What people call actors and processes: ``trainer[3]``, ``trainer``, ``gpus[3]``, ``client``, a pid."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

from monarch_async.observe.errors import UnknownName

__all__ = ["Target", "concerns", "parse", "unknown"]

Target = str | int
_NAME = re.compile(r"(.*)\[(\d+)\]")
_RANKS = re.compile(r"(.*)\[([\d–,]+)\]")


def parse(target: Target) -> tuple[str, int]:
    """``"trainer[3]"`` → ``("trainer", 3)``; ``"trainer"`` → ``("trainer", -1)``, which is every rank."""
    found = _NAME.fullmatch(str(target))
    return (found[1], int(found[2])) if found else (str(target), -1)


def concerns(subject: str, mesh: str, rank: int) -> bool:
    """Whether a subject, such as ``trainer[0–3,5]``, has this member, or any of the mesh where the rank is -1."""
    found = _RANKS.fullmatch(subject)
    if found is None or found[1] != mesh:
        return False
    if rank < 0:
        return True
    for part in found[2].split(","):
        first, _, last = part.partition("–")
        if int(first) <= rank <= int(last or first):
            return True
    return False


def unknown(target: Target, what: str, known: Iterable[str]) -> UnknownName:
    """The error for a name that is none of those known."""
    names = sorted(set(known))
    mesh, rank = parse(target)
    meshes = sorted({parse(name)[0] for name in names})
    nearest: Sequence[str] = [name for name in names if parse(name)[0] == mesh][:3]
    if not nearest:
        close = difflib.get_close_matches(mesh, meshes, 3, 0.5)
        nearest = [f"{name}[{rank}]" if rank >= 0 and f"{name}[{rank}]" in names else name for name in close]
    advice = f"; did you mean {' or '.join(nearest)}?" if nearest else f"; there are {', '.join(meshes[:8]) or 'none'}"
    return UnknownName(f"there is no {what} {target}{advice}", tuple(nearest))
