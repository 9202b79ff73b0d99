"""Who owns what: which members of which meshes are in which process, and whom their end concerns.

The owner of a mesh is the actor that spawned it, or the program itself (owner 0). When a process ends, each of its owners hears of it once,
however many of its meshes lose a member. What happens to a member is first for its `Ward`, which knows the mesh's restart policy.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from monarch_async._core.events import Evidence, Failure, Identity
from monarch_async.ids import ProcAddress

__all__ = ["Fate", "Guest", "Home", "Member", "Ownership", "Ward"]


REMEMBERED = 1000
"""How many members that have ended are remembered of each process."""


class Fate(enum.Enum):
    """What becomes of a member whose process has ended."""

    LOST = "lost"  # its owner has to be told
    ENDED = "ended"  # that is dealt with
    RETURNS = "returns"  # and it will be there again


class Ward(Protocol):
    """The owner's side of one mesh, of actors or of processes."""

    why_lost: str  # the reason to tell, once it has given up after a process had ended

    def member_failed(self, failure: Failure, *, normal: bool) -> bool:
        """A member has failed, or has ended of its own accord, in a process that goes on; whether that is dealt with."""

    def process_ended(self, member: Identity, failure: Failure, evidence: Evidence, *, returns: bool) -> Fate:
        """The process of a member has ended; `returns` says whether it will be started again by its own mesh."""

    def moved(self, member: Identity, address: ProcAddress) -> None:
        """A member is in another process than it was spawned for, which had ended before anything reached it."""

    def give_up(self, member: Identity, evidence: Evidence) -> None:
        """For a mesh of processes: nobody wants this one back."""

    def save(self, member: Identity, number: int, state: bytes) -> None:
        """Keep a member's checkpoint. Raises `UsageError` for one that can't be kept."""


class Guest(Protocol):
    """A mesh of actors with a policy, as the mesh of processes that it is in sees it."""

    owner: int

    def wants(self, address: ProcAddress) -> bool:
        """Whether a member of it waits for this process to come back."""

    def home_stopped(self, failure: Failure | None) -> None:
        """Nothing comes back: its processes were stopped on purpose, or have been given up after this failure."""


class Home(Protocol):
    """A mesh of processes, as meshes of actors in it see it."""

    owner: int
    given_up: bool  # its policy has: nothing there is started any more

    @property
    def returns(self) -> bool:
        """Whether it has a policy of its own, which then decides alone."""

    def keep(self, guest: Guest) -> None:
        """A mesh of actors in it has a policy: its processes may be started again for that."""

    def leave(self, guest: Guest) -> None:
        """It has ended, and wants nothing more."""

    async def up(self, address: ProcAddress) -> ProcAddress:
        """The process that this one is, or that takes its place, once it answers; started again if it has ended. Raises if it won't."""


class Member(NamedTuple):
    """One member of one mesh, as it is now."""

    identity: Identity
    ward: Ward


class Ownership:
    """The members of meshes that actors of this process own, by the process they are in."""

    def __init__(self) -> None:
        self._members: dict[str, dict[int, dict[int, Member]]] = {}
        self._buried: dict[str, dict[int, tuple[Identity, Evidence]]] = {}  # by process and key; see `bury`

    def own(self, process: str, owner: int, key: int, identity: Identity, ward: Ward) -> None:
        """`owner` has spawned a member, actor `key` (0: the process itself), in `process`."""
        self._members.setdefault(process, {}).setdefault(owner, {})[key] = Member(identity, ward)
        self._buried.get(process, {}).pop(key, None)

    def bury(self, process: str, key: int, identity: Identity, evidence: Evidence) -> None:
        """A member has ended for good, which another process in the place of this one has to know. Of many the last are remembered."""
        buried = self._buried.setdefault(process, {})
        buried[key] = identity, evidence
        if len(buried) > REMEMBERED:
            del buried[next(iter(buried))]

    def unbury(self, process: str, following: str) -> dict[int, tuple[Identity, Evidence]]:
        """A process is gone: what had ended in it for good, which is remembered for the one that follows, if there is one."""
        buried = self._buried.pop(process, {})
        if buried and following:
            self._buried[following] = buried
        return buried

    def find(self, process: str, owner: int, key: int) -> Member | None:
        """That member; none if it has been stopped on purpose, or its process has, so that its failure is none any more."""
        return self._members.get(process, {}).get(owner, {}).get(key)

    def members(self) -> Iterator[tuple[str, int, int, Member]]:
        """All members: the uid of the process, the key of the owner, the key of the member, the member."""
        for uid in self.processes():
            for owner, key, member in self.members_in(uid):
                yield uid, owner, key, member

    def processes(self) -> list[str]:
        """The uids of the processes that have members."""
        return list(self._members)

    def members_in(self, process: str) -> list[tuple[int, int, Member]]:
        """Those in one process: the key of the owner, the key of the member, the member."""
        owners = self._members.get(process, {})
        return [(owner, key, member) for owner, members in owners.items() for key, member in members.items()]

    def process(self, uid: str) -> Member | None:
        """The process itself, if this one owns it."""
        return next((members[0] for members in self._members.get(uid, {}).values() if 0 in members), None)

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

    def move(self, process: str, following: ProcAddress) -> None:
        """What was meant for one process is in another."""
        for owner, members in self._members.pop(process, {}).items():
            for key, member in members.items():
                self._members.setdefault(following.uid, {}).setdefault(owner, {})[key] = member
                member.ward.moved(member.identity, following)

    def release(self, process: str) -> dict[int, dict[int, Member]]:
        """A process is gone: what was in it, by owner and key, in the order of spawning."""
        return self._members.pop(process, {})

    def clear(self) -> None:
        """Everything ends on purpose."""
        self._buried.clear()
        self._members.clear()
