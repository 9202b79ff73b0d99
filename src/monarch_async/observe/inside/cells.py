"""What there is in a process: its actors, what they own, its links, what it remembers. Every function takes the runtime first."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from typing import Any

from monarch_async._runtime.behavior import CellState
from monarch_async._runtime.cell import Cell
from monarch_async._runtime.context import Message
from monarch_async._runtime.runtime import Runtime
from monarch_async.ids import ProcAddress

__all__ = ["cells", "ends", "events", "find_cells", "itself", "known_agents", "letters", "links", "owned", "reference", "running", "wards"]

Name = tuple[str, int]
"""A mesh and a rank in it; -1 is every rank."""


def find_cells(runtime: Runtime, names: Sequence[Name] | None) -> Iterable[Cell]:
    """The actors of these names, or all."""
    if names is None:
        return list(runtime.cells.values())
    wanted = set(names)
    return [
        cell for cell in runtime.cells.values() if (cell.identity.mesh, cell.identity.rank) in wanted or (cell.identity.mesh, -1) in wanted
    ]


def running(runtime: Runtime, cell: Cell) -> list[tuple[Message, float]]:
    """The messages that an actor handles, and for how long, as far as was seen: the one that has for longest first."""
    now = time.monotonic()
    watchdog = runtime.parts.get("watchdog")
    seen: dict[Message, float] = runtime.parts.setdefault("seen", {})
    found = []
    for message in (cell.current, *list(cell.overlapping)):
        if message is not None:
            began = watchdog.began(message) if watchdog is not None else seen.setdefault(message, now)
            found.append((message, now - began if began is not None else 0.0))
    return sorted(found, key=lambda entry: -entry[1])


def itself(runtime: Runtime) -> tuple[ProcAddress, int]:
    """The address and the pid of this process."""
    return runtime.me, os.getpid()


def known_agents(runtime: Runtime) -> list[ProcAddress]:
    """The agents of other hosts that this process has to do with."""
    return [peer.address for peer in runtime.peers.values() if peer.address.uid == peer.address.host and peer.evidence is None]


def cells(runtime: Runtime, names: Sequence[Name] | None = None) -> list[tuple[Any, ...]]:
    """For each actor: key, mesh, class, rank, incarnation, state, age of that, endpoint, mailbox, running handlers, owner's uid, key."""
    now = runtime.loop.time()
    rows = []
    for cell in find_cells(runtime, names):
        identity = cell.identity
        handled = running(runtime, cell) if cell.current is not None or cell.overlapping else []
        state, since = str(cell.state), now - cell.born
        if cell.state is CellState.READY and (handled or cell.mailbox):
            state, since = "busy", handled[0][1] if handled else 0.0
        owner, key = cell.owner if cell.owner is not None else (runtime.me, 0)
        rows.append(
            (
                cell.key,
                identity.mesh,
                identity.class_name,
                identity.rank,
                identity.incarnation,
                state,
                since,
                handled[0][0].endpoint if handled else "",
                len(cell.mailbox),
                len(handled),
                owner.uid,
                key,
            )
        )
    _forget_seen(runtime)
    return rows


def _forget_seen(runtime: Runtime) -> None:
    """Of handlers that have ended, when they were first seen is not kept."""
    seen: dict[Message, float] = runtime.parts.get("seen", {})
    if seen:
        alive = {message for cell in runtime.busy for message in (cell.current, *cell.overlapping)}
        for message in [message for message in seen if message not in alive]:
            del seen[message]


def owned(runtime: Runtime, silent: Sequence[str], others: Sequence[str]) -> list[tuple[Any, ...]]:
    """What this process owns in the `silent` processes, and in those that are none of the `others`: uid, address, key, mesh, class, rank, …

    … incarnation, key of the owner. Processes have key 0.
    """
    uids = {uid for uid in runtime.ownership.processes() if uid in silent or uid not in others}
    return [
        (uid, runtime.peers[uid].address if uid in runtime.peers else runtime.me, key, *member.identity, owner)
        for uid in uids
        for owner, key, member in runtime.ownership.members_in(uid)
    ]


