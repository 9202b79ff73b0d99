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
        self._members: dict[str, dict[int, dict[int, Identity]]] = {}

    def own(self, process: str, owner: int, key: int, member: Identity) -> None:
        """`owner` has spawned `member`, actor `key` (0: the process itself), in `process`."""
        self._members.setdefault(process, {}).setdefault(owner, {})[key] = member

    def owns(self, process: str, owner: int, key: int) -> bool:
        """Whether a failure of that member concerns its owner: it has not been stopped on purpose, nor its process."""
        return key in self._members.get(process, {}).get(owner, {})

    def disown(self, process: str, owner: int, key: int) -> None:
        """A member is stopped on purpose: neither its failure nor the end of its process is one any more."""
        owners = self._members.get(process, {})
        members = owners.get(owner, {})
        members.pop(key, None)
        if not members:
            owners.pop(owner, None)
        if not owners:
            self._members.pop(process, None)

    def disown_all(self, process: str, owner: int) -> None:
        """A process is stopped on purpose by its owner."""
        self._members.get(process, {}).pop(owner, None)

    def release(self, process: str) -> dict[int, list[Identity]]:
        """A process is gone: what was in it, by owner, in the order of spawning."""
        return {owner: list(members.values()) for owner, members in self._members.pop(process, {}).items()}

    def clear(self) -> None:
        """Everything ends on purpose."""
        self._members.clear()
