"""Why an operation is late: which members have not come to it, in what state their processes are, and what they have last done."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from monarch_async.checkup import check_up
from monarch_async.errors import CollectiveTimeout, MonarchError, PeerLost
from monarch_async.exchange import enquire
from monarch_async.health import Health, ProcState
from monarch_async.tensor.ledger import GroupReport
from monarch_async.tensor.membership import SERVICE, Circle
from monarch_async.tensor.operation import Operation

__all__ = ["why_late"]

PATIENCE = 0.5
"""Seconds for which whoever is asked may take to answer."""
NO_LIFE = -1
"""In place of an incarnation: it has not ended."""
NOT_THERE = {ProcState.FROZEN, ProcState.UNREACHABLE, ProcState.FAILED, ProcState.RESTARTING, ProcState.STOPPED}


async def why_late(
    circle: Circle, group: str, operation: Operation, missing: Sequence[int], *, formed: bool
) -> PeerLost | CollectiveTimeout:
    """The error for an operation whose time is over, when `missing` ranks are not known to have come to it. Takes `PATIENCE` at most."""
    suspects = list(missing) or [rank for rank in range(len(circle.me.addresses)) if rank != circle.me.rank]
    asked = asyncio.gather(*(_last_done(circle, group, operation, rank) for rank in missing))
    states, answers = await asyncio.gather(_health(circle, suspects), asked)
    what = f"operation {operation.number} of {group}, {operation.signature}" if operation.number else f"{operation.signature} of {group}"
    limit = f"within {operation.timeout:g} s"
    for rank, state in zip(suspects, states, strict=True):
        if state is not None and state.state in NOT_THERE:
            reason = f"its process is {state}"
            text = f"{circle.me.name}[{rank}] does not take part: {reason}; {what} did not end {limit}"
            return PeerLost(text, mesh=circle.me.name, rank=rank, incarnation=NO_LIFE, reason=reason)
    # In a large group who is not heard of may have come, and wait for another one.
    late = [(rank, last, state) for rank, (last, came), state in zip(missing, answers, states, strict=False) if not came]
    if not late:
        return CollectiveTimeout(f"{what} was called by all ranks and did not end {limit}")
    parts = []
    for rank, last, state in late:
        health = f"; {state}" if state is not None else ""
        parts.append(f"rank {rank} ({last}{health})")
    did = "did not reach it" if formed else "is not part of it yet" if len(parts) == 1 else "are not part of it yet"
    return CollectiveTimeout(f"{what} did not end {limit}: {', '.join(parts)} {did}", missing=tuple(rank for rank, _, _ in late))


async def _health(circle: Circle, ranks: Sequence[int]) -> list[Health | None]:
    procs = [(circle.address_of(rank), circle.me.agents[rank]) for rank in ranks]
    try:
        async with asyncio.timeout(PATIENCE):
            return list(await check_up(circle.runtime, procs))
    except TimeoutError:
        return [None] * len(ranks)


async def _last_done(circle: Circle, group: str, operation: Operation, rank: int) -> tuple[str, bool]:
    """What a member has last finished, by its own ledger, and whether it has come to an operation of all."""
    try:
        answer = await enquire(circle.runtime, circle.address_of(rank), SERVICE, circle.me.key, "", "report", timeout=PATIENCE)
    except (TimeoutError, MonarchError, AttributeError):
        return "does not say what it last finished", False
    report: GroupReport | None = answer[0].get(group) if answer is not None else None
    if report is None:
        return "has no such group", False
    mine = operation.entry
    key = mine.epoch, operation.number, mine.operation
    numbered = bool(operation.number) and operation.partner is None
    came = numbered and any((entry.epoch, entry.number, entry.operation) == key for entry in report.entries)
    return f"last finished: {report.last_done or 'nothing'}", came
