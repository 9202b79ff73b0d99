"""Why a mesh of actors does not get on: which ranks have not come to which operation, what they have done last, and where they are."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from monarch_async.checkup import check_up
from monarch_async.errors import MonarchError, UsageError
from monarch_async.exchange import Runtime, enquire
from monarch_async.health import Health
from monarch_async.ids import ProcAddress
from monarch_async.mesh import ActorMesh
from monarch_async.tensor.ledger import GroupReport, LedgerEntry
from monarch_async.tensor.membership import SERVICE

__all__ = ["RankReport", "StuckReport", "why_stuck"]

PATIENCE = 1.0
"""Seconds for which a member may take to answer."""


class RankReport(NamedTuple):
    """One member: its groups by name, where each of its handlers is, and the state of its process.

    `groups` is empty of one that did not answer; then `health` tells why, with the stack of a process whose loop is blocked.
    """

    rank: int
    groups: dict[str, GroupReport]
    stacks: list[str]
    health: Health

    @property
    def stack(self) -> str:
        return "\n".join(self.stacks) or self.health.stack


class StuckReport(NamedTuple):
    """`ranks` are the reports of all members, and `lines` what follows from them, in words."""

    ranks: dict[int, RankReport]
    lines: list[str]

    def __str__(self) -> str:
        return "\n".join(self.lines) or "no operation waits for anybody"


async def why_stuck(mesh: Any) -> StuckReport:
    """Ask every member of a mesh of actors what it is in the middle of. From anywhere, at any time; it disturbs nobody.

    Raises `UsageError` for anything but a mesh of actors.
    """
    if not isinstance(mesh, ActorMesh):
        raise UsageError(f"why_stuck takes a mesh of actors, a slice or a reference, not {mesh!r}")
    runtime, key = mesh._runtime, mesh._key
    members = mesh.members()
    procs = [(address, address._replace(uid=address.host)) for address, _ in members]
    answers = await asyncio.gather(*(_ask(runtime, address, key) for address, _ in members))
    health = await check_up(runtime, procs)  # afterwards: who did not answer has been silent for a while now
    reports = {
        rank: RankReport(rank, answer[0] if answer is not None else {}, answer[1] if answer is not None else [], state)
        for (_, rank), answer, state in zip(members, answers, health, strict=True)
    }
    return StuckReport(reports, _conclude(reports))


async def _ask(runtime: Runtime, address: ProcAddress, key: int) -> Any:
    try:
        return await enquire(runtime, address, SERVICE, key, "", "report", timeout=PATIENCE)
    except (TimeoutError, MonarchError, AttributeError):
        return None


def _conclude(reports: dict[int, RankReport]) -> list[str]:
    lines = []
    for name in dict.fromkeys(name for report in reports.values() for name in report.groups):
        inside = {rank: report.groups[name] for rank, report in reports.items() if name in report.groups}
        of_all: dict[int, LedgerEntry] = {}  # by rank the first that it waits for
        of_pairs: dict[tuple[int, int], LedgerEntry] = {}  # the same, by who waits and for whom
        for rank, group in inside.items():
            for entry in group.entries:
                if entry.state in ("waiting", "running"):
                    if entry.partner is None:
                        of_all.setdefault(rank, entry)
                    else:
                        of_pairs.setdefault((rank, entry.partner), entry)
        ranks = next(iter(inside.values())).ranks
        last = max((entry.number for entry in of_all.values()), default=0)
        late = [rank for rank in ranks if of_all and (rank not in of_all or of_all[rank].number < last)]
        wanted = [other for rank, other in of_pairs if (other, rank) not in of_pairs]
        lines += [f"{name}: rank {rank} is at {entry}" for rank, entry in of_all.items() if rank not in late]
        lines += [f"{name}: rank {rank} is at {entry}" for (rank, _), entry in of_pairs.items()]
        lines += [f"{name}: {_about(rank, inside.get(rank), reports.get(rank))}" for rank in dict.fromkeys([*late, *wanted])]
    return lines


def _about(rank: int, group: GroupReport | None, report: RankReport | None) -> str:
    if report is None:
        return f"rank {rank} was not asked"
    if group is not None:
        last = f"its last finished is {group.last_done or 'none'}"
    else:
        last = "it has not asked for this group" if report.groups else "it does not answer"
    stack = f"\n{report.stack}" if report.stack else ""
    return f"rank {rank} did not reach it; {last}; its process is {report.health}{stack}"
