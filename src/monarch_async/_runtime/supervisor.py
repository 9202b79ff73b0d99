"""Who owns what: which members of which meshes are in which process, and whom their end concerns.

The owner of a mesh is the actor that spawned it, or the program itself (owner 0). When a process ends, each of its owners hears of it once,
however many of its meshes lose a member.
"""

from __future__ import annotations

from monarch_async._core.events import Identity

__all__ = ["Ownership"]


class Ownership:
    """The members of meshes that actors of this process own, by the process they are in."""

    def __init__(self) -> None:
        self._members: dict[str, dict[int, list[Identity]]] = {}

    def own(self, process: str, owner: int, member: Identity) -> None:
        """`owner` has spawned `member` in `process`."""
        self._members.setdefault(process, {}).setdefault(owner, []).append(member)

    def disown(self, process: str, owner: int, mesh: str) -> None:
        """A mesh is stopped on purpose: the end of its process is no failure of it any more."""
        owners = self._members.get(process, {})
        left = [member for member in owners.get(owner, ()) if member.mesh != mesh]
        if left:
            owners[owner] = left
        else:
            owners.pop(owner, None)

    def release(self, process: str) -> dict[int, list[Identity]]:
        """A process is gone: what was in it, by owner, in the order of spawning."""
        return self._members.pop(process, {})

    def clear(self) -> None:
        """Everything ends on purpose."""
        self._members.clear()