def wards(runtime: Runtime) -> list[dict[str, Any]]:
    """The meshes that are owned here, each once: what it is, who owns it, its policy, its members."""
    found: dict[int, dict[str, Any]] = {}
    for uid, owner, key, member in runtime.ownership.members():
        ward: Any = member.ward
        entry = found.get(id(ward))
        if entry is None:
            entry = found[id(ward)] = {
                "kind": "actors" if key else "processes",
                "name": member.identity.mesh,
                "class_name": member.identity.class_name,
                "owner": owner,
                "above": _supervisors(runtime, getattr(ward, "parent", None)),
                "members": [],
                **_policy(runtime, getattr(ward, "_driver", None), getattr(ward, "_restart", None)),
            }
        entry["members"].append((member.identity.rank, uid, key, member.identity.incarnation))
    return list(found.values())


def _supervisors(runtime: Runtime, supervisor: Any) -> list[dict[str, Any]]:
    """The supervisors above a mesh, the outermost first."""
    above: list[dict[str, Any]] = []
    while supervisor is not None:
        above.insert(0, {"id": id(supervisor), "name": supervisor.name, **_policy(runtime, supervisor._driver, supervisor._restart)})
        supervisor = supervisor.parent
    return above


def _policy(runtime: Runtime, driver: Any, restart: Any) -> dict[str, Any]:
    if driver is None:
        return {"policy": "", "used": 0, "budget": 0, "within": 0.0, "supervises": True}
    engine = driver.engine
    restart = restart if restart is not None else engine.restart
    return {
        "policy": f"{restart.mode}, {restart.strategy}",
        "used": engine.used(runtime.loop.time()),
        "budget": restart.max_restarts,
        "within": restart.within,
        "supervises": driver.supervises,
    }


def links(runtime: Runtime) -> list[tuple[Any, ...]]:
    """For each link: address of the peer, whether it is connected, connections so far, frames sent and received, bytes queued, …"""
    now = runtime.loop.time()
    rows = []
    for link in runtime.links:
        peer = runtime.peer_of(link)
        sends = peer.usual is link
        lanes = list(peer.lanes.values()) if sends else []
        rows.append(
            (
                peer.address,
                link.connection is not None,
                link.connections,
                link.last_sent,
                link.last_received,
                link.backlog,
                sum(lane.messages for lane in lanes),
                sum(lane.bytes for lane in lanes),
                len(link.pending),
                now - link.last_heard if link.last_heard else None,
                link.sent_bytes,
                link.received_bytes,
            )
        )
    return rows


def letters(runtime: Runtime) -> list[tuple[Any, ...]]:
    """Messages that could not be delivered here."""
    return [tuple(letter) for letter in runtime.dead_letters.last]


def events(runtime: Runtime) -> list[tuple[Any, ...]]:
    """What this process remembers."""
    return [tuple(entry) for entry in runtime.history.entries]


def ends(runtime: Runtime, names: Sequence[Name]) -> list[tuple[str, int, int, str]]:
    """Why actors of these names have ended here: mesh, rank, incarnation, evidence. Also those whose next life has not begun."""
    wanted = set(names)
    living = [(cell.identity, cell.evidence) for cell in runtime.cells.values() if cell.evidence is not None]
    return [
        (who.mesh, who.rank, who.incarnation, why.text)
        for who, why in living + runtime.absent.ends()
        if (who.mesh, who.rank) in wanted or (who.mesh, -1) in wanted
    ]


def reference(runtime: Runtime, mesh: str) -> tuple[Any, ...] | None:
    """What a reference to a mesh is made of, if a member of it is here: key, class, endpoints, place, limit."""
    for cell in find_cells(runtime, [(mesh, -1)]):
        endpoints = tuple(name for name in cell.handlers if name.isidentifier())
        place = cell.place
        return cell.key, cell.identity.class_name, endpoints, place.addresses, place.extent
    return None
